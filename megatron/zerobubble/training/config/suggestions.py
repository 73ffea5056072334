"""Flags that are not ours: what to use instead of Megatron-LM's, and the closest flag to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from megatron.zerobubble.messages import MOST_SHOWN, shown

__all__ = ["did_you_mean", "unknown_flags_message"]

_ALWAYS = "it is always on; leave it out"

_INSTEAD = {
    "--use-flash-attn": "choose the kernels of attention with --attention-backend flash (or auto, its default)",
    "--use-checkpoint-args": (
        "a checkpoint does not set flags here: give those of the model; loading names the first one that differs"
    ),
    "--use-mcore-models": _ALWAYS,
    "--use-legacy-models": "models are megatron-core's; leave it out",
    "--use-dist-ckpt": f"distributed checkpoints: {_ALWAYS}",
    "--dist-ckpt-format": "checkpoints are torch_dist (--ckpt-format); leave it out",
    "--use-torch-fsdp2": "use --use-distributed-optimizer, and to shard gradients --zero-bubble-shard-gradients",
    "--use-custom-fsdp": "use --use-distributed-optimizer, and to shard gradients --zero-bubble-shard-gradients",
    "--encoder-seq-length": "a GPT has --seq-length",
    "--decoder-seq-length": "a GPT has --seq-length",
    "--model-parallel-size": "give --tensor-model-parallel-size",
    "--checkpoint-activations": "give --recompute-granularity full, --recompute-method and --recompute-num-layers",
    "--recompute-activations": "give --recompute-granularity selective",
    "--DDP-impl": "gradients are reduced by megatron-core's DDP; leave it out",
    "--no-async-tensor-model-parallel-allreduce": "give --no-zero-bubble-overlap-tensor-parallel",
    "--use-rotary-position-embeddings": "give --position-embedding-type rope",
    "--no-position-embedding": "give --position-embedding-type none",
    "--batch-size": "give --micro-batch-size and --global-batch-size",
    "--world-size": "torchrun sets the number of ranks; with --dry-run give --dry-run-world-size",
    "--log-params-norm": "the gradient norm is logged; leave it out",
    "--log-progress": "progress lines have the time left, and --metrics-jsonl every iteration; leave it out",
    "--eval-only": "give --skip-train",
}
"""Flags of Megatron-LM, of its present and earlier releases, that scripts have and this package does not take."""

_OF_MEGATRON_LM = "; what Megatron-LM's own pretrain_gpt.py has and this loop has not, runs by zerobubble run"


def unknown_flags_message(words: Sequence[str], known: Iterable[str]) -> str:
    """The error about words of the command line that no flag takes.

    Args:
        words: flags and values that are left over; at least one.
        known: all flags.
    """
    given = [word for word in words if word.startswith("--")] or list(words[:1])
    flag = given[0].partition("=")[0]
    if flag in _INSTEAD:
        return f"{flag} is not a flag of this package: {_INSTEAD[flag]}"
    others = f" (and {len(given) - 1} more)" if len(given) > 1 else ""
    hint = did_you_mean(flag, known) or (_OF_MEGATRON_LM if flag.startswith("--") else "")
    return f"unrecognized arguments: {shown(' '.join(words))}{others if len(words) > 8 else ''}{hint}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean --x?' for the closest of `known`; empty if none is close."""
    if len(name) > MOST_SHOWN:  # no flag is that long, and the comparison would take long
        return ""
    closest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f"; did you mean {closest[0]}?" if closest else ""
