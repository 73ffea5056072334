"""1F1B: the classic schedule, with a fused backward (arXiv 2104.04473, section 2.2.1).

p=4, m=6, one tick each for F and for the two halves of BW::

    rank 0  F0 F1 F2 F3 ................. BW0-- F4 BW1-- F5 BW2-- .. BW3-- .. BW4-- .. BW5--
    rank 1     F0 F1 F2 ........... BW0-- F3 BW1-- F4 BW2-- F5 BW3-- .. BW4-- .. BW5--
    rank 2        F0 F1 ..... BW0-- F2 BW1-- F3 BW2-- F4 BW3-- F5 BW4-- .. BW5--
    rank 3           F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3-- F4 BW4-- F5 BW5--

Bubble, with equal stages: (p-1)/(m+p-1) of the span. Activation memory of rank i: min(p-i, m) microbatches.
"""

from __future__ import annotations

from megatron.zerobubble.plan.ir import Op, OpKind, Placement, Plan


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Plan:
    """1F1B for any p >= 1 and m >= 1, one stage per rank."""
    m = num_microbatches
    rows = []
    for rank in range(num_ranks):
        num_ahead = min(num_ranks - rank, m)
        row = [Op(rank, OpKind.F, microbatch) for microbatch in range(num_ahead)]
        for microbatch in range(m):
            row.append(Op(rank, OpKind.BW, microbatch))
            if microbatch + num_ahead < m:
                row.append(Op(rank, OpKind.F, microbatch + num_ahead))
        rows.append(row)
    return Plan.of("1f1b", Placement.linear(num_ranks), m, rows)
