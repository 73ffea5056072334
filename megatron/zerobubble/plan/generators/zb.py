"""ZB: zero bubble on a linear placement for any number k of pending microbatches a rank (arXiv 2401.10241, section 3).

A microbatch is pending on a rank from its F until its W. The paper's ZB-1p and ZB-2p are the points k=p and k=2p; by
hand:

- k >= p: each further microbatch lets one more forward go ahead of the first B on the ranks that still wait for it,
  and W lags by what is left of k. k=p is ZB-H1, k=2p-1 is ZB-H2, and more than that buys nothing while F=B=W. p=4,
  k=5, m=6::

      rank 0  F0 F1 F2 F3 F4 ..... B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5
      rank 1     F0 F1 F2 F3 .. B0 F4 B1 W0 F5 B2 W1 B3 W2 B4 W3 B5 W4 W5
      rank 2        F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5
      rank 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5

- k < p: too few microbatches to keep the ranks busy; the list scheduler (`greedy`) fills what there is.

Bubble with F=B=W and free links, k >= p: max(2p-1-k, 2p-1-m, 0). Memory: at most k microbatches of M_B on every rank.
"""

from __future__ import annotations

from megatron.zerobubble.plan.generators.deferral import deferred_wgrad_row
from megatron.zerobubble.plan.generators.greedy import greedy_plan
from megatron.zerobubble.plan.ir import Placement, Plan


def zb(num_ranks: int, num_microbatches: int, max_pending_backward: int) -> Plan:
    """ZB for any p >= 1, m >= 1 and k >= 1, one stage a rank."""
    p, pending = num_ranks, min(max_pending_backward, 2 * num_ranks - 1)
    if pending < p:
        return greedy_plan("zb", Placement.linear(p), num_microbatches, max_pending=pending)
    rows = []
    for rank in range(p):
        num_ahead = (p - rank) + min(pending - p, p - rank - 1)
        rows.append(deferred_wgrad_row(rank, num_microbatches, num_ahead=num_ahead, delay=pending - num_ahead))
    return Plan.of("zb", Placement.linear(p), num_microbatches, rows)
