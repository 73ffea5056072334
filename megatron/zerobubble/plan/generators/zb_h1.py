"""ZB-H1 (ZB-1p): a third of 1F1B's bubble at 1F1B's memory (arXiv 2401.10241, section 2.1).

1F1B's order with the backward split into B and W. B runs as early as in 1F1B; rank i runs W i microbatches after B, so that
every rank has activations of the same number of microbatches. p=4, m=6, the digit is the microbatch::

    rank 0  F0 F1 F2 F3 ........ B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5
    rank 1     F0 F1 F2 ..... B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5
    rank 2        F0 F1 .. B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5
    rank 3           F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5

Bubble with F=B=W and free links: (p-1)*(T_F + T_B - T_W) = p-1 for m >= p, and 2p-1-m below. Activation memory:
(p-i)*M_B + i*M_W on rank i, at most 1F1B's p*M_B.

With n slices per microbatch the same of slices, behind the n-1 other slices of the first microbatch. p=3, m=2, n=2::

    rank 0  F0-- F0.1 F1-- F1.1 ......... B0.1 W0.1 B0-- W0-- B1.1 W1.1 B1-- W1--
    rank 1       F0-- F0.1 F1-- .... B0.1 F1.1 B0-- W0.1 B1.1 W0-- B1-- W1.1 W1--
    rank 2            F0-- F0.1 B0.1 F1-- B0-- F1.1 B1.1 W0.1 B1-- W0-- W1.1 W1--

Activation memory of rank i: p-i+n-1 slices before B and i after it.
"""

from __future__ import annotations

from megatron.zerobubble.plan.generators.deferral import deferred_wgrad_row
from megatron.zerobubble.plan.ir import Placement, Plan


def zb_h1(num_ranks: int, num_microbatches: int, num_slices: int = 1) -> Plan:
    """ZB-H1 for any p >= 1, m >= 1 and n >= 1 slices per microbatch, one stage per rank."""
    rows = [
        deferred_wgrad_row(rank, num_microbatches, num_ahead=num_ranks - rank, delay=rank, num_slices=num_slices)
        for rank in range(num_ranks)
    ]
    return Plan.of("zb-h1", Placement.linear(num_ranks), num_microbatches, rows, num_slices=num_slices)
