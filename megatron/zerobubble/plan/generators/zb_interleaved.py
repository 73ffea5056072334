"""Zero-bubble interleaved: several stages a rank, going round, with B and W split (ideas of arXiv 2104.04473 and 2401.10241).

Interleaving shortens the ramp v times; splitting the backward lets W fill what is left of it. Interleaved 1F1B with each BW
as a B and a W is where the search begins. p=2, v=2, m=4, small letters for the second stage of a rank::

    rank 0  F0 F1 f0 f1 F2 b0 w0 F3 b1 w1 f2 B0 W0 f3 B1 W1 b2 w2 b3 B2 B3 w3 W2 W3
    rank 1     F0 F1 f0 b0 w0 f1 b1 w1 F2 B0 W0 F3 B1 f2 b2 f3 b3 B2 B3 w2 w3 W1 W2 W3

Memory, where no limit is given: interleaved 1F1B's, 1 + (p-1)/(p*v) of 1F1B's rank 0.
"""

from __future__ import annotations

from functools import partial

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.generators.interleaved_1f1b import interleaved_1f1b
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.search.search import SearchOptions, drawing_of, search


def zb_interleaved_memory(num_ranks: int, num_microbatches: int, num_chunks: int) -> float:
    """Interleaved 1F1B's memory; 1.0 is 1F1B's rank 0."""
    return (num_ranks + (num_ranks - 1) / num_chunks) / min(num_ranks, num_microbatches)


def zb_interleaved(num_ranks: int, num_microbatches: int, num_chunks: int, costs: CostModel, options: SearchOptions) -> Plan:
    """Zero-bubble interleaved for any p >= 1, v >= 1 and m >= 1, within the search options' limit."""
    drawn = drawing_of(partial(interleaved_1f1b, num_ranks, num_chunks=num_chunks))
    return search("zb-interleaved", Placement.loop(num_ranks, num_chunks), num_microbatches, costs, options, drawings=[drawn])
