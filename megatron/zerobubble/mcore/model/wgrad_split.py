"""Installing the B/W split in a model chunk built from megatron-core's own layers.

`ColumnParallelLinear` and `RowParallelLinear` (attention, MLP, local experts, the output layer) route their GEMM through the
method `_forward_impl`; each instance gets another one. Transformer Engine's own contract tells DDP that the weight's gradient
comes later: the parameter has the attribute `skip_backward_post_hook`, and DDP hands its grad-ready hook to the module's
`register_wgrad_accumulation_and_reduce_hooks` (with `DistributedDataParallelConfig.delay_wgrad_compute`).

A module that defers weight gradients itself (Transformer Engine's with `delay_wgrad_compute`, and megatron-core's wrappers of
them) is not changed but driven: when its backward runs, the store records it, and W calls its `backward_dw` (`wgrad.deferring`).
Such modules are recognized by the contract, not by their class, so Transformer Engine need not be installed. An MLP whose linears
Transformer Engine's op fuser runs is driven as one module (`fused_ops`).

A weight that is frozen when a forward uses it leaves nothing for the W of that microbatch; one that is trained again does. What
DDP and Transformer Engine cannot follow is refused before an iteration (`mcore.ddp.frozen_weights`).

What stays in B, by declaration, because it is cheap, or because nobody can defer it, is in `kept_in_b`. Nobody can defer the
gradient of a linear whose GEMM is not megatron-core's own: a subclass's, one set on the module or put in place of the function
that all linears call (quantization-aware training), or one with a weight that is computed from other parameters.

Experts of the local spec are split like any other linear; an expert without tokens in a microbatch has a wgrad GEMM of zero rows.

A weight may get gradients from both, B and W: the embedding of MTP layers (multi-token prediction) that is tied to the output
layer, or a weight that the loss or another layer reads. B adds what autograd computes, W the linear's own GEMM, and DDP is
notified when both have been added (`wgrad.split_weight`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from torch import Tensor, nn

from megatron.zerobubble.errors import SplitError
from megatron.zerobubble.mcore.model.fused_ops import FusedLinears, FusedOperations, fused_linears, parameters_of
from megatron.zerobubble.mcore.model.kept_in_b import KEEP_IN_B, declared_in_b, find_kept, is_declared
from megatron.zerobubble.mcore.model.layer_graphs import check_not_captured, graphed_layers, is_capturing, modules_in_graph
from megatron.zerobubble.mcore.model.transformer_engine import (
    OLDEST_TRANSFORMER_ENGINE,
    give_zeros_in_backward,
    is_fused,
    mark_deferred_biases,
    own_operands,
    own_operands_in_graphs,
    stop_deferring,
    unknown_overlaps,
)
from megatron.zerobubble.wgrad.deferring import DeferringModule
from megatron.zerobubble.wgrad.linear import LinearSplit, split_linear
from megatron.zerobubble.wgrad.split_weight import SplitWeight
from megatron.zerobubble.wgrad.store import WeightGradStore

_SPLIT = (ColumnParallelLinear, RowParallelLinear)

_FORWARD_HOOK = "_zero_bubble_forward_hook"
"""Attribute of a module that defers its weight gradients itself: the handle of our forward hook."""

_DRIVEN = "_zero_bubble_deferring"
"""Attribute of such a module: its `DeferringModule`."""

_REGISTER = "register_wgrad_accumulation_and_reduce_hooks"
"""Method of a module that defers its weight gradients: takes what to call after each of them."""


def split_weight_gradients(chunk: nn.Module, store: WeightGradStore) -> list[str]:
    """Defer the weight gradients of every linear of `chunk` into `store`. Call it before DDP wraps the chunk.

    Args:
        chunk: one model chunk, possibly inside Float16Module.
        store: the rank's store.

    Returns:
        Names of the weights whose gradients are computed in W.

    Raises:
        SplitError: names what cannot be split: a weight used by two modules of the chunk, and modules of unknown kinds, which
            compute a large part of the chunk's weight gradients themselves. The chunk is unchanged then.
    """
    kept = find_kept(chunk, _leaves_b, _remedy)
    problems = [*_shared_weights(chunk), *_without_hooks(chunk), *kept.problems, *_unknown_overlaps(chunk)]
    if problems:
        raise SplitError("the backward pass of this model cannot be split into B and W:\n  " + "\n  ".join(problems))
    kept.log()
    for module in _kept_deferring_modules(chunk):
        stop_deferring(module)
    names = []
    for name, linear, owner in _splittable(chunk):
        split = SplitWeight(name, owner.weight)
        owner.weight.skip_backward_post_hook = True
        owner.register_wgrad_accumulation_and_reduce_hooks = split.hooks.append
        linear._forward_impl = _SplitForward(LinearSplit(split, store))
        names.append(split.name)
    for module in chunk.modules():
        _hook_biases_of_frozen_weights_in_backward(module)
    layers = graphed_layers(chunk)
    captured = {id(module): module for layer in layers for module in modules_in_graph(layer)}
    deferring = {id(module) for _, module in deferring_modules(chunk)}
    for module in captured.values():
        if id(module) not in deferring and getattr(module, "wgrad_store", None) is not None:  # frozen: its queue stays empty
            stop_deferring(module)
    own = (lambda operand: store.graph_memory.own(operand)) if layers else None
    for name, module in deferring_modules(chunk):
        mark_deferred_biases(module, defer=id(module) not in captured)  # a replay returns them in B
        deferred = {f"{name}.{key}": weight for key, weight in _own_parameters(module) if is_deferred(weight)}
        driven = (FusedLinears if is_fused(module) else DeferringModule)(name, module, tuple(deferred.values()))
        setattr(module, _DRIVEN, driven)
        hook = partial(_defer_in_backward, store, driven, id(module) in captured)
        if is_fused(module):
            setattr(module, _FORWARD_HOOK, FusedOperations(module, hook, own))
        else:
            give_zeros_in_backward(module)
            if own is not None:
                own_operands_in_graphs(module, own)
            setattr(module, _FORWARD_HOOK, module.register_forward_hook(hook))
        names += deferred
    own_operands([module for _, module in deferring_modules(chunk)])
    return names


def split_weights(chunk: nn.Module) -> list[SplitWeight]:
    """The weights of `chunk` whose gradients are deferred, in the order of the model; also those frozen since.

    Raises:
        SplitError: names a linear whose GEMM was replaced since it was split, which the split goes past.
    """
    found = []
    for linear in _split_linears(chunk):
        split, foreign = linear._forward_impl.how.split, _foreign(linear)
        if foreign is not None:
            raise SplitError(
                f"the GEMM of {split.name} was replaced ({foreign}) after DistributedDataParallel had wrapped the chunk, and the "
                "split of B and W goes past that: replace it before"
            )
        found.append(split)
    return found


def driven_modules(chunk: nn.Module) -> list[DeferringModule]:
    """The modules of `chunk` that defer weight gradients themselves, as W drives them."""
    return [getattr(module, _DRIVEN) for module in chunk.modules() if is_driven(module)]


def remove_split(chunk: nn.Module) -> None:
    """Undo `split_weight_gradients`. The chunk needs a new DDP then: the old one expects deferred gradients.

    Modules that defer weight gradients themselves continue to do so; the caller must call their `backward_dw`.
    """
    tied_owners = _tied_owners(chunk)
    for linear in _split_linears(chunk):
        owner = linear if linear.weight is not None else tied_owners[id(linear)][1]
        linear._forward_impl.how.split.remove()
        del linear._forward_impl
        del owner.register_wgrad_accumulation_and_reduce_hooks
        del owner.weight.skip_backward_post_hook
    for module in chunk.modules():
        if is_driven(module):
            getattr(module, _FORWARD_HOOK).remove()
            getattr(module, _DRIVEN).remove()
            vars(getattr(module, "wgrad_store", module)).pop("put", None)
            delattr(module, _FORWARD_HOOK)
            delattr(module, _DRIVEN)


class _SplitForward:
    """Replaces `_forward_impl` of one linear; takes the same keywords."""

    __slots__ = ("how",)

    def __init__(self, how: LinearSplit) -> None:
        self.how = how

    def __call__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: torch.distributed.ProcessGroup | None = None,
        gradient_accumulation_fusion: bool = False,  # W's kernel is chosen by `wgrad.gemm`; B adds what autograd computes
        output_dtype: torch.dtype | None = None,
        **others: Any,
    ) -> Tensor:
        check_not_captured(self.how.split.name)
        for name, value in others.items():
            if not _is_inert(name, value):
                raise SplitError(
                    f"{self.how.split.name} was called with {name}={value!r}, which the split of B and W would ignore: turn it "
                    "off, or use the stock schedule"
                )
        if weight is not self.how.split.weight or not weight.requires_grad:
            # There is no W: the gradient of another module's weight, or of a tensor that is computed from weights, belongs to
            # autograd, and a weight that was frozen since it was split has none.
            function = linear_with_grad_accumulation_and_async_allreduce if weight.requires_grad else linear_with_frozen_weight
            options = others if output_dtype is None else others | {"output_dtype": output_dtype}
            return function(
                input,
                weight,
                bias,
                gradient_accumulation_fusion=False,
                allreduce_dgrad=allreduce_dgrad,
                sequence_parallel=sequence_parallel,
                tp_group=tp_group,
                **options,
            )
        return split_linear(
            input,
            weight,
            bias,
            self.how,
            reduce_input_grad=allreduce_dgrad,
            sequence_parallel=sequence_parallel,
            group=tp_group,
            output_dtype=output_dtype,
        )


_STOCK_PARAMETERS = inspect.signature(linear_with_grad_accumulation_and_async_allreduce).parameters


def _is_inert(name: str, value: object) -> bool:
    """Whether a keyword of a linear's forward that the split does not know has a value with which it does nothing."""
    default = _STOCK_PARAMETERS[name].default if name in _STOCK_PARAMETERS else None
    return value is None or value is False or (type(value) is type(default) and value == default)


