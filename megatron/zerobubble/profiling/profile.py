"""The costs that follow from what the ranks of a pipeline measured.

From the typical time of each stage's F, B and W on every rank follows one `CostModel` (`combine`). A stage that several ranks
hold (tensor, data parallelism) takes as long as its slowest member. Nothing here needs torch: a recording can be read without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import OpKind, Placement


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What one microbatch of a stage holds on one rank, in bytes."""

    activation: float
    """After F."""
    after_backward: float
    """After B, until W."""


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """What one rank measured."""

    times_ms: Mapping[tuple[int, OpKind], float]
    """(stage, kind) -> milliseconds."""
    memory: Mapping[int, StageMemory]
    """Stage -> what a microbatch of it holds; empty where no memory was measured."""
    peak_bytes: int = 0
    """Most activation memory that was held after any op of the iteration whose memory was measured."""
    workspace_bytes: int = 0
    """Most that there was while an op ran on top of what was held around it. Whatever the order of ops, no more is held at once
    than the most that is held after an op plus this, provided that no more is in flight."""
    most_bytes: int = 0
    """Most that was held at any moment of the order that ran: at most the sum of the two."""


def combine(ranks: Sequence[RankProfile], placement: Placement, *, link_ms: Sequence[float] = ()) -> CostModel:
    """The costs of a pipeline from what its ranks measured.

    Args:
        ranks: of every rank that holds a stage, in any order; several for a stage that several ranks hold.
        placement: stage -> rank.
        link_ms: time of each link, in milliseconds; their mean is the plan's `comm_ms`.

    Raises:
        ExecutionError: nobody timed a stage's F, or its B.
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
        comm_ms=fmean(link_ms) if link_ms else 0.0,
        activation=activation,
        activation_after_backward=after_backward,
    )


def unit_bytes(ranks: Sequence[RankProfile], placement: Placement) -> float:
    """Bytes of one unit of a plan's memory: a microbatch on a rank with an equal part of the model. 0: not measured."""
    return math.fsum(_largest(ranks, stage).activation for stage in range(placement.num_stages)) / placement.num_ranks


def costs_within(costs: CostModel, placement: Placement, num_microbatches: int, rooms: Sequence[float]) -> CostModel:
    """The same costs, with memory in units in which every rank's room is 1.

    A plan that keeps the memory limit 1 under these costs keeps every rank within its own room.

    Args:
        costs: activations in units of one microbatch on a rank with an equal part of the model.
        placement: stage -> rank.
        num_microbatches: m, which a plan's memory is relative to where it is less than p.
        rooms: per rank, how many such units fit; above 0.
    """
    scales = [min(placement.num_ranks, num_microbatches) / rooms[rank] for rank in placement.stage_to_rank]
    return replace(
        costs,
        activation=tuple(value * scale for value, scale in zip(costs.activation, scales, strict=True)),
        activation_after_backward=tuple(
            value * scale for value, scale in zip(costs.activation_after_backward, scales, strict=True)
        ),
    )


def _shares(ranks: Sequence[RankProfile], placement: Placement) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What stages hold after F and after B, in units; where it was not measured, equal parts, held until W."""
    unit = unit_bytes(ranks, placement)
    if unit <= 0:
        equal = tuple(1.0 / len(placement.rank_to_stages[rank]) for rank in placement.stage_to_rank)
        return equal, equal
    held = [_largest(ranks, stage) for stage in range(placement.num_stages)]
    return tuple(each.activation / unit for each in held), tuple(each.after_backward / unit for each in held)


def _largest(ranks: Sequence[RankProfile], stage: int) -> StageMemory:
    """What the members of a stage hold at most."""
    members = [rank.memory[stage] for rank in ranks if stage in rank.memory]
    return StageMemory(
        activation=max((each.activation for each in members), default=0.0),
        after_backward=max((each.after_backward for each in members), default=0.0),
    )
