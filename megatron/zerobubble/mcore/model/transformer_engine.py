"""What Transformer Engine's layers need beside the contract of deferred weight gradients (`wgrad.deferring`).

With `use_cpu_initialization` megatron-core's wrappers replace a layer's bias by a parameter of their own, without the attribute
`skip_backward_post_hook` by which DDP finds a deferred gradient. The layer still defers it: it would never reach ``main_grad``.

Their GEMM adds to ``main_grad`` itself (`fuse_wgrad_accumulation`), and needs no apex for that. megatron-core has one option for
both, `gradient_accumulation_fusion`, and its `ColumnParallelLinear` refuses it where apex is missing. Every model has one of
these, the output layer, so without apex Transformer Engine's layers would write each weight gradient to memory twice, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from packaging.version import Version

if TYPE_CHECKING:  # flags are checked before torch is loaded
    from torch import Tensor, nn

__all__ = [
    "OLDEST_TRANSFORMER_ENGINE",
    "forget_scales_for_recomputation",
    "fusion_without_apex",
    "mark_deferred_biases",
    "scaling_tensors",
]

OLDEST_TRANSFORMER_ENGINE = Version("2.8.0")
"""The first release whose deferred weight gradients may overlap with their reduction over the data-parallel replicas. Before 2.7
its modules do not call DDP's hooks, so that a gradient would not reach ``main_grad``."""

_APEX_FOUND = "_grad_accum_fusion_available"
"""megatron-core's record of whether apex's kernel can be imported."""


def mark_deferred_biases(module: nn.Module) -> None:
    """Let DDP know that the gradients of this module's biases are deferred, as those of its weights are.

    Args:
        module: defers its weight gradients. Without the attribute `bias_names` of Transformer Engine's, it is not changed.
    """
    for name in getattr(module, "bias_names", ()):
        bias = module._parameters.get(name)
        if bias is not None:
            bias.skip_backward_post_hook = True  # type: ignore[attr-defined]


def scaling_tensors(chunks: Sequence[nn.Module]) -> Iterator[Tensor]:
    """The scales and histories of magnitudes (amax) of FP8 with delayed scaling, which each forward and backward updates.

    They are no buffers of their modules. Without FP8, and before the first forward, there are none.
    """
    import torch

    for chunk in chunks:
        for module in chunk.modules():
            recipes = getattr(module, "fp8_meta", None) or {}
            states = [recipes.get(key) for key in ("scaling_fwd", "scaling_bwd")]
            found = [getattr(state, name, None) for state in states for name in ("scale", "amax_history")]
            yield from (tensor for tensor in found if isinstance(tensor, torch.Tensor))


def forget_scales_for_recomputation() -> None:
    """Drop the scales that FP8 with delayed scaling keeps from each forward for the forward that recomputes it in B.

    They wait in queues without labels. Those of forwards that will be rerun would be taken for those of the new ones.
    """
    for name in ("quantization", "fp8"):  # the latter up to 2.8
        module = sys.modules.get(f"transformer_engine.pytorch.{name}")
        manager = getattr(module, "FP8GlobalStateManager", None)
        if manager is not None:
            state = getattr(manager, "quantization_state", manager)
            for queue in getattr(state, "fp8_tensors_recompute_buffer", ()):
                queue.clear()
            return


@contextmanager
def fusion_without_apex(config: Any) -> Iterator[list[Any]]:
    """While it is open, a model of Transformer Engine's layers can be built with `gradient_accumulation_fusion` without apex.

    On leaving, megatron-core's own linears of the chunks in the list get the option off: their own backward would call apex. It
    makes no difference to split ones, whose kernel `wgrad.gemm` chooses.

    Args:
        config: TransformerConfig of the model.

    Yields:
        A list, to be filled with the chunks that are built.
    """
    from megatron.core.tensor_parallel import layers

    chunks: list[Any] = []
    wanted = config.gradient_accumulation_fusion and config.transformer_impl == "transformer_engine"
    if not wanted or getattr(layers, _APEX_FOUND, True):
        yield chunks
        return
    setattr(layers, _APEX_FOUND, True)
    try:
        yield chunks
    finally:
        setattr(layers, _APEX_FOUND, False)
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear):
                module.gradient_accumulation_fusion = False
