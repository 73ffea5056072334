"""The search core: against the simulator, against itself, and what it found when a second implementation found the same."""

from __future__ import annotations

import hashlib
import itertools
import math
import runpy
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS, CostTable
from megatron.zerobubble.plan.costs.lengths_and_links import LengthsAndLinks
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.search import core as core_module
from megatron.zerobubble.plan.search.core import Core, library
from megatron.zerobubble.plan.search.interface import Policy, Problem
from megatron.zerobubble.plan.search.orders import order_of, plan_of_order, without_wgrad
from megatron.zerobubble.plan.simulate import Simulation, memory_after_ops, peak_memory, simulate
from megatron.zerobubble.plan.validate import validate

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "the planner's search core: times and memory are those of the simulator on random orders, with links, slices, unequal "
    "microbatches and unequal slices; a part of an order scores as the whole; a seed gives the same orders on every machine",
    "works",
)

ROOT = Path(__file__).parents[3]
KINDS = ("equal", "links", "slices", "unequal", "unequal slices")


def instance(kind: str, random: Random) -> tuple[Placement, int, CostModel]:
    p, m = random.randint(1, 4), random.randint(1, 6)
    placement = random.choice([Placement.linear(p), Placement.v(p), Placement.loop(p, 2)])
    stages = range(placement.num_stages)
    latency = tuple(tuple(random.uniform(0, 3) for _ in range(p)) for _ in range(p))
    speed = tuple(tuple(random.uniform(0.5e-6, 5e-6) for _ in range(p)) for _ in range(p))
    links = Links(latency_ms=latency, gigabytes_per_s=speed, message_bytes=(2,))
    if kind == "unequal":
        rows = {name: tuple(tuple(random.uniform(0.01, 5) for _ in range(m)) for _ in stages) for name in COST_LISTS}
        links = replace(links, message_bytes=tuple(random.randint(0, 3) for _ in range(m)))
        return placement, m, CostModel.of(CostTable.of_microbatches(rows), comm_ms=0.2, links=random.choice([None, links]))
    lists = {name: tuple(random.uniform(0.01, 5) for _ in stages) for name in COST_LISTS}
    costs = replace(CostModel.of_lists(lists, comm_ms=random.uniform(0, 3)), links=links if kind == "links" else None)
    if kind == "equal" or kind == "links":
        return placement, m, costs
    tokens = [random.randint(50, 4000) for _ in range(m)] if kind == "unequal slices" else []
    lengths = LengthsAndLinks(tuple(tokens), 0.3, sequence_length=4000, key_share=random.choice([0.0, 0.2]))
    return placement, m, lengths.applied(costs, random.randint(2, 4))


def some_plan(placement: Placement, slices: Sequence[int], random: Random) -> Plan:
    """A plan in which any op may be the next one whose inputs are there."""
    last, ends = placement.num_stages - 1, list(itertools.accumulate(slices))
    forward_of = [index for n, end in zip(slices, ends, strict=True) for index in range(end - 1, end - n - 1, -1)]
    done, rows = [[0, 0, 0] for _ in range(last + 1)], [bytearray() for _ in placement.rank_to_stages]
    while any(w < len(forward_of) for _, _, w in done):
        ready = []
        for stage, (f, b, w) in enumerate(done):
            if f < len(forward_of) and (stage == 0 or done[stage - 1][0] > f):
                ready.append((stage, 0))
            if b < len(forward_of) and f > forward_of[b] and (stage == last or done[stage + 1][1] > b):
                ready.append((stage, 1))
            if w < b:
                ready.append((stage, 2))
        stage, kind = random.choice(ready)
        done[stage][kind] += 1
        rows[placement.stage_to_rank[stage]].append(3 * placement.chunk_of(stage) + kind)
    return plan_of_order(list(map(bytes, rows)), "some", placement, slices, fused=False)


def with_wgrad_behind(plan: Plan) -> Plan:
    """The plan with every W directly behind its B, which needs the least memory."""
    rows = [
        bytes(itertools.chain(*((code, code + 1) if code % 3 == 1 else (code,) for code in row)))
        for row in without_wgrad(order_of(plan))
    ]
    filled = plan_of_order(rows, plan.schedule, plan.placement, plan.passes.slices, fused=False)
    return replace(filled, assignment=plan.assignment)


