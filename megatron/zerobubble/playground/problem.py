"""Requests of the page to the planner: a JSON object, validated field by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.messages import parse_json, quoted, shown
from megatron.zerobubble.plan.anytime import with_defaults
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.lengths_and_links import LengthsAndLinks
from megatron.zerobubble.plan.costs.step_costs import STEP_TIMES
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import DEFAULT_OBJECTIVE, Objective
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.plan_request import SCALARS, PlanRequest
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.registry import parse_max_pending_backward, schedule_info
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.playground.limits import (
    MAX_MEMORY,
    MAX_MICROBATCHES,
    MAX_POINTS,
    MAX_RANKS,
    MAX_SLICES,
    MAX_STAGES_PER_RANK,
    MAX_TIME_MS,
    choice,
    number,
    whole,
)
from megatron.zerobubble.playground.models.model_problem import ModelProblem, read_model


@dataclass(frozen=True, kw_only=True)
class PageRequest(PlanRequest):
    """One schedule to plan, or with `memory_limits` a Pareto front."""

    stages: CostModel | None = None
    """Costs per stage, as the form or a file has them; None: those of `times` or of a model."""
    memory_limits: tuple[float, ...]
    """Memory limits of a Pareto front, ascending; empty if none is requested."""
    model: ModelProblem | None
    """A model in place of times, which then are only those that replace its estimates. With `stages` only its bytes count."""

    def mean_costs(self, placement: Placement) -> CostModel:
        """The costs of the model or the table, of which consecutive stages are added up for placements with fewer."""
        if self.stages is None and self.model is not None:
            return self.model.costs_of(placement)
        if self.stages is not None and self.stages.num_stages % placement.num_stages == 0:
            return self.stages.merged(placement.num_stages)
        return super().mean_costs(placement)

    def memory(self, placement: Placement) -> dict[str, Any] | None:
        """What turns a plan's memory into bytes; None if nothing says that."""
        return None if self.model is None else self.model.memory(placement, self.num_microbatches)

    def layout(self, placement: Placement) -> Layout | None:
        """The layers of every stage; None without a model."""
        return None if self.model is None else self.model.layout(placement)

    def derived_from(self, placement: Placement) -> int | None:
        """The number of stages of the table, if the costs for a placement are derived from it; else None."""
        given = None if self.stages is None else self.stages.num_stages
        return None if given == placement.num_stages else given


_KEYS = {"memory_limit", "objective", "seed"} | {field.name for field in fields(PageRequest)} - {"lengths", "options"}


def read_problem(body: str | bytes) -> PageRequest:
    """Read a request.

    Raises:
        ConfigError: a value is missing, of the wrong type or out of bounds; the message names it and what is allowed.
        PlanError: the table of costs has another shape.
    """
    given = read_object(body)
    unknown = sorted(set(given) - _KEYS)
    if unknown:
        raise ConfigError(f"the request has {', '.join(map(quoted, unknown[:3]))}; known are {', '.join(sorted(_KEYS))}")
    num_ranks = whole("num_ranks", given.get("num_ranks"), 1, MAX_RANKS)
    name = given.get("schedule")
    if name != AUTO:
        schedule_info(shown(name))
    num_microbatches = whole("num_microbatches", given.get("num_microbatches"), 1, MAX_MICROBATCHES)
    num_slices = _slices(given, num_microbatches)
    times = _times(given.get("times", {}), "times", SCALARS)
    model = None if given.get("model") is None else read_model(given["model"], times)
    request = PageRequest(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        schedule=str(name),
        num_chunks=_chunks(given),
        num_slices=(num_slices,),
        max_pending_backward=_pending(given, num_ranks),
        memory_limits=_memories(given),
        options=SearchOptions(
            memory_limit=None if given.get("memory_limit") is None else _memory(given["memory_limit"]),
            objective=choice(Objective, "objective", given.get("objective", DEFAULT_OBJECTIVE.value)),
            seed=whole("seed", given.get("seed"), 0, 2**31) if "seed" in given else 0,
        ),
        effort=None if given.get("effort", "drawn") == "drawn" else choice(Effort, "effort", given["effort"]),
        times=times,
        step=_times(given.get("step", {}), "step", STEP_TIMES),
        all_to_all=number("all_to_all", given.get("all_to_all", 0), 1.0),
        stages=None if given.get("stages") is None else read_stages(given["stages"]),
        model=model,
        lengths=LengthsAndLinks() if model is None or num_slices == 1 else LengthsAndLinks(**model.shares),
    )
    return with_defaults(request)


