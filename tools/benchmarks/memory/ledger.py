"""What a rank holds, iteration by iteration, against what its plan says it would.

The second iteration of a job is measured op by op, and from it follows what the plan says of all others: the peak of activations
(`profiling.memory` says what counts as one). Then every iteration is watched. On CUDA the numbers are the allocator's, and it
also says what it took from the device and cannot give back; on the CPU they are the live tensors that passes have made since the
watching began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.plan.simulate import peak_memory
from megatron.zerobubble.profiling.memory import MemoryMeter
from megatron.zerobubble.profiling.profile import combine, unit_bytes
from megatron.zerobubble.profiling.profiler import Profiler

with quiet_third_parties():
    from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule

PEAK_TOLERANCE = 0.05
"""Of the peak of activations against the plan's."""
GROWTH_TOLERANCE = 0.01
"""Of a peak from iteration to iteration; what is held between iterations may not grow at all."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of one rank after an iteration."""

    allocated: int
    """In tensors; on the CPU in those that passes made and left behind."""
    reserved: int | None
    """What the allocator took from the device; None on the CPU."""
    inactive_split: int | None
    """Unused parts of blocks of which other parts are in use: what cannot be given back. None on the CPU."""
    activations: int
    """Most activations that were held after any op of the iteration."""
    workspace: int
    """What the most demanding op needed on top of what is held around it, tensors in flight included (`profiling.memory`)."""


@dataclass(frozen=True, kw_only=True)
class RankLedger:
    """One rank over all iterations that were watched."""

    predicted: int
    """Peak of activations in bytes, by the plan."""
    warmup: int
    """Iterations after which nothing may grow."""
    held: tuple[Held, ...]

    @property
    def measured(self) -> int:
        """Peak of activations of any iteration."""
        return max(each.activations for each in self.held)

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to it; None where it is 0."""
        return self.measured / self.predicted - 1.0 if self.predicted else None

    @property
    def fragmentation(self) -> int | None:
        """Reserved and in no tensor, at the end."""
        last = self.held[-1]
        return None if last.reserved is None else last.reserved - last.allocated

    def growth(self, what: Callable[[Held], int | None]) -> int | None:
        """Bytes from the end of the warm-up to the most after it; None where there is no such number."""
        numbers = [number for each in self.held[self.warmup - 1 :] if (number := what(each)) is not None]
        return max(numbers) - numbers[0] if numbers else None

    def complaints(self) -> list[str]:
        """What is not as it should be."""
        before = self.held[self.warmup - 1]
        some_activations = GROWTH_TOLERANCE * before.activations
        some_of_all = GROWTH_TOLERANCE * (before.activations + before.workspace)  # which bounds what was alive at any moment
        growths = {
            "allocated memory": (self.growth(lambda each: each.allocated), 0.0),
            "reserved memory": (self.growth(lambda each: each.reserved), 0.0),
            "the peak of activations": (self.growth(lambda each: each.activations), some_activations),
            "workspace": (self.growth(lambda each: each.workspace), some_of_all),
        }
        said = [
            f"{name} grew by {grown} bytes after iteration {self.warmup}"
            for name, (grown, tolerated) in growths.items()
            if grown is not None and grown > tolerated
        ]
        if self.error is None:
            said.append(f"activations took {self.measured} bytes, and the plan says that there are none: was anything measured?")
        elif abs(self.error) > PEAK_TOLERANCE:
            said.append(f"activations took {self.measured} bytes, and the plan says {self.predicted}: {self.error:+.1%}")
        return said


def watch(
    schedule: PipelineSchedule, iterate: Callable[[], Any], *, num_microbatches: int, num_iterations: int, warmup: int
) -> RankLedger:
    """Train and keep the ledger. Every rank of the world must call it, and each be in one pipeline.

    Args:
        schedule: one of ours, whose iterations `iterate` runs.
        iterate: one iteration: forward, backward, and the optimizer's step.
        num_microbatches: of an iteration.
        num_iterations: that are watched, after two that are not.
        warmup: how many of these may still grow; at least 1.

    Raises:
        ConfigError: there is nothing left to watch after the warm-up.
    """
    if not 1 <= warmup < num_iterations:
        raise ConfigError(
            f"{num_iterations} iterations with a warm-up of {warmup}: give a warm-up of 1 or more, and more iterations"
        )
    iterate()  # the optimizer's state, tables and masks that stay
    predicted = _predict(schedule, iterate, num_microbatches)
    meter, held = MemoryMeter(schedule.device), []
    schedule.hooks.profiler = meter
    for _ in range(num_iterations):
        iterate()
        held.append(_look(meter, schedule.device))
    schedule.hooks.profiler = None
    return RankLedger(predicted=predicted, warmup=warmup, held=tuple(held))


def _predict(schedule: PipelineSchedule, iterate: Callable[[], Any], num_microbatches: int) -> int:
    """This rank's peak of activations by the plan, from one iteration that is measured."""
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
    # The host's books: exact for what has been issued, and reading them waits for nothing.
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return Held(
        allocated=stats.get("allocated_bytes.all.current", meter.held_bytes),
        reserved=stats.get("reserved_bytes.all.current"),
        inactive_split=stats.get("inactive_split_bytes.all.current"),
        activations=meter.peak_bytes,
        workspace=meter.workspace_bytes,
    )


def table(ranks: Sequence[RankLedger]) -> str:
    """Markdown, in MiB."""
    lines = [
        "| rank | activations, *predicted* | activations, *measured* | error | workspace | allocated | growth | reserved "
        "| growth | reserved - allocated | inactive split |",
        "|" + "---|" * 11,
    ]
    for rank, ledger in enumerate(ranks):
        last = ledger.held[-1]
        columns = [
            *(_mib(ledger.predicted), _mib(ledger.measured), "-" if ledger.error is None else f"{ledger.error:+.1%}"),
            _mib(max(each.workspace for each in ledger.held)),
            *(_mib(last.allocated), _mib(ledger.growth(lambda each: each.allocated))),
            *(_mib(last.reserved), _mib(ledger.growth(lambda each: each.reserved))),
            *(_mib(ledger.fragmentation), _mib(last.inactive_split)),
        ]
        lines.append(f"| {rank} | " + " | ".join(columns) + " |")
    return "\n".join(lines)


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:.2f}"
