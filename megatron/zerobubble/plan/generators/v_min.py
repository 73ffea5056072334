"""V-Min: about a third of 1F1B's activation memory, two stages a rank in a V (arXiv 2405.15362, section 3).

Every pass follows the one before it at once, so that activations live as shortly as they can. With so little memory the times
decide: the paper's block (`building_blocks` has it, strides of 1) is where the search begins. p=3, m=4, capitals the chunk on the
way down, small letters the chunk on the way up::

    rank 0  F0 F1 ........ f0 b0 F2 w0 f1 b1 w1 B0 W0 F3 f2 b2 w2 B1 W1 .. f3 b3 B2 W2 w3 .. B3 W3
    rank 1     F0 ..... f0 F1 .. b0 f1 w0 F2 B0 W0 b1 f2 w1 F3 B1 b2 W1 f3 w2 B2 b3 W2 w3 B3 W3
    rank 2        F0 f0 ..... F1 f1 b0 B0 W0 F2 w0 f2 b1 B1 W1 F3 w1 f3 b2 B2 w2 W2 b3 B3 w3 W3

Memory: p/3 rounded up, and one microbatch more unless p mod 3 is 1 (the block then closes without a gap).
"""

from __future__ import annotations

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.generators.building_blocks import v_drawings
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.search.search import SearchOptions, memory_of, search


def v_min_memory(num_ranks: int, num_microbatches: int) -> float:
    """V-Min's memory limit; 1.0 is 1F1B's rank 0."""
    unit = min(num_ranks, num_microbatches)
    return min(-(-num_ranks // 3) + (num_ranks % 3 != 1), unit) / unit


def v_min(num_ranks: int, num_microbatches: int, costs: CostModel, options: SearchOptions) -> Plan:
    """V-Min for any p >= 1 and m >= 1, within the search options' limit."""
    placement = Placement.v(num_ranks)
    drawings = v_drawings(num_ranks, memory_of(options, placement, num_microbatches))
    return search("v-min", placement, num_microbatches, costs, options, drawings=drawings)
