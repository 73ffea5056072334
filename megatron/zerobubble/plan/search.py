"""Search: the best order for given times and a given memory.

Three stages, each on the real objective (in-order execution with the true times), each within its share of the budget:

1. *Try* the starting policies (`policies`) by list scheduling, and the plans drawn by hand.
2. *Tune* the numbers of the best policies. A policy has few numbers whatever the number of microbatches, and changing one
   changes the whole steady state. With many microbatches this happens on a smaller instance; the policy then unrolls it.
3. *Anneal* the best order by moving single ops, which mends the ends and the seams.

All three accept a worse candidate while it is within a threshold that falls to zero (threshold accepting: Dueck and Scheuer,
Journal of Computational Physics 90, 1990). A budget is a number of op evaluations, not seconds: the same arguments and seed give
the same plan on every machine, with the compiled core and without.
"""

from __future__ import annotations

import enum
import heapq
import importlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Op, OpKind, Placement, Plan
from megatron.zerobubble.plan.passes import split_fused
from megatron.zerobubble.plan.policies import flat_durations, starting_policies
from megatron.zerobubble.plan.search_core import DECODE_WEIGHT, Core, Order, Policy, PythonCore
from megatron.zerobubble.plan.simulate import peak_memory, simulate
from megatron.zerobubble.plan.validate import MEMORY_TOLERANCE, validate

logger = logging.getLogger(__name__)

_KINDS = (OpKind.F, OpKind.B, OpKind.W)
_MOST_TUNED = 4
_ROUNDS = ((0.1, 0.2), (0.1, 0.1), (0.1, 0.05), (0.15, 0.02), (0.2, 0.01), (0.2, 0.008), (0.15, 0.004))
"""Annealing: share of the budget and first threshold, as a share of the busiest rank's time for one microbatch. Small instances
need the high ones, long ones the low ones."""
_DRAWN_TEMPERATURE = 0.008


class Objective(enum.Enum):
    """What a plan is judged by."""

    SPAN = "span"
    """The optimizer steps without waiting for other ranks (post-validation)."""
    MAKESPAN = "makespan"
    """The optimizer waits for all ranks."""


class Effort(enum.Enum):
    """How long to look: a budget in op evaluations. The compiled core does about 10^8 a second."""

    FAST = "fast"
    DEFAULT = "default"
    MAX = "max"

    @property
    def budget(self) -> float:
        """Op evaluations of a whole search."""
        return {"fast": 6e7, "default": 1.5e9, "max": 1.5e10}[self.value]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What to look for."""

    memory_limit: float | None = None
    """Most activation memory on any rank, 1.0 is 1F1B's rank 0; None: no limit."""
    objective: Objective = Objective.SPAN
    """What to minimise."""
    seed: int = 0
    """Another seed, another search."""
    budget: float = Effort.DEFAULT.budget
    """Op evaluations to spend. 0 tries a few starting policies and nothing else."""


def smallest_memory(placement: Placement, num_microbatches: int, costs: CostModel) -> float:
    """The smallest limit under which any plan exists: one microbatch at a time, all chunks of the fullest rank."""
    costs.check_fits(placement)
    unit = min(placement.num_ranks, num_microbatches)
    return max(math.fsum(costs.activation[stage] for stage in stages) for stages in placement.rank_to_stages) / unit


def check_memory_limit(placement: Placement, num_microbatches: int, costs: CostModel, limit: float | None) -> None:
    """Raise ConfigError where no plan can keep the limit, naming the smallest that works."""
    if limit is None:
        return
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or math.isnan(limit):
        raise ConfigError(f"memory limit is {limit!r}; it must be a number, 1.0 is what 1F1B holds on rank 0")
    least = smallest_memory(placement, num_microbatches, costs)
    if limit < least - MEMORY_TOLERANCE:
        raise ConfigError(
            f"memory limit {limit:.6g} is too small for any plan of {num_microbatches} microbatches on "
            f"{placement.num_ranks} ranks ({placement.name} placement): the smallest that works is {math.ceil(least * 1e6) / 1e6}"
        )


