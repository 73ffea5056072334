"""CUDA graphs of layers under schedules that split B and W: captured in the order of a plan, and replayed in it.

Transformer Engine captures three graphs per layer and microbatch: of F, of B, and of the weight gradients that modules inside
left to W. All graphs of a rank share a pool of memory, and a capture takes what earlier captures no longer need. Five rules make
the replays right:

1. Graphs are captured in the order in which the plan replays them (`LayerGraphs.order`), which is fixed from then on. F and W
   check it.
2. Each layer and microbatch is captured as a chunk of its own (`LayerGraphs.capture`). Transformer Engine takes the W of a chunk
   for that of its last B, so with a chunk of several microbatches a later W would hold another microbatch's operands.
3. An operand of W that lies in a static input of a graph, or in its static gradient, is copied in the capture: other microbatches
   share these buffers. All others lie in the pool, and the module's queue keeps them from being handed out until its W.
4. A gradient that leaves a graph is copied (`_OwnGradient`). It lies in the pool, where the graphs of the next Bs write, while an
   eager module keeps it for a later W, and a transfer to the stage before may still read it.
5. An input of an eager module that lies in the pool is copied (`GraphMemory.own`) where W reads it: once the B of the graph that
   wrote it has been captured, its memory is another graph's.

megatron-core's `TECudaGraphHelper` calls `LayerGraphs.capture` in the place of Transformer Engine's function, and layers call
what that returns.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.zerobubble.errors import ConfigError, ExecutionError
from megatron.zerobubble.mcore.model.layer_graphs import graphed_layers, modules_in_graph, why_in_b
from megatron.zerobubble.mcore.model.wgrad_split import driven_modules
from megatron.zerobubble.plan.ir import Op, OpKind, Plan
from megatron.zerobubble.plan.tail import Tail
from megatron.zerobubble.wgrad.deferring import DeferringModule, WgradKey
from megatron.zerobubble.wgrad.final import FinalGradient
from megatron.zerobubble.wgrad.grouping import WgradGroup
from megatron.zerobubble.wgrad.split_weight import DeferredGemm
from megatron.zerobubble.wgrad.store import GraphMemory, WeightGradStore

__all__ = ["LayerGraphs"]

_log = logging.getLogger(__name__)


class _OwnGradient(torch.autograd.Function):
    """The identity in front of a graph. Its backward returns a copy of the gradient, in memory of its own.

    Args:
        tensor: an input of the graph.
        on_backward: called when the graph's B has run, or None.
        weights: of which W computes gradients: autograd is to know that the graph uses them.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, on_backward: Callable[[], None] | None, *weights: Tensor) -> Tensor:
        ctx.on_backward, ctx.num_weights = on_backward, len(weights)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.on_backward is not None:
            ctx.on_backward()
        return gradient.clone(), None, *[None] * ctx.num_weights


def _with_own_gradient(value: Any) -> Any:
    return _OwnGradient.apply(value, None) if isinstance(value, Tensor) and value.requires_grad else value


