"""One rank's ops in a schedule with one stage per rank: some warmup forwards, and W deferred behind B by a fixed count.

::

    num_ahead=3, delay=2, m=6:   F F F  B F  B F  B W F  B W  B W  B W  W W
                                        `-- delay --'
"""

from __future__ import annotations

from megatron.zerobubble.plan.ir import Op, OpKind


def deferred_wgrad_row(stage: int, num_microbatches: int, *, num_ahead: int, delay: int) -> list[Op]:
    """One rank's ops: `num_ahead` forwards, then one B, one W, one F in turn; W lags `delay` microbatches behind B.

    At most `num_ahead` microbatches are between F and B, and at most `delay` between B and W.

    Args:
        stage: the rank's only stage.
        num_microbatches: m.
        num_ahead: forwards before the first B, at least 1.
        delay: microbatches by which W lags behind B; 0 runs W right after its B.
    """
    m = num_microbatches
    row = [Op(stage, OpKind.F, microbatch) for microbatch in range(min(num_ahead, m))]
    for microbatch in range(m):
        row.append(Op(stage, OpKind.B, microbatch))
        if microbatch >= delay:
            row.append(Op(stage, OpKind.W, microbatch - delay))
        if microbatch + num_ahead < m:
            row.append(Op(stage, OpKind.F, microbatch + num_ahead))
    row.extend(Op(stage, OpKind.W, microbatch) for microbatch in range(max(0, m - delay), m))
    return row
