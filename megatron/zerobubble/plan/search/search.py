"""Search for the best order of ops under measured times and a memory limit.

Three stages. Each scores a candidate by running it in order with the true times, and each has its share of the budget:

1. *Breed* building blocks (`policies`) and list-schedule them. A block has few numbers for any number of microbatches, and
   changing one changes the whole steady state. With many microbatches this happens on a smaller instance; the block unrolls it.
2. Score *seed orders*: hand-written patterns and repeated grid blocks, as they are, and with W moved into the bubbles.
3. *Anneal* the best of both: first without W, which then follows F and B into the bubbles, and by moving many ops at once; then
   by moving single ops of the full order, most of them on the critical path, which repairs warmup, cooldown and the joints
   between repeated cycles. A worse candidate is accepted while it is within a threshold that falls to zero (threshold accepting:
   Dueck and Scheuer, Journal of Computational Physics 90, 1990).

A budget that is large for the number of ops is divided into several searches with seeds of their own, side by side if there are
workers: the best of them is better than one that takes as long as all of them.

A budget is a number of op evaluations, not seconds: the same arguments and seed give the same plan on every machine.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import accumulate, cycle
from operator import itemgetter
from random import Random

from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.search.core import EPSILON, Core
from megatron.zerobubble.plan.search.interface import Order, Problem
from megatron.zerobubble.plan.search.orders import SeedOrder, plan_of_order, repeated, without_wgrad
from megatron.zerobubble.plan.search.policies import Block, Blocks
from megatron.zerobubble.plan.search.search_options import SearchOptions, check_memory_limit
from megatron.zerobubble.plan.search.search_progress import Progress

_COMPILED_EVALUATIONS_PER_S = 1.5e8
_WEBASSEMBLY_EVALUATIONS_PER_S = 6e7


def search(
    schedule: str,
    placement: Placement,
    num_microbatches: int,
    costs: CostModel,
    options: SearchOptions,
    *,
    seed_orders: Sequence[SeedOrder] = (),
    fused: bool = False,
) -> Plan:
    """Search a placement for the best plan. The result is not validated here: `registry.build_plan` does that.

    Args:
        schedule: the plan's name.
        placement: stage -> rank.
        num_microbatches: m, at least 1.
        costs: times and memory of every stage, or of every stage and slice: the plan is then one of these slices.
        options: limit, objective, seed and budget.
        seed_orders: orders to start from besides the list schedules; those that exceed the limit are dropped.
        fused: build plans of F and BW only.

    Raises:
        ConfigError: no plan fits the memory limit; the message names the smallest one that works. Or there is no core.
    """
    check_memory_limit(placement, num_microbatches, costs, options.memory_limit)

    def start(options: SearchOptions) -> _Finder:
        # The list schedule admits an F by the memory that F allocates; a B must not then need more than is free.
        return _Finder(placement, num_microbatches, costs.reserved, options, fused, schedule=schedule)

    n = costs.num_slices
    order = _best_of(start, options, 3 * placement.num_stages * num_microbatches * n, seed_orders)
    return plan_of_order(order, schedule, placement, [n] * num_microbatches, fused=fused)


def _best_of(
    start: Callable[[SearchOptions], _Finder], options: SearchOptions, num_ops: int, seed_orders: Sequence[SeedOrder]
) -> Order:
    """The best order of one search, or of several with seeds of their own where the budget is enough for them."""
    tuning = options.tuning
    enough = max(tuning.least_of_several, tuning.enough_per_op * num_ops)
    num_searches = max(1, min(tuning.most_searches, int(options.budget / enough)))
    if num_searches == 1:
        return start(options).find(seed_orders)
    progress = options.progress or Progress()
    workers = min(options.workers, num_searches)
    shared = replace(options, budget=options.budget / num_searches, workers=max(1, options.workers // num_searches))
    followed = progress.several(num_searches)

    def find(index: int) -> tuple[float, Order, bool] | None:
        if index > 0 and followed[index].is_stopped:
            return None
        finder = start(replace(shared, seed=options.seed + index * tuning.seeds_apart, progress=followed[index]))
        return finder.found(seed_orders)

    results: list[tuple[float, Order, bool]] = []
    with ThreadPoolExecutor(workers) if workers > 1 else nullcontext() as pool:
        try:
            # In the order of the seeds, so that the result does not depend on which search ends first.
            for result in (map if pool is None else pool.map)(find, range(num_searches)):
                if result is not None:
                    results.append(result)
                    if result[2]:
                        break
        finally:
            for each in followed:
                each.stop()
    return min(results, key=itemgetter(0))[1]


def evaluations_per_second() -> float:
    """Op evaluations per second of a search, on one CPU core of 2024."""
    return _WEBASSEMBLY_EVALUATIONS_PER_S if sys.platform == "emscripten" else _COMPILED_EVALUATIONS_PER_S


class _Finder:
    """The state of one search."""

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        costs: CostModel,
        options: SearchOptions,
        fused: bool,
        *,
        schedule: str,
        stops_at_bound: bool = True,
    ) -> None:
        self._progress, self._schedule, self._tuning = options.progress or Progress(), schedule, options.tuning
        self._placement, self._costs, self._options, self._fused = placement, costs, options, fused
        self._m, self._n = num_microbatches, costs.num_slices
        fewest = max(self._tuning.small_per_rank * placement.num_ranks, self._tuning.fewest_small)
        self._small_m = min(num_microbatches, -(-fewest // self._n) + (self._tuning.more_of_slices if self._n > 1 else 0))
        limit = math.inf if options.memory_limit is None else float(options.memory_limit)
        self._limit = limit * min(placement.num_ranks, num_microbatches)
        self._full = self._make_core(num_microbatches)
        self._small = self._full if self._small_m == num_microbatches else self._make_core(self._small_m)
        bound = lower_bound(placement, num_microbatches, costs, options.memory_limit)
        self._lower_bound = options.objective.of_passes(bound)
        self._bound = self._lower_bound if stops_at_bound else -math.inf
        self._blocks = Blocks(placement, costs, self._limit, fused=fused)
        self.kept_blocks: list[Block] = []
        self.milestones: list[Order] = []
        self._best_seed_score = math.inf
        self._small_seed_orders: list[Order] = []
        self._seeds = _random_seeds(options.seed)
        self._bottleneck_ms = max(
            math.fsum(costs.forward_ms[s] + costs.backward_ms[s] + costs.wgrad_ms[s] for s in stages) / self._n
            for stages in placement.rank_to_stages
        )

    def _make_core(self, m: int) -> Core:
        """A core for m microbatches, under the memory limit of the whole instance."""
        is_makespan = self._options.objective is Objective.MAKESPAN
        problem = Problem.of(self._placement, m, self._costs, limit=self._limit, is_makespan=is_makespan, fused=self._fused)
        core = Core(problem)
        self._progress.add(core)
        return core

    def found(self, seed_orders: Sequence[SeedOrder]) -> tuple[float, Order, bool]:
        """(objective, order, whether the objective is the lower bound) of the best order found."""
        scored = self._scored(self.find(seed_orders))
        return *scored, self._is_best(scored)

    def find(self, seed_orders: Sequence[SeedOrder]) -> Order:
        """Run the three stages and return the best order found."""
        budget = self._options.budget
        seeded = [] if self._fused else self._score_seed_orders(seed_orders)
        if seeded and self._is_over(seeded[0]):
            return seeded[0][1]
        solved: list[tuple[float, Order]] = []
        if self._m > self._small_m and budget > 0 and not self._fused:
            options = replace(self._options, budget=self._tuning.small_share * budget)
            if self._small_m < self._placement.num_ranks:  # the limit counts fewer microbatches
                options = replace(options, memory_limit=self._limit / self._small_m)
            # It must not stop at its bound: among its orders we want the one that is best once it is unrolled.
            few = _Finder(
                self._placement,
                self._small_m,
                self._costs,
                options,
                self._fused,
                schedule=f"{self._schedule} with {self._small_m} microbatches",
                stops_at_bound=False,
            )
            few._small_seed_orders = self._small_seed_orders
            found = few.find(seed_orders)
            solved = [self._scored(order) for order in self._unrolled([found, *few.milestones])]
            blocks, left = few.kept_blocks, (1.0 - self._tuning.small_share) * budget
        else:
            blocks, spent = self._breed(
                min(self._tuning.breed_share * budget, self._tuning.most_bred + self._tuning.late_breed_share * budget)
            )
            left = budget - spent
        orders = [self._full.decode(self._blocks.policy(block)) for block in blocks]
        bred = sorted((self._scored(order) for order in orders if order), key=_score)
        best = min((*seeded, *bred, *solved), key=_score)
        if budget <= 0 or self._fused:
            return best[1]
        starts = sorted([*bred[:1], *solved, *seeded[: self._tuning.most_starts]], key=_score)
        near = [start for start in starts[: self._tuning.most_starts] if start[0] <= self._tuning.near * best[0]]
        return self._anneal(best, (near * 2)[: self._tuning.most_starts], left)

    def _unrolled(self, orders: Sequence[Order]) -> list[Order]:
        """The best of the smaller instance's orders, unrolled: its steady cycle repeated. Empty if none has such a cycle.

        The best order of the smaller instance need not be the best unrolled: late moves may improve it and spoil every cycle.
        """
        times = self._m - self._small_m
        candidates = []
        for order in orders:
            cycles = (repeated(rows, times, self._n) for rows in (order, without_wgrad(order)))
            for rows, bare in zip(*cycles, strict=True):
                if rows:
                    candidates.append((self._full.fill(rows, [math.inf] * len(rows)), bare))
                if bare:
                    candidates.append((self._full.fill(bare, [self._tuning.usual_patience] * len(bare)), bare))
        best = sorted(
            ((self._full.evaluate(filled), filled, bare) for filled, bare in candidates if filled), key=itemgetter(0, 1)
        )
        filled = [order for _, order, _ in best[:1]]
        for _, _, bare in best[: self._tuning.most_cycles]:
            filled += [self._full.fill(bare, [patience] * len(bare)) for patience in self._tuning.patiences if bare]
        return sorted(filter(None, filled), key=self._full.evaluate)[:1]

    def _is_best(self, scored: tuple[float, Order]) -> bool:
        """Whether an order reaches the lower bound, up to rounding."""
        return scored[0] <= self._bound * (1.0 + 1e-8)

    def _scored(self, order: Order) -> tuple[float, Order]:
        return self._full.evaluate(order)[1], order

    def _breed(self, budget: float) -> tuple[list[Block], float]:
        """The best few blocks, list-scheduled on the small instance: plain ones, random ones, then variations of the best.

        Returns:
            the blocks, and the op evaluations that were spent.
        """
        random = Random(next(self._seeds))
        plain = self._blocks.plain()
        kept: list[tuple[float, int, Block]] = []
        count, spent = 0, 0.0
        workers = min(self._options.workers, self._tuning.generation)
        cores = [self._small, *(self._make_core(self._small_m) for _ in range(workers - 1))]
        with ThreadPoolExecutor(workers) if workers > 1 else nullcontext() as pool:
            while count < self._tuning.fewest_blocks or spent < budget:
                behind = kept and kept[0][0] > self._best_seed_score
                if (behind and spent > self._tuning.behind_share * budget > 0) or (kept and self._progress.is_stopped):
                    break
                blocks = []
                for number in range(count, count + self._tuning.generation):
                    block = next(plain, None)
                    if block is None:
                        fresh = not kept or number < self._tuning.random_blocks or random.random() < self._tuning.fresh_share
                        block = self._blocks.random(random) if fresh else self._blocks.varied(random.choice(kept)[2], random)
                    blocks.append(block)
                parts = [blocks[worker::workers] for worker in range(workers)]
                tried = list((map if pool is None else pool.map)(self._tried, cores, parts))
                for number, block in enumerate(blocks):
                    score, work = tried[number % workers][number // workers]
                    spent += work
                    count += 1
                    if score < math.inf and score not in (other for other, _, _ in kept):
                        kept = sorted([*kept, (score, count, block)], key=lambda entry: entry[:2])[: self._tuning.kept_blocks]
        self.kept_blocks = [block for _, _, block in kept[: self._tuning.most_unrolled]]
        return self.kept_blocks if self._m > self._small_m else self.kept_blocks[:1], spent

    def _tried(self, core: Core, blocks: Sequence[Block]) -> list[tuple[float, float]]:
        """Score and work, in op evaluations, of each block."""
        found = []
        for block in blocks:
            begin = core.work
            order = core.decode(self._blocks.policy(block))
            core.work += self._tuning.block_weight * self._placement.num_stages
            found.append((core.evaluate(order)[0] if order else math.inf, core.work - begin))
        return found

    def _score_seed_orders(self, seed_orders: Sequence[SeedOrder]) -> list[tuple[float, Order]]:
        """The best seed orders with their scores, best first.

        The small instance selects them: all of them as they are, then the best with W moved into the bubbles. Those that remain
        are built in full.
        """
        if not self._small_seed_orders:
            self._small_seed_orders = [self._squeezed(seed_order(self._small_m)) for seed_order in seed_orders]
        small = list(enumerate(self._small_seed_orders))
        as_given = [math.inf] * self._placement.num_ranks
        plain = sorted(
            (self._small.evaluate(self._small.fill(order, as_given) or order)[0], index, order) for index, order in small
        )
        improved = [
            (index, self._improved(self._small, order, self._tuning.patiences[1::3]))
            for _, index, order in plain[: self._tuning.most_improved]
        ]
        chosen = sorted((self._small.evaluate(order)[0], index) for index, order in improved if order)[
            : self._tuning.most_seed_orders
        ]
        self._best_seed_score = chosen[0][0] if chosen else math.inf
        full = [
            self._improved(self._full, self._squeezed(seed_orders[index](self._m)), self._tuning.patiences) for _, index in chosen
        ]
        return sorted((self._scored(order) for order in full if order), key=_score)

    def _improved(self, core: Core, order: Order, patiences: Sequence[float]) -> Order:
        """The best of a seed order as it is, with the Ws of its cooldown in the bubbles, and with all of them there.

        Empty if none fits the memory limit.
        """
        candidates = [core.fill(order, [math.inf] * len(order))]
        for rows in (without_wgrad(order, tail=True), without_wgrad(order)):
            candidates += [core.fill(rows, [patience] * len(rows)) for patience in patiences]
        return min(filter(None, candidates), key=core.evaluate, default=[])

    def _squeezed(self, order: Order) -> Order:
        """The order with every F that exceeds the memory limit, and the ops that need it, moved later until it fits."""
        return [self._squeezed_row(stages, row) for stages, row in zip(self._placement.rank_to_stages, order, strict=True)]

    def _squeezed_row(self, stages: Sequence[int], row: bytes) -> bytes:
        n, changes = self._n, list[list[float]]()
        for whole, after in ([rows[s] for rows in map(self._costs.rows, COST_LISTS[3:])] for s in stages):
            freed = [kept - held for kept, held in zip(after, whole, strict=True)]
            changes += [list(whole), freed[::-1], [-kept for kept in after[::-1]]]
        upcoming = [cycle(of_slices) for of_slices in changes]
        if max(accumulate(next(upcoming[code]) for code in row), default=0.0) <= self._limit + EPSILON:
            return row
        counts, held = [0] * len(changes), 0.0
        late: deque[int] = deque()
        result = bytearray()

        def can_run(code: int) -> bool:  # an F where the other slices of its microbatch fit, too
            whole, part = divmod(counts[code], n)
            if code % 3 == 0:
                return held + math.fsum(changes[code][part:]) <= self._limit + EPSILON
            return (counts[code] if code % 3 == 2 else whole * n + n - 1 - part) < counts[code - 1]

        for code in row:
            late.append(code)
            if len(late) > 1 and code % 3 and can_run(code):
                late.rotate(1)
            while late and can_run(late[0]):
                first = late.popleft()
                held += changes[first][counts[first] % n]
                counts[first] += 1
                result.append(first)
        return bytes(result + bytes(late))

    def _anneal(self, best: tuple[float, Order], starts: Sequence[tuple[float, Order]], budget: float) -> Order:
        """Short rounds from each start, then longer ones from the best so far, with falling thresholds."""
        firsts = [(order, *first) for _, order in starts for first in self._tuning.first_rounds]
        winner = False
        if not self._is_over(best):
            with closing(self._first_rounds(firsts, self._tuning.first_share * budget)) as rounds:
                for (_, filled, _), found in zip(firsts, rounds, strict=True):
                    if found[0] < best[0]:
                        best, winner = found, filled
                    if self._is_over(best):
                        break
        self.milestones = [best[1]]
        left = budget * (1.0 - self._tuning.first_share * len(firsts))
        for filled, share, temperature in self._tuning.filled_rounds if winner else self._tuning.full_rounds:
            if self._is_over(best):
                break
            best = min(best, self._round(self._full, best[1], filled, share * left, temperature, next(self._seeds)), key=_score)
        return best[1]

    def _first_rounds(
        self, firsts: Sequence[tuple[Order, bool, float]], budget: float
    ) -> Generator[tuple[float, Order], None, None]:
        """What each round finds, in turn; several are run at a time if there are workers."""
        rounds = [(order, filled, budget, temperature, next(self._seeds)) for order, filled, temperature in firsts]
        if self._options.workers == 1:
            for each in rounds:
                yield self._round(self._full, *each)
            return
        cores = [self._make_core(self._m) for _ in rounds]
        with ThreadPoolExecutor(min(self._options.workers, len(rounds) or 1)) as pool:
            futures = [pool.submit(self._round, core, *each) for core, each in zip(cores, rounds, strict=True)]
            try:
                for future in futures:
                    yield future.result()
            finally:
                for core, future in zip(cores, futures, strict=True):
                    future.cancel()
                    core.stop()

    def _round(self, core: Core, order: Order, filled: bool, budget: float, temperature: float, seed: int) -> tuple[float, Order]:
        rows, patience = order, [math.inf] * len(order)
        if filled:
            rows = without_wgrad(order)
            waits = min(self._tuning.patiences, key=lambda value: core.evaluate(core.fill(rows, [value] * len(rows)) or order))
            patience = [waits] * len(rows)
        found = core.anneal(rows, patience, seed, budget, temperature * self._bottleneck_ms) or order
        return core.evaluate(found)[1], found

    def _is_over(self, best: tuple[float, Order]) -> bool:
        """Whether there is nothing more to find, or the search was stopped. Reports the best so far."""
        self._progress.report(self._schedule, best[0], self._lower_bound)
        return self._is_best(best) or self._progress.is_stopped


def _score(scored: tuple[float, Order]) -> float:
    return scored[0]


def _random_seeds(seed: int) -> Iterator[int]:
    """Random seeds for the parts of one search."""
    part = 0
    while True:
        yield (seed * 1_000_003 + part) & (2**63 - 1)
        part += 1
