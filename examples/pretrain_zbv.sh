#!/usr/bin/env bash
# ZBV: no bubble at the activation memory of 1F1B, two chunks per rank in a V (arXiv 2401.10241, section 6).
# Takes the switches of pretrain_zero_bubble.sh; further arguments go to pretrain_gpt.py.
set -euo pipefail
ZERO_BUBBLE_V_SCHEDULE=1 exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_zero_bubble.sh" "$@"