def fits(plan: Plan, costs: CostModel, limit: float | None) -> bool:
    """Whether a plan keeps a memory limit."""
    return limit is None or max(peak_memory(plan, costs)) <= limit + MEMORY_TOLERANCE


def objective_ms(plan: Plan, costs: CostModel, objective: Objective) -> float:
    """Span or makespan of a plan."""
    simulation = simulate(plan, costs)
    return simulation.span_ms if objective is Objective.SPAN else simulation.makespan_ms


def search(
    schedule: str,
    placement: Placement,
    num_microbatches: int,
    costs: CostModel,
    goal: Goal,
    *,
    starts: Sequence[Plan] = (),
    fused: bool = False,
    core: type[Any] | None = None,
) -> Plan:
    """The best plan found on a placement.

    Args:
        schedule: the plan's name.
        placement: stage -> rank.
        num_microbatches: m, at least 1.
        costs: times and memory of every stage.
        goal: limit, objective, seed and budget.
        starts: plans to begin from besides the policies; those that break the limit are left out.
        fused: build plans of F and BW only.
        core: `PythonCore` or the compiled one; the compiled one where it was built if not given.

    Raises:
        ConfigError: no plan keeps the limit; says the smallest that works.
    """
    check_memory_limit(placement, num_microbatches, costs, goal.memory_limit)
    finder = _Finder(placement, num_microbatches, costs, goal, fused, core or best_core())
    orders = [_order_of(plan) for plan in map(split_fused, starts) if fits(plan, costs, goal.memory_limit)]
    order = finder.find(orders)
    plan = _plan_of(order, schedule, placement, num_microbatches, fused=fused)
    validate(plan, memory_limit=goal.memory_limit, costs=costs)
    return plan


@cache
def best_core() -> type[Any]:
    """The compiled core where the install built it, else its Python twin; says once what is lost."""
    try:
        compiled = importlib.import_module("megatron.zerobubble.plan._search_core")
    except ImportError:
        logger.warning("planner: the compiled search core was not built; the same plans take about 50 times longer to find")
        return PythonCore
    core: type[Any] = compiled.NativeCore
    return core


