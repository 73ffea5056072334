#!/usr/bin/env bash
# Compare schedules on one training job, side by side. Without GPUs: a small GPT on the CPU.
#
#   bash examples/benchmark.sh --quick                                  two ranks of the CPU, or all GPUs: a first table soon
#   bash examples/benchmark.sh --contenders stock-1f1b,zbv,zbv+pv       which schedules; see zerobubble bench --help
#
# It takes the switches of pretrain_zero_bubble.sh from the environment (the model, its sizes, parallel sizes, machines). Further
# arguments are options of zerobubble bench. The report is written to RUN_DIR, by default runs/bench. On a Slurm
# cluster: BENCH=1 sbatch examples/pretrain_zero_bubble.slurm. Not run on a GPU.
set -euo pipefail
BENCH=1 exec bash "$(dirname "${BASH_SOURCE[0]}")/pretrain_zero_bubble.sh" "$@"
