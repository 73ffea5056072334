"""The inner loop of the search: score an order, make an order from a policy, and change both a little, very often.

This file and `search_core.cpp` are twins: the same arithmetic in the same order and the same random numbers, so that the same
seed gives the same plan with and without a compiler. What is changed here has to be changed there; a test compares them.

An *order* has one row a rank, and a row is a string of bytes ``3 * chunk + kind`` with kind 0, 1, 2 for F, B, W. Microbatches
ascend per stage and kind (an invariant of every plan), so the bytes say everything.

A *policy* makes an order of any length by list scheduling: whenever a rank is free it takes, of what can run, the op with the
smallest ``offset[stage, kind] + microbatch * period``. The offsets are the building block of arXiv 2405.15362 (section 3); a rank
may also wait up to `max_wait` for an op that is on its way, which costs `wait_weight` a millisecond in the comparison. The policy
has times of its own, which need not be the true ones: regular patterns are often found with evened-out times.

A policy never runs into a memory deadlock. With the chunks of a rank numbered in the order data flows and `n[c]` forwards of
chunk c started, an F is only admitted while for every chunk c with a successor

    sum over chunks k <= c of (n[k] - n[c + 1]) * activation[k]  <=  limit - sum over chunks k > c of activation[k]

Proof: take the oldest microbatch that is not finished, and let its next op be an F of chunk c (a B or W is never refused). No
younger microbatch has passed this stage and older ones hold nothing, so everything held belongs to chunks below c, and by the
inequality for c - 1 there is room for this activation.

All work is counted in op evaluations, never in seconds, so a budget gives the same plan on every machine.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

Order = list[bytes]
"""Per rank its ops, see the module docstring."""

EPSILON = 1e-9
"""Rounding allowed in comparisons of times and memory."""

DECODE_WEIGHT = 8
"""How many op evaluations list scheduling of one op counts for."""

MEAN_WEIGHT = 0.1
"""Share of the ranks' mean span in the score; the maximum alone is flat under most moves."""

_MASK = (1 << 64) - 1


class Policy(NamedTuple):
    """What a list schedule is made from."""

    durations: Sequence[float]
    """F, B, W time of every stage, flat, as the policy sees them."""
    comm_ms: float
    """Link time as the policy sees it."""
    offsets: Sequence[float]
    """Priority of every stage's F, B and W of microbatch 0, flat."""
    caps: Sequence[float]
    """Per stage, most microbatches between its F and the F of the rank's next chunk (of the last chunk: its own B)."""
    period: float
    """Distance of two microbatches in priority."""
    wait_weight: float
    """Priority lost per millisecond of waiting for an op."""
    max_wait: float
    """Longest wait for an op while another could run."""


class Core(Protocol):
    """What both twins offer."""

    work: float
    """Op evaluations so far."""

    def evaluate(self, order: Order) -> tuple[float, float]:
        """Score (what the search minimises) and objective (span or makespan); both infinite where the order deadlocks."""

    def decode(self, policy: Policy) -> Order:
        """List-schedule a policy. Empty where it cannot finish."""

    def tune(self, policy: Policy, seed: int, budget: float, temperature: float) -> Policy:
        """Change a policy's numbers at random, with an acceptance threshold falling from `temperature` to 0."""

    def anneal(self, order: Order, seed: int, budget: float, temperature: float) -> Order:
        """Move ops within rows likewise. The order must fit the memory; so does the result."""


class Random:
    """SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a few lines in any language."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def bits(self) -> int:
        """64 random bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def unit(self) -> float:
        """Uniform in [0, 1)."""
        return (self.bits() >> 11) * 2.0**-53

    def below(self, limit: int) -> int:
        """Uniform in 0..limit-1."""
        return self.bits() % limit


