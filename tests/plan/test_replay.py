"""The simulator against another one, with equal and with unequal microbatches and links.

`replay` knows the rules of docs/glossary.md and the plan file, and nothing of the package.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.costs.microbatch_costs import COST_LISTS, MicrobatchCosts
from megatron.zerobubble.plan.ir import Op, OpKind, Placement, Plan
from megatron.zerobubble.plan.simulate import simulate

Cell = tuple[int, str, int]
"""Stage, kind, and slot of an op."""


def replay(rows: list[list[Cell]], rank_of: list[int], assignment: list[int], costs: dict[str, Any]) -> dict[str, Any]:
    """Times, idle share and peak memory of a plan, by advancing whichever rank can run its next op."""
    of, links = costs["microbatches"], costs["links"]
    end: dict[Cell, float] = {}
    free: dict[tuple[int, int], float] = {}
    clock, begin, busy, held, peak = ([0.0] * len(rows) for _ in range(5))
    todo = [list(row) for row in rows]

    def arrival(now: float, a: int, b: int, batch: int) -> float:
        """Of what rank a sends to b, behind what it has sent before."""
        busy = links["message_bytes"][batch] / 1e6 / links["gigabytes_per_s"][a][b]
        free[a, b] = max(now, free.get((a, b), 0.0)) + busy
        return free[a, b] + links["latency_ms"][a][b]

    while any(todo):
        rank, (stage, kind, slot) = next((r, row[0]) for r, row in enumerate(todo) if row and _ready(row[0], end, len(rank_of)))
        batch, ready = assignment[slot], [clock[rank]]
        if kind == "F" and stage:
            ready.append(end[stage - 1, "F", slot])
        if "B" in kind and stage + 1 < len(rank_of):
            ready.append(end[stage + 1, "B", slot])
        f, b, w, whole, kept = (of[name][stage][batch] for name in COST_LISTS)
        takes = {"F": f, "B": b, "W": w, "BW": b + w}[kind]
        start = max(ready)
        clock[rank] = end[stage, kind[0], slot] = start + takes
        to = stage + (1 if kind == "F" else -1)
        if kind != "W" and 0 <= to < len(rank_of) and rank_of[to] != rank:
            end[stage, kind[0], slot] = arrival(clock[rank], rank, rank_of[to], batch)
        busy[rank] += takes
        begin[rank] = start if len(todo[rank]) == len(rows[rank]) else begin[rank]
        held[rank] += {"F": whole, "B": kept - whole, "W": -kept, "BW": -whole}[kind]
        peak[rank] = max(peak[rank], held[rank])
        del todo[rank][0]
    span, makespan = max(b - a for a, b in zip(begin, clock, strict=True)), max(clock) - min(begin)
    unit = min(len(rows), len(assignment))
    return {
        "span": span,
        "makespan": makespan,
        "bubble": (span - max(busy)) / span,
        "idle": 1 - sum(busy) / (len(rows) * makespan),
        "peak": [each / unit for each in peak],
    }


def _ready(cell: Cell, done: Any, num_stages: int) -> bool:
    stage, kind, slot = cell
    if kind == "F":
        return stage == 0 or (stage - 1, "F", slot) in done
    if kind == "W":
        return (stage, "B", slot) in done
    return (stage, "F", slot) in done and (stage + 1 == num_stages or (stage + 1, "B", slot) in done)


def some_costs(random: Random, placement: Placement, m: int) -> CostModel:
    """Costs of every microbatch and link, often with zeros, with equal memory, or with more memory for W than before B."""

    def value(least: float, most: float) -> float:
        return 0.0 if random.random() < 0.1 else random.uniform(least, most)

    shape = [range(m)] * placement.num_stages
    lists = {name: [[value(0.1, 4) for _ in row] for row in shape] for name in COST_LISTS[:3]}
    if random.random() < 0.5:
        factor = random.choice([0.0, 0.4, 1.0, 1.5])
        lists["activation"] = [[value(0.1, 3) for _ in row] for row in shape]
        lists["activation_after_backward"] = [[factor * each for each in row] for row in lists["activation"]]
    else:
        kept = random.choice([0.0, 0.3, 0.5, 0.8])
        lists |= {name: [[each for _ in row] for row in shape] for name, each in zip(COST_LISTS[3:], (0.5, kept), strict=True)}
    p = placement.num_ranks
    links = Links(
        latency_ms=tuple(tuple(value(0, 3) for _ in range(p)) for _ in range(p)),
        gigabytes_per_s=tuple(tuple(random.uniform(0.5, 9) for _ in range(p)) for _ in range(p)),
        message_bytes=tuple(value(0, 4e6) for _ in range(m)),
    )
    lists["forward_ms"][0] = [2.0 + 0.1 * index for index in range(m)]  # never all equal
    rows = {name: tuple(map(tuple, given)) for name, given in lists.items()}
    return CostModel.of_microbatches(MicrobatchCosts(**rows), links=links)


def equal_costs(random: Random, placement: Placement) -> CostModel:
    """Costs of stages that differ, of microbatches and links that do not."""
    *lists, activation = ([random.uniform(0.0, 4.0) for _ in range(placement.num_stages)] for _ in range(4))
    kept = [random.uniform(0.0, 3.0) * each for each in activation]
    stages = map(tuple, (*lists, activation, kept))
    return CostModel(**dict(zip(COST_LISTS, stages, strict=True)), comm_ms=random.uniform(0.0, 3.0))


def for_replay(costs: CostModel, num_ranks: int, m: int) -> dict[str, Any]:
    """The costs of every microbatch and link."""
    body = costs.to_json()
    alike = {"latency_ms": [[costs.comm_ms] * num_ranks] * num_ranks, "gigabytes_per_s": [[1.0] * num_ranks] * num_ranks}
    tables = {name: [[value] * m for value in getattr(costs, name)] for name in COST_LISTS}
    return {"links": alike | {"message_bytes": [0.0] * m}, "microbatches": tables} | body


def some_rows(random: Random, placement: Placement, m: int, kinds: tuple[str, ...]) -> list[list[Cell]]:
    """Any order that can run: ops of a stage and kind ascend, nothing else is wanted."""
    left = {(stage, kind): 0 for stage in range(placement.num_stages) for kind in kinds}
    rows: list[list[Cell]] = [[] for _ in range(placement.num_ranks)]
    done: set[Cell] = set()
    while left:
        (stage, kind), slot = random.choice(
            [item for item in left.items() if _ready((*item[0], item[1]), done, placement.num_stages)]
        )
        rows[placement.stage_to_rank[stage]].append((stage, kind, slot))
        done.add((stage, kind[0], slot))
        left[stage, kind] += 1
        if left[stage, kind] == m:
            del left[stage, kind]
    return rows


def plan_of(rows: list[list[Cell]], placement: Placement, m: int, assignment: tuple[int, ...]) -> Plan:
    ops = tuple(tuple(Op(stage, OpKind(kind), slot) for stage, kind, slot in row) for row in rows)
    return Plan("any", placement, m, ops, assignment)


@pytest.mark.parametrize("kinds", [("F", "B", "W"), ("F", "BW")], ids="-".join)
@pytest.mark.parametrize("is_equal", [False, True], ids=["unequal", "equal"])
@pytest.mark.parametrize("seed", range(40))
def test_the_simulator_has_the_times_and_memory_of_a_replay(seed: int, is_equal: bool, kinds: tuple[str, ...]) -> None:
    random = Random(seed)
    p, m = random.randint(1, 4), random.randint(2, 6)
    choices = [Placement.linear(p), Placement.v(p), Placement.loop(p, 2), Placement.w(p)]
    placement = random.choice(choices)
    costs = equal_costs(random, placement) if is_equal else some_costs(random, placement, m)
    rows = some_rows(random, placement, m, kinds)
    assignment = list(range(m)) if is_equal else random.sample(range(m), m)
    plan = plan_of(rows, placement, m, tuple(assignment))
    text = plan.to_json(costs=costs.to_json())
    expected = replay(rows, list(placement.stage_to_rank), assignment, for_replay(costs, p, m))
    found = simulate(Plan.from_json(text), CostModel.from_json(json.loads(text)["costs"]))
    assert found.span_ms == pytest.approx(expected["span"])
    assert found.makespan_ms == pytest.approx(expected["makespan"])
    assert found.bubble_rate == pytest.approx(expected["bubble"], abs=1e-9)
    assert found.idle_share == pytest.approx(expected["idle"], abs=1e-9)
    assert list(found.peak_memory) == pytest.approx(expected["peak"])


def test_the_slowest_microbatch_has_to_go_all_the_way_and_back() -> None:
    placement, slow = Placement.linear(2), 10.0
    rows = dict.fromkeys(COST_LISTS, ((1.0, slow),) * 2)
    costs = CostModel.of_microbatches(MicrobatchCosts(**rows), comm_ms=0.5)
    bound = lower_bound(placement, 2, costs)
    assert bound.derivation is not None
    assert bound.derivation.name == "one microbatch"
    assert bound.span_ms == pytest.approx(4 * slow + 2 * 0.5 + slow)  # F and B on both stages, two messages, W of stage 0
