"""The compiled core: `core.PythonCore` by the C functions of core.cpp. Importing this module raises ImportError without them.

A C interface, so that one library serves every version of Python. `ctypes` lets other threads run during a call.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.zerobubble.plan.search.interface import Order, Policy, Problem, Rows

__all__ = ["NativeCore"]


def _loaded() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("_core.native.so")))
    except OSError as error:
        raise ImportError(f"the compiled search core cannot be loaded: {error}") from None
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
        function = getattr(library, f"zb_{name}")
        function.restype, function.argtypes = result, arguments
    return library


_LIBRARY = _loaded()


class NativeCore:
    """Methods are those of `PythonCore`, which documents them. A core belongs to one thread, but for `stop`."""

    def __init__(self, problem: Problem) -> None:
        ranks, counts = _ints(problem.stage_to_rank), _ints(problem.counts)
        lists = (problem.durations, problem.activation, problem.remaining, problem.links, problem.busy)
        self._core = _LIBRARY.zb_new(
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
        weakref.finalize(self, _LIBRARY.zb_delete, self._core)
        self._work = _LIBRARY.zb_work(self._core)
        self._num_ranks = max(ranks) + 1
        self._num_ops = 3 * len(ranks) * problem.num_passes

    @property
    def work(self) -> float:
        """See `PythonCore`."""
        return float(self._work.contents.value)

    @work.setter
    def work(self, value: float) -> None:
        self._work.contents.value = value

    def stop(self) -> None:
        """See `PythonCore`."""
        _LIBRARY.zb_stop(self._core)

    def evaluate(self, order: Rows) -> tuple[float, float]:
        """See `PythonCore`."""
        result = array("d", (0.0, 0.0))
        _with_rows(_LIBRARY.zb_evaluate, self._core, order, _at(result))
        return result[0], result[1]

    def evaluate_assigned(self, rows: Rows, patience: Sequence[float], assignment: Sequence[int]) -> tuple[float, float]:
        """See `PythonCore`."""
        result, waits, slots = array("d", (0.0, 0.0)), _doubles(patience), _ints(assignment)
        _with_rows(_LIBRARY.zb_evaluate_assigned, self._core, rows, _at(waits), _at(slots), len(slots), _at(result))
        return result[0], result[1]

    def fill(self, rows: Rows, patience: Sequence[float]) -> Order:
        """See `PythonCore`."""
        waits = _doubles(patience)
        return self._found(_with_rows, _LIBRARY.zb_fill, self._core, rows, _at(waits))

    def fill_assigned(self, rows: Rows, patience: Sequence[float], assignment: Sequence[int]) -> Order:
        """See `PythonCore`."""
        waits, slots = _doubles(patience), _ints(assignment)
        return self._found(_with_rows, _LIBRARY.zb_fill_assigned, self._core, rows, _at(waits), _at(slots), len(slots))

    def decode(self, policy: Policy) -> Order:
        """See `PythonCore`."""
        lists = (policy.durations, policy.offsets, policy.caps)
        values, sizes = _doubles(chain.from_iterable(lists)), _ints(map(len, lists))
        names = ("comm_ms", "period", "wait_weight", "max_wait", "limit", "settled", "settle_after")
        numbers = _doubles(getattr(policy, name) for name in names)
        return self._found(_LIBRARY.zb_decode, self._core, _at(values), _at(sizes), _at(numbers))

    def anneal(self, rows: Rows, patience: Sequence[float], seed: int, budget: float, temperature: float) -> Order:
        """See `PythonCore`."""
        waits = _doubles(patience)
        return self._found(_with_rows, _LIBRARY.zb_anneal, self._core, rows, _at(waits), seed, budget, temperature)

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
        """See `PythonCore`."""
        waits, slots = _doubles(patience), _ints(assignment)
        given = (_at(waits), _at(slots), len(slots), seed, budget, temperature, fixed_order)
        return self._found(_with_rows, _LIBRARY.zb_assign, self._core, rows, *given), slots.tolist()

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
