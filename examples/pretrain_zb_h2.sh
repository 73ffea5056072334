#!/usr/bin/env bash
# ZB-H2 (ZB-2p): no bubble at twice the activation memory of 1F1B (arXiv 2401.10241).
# Takes the switches of pretrain_zero_bubble.sh; further arguments go to pretrain_gpt.py.
set -euo pipefail
ZERO_BUBBLE_MAX_PENDING_BACKWARD=2p exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_zero_bubble.sh" "$@"
