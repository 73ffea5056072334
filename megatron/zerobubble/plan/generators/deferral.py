"""One rank's ops in a schedule with one stage per rank: some warmup forwards, and W deferred behind B by a fixed count.

With slices an op is of one slice, the forwards before the first B include the other slices of its microbatch, and all numbers
below count slices::

    num_ahead=3, delay=2, m=6:   F F F  B F  B F  B W F  B W  B W  B W  W W
                                        `-- delay --'
"""

from __future__ import annotations

from functools import partial

from megatron.zerobubble.plan.ir import Op, OpKind, Passes


def deferred_wgrad_row(stage: int, num_microbatches: int, *, num_ahead: int, delay: int, num_slices: int = 1) -> list[Op]:
    """One rank's ops: `num_ahead` forwards, then one B, one W, one F in turn; W lags `delay` microbatches behind B.

    At most `num_ahead` microbatches are between F and B, and at most `delay` between B and W. With slices all of that counts
    slices, and the other slices of the first microbatch run ahead besides.

    Args:
        stage: the rank's only stage.
        num_microbatches: m.
        num_ahead: forwards before the first B, at least 1.
        delay: microbatches by which W lags behind B; 0 runs W right after its B.
        num_slices: n.
    """
    op, count = partial(Passes((num_slices,) * num_microbatches).nth, stage), num_microbatches * num_slices
    ahead = num_ahead + num_slices - 1
    row = [op(OpKind.F, number) for number in range(min(ahead, count))]
    for number in range(count):
        row.append(op(OpKind.B, number))
        if number >= delay:
            row.append(op(OpKind.W, number - delay))
        if number + ahead < count:
            row.append(op(OpKind.F, number + ahead))
    row.extend(op(OpKind.W, number) for number in range(max(0, count - delay), count))
    return row
