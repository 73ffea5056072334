"""What Transformer Engine's layers need beside the contract of deferred weight gradients (`wgrad.deferring`).

With `use_cpu_initialization` megatron-core's wrappers replace a layer's bias by a parameter of their own, without the attribute
`skip_backward_post_hook` by which DDP finds a deferred gradient. The layer still defers it: it would never reach ``main_grad``.

With `tp_comm_overlap` a module gathers an operand of its wgrad GEMM into a Userbuffers buffer that all layers of that name share:
its input beside the dgrad GEMM (bulk dgrad), or the gradient of its output for the dgrad GEMM (all-gather of row-parallel ones).
It is queued for W as a view of the buffer, which the next layer's B overwrites. So these two are off, and Transformer Engine
gathers by NCCL into memory of its own. Bulk wgrad overlaps B's reduce-scatter with the GEMM that W runs later, so it is off, too.
The overlaps of forward, and the reduce-scatter with the dgrad GEMM, are not affected: a fused backward could not share what
forward saves, either. See ADR 42.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from packaging.version import Version

if TYPE_CHECKING:  # flags are checked before torch is loaded
    from torch import Tensor, nn

__all__ = [
    "FUSED_LINEARS",
    "FUSED_OPERATIONS",
    "OLDEST_TRANSFORMER_ENGINE",
    "defer_to_w",
    "forget_scales_for_recomputation",
    "fused_operations",
    "give_zeros_in_backward",
    "is_fused",
    "mark_deferred_biases",
    "own_operands",
    "own_operands_in_graphs",
    "scaling_tensors",
    "stop_deferring",
    "unknown_overlaps",
]

logger = logging.getLogger(__name__)

OLDEST_TRANSFORMER_ENGINE = Version("2.8.0")
"""The first release whose deferred weight gradients may overlap with their reduction over the data-parallel replicas. Before 2.7
its modules do not call DDP's hooks, so that a gradient would not reach ``main_grad``."""


_SHARES_OPERANDS = ("ub_bulk_dgrad", "ub_overlap_ag_dgrad", "ub_overlap_ag")
"""Attributes of modules, read in each forward, with which the queue gets a view of a Userbuffers buffer. The last is that of
LayerNormMLP, which has one for forward and dgrad."""
_GOES_WITH_W = ("ub_name", "ub_overlap_ag_fprop", "ub_overlap_rs_fprop", "ub_overlap_rs_dgrad", "ub_overlap_rs")


FUSED_OPERATIONS = {
    "_fused_ops": "_make_fused_ops",
    "_fused_grouped_swiglu_ops": "_make_fused_grouped_swiglu_ops",
    "_fused_impl": "_make_fused_impl",
}
"""Attribute of a module that has its fused operations in a tuple, once they are made -> the method that makes them."""
FUSED_LINEARS = ("linear_fc1", "linear_fc2")
"""Attributes of an MLP whose linears fused operations run, with their parameters."""


def defer_to_w(config: Any) -> None:
    """Set the options with which Transformer Engine's modules can leave weight gradients to W. Call it before they are built.

    Args:
        config: TransformerConfig of the model, after its own checks.
    """
    config.delay_wgrad_compute = True
    if getattr(config, "tp_comm_overlap", False):
        config.tp_comm_bulk_wgrad = False  # `own_operands` logs it


def unknown_overlaps(module: nn.Module) -> list[str]:
    """Attributes for Userbuffers that are on and neither known to go with W nor turned off by `own_operands`."""
    known = (*_SHARES_OPERANDS, *_GOES_WITH_W)
    return [name for name, value in vars(module).items() if name.startswith("ub_") and value and name not in known]


def own_operands(modules: Sequence[nn.Module]) -> None:
    """Turn off what makes operands of W views of Userbuffers buffers, and log it on rank 0, once per chunk.

    Args:
        modules: the modules of a chunk that defer their weight gradients.
    """
    overlapping = [
        module for module in modules if any(getattr(module, name, False) for name in (*_SHARES_OPERANDS, *_GOES_WITH_W[1:]))
    ]
    for module in overlapping:
        for name in _SHARES_OPERANDS:
            if hasattr(module, name):
                setattr(module, name, False)
    import torch.distributed as dist

    if overlapping and not (dist.is_initialized() and dist.get_rank()):
        logger.warning(
            "tp_comm_overlap: tp_comm_bulk_wgrad, tp_comm_bulk_dgrad, and tp_comm_overlap_ag in backward are off in %d modules. "
            "W computes their weight gradients after Userbuffers buffers have been overwritten. NCCL communicates there; "
            "the overlaps in forward and tp_comm_overlap_rs_dgrad stay on",
            len(overlapping),
        )


