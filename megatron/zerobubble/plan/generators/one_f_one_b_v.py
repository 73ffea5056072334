"""1F1B-V: two stages per rank in a V with the classic fused backward (arXiv 2405.15362, section 3).

Two thirds of 1F1B's activation memory with many ranks, 0.81 with 8, without splitting the backward pass; without a separate W
nothing can fill the bubble. p=3, m=3, capitals for the chunk on the way down, small letters for the chunk on the way up::

    rank 0  F0 F1 F2 ..... f0 bw0-- f1 bw1-- ........ f2 bw2-- BW0-- ..... BW1-- ..... BW2--
    rank 1     F0 F1 F2 f0 .. f1 .. bw0-- .. bw1-- f2 .. BW0-- bw2-- BW1-- ..... BW2--
    rank 2        F0 f0 F1 f1 F2 ........ bw0-- f2 BW0-- bw1-- BW1-- bw2-- BW2--

Activation memory per rank: 2p/3 microbatches rounded up, plus half a microbatch.
"""

from __future__ import annotations

from megatron.zerobubble.plan.generators.request import Request
from megatron.zerobubble.plan.ir import Plan


def one_f_one_b_v(request: Request) -> Plan:
    """1F1B-V for any p >= 1 and m >= 1."""
    unit = min(request.num_ranks, request.num_microbatches)
    return request.searched(min(-(-2 * request.num_ranks // 3) + 0.5, unit) / unit, fused=True)
