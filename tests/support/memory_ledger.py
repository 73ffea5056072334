"""Memory of a rank over many training steps of a real model, iteration by iteration, measured vs. planned.

The second iteration of a job is measured op by op; from it follows the plan's prediction for all others: the peak activation
memory (as defined in `profiling.activation_memory`). Then every iteration is measured. On CUDA the values are those of the
caching allocator; on the CPU they count the live tensors that passes have
allocated since the measurement began.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.plan.simulate import peak_memory
from megatron.zerobubble.profiling.activation_memory import MemoryMeter
from megatron.zerobubble.profiling.profile import combine, unit_bytes
from megatron.zerobubble.profiling.profiler import Profiler
from tests.support.gpt import Case

PEAK_TOLERANCE = 0.05
"""Relative error tolerated in the peak activation memory vs. the plan's."""
GROWTH_TOLERANCE = 0.01
"""Relative growth tolerated in a peak; memory held between iterations may not grow at all."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Memory of one rank after an iteration, in bytes."""

    allocated: int
    """Memory in tensors; on the CPU in those that passes have allocated and not freed."""
    reserved: int | None
    """Memory that the allocator has reserved on the device; None on the CPU."""
    activations: int
    """Peak activation memory, as measured after each op of the iteration."""
    workspace: int
    """Peak memory of an op above what is held around it, including tensors in flight (`profiling.activation_memory`)."""


@dataclass(frozen=True, kw_only=True)
class RankLedger:
    """Memory of one rank over all measured iterations."""

    predicted: int
    """Peak activation memory predicted by the plan, in bytes."""
    warmup: int
    """Iterations after which nothing may grow."""
    held: tuple[Held, ...]

    @property
    def measured(self) -> int:
        """Peak activation memory over all iterations, in bytes."""
        return max(each.activations for each in self.held)

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None if the prediction is 0."""
        return self.measured / self.predicted - 1.0 if self.predicted else None

    def growth(self, what: Callable[[Held], int | None]) -> int | None:
        """Growth in bytes from the end of the warm-up to the maximum after it; None if `what` was not measured."""
        numbers = [number for each in self.held[self.warmup - 1 :] if (number := what(each)) is not None]
        return max(numbers) - numbers[0] if numbers else None

    def complaints(self) -> list[str]:
        """One message per check that failed."""
        before = self.held[self.warmup - 1]
        some_activations = GROWTH_TOLERANCE * before.activations
        some_of_all = GROWTH_TOLERANCE * (before.activations + before.workspace)  # which bounds what was alive at any moment
        growths = {
            "allocated memory": (self.growth(lambda each: each.allocated), 0.0),
            "reserved memory": (self.growth(lambda each: each.reserved), 0.0),
            "the peak of activations": (self.growth(lambda each: each.activations), some_activations),
            "workspace": (self.growth(lambda each: each.workspace), some_of_all),
        }
        messages = [
            f"{name} grew by {grown} bytes after iteration {self.warmup}"
            for name, (grown, tolerated) in growths.items()
            if grown is not None and grown > tolerated
        ]
        if self.error is None:
            messages.append(f"activations took {self.measured} bytes, and the plan predicts none: was anything measured?")
        elif abs(self.error) > PEAK_TOLERANCE:
            messages.append(f"activations took {self.measured} bytes, and the plan predicts {self.predicted}: {self.error:+.1%}")
        return messages


def train_watched(rank: int, case: Case, num_iterations: int, warmup: int) -> RankLedger:
    """Train the case."""
    trainer = case.trainer()
    steps = itertools.count()

    def iterate() -> None:
        trainer.zero_gradients()
        trainer.forward_backward(next(steps))
        with trainer.host.on_host():
            trainer.optimizer.step()

    found = watch(trainer.schedule, iterate, num_microbatches=case.num_microbatches, num_iterations=num_iterations, warmup=warmup)
    trainer.close()
    return found


def watch(
    schedule: PipelineSchedule, iterate: Callable[[], Any], *, num_microbatches: int, num_iterations: int, warmup: int
) -> RankLedger:
    """Measure the memory of every iteration, after two that are not measured; `warmup` of them may still grow."""
    iterate()  # allocates optimizer state, and tables and masks that stay
    predicted = _predict(schedule, iterate, num_microbatches)
    meter, held = MemoryMeter(schedule.device), []
    schedule.hooks.profiler = meter
    for _ in range(num_iterations):
        iterate()
        held.append(_look(meter, schedule.device))
    schedule.hooks.profiler = None
    return RankLedger(predicted=predicted, warmup=warmup, held=tuple(held))


def _predict(schedule: PipelineSchedule, iterate: Callable[[], Any], num_microbatches: int) -> int:
    """This rank's peak activation memory as predicted by the plan, from one measured iteration."""
    profiler = Profiler(schedule.device)
    schedule.hooks.profiler = profiler
    iterate()
    schedule.hooks.profiler = None
    profiles: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(profiles, profiler.profile())
    plan, placement = schedule.plan(num_microbatches), schedule.spec.placement
    unit = unit_bytes(profiles, placement) * min(plan.num_ranks, num_microbatches)
    return round(peak_memory(plan, combine(profiles, placement))[dist.get_rank()] * unit)


def _look(meter: MemoryMeter, device: torch.device) -> Held:
    # Counted on the host: exact for what has been issued, and read without synchronizing.
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return Held(
        allocated=stats.get("allocated_bytes.all.current", meter.held_bytes),
        reserved=stats.get("reserved_bytes.all.current"),
        activations=meter.peak_bytes,
        workspace=meter.workspace_bytes,
    )
