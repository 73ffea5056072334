"""Compare a recorded iteration with its plan: measured vs. planned, as an object, as lines for the log and as `report.json`.

The measured bubble follows the paper's definition (arXiv 2401.10241, section 5.3) with measured times: span is the longest
time any rank needs from the start of its first op to the end of its last, work is the time the bottleneck rank computes, and the
bubble rate is (span - work) / span. Predicted values come from simulating the same plan with measured costs. `breakdown`
documents the values of a rank.
"""

from __future__ import annotations

import json
import math
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS, CostTable
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.costs.links import LinkTime, links_text
from megatron.zerobubble.plan.ir import OpKind, Plan
from megatron.zerobubble.plan.simulate import Simulation, TimedOp, lengths_ms, simulate
from megatron.zerobubble.plan.timeline import Activity, Timeline
from megatron.zerobubble.profiling.breakdown import RankRecord, RankTime, link_times, rank_records, rank_times
from megatron.zerobubble.profiling.profile import RankProfile, combine, slices_of
from megatron.zerobubble.profiling.recorded_step import step_costs

Rows = Sequence[Sequence[TimedOp]]
"""Per pipeline rank its ops in the order they ran, in milliseconds."""

FORMAT = "zerobubble-report/1"
COSTS_BY_LENGTH = "costs_by_length"
"""The key of the costs that were fitted to the lengths of unequal microbatches."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of one rank in bytes, from an iteration in which it was measured (`profiling.activation_memory`)."""

    predicted_bytes: int
    """Peak activation memory as predicted by the plan of that iteration, with the measured memory of each pass."""
    measured_bytes: int
    """Peak activation memory as measured after each op."""
    workspace_bytes: int
    """Peak memory of an op above what is held around it: temporary tensors, and tensors in flight."""
    state_bytes: int
    """Weights, gradients and optimizer state."""


def memory_line(ranks: Sequence[RankMemory]) -> str:
    """One line for the end of a run, about the rank with the highest memory use."""
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].state_bytes + ranks[rank].measured_bytes)
    mib = {name: value / 2**20 for name, value in vars(ranks[fullest]).items()}
    return (
        f"memory: highest on rank {fullest}: activations {mib['measured_bytes']:.1f} MiB, "
        f"predicted {mib['predicted_bytes']:.1f}; a pass needs up to {mib['workspace_bytes']:.1f} on top; "
        f"weights, gradients and optimizer state {mib['state_bytes']:.1f}"
    )


