"""ZB: zero bubble on a linear placement for any number k of pending microbatches per rank (arXiv 2401.10241, section 3).

A microbatch is pending on a rank from its F until its W. The paper's ZB-1p and ZB-2p are the points k=p and k=2p. The
hand-written patterns:

- k >= p: each additional microbatch lets one more forward run before the first B on the ranks that still wait for it,
  and W lags by the remainder of k. k=p is ZB-H1, k=2p-1 is ZB-H2, and a larger k gains nothing while F=B=W. p=4,
  k=5, m=6::

      rank 0  F0 F1 F2 F3 F4 ..... B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5
      rank 1     F0 F1 F2 F3 .. B0 F4 B1 W0 F5 B2 W1 B3 W2 B4 W3 B5 W4 W5
      rank 2        F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5
      rank 3           F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5

- k < p: too few microbatches to keep the ranks busy; the list scheduler (`greedy`) builds the order.

With n slices per microbatch k counts slices, and the n-1 other slices of the first microbatch come in front. p=3, k=3, m=2, n=2::

    rank 0  F0-- F0.1 F1-- F1.1 ......... B0.1 W0.1 B0-- W0-- B1.1 W1.1 B1-- W1--
    rank 1       F0-- F0.1 F1-- .... B0.1 F1.1 B0-- W0.1 B1.1 W0-- B1-- W1.1 W1--
    rank 2            F0-- F0.1 B0.1 F1-- B0-- F1.1 B1.1 W0.1 B1-- W0-- W1.1 W1--

Bubble with F=B=W and free links, k >= p: max(2p-1-k, 2p-1-m, 0). Activation memory per rank: at most k*M_B.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.generators.deferral import deferred_wgrad_row
from megatron.zerobubble.plan.generators.greedy import greedy_plan
from megatron.zerobubble.plan.generators.request import Request
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.search.orders import SeedOrder, seed_order_of

_EXTRA_FORWARDS = (-2, -1, 0, 1)
_DELAY_SHARES = (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 1.0)


def zb(request: Request) -> Plan:
    """The hand-written pattern; with search options, the best plan found from the patterns of several memory points."""
    p, m, n, pending = request.num_ranks, request.num_microbatches, request.num_slices, request.pending
    if request.options is None:
        return zb_pattern(p, m, pending, n)
    costs = request.stage_costs
    costs.check_fits(request.spec.placement)

    def seed_orders(memory: float) -> list[SeedOrder]:
        pendings = [k for k in (1, -(-p // 2), p, -(-3 * p // 2), 2 * p) if k + n - 1 <= memory * n][-2:]
        patterns = [partial(zb_pattern, p, max_pending_backward=k, num_slices=n) for k in {*pendings, pending}]
        return [*map(seed_order_of, patterns), *map(seed_order_of, timed_zb(p, costs, memory, n))]

    own = min(p, m * n) if request.spec.max_pending_backward is None else pending
    return request.searched(request.memory_of(own), seed_orders)


def zb_pattern(num_ranks: int, num_microbatches: int, max_pending_backward: int, num_slices: int = 1) -> Plan:
    """ZB for any p >= 1, m >= 1 and k = `max_pending_backward` >= 1, one stage per rank. With slices k counts those."""
    p, pending = num_ranks, min(max_pending_backward, 2 * num_ranks - 1)
    if pending < p:
        return greedy_plan("zb", Placement.linear(p), num_microbatches, max_pending=pending, num_slices=num_slices)
    rows = []
    for rank in range(p):
        num_ahead = (p - rank) + min(pending - p, p - rank - 1)
        delay = pending - num_ahead
        rows.append(deferred_wgrad_row(rank, num_microbatches, num_ahead=num_ahead, delay=delay, num_slices=num_slices))
    return Plan.of("zb", Placement.linear(p), num_microbatches, rows, num_slices=num_slices)


def timed_zb(num_ranks: int, costs: CostModel, memory: float, num_slices: int = 1) -> list[Callable[[int], Plan]]:
    """Variants of the pattern for measured times: a rank runs forwards until its first B arrives; W waits as memory allows.

    The best numbers of warmup forwards and of pending W depend on how the ranks interleave, so there are several variants to try.
    Those with too many warmup forwards exceed the memory.

    Args:
        num_ranks: p.
        costs: measured times and activation memory per stage.
        memory: the limit per rank, in activations of microbatches.
        num_slices: n.

    Returns:
        For each variant a function from the number of microbatches to a plan.
    """
    shares = itertools.product(_EXTRA_FORWARDS, _DELAY_SHARES)
    return [partial(_timed, num_ranks, num_slices, costs, memory, extra, share) for extra, share in shares]


def _timed(
    num_ranks: int, num_slices: int, costs: CostModel, memory: float, extra: int, share: float, num_microbatches: int
) -> Plan:
    """One variant: `extra` more warmup forwards on all ranks but the last, and `share` of the remaining memory for pending W.

    All slices count alike, and the n-1 that run ahead of the first B besides (`deferred_wgrad_row`) count in memory.
    """
    rows = []
    until_backward, n, count = 0.0, num_slices, num_microbatches * num_slices
    for rank in reversed(range(num_ranks)):
        activation, kept = costs.activation[rank] / n, costs.activation_after_backward[rank] / n
        forward_ms, backward_ms = costs.forward_ms[rank] / n, costs.backward_ms[rank] / n
        ahead = count
        if forward_ms > 0:
            ahead = 1 + math.ceil(until_backward / forward_ms - 1e-9) + (extra if rank + 1 < num_ranks else 0)
        if activation > 0:
            ahead = min(ahead, math.floor(min(memory / activation, count) + 1e-9) - n + 1)
        ahead = max(1, ahead)
        delay = count
        if kept > 0:
            delay = math.floor(min(share * (memory - (ahead + n - 1) * activation) / kept, count) + 1e-9)
        rows.append(deferred_wgrad_row(rank, num_microbatches, num_ahead=ahead, delay=max(0, delay), num_slices=n))
        until_backward += forward_ms + backward_ms + 2 * costs.comm_ms
    return Plan.of("zb", Placement.linear(num_ranks), num_microbatches, reversed(rows), num_slices=n)