class _Finder:
    """One search."""

    def __init__(
        self, placement: Placement, num_microbatches: int, costs: CostModel, goal: Goal, fused: bool, core: type[Any]
    ) -> None:
        self._placement, self._costs, self._goal, self._fused, self._core = placement, costs, goal, fused, core
        self._m = num_microbatches
        self._small_m = min(num_microbatches, 3 * placement.num_ranks)
        self._full = self._make_core(num_microbatches)
        self._small = self._full if self._small_m == num_microbatches else self._make_core(self._small_m)
        self._busiest = max(
            math.fsum(costs.forward_ms[s] + costs.backward_ms[s] + costs.wgrad_ms[s] for s in stages)
            for stages in placement.rank_to_stages
        )

    def _make_core(self, m: int) -> Core:
        """A core for m microbatches whose limit is that of the whole instance, in microbatches."""
        costs, limit = self._costs, self._goal.memory_limit
        unit = min(self._placement.num_ranks, self._m)
        core: Core = self._core(
            m,
            list(self._placement.stage_to_rank),
            list(flat_durations(costs, fused=self._fused)),
            float(costs.comm_ms),
            list(map(float, costs.activation)),
            list(map(float, costs.activation_after_backward)),
            math.inf if limit is None else float(limit) * unit,
            self._goal.objective is Objective.MAKESPAN,
        )
        return core

    def find(self, orders: list[Order]) -> Order:
        """Run the three stages."""
        budget = self._goal.budget
        ranked = self._try(0.1 * budget)
        policies = [policy for _, policy in ranked[: _MOST_TUNED if budget > 0 else 8]]
        if budget > 0:
            policies = [self._tune(policies, 0.4 * budget), *policies]
        found = [order for order in (*orders, *map(self._full.decode, policies)) if order]
        found.sort(key=lambda order: self._full.evaluate(order)[1])
        if budget <= 0 or self._fused:
            return found[0]
        return self._anneal(found, orders, 0.5 * budget)

    def _try(self, budget: float) -> list[tuple[float, Policy]]:
        """List-schedule starting policies on the small instance; the best of every few, best first."""
        num_ops = 3 * self._placement.num_stages * self._small_m
        count = max(24, int(budget / (num_ops * (DECODE_WEIGHT + 1))))
        scored: list[tuple[float, int, Policy]] = []
        policies = starting_policies(self._placement, self._costs, fused=self._fused)
        for index, policy in zip(range(count), policies, strict=False):
            order = self._small.decode(policy)
            if order:
                scored.append((self._small.evaluate(order)[0], index, policy))
        return [(score, policy) for score, _, policy in heapq.nsmallest(_MOST_TUNED * 2, scored, key=lambda item: item[:2])]

    def _tune(self, policies: Sequence[Policy], budget: float) -> Policy:
        """Half of the budget over several policies alike, the other half for the winner."""
        temperature = 0.01 * self._busiest * self._placement.num_ranks
        seeds = self._seeds()
        tuned = [self._small_tune(policy, next(seeds), 0.5 * budget / len(policies), temperature) for policy in policies]
        score, best = min(tuned, key=lambda pair: pair[0])
        again = self._small_tune(best, next(seeds), 0.5 * budget, 0.5 * temperature)
        return again[1] if again[0] < score else best

    def _small_tune(self, policy: Policy, seed: int, budget: float, temperature: float) -> tuple[float, Policy]:
        better = Policy(*self._small.tune(policy, seed, budget, temperature))
        return self._small.evaluate(self._small.decode(better))[0], better

    def _anneal(self, found: list[Order], drawn: list[Order], budget: float) -> Order:
        """Round after round from the best so far, less and less patient; the best drawn order gets a round of its own."""
        best = found[0]
        seeds = self._seeds()
        best_drawn = min(drawn, key=lambda order: self._full.evaluate(order)[1], default=None)
        if best_drawn is not None and best_drawn != best:
            mended = self._full.anneal(best_drawn, next(seeds), 0.3 * budget, _DRAWN_TEMPERATURE * self._busiest)
            best = min((best, mended), key=lambda order: self._full.evaluate(order)[1])
            budget *= 0.7
        for share, temperature in _ROUNDS:
            order = self._full.anneal(best, next(seeds), share * budget, temperature * self._busiest)
            best = min((best, order), key=lambda order: self._full.evaluate(order)[1])
        return best

    def _seeds(self) -> Iterator[int]:
        """Seeds of the parts of one search."""
        part = 0
        while True:
            yield (self._goal.seed * 1_000_003 + part) & (2**63 - 1)
            part += 1


def _order_of(plan: Plan) -> Order:
    kind_code = {kind: code for code, kind in enumerate(_KINDS)}
    chunk = [plan.placement.chunk_of(stage) for stage in range(plan.num_stages)]
    return [bytes(3 * chunk[op.stage] + kind_code[op.kind] for op in row) for row in plan.ops]


def _plan_of(order: Order, schedule: str, placement: Placement, num_microbatches: int, *, fused: bool) -> Plan:
    rows = []
    for rank, codes in enumerate(order):
        counts = [0] * (3 * placement.num_chunks)
        row = []
        for code in codes:
            stage, kind = placement.rank_to_stages[rank][code // 3], _KINDS[code % 3]
            if not fused:
                row.append(Op(stage, kind, counts[code]))
            elif kind is not OpKind.W:
                row.append(Op(stage, OpKind.BW if kind is OpKind.B else kind, counts[code]))
            counts[code] += 1
        rows.append(row)
    return Plan.of(schedule, placement, num_microbatches, rows)