@dataclass(frozen=True, kw_only=True)
class PipelineReport:
    """One recorded iteration compared with its plan. Times in milliseconds."""

    iteration: int
    simulation: Simulation
    """The plan, simulated with the measured costs."""
    ranks: tuple[RankRecord, ...]
    predicted_ranks: tuple[RankTime, ...]
    links: Mapping[tuple[int, int], float]
    """P2P latency of each link, by (sender, receiver)."""
    hosts: tuple[str, ...]
    """Name of each rank's host; empty where it is not known."""
    measured_bytes: list[int] | None = None
    """Per rank the peak of everything on the device, as counted by the CUDA allocator; None on the CPU."""

    @property
    def span_ms(self) -> float:
        """The longest time of any rank from its first op to its last."""
        return max(rank.span_ms for rank in self.ranks)

    @property
    def makespan_ms(self) -> float:
        """From the first op of all to the last."""
        time = self.ranks[0]
        return time.starts_after_ms + time.span_ms + time.ends_before_ms

    @property
    def work_ms(self) -> float:
        """The bottleneck rank's time in ops."""
        return max(rank.busy_ms for rank in self.ranks)

    @property
    def bubble_rate(self) -> float:
        """(span - work) / span."""
        return max(0.0, self.span_ms - self.work_ms) / self.span_ms if self.span_ms else 0.0

    @property
    def wgrad_share(self) -> float:
        """W's part of the time in ops of all ranks."""
        busy = sum(rank.busy_ms for rank in self.ranks)
        return sum(rank.wgrad_ms for rank in self.ranks) / busy if busy else 0.0

    @property
    def exposed_all_to_all_ms(self) -> float:
        """The mean over ranks of the time in which tokens travel to or from experts and the rank computes nothing."""
        return fmean(rank.exposed_all_to_all_ms for rank in self.ranks)

    def lines(self) -> list[str]:
        """Lines for the log at the end of a run."""
        worst = max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].idle_ms)
        record = self.ranks[worst]
        costs = self.simulation.costs
        return [
            f"bubble: {self.bubble_rate:.1%} of the span of iteration {self.iteration} ({self.work_ms:.0f} of {self.span_ms:.0f} "
            f"ms were passes on the bottleneck rank); the plan predicts {self.simulation.bubble_rate:.1%} for these pass times",
            f"  span {self.span_ms:.1f} ms, predicted {self.simulation.span_ms:.1f}; makespan (first to last pass of all ranks) "
            f"{self.makespan_ms:.1f} ms, predicted {self.simulation.makespan_ms:.1f}",
            f"  most idle is rank {worst}: warmup {record.idle_warmup_ms:.1f} + steady {record.idle_steady_ms:.1f} + cooldown "
            f"{record.idle_cooldown_ms:.1f} ms, of which waiting for a peer {record.idle_for_peer_ms:.1f}, for a link "
            f"{record.idle_for_link_ms:.1f}",
            f"  W is {self.wgrad_share:.0%} of all passes; the slowest stage takes F {max(costs.forward_ms):.1f}, "
            f"B {max(costs.backward_ms):.1f}, W {max(costs.wgrad_ms):.1f} ms",
            f"  {links_text(self.links, self.hosts)}",
            f"  optimizer: up to {max(rank.optimizer_ms for rank in self.ranks):.1f} ms; the first rank entered it "
            f"{max(rank.optimizer_ahead_ms for rank in self.ranks):.1f} ms before the last",
            *([f"  {self._exposed_line}"] if self.exposed_all_to_all_ms else []),
        ]

    @property
    def _exposed_line(self) -> str:
        share = self.exposed_all_to_all_ms / self.span_ms
        return f"all-to-alls of experts: {self.exposed_all_to_all_ms:.1f} ms exposed on the mean rank, {share:.0%} of the span"

    def to_json(self) -> dict[str, Any]:
        """One entry of `report.json`; docs/reading-the-trace.md explains every key."""
        plan, planned = self.simulation.plan, self.simulation
        measured = {"span_ms": self.span_ms, "makespan_ms": self.makespan_ms, "bubble_rate": self.bubble_rate}
        predicted = {"span_ms": planned.span_ms, "makespan_ms": planned.makespan_ms, "bubble_rate": planned.bubble_rate}
        return {
            "iteration": self.iteration,
            "schedule": plan.schedule,
            "num_ranks": plan.num_ranks,
            "num_microbatches": plan.num_microbatches,
            **({"num_slices": plan.num_slices} if plan.num_slices > 1 else {}),
            **({"slice_counts": list(plan.slice_counts)} if plan.slice_counts else {}),
            "measured": measured | {"work_ms": self.work_ms, "wgrad_share": self.wgrad_share},
            "predicted": predicted,
            "costs": planned.costs.to_json(),
            "hosts": list(self.hosts),
            "links": [{"sender": a, "receiver": b, "ms": elapsed} for (a, b), elapsed in self.links.items()],
            "ranks": [
                {"rank": rank, "measured": record.to_json(), "predicted": time.to_json()}
                for rank, (record, time) in enumerate(zip(self.ranks, self.predicted_ranks, strict=True))
            ],
            "memory": {"predicted": list(planned.peak_memory), "measured_bytes": self.measured_bytes},
        }


