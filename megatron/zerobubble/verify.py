"""Check a certificate: is the plan valid, what does it take, and can any other plan take less?

This file shares no code with the planner and imports nothing but the standard library, so that it can be read, copied and run by
itself: ``python verify.py FILE``, or ``zerobubble verify FILE``.

A certificate is a JSON object with a plan, the costs it was made for, a memory limit, an objective and a lower bound. The plan
is simulated: every rank runs its ops in order, an op starts when its inputs are there, and a message takes the time of its link.
Then the bound is computed again, by the formula that the certificate names, for the rank that it names and with its prices. A
*price* is milliseconds per unit of memory: by weak duality every price of 0 or more gives a valid bound, so it is no matter how
the planner found them. ADR 39 has the proofs of the formulas; in short, for one rank and a memory limit of L microbatches:

- *work*: its work, plus the time in which it must wait for its first B and after its last F, when memory allows no more F or W.
- *memory*: the activation memory of all microbatches times the shortest time from F to B, and what is missing below L in the
  first F, in the last B and in W, divided by L; for the rank's own time, or from its first F to its last B with travel around it.
- *in flight*: the same in whole passes, where all take the same memory.
- *travel*: the first F comes to the rank, it does its work, and its last gradient returns to stage 0.
- *return*: microbatch 0 travels down and returns; all F run, and what frees memory for them; the last microbatch travels down
  and returns.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FORMAT = "zerobubble-certificate/1"
NAMES = ("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward")
TOLERANCE = 1e-6
"""Relative difference allowed between two computations of one number."""


class RefusedError(Exception):
    """The certificate does not hold; the text says where."""


def _is_cost(value: float) -> bool:
    """Whether it is a number, finite and not below 0; every comparison with NaN, which JSON files can have, is false."""
    return 0 <= value < float("inf")


class Costs:
    """Times and memory of passes, and times of links, from the costs of a plan."""

    def __init__(self, body: dict[str, Any], rank_of: list[int], m: int) -> None:
        own = body.get("microbatches")
        self.table: dict[str, list[list[float]]] = {
            name: own[name] if own else [[value] * m for value in body[name]] for name in NAMES
        }
        for name in NAMES:
            rows = self.table[name]
            if len(rows) != len(rank_of) or any(len(row) != m or not all(map(_is_cost, row)) for row in rows):
                raise RefusedError(
                    f"costs: {name} must have {len(rank_of)} stages and {m} microbatches, none below 0 or infinite"
                )
        self.rank_of, self.comm, self.links = rank_of, body.get("comm_ms", 0.0), body.get("links")
        self.sizes = self.links["message_bytes"] if self.links else [0.0]
        if not all(map(_is_cost, [self.comm, *self.sizes, *self._between("latency_ms")])):
            raise RefusedError("costs: comm_ms and links must be finite numbers, none below 0")
        if not all(speed > 0 for speed in self._between("gigabytes_per_s")):
            raise RefusedError("costs: every bandwidth must be above 0")

    def _between(self, name: str) -> list[float]:
        """The numbers of a matrix of links that are about two ranks."""
        rows = (self.links or {}).get(name, [])
        return [value for rank, row in enumerate(rows) for other, value in enumerate(row) if rank != other]

    def link(self, source: int, target: int, microbatch: int | None = None) -> float:
        """Time of a message between the ranks of two stages; of the smallest one if no microbatch is given."""
        one, other = self.rank_of[source], self.rank_of[target]
        if one == other or self.links is None:
            return 0.0 if one == other else self.comm
        size = min(self.sizes) if microbatch is None else self.sizes[microbatch % len(self.sizes)]
        speed = self.links.get("gigabytes_per_s")
        return self.links["latency_ms"][one][other] + (size / (speed[one][other] * 1e6) if speed else 0.0)

    def sum(self, name: str, stages: list[int]) -> float:
        """Over stages and all microbatches."""
        return sum(sum(self.table[name][stage]) for stage in stages)

    def items(self, stages: list[int], *names: str) -> list[tuple[float, ...]]:
        """One tuple of costs per stage and microbatch."""
        return [values for stage in stages for values in zip(*(self.table[name][stage] for name in names), strict=True)]


def simulate(rows: list[list[str]], costs: Costs, assignment: list[int]) -> tuple[float, float, list[float]]:
    """Span and makespan in milliseconds, and the peak memory of each rank in microbatches."""
    m, last = len(assignment), len(costs.rank_of) - 1
    parsed = [[_parsed(text) for text in row] for row in rows]
    expected = {(s, kind, i) for s in range(last + 1) for kind in "FBW" for i in range(m)}
    given = [(s, part, i) for row in parsed for s, kind, i in row for part in kind]
    if len(given) != len(expected) or set(given) != expected:
        raise RefusedError("the plan does not have F, B and W of every microbatch and stage once")
    if any(costs.rank_of[s] != rank for rank, row in enumerate(parsed) for s, _, _ in row):
        raise RefusedError("the plan has an op on a rank that does not have its stage")
    ends: dict[tuple[int, str, int], float] = {}
    at, free, first, held, peak = ([0] * len(rows), *([0.0] * len(rows) for _ in range(4)))
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(parsed):
            while at[rank] < len(row):
                stage, kind, i = row[at[rank]]
                data, needs = assignment[i], _needs(stage, kind, i, last)
                if any(need not in ends for need in needs):
                    break
                begin = max([free[rank], *(ends[need] + costs.link(need[0], stage, data) for need in needs)])
                first[rank] = first[rank] if at[rank] else begin
                f, b, w, whole, kept = (costs.table[name][stage][data] for name in NAMES)
                free[rank] = begin + {"F": f, "B": b, "W": w, "BW": b + w}[kind]
                ends[stage, kind[0], i] = free[rank]
                held[rank] += {"F": whole, "B": kept - whole, "W": -kept, "BW": -whole}[kind]
                peak[rank] = max(peak[rank], held[rank])
                at[rank], moved = at[rank] + 1, True
    if any(done < len(row) for done, row in zip(at, parsed, strict=True)):
        raise RefusedError("the plan deadlocks")
    return max(end - begin for begin, end in zip(first, free, strict=True)), max(free) - min(first), peak


def _parsed(text: str) -> tuple[int, str, int]:
    kind = "".join(letter for letter in text if letter in "FBW")
    stage, _, microbatch = text.partition(kind)
    if kind not in ("F", "B", "W", "BW") or not (stage.isdigit() and microbatch.isdigit()):
        raise RefusedError(f"{text!r} is not an op")
    return int(stage), kind, int(microbatch)


def _needs(stage: int, kind: str, microbatch: int, last: int) -> list[tuple[int, str, int]]:
    if kind == "F":
        return [(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [(stage, "B", microbatch)]
    return [(stage, "F", microbatch)] + ([(stage + 1, "B", microbatch)] if stage < last else [])


class Bounds:
    """The lower bounds on the time of any plan, for one rank; each returns milliseconds."""

    def __init__(self, costs: Costs, rank: int, limit: float, prices: dict[str, float]) -> None:
        if any(not 0 <= price < float("inf") for price in prices.values()):
            raise RefusedError(f"the bound's prices must be 0 or more: {prices}")
        self.costs, self.limit, self.prices = costs, limit, prices
        self.stages = [stage for stage, owner in enumerate(costs.rank_of) if owner == rank]
        self.first, self.last = self.stages[0], self.stages[-1]
        self.f, self.b, self.w = ([min(row) for row in costs.table[name]] for name in NAMES[:3])
        self.excess = costs.sum("activation", self.stages) - limit
        self.forward, self.backward, self.wgrad = (costs.sum(name, self.stages) for name in NAMES[:3])
        items = costs.items(self.stages, *NAMES)
        finite = 0 < limit < float("inf")
        self.alike = items[0] if finite and len(set(items)) == 1 else None
        memory = {(whole, kept) for *_, whole, kept in items}
        self.each = min(memory) if finite and len(memory) == 1 else None  # memory of a pass before and after B
        self.total, self.longest_f = len(items), max(f for f, *_ in items)

    def down(self, stage: int, since: int = 0) -> float:
        """From the start of F of one stage to the start of F of another, for the fastest microbatch."""
        return sum(self.f[s] + self.costs.link(s, s + 1) for s in range(since, stage))

    def turn(self, stage: int) -> float:
        """From the start of F of a stage to the end of its B, for the fastest microbatch."""
        last = len(self.f) - 1
        return sum(self.f[s] + self.b[s] for s in range(stage, last + 1)) + sum(
            self.costs.link(s, s + 1) + self.costs.link(s + 1, s) for s in range(stage, last)
        )

    def back(self, stage: int) -> float:
        """From the end of B of a stage to the end of W of stage 0, for the fastest microbatch."""
        return sum(self.costs.link(s + 1, s) + self.b[s] for s in range(stage)) + self.w[0]

    def most(self, name: str, items: Sequence[tuple[float, ...]]) -> float:
        """At least the most time that ops of (time, memory) can take while all their memory is within the limit."""
        price = self.prices.get(name, 0.0)
        return (price * self.limit if price else 0.0) + sum(max(0.0, time - price * memory) for time, memory in items)

    def idle_head(self) -> float:
        """Idle time before the rank's first B, in which it can only run F, as many as fit."""
        until_backward = self.down(self.last, self.first) + self.turn(self.last) - self.b[self.last]
        forwards = self.most("before the first B", self.costs.items(self.stages, "forward_ms", "activation"))
        if self.each and self.fitting() > 0:
            forwards = min(forwards, self.fitting() * self.longest_f)
        return max(0.0, until_backward - forwards)

    def fitting(self, beside: float = 0.0) -> int:
        """How many passes fit the memory between their F and their B beside something else, if all take the same."""
        if self.each is None:
            raise RefusedError("this bound needs a memory limit, and stages and microbatches that take the same memory")
        whole, headroom = self.each[0], self.limit - beside
        return self.total if self.total * whole <= headroom else max(0, int(headroom / whole * (1 + 1e-9)))

    def left(self) -> float:
        """At least the most B and W that can be left after the rank's last F: those of what is in memory, F or B being done."""
        if self.alike:
            _, b, w, whole, kept = self.alike
            most = 0.0
            for number in range(self.total + 1):
                headroom = self.limit - number * whole
                if headroom >= 0:
                    pending = min(self.total - number, int(headroom / kept * (1 + 1e-9)) if kept > 0 else self.total)
                    most = max(most, number * (b + w) + pending * w)
            return most
        price = self.prices.get("after the last F", 0.0)
        return (price * self.limit if price else 0.0) + sum(
            max(0.0, w - price * kept, b + w - price * whole) for b, w, whole, kept in self.costs.items(self.stages, *NAMES[1:])
        )

    def work(self) -> float:
        """Work and idle ends; they add up if some F is after the first B, else the larger one counts."""
        until_end = self.turn(self.first) - self.down(self.last, self.first) - self.f[self.last] + self.w[self.first]
        ends = self.idle_head(), max(0.0, until_end - self.left())
        return self.forward + self.backward + self.wgrad + (max(ends) if self.excess <= 0 else sum(ends))

    def missing(self, times: str) -> float:
        """Memory times time missing below the limit while F fill it or B empty it, no faster than the fastest of them."""
        ops = [(time, memory) for time, memory in self.costs.items(self.stages, times, "activation") if memory > 0]
        rate = max((memory / time if time else float("inf") for time, memory in ops), default=float("inf"))
        below = self.limit - max((memory for _, memory in ops), default=float("inf"))
        if below <= 0 or rate == float("inf"):
            return 0.0
        length = min(below / rate, self.costs.sum(times, self.stages))
        return below * length - rate * length * length / 2

    def area(self, left: float = 0.0) -> float:
        """Memory times time between F and B, and missing below the limit: in the first F, in the last B, in W but some left."""
        between, during, before = 0.0, 0.0, [0.0] * len(self.costs.table["activation"][0])
        for s in self.stages:
            costs = self.costs.items([s], "activation", "activation_after_backward", "wgrad_ms")
            before = [held + whole for held, (whole, _, _) in zip(before, costs, strict=True)]  # a fused BW holds all of these
            between += sum(whole for whole, _, _ in costs) * self.turn(s)
            during += sum(min(kept, held) * w for held, (_, kept, w) in zip(before, costs, strict=True))
        return between + self.missing("forward_ms") + self.missing("backward_ms") + max(0.0, during - left)

    def memory(self) -> float:
        """Memory times time, over the limit, from the rank's first op to its last."""
        return self.area() / self.limit

    def travel_memory(self) -> float:
        """The same from the rank's first F to its last B, and travel; left for later are W whose memory fits together."""
        longest = max(w for (w,) in self.costs.items(self.stages, "wgrad_ms"))
        return self.down(self.first) + self.area(longest * self.limit) / self.limit + self.back(self.first)

    def passes(self, wgrads: float) -> float:
        """Passes times time between F and B, and missing: at the k-th F at most k run, at the j-th last B j, beside a W fewer."""
        most = self.fitting()
        if most < 1 or self.each is None:
            raise RefusedError("this bound needs a memory limit that a pass fits")
        f, b = (min(self.costs.items(self.stages, name))[0] for name in NAMES[:2])
        area = self.total / len(self.stages) * sum(self.turn(s) for s in self.stages) + most * (most - 1) / 2 * (f + b)
        return (area + min(1, most - self.fitting(self.each[1])) * max(0.0, wgrads)) / most

    def in_flight(self) -> float:
        """From the rank's first op to its last; after the j-th last B at most j - 1 run."""
        most, w = self.fitting(), min(self.costs.items(self.stages, "wgrad_ms"))[0]
        beside = min(1, most - self.fitting(self.each[1] if self.each else 0.0))
        return self.passes(self.wgrad) + (most * (most + 1) / 2 - most * beside) * w / max(1, most)

    def travel_in_flight(self) -> float:
        """From the rank's first F to its last B, and travel; left for later are W whose memory fits together."""
        least, longest = min(self.each or (0.0,)), max(self.costs.items(self.stages, "wgrad_ms"))[0]
        left = (self.total if least * self.total <= self.limit else self.limit / least) * longest
        return self.down(self.first) + self.passes(self.wgrad - left) + self.back(self.first)

    def alone(self) -> float:
        """One microbatch: all its passes, and W of stage 0."""
        return self.down(self.first) + self.turn(self.first) + self.back(self.first)

    def travel(self) -> float:
        """Travel to the rank, its F, its B and the W that cannot be put off until all B are over, travel back."""
        pending = [
            (w, min(whole, kept))
            for w, whole, kept in self.costs.items(self.stages, "wgrad_ms", "activation", "activation_after_backward")
        ]
        wgrad = max(0.0, self.wgrad - self.most("after the last B", pending))
        return self.down(self.first) + self.idle_head() + self.forward + self.backward + wgrad + self.back(self.first)

    def freeing(self) -> float:
        """Round trip, the F and what frees memory for them, round trip."""
        if self.excess <= 0:
            raise RefusedError("this bound needs a memory limit that not all activations fit")
        freed = max(0.0, self.backward + self.wgrad - self.left())
        back = self.turn(self.last) - self.f[self.last] + self.back(self.last)
        return self.down(self.first) + self.idle_head() + self.forward + freed + back


