"""Open a file that was dropped onto the page. Its kind follows from its content, never from its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.messages import parse_json, quoted
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import FORMATS as PLAN_FORMATS
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.partition.layer_costs import FORMAT as LAYERS_FORMAT
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.planner import Result
from megatron.zerobubble.plan.validate import validate
from megatron.zerobubble.playground.drawing import draw_plan, draw_recorded
from megatron.zerobubble.playground.limits import MAX_MICROBATCHES, MAX_OPS, MAX_RANKS, whole
from megatron.zerobubble.playground.problem import check_size, read_stages
from megatron.zerobubble.playground.recorded import read_trace
from megatron.zerobubble.profiling.report import FORMAT as REPORT_FORMAT
from megatron.zerobubble.profiling.report import last_iteration

_TAKEN = (
    f"give a plan ({' or '.join(PLAN_FORMATS)}), a report.json ({REPORT_FORMAT}), a bench.json, a layers.json "
    f"({LAYERS_FORMAT}), a trace.json, or costs with forward_ms, backward_ms, wgrad_ms, activation and activation_after_backward"
)
Opened = dict[str, Any]

_MOST_ITERATIONS = 8
"""Iterations of a trace that are shown, the last ones."""


def open_file(body: str | bytes) -> Opened:
    """Read a file for the page: ``kind`` is plan, costs, model or trace.

    Raises:
        UserError: the format is unknown, or the content malformed.
    """
    given = _read(body)
    if given.get("format") in PLAN_FORMATS:
        return {"kind": "plan", "drawings": [draw_plan(plan_result(body, given))]}
    if given.get("format") == LAYERS_FORMAT:
        model = Model.from_json(body)
        return {"kind": "model", "layers": model.to_json(), "num_layers": model.num_layers}
    if given.get("format") == REPORT_FORMAT:
        last = last_iteration(given, "the report")
        iteration = whole("the report's iteration", last.get("iteration"), 1, 2**40)
        return _open_measured(last, f"iteration {iteration} of a report")
    if "traceEvents" in given:
        return {"kind": "trace", "drawings": [draw_recorded(timeline) for timeline in read_trace(given)[-_MOST_ITERATIONS:]]}
    if "num_microbatches" in given and isinstance(given.get("costs"), dict):
        return _open_measured(given, "a comparison")
    if "forward_ms" in given or isinstance(given.get("costs"), dict):
        return {"kind": "costs", "costs": read_stages(given.get("costs", given)).to_json(), "from": "a file with costs"}
    raise PlanError(
        f"the file has format {quoted(given.get('format'))} and keys {', '.join(map(quoted, list(given)[:4]))}; {_TAKEN}"
    )


def _read(body: str | bytes) -> dict[str, Any]:
    """Parse a file. Raises ConfigError if it is not a JSON object."""
    try:
        given = parse_json(body, "the file", ConfigError)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_TAKEN}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"the file is JSON, but a {type(given).__name__} and not an object; {_TAKEN}")
    return given


def plan_result(text: str | bytes, body: Mapping[str, Any]) -> Result:
    """A plan from a file, simulated with the costs in it or uniform ones, with the lower bound at its own peak memory."""
    plan = Plan.from_json(text)
    check_size(plan.num_ranks, plan.num_microbatches)
    if sum(map(len, plan.ops)) > MAX_OPS:
        raise PlanError(f"the plan has {sum(map(len, plan.ops))} ops; the playground takes at most {MAX_OPS}")
    validate(plan)
    given = body.get("costs")
    costs = CostModel.uniform(plan.placement) if given is None else read_stages(given)
    return Result.of(plan, costs)


def _open_measured(given: Mapping[str, Any], source: str) -> Opened:
    """Costs with the sizes of the job that they were measured in: an iteration of a report.json, or a bench.json."""
    costs = read_stages(given.get("costs", {}))
    most = {"num_ranks": MAX_RANKS, "num_microbatches": MAX_MICROBATCHES}
    sizes = {name: whole(f"the file's {name}", given.get(name), 1, largest) for name, largest in most.items()}
    if costs.num_stages % sizes["num_ranks"]:
        raise PlanError(f"the file has costs of {costs.num_stages} stages for {sizes['num_ranks']} ranks")
    schedule = given.get("schedule")
    return {
        "kind": "costs",
        "costs": costs.to_json(),
        **sizes,
        "schedule": schedule[:40] if isinstance(schedule, str) else None,
        "from": source,
    }
