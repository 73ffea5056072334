"""Plans for models whose all-to-alls of experts run beside the other pass of a pair."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron.zerobubble.mcore.model.expert_exchanges import why_exposed
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.pairing import with_pairs
from megatron.zerobubble.plan.render.plan_summary import all_to_alls
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.simulate import Simulation, peak_memory, simulate

__all__ = ["best_pairs", "can_pair", "pairs_line", "wgrad_beside"]

_log = logging.getLogger(__name__)

_WORTH = 0.01
"""Least gain, as a share of the iteration time, for which passes are paired: they take a thread and mostly more memory."""


def can_pair(config: Any, spec: ScheduleSpec, *, is_unequal: bool) -> bool:
    """Whether passes of a model can be paired. If not, one line on rank 0 says why.

    Args:
        config: TransformerConfig of the model.
        spec: its schedule.
        is_unequal: whether microbatches have lengths of their own.
    """
    if spec.is_stock:
        return False
    why = why_exposed(config, num_slices=spec.num_slices, is_unequal=is_unequal)
    if why is not None and dist.get_rank() == 0:
        _log.warning("all-to-alls of experts stay exposed, and passes run one after the other: %s", why)
    return why is None


def wgrad_beside(config: Any) -> float:
    """The share of a W that the store computes beside all-to-alls of a model where it can (`CostModel.wgrad_beside`).

    Args:
        config: TransformerConfig of the model.
    """
    if config.transformer_impl == "transformer_engine":  # see `DeferringModule.compute_ahead`
        return float(config.gradient_accumulation_fusion and not config.add_bias_linear)
    return 0.5 if config.sequence_parallel else 1.0  # a GEMM that has to gather its input first is left to its W


def best_pairs(plans: Sequence[Plan], alone: Plan, costs: CostModel, objective: Objective, limit: float | None) -> list[Plan]:
    """The plans with pairs, in other orders where those pay more (`plan.pairing`); as they are where pairs gain less than 1 %.

    Args:
        plans: validated plans within the limit.
        alone: the plan that a run starts with.
        costs: as measured, with the shares of all-to-alls.
        objective: which iteration time to minimize.
        limit: most activation memory per rank; None: that of the plans without pairs, and of one F more.
    """
    if limit is None:
        without = [alone, *(plan for plan in plans if not plan.pairs)]
        one = max(costs.activation) / min(alone.num_ranks, alone.num_microbatches)
        limit = max(max(peak_memory(plan, costs)) for plan in without) + one
    found = []
    for plan in plans:
        other = with_pairs(plan, costs, objective, limit)
        now, then = (objective.of(simulate(each, costs)) for each in (plan, other))
        found.append(other if then < now * (1 - _WORTH) else plan)
    return found


def pairs_line(found: Simulation) -> str:
    """What the pairs of a plan hide, by the costs it is simulated with, or why it has none."""
    forward, backward = (f"{share:.1%}" for share in found.costs.all_to_all)
    measured = f"all-to-alls of experts are {forward} of F and {backward} of B"
    if found.plan.pairs or any(found.early_wgrad_ms):
        return "; ".join((measured, *all_to_alls(found)))
    return f"{measured}: pairs of passes that hide them would shorten an iteration by less than {_WORTH:.0%}; none are made"