def scores(simulation: Simulation, is_makespan: bool) -> tuple[float, float]:
    """What the core has to say about a plan within its memory limit."""
    mean = math.fsum(row[-1].end_ms - row[0].start_ms for row in simulation.rows) / len(simulation.rows)
    objective = simulation.makespan_ms if is_makespan else simulation.span_ms
    return objective + (0.1 if is_makespan else 0.3) * mean, objective


def _core(placement: Placement, m: int, costs: CostModel, is_makespan: bool, limit: float, excess_ms: float = 0.0) -> Core:
    return Core(Problem.of(placement, m, costs, limit=limit, is_makespan=is_makespan, excess_ms=excess_ms))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_makespan", [False, True])
def test_times_and_memory_are_those_of_the_simulator(kind: str, is_makespan: bool) -> None:
    random, full = Random(f"{kind} {is_makespan}"), 0
    for _ in range(30):
        placement, m, costs = instance(kind, random)
        costs = costs.reserved
        is_unequal = kind.startswith("unequal")
        assignment = random.sample(range(m), m) if is_unequal else list(range(m))
        counts = [costs.table.of(i).num_slices for i in assignment]
        plan = replace(some_plan(placement, counts, random), assignment=tuple(assignment) if is_unequal else ())
        order, least, unit = order_of(plan), with_wgrad_behind(plan), min(placement.num_ranks, m)
        smallest, most = (unit * max(peak_memory(each, costs)) for each in (least, plan))

        core = partial(_core, placement, m, costs, is_makespan)
        waits = [math.inf] * placement.num_ranks
        assert core(most).evaluate_assigned(order, waits, assignment) == pytest.approx(
            scores(simulate(plan, costs), is_makespan), rel=1e-12
        )
        # Ws move where the memory or a bubble takes them, and all else stays.
        limit, patience = random.choice([smallest, most, 1e9]), random.choice([0.0, 0.7, math.inf])
        rows = random.choice([order, without_wgrad(order)])
        tight, waits = core(limit), [patience] * placement.num_ranks
        filled = tight.fill_assigned(rows, waits, assignment)
        found = replace(plan_of_order(filled, "filled", placement, counts, fused=False), assignment=plan.assignment)
        validate(found)
        assert without_wgrad(filled) == without_wgrad(order)
        assert unit * max(peak_memory(found, costs)) <= limit * (1 + 1e-9)
        expected = pytest.approx(scores(simulate(found, costs), is_makespan), rel=1e-12)
        assert (
            tight.evaluate_assigned(rows, waits, assignment)
            == tight.evaluate_assigned(filled, [math.inf] * len(filled), assignment)
            == expected
        )
        # What does not fit with every W done is charged.
        held = [
            memory
            for row in least.ops
            for op, memory in zip(row, memory_after_ops(row, costs.of_plan(least)), strict=True)
            if op.kind.value == "F"
        ]
        excess = math.fsum(max(0.0, each - smallest / 2) for each in held)
        if any(key for (key, *_) in costs.table.keys):
            continue  # these are charged with the first F
        full += excess > 0
        assert core(smallest / 2).fill_assigned(order, waits, assignment) == []
        low, high = (core(smallest / 2, charge).evaluate_assigned(order, waits, assignment) for charge in (1.0, 3.0))
        assert low[1] == high[1] == math.inf
        assert high[0] - low[0] == pytest.approx(2 * excess, rel=1e-9)
    assert full > 10


SIZES = (
    (Placement.linear(3), 6, 1, 0.0, False, 9.0),
    (Placement.v(2), 5, 1, 0.0, True, 3.5),
    (Placement.v(4), 9, 1, 0.0, True, 2.2),
    (Placement.loop(2, 3), 4, 3, 0.0, False, 2.0),
    (Placement.linear(3), (1,) * 6, 1, 5.0, True, 3.0),
    (Placement.v(2), (2, 1, 3, 1, 2), 3, 5.0, True, 4.0),
    (Placement.linear(4), 60, 1, 0.0, True, 5.0),
    (Placement.v(3), (1, 2, 4) * 10, 4, 5.0, False, 3.0),
)
"""(placement, m or the slices of unequal microbatches, most slices, excess_ms, is_makespan, limit)"""


