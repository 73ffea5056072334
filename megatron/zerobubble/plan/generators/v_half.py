"""V-Half: about half of 1F1B's activation memory, two stages per rank in a V (arXiv 2405.15362, section 3).

The paper repeats one building block made for F=B=W (in `building_blocks`: strides 1 and 2). Here V-Half is a memory limit: a
search under that limit starts from this block and similar ones, so that uneven passes and slow links get an order of their own.
p=4, m=5, capitals for the chunk on the way down, small letters for the chunk on the way up::

    rank 0  F0 F1 F2 ........... f0 b0 w0 F3 f1 b1 w1 F4 f2 b2 w2 B0 W0 .. f3 b3 B1 W1 f4 b4 B2 W2 w3 w4 B3 W3 B4 W4
    rank 1     F0 F1 ........ f0 F2 .. b0 f1 F3 w0 b1 f2 w1 F4 B0 b2 W0 f3 w2 B1 b3 f4 W1 B2 b4 W2 w3 B3 W3 B4 w4 W4
    rank 2        F0 F1 .. f0 ..... F2 f1 b0 w0 F3 f2 b1 B0 W0 F4 w1 f3 b2 B1 W1 f4 b3 B2 w2 W2 b4 B3 w3 B4 w4 W3 W4
    rank 3           F0 f0 F1 f1 ..... F2 f2 b0 w0 F3 B0 W0 f3 b1 w1 F4 B1 W1 f4 b2 B2 b3 B3 w2 W2 b4 B4 w3 w4 W3 W4

Activation memory per rank: p//2 + 1 microbatches, which is 1/2 + 1/p of 1F1B's for even p.
"""

from __future__ import annotations

from functools import partial

from megatron.zerobubble.plan.generators.request import Request
from megatron.zerobubble.plan.generators.zbv import v_seed_orders
from megatron.zerobubble.plan.ir import Plan


def v_half(request: Request) -> Plan:
    """V-Half for any p >= 1 and m >= 1."""
    unit = min(request.num_ranks, request.num_microbatches)
    seed_orders = partial(v_seed_orders, request.num_ranks, request.num_slices)
    return request.searched(min(request.num_ranks // 2 + 1, unit) / unit, seed_orders)
