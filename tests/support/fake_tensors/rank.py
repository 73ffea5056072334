"""Runs an iteration of one rank of a job on FakeTensors, through the reference trainer's set-up and the real schedule."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties
from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.profiling.activation_memory import MemoryMeter
from tests.support.fake_tensors.allocator import Event
from tests.support.fake_tensors.device import DEVICE, Counts, FakeDevice

with quiet_third_parties():
    from megatron.zerobubble.job.launch import Launch
    from megatron.zerobubble.mcore import agreement, zb_schedules
    from megatron.zerobubble.runtime.watch import Watch
    from megatron.zerobubble.training import initialize, setup
    from megatron.zerobubble.training.arguments import settings_from_argv
    from megatron.zerobubble.training.data.samples import chunk_reads
    from megatron.zerobubble.training.models.gpt import forward_step_provider, model_provider
    from megatron.zerobubble.training.step import Trainer

__all__ = ["Pass", "Ran", "run_rank"]


@dataclass(frozen=True)
class Pass:
    """One op of the plan."""

    op: Op
    counts: Counts
    held_bytes: int
    """Live after it, above those before the iteration, without tensors in flight."""
    pending_bytes: int
    """Of what the store holds for W after it; a storage counts once."""


@dataclass(frozen=True)
class Ran:
    """The first iteration of a rank: its first microbatch also allocates tables and masks that stay."""

    passes: list[Pass]
    around: Counts
    """Before, between and after the passes."""
    step: Counts
    """The optimizer step."""
    left_bytes: int
    """Live after the iteration's passes, above those before."""
    state_bytes: int
    """Live before the iteration: weights, gradients and main weights."""
    peak_bytes: int
    """Held after an op."""
    most_bytes: int
    """At any moment, above those before the iteration."""
    memory: dict[int, tuple[float, float]]
    """Stage -> bytes of a microbatch after F, and after B, as the profiler hands them to the planner."""
    events: list[Event]
    """Allocations and frees, from the set-up to the end of the last iteration."""


class _Meter(MemoryMeter):
    """The package's meter, which also takes the counts of every op."""

    def __init__(self, device: FakeDevice, pending_bytes: Callable[[], int]) -> None:
        super().__init__(DEVICE)
        self._device, self._pending_bytes = device, pending_bytes
        self._around = Counts()
        self._of_op = Counts()
        self.passes: list[Pass] = []

    def start(self, op: Op) -> None:
        self._around, self._device.counts = self._device.counts, Counts()

    def end(self, op: Op) -> None:
        self._of_op, self._device.counts = self._device.counts, self._around

    def settled(self, op: Op, in_transit: Callable[[], int]) -> None:
        super().settled(op, in_transit)
        self.passes.append(Pass(op, self._of_op, self._before - self._begin, self._pending_bytes()))


def run_rank(argv: list[str], *, rank: int, world_size: int, iterations: int = 1) -> Ran:
    """Iterations of one rank, with their optimizer steps.

    Args:
        argv: flags of `pretrain_gpt.py`.
        rank: which rank of the job.
        world_size: ranks of the job; the others do not exist, and what comes from them has no values anyway.
        iterations: how many run; only `events` has more than the first.
    """
    zb_schedules.check_same_program = agreement._raise_first = lambda *_, **__: None  # there is nobody to compare with
    settings = settings_from_argv(argv, world_size=world_size, rank=1)
    launch = Launch(rank=rank, local_rank=0, ranks_on_host=1, world_size=world_size, has_threads_set=True)
    moe = settings.moe
    selected = moe.moe_router_topk / moe.num_experts if moe.num_experts else 0.0
    routed = settings.data.micro_batch_size * settings.model.seq_length * moe.moe_router_topk if moe.num_experts else 0
    with FakeDevice(routed=routed, selected=selected).entered() as device:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        job: Any = initialize.Job(launch=launch, attempt=None, host=HostDevice(enabled=False), store=None, watch=Watch(DEVICE))  # type: ignore[arg-type]
        state = setup.build_training_state(
            settings,
            job,
            vocab_size=settings.tokenizer.vocab_size or 0,
            model_provider=model_provider,
            forward_step_provider=forward_step_provider,
        )
        trainer = Trainer(state)
        data = [_microbatches(settings) if chunk_reads(chunk, settings) else None for chunk in state.chunks]
        store = state.engine.schedule._runner._store
        meter = _Meter(device, lambda: store.pending_bytes)
        ran = _measured(device, state, trainer, meter, data)
        state.schedule.hooks.profiler = None
        for _ in range(iterations - 1):
            trainer.iterate(data if len(data) > 1 else data[0])
        return ran


def _measured(device: FakeDevice, state: Any, trainer: Any, meter: _Meter, data: list[Any]) -> Ran:
    """One iteration, with the passes apart from the step."""
    seen: dict[str, Any] = {}
    step = trainer._step

    def counted_step() -> None:
        seen["around"], device.counts = device.counts, Counts()
        seen["left"] = device.live_bytes - begin
        step()

    trainer._step, state.schedule.hooks.profiler = counted_step, meter
    device.counts, begin = Counts(), device.live_bytes
    trainer.iterate(data if len(data) > 1 else data[0])
    trainer._step = step
    return Ran(
        passes=meter.passes,
        around=seen["around"],
        step=device.counts,
        left_bytes=seen["left"],
        state_bytes=begin,
        peak_bytes=meter.peak_bytes,
        most_bytes=meter.most_bytes,
        memory={stage: (each.activation, each.after_backward) for stage, each in meter.typical().items()},
        events=device.events,
    )


def _microbatches(settings: Any) -> Iterator[dict[str, torch.Tensor]]:
    """As the data loader yields them, on the host."""
    shape = settings.data.micro_batch_size, settings.model.seq_length
    numbers = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "labels", "position_ids")}
    return itertools.repeat(numbers | {"loss_mask": torch.ones(shape)})
