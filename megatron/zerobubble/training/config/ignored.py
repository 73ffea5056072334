"""Flags of Megatron-LM that change neither the model nor a result here: accepted with their values, and ignored.

A run that was given some names them in one line of its log, on rank 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Literal

__all__ = ["IGNORED", "add_ignored"]

IGNORED: Mapping[str, Mapping[str, int | Literal["+"]]] = {
    "TensorBoard": {
        "--tensorboard-dir": 1,
        "--tensorboard-log-interval": 1,
        "--tensorboard-queue-size": 1,
        "--log-timers-to-tensorboard": 0,
        "--log-validation-ppl-to-tensorboard": 0,
        "--log-memory-to-tensorboard": 0,
        "--log-batch-size-to-tensorboard": 0,
        "--log-world-size-to-tensorboard": 0,
        "--no-log-loss-scale-to-tensorboard": 0,
        "--no-log-learnig-rate-to-tensorboard": 0,
    },
    "Weights & Biases": {
        "--wandb-project": 1,
        "--wandb-exp-name": 1,
        "--wandb-save-dir": 1,
        "--wandb-entity": 1,
    },
    "More values in the log": {
        "--log-throughput": 0,
        "--log-params-norm": 0,
        "--log-num-zeros-in-grad": 0,
        "--log-progress": 0,
        "--log-energy": 0,
        "--log-straggler": 0,
        "--log-device-memory-used": 0,
        "--log-memory-interval": 1,
        "--logging-level": 1,
        "--no-one-logger": 0,
        "--one-logger-project": 1,
        "--one-logger-run-name": 1,
        "--one-logger-async": 0,
    },
    "Timers": {
        "--timing-log-level": 1,
        "--timing-log-option": 1,
        "--barrier-with-L1-time": 0,
        "--no-barrier-with-level-1-timing": 0,
    },
    "Profilers": {
        "--profile": 0,
        "--profile-step-start": 1,
        "--profile-step-end": 1,
        "--profile-ranks": "+",
        "--use-pytorch-profiler": 0,
        "--pytorch-profiler-collect-shapes": 0,
        "--pytorch-profiler-collect-callstack": 0,
        "--pytorch-profiler-collect-chakra": 0,
        "--nvtx-ranges": 0,
        "--record-memory-history": 0,
        "--memory-snapshot-path": 1,
    },
    "Choice of model code": {
        "--use-mcore-models": 0,
    },
    "Choice of kernels": {
        "--use-flash-attn": 0,
        "--no-masked-softmax-fusion": 0,
        "--no-persist-layer-norm": 0,
        "--no-rope-fusion": 0,
        "--no-bias-swiglu-fusion": 0,
        "--cross-entropy-loss-fusion": 0,
        "--cross-entropy-fusion-impl": 1,
        "--disable-jit-fuser": 0,
    },
    "Communication": {
        "--no-async-tensor-model-parallel-allreduce": 0,
        "--use-ring-exchange-p2p": 0,
        "--overlap-p2p-communication": 0,
        "--no-overlap-p2p-communication": 0,
        "--overlap-p2p-communication-warmup-flush": 0,
    },
    "Reading of data": {
        "--data-cache-path": 1,
        "--no-mmap-bin-files": 0,
        "--dataloader-fast-cache-load": 0,
        "--dataloader-defer-npy-index-mmap": 0,
        "--create-attention-mask-in-dataloader": 0,
        "--no-create-attention-mask-in-dataloader": 0,
    },
    "Format of checkpoints": {
        "--ckpt-format": 1,
        "--auto-detect-ckpt-format": 0,
        "--use-dist-ckpt": 0,
        "--dist-ckpt-format": 1,
        "--dist-ckpt-strictness": 1,
        "--ckpt-fully-parallel-save": 0,
        "--no-ckpt-fully-parallel-save": 0,
        "--ckpt-fully-parallel-load": 0,
        "--ckpt-assume-constant-structure": 0,
        "--async-save": 0,
        "--use-persistent-ckpt-worker": 0,
    },
    "Freeing of memory": {
        "--empty-unused-memory-level": 1,
        "--manual-gc": 0,
        "--manual-gc-interval": 1,
        "--no-manual-gc-eval": 0,
    },
}
"""What flags are about -> flag -> number of its values; "+" is one or more."""


class _Ignore(argparse.Action):
    """Adds the flag to `namespace.ignored_flags`, once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        namespace.ignored_flags = tuple(dict.fromkeys([*namespace.ignored_flags, option_string]))


def add_ignored(parser: argparse.ArgumentParser) -> None:
    """Add the flags to `parser` as one group. Those that were given are then in `namespace.ignored_flags`."""
    group = parser.add_argument_group(
        "Ignored",
        "Flags of Megatron-LM that change neither the model nor a result here. They are accepted with their values, and one line "
        "of the log names those that were given.",
    )
    parser.set_defaults(ignored_flags=())
    for topic, flags in IGNORED.items():
        for flag, count in flags.items():
            group.add_argument(
                flag,
                action=_Ignore,
                dest="ignored_flags",
                nargs={0: 0, 1: None}.get(count, count),  # type: ignore[arg-type]
                metavar=None if count == 0 else "VALUE",
                default=(),
                help=f"{topic}.",
            )
