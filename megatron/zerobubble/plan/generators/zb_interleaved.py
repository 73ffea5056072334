"""Zero-bubble interleaved: several stages per rank, placed round-robin, B and W split (ideas of arXiv 2104.04473 and 2401.10241).

Interleaving divides warmup and cooldown by v; splitting the backward lets W fill the remaining bubble. The search starts from
interleaved 1F1B with each BW split into B and W. p=2, v=2, m=4, small letters for the second stage of a rank::

    rank 0  F0 F1 f0 f1 F2 b0 w0 F3 b1 w1 f2 B0 W0 f3 B1 W1 b2 w2 b3 B2 B3 w3 W2 W3
    rank 1     F0 F1 f0 b0 w0 f1 b1 w1 F2 B0 W0 F3 B1 f2 b2 f3 b3 B2 B3 w2 w3 W1 W2 W3

Activation memory without a limit of its own: interleaved 1F1B's, 1 + (p-1)/(p*v) of 1F1B's rank 0.
"""

from __future__ import annotations

from functools import partial

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.generators.interleaved_1f1b import interleaved_1f1b
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.search.orders import seed_order_of
from megatron.zerobubble.plan.search.search import search
from megatron.zerobubble.plan.search.search_options import SearchOptions


def zb_interleaved_memory(num_ranks: int, num_microbatches: int, num_chunks: int) -> float:
    """The default memory limit, that of interleaved 1F1B; 1.0 is 1F1B's rank 0."""
    return (num_ranks + (num_ranks - 1) / num_chunks) / min(num_ranks, num_microbatches)


def zb_interleaved(num_ranks: int, num_microbatches: int, num_chunks: int, costs: CostModel, options: SearchOptions) -> Plan:
    """Zero-bubble interleaved for any p >= 1, v >= 1 and m >= 1, within the memory limit of the search options."""
    seed_orders = [seed_order_of(partial(interleaved_1f1b, num_ranks, num_chunks=num_chunks))]
    placement = Placement.loop(num_ranks, num_chunks)
    return search("zb-interleaved", placement, num_microbatches, costs, options, seed_orders=seed_orders)
