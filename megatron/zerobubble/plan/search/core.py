"""The inner loop of the search: score an order, build an order from a policy, and anneal an order.

This file and `core.cpp` with its headers are twins (`evaluate.hpp` scores, `decode.hpp` builds from a policy), and so are
`moves.py` and `moves.hpp`: the same arithmetic in the same order and the same random numbers, so that the same seed gives the
same plan with and without a compiler. Change both together; a test compares them.

An *order* has one row per rank, and a row is a string of bytes ``3 * chunk + kind`` with kind 0, 1, 2 for F, B, W. Microbatches
ascend per stage and kind (an invariant of every plan), so the bytes define the plan completely. With n slices per microbatch the
same holds of slices: ops are numbered as in `ir.Passes`, so B number k needs the F of its own slice, which has another number.

Rows may leave W out. W fills bubbles, and its places follow from the order of F and B: a rank runs its oldest pending W if its
next op is at least `patience` times that W's duration away, or if an F would otherwise exceed the memory. The remaining Ws run at
the end. Changing an order without W therefore moves every W with it, which changes of a full order cannot do. Infinite patience
runs W only where the rows have it or the memory requires it.

A *policy* builds an order of any length by list scheduling: a free rank runs, of the ops that are ready, the one with the
smallest ``offset[stage, kind] + microbatch * period``. The offsets are the building block of arXiv 2405.15362 (section 3). A rank
may also wait up to `max_wait` for an op whose input is in flight, which costs `wait_weight` per millisecond in the comparison.
The policy has times of its own, which may differ from the true ones: evened-out times often lead to regular patterns. The cap on
microbatches between two chunks may fall after the first ones: many forwards fill the warmup, later their memory is better used
for pending W.

A policy never runs into a memory deadlock. With the chunks of a rank numbered in the order data flows and `n[c]` forwards of
chunk c started, an F is only admitted while for every chunk c with a successor

    sum over chunks k <= c of (n[k] - n[c + 1]) * activation[k]  <=  limit - sum over chunks k > c of activation[k]

Proof: take the oldest unfinished microbatch, and let its next op be an F of chunk c (a B or W is never refused). No younger
microbatch has passed this stage and older ones have freed their memory, so all activations in memory belong to chunks below c,
and by the inequality for c - 1 this activation fits.

With slices `n[k]` counts slices, `n[c + 1]` only those of microbatches of which all have passed, and a microbatch of which some
have not passed counts whole: an F of a slice is only admitted where all slices of its microbatch fit. The proof is the same.

Unequal microbatches have costs of their own, and an *assignment* states which of them an order runs as its microbatch i. They
may have different numbers of slices, which move with them: a row's k-th F is then another slice's. Annealing then changes both
(`assign`). An F that does not fit the memory limit is charged for its excess instead of ending the evaluation, so that the search
leaves assignments that do not fit in small steps. Policies are for equal microbatches only.

All work is counted in op evaluations, never in seconds, so a budget gives the same plan on every machine. The compiled core
charges what this one does, but runs only the ops that a move may have changed, and stops where the score is certain to be too
high.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate

from megatron.zerobubble.plan.search.interface import Order, Policy, Problem, Rows
from megatron.zerobubble.plan.search.moves import Moves, Random

EPSILON = 1e-9
"""Rounding allowed in comparisons of times and memory."""

DECODE_WEIGHT = 8
"""Op evaluations charged for list-scheduling one op."""

MOVE_WEIGHT = 40
"""Op evaluations charged for choosing a move."""

SPAN_MEAN_WEIGHT, MAKESPAN_MEAN_WEIGHT = 0.3, 0.1
"""Share of the ranks' mean span in the score, for each objective; the maximum alone is flat under most moves."""

PATIENCE_SHARE, SWAP_SHARE, SHIFT_SHARE, PLAIN_SHIFT_SHARE = 0.05, 0.1, 0.9, 0.2
"""Upper ends of the shares of moves: patience (without W only), repeated swaps, repeated shifts (without W, with W); the rest are
single moves."""

