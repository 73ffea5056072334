"""Costs for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS


def uneven_costs(draw: st.DrawFn, num_stages: int, times: st.SearchStrategy[float], shares: float = 1.0) -> CostModel:
    """Each stage has times and activations of its own, of which B leaves a share, from 0 to `shares`."""
    lists = [tuple(draw(st.lists(times, min_size=num_stages, max_size=num_stages))) for _ in range(4)]
    left = draw(st.lists(st.floats(0.0, shares), min_size=num_stages, max_size=num_stages))
    rows = [*lists, tuple(whole * share for whole, share in zip(lists[3], left, strict=True))]
    return CostModel.of_lists(dict(zip(COST_LISTS, rows, strict=True)), comm_ms=draw(st.just(0.0) | times))