def read_object(body: str | bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ConfigError if it is anything else."""
    given = parse_json(body, "the request", ConfigError)
    if not isinstance(given, dict):
        raise ConfigError(f"the request is {type(given).__name__}; it must be an object")
    return given


def check_size(num_ranks: int, num_microbatches: int) -> None:
    """Raise ConfigError if a pipeline from a file is too large."""
    whole("num_ranks", num_ranks, 1, MAX_RANKS)
    whole("num_microbatches", num_microbatches, 1, MAX_MICROBATCHES)


def _memory(value: object) -> float:
    return number("memory_limit", value, MAX_MEMORY)


def _memories(given: Mapping[str, Any]) -> tuple[float, ...]:
    values = given.get("memory_limits", [])
    if not isinstance(values, list) or len(values) > MAX_POINTS:
        raise ConfigError(f"memory_limits must be a list of at most {MAX_POINTS} numbers, got {quoted(values)}")
    return tuple(sorted(set(map(_memory, values))))


def _chunks(given: Mapping[str, Any]) -> int | None:
    return None if given.get("num_chunks") is None else whole("num_chunks", given.get("num_chunks"), 1, MAX_STAGES_PER_RANK)


def _slices(given: Mapping[str, Any], num_microbatches: int) -> int:
    count = 1 if given.get("num_slices") is None else whole("num_slices", given["num_slices"], 1, MAX_SLICES)
    if count * num_microbatches > MAX_MICROBATCHES:
        raise ConfigError(
            f"{num_microbatches} microbatches of {count} slices are {count * num_microbatches} slices; the playground takes at "
            f"most {MAX_MICROBATCHES}: give fewer slices"
        )
    return count


def _pending(given: Mapping[str, Any], num_ranks: int) -> int | None:
    value = given.get("max_pending_backward")
    if value is None or value == "":
        return None
    pending = parse_max_pending_backward("max pending backward", shown(value)[:20], num_ranks)
    if pending > 2 * MAX_MICROBATCHES:
        raise ConfigError(f"max pending backward is {quoted(value)}; the playground takes at most {2 * MAX_MICROBATCHES}")
    return pending


def _times(given: object, field: str, names: Sequence[str]) -> Mapping[str, float]:
    if not isinstance(given, dict) or not set(given) <= set(names):
        raise ConfigError(f"{field} must be an object with some of {', '.join(names)}, got {quoted(given)}")
    return {
        name: number(name, value, MAX_MEMORY if name == "activation_after_backward" else MAX_TIME_MS)
        for name, value in given.items()
    }


def read_stages(given: object) -> CostModel:
    """Read the costs per stage of a request or a file.

    Raises:
        ConfigError: a value is not a number, or out of bounds.
        PlanError: a list is missing.
    """
    if not isinstance(given, dict):
        raise PlanError(f"costs must be an object with one list per kind, got {quoted(given)}")
    most = MAX_RANKS * MAX_STAGES_PER_RANK
    for name, values in given.items():
        if isinstance(values, list) and name != "slices":
            if len(values) > most:
                raise ConfigError(f"costs: {name[:40]!r} has {len(values)} values; the playground takes at most {most}")
            for stage, value in enumerate(values):
                number(f"{name[:40]} of stage {stage}", value, MAX_TIME_MS)
    costs = CostModel.from_json(given)
    number("comm_ms", costs.comm_ms, MAX_TIME_MS)
    return costs
