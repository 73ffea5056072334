"""Checks for every trace of recorded iterations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from megatron.zerobubble.plan.communication import place_communication
from megatron.zerobubble.plan.ir import Plan

CLOCK_US = 0.01
"""Times are floats: adjacent events may overlap by this number of microseconds."""


def check_trace(events: Sequence[dict[str, Any]], plan: Plan, *, iterations: Sequence[int]) -> None:
    """Check that every op of the plan occurs once per iteration, on its rank and in the plan's order, every transfer once on
    either rank, and that the events of every thread nest."""
    complete = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in complete)
    steps = place_communication(plan).steps
    for iteration in iterations:
        here = [event for event in complete if event["args"].get("iteration") == iteration]
        for rank, row in enumerate(plan.ops):
            ops = [event for event in here if event["pid"] == rank and event["cat"] in ("F", "B", "W", "BW")]
            assert [event["name"] for event in ops] == [str(op) for op in row]
            assert [(event["cat"], event["args"]["stage"], event["args"]["microbatch"]) for event in ops] == [
                (op.kind.value, op.stage, op.microbatch) for op in row
            ]
            assert sorted(event["ts"] for event in ops) == [event["ts"] for event in ops]
            for activity, messages in (
                ("send", [step.send for step in steps[rank] if step.send]),
                ("recv", [step.take for step in steps[rank] if step.take]),
                ("wait", [step.take for step in steps[rank] if step.take]),
            ):
                found = [event["args"] for event in here if event["pid"] == rank and event["cat"] == activity]
                assert Counter(
                    (args["payload"], args["stage"], args["microbatch"], args["from_rank"], args["to_rank"]) for args in found
                ) == Counter((each.payload.value, *each[1:]) for each in messages)
    _check_nesting(complete)


def _check_nesting(complete: Sequence[dict[str, Any]]) -> None:
    threads = defaultdict(list)
    for event in complete:
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    for thread, spans in threads.items():
        ends: list[float] = []
        for start, end, name in sorted(spans, key=lambda span: (span[0], -span[1])):
            while ends and ends[-1] <= start + CLOCK_US:
                ends.pop()
            assert not ends or end <= ends[-1] + CLOCK_US, f"{name} of thread {thread} runs over what it began in"
            ends.append(end)
