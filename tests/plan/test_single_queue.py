"""With CUDA_DEVICE_MAX_CONNECTIONS=1 every kernel of a rank goes through one hardware queue: a kernel that must wait keeps all
kernels issued after it waiting too, transfers included. The four rules of `plan/communication.py` do not cover that case. That
the plans which are run have no cycle in it is a property of theirs, and of posting receives one op ahead. It is tested here.

The model: each rank issues posts, ops and sends in program order. A kernel *starts* when the kernel issued before it on its rank
has started (the queue), the last op has finished if it depends on the compute stream, and the transfer before it on its link
has finished. A transfer finishes when both of its ends have started.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.zerobubble.plan.communication import Program, place_communication
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.passes import forward_only
from megatron.zerobubble.plan.registry import build_plan, known_schedules

Event = tuple[Any, str]


def _finishes(program: Program, *, single_queue: bool) -> bool:
    """Whether every kernel of the program gets to run."""
    needs = _dependencies(program, single_queue=single_queue)
    blocked = {event: len(before) for event, before in needs.items()}
    after: dict[Event, list[Event]] = defaultdict(list)
    for event, before in needs.items():
        for earlier in before:
            after[earlier].append(event)
    ready = [event for event, count in blocked.items() if count == 0]
    done = 0
    while ready:
        done += 1
        for event in after[ready.pop()]:
            blocked[event] -= 1
            if blocked[event] == 0:
                ready.append(event)
    return done == len(needs)


def _dependencies(program: Program, *, single_queue: bool) -> dict[Event, list[Event]]:
    needs: dict[Event, list[Event]] = defaultdict(list)
    for rank, steps in enumerate(program.steps):
        issued: Any = None
        computed: list[Event] = []
        on_link: dict[tuple[int, int], Event] = {}

        def issue(kernel: Any, before: list[Event]) -> None:
            nonlocal issued
            needs[kernel, "start"] += before
            if single_queue and issued is not None:
                needs[kernel, "start"].append((issued, "start"))
            issued = kernel

        def transfer(verb: str, peer_verb: str, message: Any) -> None:
            link = message.source, message.target
            issue((verb, message), [*computed, *([on_link[link]] if link in on_link else [])])  # noqa: B023 - used at once
            needs[(verb, message), "finish"] += [((verb, message), "start"), ((peer_verb, message), "start")]
            on_link[link] = (verb, message), "finish"  # noqa: B023

        for index, step in enumerate(steps):
            for message in step.post:
                transfer("receive", "send", message)
            waits = [(("receive", step.take), "finish")] if step.take else []
            waits += [(("send", message), "finish") for message in step.retire]
            op = "op", rank, index
            issue(op, [*computed, *waits])
            needs[op, "finish"].append((op, "start"))
            computed = [(op, "finish")]
            if step.send:
                transfer("send", "receive", step.send)
    return needs


def _plans(name: str) -> Iterator[Plan]:
    for num_ranks in range(2, 7):
        for num_microbatches in (*range(1, 2 * num_ranks + 2), 3 * num_ranks):
            options: list[dict[str, int]] = [{}]
            if name == "zb":
                options = [{"max_pending_backward": k} for k in (1, num_ranks - 1, num_ranks, num_ranks + 1, 2 * num_ranks)]
            for option in options:
                plan = build_plan(
                    name, num_ranks=num_ranks, num_microbatches=num_microbatches, **{k: max(1, v) for k, v in option.items()}
                )
                yield plan
                yield forward_only(plan)


@pytest.mark.parametrize("name", [info.name for info in known_schedules()])
def test_what_is_run_passes_a_single_hardware_queue(name: str) -> None:
    for plan in _plans(name):
        assert _finishes(place_communication(plan), single_queue=True), plan.to_text()


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_posting_receives_two_ops_ahead_would_not(name: str) -> None:
    """So the model can fail, and `lookahead` is not free to choose. With independent queues any lookahead is safe."""
    programs = [place_communication(plan, lookahead=2) for plan in _plans(name)]
    assert not all(_finishes(program, single_queue=True) for program in programs)
    assert all(_finishes(program, single_queue=False) for program in programs)
