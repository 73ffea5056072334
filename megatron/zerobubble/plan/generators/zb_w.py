"""ZB-W: two Vs, one after the other, with four stages per rank, B and W split.

As in a V (arXiv 2401.10241, section 6) the first and the last stage are on rank 0, and every rank has early and late stages; with
twice as many stages each is half as long, so that warm-up and cool-down are shorter, for twice the messages. Short stages also
divide layers of unequal kinds over the ranks more evenly. There is no hand-written pattern: the order is searched for. p=2,
stages 0..7::

    rank 0  0     3 4     7
    rank 1    1 2     5 6

Activation memory without a limit of its own: 1F1B's.
"""

from __future__ import annotations

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.search.search import search
from megatron.zerobubble.plan.search.search_options import SearchOptions


def zb_w(num_ranks: int, num_microbatches: int, costs: CostModel, options: SearchOptions) -> Plan:
    """ZB-W for any p >= 1 and m >= 1, within the memory limit of the search options."""
    return search("zb-w", Placement.w(num_ranks), num_microbatches, costs, options)