class _Splittable(NamedTuple):
    name: str
    """Name of its weight."""
    linear: Any
    owner: Any
    """The module that owns the weight: the linear itself, or an embedding tied to it."""


def _split_linears(chunk: nn.Module) -> list[Any]:
    """The linears of `chunk` that are split."""
    return [module for module in chunk.modules() if isinstance(module.__dict__.get("_forward_impl"), _SplitForward)]


def _splittable(chunk: nn.Module) -> Iterator[_Splittable]:
    """The linears of `chunk` whose weights are trained, and can be split."""
    tied_owners, in_b = _tied_owners(chunk), declared_in_b(chunk)
    for name, module in chunk.named_modules():
        if not isinstance(module, _SPLIT) or id(module) in in_b or _foreign(module) is not None:
            continue
        name, owner = (name, module) if module.weight is not None else tied_owners.get(id(module), (name, None))
        if owner is not None and owner.weight.requires_grad and not is_declared(owner.weight):
            yield _Splittable(f"{name}.weight", module, owner)


def _tied_owners(chunk: nn.Module) -> dict[int, tuple[str, Any]]:
    """id of an output layer without a weight -> name and module of the MTP layers' embedding, whose weight it uses."""
    tied_owners: dict[int, tuple[str, Any]] = {}
    for name, model in chunk.named_modules():
        is_tied = getattr(model, "mtp_process", False) and getattr(model, "share_embeddings_and_output_weights", False)
        # Not in a model of one stage: there the weight is the first stage's embedding, too, and the split refuses it.
        if is_tied and model.post_process and not model.pre_process:
            tied_owner = f"{name}.embedding.word_embeddings".lstrip(".")
            tied_owners[id(model.output_layer)] = tied_owner, model.embedding.word_embeddings
    return tied_owners


