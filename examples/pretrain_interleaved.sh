#!/usr/bin/env bash
# megatron-core's own interleaved 1F1B, one layer per chunk: the other baseline.
# Takes the switches of pretrain_zero_bubble.sh; further arguments go to pretrain_gpt.py.
set -euo pipefail
INTERLEAVED_1F1B=1 exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_zero_bubble.sh" "$@"
