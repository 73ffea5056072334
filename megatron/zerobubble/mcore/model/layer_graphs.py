"""Which layers of a chunk get CUDA graphs (`cuda_graph_impl="transformer_engine"`), and where weight gradients inside them go.

Transformer Engine captures a forward and a backward graph per layer and microbatch, of the part of the layer that is in scope,
and a third one with the weight gradients that modules inside it left to W. B and W replay a graph each (`graph_replays`).

A module in a graph leaves W to the third graph if a replay can compute it: with fused accumulation, whose GEMM adds to
``main_grad``. Otherwise Python sets ``weight.grad``, and so it does with the gradient of a bias that the GEMM computes; no Python
runs in a replay. Such modules, and all of them under FP8 and before Transformer Engine 2.10, keep their weight gradients in B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.utils import is_te_min_version
from torch import nn

from megatron.zerobubble.errors import SplitError

__all__ = [
    "IMPLEMENTATION",
    "check_not_captured",
    "graphed_layers",
    "is_capturing",
    "kept_in_graphs",
    "modules_in_graph",
    "why_in_b",
]

IMPLEMENTATION = "transformer_engine"
"""The `cuda_graph_impl` that goes with a split of B and W."""

_OLDEST_WITH_W = "2.10.0"
"""Transformer Engine's first release that captures weight gradients apart from the rest of backward."""


def graphed_layers(chunk: nn.Module) -> list[Any]:
    """The layers of a chunk of which graphs are or will be captured."""
    return [
        layer
        for layer in chunk.modules()
        if isinstance(layer, GraphableMegatronModule)
        and not any(isinstance(each, GraphableMegatronModule) for each in layer.modules() if each is not layer)  # a block
        and getattr(layer.config, "cuda_graph_impl", None) == IMPLEMENTATION
        and cuda_graphs._layer_is_graphable(layer, layer.config)
    ]


def modules_in_graph(layer: Any) -> list[nn.Module]:
    """The modules of a layer whose backward is in its graphs, each with those inside of it."""
    parts = list(layer._get_submodules_under_cudagraphs())
    scopes = {scope.name for scope in _scopes(layer.config)}
    if "moe_preprocess" in scopes and getattr(layer, "is_moe_layer", False):
        parts.append(getattr(layer.mlp, "fc1_latent_proj", None))  # megatron-core names the modules with hooks alone
    return list(dict.fromkeys(module for part in parts if part is not None for module in part.modules()))


def kept_in_graphs(chunk: nn.Module) -> Iterator[nn.Module]:
    """The modules in graphs of a chunk that keep their weight gradients in B."""
    for layer in graphed_layers(chunk):
        yield from (module for module in modules_in_graph(layer) if why_in_b(module, layer.config) is not None)


def why_in_b(module: Any, config: Any) -> str | None:
    """Why a module in a graph keeps its weight gradients in B; None: a graph of W computes them.

    Args:
        module: has weights of its own.
        config: TransformerConfig of its layer.
    """
    if not hasattr(module, "wgrad_store"):
        return "not modules that defer them"
    if not is_te_min_version(_OLDEST_WITH_W):
        return f"Transformer Engine is older than {_OLDEST_WITH_W}"
    if getattr(config, "fp8", None) or getattr(config, "fp4", None):
        return "not tried with FP8"
    if not getattr(module, "fuse_wgrad_accumulation", False):
        return "without gradient_accumulation_fusion Python adds them"
    if getattr(module, "apply_bias", False):
        return "the GEMM has the gradient of a bias, too"
    return None


def _scopes(config: Any) -> Sequence[Any]:
    """What of a layer is captured; empty: all of it. The option was renamed with 0.18."""
    scopes: Sequence[Any] = config.cuda_graph_modules if hasattr(config, "cuda_graph_modules") else config.cuda_graph_scope
    return scopes


def is_capturing() -> bool:
    """Whether graphs are being captured, or warmed up for it."""
    return bool(cuda_graphs.is_graph_capturing())


def check_not_captured(name: str) -> None:
    """Raise SplitError while graphs are captured: a module runs there that leaves its weight gradients to W."""
    if is_capturing():
        raise SplitError(
            f"{name} runs inside a CUDA graph, and its weight gradients were left to W: set wgrad_in_backward = True on the "
            "module before DDP wraps the model, or take its part of the layer out of cuda_graph_modules"
        )