def is_fused(module: nn.Module) -> bool:
    """Whether fused operations run the linears of a module, and its `backward_dw` computes their weight gradients."""
    return bool(getattr(module, "_with_fused_impl", False)) or hasattr(module, "_make_fused_grouped_swiglu_ops")


def mark_deferred_biases(module: nn.Module, *, defer: bool) -> None:
    """Let DDP know that the gradients of this module's biases are deferred, as those of its weights are, or that they are not.

    Args:
        module: defers its weight gradients. Without the attribute `bias_names` of Transformer Engine's, it is not changed. Fused
            operations return the gradients of biases in B.
        defer: whether W has those of its biases, too.
    """
    if is_fused(module):
        parameters = [each for name in FUSED_LINEARS for each in getattr(module, name)._parameters.values()]
        for each in parameters:
            if each is not None and each.dim() == 1:
                each.skip_backward_post_hook = False
    for name in getattr(module, "bias_names", ()):
        bias = module._parameters.get(name)
        if bias is not None:
            bias.skip_backward_post_hook = defer  # type: ignore[attr-defined]


def give_zeros_in_backward(module: Any) -> None:
    """Make what a module that defers its weight gradients gives autograd for them in B zero.

    GroupedLinear without fused accumulation gives the uninitialized memory that its W will fill. As zeros it can be told from
    what other readers of the weights add. Other modules give nothing.
    """
    if hasattr(module, "num_gemms") and not getattr(module, "fuse_wgrad_accumulation", False):
        module.wgrad_store.put = partial(_put_zeros, module.wgrad_store.put)


def _put_zeros(put: Callable[..., None], tensors: Any, function: Any) -> None:
    outputs = tensors[-1] if isinstance(tensors[-1], list) else getattr(tensors[-1], "rowwise_data", None)
    for output in outputs if isinstance(outputs, list) else [outputs]:
        if output is not None:
            output.zero_()
    put(tensors, function)


def own_operands_in_graphs(module: Any, own: Callable[[Any], Any]) -> None:
    """Let a module's queue hold copies of those operands of W that lie in the memory of CUDA graphs.

    Args:
        module: defers its weight gradients.
        own: what is queued in the place of a list of operands.
    """
    if hasattr(module, "wgrad_store"):  # another one's queue is not known
        put = module.wgrad_store.put
        module.wgrad_store.put = lambda tensors, function: put(own(list(tensors)), function)


def stop_deferring(module: nn.Module) -> None:
    """Let a module compute its weight gradients in backward, as if it had been built without `delay_wgrad_compute`.

    Call it before DDP wraps the module, which then hooks the weights' gradients in backward, too.
    """
    if is_fused(module):
        for name in FUSED_LINEARS:
            stop_deferring(getattr(module, name))
        return
    if hasattr(module, "delay_wgrad_compute"):  # by which experts build fused operations
        module.delay_wgrad_compute = False  # type: ignore[assignment]
    module.wgrad_store.disable_delay_wgrad_compute()  # type: ignore[operator, union-attr]
    for weight in module._parameters.values():
        if weight is not None and hasattr(weight, "skip_backward_post_hook"):
            weight.skip_backward_post_hook = False


def scaling_tensors(chunks: Sequence[nn.Module]) -> Iterator[Tensor]:
    """The scales and histories of magnitudes (amax) of FP8 with delayed scaling, which each forward and backward updates.

    They are no buffers of their modules. Without FP8, and before the first forward, there are none.
    """
    import torch

    for chunk in chunks:
        for module in (each for part in chunk.modules() for each in (part, *fused_operations(part))):
            recipes = getattr(module, "fp8_meta", None) or {}
            for of_pass in (getattr(module, "_fp8_metas", None) or {}).values():  # of a fused operation
                recipes = {**recipes, **(of_pass or {})}
            states = [recipes.get(key) for key in ("scaling_fwd", "scaling_bwd")]
            found = [getattr(state, name, None) for state in states for name in ("scale", "amax_history")]
            yield from (tensor for tensor in found if isinstance(tensor, torch.Tensor))


def fused_operations(module: nn.Module) -> Iterator[Any]:
    """The operations that Transformer Engine's op fuser runs for a module, in the order of forward; none before they are made."""
    for name in FUSED_OPERATIONS:
        (made,) = getattr(module, name, None) or (None,)
        if made is not None:
            yield from made.children()


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
