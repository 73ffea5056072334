"""A router's auxiliary losses over whole microbatches, for slices.

The auxiliary loss multiplies how many tokens of a microbatch are routed to each expert by the sum of the expert's scores. The
counts have no gradient, and the sum is one over the slices. So a slice's share of the loss, and its gradient, follow from its own
scores and the counts of all slices. The F of a slice keeps which experts its tokens were routed to, one boolean per token and
expert. Its B, which comes after the Fs of all slices, computes its share by the router's own methods, with which megatron-core
also logs it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn
from torch.nn import functional

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice

__all__ = ["REPLACED", "balance_microbatches"]

REPLACED = ("routing", "is_aux_loss_enabled")
"""Attributes of a router that `balance_microbatches` sets."""


def balance_microbatches(module: nn.Module, slices: CurrentSlice) -> bool:
    """Let a router's auxiliary losses be those of whole microbatches. Undone by deleting its attributes `REPLACED`.

    Args:
        module: any module of a model.
        slices: of the rank.

    Returns:
        Whether it is a router with an auxiliary loss.
    """
    if not isinstance(module, TopKRouter) or not module.is_aux_loss_enabled():
        return False
    routing = _Routing(module, slices)
    module.routing = routing
    module.is_aux_loss_enabled = routing.is_own_loss_enabled
    return True


class _Routed:
    """Which experts the tokens of a microbatch's slices are routed to, in one layer."""

    def __init__(self) -> None:
        self.nbytes = 0  # counted as activations
        self._maps: dict[int, Tensor] = {}

    def keep(self, index: int, routing_map: Tensor) -> None:
        """Keep a slice's map, [tokens, experts], or replace it by the same when a layer is recomputed."""
        self._maps[index] = routing_map.detach()

    def whole(self, index: int) -> tuple[Tensor, int]:
        """The maps of all slices, one behind the other, and how many tokens come before those of slice `index`."""
        before = sum(self._maps[number].size(0) for number in range(index))
        return torch.cat([self._maps[number] for number in range(len(self._maps))]), before


class _Routing:
    """The `routing` of a router."""

    def __init__(self, router: TopKRouter, slices: CurrentSlice) -> None:
        self._router = weakref.ref(router)
        self._slices = slices

    def is_own_loss_enabled(self) -> bool:
        """The router's `is_aux_loss_enabled`: False while a slice runs, whose loss is attached here."""
        router = self._router()
        assert router is not None
        return self._slices.part is None and type(router).is_aux_loss_enabled(router)

    def __call__(self, logits: Tensor, padding_mask: Tensor | None = None, **others: Any) -> tuple[Tensor, Tensor]:
        router, part = self._router(), self._slices.part
        assert router is not None
        given = others if padding_mask is None else {"padding_mask": padding_mask, **others}
        probs, routing_map = type(router).routing(router, logits, **given)
        if part is None or not router.training:
            return probs, routing_map
        if padding_mask is not None:
            raise ConfigError("slices do not go with a padding mask in routers with an auxiliary loss: leave one of the two out")
        fused = router.config.moe_router_fusion
        own_map, scores = compute_routing_scores_for_aux_loss(
            logits.view(-1, router.config.num_moe_experts), router.topk, router.score_function, fused=fused
        )
        routed = self._slices.kept(router, _Routed)
        routed.keep(part.index, own_map)
        if torch.is_grad_enabled():
            probs = _AuxiliaryLoss.apply(probs, scores, router, routed, part.index, logits.size(1))
        return probs, routing_map


class _AuxiliaryLoss(torch.autograd.Function):
    """Passes on probabilities; in B, adds the gradient of the slice's share of the auxiliary losses to the scores."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, scores: Tensor, router: TopKRouter, routed: _Routed, index: int, batch: int) -> Tensor:
        ctx.save_for_backward(scores)
        ctx.router, ctx.routed, ctx.index, ctx.batch = router, routed, index, batch
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (scores,) = ctx.saved_tensors
        whole_map, before = ctx.routed.whole(ctx.index)
        tokens = whole_map.size(0)
        with torch.enable_grad():
            own = scores.detach().requires_grad_()
            rest = tokens - before - own.size(0)
            whole = functional.pad(own, (0, 0, before, rest))  # the other slices add their own shares
            carrier = own.new_zeros(tokens, 1, requires_grad=True)
            carrier = ctx.router._apply_aux_loss(carrier, whole, whole_map)
            carrier = ctx.router._apply_seq_aux_loss(carrier, whole, whole_map, tokens // ctx.batch, ctx.batch)
        (of_scores,) = torch.autograd.grad(carrier, own, torch.zeros_like(carrier))
        return gradient, of_scores, None, None, None, None
