"""Whether a program can deadlock on GPUs, for any sharing of hardware queues by their streams, and any synchronization.

On a GPU the ops and transfers of a rank are kernels on several streams. What keeps one from starting is more than what the plan
says. With CUDA_DEVICE_MAX_CONNECTIONS=1, or when two of many streams happen to share one of the hardware queues, a kernel that
waits for another rank holds up everything issued after it. A device-wide synchronization inside an op (a timer, a module that
CUDA loads at its first use, memory that is freed, a communicator that is created) makes the host wait for everything issued
before it, receives that were posted early included.

All of these only make a kernel wait for kernels issued *earlier on its own rank*. The strictest case is that each kernel waits
for all of them: a rank does one thing at a time, in the order in which it issues them, and a transfer is over when both of its
ranks have come to it. A program that ends there ends in every case between that and independent streams (docs/adr/0003).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from megatron.zerobubble.plan.communication import Message, Program
from megatron.zerobubble.plan.ir import Launch, launch_text


class Stuck(NamedTuple):
    """A rank that waits for ever, and for what."""

    rank: int
    step: int
    """The launch that it cannot reach or end."""
    waits_for: Message | None
    """The transfer that its peer never comes to; None at the fence."""

    def text(self, launch: Launch) -> str:
        """In words; `launch` has the ops at `step`."""
        what = launch_text(launch)
        if self.waits_for is None:
            return f"rank {self.rank} before {what} for the outcome of the last step"
        source, target = self.waits_for.source, self.waits_for.target
        verb, peer = ("sending", f"to rank {target}") if self.rank == source else ("receiving", f"from rank {source}")
        return f"rank {self.rank} at {what}, {verb} {self.waits_for.where}, {peer}"


def stuck_ranks(program: Program) -> tuple[Stuck, ...]:
    """The ranks that wait for ever if each does one thing at a time; empty if the program ends. Linear in the number of ops.

    A receive is over when its rank's peer sends, and a send when it is received. What an op takes has been received before it on
    its own rank, so that ops themselves never wait. A rank passes its fence when the next rank has: the outcome of the last
    optimizer step comes from there.
    """
    num_ranks = program.plan.num_ranks
    actions = [_actions(program, rank) for rank in range(num_ranks)]
    at, passed = [0] * num_ranks, set[int]()
    waiting: dict[Hashable, int] = {}  # what ranks wait at, a transfer or the fence of a rank -> the rank that waits there
    ready = list(range(num_ranks))
    while ready:
        rank = ready.pop()
        while at[rank] < len(actions[rank]):
            _, message = actions[rank][at[rank]]
            if message is None:
                if rank + 1 < num_ranks and rank + 1 not in passed:
                    waiting[rank] = rank
                    break
                passed.add(rank)
                if rank - 1 in waiting:
                    ready.append(waiting.pop(rank - 1))  # it looks again, and passes
            elif message in waiting:
                peer = waiting.pop(message)
                at[peer] += 1
                ready.append(peer)
            else:
                waiting[message] = rank
                break
            at[rank] += 1
    return tuple(Stuck(rank, *row[step]) for rank, (row, step) in enumerate(zip(actions, at, strict=True)) if step < len(row))


def _actions(program: Program, rank: int) -> list[tuple[int, Message | None]]:
    """Per thing that the rank may wait at: the step, and the transfer, or None for the fence."""
    actions: list[tuple[int, Message | None]] = []
    for index, step in enumerate(program.steps[rank]):
        if index == program.fence[rank] and any(program.fence):
            actions.append((index, None))
        actions += [(index, message) for message in step.post]
        actions += [(index, message) for message in step.send]
    return actions
