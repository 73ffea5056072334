"""1F1B: the classic schedule, with a fused backward (arXiv 2104.04473, section 2.2.1).

p=4, m=6, one tick each for F and for the two halves of BW::

    rank 0  F0 F1 F2 F3 ................. BW0-- F4 BW1-- F5 BW2-- .. BW3-- .. BW4-- .. BW5--
    rank 1     F0 F1 F2 ........... BW0-- F3 BW1-- F4 BW2-- F5 BW3-- .. BW4-- .. BW5--
    rank 2        F0 F1 ..... BW0-- F2 BW1-- F3 BW2-- F4 BW3-- F5 BW4-- .. BW5--
    rank 3           F0 BW0-- F1 BW1-- F2 BW2-- F3 BW3-- F4 BW4-- F5 BW5--

Bubble, with equal stages: (p-1)/(m+p-1) of the span. Activation memory of rank i: min(p-i, m) microbatches.

With n slices per microbatch it is Seq1F1B (arXiv 2406.03488, section 3.2): the same order of slices, with the n-1 other slices of
the first microbatch in front, because the B of its last slice is the first one. p=3, m=2, n=2, F0.1 is slice 1 of microbatch 0::

    rank 0  F0-- F0.1 F1-- F1.1 ................... BW0.1---- .... BW0------ .... BW1.1---- BW1------
    rank 1       F0-- F0.1 F1-- ......... BW0.1---- F1.1 BW0------ .... BW1.1---- BW1------
    rank 2            F0-- F0.1 BW0.1---- F1-- BW0------ F1.1 BW1.1---- BW1------

Bubble: (p-1)/(m*n+p-1) of the span. Activation memory of rank i: min(p-i+n-1, m*n) slices.
"""

from __future__ import annotations

from megatron.zerobubble.plan.ir import OpKind, Passes, Placement, Plan


def one_f_one_b(num_ranks: int, num_microbatches: int, num_slices: int = 1) -> Plan:
    """1F1B for any p >= 1, m >= 1 and n >= 1 slices per microbatch, one stage per rank."""
    passes = Passes((num_slices,) * num_microbatches)
    count, rows = len(passes), []
    for rank in range(num_ranks):
        num_ahead = min(num_ranks - rank + num_slices - 1, count)
        row = [passes.nth(rank, OpKind.F, number) for number in range(num_ahead)]
        for number in range(count):
            row.append(passes.nth(rank, OpKind.BW, number))
            if number + num_ahead < count:
                row.append(passes.nth(rank, OpKind.F, number + num_ahead))
        rows.append(row)
    return Plan.of("1f1b", Placement.linear(num_ranks), num_microbatches, rows, num_slices=num_slices)
