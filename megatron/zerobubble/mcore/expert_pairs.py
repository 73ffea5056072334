"""Plans for models whose all-to-alls of experts run beside the other pass of a pair."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron.zerobubble.mcore.model.expert_exchanges import why_exposed
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.pairing import with_pairs
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec

__all__ = ["can_pair", "paired"]

_log = logging.getLogger(__name__)

_ALL_TO_ALL = 0.3
"""Share of F and of B in which tokens are assumed to travel. A run does not measure it."""


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


def paired(plan: Plan, spec: ScheduleSpec, costs: CostModel | None) -> Plan:
    """A plan with pairs where they pay, in another order where that pays more; one that has pairs as it is.

    Args:
        plan: a plan of `spec`.
        spec: whose memory limit holds; without one a rank may hold one microbatch more than in `plan`.
        costs: as profiled; None: F, B and W take the same time.
    """
    if plan.pairs:
        return plan
    known = replace(costs or CostModel.uniform(plan.placement), all_to_all=(_ALL_TO_ALL, _ALL_TO_ALL))
    return with_pairs(plan, known, Objective.MAKESPAN, spec.memory_limit)
