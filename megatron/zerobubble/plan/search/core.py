"""The inner loop of the search: score an order, build an order from a policy, and anneal an order.

The core is `core.cpp` with its headers (`evaluate.hpp` scores, `decode.hpp` builds from a policy, `moves.hpp` has the moves of
annealing), compiled when the package is installed. It has a C interface, so that one library serves every version of Python, and
`ctypes` lets other threads run during a call.

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

All work is counted in op evaluations, never in seconds, so a budget gives the same plan on every machine. Annealing charges an
evaluation of the whole order for each move, but runs only the ops that it may have changed, and stops where the score is certain
to be too high.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.search.interface import Order, Policy, Problem, Rows

__all__ = ["BUILT", "EPSILON", "Core", "library"]

BUILT = Path(__file__).with_name("_core.native.so")
"""The library that `setup.py` builds."""

EPSILON = 1e-9
"""Rounding allowed in comparisons of times and memory."""


@cache
def library() -> ctypes.CDLL:
    """The compiled core. Raises ConfigError if it was not built for this machine."""
    try:
        loaded = ctypes.CDLL(str(BUILT))
    except OSError as error:
        raise ConfigError(
            f"the compiled search core cannot be loaded ({error}): install this package with pip, which builds it with a C++ "
            "compiler or with ziglang from PyPI; hand-written schedules need none"
        ) from None
    pointer, number, count = ctypes.c_void_p, ctypes.c_double, ctypes.c_int
    rows, found = [pointer, ctypes.c_char_p, pointer, count], [pointer, pointer]
    anneals = [ctypes.c_uint64, number, number]
    for name, result, arguments in (
        ("new", pointer, [count, count, pointer, count, count, pointer, pointer, pointer, number, number, count, number]),
        ("delete", None, [pointer]),
        ("work", ctypes.POINTER(number), [pointer]),
        ("stop", None, [pointer]),
        ("evaluate", None, [*rows, pointer]),
        ("evaluate_assigned", None, [*rows, pointer, pointer, count, pointer]),
        ("fill", count, [*rows, pointer, *found]),
        ("fill_assigned", count, [*rows, pointer, pointer, count, *found]),
        ("decode", count, [pointer, pointer, pointer, pointer, *found]),
        ("anneal", count, [*rows, pointer, *anneals, *found]),
        ("assign", count, [*rows, pointer, pointer, count, *anneals, count, *found]),
    ):
        function = getattr(loaded, f"zb_{name}")
        function.restype, function.argtypes = result, arguments
    return loaded


class Core:
    """Scores, builds and anneals orders for one problem. A core belongs to one thread, but for `stop`.

    Args:
        problem: what it scores orders for.

    Raises:
        ConfigError: see `library`.
    """

    def __init__(self, problem: Problem) -> None:
        ranks, counts = _ints(problem.stage_to_rank), _ints(problem.counts)
        lists = (problem.durations, problem.activation, problem.remaining, problem.links, problem.busy)
        self._library = library()
        self._core = self._library.zb_new(
            problem.num_microbatches,
            problem.num_slices,
            _at(counts),
            len(counts),
            len(ranks),
            _at(ranks),
            _at(values := _doubles(chain.from_iterable(lists))),
            _at(sizes := _ints(map(len, lists))),
            problem.comm_ms,
            problem.limit,
            problem.is_makespan,
            problem.excess_ms,
        )
        del values, sizes
        weakref.finalize(self, self._library.zb_delete, self._core)
        self._work = self._library.zb_work(self._core)
        self._num_ranks = max(ranks) + 1
        self._num_ops = 3 * len(ranks) * problem.num_passes

    @property
    def work(self) -> float:
        """Op evaluations charged so far."""
        return float(self._work.contents.value)

    @work.setter
    def work(self, value: float) -> None:
        self._work.contents.value = value

    def stop(self) -> None:
        """End annealing at the next move, now and from now on; may be called from any thread."""
        self._library.zb_stop(self._core)

    def evaluate(self, order: Rows) -> tuple[float, float]:
        """Score, which the search minimizes, and objective (span or makespan) in ms; infinite if it deadlocks. See `simulate`."""
        result = array("d", (0.0, 0.0))
        _with_rows(self._library.zb_evaluate, self._core, order, _at(result))
        return result[0], result[1]

    def evaluate_assigned(self, rows: Rows, patience: Sequence[float], assignment: Sequence[int]) -> tuple[float, float]:
        """Score and objective of rows whose microbatch i is `assignment[i]` in the costs; beyond the limit only a score."""
        result, waits, slots = array("d", (0.0, 0.0)), _doubles(patience), _ints(assignment)
        _with_rows(self._library.zb_evaluate_assigned, self._core, rows, _at(waits), _at(slots), len(slots), _at(result))
        return result[0], result[1]

    def fill(self, rows: Rows, patience: Sequence[float]) -> Order:
        """The order with every W inserted; patience per rank. Empty if the rows deadlock or exceed the memory limit."""
        waits = _doubles(patience)
        return self._found(_with_rows, self._library.zb_fill, self._core, rows, _at(waits))

    def fill_assigned(self, rows: Rows, patience: Sequence[float], assignment: Sequence[int]) -> Order:
        """`fill` with this assignment."""
        waits, slots = _doubles(patience), _ints(assignment)
        return self._found(_with_rows, self._library.zb_fill_assigned, self._core, rows, _at(waits), _at(slots), len(slots))

    def decode(self, policy: Policy) -> Order:
        """List-schedule a policy. Empty if it cannot finish."""
        lists = (policy.durations, policy.offsets, policy.caps)
        values, sizes = _doubles(chain.from_iterable(lists)), _ints(map(len, lists))
        names = ("comm_ms", "period", "wait_weight", "max_wait", "limit", "settled", "settle_after")
        numbers = _doubles(getattr(policy, name) for name in names)
        return self._found(self._library.zb_decode, self._core, _at(values), _at(sizes), _at(numbers))

    def anneal(self, rows: Rows, patience: Sequence[float], seed: int, budget: float, temperature: float) -> Order:
        """Move ops within rows at random, with an acceptance threshold falling from `temperature` to 0, and fill the best.

        If some patience is finite (rows without W), more of the moves change many ops at once, and some change the patience.
        """
        waits = _doubles(patience)
        return self._found(_with_rows, self._library.zb_anneal, self._core, rows, _at(waits), seed, budget, temperature)

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
        waits, slots = _doubles(patience), _ints(assignment)
        given = (_at(waits), _at(slots), len(slots), seed, budget, temperature, fixed_order)
        return self._found(_with_rows, self._library.zb_assign, self._core, rows, *given), slots.tolist()

    def _found(self, call: Any, *arguments: Any) -> Order:
        """The order that a call leaves in the buffers that it gets last."""
        codes, lengths = bytearray(self._num_ops), array("i", [0] * self._num_ranks)
        num_ranks = call(*arguments, _at((ctypes.c_char * len(codes)).from_buffer(codes)), _at(lengths))
        order, begin = [], 0
        for length in lengths[:num_ranks]:
            order.append(bytes(codes[begin : begin + length]))
            begin += length
        return order


def _with_rows(function: Any, core: int, rows: Rows, *arguments: Any) -> Any:
    """Call a C function with rows behind the core."""
    lengths = _ints(map(len, rows))
    return function(core, b"".join(rows), _at(lengths), len(lengths), *arguments)


def _doubles(values: Iterable[float]) -> array[float]:
    return array("d", values)


def _ints(values: Iterable[int]) -> array[int]:
    return array("i", values)


def _at(values: Any) -> int:
    """The address of an array, which must outlive the call."""
    return int(values.buffer_info()[0]) if isinstance(values, array) else ctypes.addressof(values)