def deferring_modules(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, module) of the modules that defer weight gradients themselves until their `backward_dw` is called."""
    inside = fused_linears(chunk)
    for name, module in chunk.named_modules():
        if isinstance(module, _SPLIT) or id(module) in inside or not (_has_contract(module) or is_fused(module)):
            continue
        if any(is_deferred(weight) for _, weight in _own_parameters(module)):
            yield name, module


def _kept_deferring_modules(chunk: nn.Module) -> list[Any]:
    """Those of them whose gradients are declared to stay in B, for which they need not defer them."""
    in_b = declared_in_b(chunk)
    return [
        module
        for _, module in deferring_modules(chunk)
        if id(module) in in_b or any(is_declared(weight) for _, weight in _own_parameters(module))
    ]


def is_driven(module: nn.Module) -> bool:
    """Whether `split_weight_gradients` found that the module defers weight gradients itself, and W calls its `backward_dw`."""
    return hasattr(module, _FORWARD_HOOK)


def _has_contract(module: nn.Module) -> bool:
    """Whether the module has the methods of Transformer Engine's contract for deferred weight gradients."""
    return hasattr(module, "backward_dw") and hasattr(module, _REGISTER)


def is_deferred(weight: nn.Parameter) -> bool:
    """Whether DDP is to be told of the weight's gradient in W."""
    return bool(getattr(weight, "skip_backward_post_hook", False))


