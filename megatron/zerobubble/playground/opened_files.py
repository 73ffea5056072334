"""Open a file that was dropped onto the page. Its kind follows from its content, never from its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.messages import parse_json, quoted
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.ir import FORMATS as PLAN_FORMATS
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.partition.layer_costs import FORMAT as LAYERS_FORMAT
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.planner import Result
from megatron.zerobubble.plan.validate import validate
from megatron.zerobubble.playground.drawing import Drawing, draw_plan, draw_recorded
from megatron.zerobubble.playground.file_verdicts import contenders, placement_named, verdict
from megatron.zerobubble.playground.length_fields import as_it_came, attention_share
from megatron.zerobubble.playground.limits import MAX_MICROBATCHES, MAX_OPS, MAX_RANKS, MAX_TIME_MS, number, whole
from megatron.zerobubble.playground.models.measured import memory_of_report
from megatron.zerobubble.playground.problem import check_size, read_stages
from megatron.zerobubble.playground.recorded import read_trace
from megatron.zerobubble.profiling.report import FORMAT as REPORT_FORMAT
from megatron.zerobubble.profiling.report import last_iteration, report

_TAKEN = (
    f"give a plan ({' or '.join(PLAN_FORMATS)}), a report.json ({REPORT_FORMAT}), a bench.json, a layers.json "
    f"({LAYERS_FORMAT}), a trace.json, links with latency_ms, or costs with forward_ms, backward_ms, "
    "wgrad_ms, activation and activation_after_backward"
)
Opened = dict[str, Any]

_MOST_ITERATIONS = 8
"""Iterations of a trace that are shown, the last ones."""


def open_file(body: str | bytes) -> Opened:
    """Read a file for the page: ``kind`` is plan, costs, model, links or trace; ``verdict`` is one sentence about it.

    Raises:
        UserError: the format is unknown, or the content malformed.
    """
    given = _read(body)
    if given.get("format") in PLAN_FORMATS:
        return _open_plan(body, given)
    if given.get("format") == LAYERS_FORMAT:
        model = Model.from_json(body)
        return {"kind": "model", "layers": model.to_json(), "verdict": f"{model.num_layers} layers"}
    if given.get("format") == REPORT_FORMAT:
        last = last_iteration(given, "the report")
        iteration = whole("the report's iteration", last.get("iteration"), 1, 2**40)
        opened = _open_measured(
            last, f"iteration {iteration} of a report", run_ms=_makespan(last, "measured"), plan_ms=_makespan(last, "predicted")
        )
        return opened | {"memory": memory_of_report(given.get("memory"), last, opened["num_ranks"], opened["num_microbatches"])}
    if "traceEvents" in given:
        timelines = read_trace(given)
        seen = report(timelines[-1])
        plan, simulation = timelines[-1].plan, seen.simulation
        return {
            "kind": "trace",
            "drawings": [draw_recorded(timeline) for timeline in timelines[-_MOST_ITERATIONS:]],
            "verdict": verdict(
                *(simulation.costs, plan.placement, plan.num_ranks, plan.num_microbatches),
                run_ms=seen.makespan_ms,
                plan_ms=simulation.makespan_ms,
            ),
        }
    if "latency_ms" in given:
        links = Links.from_json(given)
        check_size(links.num_ranks, 1)
        return {"kind": "links", "links": links.to_json(), "num_ranks": links.num_ranks, "verdict": ""}
    if "num_microbatches" in given and isinstance(given.get("costs"), dict):
        opened = _open_measured(given, "a comparison")
        return opened | {"verdict": "; ".join(filter(None, [contenders(given.get("contenders")), opened["verdict"]]))}
    if "forward_ms" in given or isinstance(given.get("costs"), dict):
        costs = read_stages(given.get("costs", given))
        return {
            "kind": "costs",
            "costs": costs.to_json(),
            "attention_share": attention_share(costs),
            "from": "a file with costs",
            "verdict": "",
        }
    raise PlanError(
        f"the file has format {quoted(given.get('format'))} and keys {', '.join(map(quoted, list(given)[:4]))}; {_TAKEN}"
    )


def _draw(result: Result) -> Drawing:
    return draw_plan(result, as_it_came(result.simulation.plan, result.simulation.costs))


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


def _open_plan(body: str | bytes, given: Mapping[str, Any]) -> Opened:
    result = plan_result(body, given)
    plan, simulation = result.simulation.plan, result.simulation
    sentence = verdict(simulation.costs, plan.placement, plan.num_ranks, plan.num_microbatches, plan_ms=simulation.makespan_ms)
    return {"kind": "plan", "drawings": [_draw(result)], "verdict": sentence}


def _makespan(given: Mapping[str, Any], part: str) -> float | None:
    """The makespan in a part of a report's iteration; None if it has none."""
    values = given.get(part)
    value = values.get("makespan_ms") if isinstance(values, dict) else None
    return None if value is None else number(f"the {part} makespan_ms", value, MAX_TIME_MS)


def _open_measured(given: Mapping[str, Any], source: str, *, run_ms: float | None = None, plan_ms: float | None = None) -> Opened:
    """Costs with the sizes of the job that they were measured in: an iteration of a report.json, or a bench.json."""
    costs = read_stages(given.get("costs", {}))
    most = {"num_ranks": MAX_RANKS, "num_microbatches": MAX_MICROBATCHES}
    sizes = {name: whole(f"the file's {name}", given.get(name), 1, largest) for name, largest in most.items()}
    if costs.num_stages % sizes["num_ranks"]:
        raise PlanError(f"the file has costs of {costs.num_stages} stages for {sizes['num_ranks']} ranks")
    schedule = given.get("schedule")
    placement = placement_named(schedule, costs.num_stages, sizes["num_ranks"])
    return {
        "kind": "costs",
        "verdict": verdict(costs, placement, *sizes.values(), run_ms=run_ms, plan_ms=plan_ms),
        "costs": costs.to_json(),
        "attention_share": attention_share(costs),
        **sizes,
        "schedule": schedule[:40] if isinstance(schedule, str) else None,
        "from": source,
    }
