"""The file of --zero-bubble-load-plan: a plan that runs from the first iteration on, and the costs it was made for."""

from __future__ import annotations

from pathlib import Path

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.files import MOST_GIVEN, read_regular
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.simulate import read_plan

__all__ = ["check_stages", "loaded_plan"]


def loaded_plan(file: str) -> tuple[Plan, CostModel | None]:
    """(the plan, its costs if the file has them).

    Raises:
        ConfigError: the file cannot be read.
        PlanError: it is not a plan, its costs do not fit its stages, or it is for microbatches of certain lengths.
    """
    try:
        plan, costs = read_plan(read_regular(Path(file), most=MOST_GIVEN))
        if costs is not None:
            costs.check_fits(plan.placement)
        if plan.assignment or plan.slice_counts or (costs is not None and costs.num_microbatches is not None):
            raise PlanError(
                "it plans microbatches of certain lengths, and a run plans each iteration for its own; plan without "
                "--microbatch-tokens"
            )
    except OSError as error:
        raise ConfigError(f"--zero-bubble-load-plan {file}: {error.strerror}") from None
    except (PlanError, ConfigError) as error:
        raise PlanError(f"--zero-bubble-load-plan {file}: {error}") from None
    return plan, costs


def check_stages(path: str, spec: ScheduleSpec, schedule: str) -> None:
    """Raise ConfigError unless the loaded plan's stages are on the ranks where those of a run are.

    Args:
        path: the file, for the message.
        spec: of the run, with the plan.
        schedule: its name, for the message.
    """
    plan = spec.loaded_plan
    if plan is not None and plan.placement != spec.placement:
        raise ConfigError(
            f"--zero-bubble-load-plan {path}: the plan's stages are on ranks {_listed(plan.placement)}, those of schedule "
            f"{schedule} on {spec.num_ranks} pipeline ranks on {_listed(spec.placement)}; choose another schedule, pipeline size "
            "or plan"
        )


def _listed(placement: Placement) -> str:
    return f"{', '.join(map(str, placement.stage_to_rank))} ({placement.name} placement)"
