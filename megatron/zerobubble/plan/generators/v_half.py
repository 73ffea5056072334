"""V-Half: half of 1F1B's activation memory and a microbatch more, two stages per rank in a V (arXiv 2405.15362, section 3).

The paper repeats one building block made for F=B=W (in `building_blocks`: strides 1 and 2). Here V-Half is a memory limit: a
search under that limit starts from this block and similar ones, so that uneven passes and slow links get an order of their own.
p=4, m=5, capitals for the chunk on the way down, small letters for the chunk on the way up::

    rank 0  F0 F1 F2 ........... f0 b0 w0 F3 f1 b1 w1 F4 f2 b2 w2 B0 W0 .. f3 b3 B1 W1 f4 b4 B2 W2 w3 w4 B3 W3 B4 W4
    rank 1     F0 F1 ........ f0 F2 .. b0 f1 F3 w0 b1 f2 w1 F4 B0 b2 W0 f3 w2 B1 b3 f4 W1 B2 b4 W2 w3 B3 W3 B4 w4 W4
    rank 2        F0 F1 .. f0 ..... F2 f1 b0 w0 F3 f2 b1 B0 W0 F4 w1 f3 b2 B1 W1 f4 b3 B2 w2 W2 b4 B3 w3 B4 w4 W3 W4
    rank 3           F0 f0 F1 f1 ..... F2 f2 b0 w0 F3 B0 W0 f3 b1 w1 F4 B1 W1 f4 b2 B2 b3 B3 w2 W2 b4 B4 w3 w4 W3 W4

Activation memory per rank: p//2 + 1 microbatches, which is 1/2 + 1/p of 1F1B's for even p.

With n slices per microbatch the block is of slices, and its B and W follow n-1 periods later, when all slices of a microbatch have
had F. p=3, m=2, n=2::

    rank 0  F0-- F0.1 F1-- F1.1 .... f0-- .... f0.1 b0.1 w0.1 b0-- w0-- .... B0.1 W0.1 .... f1-- f1.1 b1.1 B0-- w1.1 W0-- b1-- B1.1 w1-- W1.1 .... B1-- W1--
    rank 1       F0-- F0.1 F1-- f0-- F1.1 f0.1 ......... b0.1 w0.1 b0-- B0.1 W0.1 w0-- f1-- f1.1 .... B0-- b1.1 W0-- w1.1 B1.1 b1-- W1.1 w1-- B1-- W1--
    rank 2            F0-- f0-- F0.1 f0.1 F1-- F1.1 ......... b0.1 B0.1 w0.1 W0.1 f1-- f1.1 b0-- B0-- w0-- W0-- b1.1 B1.1 w1.1 W1.1 b1-- B1-- w1-- W1--

Activation memory per rank: p//2 + n slices.
"""  # noqa: E501 - the timeline is wider

from __future__ import annotations

from functools import partial

from megatron.zerobubble.plan.generators.request import Request
from megatron.zerobubble.plan.generators.zbv import v_seed_orders
from megatron.zerobubble.plan.ir import Plan


def v_half(request: Request) -> Plan:
    """V-Half for any p >= 1 and m >= 1."""
    p = request.num_ranks
    return request.searched(request.memory_of(min(p // 2 + 1, request.num_passes)), partial(v_seed_orders, p, request.num_slices))
