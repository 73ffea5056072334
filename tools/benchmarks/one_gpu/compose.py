"""The pipeline's iteration, composed on the CPU from what the ranks took alone.

The timeline follows from the plan's dependencies. An op takes a measured time of its stage's kind and the gap that its rank left
before it, drawn anew for every composition. Ranks that were not run take the times of an inner one that was. Messages of our
schedules and of interleaved 1F1B go beside the passes, which are slower, by `SLOWER`, as long as a transfer is resident on their
rank: a receive from its post, a send from the end of its op, both until the message is there. megatron-core's 1F1B
exchanges messages between two passes: both ends must have come, and go on when both messages are over.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from megatron.zerobubble.plan.communication import place_communication
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.dependencies import execution_order, requirements, result_of
from megatron.zerobubble.plan.ir import Op, OpKind, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.registry import build_plan, schedule_info
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from tools.benchmarks.one_gpu.ranks import CONTENDERS, Contender
from tools.benchmarks.reports import Row

__all__ = ["LINKS_MS", "Composition", "Times", "compose", "exchanging", "timeline"]

Draws = NDArray[numpy.float64]
"""A number of milliseconds for each composition."""
Span = tuple[Draws, Draws]

LINKS_MS = {"free": 0.0, "NVLink": 0.096, "InfiniBand": 0.75}
"""Of a message between two ranks, 33.5 MB: at 350 GB/s on NVLink, at 45 GB/s on InfiniBand."""
CTAS = 4
"""Of a transfer, for all contenders: what our links take on NVLink."""
_B = {1: 1.126, 4: 1.216, 8: 1.232, 16: 1.254, 32: 1.388}
SLOWER: Mapping[OpKind, Mapping[int, float]] = {
    OpKind.F: {1: 1.102, 4: 1.177, 8: 1.184, 16: 1.219, 32: 1.343},
    OpKind.B: _B,
    OpKind.W: {1: 1.100, 4: 1.134, 8: 1.134, 16: 1.218, 32: 1.335},
    OpKind.BW: _B,
}
"""Pass -> CTAs that hold SMs beside it -> its time over that alone, on an H200 (docs/benchmarks/settled.md)."""
_DRAWS = 200


class Times:
    """What a contender's ranks took alone.

    Args:
        runs: the ranks that were run.
        num_ranks: of the pipeline that they belong to.
        alike: whether all ranks take the times of inner ones, as if embedding and head cost nothing.
    """

    def __init__(self, runs: Sequence[Row], num_ranks: int, *, alike: bool) -> None:
        self._ops: dict[tuple[int, int, str], list[float]] = {}
        self._gaps: dict[tuple[int, str], list[float]] = {}
        self._ends = {} if alike else {0: 0, -1: num_ranks - 1}
        self._inner = sorted({run["rank"] for run in runs} - {0, num_ranks - 1})
        for run in runs:
            for iteration in run["iterations"]:
                ops = {tuple(key.split()): taken for key, taken in iteration["ops_ms"].items()}
                stages = sorted({int(stage) for stage, _ in ops})
                for (stage, kind), taken in ops.items():
                    self._ops.setdefault((run["rank"], stages.index(int(stage)), kind), []).extend(taken)
                for kind, taken in iteration["gaps_ms"].items():
                    self._gaps.setdefault((run["rank"], kind), []).extend(taken)

    def _like(self, op: Op, plan: Plan) -> tuple[int, int]:
        """The rank that was run whose times an op takes, and which of its stages."""
        rank = plan.placement.stage_to_rank[op.stage]
        place = plan.placement.rank_to_stages[rank].index(op.stage)
        end = -1 if rank == plan.num_ranks - 1 else rank
        return self._ends[end] if end in self._ends else self._inner[rank % len(self._inner)], place

    def drawn(self, op: Op, plan: Plan, draw: numpy.random.Generator) -> Span:
        """(an op's time, the gap before it): a measured one at random for each composition."""
        rank, place = self._like(op, plan)
        gaps = self._gaps.get((rank, op.kind.name), [0.0])
        return draw.choice(self._ops[rank, place, op.kind.name], _DRAWS), draw.choice(gaps, _DRAWS)

    def median(self, op: Op, plan: Plan) -> float:
        """An op's typical time."""
        return statistics.median(self._ops[(*self._like(op, plan), op.kind.name)])

    def costs(self, plan: Plan, link_ms: float) -> CostModel:
        """Typical times of the stages, for a plan that is made for them."""
        kinds = (OpKind.F, OpKind.B, OpKind.W)
        lists = [[self.median(Op(stage, kind, 0), plan) for stage in range(plan.num_stages)] for kind in kinds]
        forward, backward, wgrad = map(tuple, lists)
        even = CostModel.uniform(plan.placement, comm_ms=link_ms)
        return even.with_lists(forward_ms=forward, backward_ms=backward, wgrad_ms=wgrad)


def timeline(plan: Plan, ms: Mapping[Op, Draws], link_ms: float) -> dict[Op, Span]:
    """Op -> when it starts and ends, as early as its rank and its inputs allow: `plan.simulate.run_in_order` for many draws."""
    ranks, spans = plan.placement.stage_to_rank, dict[Op, Span]()
    free, ready = [numpy.zeros(1)] * plan.num_ranks, dict[Op, Draws]()
    for rank, step in execution_order(plan):
        op, start = plan.ops[rank][step], free[rank]
        for need in requirements(op, plan.num_stages):
            if need.stage != op.stage:
                start = numpy.maximum(start, ready[need] + (link_ms if ranks[need.stage] != rank else 0.0))
        spans[op] = start, start + ms[op]
        free[rank] = ready[result_of(op)] = spans[op][1]
    return spans


def exchanging(plan: Plan, ms: Mapping[Op, Draws], link_ms: float) -> Draws:
    """The makespan of megatron-core's 1F1B, whose ranks exchange messages between two passes.

    Args:
        plan: of 1F1B.
        ms: op -> its time, with the gap before it.
        link_ms: of a message; both of an exchange go at once.
    """
    actions = [_actions(plan, rank) for rank in range(plan.num_ranks)]
    clock, at = [numpy.zeros(1)] * plan.num_ranks, [0] * plan.num_ranks
    come: dict[Any, dict[int, Draws]] = {}
    """Message -> rank -> when it has come to exchange it."""
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(actions):
            while at[rank] < len(row):
                action = row[at[rank]]
                if isinstance(action, Op):
                    clock[rank] = clock[rank] + ms[action]
                else:
                    for message in action:
                        come.setdefault(message, {}).setdefault(rank, clock[rank])
                    if any(len(come[message]) < 2 for message in action):
                        break
                    for message in action:
                        clock[rank] = numpy.maximum(clock[rank], numpy.maximum(*come[message].values()) + link_ms)
                at[rank] += 1
                moved = True
    assert all(done == len(row) for done, row in zip(at, actions, strict=True))
    return _latest(clock)


def _actions(plan: Plan, rank: int) -> list[Any]:
    """The ops of a rank of 1F1B and, between them, tuples of messages (payload, microbatch, lower rank) that are exchanged."""
    row, last = plan.ops[rank], plan.num_ranks - 1
    sends = {OpKind.F: rank < last, OpKind.BW: rank > 0}
    takes = {OpKind.F: rank > 0, OpKind.BW: rank < last}

    def message(op: Op, *, is_sent: bool) -> tuple[str, int, int]:
        is_forward = op.kind is OpKind.F
        return op.kind.name, op.microbatch, rank if is_sent == is_forward else rank - 1

    found: list[Any] = [(message(row[0], is_sent=False),)] if takes[row[0].kind] else []
    for op, after in zip(row, [*row[1:], None], strict=True):
        found.append(op)
        sent = [message(op, is_sent=True)] if sends[op.kind] else []
        taken = [message(after, is_sent=False)] if after is not None and takes[after.kind] else []
        # With one neighbor at once, as in the steady state; in the warm-up and the cool-down one after the other.
        together = after is not None and after.kind is not op.kind
        found += [tuple(sent + taken)] if together and sent and taken else [(each,) for each in sent + taken]
    return found


def compose(ranks: Row) -> Row:
    """Compose every contender's iteration for each size of pipeline and each link.

    Args:
        ranks: what they took.
    """
    draw, size = numpy.random.default_rng(1), ranks["num_ranks"]
    of = {each.name: [run for run in ranks["runs"] if run["contender"] == each.name] for each in CONTENDERS}
    complete = [each for each in CONTENDERS if {0, size - 1} < {run["rank"] for run in of[each.name]}]
    rows = []
    for num_ranks, alike in ((size, False), (size, True), (size // 2, False)):
        times = {each.name: Times(of[each.name], size, alike=alike) for each in complete}
        num_microbatches = ranks["num_microbatches"] // size * num_ranks
        for link, link_ms in LINKS_MS.items():
            setting = Composition(link_ms, SLOWER if link_ms else {}, draw)
            drawn = {}
            for each in complete:
                for name, plan in _plans(each, times[each.name], num_ranks, num_microbatches, link_ms):
                    drawn[name] = setting.makespan(each, plan, times[each.name])
            rows.append({"num_ranks": num_ranks, "alike": alike, "link": link, "contenders": _compared(drawn)})
    return {"draws": _DRAWS, "ctas": CTAS, "links_ms": LINKS_MS, "rows": rows}


def _plans(each: Contender, times: Times, num_ranks: int, num_microbatches: int, link_ms: float) -> list[tuple[str, Plan]]:
    """The contender's plan; and where one is searched for costs, as a training run does after its first iterations, that."""
    sizes: dict[str, Any] = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": each.chunks}
    plan = build_plan(each.plan_name, **sizes)
    if each.is_stock or not schedule_info(each.schedule).is_searched:
        return [(each.name, plan)]
    options = SearchOptions(budget=Effort.FAST.budget, objective=Objective.MAKESPAN)
    again = build_plan(each.schedule, **sizes, costs=times.costs(plan, link_ms), options=options)
    return [(each.name, plan), (f"{each.name}, planned with its times", again)]


@dataclass(frozen=True)
class Composition:
    """The makespans of contenders on one kind of link."""

    link_ms: float
    slower: Mapping[OpKind, Mapping[int, float]]
    """As `SLOWER`; empty: transfers hold nothing."""
    draw: numpy.random.Generator

    def makespan(self, contender: Contender, plan: Plan, times: Times) -> Draws:
        """Of every draw."""
        exchanges = contender.is_stock and contender.chunks == 1
        factors = {} if exchanges or not self.slower else self._factors(contender, plan, times)
        ms = {}
        for row in plan.ops:
            for op in row:
                taken, gap = times.drawn(op, plan, self.draw)
                ms[op] = taken * factors.get(op, 1.0) + gap
        if exchanges:
            return exchanging(plan, ms, self.link_ms)
        return _latest([end for _, end in timeline(plan, ms, self.link_ms).values()])

    def _factors(self, contender: Contender, plan: Plan, times: Times) -> dict[Op, float]:
        """Op -> how much longer it takes beside the transfers that are resident meanwhile, on the timeline of typical times."""
        typical = {op: numpy.array([times.median(op, plan)]) for row in plan.ops for op in row}
        spans = {op: (float(start[0]), float(end[0])) for op, (start, end) in timeline(plan, typical, self.link_ms).items()}
        resident: list[list[tuple[float, float]]] = [[] for _ in plan.ops]
        for post, sender, to in _transfers(plan, None if contender.is_stock else times.costs(plan, self.link_ms)):
            posted, sent = 0.0 if post is None else spans[post][1], spans[sender][1]
            here = max(posted, sent) + self.link_ms
            resident[to].append((posted, here))
            resident[plan.placement.stage_to_rank[sender.stage]].append((sent, here))
        factors = {}
        for rank, row in enumerate(plan.ops):
            for op in row:
                factors[op] = self._mean(op, spans[op], [each for each in resident[rank] if _overlap(each, spans[op]) > 0])
        return factors

    def _mean(self, op: Op, span: tuple[float, float], beside: Sequence[tuple[float, float]]) -> float:
        """The mean of the factors over an op, which change when a transfer comes or ends."""
        if span[1] <= span[0]:
            return 1.0
        known = {0: 1.0} | dict(self.slower[op.kind])
        cuts = sorted({*span, *(at for each in beside for at in each if span[0] < at < span[1])})
        total = 0.0
        for part in itertools.pairwise(cuts):
            ctas = CTAS * sum(_overlap(each, part) > 0 for each in beside)
            total += known[max(count for count in known if count <= ctas)] * (part[1] - part[0])
        return total / (span[1] - span[0])


def _latest(ends: Sequence[Draws]) -> Draws:
    found: Draws = numpy.maximum.reduce(ends)
    return found


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return min(one[1], other[1]) - max(one[0], other[0])


def _transfers(plan: Plan, costs: CostModel | None) -> list[tuple[Op | None, Op, int]]:
    """(the op behind which a receive is posted, or None at the start; the op that sends; the rank that receives).

    Args:
        plan: of the contender.
        costs: by which our programs post receives after the first iterations; None: megatron-core's interleaved 1F1B, which posts
            one behind the last op of the same direction.
    """
    found: list[tuple[Op | None, Op, int]] = []
    ranks, results = plan.placement.stage_to_rank, {result_of(op): op for row in plan.ops for op in row}
    for rank, steps in enumerate(place_communication(plan, costs=costs).steps):
        posted: dict[Any, Op | None] = {}
        before: Op | None = None
        last: dict[bool, Op] = {}
        for step in steps:
            posted |= dict.fromkeys(step.post, before)
            (op,), is_forward = step.ops, step.ops[0].kind is OpKind.F
            for message in step.take:
                need = next(each for each in requirements(op, plan.num_stages) if each.stage != op.stage)
                assert ranks[need.stage] != rank
                post = last.get(is_forward) if costs is None else posted[message]
                found.append((post, results[need], rank))
            before, last[is_forward] = op, op
    return found


def _compared(drawn: Mapping[str, Draws]) -> list[Row]:
    """Per contender its makespan, and its speed over 1F1B and over the faster interleaved 1F1B, with 95 % of the draws."""
    interleaved = [ms for name, ms in drawn.items() if name.startswith("interleaved")]
    bases = {"over_1f1b": drawn.get("1F1B"), "over_interleaved": numpy.minimum.reduce(interleaved) if interleaved else None}
    return [
        {"name": name, "ms": _interval(ms)} | {to: _interval(base / ms) for to, base in bases.items() if base is not None}
        for name, ms in drawn.items()
    ]


def _interval(values: Draws) -> list[float]:
    """[mean, least, most] of 95 % of the values."""
    return [round(float(each), 5) for each in (values.mean(), *numpy.quantile(values, (0.025, 0.975)))]
