#!/usr/bin/env bash
# megatron-core's own 1F1B: the baseline.
# Takes the switches of pretrain_zero_bubble.sh; further arguments go to pretrain_gpt.py.
set -euo pipefail
ENABLE_ZERO_BUBBLE=0 exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_zero_bubble.sh" "$@"
