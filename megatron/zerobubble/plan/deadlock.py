"""Whether a program can deadlock on a device with a single hardware queue.

With CUDA_DEVICE_MAX_CONNECTIONS=1 every kernel of a rank goes through one hardware queue: a kernel that must wait blocks all
kernels issued after it, transfers included. The four rules of `communication` do not cover that case. Whether there are cycles
depends on the plan, and on posting receives one op ahead (docs/adr/0003).

The model: each rank issues receives, ops and sends in program order. A kernel *starts* when the kernel issued before it on its
rank has started (the queue), the last op has finished if it depends on the compute stream, and the previous transfer on its link
has finished. A transfer finishes when both of its ends have started. Linear in the number of ops.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from megatron.zerobubble.plan.communication import Program

_Event = tuple[Any, str]


def finishes(program: Program, *, single_queue: bool) -> bool:
    """Whether every kernel of the program eventually runs, with one hardware queue per rank or with independent ones."""
    needs = _dependencies(program, single_queue=single_queue)
    blocked = {event: len(before) for event, before in needs.items()}
    after: dict[_Event, list[_Event]] = defaultdict(list)
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


def _dependencies(program: Program, *, single_queue: bool) -> dict[_Event, list[_Event]]:
    needs: dict[_Event, list[_Event]] = defaultdict(list)
    for rank, steps in enumerate(program.steps):
        issued: Any = None
        computed: list[_Event] = []
        on_link: dict[tuple[int, int], _Event] = {}

        def issue(kernel: Any, before: list[_Event]) -> None:
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
