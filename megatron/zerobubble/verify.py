"""Check a certificate: is the plan valid, what does it take, and can any other plan take less?

This file shares no code with the planner and imports nothing but the standard library, so that it can be read, copied and run by
itself: ``python verify.py FILE``, or ``zerobubble verify FILE``.

A certificate is a JSON object with a plan, the costs it was made for, a memory limit, an objective and a lower bound. `check`
reads it in four steps: `read_plan` (every op once, on the rank of its stage), `read_costs`, `simulate` (every rank runs its ops
in order, each as soon as its inputs are there) and `bounds`, which computes the lower bound again for the rank that the
certificate names. All memory is in microbatches, all time in milliseconds.

The certificate's *prices* are milliseconds per unit of memory. Of ops that take time t and memory s each, those that fit the
limit L together take at most ``price * L + sum(max(0, t - price * s))``, for any price (weak duality). So the prices need no
trust: a wrong one only lowers the bound. ADR 39 has the proofs of the bounds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import re
import sys
from typing import Any, NamedTuple

FORMAT = "zerobubble-certificate/1"
NAMES = ("forward_ms", "backward_ms", "wgrad_ms", "activation", "activation_after_backward")
KEYS = ("keys", "key_gradients")
LARGEST = 1e12
"""Most that a cost can be, so that sums stay finite."""
TOLERANCE = 1e-6
"""Relative difference allowed between two computations of one time."""
MOST_LETTERS = 2**28
"""Of a file, so that one without an end is refused."""

Op = tuple[int, str, int]
"""Stage, kind (F, B, W, or BW for both without a break), and microbatch; with slices, the slice, counted through microbatches."""
Table = list[list[float]]
"""A cost of every stage and microbatch or slice, as in `Op` but in the order of the data; of keys those of its microbatch."""


class Pass(NamedTuple):
    """Times of F, B and W of one stage and microbatch, and its memory."""

    forward: float
    backward: float
    wgrad: float
    whole: float  # from the start of F to the end of B
    kept: float  # from the end of B to the end of W
    held: float  # `whole` of this and of the rank's earlier stages, whose B come later: what a fused BW holds
    turn: float  # the shortest time from the start of F to the end of B


class RefusedError(Exception):
    """The certificate does not hold; the text says where."""


def need(condition: bool, text: str) -> None:
    """Refuse the certificate unless a condition holds."""
    if not condition:
        raise RefusedError(text)


def is_number(value: object, largest: float = LARGEST) -> bool:
    """Whether it is a number from 0 to the largest. NaN, which JSON files can have, is not."""
    return type(value) in (int, float) and 0 <= value <= largest  # type: ignore[operator]


def read_plan(plan: dict[str, Any]) -> tuple[list[list[Op]], list[int], list[int], list[int]]:
    """The ops per rank, the rank per stage, which microbatch or slice of the data every one of the plan is, and the number of
    slices of every microbatch of the data.
    """
    rank_of, m, n, rows = plan["stage_to_rank"], plan["num_microbatches"], plan.get("num_slices", 1), plan["ops"]
    is_number = type(m) is int and 0 < m <= sum(map(len, rows))
    need(bool(rank_of) and is_number, "the plan has no stages, or not an op of every microbatch")
    slices = plan.get("slice_counts") or [n] * m
    are_counts = len(slices) == m and all(type(each) is int and 0 < each <= LARGEST for each in (n, *slices))
    are_counts = are_counts and max(slices) == n
    need(are_counts, "the plan's number of slices is not an integer above 0, or not the largest of slice_counts")
    starts = [0, *itertools.accumulate(slices)]
    order: dict[tuple[int, str], list[int]] = {(stage, part): [] for stage in range(len(rank_of)) for part in "FBW"}
    ops: list[list[Op]] = []
    for rank, row in enumerate(rows):
        ops.append([])
        for text in row:
            found = re.fullmatch("([0-9]{1,9})(F|B|W|BW)([0-9]{1,9})(?:[.]([0-9]{1,9}))?", text)
            if found is None:
                raise RefusedError(f"{text!r:.40} is not an op")
            stage, kind, i, part = int(found[1]), found[2], int(found[3]), int(found[4] or 0)
            need(i < m, f"{text} is none of the ops of every microbatch")
            need(part < slices[i], f"{text} is of a slice that does not exist")
            begin, end = starts[i : i + 2]
            need(stage < len(rank_of) and rank_of[stage] == rank, f"{text} is on rank {rank}, which does not have its stage")
            ops[rank].append((stage, kind, begin + part))
            for each in kind:  # F in the order of the slices, B and W in reverse
                order[stage, each].append(begin + part if each == "F" else end - 1 - part)
    for (stage, each), given in order.items():
        is_complete = len(given) == starts[-1] and given == [*range(len(given))]
        also = "" if starts[-1] == m else ", their slices ascending in F and descending in B and W"
        need(is_complete, f"stage {stage} does not have {each} of every microbatch once, in ascending order{also}")
    numbers = (plan["num_ranks"], m, *rank_of, *(plan.get("assignment") or ()))
    need({*map(type, numbers)} == {int}, "the plan has a rank or a microbatch that is not an integer")
    need({*rank_of} == {*range(len(ops))} and plan["num_ranks"] == len(ops), "the plan's stages do not have all of its ranks")
    assignment = plan.get("assignment") or [*range(m)]
    need(sorted(assignment) == [*range(m)], "the plan's assignment does not have every microbatch once")
    of_data = [count for _, count in sorted(zip(assignment, slices, strict=True))]
    firsts = [0, *itertools.accumulate(of_data)]
    return ops, rank_of, [firsts[i] + part for i in assignment for part in range(of_data[i])], of_data


def read_costs(body: dict[str, Any], rank_of: list[int], counts: list[int]) -> dict[str, Table]:
    """Time and memory of every stage and microbatch; "down", its message to the next stage, and "up", the gradient's way back.

    With slices, of every slice of every microbatch: the same of each microbatch, or a list of each one's own.
    """
    own, slices, links, last = body.get("microbatches"), body.get("slices"), body.get("links"), len(rank_of) - 1
    m = sum(counts)
    need(bool(slices) or m == len(counts), "costs: a plan of slices needs costs of each")
    need(not (own and slices), "costs: those of microbatches do not go with those of slices")
    each: list[Any] = slices if isinstance(slices, list) else [slices] * len(counts)
    fits = not slices or [len(one["forward_ms"][0]) for one in each] == counts
    need(fits, "costs: every microbatch must have as many slices as in the plan")
    costs: dict[str, Table] = {
        name: own[name]
        if own
        else [[value for one in each for value in one[name][s]] for s in range(last + 1)]
        if slices
        else [[value] * m for value in body[name]]
        for name in NAMES
    }
    for name, rows in costs.items():
        fits = len(rows) == len(rank_of) and all(len(row) == m and all(map(is_number, row)) for row in rows)
        need(fits, f"costs: {name} must have {len(rank_of)} stages and {m} passes, finite numbers from 0 to {LARGEST:g}")
    for name in KEYS:
        of_each = [one[name] for one in each] if slices else [[0.0] * len(rank_of)] * m
        fits = all(len(values) == len(rank_of) and all(map(is_number, values)) for values in of_each)
        need(fits, f"costs: {name} must have a finite number per stage")
        costs[name] = [[values[s] for values, n in zip(of_each, counts, strict=True) for _ in range(n)] for s in range(last + 1)]

    def message(source: int, target: int, i: int) -> tuple[float, float]:
        one, other = rank_of[source], rank_of[target]
        if one == other:
            return 0.0, 0.0
        sizes, speeds = (links["message_bytes"], links.get("gigabytes_per_s")) if links else ([0.0], None)
        latency = links["latency_ms"][one][other] if links else body["comm_ms"]
        size, speed = (sizes[i if len(sizes) > 1 else 0], speeds[one][other]) if speeds else (0.0, 1.0)
        fits = is_number(latency) and is_number(size) and is_number(speed) and speed > 0
        time = latency + size / (speed * 1e6) if fits else math.nan
        need(
            is_number(time),
            f"costs: comm_ms or links from rank {one} to rank {other} must be finite numbers from 0, a bandwidth above it",
        )
        return float(time), size / (speed * 1e6)

    down = [[message(s, s + 1, i) for i in range(m)] for s in range(last)] + [[(0.0, 0.0)] * m]
    up = [[message(s + 1, s, i) for i in range(m)] for s in range(last)] + [[(0.0, 0.0)] * m]
    for name, table in (("down", down), ("up", up)):
        costs[name], costs[f"{name} busy"] = ([[each[part] for each in row] for row in table] for part in (0, 1))
    return costs


def inputs(stage: int, kind: str, i: int, last: int) -> list[Op]:
    """The ops whose results an op needs."""
    if kind == "F":
        return [(stage - 1, "F", i)] if stage else []
    if kind == "W":
        return [(stage, "B", i)]
    return [(stage, "F", i), *([(stage + 1, "B", i)] if stage < last else [])]


def simulate(
    ops: list[list[Op]], rank_of: list[int], costs: dict[str, Table], assignment: list[int], counts: list[int]
) -> tuple[float, float, float]:
    """Span, makespan, and the peak memory of the rank that needs most. A link carries one message after the other.

    Keys and values are in memory from the F of the first slice to its B, the last of the microbatch, their gradients from the B
    of the last slice on. With one slice the gradients come and go within its B.
    """
    there: dict[Op, float] = {}  # when the next stage has a result
    links: dict[tuple[int, int], float] = {}  # when a link can take the next message
    last = len(rank_of) - 1
    firsts = {0, *itertools.accumulate(counts)}  # the first slice of every microbatch, and their number
    at, first, free, held = ([0] * len(ops), *([0.0] * len(ops) for _ in range(3)))
    peak, moved = 0.0, True
    while moved:
        moved = False
        for rank, row in enumerate(ops):
            while at[rank] < len(row):
                stage, kind, i = row[at[rank]]
                needs = inputs(stage, kind, i, last)
                if any(op not in there for op in needs):
                    break
                start = max([free[rank], *(there[op] for op in needs if op[0] != stage)])
                first[rank] = first[rank] if at[rank] else start
                f, b, w, whole, kept = (costs[name][stage][assignment[i]] for name in NAMES)
                free[rank] = start + {"F": f, "B": b, "W": w, "BW": b + w}[kind]
                way, from_ = ("down", stage) if kind == "F" else ("up", stage - 1)
                link = rank, rank_of[min(stage + 1, last) if kind == "F" else max(stage - 1, 0)]
                sent = there[stage, kind[0], i] = max(free[rank], links.get(link, 0.0))
                if kind != "W" and link[0] != link[1]:
                    links[link] = sent + costs[f"{way} busy"][from_][assignment[i]]
                    there[stage, kind[0], i] = sent + costs[way][from_][assignment[i]]
                held[rank] += {"F": whole, "B": kept - whole, "W": -kept, "BW": -whole}[kind]
                one = assignment[i]
                is_first, is_last = one in firsts, one + 1 in firsts
                keys, gradients = costs["keys"][stage][one], costs["key_gradients"][stage][one]
                gradients *= not (is_first and is_last)
                held[rank] += keys * (kind == "F" and is_first) + gradients * ("B" in kind and is_last)
                held[rank] -= (keys + gradients) * ("B" in kind and is_first)
                peak = max(peak, held[rank])
                at[rank], moved = at[rank] + 1, True
    need(at == [*map(len, ops)], "the plan deadlocks")
    return max(end - start for start, end in zip(first, free, strict=True)), max(free) - min(first), peak


def fit(size: float, memory: float, total: int) -> int:
    """How many of a number of passes fit a memory, if each takes that size."""
    return total if total * size <= max(0.0, memory) else max(0, int(memory / size * (1 + 1e-9)))


def areas(passes: list[Pass], limit: float, is_equal: bool) -> dict[str, tuple[float, float, float, float]]:
    """Memory times time over the limit, and the same in whole passes for passes of equal memory: the rank takes no less time.

    What lies between F and B fills an area below the limit. Missing are: what the first F have not filled yet and what the last
    B leave empty (in the first number, with the area itself); what W keep or a fused BW holds longer (the second; the third is
    more of it, after the last B); the fourth is the most of the second that can come after the last B.
    """

    def missing(ops: list[tuple[float, float]]) -> float:
        """Area missing while ops of (time, memory) fill the limit or empty it, which is no faster than the fastest of them."""
        rate = max((size / time if time else math.inf for time, size in ops if size), default=math.inf)
        if rate == math.inf:
            return 0.0
        below = max(0.0, limit - max(size for _, size in ops))
        length = min(below / rate, sum(time for time, _ in ops))
        return below * length - rate * length * length / 2

    filling = missing([(one.forward, one.whole) for one in passes]) + missing([(one.backward, one.whole) for one in passes])
    area = sum(one.whole * one.turn for one in passes) + filling
    during_w = sum(min(one.kept, one.held) * one.wgrad for one in passes)
    longest_w = max(one.wgrad for one in passes)
    found = {"memory times time": (area / limit, during_w / limit, 0.0, longest_w)}

    whole, kept, total = passes[0].whole, passes[0].kept, len(passes)
    most = fit(whole, limit, total)  # at the k-th F at most k are in flight, at the j-th last B j, beside a W fewer
    if is_equal and most:
        shortest = [min(one[kind] for one in passes) for kind in range(3)]
        area = sum(one.turn for one in passes) + most * (most - 1) / 2 * (shortest[0] + shortest[1])
        fewer = min(1, most - fit(whole, limit - kept, total)) / most
        after = (most + 1) / 2 * shortest[2] - fewer * most * shortest[2]  # at the W of the j-th last B at most j - 1
        later = total if min(whole, kept) * total <= limit else limit / min(whole, kept)
        wgrad = sum(one.wgrad for one in passes)
        found["passes in flight times time"] = (area / most, fewer * wgrad, after, fewer * later * longest_w)
    return found


def bounds(
    costs: dict[str, Table],
    rank_of: list[int],
    rank: int,
    limit: float,
    prices: dict[str, float],
    objective: str,
    counts: list[int],
) -> dict[str, float]:
    """Name -> lower bound on the time of any plan within the limit, from what one rank has to do. Not all apply to every rank."""
    stages = [stage for stage, owner in enumerate(rank_of) if owner == rank]
    first, last = stages[0], stages[-1]

    # Paths of the fastest microbatch: from the first F of all to F of a stage; from there through all later stages to the end of
    # its B; from there to the end of W of stage 0.
    f, b, w, down, up = ([min(row) for row in costs[name]] for name in (*NAMES[:3], "down", "up"))
    arrive = [sum(f[:s] + down[:s]) for s in range(len(f))]
    turn = [sum(f[s:] + down[s:] + b[s:] + up[s:]) for s in range(len(f))]
    leave = [sum(b[:s] + up[:s]) + w[0] for s in range(len(f))]

    # With slices such a path waits, at the slowest stage from one on, for F of the slices behind its own, and for B of those.
    starts = [0, *itertools.accumulate(counts)]
    firsts = starts[:-1]
    ends = [end for end, n in zip(starts[1:], counts, strict=True) for _ in range(n)]
    has_slices = len(ends) > len(counts)

    def wait(name: str, since: int, part: int) -> float:
        return max(sum(row[part : ends[part]]) - min(row) for row in costs[name][since:]) if has_slices else 0.0

    def least_wait(name: str, since: int) -> float:
        return min(wait(name, since, part) for part in firsts)

    whole = zip(costs["activation"], costs["keys"], strict=True)
    costs = costs | {
        "activation": [[size + keys[i] * (i in {*firsts}) for i, size in enumerate(row)] for row, keys in whole],
    }

    # Every microbatch, also the slowest, has to go all the way and back.
    ways = [*zip(*(row for name in (*NAMES[:2], "down", "up") for row in costs[name]), strict=True)]
    alone = [sum(way) + costs["wgrad_ms"][0][i] for i, way in enumerate(ways)]
    alone.append(turn[0] + max(wait("forward_ms", 0, i) + wait("backward_ms", 0, i) for i in firsts) + w[0])

    turns = {s: [turn[s] + wait("forward_ms", s, i) + wait("backward_ms", s, i) for i in range(len(ends))] for s in stages}

    passes: list[Pass] = []
    for i in range(len(ends)):
        held = 0.0
        for s in stages:
            held += costs["activation"][s][i]
            passes.append(Pass._make((*(costs[name][s][i] for name in NAMES), held, turns[s][i])))
    total, is_equal = len(passes), len({(one.whole, one.kept) for one in passes}) == 1
    forward, backward, wgrad = (sum(one[kind] for one in passes) for kind in range(3))
    all_fit = sum(one.whole for one in passes) <= limit

    def most(name: str, options: list[list[tuple[float, float]]]) -> float:
        """At least the most time of ops that fit the limit together, of each pass one of its options (time, memory) or none."""
        price = prices.get(name, 0.0)
        return price * limit + sum(max(0.0, *(time - price * size for time, size in each)) for each in options)

    # Before its first B a rank can only run F, as many as fit the memory, but that B waits for a microbatch to return. After its
    # last F it can only run B and W of what is in memory, but that microbatch has to return, too.
    run = most("before the first B", [[(one.forward, one.whole)] for one in passes])
    if is_equal:
        run = min(run, fit(passes[0].whole, limit, total) * max(one.forward for one in passes))
    idle_head = max(0.0, arrive[last] - arrive[first] + turn[last] - b[last] + least_wait("forward_ms", first) - run)
    left = most("after the last F", [[(one.wgrad, one.kept), (one.backward + one.wgrad, one.whole)] for one in passes])
    if len({one[:5] for one in passes}) == 1:  # in whole passes: some with their B, and as many W as fit beside them
        one = passes[0]
        fitting = (k for k in range(total + 1) if k * one.whole <= limit)
        left = max(k * one.backward + min(total, k + fit(one.kept, limit - k * one.whole, total)) * one.wgrad for k in fitting)
    until_end = turn[first] - (arrive[last] - arrive[first]) - f[last] + w[first] + least_wait("backward_ms", first)
    idle_tail = max(0.0, until_end - left)
    put_off = most("after the last B", [[(one.wgrad, min(one.whole, one.kept))] for one in passes])

    # If not all F fit, the last F comes after the first B, and the idle times do not overlap.
    idle = max(idle_head, idle_tail) if all_fit else idle_head + idle_tail
    before = arrive[first] if objective == "makespan" else 0.0  # the span is at least the rank's own time
    needed = idle_head + forward + backward + max(0.0, wgrad - put_off)
    found = {
        "nothing": 0.0,
        "work and idle ends": before + forward + backward + wgrad + idle,
        "one microbatch": max(alone),
        "travel, work, travel": arrive[first] + needed + leave[first],
    }
    if not all_fit:
        freeing = idle_head + forward + max(0.0, backward + wgrad - left)
        home = turn[last] - f[last] + least_wait("backward_ms", 0) + leave[last]
        found["round trip, free memory, round trip"] = arrive[first] + freeing + home
    for name, (area, during_w, last_w, later_w) in areas(passes, limit, is_equal).items():
        found[name] = before + area + during_w + last_w
        found[f"travel, {name}, travel"] = arrive[first] + area + max(0.0, during_w - later_w) + leave[first]
    return found


def check(body: dict[str, Any]) -> tuple[float, float]:
    """The objective and its lower bound, both in milliseconds. Raises RefusedError if anything in the certificate is wrong."""
    need(body.get("format") == FORMAT, f"its format is {body.get('format')!r:.40}; this checker reads {FORMAT}")
    plan, claimed, objective, allowed = body["plan"], body["bound"], body["objective"], body["memory_limit"]
    ops, rank_of, assignment, counts = read_plan(plan)
    costs = read_costs(plan["costs"], rank_of, counts)
    span, makespan, peak = simulate(ops, rank_of, costs, assignment, counts)
    need(allowed is None or is_number(allowed), "its memory_limit must be a number from 0, or null")
    m = len(counts)
    everything = sum(sum(row) for name in (*NAMES[3:], *KEYS) for row in costs[name])  # no plan needs more
    limit = (everything if allowed is None else allowed * min(len(ops), m)) * (1 + 1e-9) + 1e-9  # rounded up
    need(peak <= limit, f"the plan needs {peak:.10g} microbatches of memory and its limit is {limit:.10g}")
    need(objective in ("span", "makespan"), f"its objective is {objective!r:.40}; span and makespan are known")
    value = span if objective == "span" else makespan

    name, rank, bound, prices = claimed["name"], claimed["rank"], claimed["bound_ms"], claimed["prices"]
    need(type(rank) is int and 0 <= rank < len(ops), f"its bound is about rank {rank!r:.40}, which does not exist")
    need(all(is_number(price, sys.float_info.max) for price in prices.values()), "its prices must be finite and 0 or more")
    proven = bounds(costs, rank_of, rank, limit, prices, objective, counts)
    need(name in proven, f"its bound {name!r:.40} is not known for these costs and memory; known are {', '.join(proven)}")
    for text, number in (("objective_ms", body["objective_ms"]), ("bound_ms", bound), *claimed["terms_ms"].items()):
        need(is_number(number, sys.float_info.max), f"its {text!r:.40} must be a finite number from 0")
    off, stated = TOLERANCE * value, body["objective_ms"]
    need(abs(stated - value) <= off, f"its objective_ms is {stated:.10g} and comes out as {value:.10g}")
    need(bound <= proven[name] + off, f"its bound is {bound:.10g} and only {proven[name]:.10g} is proven")
    need(bound <= value + off, f"its bound is {bound:.10g} and the plan takes {value:.10g}, which is less")
    need(abs(math.fsum(claimed["terms_ms"].values()) - bound) <= off, "the terms of its bound do not add up to it")
    return value, min(bound, proven[name])


def main(argv: list[str] | None = None) -> int:
    """Check a file and print what it proves; 1 if it does not hold."""
    parser = argparse.ArgumentParser(prog="zerobubble verify", description="check the certificate of a plan")
    parser.add_argument("file", help="a certificate, as `zerobubble plan --certificate FILE` writes it; - reads standard input")
    file = parser.parse_args(argv).file
    try:
        with contextlib.nullcontext(sys.stdin) if file == "-" else open(file, encoding="utf-8") as stream:
            text = stream.read(MOST_LETTERS + 1)
        need(len(text) <= MOST_LETTERS, f"it has more than {MOST_LETTERS:,} letters")
        body = json.loads(text)
        value, bound = check(body)
    except OSError as error:
        print(f"{file!r} cannot be read: {error.strerror}", file=sys.stderr)
        return 2
    except (RefusedError, ValueError, LookupError, TypeError, AttributeError, RecursionError, ArithmeticError) as error:
        refused = "does not hold" if isinstance(error, RefusedError) else f"is not a certificate: {type(error).__name__}"
        print(f"{file!r} {refused}: {error!s:.300}", file=sys.stderr)
        return 1
    gap = max(0.0, value / bound - 1) if bound > 0 else math.inf if value > 0 else 0.0
    within = "" if body["memory_limit"] is None else f" within {body['memory_limit']:.6g} of 1F1B's memory"
    n, counts = body["plan"].get("num_slices", 1), body["plan"].get("slice_counts")
    slices = f"{min(counts)} to {n}" if counts else n
    within = within if n == 1 else f" with {slices} slices per microbatch{within}"
    print(f"valid; {body['objective']} {value:.6g} ms, no plan{within} takes less than {bound:.6g} ms, gap {100 * gap:.3f} %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
