"""The emulated mode: plans on the real executor and real links, with passes that sleep. Does not import megatron-core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.communication import place_communication
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.plan_request import CostsOf, PlanRequest
from megatron.zerobubble.plan.planner import make_plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.simulate import TimedOp, simulate
from megatron.zerobubble.profiling.recorder import OpRecorder
from megatron.zerobubble.runtime.executor import Executor
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from tools.benchmarks.emulation import SleepingWork, run_on_ranks
from tools.benchmarks.reports import Row
from tools.benchmarks.schedules.contenders import Runtime
from tools.benchmarks.schedules.report import Line, Sample, by_iteration, rows_of
from tools.benchmarks.schedules.rounds import run_rounds

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of the emulated passes, in milliseconds."""

    forward_ms: float = 20.0
    """F per rank and microbatch; the two stages of a rank with V placement take half of it each."""
    backward_ms: float = 20.0
    """B per rank and microbatch."""
    wgrad_ms: float = 20.0
    """W per rank and microbatch."""
    comm_ms: float = 0.0
    """P2P latency per message as assumed by planner and simulator; the latency of the real links is what it is."""
    last_stage: float = 1.0
    """Factor on the times of the last stage's passes."""

    def equal(self, placement: Placement) -> CostModel:
        """Costs without the factor: equal stages."""
        times = {name: getattr(self, name) for name in ("forward_ms", "backward_ms", "wgrad_ms", "comm_ms")}
        return CostModel.uniform(placement, **times)

    def true(self, placement: Placement) -> CostModel:
        """Costs with the factor: the times that the passes really sleep."""
        costs = self.equal(placement)

        def slowed(values: tuple[float, ...]) -> tuple[float, ...]:
            return (*values[:-1], self.last_stage * values[-1])

        return costs.with_lists(
            forward_ms=slowed(costs.forward_ms),
            backward_ms=slowed(costs.backward_ms),
            wgrad_ms=slowed(costs.wgrad_ms),
        )


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """A plan, and the times of its passes."""

    name: str
    baseline: str
    """Name of the emulation that its speed-up is relative to."""
    plan: Plan
    costs: CostModel


def plan_emulations(
    names: Sequence[str], times: Times, *, num_ranks: int, num_microbatches: int, budget: float
) -> list[Emulation]:
    """Plan the contenders: `NAME` is the hand-written schedule, `NAME@LIMIT` the best plan for the true times in a memory limit.

    With a slower last stage each `NAME@LIMIT` comes after a plan for equal stages, which is its baseline.
    """
    found: list[Emulation] = []

    def add(name: str, plan: Plan, baseline: str | None = None) -> None:
        first = found[0].name if found else name
        found.append(Emulation(name=name, baseline=baseline or first, plan=plan, costs=times.true(plan.placement)))

    def searched(name: str, schedule: str, limit: str, costs_of: CostsOf) -> Plan:
        options = SearchOptions(memory_limit=_limit(name, limit), objective=Objective.SPAN, budget=budget)
        result = make_plan(
            PlanRequest(
                schedule=schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, stages=costs_of, options=options
            )
        )
        return result.simulation.plan

    for name in dict.fromkeys(names):
        schedule, _, limit = name.partition("@")
        if not limit:
            add(name, build_plan(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches))
            continue
        baseline = None
        if times.last_stage != 1.0:
            baseline = f"{name} for equal stages"
            add(baseline, searched(name, schedule, limit, times.equal), baseline)
        add(name, searched(name, schedule, limit, times.true), baseline)
    return found


def _limit(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"schedule {name!r}: what follows @ must be a memory limit, a number, as in zbv@1 or zb@2") from None


class EmulatedContender:
    """A plan on the real executor, with passes that sleep."""

    def __init__(self, emulation: Emulation, rank: int, links: ProcessGroupLinks, num_elements: int) -> None:
        self._program = place_communication(emulation.plan, costs=emulation.costs)
        self._rank = rank
        self._links = links
        self._work = SleepingWork(emulation.costs, emulation.plan.ops[rank], num_elements=num_elements)
        self._recorder = OpRecorder(CPU)

    def iterate(self, num_microbatches: int) -> None:
        """Run all passes of this rank."""
        self._recorder.clear()
        Executor(self._program, self._rank, self._links, self._work, self._recorder).run()

    def timed_ops(self) -> list[TimedOp]:
        """The ops of the last iteration with their times."""
        return self._recorder.timed_ops()

    def loss(self) -> None:
        """None: nothing is computed."""


def serve(rank: int, emulations: Sequence[Emulation], num_elements: int, rounds: int) -> list[list[Sample]]:
    """Run one rank; returns each contender's samples. Contenders with the same placement share the links."""
    placements = list(dict.fromkeys(each.plan.placement for each in emulations))  # the same order on every rank
    links = {
        placement: ProcessGroupLinks(placement, pipeline=range(placement.num_ranks), rank=rank, device=CPU)
        for placement in placements
    }
    contenders = [EmulatedContender(each, rank, links[each.plan.placement], num_elements) for each in emulations]
    samples = run_rounds(contenders, emulations[0].plan.num_microbatches, rounds)
    for link in links.values():
        link.close()
    return samples


def measure(emulations: Sequence[Emulation], *, rounds: int, message_kib: float) -> list[Row]:
    """Run the emulations side by side, and measure the span."""
    num_elements = max(1, round(message_kib * 1024 / 4))
    plan = emulations[0].plan
    ranks = run_on_ranks(serve, plan.num_ranks, emulations, num_elements, rounds)
    lines = []
    for place, each in enumerate(emulations):
        iterations = by_iteration([samples[place] for samples in ranks])
        lines.append(
            Line(
                name=each.name,
                runtime=Runtime.OURS.value,
                baseline=each.baseline,
                ms=tuple(iteration.span_ms for iteration in iterations),
                predicted_ms=simulate(each.plan, each.costs).span_ms,
                beyond_passes=tuple(iteration.beyond_passes(each.plan) for iteration in iterations),
            )
        )
    return [{"num_microbatches": plan.num_microbatches, "rows": rows_of(lines)}]
