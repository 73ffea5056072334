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
from megatron.zerobubble.plan.ir import Op


class Stuck(NamedTuple):
    """A rank that waits for ever, and for what."""

    rank: int
    step: int
    """The op that it cannot reach or end."""
    waits_for: Message | None
    """The transfer that its peer never comes to; None at the fence."""

    def text(self, op: Op) -> str:
        """In words; `op` is the op at `step`."""
        if self.waits_for is None:
            return f"rank {self.rank} before {op} for the outcome of the last step"
        payload, stage, microbatch, source, target = self.waits_for
        verb, peer = ("sending", f"to rank {target}") if self.rank == source else ("receiving", f"from rank {source}")
        return f"rank {self.rank} at {op}, {verb} the {payload.value} for stage {stage}, microbatch {microbatch}, {peer}"


def stuck_ranks(program: Program) -> tuple[Stuck, ...]:
    """The ranks that wait for ever if each does one thing at a time; empty if the program ends. Linear in the number of ops."""
    return _Sequential(program).run()


class _Sequential:
    """A program whose ranks do one thing at a time: post a receive, pass the fence, run an op, send.

    A receive is over when its rank's peer sends, and a send when it is received. What an op takes has been received before it on
    its own rank, so that ops themselves never wait. A rank passes its fence when the next rank has: the outcome of the last
    optimizer step comes from there.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._actions = [self._actions_of(rank) for rank in range(program.plan.num_ranks)]
        self._at = [0] * program.plan.num_ranks
        self._passed: set[int] = set()
        self._arrived: dict[Hashable, int] = {}
        """What ranks wait at -> the rank that waits there."""

    def run(self) -> tuple[Stuck, ...]:
        ready = list(range(len(self._at)))
        while ready:
            ready += self._advance(ready.pop())
        stuck = [rank for rank, at in enumerate(self._at) if at < len(self._actions[rank])]
        return tuple(Stuck(rank, *self._actions[rank][self._at[rank]]) for rank in stuck)

    def _actions_of(self, rank: int) -> list[tuple[int, Message | None]]:
        """Per thing that the rank may wait at: the step, and the transfer, or None for the fence."""
        actions: list[tuple[int, Message | None]] = []
        fence = self._program.fence[rank]
        for index, step in enumerate(self._program.steps[rank]):
            if index == fence and any(self._program.fence):
                actions.append((index, None))
            actions += [(index, message) for message in step.post]
            if step.send is not None:
                actions.append((index, step.send))
        return actions

    def _advance(self, rank: int) -> list[int]:
        """Run one rank until it waits; returns the ranks that can go on because of it."""
        released: list[int] = []
        while self._at[rank] < len(self._actions[rank]):
            _, message = self._actions[rank][self._at[rank]]
            if message is None:
                if rank + 1 < len(self._at) and rank + 1 not in self._passed:
                    self._arrived[rank] = rank
                    return released
                self._passed.add(rank)
                released += self._leave(rank - 1)
            elif message in self._arrived:
                released += self._leave(message)
            else:
                self._arrived[message] = rank
                return released
            self._at[rank] += 1
        return released

    def _leave(self, where: Hashable) -> list[int]:
        """The rank that waits there goes on."""
        if where not in self._arrived:
            return []
        rank = self._arrived.pop(where)
        if where != rank:  # at the fence it looks again, and passes
            self._at[rank] += 1
        return [rank]