class _Graph:
    """A captured layer, for one microbatch, as the layer calls it.

    Args:
        captured: what Transformer Engine made.
        graphs: the rank's.
        number: of this layer and microbatch, from 1.
        modules: of the layer, those whose W is captured.
    """

    def __init__(self, captured: Any, graphs: LayerGraphs, number: int, modules: Sequence[DeferringModule]) -> None:
        self._captured = captured
        self._graphs = graphs
        self._number = number
        self._modules = modules
        self._is_noted = False

    def __call__(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        self._graphs.check_order(self._number)
        if self._modules:
            hidden = _OwnGradient.apply(hidden, self._defer, *(module.weights[0] for module in self._modules))
        else:
            hidden = _with_own_gradient(hidden)
        others = {name: _with_own_gradient(each) for name, each in kwargs.items()}
        outputs = self._captured(hidden, *map(_with_own_gradient, args), **others)
        if not self._is_noted:  # they are in the same place in every replay
            self._is_noted = True
            self._graphs.store.graph_memory.add(outputs if isinstance(outputs, tuple | list) else (outputs,))
        return outputs

    def _defer(self) -> None:
        for module in self._modules:
            self._graphs.store.defer(module)

    def replay_wgrad(self) -> None:
        """Compute the weight gradients. Transformer Engine calls hooks behind them, in an order that differs between replicas."""
        self._graphs.check_order(_w_of(self._number))
        with ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(module.without_hooks())
            self._captured.backward_dw()

    def __getattr__(self, name: str) -> Any:  # reset
        return getattr(self._captured, name)


class _LayerWgrad:
    """W of one layer: one graph per microbatch has the weight gradients of all its modules, which W runs one by one.

    Args:
        layer: has `cuda_graphs`, by microbatch.
        num_modules: how many modules ask for each W.
    """

    def __init__(self, layer: Any, num_modules: int) -> None:
        self._layer = layer
        self._num_modules = num_modules
        self._left: dict[WgradKey, int] = {}

    def __call__(self, key: WgradKey) -> bool:
        """Replay the graph when the first module asks; False if the layer has none any more."""
        if not self._layer.cuda_graphs:
            return False
        if key not in self._left:
            self._left[key] = self._num_modules
            self._layer.cuda_graphs[key.microbatch].replay_wgrad()
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key]
        return True

    def forget(self) -> None:
        """Begin an iteration: an error may have ended the last one between two modules."""
        self._left.clear()


@dataclass
class _Group:
    """Ws of a chunk that run together, before they are captured."""

    units: WgradGroup
    layers: dict[DeferringModule, int]
    """Of the modules with a captured W: their layer, in its chunk, until that has run."""


