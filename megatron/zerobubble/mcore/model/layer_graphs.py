"""CUDA graphs of layers (`cuda_graph_impl="transformer_engine"`) under schedules that split B and W.

Transformer Engine captures a forward and a backward graph per layer and microbatch, of the part of the layer that is in scope. B
replays the backward graph, with the weight gradients of the modules in it; W has those of all others, of experts above all. Four
rules make that right:

1. Modules in a graph leave nothing to W (`modules_in_graphs`): Python does not run in a replay, so no queue would be filled.
2. Graphs are captured in the order in which the plan replays them (`LayerGraphs.order`), which is fixed from then on: all graphs
   share a pool of memory, and a capture takes what earlier captures no longer need.
3. A gradient that leaves a graph is copied (`_OwnGradient`). It lies in the pool, where the graphs of the next Bs write, while an
   eager module keeps it for a later W, and a transfer to the stage before may still read it.
4. An input of an eager module that lies in the pool is copied (`GraphMemory.own`) where W reads it: once the B of the graph that
   wrote it has been captured, its memory is another graph's.

megatron-core's `TECudaGraphHelper` captures and replays; layers call what `LayerGraphs.begin` puts in the place of its graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.module import GraphableMegatronModule
from torch import Tensor, nn

from megatron.zerobubble.errors import ConfigError, SplitError
from megatron.zerobubble.plan.ir import OpKind, Plan
from megatron.zerobubble.wgrad.store import GraphMemory

__all__ = ["IMPLEMENTATION", "LayerGraphs", "check_not_captured", "graphed_layers", "modules_in_graphs"]

_log = logging.getLogger(__name__)

IMPLEMENTATION = "transformer_engine"
"""The `cuda_graph_impl` that goes with a split of B and W."""


def graphed_layers(chunk: nn.Module) -> list[Any]:
    """The layers of a chunk of which graphs are or will be captured."""
    return [
        layer
        for layer in chunk.modules()
        if isinstance(layer, GraphableMegatronModule)
        and getattr(layer.config, "cuda_graph_impl", None) == IMPLEMENTATION
        and cuda_graphs._layer_is_graphable(layer, layer.config)
    ]


def modules_in_graphs(chunk: nn.Module) -> Iterator[nn.Module]:
    """The modules of a chunk whose backward is in a graph, each with those inside of it."""
    for layer in graphed_layers(chunk):
        parts = list(layer._get_submodules_under_cudagraphs())
        scopes = {scope.name for scope in _scopes(layer.config)}
        if "moe_preprocess" in scopes and getattr(layer, "is_moe_layer", False):
            parts.append(getattr(layer.mlp, "fc1_latent_proj", None))  # megatron-core names the modules with hooks alone
        yield from (module for part in parts if part is not None for module in part.modules())


def _scopes(config: Any) -> Sequence[Any]:
    """What of a layer is captured; empty: all of it. The option was renamed with 0.18."""
    scopes: Sequence[Any] = config.cuda_graph_modules if hasattr(config, "cuda_graph_modules") else config.cuda_graph_scope
    return scopes


def check_not_captured(name: str) -> None:
    """Raise SplitError while graphs are captured: a module runs there that leaves its weight gradients to W."""
    if cuda_graphs.is_graph_capturing():
        raise SplitError(
            f"{name} runs inside a CUDA graph, and its weight gradients were left to W: set wgrad_in_backward = True on the "
            "module before DDP wraps the model, or take its part of the layer out of cuda_graph_modules"
        )


class _OwnGradient(torch.autograd.Function):
    """The identity in front of a graph. Its backward returns a copy of the gradient, in memory of its own."""

    @staticmethod
    def forward(_ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()


class _Graph:
    """A captured layer, for one microbatch, as the layer calls it.

    Args:
        captured: what Transformer Engine made.
        memory: notes where the outputs are.
    """

    def __init__(self, captured: Any, memory: GraphMemory) -> None:
        self._captured = captured
        self._memory: GraphMemory | None = memory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._captured(*map(_with_own_gradient, args), **{name: _with_own_gradient(x) for name, x in kwargs.items()})
        if self._memory is not None:  # they are in the same place in every replay
            self._memory.add(outputs if isinstance(outputs, tuple | list) else (outputs,))
            self._memory = None
        return outputs

    def __getattr__(self, name: str) -> Any:  # reset, backward_dw
        return getattr(self._captured, name)


def _with_own_gradient(value: Any) -> Any:
    return _OwnGradient.apply(value) if isinstance(value, Tensor) and value.requires_grad else value


class LayerGraphs:
    """The graphs of a rank's layers.

    Args:
        chunks: this rank's model chunks, wrapped by DDP, in the order of their stages.
        config: the chunks' TransformerConfig.
        memory: the store's.
    """

    def __init__(self, chunks: Sequence[nn.Module], config: Any, memory: GraphMemory) -> None:
        self._layers = [layer for chunk in chunks for layer in graphed_layers(chunk)]
        self._memory = memory
        self.warmup_steps: int = config.cuda_graph_warmup_steps
        """Training iterations before the graphs are captured."""
        self.num_microbatches: int | None = None
        """Of an iteration whose plan is fixed, because its graphs are being or were captured; None: any plan may run."""

    def order(self, plan: Plan, rank: int) -> list[int]:
        """Fix the plan, and return this rank's F (chunk + 1) and B (-chunk - 1) in its order, as megatron-core numbers chunks."""
        self.num_microbatches = plan.num_microbatches
        if torch.distributed.get_rank() == 0:
            _log.info("CUDA graphs of layers are captured in the plan's order, which is fixed from now on")
        chunk_of = plan.placement.chunk_of
        sign = {OpKind.F: 1, OpKind.B: -1, OpKind.BW: -1}
        return [sign[op.kind] * (chunk_of(op.stage) + 1) for op in plan.ops[rank] if op.kind in sign]

    def begin(self, num_microbatches: int, *, forward_only: bool) -> None:
        """Call it before the passes of an iteration.

        Raises:
            ConfigError: no graphs were captured for this number of microbatches, or the passes are not those of training.
        """
        captured = [layer for layer in self._layers if getattr(layer, "cuda_graphs", None)]
        for layer in captured:
            graphs = layer.cuda_graphs
            if not isinstance(graphs[0], _Graph):
                layer.cuda_graphs = [_Graph(each, self._memory) for each in graphs]
        if self.num_microbatches is None:
            return
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