ASSIGN_SHARE, LATE_MOVE_SHARE = 0.8, 0.5
"""With unequal microbatches: share of moves that change the assignment, and upper end of the share of repeated shifts among the
others."""


class PythonCore:
    """The core in pure Python, twin of `NativeCore` in core.cpp, which has the same methods.

    Args:
        problem: what it scores orders for.
    """

    def __init__(self, problem: Problem) -> None:
        self.n = n = problem.num_slices
        self.m = problem.num_passes
        self.rank_of = list(problem.stage_to_rank)
        self.num_stages = len(self.rank_of)
        self.p = max(self.rank_of) + 1
        self.stages = [[s for s, rank in enumerate(self.rank_of) if rank == r] for r in range(self.p)]
        self.chunk_of = [self.stages[rank].index(s) for s, rank in enumerate(self.rank_of)]
        self.durations = list(problem.durations)
        self.activation = list(problem.activation)
        self.remaining = list(problem.remaining)
        self.limit = problem.limit
        self.makespan = problem.is_makespan
        self.excess_ms = problem.excess_ms
        self.counts = list(problem.counts)
        has_columns = bool(self.counts) or (n == 1 and self.m > 1 and len(self.activation) == self.num_stages * self.m)
        self.is_unequal = has_columns and problem.num_microbatches > 1
        self.width = self.m if has_columns else n
        self.starts = [0, *accumulate(self.counts)]
        self.own = list(range(problem.num_microbatches))
        self._take(self.own)
        self.links = list(problem.links) or self._equal_links(problem.comm_ms)
        self.busy = list(problem.busy)
        self.work = 0.0
        self._is_stopped = False
        self.step_of: list[int] = []
        self._ranks: list[_Rank] = []
        self._critical: list[tuple[int, int]] = []
        self._moves = Moves(self.m, [len(stages) for stages in self.stages])

    def _take(self, assignment: Sequence[int]) -> None:
        """Find the column of costs of every F, and the F that every B and W belongs to. Equal microbatches have one column."""
        if not self.counts:
            n = self.n
            self.slots = list(assignment) if self.is_unequal else [number % self.width for number in range(self.m)]
            self.forward_of = [number + n - 1 - 2 * (number % n) for number in range(self.m)]
            return
        self.slots, self.forward_of = [], []
        for microbatch in assignment:
            first, count = len(self.slots), self.counts[microbatch]
            self.slots += range(self.starts[microbatch], self.starts[microbatch + 1])
            self.forward_of += range(first + count - 1, first - 1, -1)

    def _equal_links(self, comm_ms: float) -> list[float]:
        links = []
        for kind in (0, 1):
            for producer in range(self.num_stages):
                consumer = producer + 1 if kind == 0 else producer - 1
                crosses = 0 <= consumer < self.num_stages and self.rank_of[consumer] != self.rank_of[producer]
                links += [comm_ms if crosses else 0.0] * self.width
        return links

    def stop(self) -> None:
        """End annealing at the next move, now and from now on; may be called from any thread."""
        self._is_stopped = True

    # -- scoring --------------------------------------------------------------------------------------------------------

    def evaluate(self, order: Rows) -> tuple[float, float]:
        """Score, which the search minimizes, and objective (span or makespan) in ms; infinite if it deadlocks. See `simulate`."""
        return self._run(order, [math.inf] * self.p, None)

    def fill(self, rows: Rows, patience: Sequence[float]) -> Order:
        """The order with every W inserted; patience per rank. Empty if the rows deadlock or exceed the memory limit."""
        order = [bytearray() for _ in range(self.p)]
        return [bytes(row) for row in order] if self._run(rows, patience, order)[1] < math.inf else []

    def evaluate_assigned(self, rows: Rows, patience: Sequence[float], assignment: Sequence[int]) -> tuple[float, float]:
        """Score and objective of rows whose microbatch i is `assignment[i]` in the costs; beyond the limit only a score."""
        self._take(assignment)
        found = self._run(rows, patience, None)
        self._take(self.own)
        return found

    def fill_assigned(self, rows: Rows, patience: Sequence[float], assignment: Sequence[int]) -> Order:
        """`fill` with this assignment."""
        self._take(assignment)
        order = self.fill(rows, patience)
        self._take(self.own)
        return order

    def _run(self, rows: Rows, patience: Sequence[float], out: list[bytearray] | None) -> tuple[float, float]:
        """Score and objective of rows that may leave W out; the rows with every W are appended to `out`."""
        ends = [-1.0] * (2 * self.num_stages * self.m)
        self.step_of = [-1] * (2 * self.num_stages * self.m)
        self._ranks = ranks = [
            _Rank(self, stages, row, waits, out[rank] if out else bytearray())
            for rank, (stages, row, waits) in enumerate(zip(self.stages, rows, patience, strict=True))
        ]
        stack = list(range(self.p - 1, -1, -1))
        self.work += sum(map(len, rows))
        while stack:
            if not ranks[stack.pop()].advance(ranks, ends, stack):
                return math.inf, math.inf
        if any(rank.step < len(rank.row) for rank in ranks):
            return math.inf, math.inf
        longest = mean = excess = 0.0
        for rank in ranks:
            span = rank.now - rank.first
            longest = max(longest, span)
            mean += span
            excess += rank.excess
        objective = max(rank.now for rank in ranks) - min(rank.first for rank in ranks) if self.makespan else longest
        score = objective + (MAKESPAN_MEAN_WEIGHT if self.makespan else SPAN_MEAN_WEIGHT) * (mean / self.p)
        if excess > 0:
            return score + self.excess_ms * excess, math.inf
        return score, objective

    # -- list scheduling ------------------------------------------------------------------------------------------------

    def decode(self, policy: Policy) -> Order:
        """List-schedule a policy. Empty if it cannot finish."""
        p, m = self.p, self.m
        rows = [bytearray() for _ in range(p)]
        ends = [-1.0] * (2 * self.num_stages * m)
        counts = [0] * (3 * self.num_stages)
        free, held, begun = [0.0] * p, [0.0] * p, self._begun_sums()
        events = [(0.0, rank) for rank in range(p)]
        done = 0
        while events:
            now, rank = heapq.heappop(events)
            if now < free[rank] - EPSILON:
                continue
            stage, kind, start = self._choose(policy, rank, now, counts, ends, held[rank], begun)
            if stage < 0:
                continue
            if start > now + EPSILON:
                heapq.heappush(events, (start, rank))
                continue
            number = counts[3 * stage + kind]
            counts[3 * stage + kind] = number + 1
            end = now + policy.durations[3 * stage + kind]
            free[rank] = end
            rows[rank].append(3 * self.chunk_of[stage] + kind)
            done += 1
            at = stage * self.width + self.slots[number if kind == 0 else self.forward_of[number]]
            if kind == 2:
                held[rank] -= self.remaining[at]
            else:
                held[rank] += self.activation[at] if kind == 0 else self.remaining[at] - self.activation[at]
                ends[(kind * self.num_stages + stage) * m + number] = end
                consumer = stage + 1 if kind == 0 else stage - 1
                if 0 <= consumer < self.num_stages and self.rank_of[consumer] != rank:
                    other = self.rank_of[consumer]
                    heapq.heappush(events, (max(end + policy.comm_ms, free[other]), other))
            heapq.heappush(events, (end, rank))
        self.work += DECODE_WEIGHT * done
        return [bytes(row) for row in rows] if done == 3 * self.num_stages * m else []

    def _begun_sums(self) -> list[list[float]]:
        """Per stage, the activation memory of the first 0..n slices of a microbatch."""
        starts = range(0, self.num_stages * self.width, self.width)
        return [[0.0, *accumulate(self.activation[at + self.slots[slice]] for slice in range(self.n))] for at in starts]

    def _choose(
        self,
        policy: Policy,
        rank: int,
        now: float,
        counts: list[int],
        ends: list[float],
        held: float,
        begun: list[list[float]],
    ) -> tuple[int, int, float]:
        """The op that `rank` starts next and when: (stage, kind, start); stage -1 if none is ready or in flight."""
        m = self.m
        best, chosen = math.inf, (-1, 0, 0.0)
        for chunk, stage in enumerate(self.stages[rank]):
            for kind in (0, 1, 2):
                number = counts[3 * stage + kind]
                if number >= (m if kind == 0 else counts[3 * stage + kind - 1]):
                    continue
                if kind == 1 and self.forward_of[number] >= counts[3 * stage]:
                    continue
                arrival = 0.0
                producer = stage - 1 if kind == 0 else stage + 1
                if kind < 2 and 0 <= producer < self.num_stages:
                    arrival = ends[(kind * self.num_stages + producer) * m + number]
                    if arrival < 0:
                        continue
                    if self.rank_of[producer] != rank:
                        arrival += policy.comm_ms
                    if arrival > now + policy.max_wait:
                        continue
                wait = max(arrival - now, 0.0)
                value = policy.offsets[3 * stage + kind] + number * policy.period + policy.wait_weight * wait
                if value < best and (kind > 0 or self._admits(policy, rank, chunk, counts, held, begun)):
                    best, chosen = value, (stage, kind, now + wait)
        return chosen

    def _admits(self, policy: Policy, rank: int, chunk: int, counts: list[int], held: float, begun: list[list[float]]) -> bool:
        """Whether an F of `chunk` fits the memory limit now and for all that must follow, and is within its cap."""
        stages, n = self.stages[rank], self.n
        stage, last = stages[chunk], len(stages) - 1
        limit = min(self.limit, policy.limit)
        if held + (begun[stage][n] - begun[stage][counts[3 * stage] % n]) > limit + EPSILON:
            return False
        started, passed = counts[3 * stage], counts[3 * stages[chunk + 1]] if chunk < last else counts[3 * stage + 1] + n - 1
        share = 1.0 - (1.0 - policy.settled) * min(1.0, started / policy.settle_after)
        if started - passed >= policy.caps[stage] * share:
            return False
        for c in range(chunk, last):
            waiting = 0.0
            beyond = counts[3 * stages[c + 1]] // n * n
            for k in range(c + 1):
                ahead = counts[3 * stages[k]] + (k == chunk) - beyond
                if ahead > 0:
                    whole, part = divmod(max(ahead, n), n)
                    waiting += whole * begun[stages[k]][n] + begun[stages[k]][part]
            for k in range(c + 1, last + 1):
                waiting += begun[stages[k]][n]
            if waiting > limit + EPSILON:
                return False
        return True

    # -- moves ----------------------------------------------------------------------------------------------------------

    def anneal(self, rows: Rows, patience: Sequence[float], seed: int, budget: float, temperature: float) -> Order:
        """Move ops within rows at random, with an acceptance threshold falling from `temperature` to 0, and fill the best.

        If some patience is finite (rows without W), more of the moves change many ops at once, and some change the patience.
        """
        return self._improve(rows, patience, self.own, seed, budget, temperature, assigns=False, fixed_order=False)[0]

    def assign(
        self,
        rows: Rows,
        patience: Sequence[float],
        assignment: Sequence[int],
        seed: int,
        budget: float,
        temperature: float,
        fixed_order: bool,
    ) -> tuple[Order, list[int]]:
        """Anneal the assignment and, unless it is fixed, the order. The order is empty if none met fits the memory limit."""
        return self._improve(rows, patience, assignment, seed, budget, temperature, assigns=True, fixed_order=fixed_order)

    def _improve(
        self,
        rows: Rows,
        patience: Sequence[float],
        assignment: Sequence[int],
        seed: int,
        budget: float,
        temperature: float,
        *,
        assigns: bool,
        fixed_order: bool,
    ) -> tuple[Order, list[int]]:
        """`assign`, or with `assigns` false `anneal`, which leaves the assignment as it is."""
        random = Random(seed)
        self._take(assignment)
        current, patient = [bytearray(row) for row in rows], list(patience)
        filled = any(value < math.inf for value in patient)
        shift_share = LATE_MOVE_SHARE if assigns else SHIFT_SHARE if filled else PLAIN_SHIFT_SHARE
        score, objective = self._run(current, patient, None)
        assigned = list(assignment)
        best, best_patience, best_assigned = list(current), patient, assigned
        best_score = score if objective < math.inf else math.inf
        if score == math.inf or (fixed_order and not self.is_unequal):
            budget = 0.0
        if budget > 0:
            self._find_critical()
        begin = self.work
        while self.work - begin < budget and not self._is_stopped:
            left = 1.0 - (self.work - begin) / budget
            varied, previous, changed = patient, assigned, dict[int, bytearray]()
            choice = random.unit()
            if fixed_order or (assigns and self.is_unequal and choice < ASSIGN_SHARE):
                assigned = self._moves.reassign(previous, random)
                self._take(assigned)
            else:
                kind = random.unit() if assigns else choice
                if filled and kind < PATIENCE_SHARE:
                    varied = self._moves.vary_patience(patient, random)
                elif kind < SWAP_SHARE:
                    changed = self._moves.repeated_swap(current, 2 if filled else 3, random)
                elif kind < shift_share:
                    changed = self._moves.repeated_shift(current, random)
                else:
                    changed = self._moves.single_move(current, self._critical, random)
            self.work += MOVE_WEIGHT
            if not changed and varied is patient and assigned is previous:
                continue
            candidate = [changed.get(rank, row) for rank, row in enumerate(current)]
            self.work += sum(map(len, changed.values()))
            candidate_score, reached = self._run(candidate, varied, None)
            if candidate_score <= score + temperature * left * left * random.unit():
                current, patient, score = candidate, varied, candidate_score
                self._find_critical()
                if reached < math.inf and score < best_score:
                    best, best_patience, best_assigned, best_score = current, patient, assigned, score
            elif assigned is not previous:
                assigned = previous
                self._take(assigned)
        self._take(best_assigned)
        found = self.fill(best, best_patience)
        self._take(self.own)
        return found, best_assigned

    def _find_critical(self) -> None:
        """Find the critical path of the last run: the ops that determine when its longest rank ends, last first."""
        lengths = [rank.now - (0.0 if self.makespan else rank.first) for rank in self._ranks]
        rank = lengths.index(max(lengths))
        step = len(self._ranks[rank].row) - 1
        self._critical = []
        while step >= 0:
            self._critical.append((rank, step))
            key = self._ranks[rank].bound[step]
            if key < 0:
                step -= 1
            else:
                rank, step = self.rank_of[key // self.m % self.num_stages], self.step_of[key]


class _Rank:
    """The state of one rank while its row runs."""

    def __init__(self, core: PythonCore, stages: list[int], row: bytes | bytearray, patience: float, out: bytearray) -> None:
        self.core, self.stages, self.row, self.patience, self.out = core, stages, row, patience, out
        self.counts = [0] * (3 * len(stages))
        self.bound = [-1] * len(row)
        self.step = 0
        self.now = self.first = self.held = self.excess = 0.0
        self.awaited = -1
        self.free: dict[int, float] = {}
        """Receiving rank -> when the link to it takes the next message."""

    def advance(self, ranks: list[_Rank], ends: list[float], stack: list[int]) -> bool:
        """Run until an op has to wait for another rank or the row ends; False if the row can never finish."""
        core, m, num_stages = self.core, self.core.m, self.core.num_stages
        begin = self.step
        while self.step < len(self.row):
            code = self.row[self.step]
            kind, stage, count = code % 3, self.stages[code // 3], self.counts[code]
            if kind == 2:
                if count < self.counts[code - 1]:
                    self._wgrad(code // 3)
                self.step += 1
                continue
            forward = count if kind == 0 else core.forward_of[count]
            if kind == 1 and forward >= self.counts[code - 1]:
                return False
            producer = stage - 1 if kind == 0 else stage + 1
            ready, key = self.now, -1
            if 0 <= producer < num_stages:
                key = (kind * num_stages + producer) * m + count
                ready = ends[key]
                if ready < 0:
                    self.awaited = key
                    return True
            at = stage * core.width + core.slots[forward]
            if not self._fill(ready, core.activation[at] if kind == 0 else -math.inf):
                return False
            if ready > self.now:
                self.now, self.bound[self.step] = ready, key
            if self.step == 0:
                self.first = self.now
            self.now += core.durations[(3 * stage + kind) * core.width + core.slots[forward]]
            self.held += core.activation[at] if kind == 0 else core.remaining[at] - core.activation[at]
            self.counts[code] = count + 1
            self.out.append(code)
            self.step += 1
            key = (kind * num_stages + stage) * m + count
            consumer = stage + 1 if kind == 0 else stage - 1
            ends[key] = self._sent(consumer, (kind * num_stages + stage) * core.width + core.slots[forward])
            core.step_of[key] = self.step - 1
            if 0 <= consumer < num_stages and ranks[core.rank_of[consumer]].awaited == key:
                ranks[core.rank_of[consumer]].awaited = -1
                stack.append(core.rank_of[consumer])
        if begin < len(self.row):
            for chunk in reversed(range(len(self.stages))):
                while self.counts[3 * chunk + 2] < self.counts[3 * chunk + 1]:
                    self._wgrad(chunk)
        return True

    def _sent(self, consumer: int, at: int) -> float:
        """When a result that is there now has reached the stage `consumer`; `at` is its place in the costs of links."""
        core = self.core
        if not core.busy or not 0 <= consumer < core.num_stages:
            return self.now + core.links[at]
        to = core.rank_of[consumer]
        start = max(self.now, self.free.get(to, 0.0))
        self.free[to] = start + core.busy[at]
        return start + core.links[at]

    def _fill(self, ready: float, needed: float) -> bool:
        """Run W until the next op fits the memory and starts too soon (at `ready`) for another W; whether it fits."""
        core = self.core
        while True:
            full = self.held + needed > core.limit + EPSILON
            if not full and ready <= self.now:
                return True
            oldest, microbatch = -1, core.m
            for chunk in reversed(range(len(self.stages))):
                done = self.counts[3 * chunk + 2]
                if done < self.counts[3 * chunk + 1] and done < microbatch:
                    oldest, microbatch = chunk, done
            if full and oldest < 0:
                self.excess += self.held + needed - core.limit
                return core.excess_ms > 0
            if oldest < 0:
                return True
            wgrad = core.durations[(3 * self.stages[oldest] + 2) * core.width + core.slots[core.forward_of[microbatch]]]
            if not full and ready - self.now < self.patience * wgrad:
                return True
            self._wgrad(oldest)

    def _wgrad(self, chunk: int) -> None:
        core, stage = self.core, self.stages[chunk]
        slot = core.slots[core.forward_of[self.counts[3 * chunk + 2]]]
        self.now += core.durations[(3 * stage + 2) * core.width + slot]
        self.held -= core.remaining[stage * core.width + slot]
        self.counts[3 * chunk + 2] += 1
        self.out.append(3 * chunk + 2)
