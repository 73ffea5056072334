#!/usr/bin/env bash
# ZB-H1 (ZB-1p): a third of 1F1B's bubble at its activation memory (arXiv 2401.10241).
# Takes the switches of pretrain_zero_bubble.sh; further arguments go to pretrain_gpt.py.
set -euo pipefail
ENABLE_ZERO_BUBBLE=1 exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_zero_bubble.sh" "$@"
