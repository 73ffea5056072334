"""A model of what keeps kernels on GPUs from starting: hardware queues that streams share, and device-wide synchronization.

It stands for GPUs with NCCL, and knows nothing of time: it builds the graph of what waits for what and looks for a cycle. Each
rank issues receives, ops and sends in program order. A kernel *starts* when the kernel issued before it in its hardware queue has
started, the last op has finished (streams of transfers wait for the compute stream), and the previous transfer on its link has
finished. A transfer finishes when both of its ends have started. An op with a device-wide synchronization in it cannot finish
before everything that its rank has issued before. How a driver maps streams to queues it cannot show; tests try several ways.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

from megatron.zerobubble.plan.communication import Message, Program

COMPUTE = "compute"
"""The name of the stream of the ops; the stream of a link is named (source, target)."""

Queues = Callable[[int, Any], Any]
"""(rank, stream) -> its hardware queue."""

_Event = tuple[Any, str]


def independent(rank: int, stream: Any) -> Any:
    """A hardware queue for every stream."""
    return stream


def single(rank: int, stream: Any) -> Any:
    """CUDA_DEVICE_MAX_CONNECTIONS=1."""
    return 0


def finishes(program: Program, *, queues: Queues = independent, syncs: Collection[tuple[int, int]] = ()) -> bool:
    """Whether every kernel of the program eventually runs.

    Args:
        program: what the ranks issue.
        queues: the hardware queues.
        syncs: the ops, as (rank, step), in which the rank waits for everything that it has issued.
    """
    needs = _dependencies(program, queues, frozenset(syncs))
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


def ops_of(program: Program) -> Iterator[tuple[int, int]]:
    """All ops, as (rank, step)."""
    return ((rank, step) for rank, row in enumerate(program.steps) for step in range(len(row)))


def first_ops(program: Program) -> set[tuple[int, int]]:
    """The first op of each kind on each stage, where CUDA loads modules and libraries allocate their workspaces."""
    firsts: dict[Any, tuple[int, int]] = {}
    for rank, index in ops_of(program):
        op = program.steps[rank][index].op
        firsts.setdefault((op.stage, op.kind), (rank, index))
    return set(firsts.values())


def _dependencies(program: Program, queues: Queues, syncs: frozenset[tuple[int, int]]) -> dict[_Event, list[_Event]]:
    needs: dict[_Event, list[_Event]] = defaultdict(list)
    for rank, steps in enumerate(program.steps):
        issued: dict[Any, Any] = {}
        computed: list[_Event] = []
        on_link: dict[Any, _Event] = {}

        def issue(kernel: Any, stream: Any, before: list[_Event]) -> None:
            queue = queues(rank, stream)  # noqa: B023 - used at once, as below
            needs[kernel, "start"] += before
            if queue in issued:  # noqa: B023
                needs[kernel, "start"].append((issued[queue], "start"))  # noqa: B023
            issued[queue] = kernel  # noqa: B023

        def transfer(verb: str, peer_verb: str, message: Message) -> None:
            link = message.source, message.target
            issue((verb, message), link, [*computed, *([on_link[link]] if link in on_link else [])])  # noqa: B023
            needs[(verb, message), "finish"] += [((verb, message), "start"), ((peer_verb, message), "start")]
            on_link[link] = (verb, message), "finish"  # noqa: B023

        for index, step in enumerate(steps):
            for message in step.post:
                transfer("receive", "send", message)
            waits = [(("receive", step.take), "finish")] if step.take else []
            waits += [(("send", message), "finish") for message in step.retire]
            op = "op", rank, index
            issue(op, COMPUTE, [*computed, *waits])
            needs[op, "finish"].append((op, "start"))
            if (rank, index) in syncs:
                needs[op, "finish"] += on_link.values()  # the last of each link: those before it have finished by then
            computed = [(op, "finish")]
            if step.send:
                transfer("send", "receive", step.send)
    return needs
