"""The tasks that the page asks for, as generators of events.

An event is an object with ``event``: ``started`` (the request is valid), ``best`` and ``point`` (intermediate results of a
search), ``times`` (at its end, the iteration times with either kind of optimizer step, each of a plan made for it), ``done`` (the
answer of any other task), ``error``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.messages import one_line, quoted
from megatron.zerobubble.plan.anytime import anytime, pareto
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.planner import AUTO, Result
from megatron.zerobubble.plan.render.plan_summary import title
from megatron.zerobubble.plan.simulate import Simulation
from megatron.zerobubble.playground.deviations import compare
from megatron.zerobubble.playground.drawing import draw_plan
from megatron.zerobubble.playground.exports import Export, commands, export
from megatron.zerobubble.playground.ladder import for_other_objective, seconds_by_effort, share_of_plan
from megatron.zerobubble.playground.length_fields import as_it_came
from megatron.zerobubble.playground.limits import MAX_POINTS, choice
from megatron.zerobubble.playground.opened_files import open_file, plan_result
from megatron.zerobubble.playground.problem import read_object, read_problem
from megatron.zerobubble.playground.recorded import read_trace

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
    yield {"event": "started", "seconds": seconds_by_effort(problem)}
    shown, share = None, share_of_plan(problem)
    own: dict[tuple[str, Placement], Simulation | None] = {}  # the plans of a schedule differ in order and assignment only
    for rung in anytime(problem):
        event: Event = {"event": "best", "spent": share * rung.spent, "verdict": ""}
        if problem.schedule == AUTO and rung.spent == 1.0:
            event["verdict"] = rung.result.verdict(problem.objective)
        if rung.result is not shown:
            plan = rung.result.simulation.plan
            key, costs = (plan.schedule, plan.placement), rung.result.simulation.costs
            if key not in own:
                own[key] = as_it_came(plan, costs, problem.max_pending_backward)
            drawing = draw_plan(rung.result, own[key])
            derived = problem.derived_from(plan.placement)
            event["drawing"] = drawing | {"derived_from": derived, "memory_limit": problem.memory_limit}
            event["drawing"]["memory"] = problem.memory(plan.placement)
            event["commands"] = commands(plan, problem.objective, costs, problem.layout(plan.placement))
        shown = rung.result
        yield event
    assert shown is not None
    other = for_other_objective(problem, shown).simulation
    times = {
        objective.value: objective.of(shown.simulation if objective is problem.objective else other) for objective in Objective
    }
    yield {"event": "times", "spent": 1.0, "times_ms": times}


def _pareto(body: str | bytes) -> Iterator[Event]:
    problem = read_problem(body)
    if not problem.memory_limits:
        raise ConfigError(f"memory_limits is empty; give 1 to {MAX_POINTS} numbers")
    yield {"event": "started"}
    asked = replace(problem, schedule=AUTO, num_chunks=None, max_pending_backward=None)
    for limit, result, _ in pareto(asked, problem.memory_limits):
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


def _curve(body: str | bytes) -> Iterator[Event]:
    """Speed-ups of hand-written orders over a baseline, for several numbers of microbatches."""
    given = read_object(body)
    counts, requests = given.get("counts"), given.get("problems")
    for name, values in (("counts", counts), ("problems", requests)):
        if not isinstance(values, list) or len(values) > MAX_POINTS:
            raise ConfigError(f"{name} must be a list of at most {MAX_POINTS}, got {quoted(values)}")
    yield {"event": "started"}
    for count in counts or ():
        base, *times = (_drawn_ms(request, count) for request in (given.get("baseline"), *(requests or ())))
        ratios = [base / time if base and time else None for time in times]
        yield {"event": "point", "num_microbatches": count, "speed_ups": ratios}


def _drawn_ms(request: object, num_microbatches: object) -> float | None:
    """The iteration time of a request without a search, for another number of microbatches; None if there is no such plan."""
    if not isinstance(request, dict):
        raise ConfigError(f"a problem must be an object, got {quoted(request)}")
    with suppress(UserError):
        problem = read_problem(json.dumps(request | {"num_microbatches": num_microbatches, "effort": "drawn"}))
        *_, last = anytime(problem)
        return problem.objective.of(last.result.simulation)
    return None


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
    result = plan_result(*_plan_of(read_object(body)))
    simulation = result.simulation
    yield {"event": "done", "drawing": draw_plan(result, as_it_came(simulation.plan, simulation.costs))}


def _export(body: str | bytes) -> Iterator[Event]:
    given = read_object(body)
    form = choice(Export, "form", given.get("form"))
    yield {"event": "done", **export(plan_result(*_plan_of(given)).simulation, form)._asdict()}


def _compare(body: str | bytes) -> Iterator[Event]:
    """Compare a trace with a plan."""
    given = read_object(body)
    trace = given.get("trace")
    if not isinstance(trace, dict):
        raise ConfigError("the request needs 'trace', the content of a trace.json")
    timelines = read_trace(trace)
    chosen = next((each for each in timelines if each.iteration == given.get("iteration")), timelines[-1])
    found = compare(plan_result(*_plan_of(given)).simulation, chosen)
    largest = [asdict(each) | {"op": str(each.op), "lost_ms": each.lost_ms} for each in found.largest]
    yield {"event": "done", "iteration": chosen.iteration, "ranks": [asdict(rank) for rank in found.ranks], "largest": largest}


def _plan_of(given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    text = given.get("plan")
    if not isinstance(text, str):
        raise ConfigError("the request needs 'plan', the text of a plan file")
    return text, read_object(text)


TASKS: dict[str, Callable[[str | bytes], Iterator[Event]]] = {
    "search": _search,
    "pareto": _pareto,
    "curve": _curve,
    "figures": _figures,
    "open": _open,
    "show": _show,
    "export": _export,
    "compare": _compare,
}
"""Name of the endpoint -> task."""


def lines(name: str, body: str | bytes) -> Iterator[str]:
    """The events of a task, each as a line of JSON."""
    return (json.dumps(event, separators=(",", ":")) + "\n" for event in run_task(name, body))
