"""V-Min: towards a third of 1F1B's activation memory with many ranks, two stages per rank in a V (arXiv 2405.15362, section 3).

Every pass of a microbatch follows the previous one immediately, so that activations live as briefly as possible. Under this limit
the bubble depends strongly on the times: a search starts from the paper's block (in `building_blocks`: strides of 1) and similar
ones. p=4, m=5, capitals for the chunk on the way down, small letters for the chunk on the way up::

    rank 0  F0 F1 .............. f0 b0 F2 w0 f1 b1 w1 F3 B0 W0 ..... f2 b2 B1 w2 F4 W1 f3 b3 B2 w3 W2 .. f4 b4 B3 w4 W3 ........ B4 W4
    rank 1     F0 F1 ........ f0 ..... b0 f1 w0 F2 b1 B0 W0 F3 w1 f2 .. B1 b2 W1 w2 f3 F4 B2 b3 W2 w3 f4 .. B3 b4 W3 w4 ..... B4 W4
    rank 2        F0 ..... f0 F1 ..... f1 b0 w0 .. B0 F2 b1 W0 f2 w1 B1 F3 W1 b2 f3 w2 B2 F4 W2 b3 f4 w3 B3 W3 .. b4 w4 .. B4 W4
    rank 3           F0 f0 ..... F1 f1 ..... b0 B0 w0 W0 F2 f2 b1 B1 w1 W1 F3 f3 b2 B2 w2 W2 F4 f4 b3 B3 w3 W3 ..... b4 B4 w4 W4

Activation memory per rank: p/3 microbatches rounded up, and one more unless p mod 3 is 1 (the block then has no gaps). That is
0.5 of 1F1B's for p = 4 and 8, 0.375 for 16 and 0.34 for 64.
"""  # noqa: E501 - the timeline is wider

from __future__ import annotations

from functools import partial

from megatron.zerobubble.plan.generators.request import Request
from megatron.zerobubble.plan.generators.zbv import v_seed_orders
from megatron.zerobubble.plan.ir import Plan


def v_min(request: Request) -> Plan:
    """V-Min for any p >= 1 and m >= 1."""
    p = request.num_ranks
    pending = min(-(-p // 3) + (p % 3 != 1), request.num_passes)
    return request.searched(request.memory_of(pending), partial(v_seed_orders, p, request.num_slices))