def _own_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of the trainable parameters of the module itself; of one with fused operations those of its linears."""
    return [(key, weight) for key, weight in parameters_of(module).items() if weight is not None and weight.requires_grad]


def _defer_in_backward(
    store: WeightGradStore, driven: DeferringModule, is_captured: bool, _module: nn.Module, _args: Any, output: Any
) -> None:
    """A forward hook that adds the module to the store when its backward runs.

    A forward without gradients, such as the first one with activation recomputation, has no backward; the recomputed one, in B,
    has. An output without grad_fn (a bias that is returned as it is) is not computed by the module. A module whose weights are
    frozen queues nothing. While graphs are captured, Transformer Engine itself runs the W of a module that is in one.
    """
    outputs = output if isinstance(output, tuple | list) else (output,)
    if driven.is_frozen:
        return
    if is_captured and is_capturing():
        return
    check_not_captured(driven.name)
    first = next((each for each in outputs if isinstance(each, Tensor) and each.grad_fn is not None), None)
    if first is not None:
        first.register_hook(lambda _grad: store.defer(driven))


def _hook_biases_of_frozen_weights_in_backward(module: nn.Module) -> None:
    """Let DDP hook a module's biases in backward if its weights are frozen: there will be no W that calls the hooks."""
    if not _has_contract(module) or isinstance(module, _SPLIT):
        return
    deferred = [weight for _, weight in _own_parameters(module) if is_deferred(weight)]
    if all(weight.dim() == 1 for weight in deferred):
        for bias in deferred:
            bias.skip_backward_post_hook = False  # type: ignore[attr-defined]


_FUNCTIONS = (linear_with_grad_accumulation_and_async_allreduce.__name__, linear_with_frozen_weight.__name__)


def _foreign(module: nn.Module) -> str | None:
    """What of a linear's GEMM is not megatron-core's own, so that the split would go past it; None: nothing."""
    kind = type(module)
    base = ColumnParallelLinear if isinstance(module, ColumnParallelLinear) else RowParallelLinear
    for method in ("forward", "_forward_impl"):
        if getattr(kind, method) is not getattr(base, method):
            return f"{kind.__name__}.{method}"
    implementation = module.__dict__.get("_forward_impl")
    if implementation is not None and not isinstance(implementation, _SplitForward):
        return "_forward_impl, set on the module"
    if module.weight is not None and "weight" not in module._parameters:  # torch's parametrizations and weight_norm
        return "a weight that is computed from other parameters"
    if not _is_from_layers(base._forward_impl):
        return f"{base.__name__}._forward_impl, replaced"
    return next((f"layers.{each}, replaced" for each in _FUNCTIONS if not _is_from_layers(getattr(layers, each))), None)


