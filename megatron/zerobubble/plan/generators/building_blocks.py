"""Repeated building blocks on a grid: every V schedule with F=B=W, one microbatch per period (arXiv 2405.15362, section 3).

A block starts F of stage 0 at tick 0, and every pass takes one tick. From rank to rank it advances by four strides: F down, F up,
B down, B up; and it may pause at each of the three turns. Repeated every six ticks it is a schedule if no rank has two passes in
the same tick modulo six; W takes the next free ticks. The time from F to B on a rank determines its activation memory: strides of
1 give the paper's V-Min, two of 1 and two of 2 its V-Half, strides of 3 its V-ZB. p=2, strides of 1, one microbatch by ticks,
small letters for the way up::

    rank 0  F . . f b w . B W . .
    rank 1  . F f . . b B . . W w

With n slices per microbatch a period is of one slice, and B and W follow n-1 periods later: B of the last slice is the first one.

`grid_blocks` lists all of them up to stride 3. They assume passes of equal length; a search starts from them for any times.
"""

from __future__ import annotations

import itertools
from functools import lru_cache, partial
from itertools import pairwise

from megatron.zerobubble.plan.search.interface import Order
from megatron.zerobubble.plan.search.orders import SeedOrder

_PERIOD = 6
_STRIDES = (1, 2, 3)
_LEAST_SHARE = 0.6
_MOST_SHARE = 1.25


GridBlock = tuple[tuple[int, ...], ...]
"""Per rank, the ticks at which microbatch 0 starts F, B, W of the chunk on the way down, then of the chunk on the way up."""


def grid_order(block: GridBlock, num_microbatches: int, num_slices: int = 1) -> Order:
    """The block repeated every six ticks for every microbatch or slice, as op codes per rank (see `search.core`)."""
    later = _PERIOD * (num_slices - 1)
    rows = [tuple(tick + later * (code % 3 > 0) for code, tick in enumerate(ticks)) for ticks in block]
    return [_row(ticks, num_microbatches * num_slices) for ticks in rows]


def grid_seed_orders(num_ranks: int, num_slices: int, memory: float) -> list[SeedOrder]:
    """The blocks of about the given memory, as seed orders of a search on the V placement.

    Args:
        num_ranks: p.
        num_slices: n.
        memory: the limit per rank, in activations of microbatches.
    """
    n = num_slices
    own = memory * n - (n - 1)
    fitting = [block for block in grid_blocks(num_ranks) if _residence(block) <= _MOST_SHARE * own]
    most = max(map(_residence, fitting), default=0.0)
    return [partial(grid_order, block, num_slices=n) for block in fitting if _residence(block) >= _LEAST_SHARE * most]


def _residence(block: GridBlock) -> float:
    """Microbatches between F and B on the rank with most of them, each of its two stages counting half."""
    return max((b0 - f0 + b1 - f1) / (2 * _PERIOD) for f0, b0, _, f1, b1, _ in block)


@lru_cache(maxsize=8)
def grid_blocks(num_ranks: int) -> tuple[GridBlock, ...]:
    """Every block for p ranks with strides up to 3; of two that mirror each other, only the one with the smaller strides of F."""
    blocks = []
    for down, up, back, home in itertools.product(_STRIDES, repeat=4):
        if (down, up) > (back, home):
            continue
        for turns in itertools.product(range(1, _PERIOD + 1), repeat=3):
            ticks = _ticks(num_ranks, (down, up, back, home), turns)
            if ticks:
                blocks.append(ticks)
    return tuple(blocks)


def _ticks(num_ranks: int, strides: tuple[int, ...], turns: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The ticks of the block with four strides and three turns; empty if two passes collide on a rank."""
    down, up, back, home = strides
    last = num_ranks - 1
    f1_last = down * last + turns[0]
    b1_first = f1_last + up * last + turns[1]
    b0_last = b1_first + back * last + turns[2]
    rows = []
    for rank in range(num_ranks):
        f0, f1 = down * rank, f1_last + up * (last - rank)
        b1, b0 = b1_first + back * rank, b0_last + home * (last - rank)
        used = {tick % _PERIOD for tick in (f0, f1, b1, b0)}
        if len(used) < 4:
            return ()
        w0, w1 = _wgrad_ticks(b0, b1, [tick for tick in range(_PERIOD) if tick not in used])
        rows.append((f0, b0, w0, f1, b1, w1))
    return tuple(rows)


def _wgrad_ticks(b0: int, b1: int, free: list[int]) -> tuple[int, int]:
    """Assigns the two free ticks of a period to the two Ws so that their summed delay after B is smallest."""
    after = [[b + 1 + (tick - b - 1) % _PERIOD for tick in free] for b in (b0, b1)]
    return min((after[0][0], after[1][1]), (after[0][1], after[1][0]), key=sum)


def _row(ticks: tuple[int, ...], num_microbatches: int) -> bytes:
    """One rank's op codes in the order of their ticks: a cycle of all six passes, cut at warmup and cooldown."""
    periods = [tick // _PERIOD for tick in ticks]
    cycle = sorted(range(len(ticks)), key=lambda code: ticks[code] % _PERIOD)
    changes = sorted({*periods, *(period + num_microbatches for period in periods)})
    row = b""
    for begin, end in pairwise(changes):  # in between every period runs the same passes
        row += bytes(code for code in cycle if periods[code] <= begin < periods[code] + num_microbatches) * (end - begin)
    return row
