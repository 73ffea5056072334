"""The first log line of a run, and the table at its end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.zerobubble.profiling.report import PipelineReport, RankMemory
from megatron.zerobubble.training.checkpoint.directory import iteration_directory
from megatron.zerobubble.training.config.settings import Settings

__all__ = ["Totals", "description", "schedule_name", "summary_lines"]


@dataclass
class Totals:
    """What was logged of a run so far, for its summary. The first iteration warms up, and does not count."""

    last_loss: float | None = None
    """Of the last logged iteration."""
    last_validation_loss: float | None = None
    """Of the last evaluation."""
    _speeds: list[tuple[int, float]] = field(default_factory=list)

    def add(self, *, tokens: int, seconds: float, loss: float) -> None:
        """Add an iteration."""
        self._speeds.append((tokens, seconds))
        self.last_loss = loss

    @property
    def num_timed(self) -> int:
        """Number of iterations after the first."""
        return max(0, len(self._speeds) - 1)

    @property
    def seconds(self) -> float:
        """Mean seconds of an iteration; defined after the second."""
        return sum(seconds for _, seconds in self._speeds[1:]) / self.num_timed

    @property
    def tokens_per_s(self) -> float:
        """Mean tokens per second of all ranks together, without padding; defined after the second iteration."""
        return sum(tokens for tokens, _ in self._speeds[1:]) / (self.seconds * self.num_timed)


def description(settings: Settings, *, on_cpu: bool) -> str:
    """The first log line: schedule, parallel sizes, batch, precision, device."""
    context = settings.parallel.context_parallel_size
    return (
        f"training with {schedule_name(settings)}: {settings.world_size} ranks = {settings.pipeline_size} pipeline x "
        f"{settings.parallel.tensor_model_parallel_size} tensor x {f'{context} context x ' if context > 1 else ''}"
        f"{settings.data_parallel_size} data, "
        f"{settings.num_microbatches} microbatches of {settings.batch.micro_batch_size} x "
        f"{'at most ' if settings.data.variable_seq_lengths else ''}{settings.model.seq_length} "
        f"tokens, {settings.precision.name} on {'CPU' if on_cpu else 'GPU'}"
    )


def schedule_name(settings: Settings) -> str:
    """The schedule, as in "trains with the ZBV schedule"."""
    if settings.zero_bubble.schedule != "stock":
        return f"the {settings.zero_bubble.schedule.upper()} schedule"
    if settings.pipeline_size == 1:
        return "no pipeline"
    return f"megatron-core's own {'interleaved ' if settings.num_chunks > 1 else ''}1F1B schedule"


def summary_lines(
    settings: Settings,
    totals: Totals,
    *,
    iteration: int,
    seen: PipelineReport | None,
    memory: Sequence[RankMemory] | None,
    on_cpu: bool,
) -> list[str]:
    """The table at the end of a run.

    Args:
        settings: the run.
        totals: what was logged of it.
        iteration: iterations done, with those of earlier runs.
        seen: the report of the last recorded iteration; None if none was recorded.
        memory: measured memory per rank; None if it was not measured.
        on_cpu: whether ranks compute on the CPU, where they may share cores.
    """
    rows = {"loss": _losses(totals), **_speed(settings, totals)}
    if seen is not None:
        predicted = seen.simulation.bubble_rate
        rows["bubble"] = f"{seen.bubble_rate:.1%} (iteration {seen.iteration}; {predicted:.1%} predicted for its pass times)"
        cores = os.cpu_count() or 1
        if on_cpu and settings.world_size > cores:  # they take turns, and no schedule can be faster than another
            rows["CPU cores"] = f"{cores}, shared by {settings.world_size} ranks; waiting for a core counts as bubble"
    if memory is not None:
        peaks = [(rank.state_bytes + rank.measured_bytes) / 2**20 for rank in memory]
        rows["memory"] = f"{max(peaks):.1f} MiB on rank {peaks.index(max(peaks))}: state and peak of activations"
    if settings.checkpoint.save is not None:
        rows["checkpoint"] = str(iteration_directory(settings.checkpoint.save, iteration))
    if settings.zero_bubble.zero_bubble_trace is not None and seen is not None:
        rows["trace"] = settings.zero_bubble.zero_bubble_trace
    rows = {name: value for name, value in rows.items() if value}
    width = max(map(len, rows), default=0)
    return [
        f"done: {iteration} iterations, schedule: {schedule_name(settings)}",
        *(f"  {name:<{width}}  {value}" for name, value in rows.items()),
    ]


def _losses(totals: Totals) -> str:
    losses = [] if totals.last_loss is None else [f"{totals.last_loss:.4f} (last iteration)"]
    if totals.last_validation_loss is not None:
        losses.append(f"{totals.last_validation_loss:.4f} (validation)")
    return ", ".join(losses)


def _speed(settings: Settings, totals: Totals) -> dict[str, str]:
    if not totals.num_timed:
        return {}
    tokens = totals.tokens_per_s
    return {
        "time": f"{totals.seconds * 1000.0:.1f} ms per iteration (mean of {totals.num_timed}, without the first)",
        "speed": f"{tokens:.0f} tokens per second, {tokens / settings.world_size:.0f} per GPU",
    }