class PythonCore:
    """The twin without a compiler."""

    def __init__(
        self,
        num_microbatches: int,
        stage_to_rank: Sequence[int],
        durations: Sequence[float],
        comm_ms: float,
        activation: Sequence[float],
        remaining: Sequence[float],
        limit: float,
        makespan: bool,
    ) -> None:
        """Args: as in CostModel, `durations` flat over (stage, F B W); `limit` in the unit of `activation`, for every rank."""
        self.m = num_microbatches
        self.rank_of = list(stage_to_rank)
        self.num_stages = len(self.rank_of)
        self.p = max(self.rank_of) + 1
        self.stages = [[s for s, rank in enumerate(self.rank_of) if rank == r] for r in range(self.p)]
        self.chunk_of = [self.stages[rank].index(s) for s, rank in enumerate(self.rank_of)]
        self.durations = list(durations)
        self.comm_ms = comm_ms
        self.activation = list(activation)
        self.remaining = list(remaining)
        self.limit = limit
        self.makespan = makespan
        self.work = 0.0

    # -- scoring --------------------------------------------------------------------------------------------------------

    def evaluate(self, order: Sequence[bytes | bytearray]) -> tuple[float, float]:
        """See `Core`. Execution in order, as in `simulate`."""
        p, m = self.p, self.m
        ends = [-1.0] * (2 * self.num_stages * m)
        awaited = [-1] * p
        position = [0] * p
        free = [0.0] * p
        first = [0.0] * p
        counts = [[0] * (3 * len(stages)) for stages in self.stages]
        stack = list(range(p - 1, -1, -1))
        done = 0
        while stack:
            rank = stack.pop()
            row, begin = order[rank], position[rank]
            now = free[rank]
            step = begin
            while step < len(row):
                code = row[step]
                kind = code % 3
                stage = self.stages[rank][code // 3]
                count = counts[rank][code]
                start = now
                producer = stage - 1 if kind == 0 else stage + 1
                if kind < 2 and 0 <= producer < self.num_stages:
                    key = (kind * self.num_stages + producer) * m + count
                    ready = ends[key]
                    if ready < 0:
                        awaited[rank] = key
                        break
                    if self.rank_of[producer] != rank:
                        ready += self.comm_ms
                    start = max(start, ready)
                if step == 0:
                    first[rank] = start
                now = start + self.durations[3 * stage + kind]
                counts[rank][code] = count + 1
                step += 1
                if kind < 2:
                    key = (kind * self.num_stages + stage) * m + count
                    ends[key] = now
                    consumer = stage + 1 if kind == 0 else stage - 1
                    if 0 <= consumer < self.num_stages and awaited[self.rank_of[consumer]] == key:
                        awaited[self.rank_of[consumer]] = -1
                        stack.append(self.rank_of[consumer])
            position[rank], free[rank] = step, now
            done += step - begin
        total = sum(map(len, order))
        self.work += total
        if done < total:
            return math.inf, math.inf
        longest = mean = 0.0
        for rank in range(p):
            span = free[rank] - first[rank]
            longest = max(longest, span)
            mean += span
        objective = max(free) - min(first) if self.makespan else longest
        return objective + MEAN_WEIGHT * (mean / p), objective

    # -- list scheduling ------------------------------------------------------------------------------------------------

    def decode(self, policy: Policy) -> Order:
        """See `Core`."""
        p, m = self.p, self.m
        rows = [bytearray() for _ in range(p)]
        ends = [-1.0] * (2 * self.num_stages * m)
        counts = [0] * (3 * self.num_stages)
        free, held = [0.0] * p, [0.0] * p
        events = [(0.0, rank) for rank in range(p)]
        done = 0
        while events:
            now, rank = heapq.heappop(events)
            if now < free[rank] - EPSILON:
                continue
            stage, kind, start = self._choose(policy, rank, now, counts, ends, held[rank])
            if stage < 0:
                continue
            if start > now + EPSILON:
                heapq.heappush(events, (start, rank))
                continue
            microbatch = counts[3 * stage + kind]
            counts[3 * stage + kind] = microbatch + 1
            end = now + policy.durations[3 * stage + kind]
            free[rank] = end
            rows[rank].append(3 * self.chunk_of[stage] + kind)
            done += 1
            if kind == 2:
                held[rank] -= self.remaining[stage]
            else:
                held[rank] += self.activation[stage] if kind == 0 else self.remaining[stage] - self.activation[stage]
                ends[(kind * self.num_stages + stage) * m + microbatch] = end
                consumer = stage + 1 if kind == 0 else stage - 1
                if 0 <= consumer < self.num_stages and self.rank_of[consumer] != rank:
                    other = self.rank_of[consumer]
                    heapq.heappush(events, (max(end + policy.comm_ms, free[other]), other))
            heapq.heappush(events, (end, rank))
        self.work += DECODE_WEIGHT * done
        return [bytes(row) for row in rows] if done == 3 * self.num_stages * m else []

    def _choose(
        self, policy: Policy, rank: int, now: float, counts: list[int], ends: list[float], held: float
    ) -> tuple[int, int, float]:
        """The op `rank` should start next and when: (stage, kind, start); stage -1 where nothing is in sight."""
        m = self.m
        best, chosen = math.inf, (-1, 0, 0.0)
        for chunk, stage in enumerate(self.stages[rank]):
            for kind in (0, 1, 2):
                microbatch = counts[3 * stage + kind]
                if microbatch >= (m if kind == 0 else counts[3 * stage + kind - 1]):
                    continue
                arrival = 0.0
                producer = stage - 1 if kind == 0 else stage + 1
                if kind < 2 and 0 <= producer < self.num_stages:
                    arrival = ends[(kind * self.num_stages + producer) * m + microbatch]
                    if arrival < 0:
                        continue
                    if self.rank_of[producer] != rank:
                        arrival += policy.comm_ms
                    if arrival > now + policy.max_wait:
                        continue
                wait = max(arrival - now, 0.0)
                value = policy.offsets[3 * stage + kind] + microbatch * policy.period + policy.wait_weight * wait
                if value < best and (kind > 0 or self._admits(policy, rank, chunk, counts, held)):
                    best, chosen = value, (stage, kind, now + wait)
        return chosen

    def _admits(self, policy: Policy, rank: int, chunk: int, counts: list[int], held: float) -> bool:
        """Whether an F of `chunk` fits the limit, leaves room for what must follow, and is within its cap."""
        stages = self.stages[rank]
        stage, last = stages[chunk], len(stages) - 1
        if held + self.activation[stage] > self.limit + EPSILON:
            return False
        passed = counts[3 * stages[chunk + 1]] if chunk < last else counts[3 * stage + 1]
        if counts[3 * stage] - passed >= policy.caps[stage]:
            return False
        for c in range(chunk, last):
            waiting = self.activation[stage]
            beyond = counts[3 * stages[c + 1]]
            for k in range(c + 1):
                waiting += (counts[3 * stages[k]] - beyond) * self.activation[stages[k]]
            for k in range(c + 1, last + 1):
                waiting += self.activation[stages[k]]
            if waiting > self.limit + EPSILON:
                return False
        return True

    # -- moves ----------------------------------------------------------------------------------------------------------

    def tune(self, policy: Policy, seed: int, budget: float, temperature: float) -> Policy:
        """See `Core`."""
        random = Random(seed)
        current, score = policy, self._score(policy)
        best, best_score = current, score
        begin = self.work
        while self.work - begin < budget:
            left = 1.0 - (self.work - begin) / budget
            candidate = self._varied(current, policy.period, random)
            candidate_score = self._score(candidate)
            if candidate_score <= score + temperature * left * left * random.unit():
                current, score = candidate, candidate_score
                if score < best_score:
                    best, best_score = current, score
        return best

    def _score(self, policy: Policy) -> float:
        order = self.decode(policy)
        self.work += 8
        return self.evaluate(order)[0] if order else math.inf

    def _varied(self, policy: Policy, period: float, random: Random) -> Policy:
        """A policy with one thing changed."""
        choice = random.unit()
        if choice >= 0.96:
            return policy._replace(max_wait=random.unit() * period * 0.3)
        if choice >= 0.93:
            return policy._replace(period=period * (0.95 + 0.45 * random.unit()))
        if choice >= 0.9:
            return policy._replace(wait_weight=random.unit() * 3.0)
        kind = random.below(3)
        first = last = random.below(self.num_stages)
        if random.unit() >= 0.5:
            other = random.below(self.num_stages)
            first, last = min(first, other), max(last, other)
        if choice < 0.6:
            offsets = list(policy.offsets)
            scale = random.unit()
            change = (random.unit() - 0.5) * 2.0 * period * (scale * scale)
            ramp = random.unit() < 0.3
            for stage in range(first, last + 1):
                share = (stage - first + 1) / (last - first + 1) if ramp else 1.0
                offsets[3 * stage + kind] += change * share
            return policy._replace(offsets=offsets)
        caps = list(policy.caps)
        step = 1.0 if random.below(2) else -1.0
        for stage in range(first, last + 1):
            caps[stage] = max(1.0, caps[stage] + step)
        return policy._replace(caps=caps)

    def anneal(self, order: Order, seed: int, budget: float, temperature: float) -> Order:
        """See `Core`."""
        random = Random(seed)
        rows = [bytearray(row) for row in order]
        score = self.evaluate(rows)[0]
        best, best_score = [bytes(row) for row in rows], score
        begin = self.work
        while self.work - begin < budget:
            left = 1.0 - (self.work - begin) / budget
            changed = self._repeated_swap(rows, random) if random.unit() < 0.1 else self._single_move(rows, random)
            self.work += 8
            if not changed:
                continue
            saved = [(rank, rows[rank]) for rank, _ in changed]
            for rank, row in changed:
                rows[rank] = row
                self.work += len(row)
            fits = all(self._row_is_valid(rank, row) for rank, row in changed)
            candidate = self.evaluate(rows)[0] if fits else math.inf
            if candidate <= score + temperature * left * left * random.unit():
                score = candidate
                if score < best_score:
                    best, best_score = [bytes(row) for row in rows], score
            else:
                for rank, row in saved:
                    rows[rank] = row
        return best

    def _single_move(self, rows: list[bytearray], random: Random) -> list[tuple[int, bytearray]]:
        """Take one op out and put it back a little earlier or later."""
        rank = random.below(self.p)
        row = rows[rank]
        source = random.below(len(row))
        scale = random.unit()
        distance = 1 + int(scale * scale * scale * (3 * len(self.stages[rank]) + 6))
        target = source + distance if random.below(2) else source - distance
        if not 0 <= target < len(row):
            return []
        moved = bytearray(row)
        moved.insert(target, moved.pop(source))
        return [(rank, moved)] if moved != row else []

    def _repeated_swap(self, rows: list[bytearray], random: Random) -> list[tuple[int, bytearray]]:
        """Swap every pair of neighbours of two given codes in a window, on one rank, some, or all: another steady state."""
        first = last = random.below(self.p)
        choice = random.unit()
        if choice < 0.3:
            first, last = 0, self.p - 1
        elif choice < 0.6:
            last = min(self.p - 1, first + 1 + random.below(self.p))
        num_codes = 3 * len(self.stages[first])
        before, after = random.below(num_codes), random.below(num_codes)
        length = len(rows[first])
        low, high = random.below(length), random.below(length)
        low, high = min(low, high), max(low, high)
        if before == after:
            return []
        changed = []
        for rank in range(first, last + 1):
            row = bytearray(rows[rank])
            step = low
            while step + 1 < min(high, len(row)):
                if row[step] == before and row[step + 1] == after:
                    row[step], row[step + 1] = after, before
                    step += 1
                step += 1
            if row != rows[rank]:
                changed.append((rank, row))
        return changed

    def _row_is_valid(self, rank: int, row: bytearray) -> bool:
        """Whether the row runs F before B before W and stays within the memory."""
        counts = [0] * (3 * len(self.stages[rank]))
        held = 0.0
        for code in row:
            kind, stage = code % 3, self.stages[rank][code // 3]
            counts[code] += 1
            if kind == 0:
                held += self.activation[stage]
                if held > self.limit + EPSILON:
                    return False
            else:
                if counts[code] > counts[code - 1]:
                    return False
                held -= self.activation[stage] - self.remaining[stage] if kind == 1 else self.remaining[stage]
        return True
