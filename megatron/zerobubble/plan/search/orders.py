"""Orders (op codes per rank, see `core`): from and to plans, without W, and with a repeated steady cycle."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from megatron.zerobubble.plan.ir import OpKind, Passes, Placement, Plan
from megatron.zerobubble.plan.search.interface import Order
from megatron.zerobubble.plan.transforms import split_fused

SeedOrder = Callable[[int], Order]
"""Number of microbatches -> an order that a search starts from, for example a hand-written pattern."""

CYCLE_AT = tuple(0.2 + 0.025 * step for step in range(25))
"""Shares of a row's length at which `repeated` looks for a cycle."""

_KINDS = (OpKind.F, OpKind.B, OpKind.W)
_WGRAD_CODES = bytes(range(2, 256, 3))


def repeated(rows: Order, times: int, num_slices: int = 1) -> list[Order]:
    """For each share in `CYCLE_AT`, the rows with one cycle repeated `times` times.

    A cycle is a run of ops in which every code of the row occurs once, with slices n times, that is for a whole microbatch; of
    those, each row repeats the one nearest to that share of its length. All results are empty if some row has no such cycle.
    """
    width = [num_slices * len(set(row)) for row in rows]
    cycles = [_cycles(row, size, num_slices) for row, size in zip(rows, width, strict=True)]
    if not all(cycles):
        return [[] for _ in CYCLE_AT]
    longer = []
    for share in CYCLE_AT:
        steps = [_nearest(some, int(share * len(row))) for some, row in zip(cycles, rows, strict=True)]
        cut = zip(rows, steps, width, strict=True)
        longer.append([row[:step] + row[step : step + size] * times + row[step:] for row, step, size in cut])
    return longer


def _cycles(row: bytes, size: int, num_slices: int) -> list[int]:
    """The steps at which a run of `size` ops begins that has every code of the row as often as there are slices."""
    codes, starts = set(row), range(len(row) - size + 1)
    if num_slices == 1:
        return [step for step in starts if len(set(row[step : step + size])) == size]
    return [step for step in starts if all(row.count(code, step, step + size) == num_slices for code in codes)]


def _nearest(steps: Sequence[int], at: int) -> int:
    """The step nearest to `at`, the earlier one on a tie; `steps` ascend."""
    index = bisect.bisect_left(steps, at)
    return min(steps[max(0, index - 1) : index + 1], key=lambda step: abs(step - at))


def without_wgrad(order: Order, *, tail: bool = False) -> Order:
    """The order without its Ws; with `tail`, only without those after the last F."""
    rows = []
    for row in order:
        begin = row.rfind(0) if tail else 0
        rows.append(row[:begin] + row[begin:].translate(None, delete=_WGRAD_CODES))
    return rows


def seed_order_of(generate: Callable[[int], Plan]) -> SeedOrder:
    """A seed order from a function that takes the number of microbatches and returns a plan; every BW becomes B and W."""
    return lambda num_microbatches: order_of(split_fused(generate(num_microbatches)))


def order_of(plan: Plan) -> Order:
    """The op codes of a plan with split backwards."""
    kind_code = {kind: code for code, kind in enumerate(_KINDS)}
    chunk = [plan.placement.chunk_of(stage) for stage in range(plan.num_stages)]
    return [bytes(3 * chunk[op.stage] + kind_code[op.kind] for op in row) for row in plan.ops]


def plan_of_order(order: Order, schedule: str, placement: Placement, slices: Sequence[int], *, fused: bool) -> Plan:
    """The plan of an order for microbatches with these numbers of slices; with `fused`, every B becomes a BW and W is dropped."""
    passes, rows = Passes(tuple(slices)), []
    for rank, codes in enumerate(order):
        counts = [0] * (3 * placement.num_chunks)
        row = []
        for code in codes:
            stage, kind = placement.rank_to_stages[rank][code // 3], _KINDS[code % 3]
            if not fused:
                row.append(passes.nth(stage, kind, counts[code]))
            elif kind is not OpKind.W:
                row.append(passes.nth(stage, OpKind.BW if kind is OpKind.B else kind, counts[code]))
            counts[code] += 1
        rows.append(tuple(row))
    return Plan(schedule, placement, len(slices), tuple(rows), num_slices=max(slices), slice_counts=passes.slices)
