"""All-to-alls of experts inside F and B: how long they take, and how much of them a pair hides, or a W that waits.

Beside the all-to-alls of an op that is in no pair its rank computes what it can of the W that waits longest (`Filling`), as the
store of a run does (ADR 64). The W is shorter by it when its turn comes. What runs where follows from the order of ops alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS
from megatron.zerobubble.plan.ir import Launch, Op, OpKind


def all_to_all_ms(costs: CostModel, op: Op) -> float:
    """Time in an op in which tokens travel to their experts and back, in milliseconds."""
    if op.kind is OpKind.W or not any(costs.all_to_all):
        return 0.0
    is_forward = op.kind is OpKind.F
    kind = OpKind.F if is_forward else OpKind.B
    return costs.all_to_all[not is_forward] * costs.duration_ms(op.stage, kind, op.microbatch, op.slice)


def launch_ms(costs: CostModel, launch: Launch) -> float:
    """Time of an op, or of a pair: a rank computes for one op at a time and communicates for one, and each takes at least as long
    as alone. It is what many layers come close to, whose parts alternate."""
    own = [costs.duration_ms(*op) for op in launch]
    whole, communicates = sum(own), sum(all_to_all_ms(costs, op) for op in launch)
    return whole if len(own) == 1 else max(*own, communicates, whole - communicates)


def exposed_ms(costs: CostModel, launch: Launch) -> float:
    """The part of its time in which a rank communicates and does not compute."""
    communicates = sum(all_to_all_ms(costs, op) for op in launch)
    if len(launch) == 1 or not communicates:
        return communicates
    return max(0.0, launch_ms(costs, launch) - (sum(costs.duration_ms(*op) for op in launch) - communicates))


class Filling:
    """Computes Ws of one rank beside its all-to-alls.

    Args:
        costs: those of the plan (`CostModel.of_plan`).
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._is_possible = costs.wgrad_beside > 0 and any(costs.all_to_all)
        self._left: dict[Op, float] = {}
        """A W that waits -> time of what can still be computed of it, the oldest first."""
        self._done: dict[Op, float] = {}
        self._idle: tuple[Op | None, float] = None, 0.0
        """The W of the B that has just run, and the time of its all-to-alls in which nothing older was computed."""

    def time_ms(self, launch: Launch) -> float:
        """Time that an op, or a pair, takes if the rank runs it next."""
        whole = launch_ms(self._costs, launch)
        if not self._is_possible or launch[0].kind is not OpKind.W:
            return whole
        own, idle = self._idle
        beside = min(idle, self._left.get(own, 0.0)) if own == launch[0] else 0.0
        return max(0.0, whole - self._done.get(launch[0], 0.0) - beside)

    def run(self, launch: Launch) -> float:
        """Run an op, or a pair; returns its time."""
        time = self.time_ms(launch)
        if not self._is_possible:
            return time
        op, travels = launch[0], 0.0
        if op.kind is OpKind.W:
            self._left.pop(op, None)
        elif len(launch) == 1 and op.kind is not OpKind.BW:  # which has a W of its own
            travels = all_to_all_ms(self._costs, op)
            while travels > 0 and self._left:
                wgrad, left = next(iter(self._left.items()))
                beside = min(travels, left)
                travels -= beside
                self._done[wgrad] = self._done.get(wgrad, 0.0) + beside
                self._left[wgrad] -= beside
                if beside == left:
                    del self._left[wgrad]
        self._idle = (op._replace(kind=OpKind.W) if op.kind is OpKind.B else None), travels
        for each in launch:
            if each.kind is OpKind.B:
                wgrad = each._replace(kind=OpKind.W)
                self._left[wgrad] = self._costs.wgrad_beside * self._costs.duration_ms(*wgrad)
        return time


def wgrad_times_ms(costs: CostModel, rows: Sequence[Sequence[Launch]]) -> dict[Op, float]:
    """The time of each W that is shorter, because a part of it is computed beside all-to-alls.

    Args:
        costs: those of the plan (`CostModel.of_plan`).
        rows: per rank what it runs, one after the other.
    """
    if not costs.wgrad_beside or not any(costs.all_to_all):
        return {}
    fillings = [(Filling(costs), row) for row in rows]
    times = ((launch[0], filling.run(launch)) for filling, row in fillings for launch in row)
    return {op: time for op, time in times if op.kind is OpKind.W}


def without_overlap(costs: CostModel) -> tuple[CostModel, ...]:
    """Costs of single ops that no order of pairs is faster than: those of computation alone, and those of communication."""
    if not any(costs.all_to_all):
        return (costs,)
    found = []
    for shares, wgrad in (([1 - share for share in costs.all_to_all], 1.0), (costs.all_to_all, 0.0)):
        rows = {
            name: tuple(tuple(factor * value for value in row) for row in getattr(costs.table, name))
            for name, factor in zip(COST_LISTS[:3], (*shares, wgrad), strict=True)
        }
        found.append(replace(costs, table=replace(costs.table, **rows), all_to_all=(0.0, 0.0)))  # type: ignore[arg-type]
    return tuple(found)
