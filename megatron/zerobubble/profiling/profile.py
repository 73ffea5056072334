"""Combine the measurements of a pipeline's ranks into the planner's `CostModel`.

The typical time of each stage's F, B and W on every rank gives one `CostModel` (`combine`). A stage that several ranks hold
(tensor or data parallelism) takes as long as its slowest member. This module does not import torch: a recording can be read
without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Generic, NamedTuple, TypeVar

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.links import unequal_links
from megatron.zerobubble.plan.ir import OpKind, Placement

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Activation memory of one microbatch of a stage on one rank, in bytes."""

    activation: float
    """After F."""
    after_backward: float
    """After B, until W."""


class ByLength(NamedTuple, Generic[Value]):
    """What was measured of one microbatch whose length is known."""

    tokens: int
    """Tokens of the microbatch."""
    squares: float
    """Sum of the squared lengths of its sequences."""
    value: Value


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """Pass times and memory as measured on one rank."""

    times_ms: Mapping[tuple[int, OpKind], float]
    """(stage, kind) -> milliseconds."""
    memory: Mapping[int, StageMemory]
    """Stage -> activation memory of one microbatch; empty if memory was not measured."""
    peak_bytes: int = 0
    """Peak of the activation memory held after an op, in the iteration whose memory was measured."""
    workspace_bytes: int = 0
    """Peak of the memory in use during an op, above what is held around it. In any order of ops the memory in use is at most the
    peak after an op plus this, provided that no more is in flight."""
    most_bytes: int = 0
    """Peak of the memory in use at any moment of the order that ran: at most the sum of the other two."""
    timed: Mapping[tuple[int, OpKind], tuple[ByLength[float], ...]] = field(default_factory=dict)
    """(stage, kind) -> milliseconds of its passes by length, where microbatches have lengths of their own."""
    measured: Mapping[int, tuple[ByLength[StageMemory], ...]] = field(default_factory=dict)
    """Stage -> its microbatches' memory by length, likewise."""


def combine(
    ranks: Sequence[RankProfile], placement: Placement, links: Mapping[tuple[int, int], float] | None = None
) -> CostModel:
    """Combine the measurements of all ranks into the costs of their pipeline.

    Args:
        ranks: the profile of every rank that holds a stage, in any order; several for a stage that several ranks hold.
        placement: stage -> rank.
        links: (sender, receiver) -> milliseconds of a message. Links that are alike cost their mean.

    Raises:
        ExecutionError: no rank timed a stage's F, or its B.
    """
    slowest: dict[tuple[int, OpKind], float] = {}
    for rank in ranks:
        for key, elapsed in rank.times_ms.items():
            slowest[key] = max(elapsed, slowest.get(key, 0.0))

    def of(*kinds: OpKind, optional: bool = False) -> tuple[float, ...]:
        found = [[slowest[stage, kind] for kind in kinds if (stage, kind) in slowest] for stage in range(placement.num_stages)]
        if not optional and not all(found):
            raise ExecutionError(f"no {kinds[0].value} of stage {found.index([])} was timed")
        return tuple(map(sum, found))

    activation, after_backward = _shares(ranks, placement)
    return CostModel(
        forward_ms=of(OpKind.F),
        backward_ms=of(OpKind.B, OpKind.BW),
        wgrad_ms=of(OpKind.W, optional=True),
        comm_ms=fmean(links.values()) if links else 0.0,
        links=unequal_links(links or {}, placement.num_ranks),
        activation=activation,
        activation_after_backward=after_backward,
    )


def unit_bytes(ranks: Sequence[RankProfile], placement: Placement) -> float:
    """Bytes of one unit of a plan's memory: one microbatch on a rank with an equal part of the model. 0 if not measured."""
    return math.fsum(_largest(ranks, stage).activation for stage in range(placement.num_stages)) / placement.num_ranks


def costs_within(costs: CostModel, placement: Placement, num_microbatches: int, headrooms: Sequence[float]) -> CostModel:
    """Rescale the memory of `costs` to units in which the headroom of every rank is 1.

    A plan within memory limit 1 under these costs keeps every rank within its own headroom.

    Args:
        costs: costs with activations in units of one microbatch on a rank with an equal part of the model.
        placement: stage -> rank.
        num_microbatches: m; a plan's memory is relative to min(p, m) microbatches.
        headrooms: per rank, how many such units fit; above 0.
    """
    scales = [min(placement.num_ranks, num_microbatches) / headrooms[rank] for rank in placement.stage_to_rank]
    return replace(
        costs,
        activation=tuple(value * scale for value, scale in zip(costs.activation, scales, strict=True)),
        activation_after_backward=tuple(
            value * scale for value, scale in zip(costs.activation_after_backward, scales, strict=True)
        ),
    )


def _shares(ranks: Sequence[RankProfile], placement: Placement) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Activation memory of each stage after F and after B, in units; if not measured, equal parts that are held until W."""
    unit = unit_bytes(ranks, placement)
    if unit <= 0:
        equal = tuple(1.0 / len(placement.rank_to_stages[rank]) for rank in placement.stage_to_rank)
        return equal, equal
    held = [_largest(ranks, stage) for stage in range(placement.num_stages)]
    return tuple(each.activation / unit for each in held), tuple(each.after_backward / unit for each in held)


def _largest(ranks: Sequence[RankProfile], stage: int) -> StageMemory:
    """The largest activation memory of a stage over the ranks that hold it."""
    members = [rank.memory[stage] for rank in ranks if stage in rank.memory]
    return StageMemory(
        activation=max((each.activation for each in members), default=0.0),
        after_backward=max((each.after_backward for each in members), default=0.0),
    )