FORMULAS: dict[str, tuple[Callable[[Bounds], float], bool]] = {
    "nothing": (lambda bounds: 0.0, False),
    "work and idle ends": (Bounds.work, True),
    "memory times time": (Bounds.memory, True),
    "travel, memory times time, travel": (Bounds.travel_memory, False),
    "passes in flight times time": (Bounds.in_flight, True),
    "travel, passes in flight times time, travel": (Bounds.travel_in_flight, False),
    "one microbatch": (Bounds.alone, False),
    "travel, work, travel": (Bounds.travel, False),
    "round trip, free memory, round trip": (Bounds.freeing, False),
}
"""Name -> formula, and whether it is about the rank's own time, to which the makespan adds the way from stage 0 to the rank."""


def check(body: dict[str, Any]) -> tuple[float, float]:
    """The objective and its lower bound, both in milliseconds. Raises RefusedError if anything in the certificate is wrong."""
    if body.get("format") != FORMAT:
        raise RefusedError(f"its format is {body.get('format')!r}; this checker reads {FORMAT}")
    plan, claimed = body["plan"], body["bound"]
    m, rank_of, rows = plan["num_microbatches"], plan["stage_to_rank"], plan["ops"]
    assignment = plan.get("assignment") or list(range(m))
    if sorted(assignment) != list(range(m)) or sorted(set(rank_of)) != list(range(len(rows))):
        raise RefusedError("the plan's assignment or its stage_to_rank leaves something out")
    costs = Costs(plan["costs"], rank_of, m)
    span, makespan, peak = simulate(rows, costs, assignment)
    limit = float("inf") if body["memory_limit"] is None else body["memory_limit"] * min(len(rows), m) * (1 + 1e-9) + 1e-9
    if not max(peak) <= limit * (1 + TOLERANCE):
        raise RefusedError(f"the plan needs {max(peak):.6g} microbatches of memory and its limit is {limit:.6g}")
    if body["objective"] not in ("span", "makespan"):
        raise RefusedError(f"its objective is {body['objective']!r}; span and makespan are known")
    value = span if body["objective"] == "span" else makespan
    if claimed["name"] not in FORMULAS:
        raise RefusedError(f"its bound {claimed['name']!r} is not known; known are {', '.join(FORMULAS)}")
    formula, of_one_rank = FORMULAS[claimed["name"]]
    bounds = Bounds(costs, claimed["rank"], limit, claimed["prices"])
    bound = formula(bounds) + (bounds.down(bounds.first) if of_one_rank and body["objective"] == "makespan" else 0.0)
    if not abs(body["objective_ms"] - value) <= TOLERANCE * value:
        raise RefusedError(f"its objective_ms is {body['objective_ms']} and comes out as {value}")
    if not claimed["bound_ms"] <= bound + TOLERANCE * value:
        raise RefusedError(f"its bound is {claimed['bound_ms']} and only {bound} is proven")
    if not claimed["bound_ms"] <= value * (1 + TOLERANCE):
        raise RefusedError(f"its bound is {claimed['bound_ms']} and the plan takes {value}, which is less")
    return value, claimed["bound_ms"]


def main(argv: list[str] | None = None) -> int:
    """Check a file and print what it proves; 1 if it does not hold."""
    parser = argparse.ArgumentParser(prog="zerobubble verify", description="check the certificate of a plan")
    parser.add_argument("file", help="a certificate, as `zerobubble plan --certificate FILE` writes it; - reads standard input")
    file = parser.parse_args(argv).file
    try:
        body = json.loads(sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8"))
        value, bound = check(body)
    except RefusedError as error:
        print(f"{file} does not hold: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{file} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, ZeroDivisionError) as error:
        print(f"{file} is not a certificate: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    gap = max(0.0, value / bound - 1) if bound > 0 else float("inf") if value > 0 else 0.0
    print(f"valid; {body['objective']} {value:.6g} ms, no plan takes less than {bound:.6g} ms, gap {100 * gap:.3f} %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
