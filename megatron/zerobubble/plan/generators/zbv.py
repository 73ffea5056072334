"""ZB-V: no bubble at 1F1B's memory, with two stages per rank in a V (arXiv 2401.10241, section 6).

Rank 0 has the first and the last stage, so the loss is computed where the data is read, and activation memory is balanced
over the ranks. Seven phases; c0 is the chunk on the way down, c1 on the way up, and each phase continues where the previous
one stopped::

    1  F c0                 x 2(p-i)-1    until microbatch 0 is back from rank p-1
    2  F c1, F c0           x i           until the first B arrives
    3  F c1, B c1, W c1     x p-i         until the first B of c0 arrives
    4  F c0, B c0, W c0,    until no F    steady
       F c1, B c1, W c1     is left
    5  B c0, B c1           x i           drain; W waits
    6  B c0, W c0           x p-i         drain
    7  W c1, W c0           the rest

p=2, m=4, capitals c0, small letters c1::

    rank 0  F0 F1 F2 f0 b0 w0 f1 b1 w1 F3 B0 W0 f2 b2 w2 B1 W1 f3 b3 w3 B2 W2 B3 W3
    rank 1     F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 F3 B1 W1 f3 b2 w2 B2 b3 B3 W2 w3 W3

Bubble with F=B=W=1 per rank and free links: 0 for m >= 2p. Activation memory per rank: 2p stages, which is 1F1B's p microbatches.

For m < 2p the seven phases have no steady state. Built for 2p microbatches, with the excess ones removed, they idle 2p-1-m for
m <= p and 2p-m above. Repeated grid blocks (`building_blocks`), as V-Half's, fill and drain faster, at no more memory: for p=8 and
m=4 the best one idles 7.5 in place of 11. So there the order is the best of both kinds.

With n slices per microbatch the same of slices, and phases 2 and 5 are n-1 rounds longer: the first B is that of the last slice.
p=2, m=2, n=2, cut from m=3::

    rank 0  F0-- F0.1 F1-- f0-- F1.1 f0.1 b0.1 w0.1 f1-- b0-- w0-- B0.1 W0.1 f1.1 b1.1 w1.1 B0-- W0-- b1-- w1-- B1.1 W1.1 ......... B1-- W1--
    rank 1       F0-- f0-- F0.1 f0.1 F1-- f1-- b0.1 w0.1 F1.1 B0.1 W0.1 f1.1 b0-- w0-- B0-- W0-- b1.1 w1.1 B1.1 W1.1 b1-- w1-- B1-- W1--
"""  # noqa: E501 - the timeline is wider

from __future__ import annotations

from functools import partial

from megatron.zerobubble.plan.generators.building_blocks import grid_seed_orders
from megatron.zerobubble.plan.generators.request import Request
from megatron.zerobubble.plan.ir import Op, OpKind, Passes, Placement, Plan
from megatron.zerobubble.plan.search.orders import SeedOrder, seed_order_of
from megatron.zerobubble.plan.transforms import first_microbatches


def zbv(request: Request) -> Plan:
    """ZB-V for any p >= 1 and m >= 1: the hand-written pattern, or with search options or m < 2p the best plan found."""
    p = request.num_ranks
    if request.options is None and request.num_microbatches >= _fewest_microbatches(p, request.num_slices):
        return zbv_pattern(p, request.num_microbatches, request.num_slices)
    return request.searched(request.memory_of(min(p, request.num_passes)), partial(v_seed_orders, p, request.num_slices))


def v_seed_orders(num_ranks: int, num_slices: int, memory: float) -> list[SeedOrder]:
    """The seed orders of a search on the V placement: the hand-written ZB-V and grid blocks of about the given memory.

    Args:
        num_ranks: p.
        num_slices: n.
        memory: the limit per rank, in activations of microbatches.
    """
    return [
        seed_order_of(partial(zbv_pattern, num_ranks, num_slices=num_slices)),
        *grid_seed_orders(num_ranks, num_slices, memory),
    ]


def zbv_pattern(num_ranks: int, num_microbatches: int, num_slices: int = 1) -> Plan:
    """The seven phases for any p >= 1, m >= 1 and n >= 1 slices per microbatch, two stages per rank."""
    p = num_ranks
    m = max(num_microbatches, _fewest_microbatches(p, num_slices))
    rows = [_row(rank, p, m, num_slices) for rank in range(p)]
    return first_microbatches(Plan.of("zbv", Placement.v(p), m, rows, num_slices=num_slices), num_microbatches)


def _fewest_microbatches(num_ranks: int, num_slices: int) -> int:
    """Of all seven phases."""
    return -(-2 * num_ranks // num_slices) + (num_slices > 1)


def _row(rank: int, num_ranks: int, num_microbatches: int, num_slices: int) -> list[Op]:
    """The seven phases of one rank. Ops beyond the last microbatch are left out."""
    p, passes = num_ranks, Passes((num_slices,) * num_microbatches)
    m = len(passes)
    row: list[Op] = []
    upcoming: dict[tuple[int, OpKind], int] = {}

    def emit(chunk: int, *kinds: OpKind) -> None:
        stage = rank if chunk == 0 else 2 * p - 1 - rank
        for kind in kinds:
            number = upcoming.get((chunk, kind), 0)
            if number < m:
                row.append(passes.nth(stage, kind, number))
                upcoming[chunk, kind] = number + 1

    for _ in range(2 * (p - rank) - 1):
        emit(0, OpKind.F)
    for _ in range(rank + num_slices - 1):
        emit(1, OpKind.F)
        emit(0, OpKind.F)
    for _ in range(p - rank):
        emit(1, OpKind.F, OpKind.B, OpKind.W)
    while upcoming[1, OpKind.F] < m:
        emit(0, OpKind.F, OpKind.B, OpKind.W)
        emit(1, OpKind.F, OpKind.B, OpKind.W)
    for _ in range(rank + num_slices - 1):
        emit(0, OpKind.B)
        emit(1, OpKind.B)
    for _ in range(p - rank):
        emit(0, OpKind.B, OpKind.W)
    for chunk in (1, 0):
        emit(chunk, *[OpKind.W] * m)
    return row