def _is_from_layers(function: Callable[..., Any]) -> bool:
    """Whether a function is one of megatron-core's, not one that was put in its place, nor one around it."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == layers.set_tensor_model_parallel_attributes.__code__.co_filename


def _shared_weights(chunk: nn.Module) -> Iterator[str]:
    owners: dict[int, list[str]] = {}
    tied_owners = _tied_owners(chunk)
    for name, module in chunk.named_modules():
        for key, weight in module._parameters.items():
            if weight is not None and weight.requires_grad:
                owners.setdefault(id(weight), []).append(f"{name}.{key}".lstrip("."))
        if isinstance(module, _SPLIT) and module.weight is None and id(module) not in tied_owners:
            yield (
                f"{name} ({type(module).__name__}) uses the weight of another module of the same chunk (tied embedding "
                "and output layer on one stage): its gradient would come partly from B and partly from W. Use more stages, or "
                "--untie-embeddings-and-output-weights"
            )
    split = {id(each.owner.weight) for each in _splittable(chunk)}
    split |= {id(weight) for _, module in deferring_modules(chunk) for _, weight in _own_parameters(module)}
    for key, names in owners.items():
        if len(names) > 1 and key in split:
            yield f"{' and '.join(names)} are one weight used twice in a chunk: its gradient would be wrong. Untie them"


def _unknown_overlaps(chunk: nn.Module) -> Iterator[str]:
    for name, module in deferring_modules(chunk):
        for overlap in unknown_overlaps(module):
            yield (
                f"{name} ({type(module).__module__}.{type(module).__name__}) was built with {overlap}, a tensor-parallel overlap "
                "that may use Userbuffers memory which is overwritten before W: build it without (tp_comm_bulk_wgrad=False, or "
                "tp_comm_overlap=False)"
            )


def _leaves_b(module: nn.Module, weight: nn.Parameter) -> bool:
    """Whether the gradient of a module's weight is computed in W, or the module is refused by `_without_hooks`."""
    if isinstance(module, _SPLIT):
        return _foreign(module) is None
    return (_has_contract(module) and is_deferred(weight)) or _has_queue_without_hooks(module)


def _remedy(module: nn.Module) -> str:
    """What to do about weights of the module that stay in B."""
    foreign = _foreign(module) if isinstance(module, _SPLIT) else None
    if foreign is not None:
        return (
            f"Their GEMM is not megatron-core's own ({foreign}), and cannot be split into B and W: set {KEEP_IN_B} = True on the "
            "module, on one around it or on the parameter to keep these gradients in B"
        )
    if _has_contract(module) and not isinstance(module, _SPLIT):
        return (
            "Their module could defer them, but was built without delay_wgrad_compute: set config.delay_wgrad_compute = True "
            "after the TransformerConfig is made and before the model is built (it needs Transformer Engine "
            f"{OLDEST_TRANSFORMER_ENGINE} or later)"
        )
    return (
        "They cannot be deferred to W: use a megatron-core ColumnParallelLinear or RowParallelLinear (--transformer-impl local), "
        f"or set {KEEP_IN_B} = True on the module, on one around it or on the parameter to keep these gradients in B"
    )


def _has_queue_without_hooks(module: nn.Module) -> bool:
    """Whether the module itself defers weight gradients, and does not call hooks after them.

    A `backward_dw` of a module with submodules, as megatron-core's layers have one, calls theirs.
    """
    is_one = hasattr(module, "backward_dw") and not isinstance(module, _SPLIT) and not _has_contract(module)
    return is_one and next(module.children(), None) is None


def _without_hooks(chunk: nn.Module) -> Iterator[str]:
    in_b = declared_in_b(chunk)
    for name, module in chunk.named_modules():
        own = [key for key, weight in _own_parameters(module) if weight.dim() > 1]
        if own and _has_queue_without_hooks(module) and id(module) not in in_b:
            yield (
                f"{name}.{own[0]} ({type(module).__module__}.{type(module).__name__}) has backward_dw, but not {_REGISTER}: "
                "DDP could not hook into its W. Transformer Engine's modules have both: pip install "
                f"'transformer-engine[pytorch]>={OLDEST_TRANSFORMER_ENGINE}'"
            )
