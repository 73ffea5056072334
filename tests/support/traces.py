"""Checks for every trace of recorded iterations."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

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
                ("send", [message for step in steps[rank] for message in step.send]),
                ("recv", [message for step in steps[rank] for message in step.take]),
                ("wait", [message for step in steps[rank] for message in step.take]),
            ):
                found = [event["args"] for event in here if event["pid"] == rank and event["cat"] == activity]
                assert Counter(
                    (args["payload"], args["stage"], args["microbatch"], args["from_rank"], args["to_rank"]) for args in found
                ) == Counter((each.payload.value, *each[1:5]) for each in messages)
    _check_nesting(complete)


def check_trace_files(
    folder: Path,
    schedule: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    iterations: Sequence[int],
    others: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """The files of a trace, and `others`: each iteration's plan ran, op by op, and the parts of the report add up.

    Returns:
        The iterations of the report.
    """
    pictures, plans = ([f"{kind}-{number}" for number in iterations] for kind in ("timeline", "plan"))
    wanted = {
        "trace.json",
        "report.json",
        *(f"{name}.svg" for name in pictures),
        *(f"{name}.json" for name in plans),
        *others,
    }
    assert {path.name for path in folder.iterdir()} == wanted
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    for number, name in zip(iterations, plans, strict=True):
        plan = Plan.from_json((folder / f"{name}.json").read_text())
        assert (plan.schedule, plan.num_ranks, plan.num_microbatches) == (schedule, num_ranks, num_microbatches)
        check_trace(events, plan, iterations=[number])
    optimizer = [(event["pid"], event["args"]["iteration"]) for event in events if event.get("cat") == "optimizer"]
    assert sorted(optimizer) == sorted((rank, number) for rank in range(num_ranks) for number in iterations)
    for name in pictures:
        assert ElementTree.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")
    entries: list[dict[str, Any]] = json.loads((folder / "report.json").read_text())["iterations"]
    assert [entry["iteration"] for entry in entries] == list(iterations)
    for entry in entries:
        for rank in entry["ranks"]:
            time = rank["measured"]
            causes = [time[f"idle_{cause}_ms"] for cause in ("for_peer", "for_link", "for_validation", "other")]
            assert sum(causes) == pytest.approx(time["idle_ms"])
            assert min(causes) >= -0.001, "no cause is counted twice"
            busy = time["forward_ms"] + time["backward_ms"] + time["wgrad_ms"]
            parts = time["starts_after_ms"], busy, time["idle_ms"], time["ends_before_ms"]
            assert sum(parts) == pytest.approx(entry["measured"]["makespan_ms"])
    return entries


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
