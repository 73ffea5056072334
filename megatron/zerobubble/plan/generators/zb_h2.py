"""ZB-H2 (ZB-2p): no bubble at twice 1F1B's memory (arXiv 2401.10241, section 2.2).

Enough forwards run before the first B to fill the warmup, and rank i runs W 2i microbatches after B. With post-validation a
rank's optimizer steps when its own W are done, so the ranks finish one after another, as they started. p=3, m=6::

    rank 0  F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5
    rank 1     F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5
    rank 2        F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5

Bubble with F=B=W and free links: 0 for m >= 2p-1, and 2p-1-m below. Activation memory on rank i:
(2p-2i-1)*M_B + 2i*M_W.

With n slices per microbatch the same of slices, behind the n-1 other slices of the first microbatch. p=3, m=2, n=2::

    rank 0  F0-- F0.1 F1-- F1.1 ......... B0.1 W0.1 B0-- W0-- B1.1 W1.1 B1-- W1--
    rank 1       F0-- F0.1 F1-- F1.1 B0.1 .... B0-- .... B1.1 W0.1 B1-- W0-- W1.1 W1--
    rank 2            F0-- F0.1 B0.1 F1-- B0-- F1.1 B1.1 B1-- W0.1 W0-- W1.1 W1--
"""

from __future__ import annotations

from megatron.zerobubble.plan.generators.deferral import deferred_wgrad_row
from megatron.zerobubble.plan.ir import Placement, Plan


def zb_h2(num_ranks: int, num_microbatches: int, num_slices: int = 1) -> Plan:
    """ZB-H2 for any p >= 1, m >= 1 and n >= 1 slices per microbatch, one stage per rank."""
    rows = [
        deferred_wgrad_row(rank, num_microbatches, num_ahead=2 * (num_ranks - rank) - 1, delay=2 * rank, num_slices=num_slices)
        for rank in range(num_ranks)
    ]
    return Plan.of("zb-h2", Placement.linear(num_ranks), num_microbatches, rows, num_slices=num_slices)