def report(timeline: Timeline) -> PipelineReport:
    """Compare a recorded iteration, on one clock, with its plan.

    It is predicted with the medians of its own passes, of each link, what surrounded them, and the measured activation memory of
    the timeline. Without that, stages are taken to be alike and to hold everything until W. Of a plan that assigns unequal
    microbatches, the passes of each one; their memory is still taken to be equal.
    """
    links = link_times(timeline)
    costs = measured_costs(timeline.plan, timeline.rows, {pair: LinkTime(elapsed) for pair, elapsed in links.items()})
    if not timeline.plan.pairs:
        costs = replace(costs, all_to_all=(_share(timeline, OpKind.F), _share(timeline, OpKind.B, OpKind.BW)))
    if timeline.activations is not None:
        costs = costs.with_activations(timeline.activations)
    if timeline.plan.assignment or timeline.plan.slice_counts:
        costs = _of_each_microbatch(timeline, costs)
    simulation = simulate(timeline.plan, replace(costs, step=step_costs(timeline)))
    counted = [rank.peak_bytes for rank in timeline.ranks if rank.peak_bytes is not None]
    return PipelineReport(
        iteration=timeline.iteration,
        simulation=simulation,
        ranks=rank_records(timeline),
        predicted_ranks=rank_times(simulation.rows),
        links=links,
        hosts=tuple(rank.host for rank in timeline.ranks),
        measured_bytes=counted if len(counted) == len(timeline.ranks) else None,
    )


def reports_to_json(
    reports: Sequence[PipelineReport], memory: Sequence[RankMemory] | None = None, by_length: LengthModel | None = None
) -> str:
    """The content of `report.json`; `memory` per rank if it was measured, costs `by_length` if they were."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "iterations": [each.to_json() for each in reports],
        "memory": None if memory is None else [vars(rank) for rank in memory],
    }
    if by_length is not None:
        body[COSTS_BY_LENGTH] = by_length.to_json()
    return json.dumps(body, indent=1) + "\n"


def last_iteration(body: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The last entry of a `report.json`. Raises PlanError with the name of its source if there is none."""
    iterations = body.get("iterations")
    last = iterations[-1] if isinstance(iterations, list) and iterations else None
    if not isinstance(last, dict):
        raise PlanError(f"{source} has no iterations: 'iterations' must be a list of objects, got {quoted(iterations)}")
    return last


def measured_costs(plan: Plan, rows: Rows, links: Mapping[tuple[int, int], LinkTime] | None = None) -> CostModel:
    """Costs from the median time of each stage's F, B and W, and the times of links. Activations are equal."""
    times: dict[tuple[int, OpKind, int], list[float]] = {}
    for row in rows:
        for ((stage, kind, _, part), *_), length in zip(row, lengths_ms(row), strict=True):
            times.setdefault((stage, kind, part), []).append(length)

    slices = slices_of({key: median(values) for key, values in times.items()})
    typical = {(stage, kind): sum(each) for stage, of in slices.items() for kind, each in of.times_ms.items()}
    are_alike = plan.num_slices > 1 and not plan.slice_counts
    return combine([RankProfile(times_ms=typical, memory={}, slices=slices if are_alike else {})], plan.placement, links)


def _share(timeline: Timeline, *kinds: OpKind) -> float:
    """The share of the time of all passes of these kinds in which their tokens travel to or from experts."""
    whole = traveling = 0.0
    for rank in timeline.ranks:
        ops, starts = [timed for timed in rank.ops if timed.op.kind in kinds], [timed.start_ms for timed in rank.ops]
        whole += math.fsum(end - start for _, start, end in ops)
        for span in rank.spans:
            if span.activity is Activity.ALL_TO_ALL and rank.ops[bisect(starts, span.start_ms) - 1].op.kind in kinds:
                traveling += span.end_ms - span.start_ms
    return min(1.0, traveling / whole) if whole else 0.0


def _of_each_microbatch(timeline: Timeline, costs: CostModel) -> CostModel:
    """The costs with the times of every microbatch as recorded: of unequal ones a median says little."""
    plan, m = timeline.plan, timeline.plan.num_microbatches
    own = costs.of_slices(plan)
    table = CostTable.joined([own.table.of(i) for i in range(m)])
    times = {name: [list(row) for row in table.lists[name]] for name in COST_LISTS[:3]}
    for row in timeline.rows:
        for ((stage, kind, microbatch, part), *_), length in zip(row, lengths_ms(row), strict=True):
            name = COST_LISTS[0 if kind is OpKind.F else 2 if kind is OpKind.W else 1]  # a fused BW is a B, as in `combine`
            times[name][stage][table.starts[plan.batch_index(microbatch)] + part] = length
    rows = {name: tuple(map(tuple, of_kind)) for name, of_kind in times.items()}
    return costs.changed(table=replace(table, tokens=(), **rows))  # type: ignore[arg-type]
