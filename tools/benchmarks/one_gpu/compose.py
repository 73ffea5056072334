"""Step E: the pipeline's iteration, composed on the CPU from what the ranks took alone.

The timeline follows from the plan's dependencies (`plan.simulate.run_in_order`); each op takes a measured time of its stage's
kind and the gap that the rank left before it, drawn anew for every composition. Ranks that were not run take the times of an
inner one that was. Messages of our schedules and of interleaved 1F1B go beside the passes; megatron-core's 1F1B exchanges them
between two passes: both ends must have come, and go on when both messages are over.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.zerobubble.plan.communication import place_communication
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Op, OpKind, Plan
from megatron.zerobubble.plan.registry import build_plan, schedule_info
from megatron.zerobubble.plan.simulate import run_in_order
from tools.benchmarks.one_gpu.ranks import CONTENDERS, Contender
from tools.benchmarks.reports import Row

__all__ = ["LINKS_MS", "Times", "compose", "exchanging"]

LINKS_MS = (0.0, 0.096, 0.75)
"""Of a message between two ranks: free, NVLink (33.5 MB at 350 GB/s) and InfiniBand (45 GB/s)."""
_DRAWS = 200
_PASSES = {"F": "forward", "B": "backward", "W": "wgrad", "BW": "backward"}


class Times:
    """What a contender's ranks took alone.

    Args:
        runs: the ranks that were run.
        num_ranks: of the pipeline that they belong to.
    """

    def __init__(self, runs: Sequence[Row], num_ranks: int) -> None:
        self._ops: dict[tuple[int, int, str], list[float]] = {}
        self._gaps: dict[tuple[int, str], list[float]] = {}
        self.ranks = sorted(run["rank"] for run in runs)
        self._num_ranks = num_ranks
        for run in runs:
            for iteration in run["iterations"]:
                ops = iteration["ops"]
                stages = sorted({stage for stage, _, _ in ops})
                for stage, kind, ms in ops:
                    self._ops.setdefault((run["rank"], stages.index(stage), kind), []).append(ms)
                for (_, kind, _), gap in zip(ops[1:], iteration["gaps"], strict=True):
                    self._gaps.setdefault((run["rank"], kind), []).append(gap)

    def like(self, rank: int, num_ranks: int) -> int:
        """The rank that was run whose times a rank takes: the first and the last one their own, inner ones of inner ones."""
        if rank == 0:
            return 0
        if rank == num_ranks - 1:
            return self._num_ranks - 1
        inner = [each for each in self.ranks if 0 < each < self._num_ranks - 1]
        return inner[rank % len(inner)]

    def drawn(self, plan: Plan, draw: random.Random) -> tuple[Callable[[Op], float], Callable[[Op], float]]:
        """(the time of an op, the gap before it), a measured one at random for each."""
        places = {stage: plan.placement.stage_to_rank[stage] for stage in range(plan.num_stages)}

        def source(op: Op) -> tuple[int, int]:
            rank = places[op.stage]
            return self.like(rank, plan.num_ranks), plan.placement.rank_to_stages[rank].index(op.stage)

        def ms(op: Op) -> float:
            return draw.choice(self._ops[(*source(op), op.kind.name)])

        def gap(op: Op) -> float:
            return draw.choice(self._gaps.get((source(op)[0], op.kind.name), [0.0]))

        return ms, gap

    def costs(self, plan: Plan, link_ms: float) -> CostModel:
        """Median times of the stages, for a plan that is made for them."""
        lists: dict[OpKind, list[float]] = {}
        for stage, rank in enumerate(plan.placement.stage_to_rank):
            key = self.like(rank, plan.num_ranks), plan.placement.rank_to_stages[rank].index(stage)
            for kind in (OpKind.F, OpKind.B, OpKind.W):
                lists.setdefault(kind, []).append(statistics.median(self._ops[(*key, kind.name)]))
        uniform = CostModel.uniform(plan.placement)
        return CostModel(
            forward_ms=lists[OpKind.F],
            backward_ms=lists[OpKind.B],
            wgrad_ms=lists[OpKind.W],
            activation=uniform.activation,
            activation_after_backward=uniform.activation_after_backward,
            comm_ms=link_ms,
        )


def exchanging(plan: Plan, ms: Callable[[Op], float], link_ms: float) -> float:
    """The makespan of megatron-core's 1F1B, whose ranks exchange messages between two passes.

    Args:
        plan: of 1F1B.
        ms: op -> its time, with the gap before it.
        link_ms: of a message; both of an exchange go at once.
    """
    actions = [_actions(plan, rank) for rank in range(plan.num_ranks)]
    clock, at = [0.0] * plan.num_ranks, [0] * plan.num_ranks
    come: dict[Any, dict[int, float]] = {}
    """Message -> rank -> when it has come to exchange it."""
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(actions):
            while at[rank] < len(row):
                action = row[at[rank]]
                if isinstance(action, Op):
                    clock[rank] += ms(action)
                else:
                    for message in action:
                        come.setdefault(message, {}).setdefault(rank, clock[rank])
                    if any(len(come[message]) < 2 for message in action):
                        break
                    clock[rank] = max([clock[rank], *(max(come[message].values()) + link_ms for message in action)])
                at[rank] += 1
                moved = True
    assert all(done == len(row) for done, row in zip(at, actions, strict=True))
    return max(clock)


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
        # To one neighbor at once, as in the steady state; in the warm-up and the cool-down one after the other.
        together = after is not None and after.kind is not op.kind
        found += [tuple(sent + taken)] if together and sent and taken else [(each,) for each in sent + taken]
    return found


def compose(ranks: Row, transfers: Row | None) -> Row:
    """Compose every contender's iteration at each size of pipeline and each link.

    Args:
        ranks: of step D.
        transfers: of step B, by which passes beside posted receives are slower; None: they are not.
    """
    draw, rows = random.Random(1), []
    by_name = {each.name: [run for run in ranks["runs"] if run["contender"] == each.name] for each in CONTENDERS}
    complete = {0, ranks["num_ranks"] - 1}
    times = {name: Times(runs, ranks["num_ranks"]) for name, runs in by_name.items() if complete < {run["rank"] for run in runs}}
    per_rank = ranks["num_microbatches"] // ranks["num_ranks"]
    for num_ranks in (ranks["num_ranks"], ranks["num_ranks"] // 2):
        for link_ms in LINKS_MS:
            drawn = {
                name: of
                for contender in CONTENDERS
                if contender.name in times
                for name, of in _makespans(
                    contender, times[contender.name], num_ranks, per_rank * num_ranks, link_ms, transfers, draw
                )
            }
            rows.append({"num_ranks": num_ranks, "link_ms": link_ms, "contenders": _compared(drawn)})
    return {"draws": _DRAWS, "rows": rows}


def _makespans(
    contender: Contender,
    times: Times,
    num_ranks: int,
    num_microbatches: int,
    link_ms: float,
    transfers: Row | None,
    draw: random.Random,
) -> list[tuple[str, list[float]]]:
    sizes: dict[str, Any] = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": contender.chunks}
    plan = build_plan(contender.plan_name, **sizes)
    plans = [(contender.name, plan)]
    if not contender.is_stock and schedule_info(contender.schedule).is_searched:
        plans.append(
            (
                f"{contender.name}, planned with its times",
                build_plan(contender.schedule, **sizes, costs=times.costs(plan, link_ms)),
            )
        )
    return [(name, [_makespan(contender, each, times, link_ms, transfers, draw) for _ in range(_DRAWS)]) for name, each in plans]


def _makespan(
    contender: Contender, plan: Plan, times: Times, link_ms: float, transfers: Row | None, draw: random.Random
) -> float:
    ms, gap = times.drawn(plan, draw)
    if contender.is_stock and contender.chunks == 1:
        return exchanging(plan, lambda op: ms(op) + gap(op), link_ms)
    beside = _beside(plan, contender)
    slower = {op: slow_down(transfers, op.kind, count) for op, count in beside.items()} if link_ms > 0 else {}
    rows = run_in_order(
        plan,
        lambda op: ms(op) * slower.get(op, 1.0) + gap(op),
        CostModel.uniform(plan.placement, comm_ms=link_ms),
    )
    return max(row[-1].end_ms for row in rows) - min(row[0].start_ms for row in rows)


def _beside(plan: Plan, contender: Contender) -> dict[Op, int]:
    """Op -> receives that are posted while it runs; megatron-core's interleaved 1F1B posts one ahead."""
    if contender.is_stock:
        return {op: 1 for row in plan.ops for op in row}
    found = {}
    for steps in place_communication(plan).steps:
        posted = 0
        for step in steps:
            posted += len(step.post) - (step.take is not None)
            found[step.op] = posted
    return found


