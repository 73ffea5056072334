"""Weights that are frozen, or trained again, after DDP has wrapped their chunk (`requires_grad_`).

A frozen weight leaves nothing for W (`wgrad_split`), and its ``main_grad`` stays zero, as with megatron-core's own schedules.
Refused are cases that megatron-core's DDP and Transformer Engine cannot follow, where they would raise an AssertionError in the
middle of an iteration, or queue operands that nobody takes:

- With `overlap_grad_reduce` a bucket is reduced when all of its weights have reported a gradient; a frozen one never does. With
  `overlap_param_gather` DDP's forward hook asserts that weights are trained.
- A module that defers its weight gradients itself calls the hooks of all its weights and biases, or of none.
- One that was frozen when DDP wrapped it has neither ``main_grad`` nor hooks.
- A user's hook on a weight that such a module defers would not be called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.model.fused_ops import parameters_of
from megatron.zerobubble.mcore.model.wgrad_split import deferring_modules, is_deferred, is_driven
from megatron.zerobubble.wgrad.split_weight import has_hooks

__all__ = ["check_frozen"]


def check_frozen(chunks: Sequence[Any]) -> None:
    """Check before a training iteration that what was frozen since DDP wrapped the chunks can be left out of it.

    Args:
        chunks: this rank's chunks, wrapped by DDP.

    Raises:
        ConfigError: names the first weight, and what to do.
    """
    for chunk in chunks:
        for problem in (*_overlapped(chunk), *_in_part(chunk), *_trained_since(chunk), *_hooked(chunk)):
            raise ConfigError(problem)


def _overlapped(chunk: Any) -> Iterator[str]:
    options = chunk.ddp_config
    overlaps = [name for name in ("overlap_grad_reduce", "overlap_param_gather") if getattr(options, name)]
    if not overlaps:
        return
    for name, weight in chunk.module.named_parameters():
        if not weight.requires_grad and weight in chunk.param_to_bucket_group:
            yield (
                f"{name} was frozen (requires_grad_(False)) after DistributedDataParallel wrapped the model with {overlaps[0]}, "
                "whose buckets wait for the gradient of every weight: freeze it before it is wrapped, wrap the model again, or "
                f"turn {' and '.join(overlaps)} off"
            )


def _in_part(chunk: Any) -> Iterator[str]:
    for name, module in chunk.module.named_modules():
        if not is_driven(module):
            continue
        having = ((key, weight) for key, weight in parameters_of(module).items() if weight is not None)
        weights = {key: weight for key, weight in having if weight in chunk.param_to_bucket_group}
        frozen = [key for key, weight in weights.items() if is_deferred(weight) and not weight.requires_grad]
        trained = [key for key, weight in weights.items() if is_deferred(weight) and weight.requires_grad]
        if frozen and trained:
            yield (
                f"{name}.{frozen[0]} was frozen after DistributedDataParallel wrapped the model, and {name}.{trained[0]} was "
                f"not: {type(module).__name__} computes the deferred gradients of both or of none. Freeze both, or freeze before "
                "the model is wrapped"
            )


def _trained_since(chunk: Any) -> Iterator[str]:
    for name, module in deferring_modules(chunk.module):
        if not is_driven(module):
            yield (
                f"{name} ({type(module).__name__}) was frozen when DistributedDataParallel wrapped the model and is trained now: "
                "its gradients would reach neither DistributedDataParallel nor the optimizer. Wrap the model again"
            )


def _hooked(chunk: Any) -> Iterator[str]:
    for name, module in deferring_modules(chunk.module):
        for key, weight in parameters_of(module).items():
            if weight is not None and is_deferred(weight) and weight.requires_grad and has_hooks(weight):
                yield (
                    f"{name}.{key} has a hook on its gradient (register_hook), which {type(module).__name__} computes in W, "
                    "where autograd calls no hooks: set wgrad_in_backward = True on the module before the model is wrapped"
                )
