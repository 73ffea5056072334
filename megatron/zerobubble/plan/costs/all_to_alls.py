"""All-to-alls of experts inside F and B: how long they take, and how much of them a pair hides."""

from __future__ import annotations

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