def slow_down(transfers: Row | None, kind: OpKind, receives: int) -> float:
    """How much longer a pass takes beside posted receives of 4 CTAs each, as measured with as many or fewer CTAs."""
    counts = [] if transfers is None else transfers["counts"]
    name, known = _PASSES[kind.name], {0: 1.0}
    known |= {row["ctas"]: row[name]["median"] for row in counts if name in row}
    return float(known[max(ctas for ctas in known if ctas <= 4 * receives)])


def _compared(drawn: Mapping[str, Sequence[float]]) -> list[Row]:
    """Per contender its makespan, and its speed over 1F1B and over the faster interleaved 1F1B, with 95 % of the draws."""
    interleaved = [min(each) for each in zip(*(ms for name, ms in drawn.items() if name.startswith("interleaved")), strict=True)]
    found = []
    for name, taken in drawn.items():
        row: Row = {"name": name, "ms": _interval(taken)}
        for other, base in (("over_1f1b", drawn.get("1F1B", ())), ("over_interleaved", interleaved)):
            if base:
                row[other] = _interval([a / b for a, b in zip(base, taken, strict=True)])
        found.append(row)
    return found


def _interval(values: Sequence[float]) -> list[float]:
    """[mean, least, most] of 95 % of the values."""
    ordered, cut = sorted(values), round(0.025 * len(values))
    return [statistics.fmean(values), ordered[cut], ordered[-1 - cut]]
