"""Weight gradients that stay in B: of modules that declare it, and of those whose gradients nobody can defer.

Embeddings, routers, gates of shared experts, norms and biases stay in B: they are cheap. Of a Mamba mixer, in_proj and out_proj
are split; the short convolution and what the scan takes (A, D, the bias of dt) stay in B: the kernel of the scan computes their
gradients along with its input's.

A module with `wgrad_in_backward = True` keeps its gradients in B, and so do the modules inside of it, unless one of them has
`wgrad_in_backward = False`. A parameter may have the attribute, too. Modules in a CUDA graph whose weight gradients no graph of W
can compute keep theirs as if they had said so (`layer_graphs`), and so do dense MLPs of Transformer Engine's op fuser
(`fused_ops`).

Every other weight that is neither split nor deferred by its module is computed in B, by autograd. Its gradient is right there,
but B takes longer than a schedule assumes, and W, which is to fill the bubble, less. A value head or an adapter is no reason to
refuse a model. So such weights are logged, one line per kind of module, and refused where they are more than `_MOST_SHARE` of
the stage's. A stage most of whose weights are frozen (LoRA) has next to no W in any case: it has no limit.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import nn

from megatron.zerobubble.mcore.model.fused_ops import keeps_fused_in_b
from megatron.zerobubble.mcore.model.layer_graphs import kept_in_graphs

__all__ = ["KEEP_IN_B", "KeptInB", "declared_in_b", "find_kept", "is_declared"]

_log = logging.getLogger(__name__)

KEEP_IN_B = "wgrad_in_backward"
"""Set this attribute to True on a module, its class or a parameter to keep weight gradients in B."""

_STAYS_IN_B = (VocabParallelEmbedding, nn.Embedding, LanguageModelEmbedding, Router, SharedExpertMLP)
"""Modules whose own weights stay in B. Of a SharedExpertMLP that is the gate, one row; its linears are split as others."""

_MAMBA = "megatron.core.ssm.mamba_mixer"
"""Module of `MambaMixer`. Not imported here: importing it takes time, and few models have one."""

_MOST_SHARE = 0.05
"""Of the weights of a stage with a GEMM, frozen ones included. W is about a third of an iteration, so this is 2 % of it."""
_MOSTLY_FROZEN = 0.5


class _Kind(NamedTuple):
    """Weights that stay in B without being declared, of one kind of module."""

    text: str
    """The class of the module."""
    remedy: str
    names: list[str]
    sizes: list[int]


class KeptInB(NamedTuple):
    """What stays in B of a chunk without being declared."""

    kinds: list[_Kind]
    size: int
    """Elements of the chunk's weights with a GEMM."""
    frozen: int
    """Those of them that are not trained."""
    fused: int
    """Those of them in fused MLPs whose operations cannot defer."""

    @property
    def problems(self) -> Iterator[str]:
        """One line per remedy, where it is too much."""
        share = sum(sum(kind.sizes) for kind in self.kinds) / max(self.size, 1)
        if share <= _MOST_SHARE or self.frozen > _MOSTLY_FROZEN * self.size:
            return
        for remedy in dict.fromkeys(kind.remedy for kind in self.kinds):
            named = ", ".join(self._text(kind) for kind in self.kinds if kind.remedy == remedy)
            yield f"{named}: of a stage's weights at most {_MOST_SHARE:.0%} are left in B unasked, here {share:.1%}. {remedy}"

    def log(self) -> None:
        """Log each kind, once per stage."""
        if not _is_first_replica():
            return
        if self.fused:
            _log.warning(
                "pipeline rank %d: use_transformer_engine_op_fuser: fused MLPs, with %.0f %% of the stage's weights, "
                "compute weight gradients in B; without the option W would have them, to fill bubbles",
                *(_pipeline_rank(), 100 * self.fused / self.size),
            )
        for kind in self.kinds:
            _log.warning(
                "pipeline rank %d: %s: their gradients cannot be deferred to W and are computed in B; %s = True on the module, "
                "or on one around it, says that this is meant",
                *(_pipeline_rank(), self._text(kind), KEEP_IN_B),
            )

    def _text(self, kind: _Kind) -> str:
        first, others = kind.names[0], len(kind.names) - 1
        more = f" and {others} more" if others else ""
        return f"{first}{more} ({kind.text}, {sum(kind.sizes) / self.size:.1%} of the stage's weights)"


