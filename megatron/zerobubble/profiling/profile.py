"""Combine the measurements of a pipeline's ranks into the planner's `CostModel`.

The typical time of each stage's F, B and W on every rank gives one `CostModel` (`combine`). A stage that several ranks hold
(tensor or data parallelism) takes as long as its slowest member. This module does not import torch: a recording can be read
without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import CostTable
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.ir import OpKind, Placement

Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Activation memory of one microbatch of a stage on one rank, in bytes."""

    activation: float
    """After F."""
    after_backward: float
    """After B, until W."""


@dataclass(frozen=True, kw_only=True)
class StageSlices:
    """What was measured of the slices of a microbatch, of a stage on one rank."""

    times_ms: Mapping[OpKind, tuple[float, ...]]
    """Kind -> milliseconds of each slice."""
    memory: tuple[StageMemory, ...] = ()
    """Activation memory of each slice, without keys and values; empty if memory was not measured."""
    key_bytes: int = 0
    """Of the keys and values of a microbatch, which all its slices share, and again of their gradients."""


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
    all_to_all_ms: Mapping[tuple[int, OpKind], float] = field(default_factory=dict)
    """(stage, kind) -> the milliseconds of a pass in which its tokens travel to or from experts, and nothing runs beside that;
    passes without such are missing."""
    peak_bytes: int = 0
    """Peak of the activation memory held after an op, in the iteration whose memory was measured."""
    workspace_bytes: int = 0
    """Peak of the memory in use during an op, above what is held around it. In any order of ops the memory in use is at most the
    peak after an op plus this, provided that no more is in flight."""
    most_bytes: int = 0
    """Peak of the memory in use at any moment of the order that ran: at most the sum of the other two."""
    timed: Mapping[tuple[int, OpKind], tuple[ByLength[float], ...]] = field(default_factory=dict)
    """(stage, kind) -> milliseconds of its passes by length, where microbatches have lengths of their own."""
    slices: Mapping[int, StageSlices] = field(default_factory=dict)
    """Stage -> its slices, where microbatches are cut; the times and memory above are then those of whole microbatches, their
    keys and values included."""
    measured: Mapping[int, tuple[ByLength[StageMemory], ...]] = field(default_factory=dict)
    """Stage -> its microbatches' memory by length, likewise."""


def combine(
    ranks: Sequence[RankProfile], placement: Placement, links: Mapping[tuple[int, int], LinkTime] | None = None
) -> CostModel:
    """Combine the measurements of all ranks into the costs of their pipeline.

    Args:
        ranks: the profile of every rank that holds a stage, in any order; several for a stage that several ranks hold.
        placement: stage -> rank.
        links: (sender, receiver) -> a message. Links that are alike cost their mean.

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
    whole = CostModel.of_lists(
        {
            "forward_ms": of(OpKind.F),
            "backward_ms": of(OpKind.B, OpKind.BW),
            "wgrad_ms": of(OpKind.W, optional=True),
            "activation": activation,
            "activation_after_backward": after_backward,
        }
    )
    costs = replace(whole, table=_slice_costs(ranks, placement) or whole.table)
    return replace(costs, all_to_all=_all_to_all(ranks, whole)).with_links(links or {}, placement.num_ranks)


def _all_to_all(ranks: Sequence[RankProfile], costs: CostModel) -> tuple[float, float]:
    """The shares of F and of B, over all stages, in which tokens travel to or from experts.

    Of the ranks that hold a stage the one with the shortest counts: the others wait for it in their all-to-alls, for what it
    still computes. The times of passes are those of the slowest rank.
    """
    shares = []
    for times, kinds in ((costs.forward_ms, (OpKind.F,)), (costs.backward_ms, (OpKind.B, OpKind.BW))):
        found: dict[int, float] = {}
        for rank in ranks:
            for (stage, kind), elapsed in rank.all_to_all_ms.items():
                if kind in kinds:
                    found[stage] = min(elapsed, found.get(stage, elapsed))
        shares.append(min(1.0, math.fsum(found.values()) / math.fsum(times)) if found and any(times) else 0.0)
    return shares[0], shares[1]


def slices_of(times_ms: Mapping[tuple[int, OpKind, int], float]) -> dict[int, StageSlices]:
    """The times of every stage's slices.

    Args:
        times_ms: (stage, kind, slice) -> milliseconds.
    """
    rows: dict[int, dict[OpKind, list[float]]] = {}
    for (stage, kind, _), elapsed in sorted(times_ms.items(), key=lambda item: (item[0][0], item[0][2])):
        rows.setdefault(stage, {}).setdefault(kind, []).append(elapsed)
    return {stage: StageSlices(times_ms={kind: tuple(row) for kind, row in kinds.items()}) for stage, kinds in rows.items()}


def _slice_costs(ranks: Sequence[RankProfile], placement: Placement) -> CostTable | None:
    """The costs of every slice, memory in units as in `combine`; None where microbatches are not cut."""
    members = [[rank.slices[stage] for rank in ranks if stage in rank.slices] for stage in range(placement.num_stages)]
    if not all(members):
        return None
    unit = unit_bytes(ranks, placement)
    num_slices = len(members[0][0].times_ms[OpKind.F])

    def slowest(*kinds: OpKind) -> tuple[tuple[float, ...], ...]:
        rows = [[each.times_ms[kind] for each in stage for kind in kinds if kind in each.times_ms] for stage in members]
        return tuple(tuple(map(max, zip(*row, strict=True))) if row else (0.0,) * num_slices for row in rows)

    def largest(part: Callable[[StageMemory], float]) -> tuple[tuple[float, ...], ...]:
        rows = [zip(*(each.memory for each in stage if each.memory), strict=True) for stage in members]
        return tuple(tuple(max(map(part, each)) / unit for each in row) for row in rows)

    equal = tuple((1.0 / len(placement.rank_to_stages[rank]) / num_slices,) * num_slices for rank in placement.stage_to_rank)
    keys = tuple((max(each.key_bytes for each in stage) / unit,) for stage in members) if unit > 0 else ()
    return CostTable(
        slices=num_slices,
        forward_ms=slowest(OpKind.F),
        backward_ms=slowest(OpKind.B, OpKind.BW),
        wgrad_ms=slowest(OpKind.W),
        activation=largest(lambda memory: memory.activation) if unit > 0 else equal,
        activation_after_backward=largest(lambda memory: memory.after_backward) if unit > 0 else equal,
        keys=keys,
        key_gradients=keys,
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
    return replace(costs, table=costs.table.scaled(scales))


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
