"""Whole iterations on the fake NCCL: work whose values prove what reached where, and whose memory is reused at once."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.plan.communication import Message, Program
from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.runtime.executor import BatchedExecutor, Executor
from megatron.zerobubble.runtime.p2p import P2PLinks, ProcessGroupLinks
from megatron.zerobubble.runtime.recording import Recorder
from tests.runtime.support import LabelWork
from tests.support.fake_nccl.device import Device
from tests.support.fake_nccl.ranks import run_ranks
from tests.support.plans import receive_buffers

CPU = torch.device("cpu")
SIZE = 3
"""Elements of every tensor, so that every block can be handed out for every purpose."""


class Hazard(enum.Enum):
    """What happens on the host inside of an op."""

    NONE = "none"
    SYNC_ONCE = "a device-wide synchronization in one op of each rank"
    SYNC_FIRST = "a device-wide synchronization in the first op of each kind and stage: a module that CUDA loads lazily"
    SYNC_ALWAYS = "a device-wide synchronization in every op: timers at level 2"
    COMMUNICATOR = "a communicator, of ranks that run the same ops, made in one op"


class ArenaWork(LabelWork):
    """Labels in memory that is handed out again as soon as it is free.

    Every op takes its input and gives its output as kernels on the current stream do, and uses a temporary tensor of the same
    size in between, which lies where something has just been freed.

    Args:
        program: what is run.
        device: of this rank.
        in_op: called with the index of an op, inside of it.
    """

    def __init__(self, program: Program, device: Device, in_op: Callable[[int, Op], None]) -> None:
        super().__init__(program)
        self.fake, self._in_op = device, in_op
        self.stalls: list[str] = []
        """Sends that were retired before they were over; not those waited for after the last op."""

    def forward(self, op: Op, activation: Tensor | None, last: bool) -> Tensor | None:
        return self._compute(op, activation, super().forward, last)

    def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor | None:
        return self._compute(op, gradient, super().backward, last)

    def weight_gradient(self, op: Op, last: bool) -> None:
        self._scratch(op)
        super().weight_gradient(op, last)
        self._in_op(len(self.ops) - 1, op)

    def buffer(self, message: Message) -> Tensor:
        buffer = self.fake.arena.empty(SIZE)
        self._count(buffer)
        return buffer

    def _compute(self, op: Op, given: Tensor | None, run: Callable[..., Tensor | None], last: bool) -> Tensor | None:
        self._scratch(op)
        if given is not None:
            self.fake.compute(str(op), reads=[given])
        result = run(op, given, last)
        self._in_op(len(self.ops) - 1, op)
        if result is None:
            return None
        output = self.fake.arena.empty(SIZE)
        self.fake.compute(str(op), writes=[output])
        return output.copy_(result)

    def _scratch(self, op: Op) -> None:
        self.stalls = [*self.fake.stalls]
        scratch = self.fake.arena.empty(SIZE)
        self.fake.compute(f"{op} (a temporary tensor)", writes=[scratch])
        scratch.fill_(-1.0)


def injector(hazard: Hazard, rank: int, program: Program, seed: int, device: Device) -> Callable[[int, Op], None]:
    """What happens inside of the ops of a rank."""
    drawn = random.Random(f"{seed} {rank}")
    chosen = drawn.randrange(len(program.plan.ops[rank]))
    seen: set[tuple[int, OpKind]] = set()
    group = _group_of_replicas(rank, program.plan.num_ranks) if hazard is Hazard.COMMUNICATOR else None

    def in_op(index: int, op: Op) -> None:
        is_first = (op.stage, op.kind) not in seen
        seen.add((op.stage, op.kind))
        once = index == chosen and hazard is Hazard.SYNC_ONCE
        if once or hazard is Hazard.SYNC_ALWAYS or (hazard is Hazard.SYNC_FIRST and is_first):
            device.synchronize(f"a device-wide synchronization in {op}")
        if index == chosen and group is not None:
            dist.all_reduce(torch.zeros(1), group=group)

    return in_op


def _group_of_replicas(rank: int, num_ranks: int) -> dist.ProcessGroup:
    """The ranks of all pipelines that run the same ops. Nothing has been done in it."""
    groups = [dist.new_group(list(range(first, dist.get_world_size(), num_ranks))) for first in range(num_ranks)]
    return groups[rank]


@dataclass
class Setup:
    """How an iteration is run, and what is changed in it. The fields are called on each rank.

    Rules are broken by these, so that what runs without changes is our code as it is.
    """

    links: Callable[[P2PLinks], P2PLinks] = lambda links: links
    executor: Callable[..., Executor] = Executor
    work: Callable[..., ArenaWork] = ArenaWork
    recorder: Callable[[], Recorder | None] = lambda: None
    hazard: Hazard = Hazard.NONE
    iterations: int = 1
    replicas: int = 1
    """Pipelines that run the same program."""
    rewinds: bool = False
    """Whether the steps before the program's fence are run, discarded, and run again."""
    batched: bool = False
    """Whether all transfers between two ops are over before the next one."""


@dataclass
class RankResult:
    stalls: list[str]
    """Sends that were retired before they were over."""
    num_reused: int
    """Times that memory was handed out again."""
    recorder: Recorder | None


def iterate(rank: int, program: Program, seed: int, setup: Setup) -> RankResult:
    """Iterations of a program on this rank."""
    device = Device.current()
    num_ranks = program.plan.num_ranks
    replica, rank = divmod(rank, num_ranks)
    pipeline = range(replica * num_ranks, (replica + 1) * num_ranks)
    links = ProcessGroupLinks(program.plan.placement, pipeline=pipeline, rank=rank, device=CPU, batched=setup.batched)
    executor_of = BatchedExecutor if setup.batched else setup.executor
    work = setup.work(program, device, injector(setup.hazard, rank, program, seed, device))
    recorder = setup.recorder()
    for _ in range(setup.iterations):
        if setup.rewinds:
            first = executor_of(program, rank, setup.links(links), work, recorder)
            first.begin(program.fence[rank])
            first.abandon(program.unread(rank))
        work.ops.clear()
        device.stalls.clear()
        executor = executor_of(program, rank, setup.links(links), work, recorder)
        executor.run()
        assert work.ops == list(program.plan.ops[rank])
        assert not executor._receiving
        assert not executor._sending
        assert not executor._local
        assert setup.rewinds or work.most_buffers_alive == receive_buffers(program)[rank]
        assert work.buffers_alive == 0
    device.synchronize()
    links.close()
    return RankResult(work.stalls, device.arena.num_reused, recorder)


def run_program(program: Program, seed: int, setup: Setup | None = None, **options: Any) -> Sequence[RankResult]:
    """An iteration on all ranks; raises what went wrong.

    Args:
        program: what is run.
        seed: of all delays.
        setup: how.
        options: of `run_ranks`.
    """
    setup = setup or Setup()
    return run_ranks(program.plan.num_ranks * setup.replicas, iterate, program, seed, setup, seed=seed, **options)
