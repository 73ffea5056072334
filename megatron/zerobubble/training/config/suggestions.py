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
    "--no-async-tensor-model-parallel-allreduce": "B's all-reduce overlaps with a deferred wgrad GEMM; leave it out",
    "--use-rotary-position-embeddings": "give --position-embedding-type rope",
    "--no-position-embedding": "give --position-embedding-type none",
    "--batch-size": "give --micro-batch-size and --global-batch-size",
    "--world-size": "torchrun sets the number of ranks; with --dry-run give --dry-run-world-size",
    "--log-params-norm": "the gradient norm is logged; leave it out",
    "--log-validation-ppl-to-tensorboard": "the validation loss is a curve of --tensorboard-dir; leave it out",
    "--log-world-size-to-tensorboard": "the number of ranks is in the first line of the log; leave it out",
    "--log-progress": "progress lines have the time left, and --metrics-jsonl every iteration; leave it out",
    "--tensorboard-log-interval": "curves have every iteration; leave it out",
    "--tensorboard-queue-size": "leave it out",
    "--eval-only": "give --skip-train",
}
"""Flags of Megatron-LM, of its present and earlier releases, that scripts have and this package does not take."""

_OF_MEGATRON_LM = frozenset(
    (
        "--apply-query-key-layer-scaling",
        "--attention-softmax-in-fp32",
        "--decoupled-lr",
        "--decoupled-min-lr",
        "--end-weight-decay",
        "--exit-on-missing-checkpoint",
        "--fp16-lm-cross-entropy",
        "--fp8-interval",
        "--log-memory-to-tensorboard",
        "--log-timers-to-tensorboard",
        "--lr-warmup-init",
        "--lr-wsd-decay-iters",
        "--lr-wsd-decay-samples",
        "--lr-wsd-decay-style",
        "--moe-input-jitter-eps",
        "--moe-token-drop-policy",
        "--no-save-optim",
        "--no-save-rng",
        "--num-distributed-optimizer-instances",
        "--profile",
        "--profile-ranks",
        "--profile-step-end",
        "--profile-step-start",
        "--save-retain-interval",
        "--sft",
        "--sgd-momentum",
        "--start-weight-decay",
        "--timing-log-option",
        "--tokenizer-hf-no-use-fast",
        "--use-checkpoint-opt_param-scheduler",
        "--use-pytorch-profiler",
        "--weight-decay-incr-style",
        "--yaml-cfg",
    )
)
"""Flags of Megatron-LM's loop that the reference trainer does without."""


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
    if flag in _OF_MEGATRON_LM:
        owner = "Megatron-LM's own pretrain_gpt.py has it, which zerobubble run drives"
        return f"{flag} is not a flag of this package: {owner}; leave it out here"
    others = f" (and {len(given) - 1} more)" if len(given) > 1 else ""
    return f"unrecognized arguments: {shown(' '.join(words))}{others if len(words) > 8 else ''}{did_you_mean(flag, known)}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean --x?' for the closest of `known`; empty if none is close."""
    if len(name) > MOST_SHOWN:  # no flag is that long, and the comparison would take long
        return ""
    closest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f"; did you mean {closest[0]}?" if closest else ""
