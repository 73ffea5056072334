"""1F1B-V: two stages per rank in a V with the classic fused backward (arXiv 2405.15362, section 3).

About two thirds of 1F1B's activation memory without splitting the backward pass; without a separate W nothing can fill the
bubble. p=3, m=3, capitals for the chunk on the way down, small letters for the chunk on the way up::

    rank 0  F0 F1 F2 ..... f0 bw0-- f1 bw1-- ........ f2 bw2-- BW0-- ..... BW1-- ..... BW2--
    rank 1     F0 F1 F2 f0 .. f1 .. bw0-- .. bw1-- f2 .. BW0-- bw2-- BW1-- ..... BW2--
    rank 2        F0 f0 F1 f1 F2 ........ bw0-- f2 BW0-- bw1-- BW1-- bw2-- BW2--

Activation memory per rank: 2p/3 microbatches rounded up, plus half a microbatch.
"""

from __future__ import annotations

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.search.search import search
from megatron.zerobubble.plan.search.search_options import SearchOptions


def one_f_one_b_v_memory(num_ranks: int, num_microbatches: int) -> float:
    """The memory limit of 1F1B-V; 1.0 is 1F1B's rank 0."""
    unit = min(num_ranks, num_microbatches)
    return min(-(-2 * num_ranks // 3) + 0.5, unit) / unit


def one_f_one_b_v(num_ranks: int, num_microbatches: int, costs: CostModel, options: SearchOptions) -> Plan:
    """1F1B-V for any p >= 1 and m >= 1, within the memory limit of the search options."""
    return search("1f1b-v", Placement.v(num_ranks), num_microbatches, costs, options, fused=True)