class LayerGraphs:
    """The graphs of a rank's layers.

    Args:
        chunks: this rank's model chunks, wrapped by DDP, in the order of their stages.
        config: the chunks' TransformerConfig.
        store: of the weight gradients.
    """

    def __init__(self, chunks: Sequence[nn.Module], config: Any, store: WeightGradStore) -> None:
        self.store = store
        self._layers = [graphed_layers(chunk) for chunk in chunks]
        self.warmup_steps: int = config.cuda_graph_warmup_steps
        """Training iterations before the graphs are captured."""
        self.num_microbatches: int | None = None
        """Of an iteration whose plan is fixed, because its graphs are being or were captured; None: any plan may run."""
        self._ops: Sequence[tuple[int, Op]] = ()
        """Of this rank, in the order of the plan, each with its chunk."""
        self._tail = Tail()
        self._modules: dict[int, tuple[DeferringModule, ...]] = {}
        """By identity of a layer, its modules whose W is captured."""
        self.wgrads: list[_LayerWgrad] = []
        """Of the layers, once they are captured."""
        self._order: Sequence[float] = ()
        """Of captures: a number from 1 per layer and microbatch for F, its negative for B, and that less a half for W."""
        self._replays: Sequence[float] = ()
        """Those of F and W."""
        self._next = 0

    def order(self, plan: Plan, rank: int, tail: Tail) -> list[int]:
        """Fix the plan, and return this rank's F (chunk + 1) and B (-chunk - 1) in its order, as megatron-core numbers chunks.

        Args:
            plan: that runs from now on.
            rank: of the pipeline.
            tail: how the last Ws of the rank run.
        """
        self.num_microbatches = plan.num_microbatches
        self._ops = [(plan.placement.chunk_of(op.stage), op) for op in plan.ops[rank]]
        self._tail = tail
        sign = {OpKind.F: 1, OpKind.B: -1, OpKind.BW: -1}
        return [sign[op.kind] * (chunk + 1) for chunk, op in self._ops if op.kind in sign]

    def capture(self, original: Callable[..., Any], callables: Any, sample_args: Sequence[Any], **options: Any) -> Any:
        """Capture graphs in the order of the plan, as Transformer Engine's `make_graphed_callables` does in another one.

        Args:
            original: that function.
            callables: the layers, chunk after chunk.
            sample_args: static inputs by chunk, microbatch and layer.
            options: of the function. `_order` is replaced if there are weight gradients to capture.

        Returns:
            What `original` returns, in the order of `sample_args`.
        """
        place = {id(layer): index for index, layer in enumerate(callables)}
        layers = [layer for chunk in self._layers for layer in chunk]
        if self.num_microbatches is None or place.keys() != {id(layer) for layer in layers}:
            return original(callables, sample_args, **options)  # an encoder's, which no plan of ours runs
        self._layers = [sorted(chunk, key=lambda layer: place[id(layer)]) for chunk in self._layers]
        self._modules = {id(layer): _trained_modules(layer) for layer in layers}
        self.store.runs_ahead = not self._tail.parts  # which depend on what is left for each W
        self._fix_positions()
        self._order = list(self._sequence())
        self._replays = [number for number in self._order if number > 0 or number != int(number)]
        ordered = [layer for chunk in self._layers for _ in range(self.num_microbatches) for layer in chunk]
        assert len(ordered) == len(sample_args)
        self._log(layers)
        if any(self._modules.values()):
            callables = tuple(ordered)
            options |= {"_order": list(self._order), "_num_layers_per_chunk": [1] * len(ordered)}
        with self._owning_operands(layers, [*sample_args, *(each.values() for each in options.get("sample_kwargs") or ())]):
            made = original(callables, sample_args, **options)
        self.wgrads.clear()
        for layer in layers:
            self.wgrads.append(wgrad := _LayerWgrad(layer, len(self._modules[id(layer)])))
            for module in self._modules[id(layer)]:
                module.replay = wgrad
        pairs = enumerate(zip(made, ordered, strict=True), 1)
        return tuple(_Graph(each, self, number, self._modules[id(layer)]) for number, (each, layer) in pairs)

    def _number(self, chunk: int, layer: int, microbatch: int) -> int:
        """Of a layer, counted in its chunk, and a microbatch, in the order of `sample_args`."""
        assert self.num_microbatches is not None
        before = self.num_microbatches * sum(len(layers) for layers in self._layers[:chunk])
        return 1 + before + microbatch * len(self._layers[chunk]) + layer

    def _sequence(self) -> Iterator[float]:
        """The order of captures."""
        groups: dict[int, _Group] = {}
        for chunk, op in self._ops:
            own = range(len(self._layers[chunk]))
            if op.kind is OpKind.F:
                yield from (self._number(chunk, layer, op.microbatch) for layer in own)
            if op.kind in (OpKind.B, OpKind.BW):
                yield from (-self._number(chunk, layer, op.microbatch) for layer in reversed(own))
            if op.kind is OpKind.W and op in self._tail.parts:
                yield from self._part(groups, chunk, *self._tail.parts[op])
            elif op.kind is OpKind.BW or op == self._tail.fused or (op.kind is OpKind.W and op != self._tail.done):
                having = [layer for layer in reversed(own) if self._modules[id(self._layers[chunk][layer])]]
                yield from (_w_of(self._number(chunk, layer, op.microbatch)) for layer in having)

    def _part(self, groups: dict[int, _Group], chunk: int, ops: Sequence[Op], part: int) -> Iterator[float]:
        """Ws in one part of a group: the first module of a layer replays for all."""
        if part == 0:
            keys = [WgradKey(chunk, op.microbatch) for op in ops]
            splits, modules = self.store.first(chunk)
            nothing = torch.empty(0)
            gemms = [DeferredGemm(split, nothing, nothing) for split in splits]
            layers = {module: layer for layer, each in enumerate(self._layers[chunk]) for module in self._modules[id(each)]}
            groups[chunk] = _Group(WgradGroup(keys, [gemms] * len(keys), [list(modules)] * len(keys)), layers)
        group = groups[chunk]
        for module, keys in group.units.take(part)[1]:
            layer = group.layers.get(module)
            if layer is not None:
                yield from (_w_of(self._number(chunk, layer, key.microbatch)) for key in keys)
                group.layers = {each: of for each, of in group.layers.items() if of != layer}

    def _fix_positions(self) -> None:
        """Give every weight and module of the tail a place of its own: in a replay, modules come in another order than in B."""
        if not self._tail.parts:
            return
        for splits, modules in map(self.store.first, range(len(self._layers))):
            units: dict[FinalGradient, None] = dict.fromkeys((*splits, *modules))
            for position, unit in enumerate(sorted(units, key=lambda unit: unit.position)):
                unit.position = position

    @contextmanager
    def _owning_operands(self, layers: Sequence[Any], static: Sequence[Any]) -> Iterator[None]:
        """Inside, operands of W are copied that lie in static inputs, or in the static gradients of the layers' outputs."""
        memory = GraphMemory()
        for each in static:
            memory.add(list(each))

        def noting(capture: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            outputs = capture(*args, **kwargs)
            for output in outputs if isinstance(outputs, tuple | list) else (outputs,):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(lambda gradient: memory.add([gradient]))
            return outputs

        before, self.store.graph_memory = self.store.graph_memory, memory
        for layer in layers:
            layer._te_cuda_graph_capture = partial(noting, layer._te_cuda_graph_capture)
        try:
            yield
        finally:
            self.store.graph_memory = before
            for layer in layers:
                del layer._te_cuda_graph_capture

    def _log(self, layers: Sequence[Any]) -> None:
        if torch.distributed.get_rank() != 0:
            return
        kept = Counter(
            why
            for layer in layers
            for module in modules_in_graph(layer)
            if any(weight.dim() > 1 for weight in module._parameters.values() if weight is not None)
            and (why := why_in_b(module, layer.config)) is not None
        )
        reasons = "; ".join(f"{count} keep theirs in B ({why})" for why, count in kept.items())
        _log.info(
            "CUDA graphs of layers are captured in the plan's order, which is fixed from now on: weight gradients of %d modules "
            "in graphs of W%s",
            sum(map(len, self._modules.values())),
            f"; {reasons}" if reasons else "",
        )

    def check_order(self, number: float) -> None:
        """Check that a graph is replayed in the order of captures.

        Raises:
            ExecutionError: it is not, and would read memory of other graphs.
        """
        if not self._replays:
            return
        expected = self._replays[self._next]
        if number != expected:
            raise ExecutionError(
                f"a CUDA graph is replayed in another order than it was captured in: {self._text(number)}, where "
                f"{self._text(expected)} was captured"
            )
        self._next = (self._next + 1) % len(self._replays)

    def _text(self, number: float) -> str:
        assert self.num_microbatches is not None
        index, kind = (int(number) - 1, "F") if number > 0 else (-int(number) - 1, "W")
        for chunk, layers in enumerate(self._layers):
            size = len(layers) * self.num_microbatches
            if index < size:
                microbatch, layer = divmod(index, len(layers))
                return f"{kind} of chunk {chunk}, layer {layer}, microbatch {microbatch}"
            index -= size
        raise AssertionError(number)

    def begin(self, num_microbatches: int, *, forward_only: bool) -> None:
        """Call it before the passes of an iteration.

        Raises:
            ConfigError: no graphs were captured for this number of microbatches, or the passes are not those of training.
        """
        if self.num_microbatches is None:
            return
        self._next = 0
        for wgrad in self.wgrads:
            wgrad.forget()
        captured = [layer for layers in self._layers for layer in layers if getattr(layer, "cuda_graphs", None)]
        if forward_only and any(layer.training for layer in captured):
            raise ConfigError(
                "forward passes alone in training mode would replay CUDA graphs that were captured between backward passes: call "
                "model.eval() before, or run them before the graphs are captured"
            )
        if not forward_only and num_microbatches != self.num_microbatches:
            raise ConfigError(
                f"CUDA graphs were captured for {self.num_microbatches} microbatches, and an iteration has {num_microbatches}: "
                'give a constant global batch size, or cuda_graph_impl="none"'
            )


def _trained_modules(layer: Any) -> tuple[DeferringModule, ...]:
    """The modules in the graphs of a layer that leave weight gradients to W."""
    inside = {id(module) for module in modules_in_graph(layer)}
    return tuple(each for each in driven_modules(layer) if each.is_of(inside) and not each.is_frozen)


def _w_of(number: int) -> float:
    """What stands for the W of a layer and microbatch in an order of captures."""
    return -number - 0.5
