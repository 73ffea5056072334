"""Read a Chrome trace of a run (`--zero-bubble-trace`) back into timelines.

Only complete events with the category of an op or an activity are read; all other events are ignored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.communication import Message, Payload
from megatron.zerobubble.plan.costs.cost_model import Activations
from megatron.zerobubble.plan.ir import Op, OpKind, Placement, Plan
from megatron.zerobubble.plan.simulate import TimedOp, seconds_of_pairs
from megatron.zerobubble.plan.timeline import Activity, RankTimeline, Span, Timeline
from megatron.zerobubble.plan.validate import validate
from megatron.zerobubble.playground.limits import MAX_OPS, MAX_RANKS, MAX_TIME_MS, number, whole
from megatron.zerobubble.playground.problem import check_size

_KINDS = frozenset(kind.value for kind in OpKind)
_ACTIVITIES = frozenset(activity.value for activity in Activity)
_MOST_EVENTS = 40 * MAX_OPS
_LATEST_US = 1e16
"""Three centuries; beyond it a float cannot distinguish microseconds."""


def read_trace(body: Mapping[str, Any]) -> list[Timeline]:
    """Read the iterations of a trace, in ascending order.

    Raises:
        PlanError: the trace has no passes, or they are not those of a whole iteration.
        ConfigError: it has more ranks or microbatches than the playground accepts.
    """
    events = body.get("traceEvents")
    if not isinstance(events, list) or len(events) > _MOST_EVENTS:
        raise PlanError(f"the trace's 'traceEvents' must be a list of at most {_MOST_EVENTS} events")
    complete = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    ops = [event for event in complete if _category(event) in _KINDS]
    if not ops:
        raise PlanError("the trace has no passes: give the trace.json of a run with --zero-bubble-trace")
    spans = [event for event in complete if _category(event) in _ACTIVITIES]
    by_iteration: dict[int, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for which, chosen in enumerate((ops, spans)):
        for event in chosen:
            iteration = whole("the trace's iteration", _args(event).get("iteration"), 0, 2**40)
            by_iteration[iteration][which].append(event)
    about = _iterations(complete)
    return [
        _timeline(iteration, about.get(iteration, {}), *by_iteration[iteration])
        for iteration in sorted(by_iteration)
        if by_iteration[iteration][0]
    ]


def _category(event: Mapping[str, Any]) -> str:
    category = event.get("cat")
    return category if isinstance(category, str) else ""


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _iterations(complete: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """What the trace says about whole iterations, by iteration."""
    found = {}
    for event in complete:
        words = str(event.get("name")).split()
        if _category(event) == "iteration" and len(words) == 2 and words[1].isdecimal():
            found[int(words[1][:12])] = _args(event)
    return found


def _activations(about: Mapping[str, Any], plan: Plan) -> Activations | None:
    """The measured activation memory per stage; None in a trace without it."""
    if "activation" not in about:
        return None
    lists = {}
    for name in ("activation", "activation_after_backward"):
        values = about.get(name)
        if not isinstance(values, list) or len(values) != plan.num_stages:
            raise PlanError(
                f"the trace's {name!r} must be a list with one number per stage, {plan.num_stages}, got {quoted(values)}"
            )
        lists[name] = tuple(number(f"{name} of stage {stage}", value, MAX_TIME_MS) for stage, value in enumerate(values))
    return lists


def _timeline(
    iteration: int,
    about: Mapping[str, Any],
    ops: Sequence[Mapping[str, Any]],
    spans: Sequence[Mapping[str, Any]],
) -> Timeline:
    rows: dict[int, list[TimedOp]] = defaultdict(list)
    for event in ops:
        op = Op.parse(str(event.get("name"))[:40])
        rows[_rank(event)].append(TimedOp(op, *_times(event)))
    for row in rows.values():
        row.sort(key=lambda timed: (timed.start_ms, timed.end_ms))
    schedule = about.get("schedule")
    plan = _plan(iteration, schedule[:40] if isinstance(schedule, str) else "recorded", rows)
    around: dict[int, list[Span]] = defaultdict(list)
    for event in spans:
        around[_rank(event)].append(_span(event))
    return Timeline(
        iteration=iteration,
        plan=plan,
        activations=_activations(about, plan),
        ranks=tuple(
            RankTimeline(ops=tuple(rows[rank]), spans=tuple(sorted(around[rank], key=lambda span: span.end_ms)))
            for rank in range(plan.num_ranks)
        ),
    )


def _plan(iteration: int, schedule: str, rows: Mapping[int, Sequence[TimedOp]]) -> Plan:
    """The recorded ops as a validated plan; this rejects a trace with missing passes."""
    stage_to_rank: dict[int, int] = {}
    for rank, row in rows.items():
        for timed in row:
            if stage_to_rank.setdefault(timed.op.stage, rank) != rank:
                raise PlanError(
                    f"iteration {iteration}: stage {timed.op.stage} ran on ranks {stage_to_rank[timed.op.stage]} and {rank}"
                )
    if set(stage_to_rank) != set(range(len(stage_to_rank))) or set(rows) != set(range(len(rows))):
        raise PlanError(
            f"iteration {iteration}: the trace has passes of stages {sorted(stage_to_rank)[:10]} on ranks {sorted(rows)[:10]}; "
            "every stage and rank from 0 on is needed"
        )
    num_microbatches = 1 + max(timed.op.microbatch for row in rows.values() for timed in row)
    check_size(len(rows), num_microbatches)
    placement = Placement(tuple(stage_to_rank[stage] for stage in range(len(stage_to_rank))))
    pairs = frozenset(row[place - 1].op for row in rows.values() for place in seconds_of_pairs(row))
    plan = Plan.of(schedule, placement, num_microbatches, [[timed.op for timed in rows[rank]] for rank in range(len(rows))])
    plan = replace(plan, pairs=pairs)
    validate(plan)
    return plan


def _span(event: Mapping[str, Any]) -> Span:
    start, end = _times(event)
    args = _args(event)
    message = None
    if args.get("payload") in (Payload.ACTIVATION.value, Payload.GRADIENT.value):
        numbers = (
            whole(f"the trace's {name}", args.get(name), 0, 2**40) for name in ("stage", "microbatch", "from_rank", "to_rank")
        )
        message = Message(Payload(args["payload"]), *numbers)
    return Span(activity=Activity(event["cat"]), start_ms=start, end_ms=end, message=message)


def _rank(event: Mapping[str, Any]) -> int:
    return whole("the trace's pid of a pass, its rank,", event.get("pid"), 0, MAX_RANKS - 1)


def _times(event: Mapping[str, Any]) -> tuple[float, float]:
    """Start and end of an event, in milliseconds."""
    start = number("the trace's 'ts', in microseconds,", event.get("ts"), _LATEST_US, -_LATEST_US)
    return start / 1e3, (start + number("the trace's 'dur', in microseconds,", event.get("dur"), _LATEST_US)) / 1e3