def declared_in_b(chunk: nn.Module) -> frozenset[int]:
    """ids of the modules of `chunk` that keep their weight gradients in B because they, or a module around them, say so, or
    because they are in a CUDA graph or a fused MLP, and none of W can compute them."""
    kept = {id(module) for module in kept_in_graphs(chunk)}

    def visit(module: nn.Module, is_kept: bool) -> None:
        own = getattr(module, KEEP_IN_B, None)
        is_kept = (is_kept if own is None else bool(own)) or keeps_fused_in_b(module)
        if is_kept:
            kept.add(id(module))
        for child in module.children():
            visit(child, is_kept)

    visit(chunk, False)
    return frozenset(kept)


def is_declared(weight: nn.Parameter) -> bool:
    """Whether the parameter itself says that its gradient stays in B."""
    return bool(getattr(weight, KEEP_IN_B, False))


def find_kept(
    chunk: nn.Module, leaves_b: Callable[[nn.Module, nn.Parameter], bool], remedy: Callable[[nn.Module], str]
) -> KeptInB:
    """What stays in B of `chunk` without being declared.

    Args:
        chunk: one model chunk.
        leaves_b: whether the gradient of a module's weight is computed in W.
        remedy: what to do about a module's weights, for the error.
    """
    declared, cheap = declared_in_b(chunk), _of_mamba(chunk)
    kinds: dict[tuple[str, str], _Kind] = {}
    seen: set[int] = set()
    fused_mlps = {id(part) for module in chunk.modules() if keeps_fused_in_b(module) for part in module.modules()}
    size = frozen = fused = 0
    for name, module in chunk.named_modules():
        if isinstance(module, _STAYS_IN_B):
            continue
        for key, weight in _matrices(module):
            if id(weight) in seen:
                continue
            seen.add(id(weight))
            size += weight.numel()
            fused += weight.numel() * (id(module) in fused_mlps)
            if not weight.requires_grad:
                frozen += weight.numel()
            elif not ({id(module)} & (declared | cheap) or is_declared(weight) or leaves_b(module, weight)):
                text = f"{type(module).__module__}.{type(module).__name__}"
                kind = kinds.setdefault((text, remedy(module)), _Kind(text, remedy(module), [], []))
                kind.names.append(f"{name}.{key}".lstrip("."))
                kind.sizes.append(weight.numel())
    return KeptInB([*kinds.values()], size, frozen, fused)


def _matrices(module: nn.Module) -> Sequence[tuple[str, nn.Parameter]]:
    """(name, parameter) of the module itself, without its submodules, norms and biases."""
    return [(key, weight) for key, weight in module._parameters.items() if weight is not None and weight.dim() > 1]


def _of_mamba(chunk: nn.Module) -> frozenset[int]:
    """ids of the Mamba mixers of `chunk` and of their convolutions, which are modules of their own before 0.19."""
    imported = sys.modules.get(_MAMBA)  # if nothing has imported it, `chunk` has none
    mixers = [] if imported is None else [each for each in chunk.modules() if isinstance(each, imported.MambaMixer)]
    return frozenset(id(each) for mixer in mixers for each in (mixer, getattr(mixer, "conv1d", mixer)))


def _pipeline_rank() -> int:
    initialized = parallel_state.model_parallel_is_initialized()
    return parallel_state.get_pipeline_model_parallel_rank() if initialized else 0


def _is_first_replica() -> bool:
    """Whether this rank is the first of those with the same stage."""
    if not parallel_state.model_parallel_is_initialized():
        return True
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return replica == parallel_state.get_tensor_model_parallel_rank() == 0
