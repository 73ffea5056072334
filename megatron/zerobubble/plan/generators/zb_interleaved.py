"""Zero-bubble interleaved: several stages a rank, going round, with B and W split (ideas of arXiv 2104.04473 and 2401.10241).

Interleaving shortens the ramp v times; splitting the backward lets W fill what is left of it. Interleaved 1F1B with each BW
as a B and a W is where the search begins. p=2, v=2, m=4, small letters for the second stage of a rank::

    rank 0  F0 F1 f0 f1 F2 b0 w0 B0 b1 f2 B1 W0 F3 b2 w1 B2 f3 W1 w2 b3 W2 B3 w3 W3
    rank 1     F0 F1 f0 b0 f1 B0 b1 F2 B1 w0 f2 b2 W0 B2 F3 w1 f3 b3 W1 B3 w2 W2 w3 W3

Memory, where no limit is given: interleaved 1F1B's, 1 + (p-1)/(p*v) of 1F1B's rank 0.
"""

from __future__ import annotations

from functools import partial

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.generators.interleaved_1f1b import interleaved_1f1b
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.search import Goal, drawing_of, search


def zb_interleaved_memory(num_ranks: int, num_microbatches: int, num_chunks: int) -> float:
    """Interleaved 1F1B's memory; 1.0 is 1F1B's rank 0."""
    return (num_ranks + (num_ranks - 1) / num_chunks) / min(num_ranks, num_microbatches)


def zb_interleaved(num_ranks: int, num_microbatches: int, num_chunks: int, costs: CostModel, goal: Goal) -> Plan:
    """Zero-bubble interleaved for any p >= 1, v >= 1 and m >= 1, within the goal's limit."""
    drawn = drawing_of(partial(interleaved_1f1b, num_ranks, num_chunks=num_chunks))
    return search("zb-interleaved", Placement.loop(num_ranks, num_chunks), num_microbatches, costs, goal, drawings=[drawn])
