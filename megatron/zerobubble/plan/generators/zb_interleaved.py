"""Zero-bubble interleaved: several stages per rank, placed round-robin, B and W split (ideas of arXiv 2104.04473 and 2401.10241).

Interleaving divides warmup and cooldown by v; splitting the backward lets W fill the remaining bubble. The search starts from
interleaved 1F1B with each BW split into B and W. p=2, v=2, m=4, small letters for the second stage of a rank::

    rank 0  F0 F1 f0 f1 F2 b0 w0 F3 b1 w1 f2 B0 W0 f3 B1 W1 b2 w2 b3 B2 B3 w3 W2 W3
    rank 1     F0 F1 f0 b0 w0 f1 b1 w1 F2 B0 W0 F3 B1 f2 b2 f3 b3 B2 B3 w2 w3 W1 W2 W3

Activation memory without a limit of its own: interleaved 1F1B's, 1 + (p-1)/(p*v) of 1F1B's rank 0.
"""

from __future__ import annotations

from functools import partial

from megatron.zerobubble.plan.generators.interleaved_1f1b import interleaved_1f1b
from megatron.zerobubble.plan.generators.request import Request
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.search.orders import seed_order_of


def zb_interleaved(request: Request) -> Plan:
    """Zero-bubble interleaved for any p >= 1, v >= 1 and m >= 1."""
    p, v = request.num_ranks, request.num_chunks
    seed_order = seed_order_of(partial(interleaved_1f1b, p, num_chunks=v))
    return request.searched((p + (p - 1) / v) / min(p, request.num_microbatches), lambda _: [seed_order])
