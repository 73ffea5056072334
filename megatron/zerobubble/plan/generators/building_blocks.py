"""Repeated building blocks on a grid: every V schedule with F=B=W, one microbatch a period (arXiv 2405.15362, section 3).

A block starts F of stage 0 at tick 0 and takes one tick a pass. From rank to rank it moves on by four strides: F down, F up, B
down, B up; and it may pause at each of the three turns. Repeated every six ticks it is a schedule if no rank has two passes in
the same tick modulo six; W takes the next free ticks. How long a microbatch stays on a rank is the memory: strides of 1 give
the paper's V-Min, two of 1 and two of 2 its V-Half, strides of 3 its V-ZB. p=2, strides of 1, one microbatch by ticks, small
letters for the way up::

    rank 0  F . . f b w . B W . .
    rank 1  . F f . . b B . . W w

`grid_blocks` lists all of them up to stride 3. They are drawn for equal passes; the search starts from them for any.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise

from megatron.zerobubble.plan.generators.zbv import zbv
from megatron.zerobubble.plan.search.core import Order
from megatron.zerobubble.plan.search.search import Drawing, drawing_of

_PERIOD = 6
_STRIDES = (1, 2, 3)
_LEAST_SHARE = 0.6
_MOST_SHARE = 1.25


@dataclass(frozen=True)
class GridBlock:
    """One block."""

    ticks: tuple[tuple[int, ...], ...]
    """Per rank, when microbatch 0 starts F, B, W of the chunk on the way down and of the one on the way up."""

    @property
    def residence(self) -> float:
        """Microbatches between F and B on the fullest rank, a stage counting half of one."""
        return max((b0 - f0 + b1 - f1) / (2 * _PERIOD) for f0, b0, _, f1, b1, _ in self.ticks)

    def order(self, num_microbatches: int) -> Order:
        """The block repeated, every pass as soon as its order allows."""
        return [_row(ticks, num_microbatches) for ticks in self.ticks]


def v_drawings(num_ranks: int, memory: float) -> list[Drawing]:
    """What a search for a V schedule within `memory` microbatches begins with: ZB-V by hand, and blocks that need about that."""
    fitting = [block for block in grid_blocks(num_ranks) if block.residence <= _MOST_SHARE * memory]
    most = max((block.residence for block in fitting), default=0.0)
    blocks = [block for block in fitting if block.residence >= _LEAST_SHARE * most]
    return [drawing_of(partial(zbv, num_ranks)), *(block.order for block in blocks)]


@lru_cache(maxsize=8)
def grid_blocks(num_ranks: int) -> tuple[GridBlock, ...]:
    """Every block for p ranks whose strides of F are in order not above those of B."""
    blocks = []
    for down, up, back, home in itertools.product(_STRIDES, repeat=4):
        if (down, up) > (back, home):
            continue
        for turns in itertools.product(range(1, _PERIOD + 1), repeat=3):
            ticks = _ticks(num_ranks, (down, up, back, home), turns)
            if ticks:
                blocks.append(GridBlock(ticks))
    return tuple(blocks)


def _ticks(num_ranks: int, strides: tuple[int, ...], turns: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The block of four strides and three turns; empty where passes collide."""
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
    """The two free ticks of a period, so that W waits least for its B in sum."""
    after = [[b + 1 + (tick - b - 1) % _PERIOD for tick in free] for b in (b0, b1)]
    return min((after[0][0], after[1][1]), (after[0][1], after[1][0]), key=sum)


def _row(ticks: tuple[int, ...], num_microbatches: int) -> bytes:
    """One rank's passes in the order of their ticks: a cycle of all six, but for the ends."""
    periods = [tick // _PERIOD for tick in ticks]
    cycle = sorted(range(len(ticks)), key=lambda code: ticks[code] % _PERIOD)
    changes = sorted({*periods, *(period + num_microbatches for period in periods)})
    row = b""
    for begin, end in pairwise(changes):  # in between every period runs the same passes
        row += bytes(code for code in cycle if periods[code] <= begin < periods[code] + num_microbatches) * (end - begin)
    return row
