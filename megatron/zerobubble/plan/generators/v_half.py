"""V-Half: about half of 1F1B's activation memory, two stages per rank in a V (arXiv 2405.15362, section 3).

The paper repeats one building block made for F=B=W (in `building_blocks`: strides 1 and 2). Here V-Half is a memory limit: a
search under that limit starts from this block and similar ones, so that uneven passes and slow links get an order of their own.
p=4, m=5, capitals for the chunk on the way down, small letters for the chunk on the way up::

    rank 0  F0 F1 F2 ........... f0 b0 w0 F3 f1 b1 w1 F4 f2 b2 w2 B0 W0 .. f3 b3 B1 W1 f4 b4 B2 W2 w3 w4 B3 W3 B4 W4
    rank 1     F0 F1 ........ f0 F2 .. b0 f1 F3 w0 b1 f2 w1 F4 B0 b2 W0 f3 w2 B1 b3 f4 W1 B2 b4 W2 w3 B3 W3 B4 w4 W4
    rank 2        F0 F1 .. f0 ..... F2 f1 b0 w0 F3 f2 b1 B0 W0 F4 w1 f3 b2 B1 W1 f4 b3 B2 w2 W2 b4 B3 w3 B4 w4 W3 W4
    rank 3           F0 f0 F1 f1 ..... F2 f2 b0 w0 F3 B0 W0 f3 b1 w1 F4 B1 W1 f4 b2 B2 b3 B3 w2 W2 b4 B4 w3 w4 W3 W4

Activation memory per rank: p//2 + 1 microbatches, which is 1/2 + 1/p of 1F1B's for even p.
"""

from __future__ import annotations

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.generators.building_blocks import v_seed_orders
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.search.search import search
from megatron.zerobubble.plan.search.search_options import SearchOptions, memory_of


def v_half_memory(num_ranks: int, num_microbatches: int) -> float:
    """The memory limit of V-Half; 1.0 is 1F1B's rank 0."""
    unit = min(num_ranks, num_microbatches)
    return min(num_ranks // 2 + 1, unit) / unit


def v_half(num_ranks: int, num_microbatches: int, costs: CostModel, options: SearchOptions) -> Plan:
    """V-Half for any p >= 1 and m >= 1, within the memory limit of the search options."""
    placement = Placement.v(num_ranks)
    seed_orders = v_seed_orders(num_ranks, memory_of(options, placement, num_microbatches))
    return search("v-half", placement, num_microbatches, costs, options, seed_orders=seed_orders)