def given_problem(case: int) -> tuple[Problem, Random]:
    """A problem of one of these sizes whose numbers are all given."""
    placement, m, n, excess_ms, is_makespan, limit = SIZES[case]
    random, counts = Random(case), () if isinstance(m, int) else m
    size = placement.num_stages * (sum(counts) or n)
    activation = [random.choice([0.75, 1.0, 1.25]) / placement.num_chunks / n for _ in range(size)]
    links = [random.uniform(0, 1) for _ in range(2 * size)] if case % 2 else []
    return Problem(
        len(counts) or int(m),
        placement.stage_to_rank,
        [random.uniform(0.1, 3) for _ in range(3 * size)],
        0.3,
        activation,
        [random.choice([0.25, 0.5]) * each for each in activation],
        limit,
        is_makespan,
        links,
        [each / 2 for each in links],
        excess_ms,
        n,
        counts if n > 1 else (),
    ), random


def found(case: int) -> str:
    """A digest of what the core builds, fills and anneals; no time is in it."""
    problem, random = given_problem(case)
    own, ranks, stages = Core(problem), max(problem.stage_to_rank) + 1, len(problem.stage_to_rank)
    digest = hashlib.sha256()
    order = order_of(some_plan(SIZES[case][0], problem.counts or [problem.num_slices] * problem.num_microbatches, random))
    starts = [order, without_wgrad(order)]
    for _ in range(0 if problem.excess_ms else 12):
        durations = [random.uniform(0.1, 3) for _ in range(3 * stages)]
        offsets = [random.uniform(0, 9) for _ in range(3 * stages)]
        caps = [random.choice([math.inf, 2.0, 4.0]) * problem.num_slices for _ in range(stages)]
        policy = Policy(durations, 0.2, offsets, caps, random.uniform(1, 4), 1.0, random.choice([0.0, 0.4]), 9.0, 0.6, 3.0)
        if order := own.decode(policy):
            starts.append(without_wgrad(order))
    for seed, rows in enumerate(starts):
        waits = [0.5 if rows == without_wgrad(rows) else math.inf] * ranks
        slots = list(range(problem.num_microbatches))
        found = [own.fill(rows, waits), own.anneal(rows, waits, seed, 3e4, 2.0)]
        assigned = own.assign(rows, waits, slots, seed, 3e4, 2.0, seed == 1) if problem.excess_ms else None
        digest.update(repr((found, assigned, own.work)).encode())
    return digest.hexdigest()[:16]


FOUND = (
    "8269f6efd8df587f",
    "4ae0b743b8d3c529",
    "d0e769fb9648b310",
    "31875d6761e0ee88",
    "e16644b9dadcae77",
    "6a49a062e4b7b979",
    "5550aff808f59661",
    "f1e9940da1f80fc2",
)
"""What the core found for each size when a second implementation in Python found the same."""


@pytest.mark.parametrize("case", range(len(SIZES)))
def test_a_seed_gives_the_same_orders_on_every_machine(case: int) -> None:
    assert found(case) == FOUND[case]


CHECKED = """
import sys
from pathlib import Path
from megatron.zerobubble.plan.search import core
core.BUILT = Path(sys.argv[1])
from tests.plan.search.test_core import FOUND, found
assert [found(case) for case in range(len(FOUND))] == list(FOUND)
"""


@pytest.fixture(scope="module")
def checked_core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The core with its assertions: a move's score is that of a run of the whole order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **_: None)
        build = runpy.run_path(str(ROOT / "setup.py"))
    target = tmp_path_factory.mktemp("core") / "core.so"
    flags = [flag for flag in build["FLAGS"] if flag not in ("-DNDEBUG", "-O3")]
    subprocess.run([*build["COMPILER"], "-O1", *flags, str(ROOT / build["FOLDER"] / "core.cpp"), "-o", str(target)], check=True)
    return target


def test_runs_of_a_part_of_an_order_score_as_those_of_the_whole(checked_core: Path) -> None:
    command = [sys.executable, "-c", CHECKED, str(checked_core)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_without_a_core_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "BUILT", Path("/nowhere/_core.native.so"))
    library.cache_clear()
    with pytest.raises(ConfigError, match=r"^the compiled search core cannot be loaded \(/nowhere.*install this") as caught:
        build_plan("v-half", num_ranks=2, num_microbatches=3)
    assert "\n" not in str(caught.value)
    assert build_plan("zbv", num_ranks=2, num_microbatches=4).num_microbatches == 4
    library.cache_clear()
