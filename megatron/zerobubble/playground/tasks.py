"""The tasks that the page asks for, as generators of events.

An event is an object with ``event``: ``best`` and ``point`` (intermediate results of a search), ``done`` (the answer of any other
task), ``error``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.messages import one_line
from megatron.zerobubble.plan.anytime import anytime, pareto
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.planner import AUTO, Result
from megatron.zerobubble.plan.render.plan_summary import title
from megatron.zerobubble.playground.drawing import draw_plan
from megatron.zerobubble.playground.exports import Export, commands, export
from megatron.zerobubble.playground.limits import MAX_POINTS, choice
from megatron.zerobubble.playground.opened_files import open_file, plan_result
from megatron.zerobubble.playground.problem import read_object, read_problem

Event = dict[str, Any]


def run_task(name: str, body: str | bytes) -> Iterator[Event]:
    """Yield the events of a task. A user error is an ``error`` event."""
    try:
        yield from TASKS[name](body)
    except UserError as error:
        yield {"event": "error", "message": str(error) if "\n" in str(error) else one_line(str(error))}
    except MemoryError:
        yield {"event": "error", "message": "the file is too large for the playground"}
    except RecursionError:
        yield {"event": "error", "message": "the file is nested too deeply for the playground"}


def _search(body: str | bytes) -> Iterator[Event]:
    problem = read_problem(body)
    shown = None
    for rung in anytime(problem):
        event: Event = {"event": "best", "spent": rung.spent, "verdict": ""}
        if problem.schedule == AUTO and rung.spent == 1.0:
            event["verdict"] = rung.result.verdict(problem.objective)
        if rung.result is not shown:
            plan, costs = rung.result.simulation.plan, rung.result.simulation.costs
            derived = problem.derived_from(plan.placement)
            event["drawing"] = draw_plan(rung.result) | {"derived_from": derived}
            event["drawing"]["memory"] = problem.memory(plan.placement)
            event["commands"] = commands(plan, problem.objective, costs, problem.layout(plan.placement))
        shown = rung.result
        yield event


def _pareto(body: str | bytes) -> Iterator[Event]:
    problem = read_problem(body)
    if not problem.memory_limits:
        raise ConfigError(f"memory_limits is empty; give 1 to {MAX_POINTS} numbers")
    asked = replace(problem, schedule=AUTO, num_chunks=None, max_pending_backward=None)
    for limit, result in pareto(asked, problem.memory_limits):
        event: Event = {"event": "point", "memory_limit": limit}
        if isinstance(result, Result):
            plan, costs, metrics = result.simulation.plan, result.simulation.costs, result.metrics()
            event |= {
                "schedule": plan.schedule,
                "title": result.titled(title(plan.schedule)),
                "num_chunks": plan.placement.num_chunks,
            }
            event |= {"metrics": metrics, "derived_from": problem.derived_from(plan.placement)}
            event["memory"] = problem.memory(plan.placement)
            event["commands"] = commands(plan, problem.objective, costs, problem.layout(plan.placement))
            event["plan"] = plan.to_json(costs=costs.to_json(), metrics=metrics)
        yield event


def _figures(body: str | bytes) -> Iterator[Event]:
    """What the times of the form are for a model, and its costs per stage."""
    problem = read_problem(body)
    if problem.model is None:
        raise ConfigError("the request needs 'model'")
    costs = problem.model.costs_of(Placement.v(problem.num_ranks))
    yield {"event": "done", "figures": problem.model.figures(problem.num_ranks), "stages": costs.to_json()}


def _open(body: str | bytes) -> Iterator[Event]:
    yield {"event": "done", **open_file(body)}


def _show(body: str | bytes) -> Iterator[Event]:
    """The drawing of a plan sent by the page."""
    yield {"event": "done", "drawing": draw_plan(plan_result(*_plan_of(read_object(body))))}


def _export(body: str | bytes) -> Iterator[Event]:
    given = read_object(body)
    form = choice(Export, "form", given.get("form"))
    yield {"event": "done", **export(plan_result(*_plan_of(given)).simulation, form)._asdict()}


def _plan_of(given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    text = given.get("plan")
    if not isinstance(text, str):
        raise ConfigError("the request needs 'plan', the text of a plan file")
    return text, read_object(text)


TASKS: dict[str, Callable[[str | bytes], Iterator[Event]]] = {
    "search": _search,
    "pareto": _pareto,
    "figures": _figures,
    "open": _open,
    "show": _show,
    "export": _export,
}
"""Name of the endpoint -> task."""


def lines(name: str, body: str | bytes) -> Iterator[str]:
    """The events of a task, each as a line of JSON."""
    return (json.dumps(event, separators=(",", ":")) + "\n" for event in run_task(name, body))
