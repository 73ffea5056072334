"""The first line of a run; records of iterations, and their progress lines.

Those are as Megatron-LM's training loop prints them, so that its parsers read ours::

    [2026-01-31 12:00:00] iteration      200/   1000 | consumed samples:         3200 | elapsed time per iteration (ms): 812.5 |
    learning rate: 1.000000E-04 | global batch size:    16 | lm loss: 5.554300E+00 | loss scale: 1.0 | grad norm: 1.234 |
    number of skipped iterations:   0 | number of nan iterations:   0 | tokens/s: 80660 | tokens/s/GPU: 10082 |
    time left: 0:10:50 |

(one line). Its fields come first and in its order; those that only this package has follow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.step import StepResult

__all__ = ["IterationRecord", "description", "progress_line", "schedule_name", "time_left"]


def description(settings: Settings, *, on_cpu: bool) -> str:
    """The first log line: schedule, parallel sizes, batch, precision, device."""
    context, slices = settings.parallel.context_parallel_size, ""
    if settings.zero_bubble.num_slices > 1:
        slices = " in slices" if settings.zero_bubble.chooses_slices else f" in {settings.zero_bubble.num_slices} slices"
    return (
        f"training with {schedule_name(settings)}: {settings.world_size} ranks = {settings.pipeline_size} pipeline x "
        f"{settings.parallel.tensor_model_parallel_size} tensor x {f'{context} context x ' if context > 1 else ''}"
        f"{settings.data_parallel_size} data, "
        f"{settings.num_microbatches} microbatches of {settings.data.micro_batch_size} x "
        f"{settings.model.seq_length} tokens{slices}, {settings.precision.name} on "
        f"{'CPU' if on_cpu else 'GPU'}"
    )


def schedule_name(settings: Settings) -> str:
    """The schedule, as in "trains with the ZBV schedule"."""
    if settings.zero_bubble.schedule != "stock":
        return f"the {settings.zero_bubble.schedule.upper()} schedule"
    if settings.pipeline_size == 1:
        return "no pipeline"
    return f"megatron-core's own {'interleaved ' if settings.num_chunks > 1 else ''}1F1B schedule"


@dataclass(kw_only=True)
class IterationRecord:
    """One iteration, to be logged. `loss` and `seconds` are filled in with the losses' all-reduce, which waits for the device."""

    iteration: int
    """From 1."""
    consumed_samples: int
    """Samples consumed by the end of this iteration."""
    result: StepResult
    """Loss and optimizer step of this rank."""
    tokens: int
    """Tokens of this iteration, without padding."""
    elapsed_ms: Callable[[], float]
    """Reads the iteration time in milliseconds, once the device has done the iteration."""
    seconds: float = field(default=math.nan)
    """Iteration time in seconds."""
    loss: float = field(default=math.nan)
    """Mean loss per token over all ranks."""

    def to_json(self, settings: Settings) -> dict[str, Any]:
        """The JSON object of this iteration in --metrics-jsonl."""
        return {
            "iteration": self.iteration,
            "loss": self.loss,
            "lr": self.result.lr,
            "grad_norm": self.result.grad_norm,
            "skipped": not self.result.is_stepped,
            "redone": self.result.rolled_back is not None,
            "tokens_per_s": self.tokens / self.seconds,
            "iteration_ms": self.seconds * 1000.0,
            "schedule": settings.zero_bubble.schedule,
        }


def progress_line(
    settings: Settings,
    records: Sequence[IterationRecord],
    *,
    num_corrected: int,
) -> str:
    """The line about the iterations since the last one.

    Args:
        settings: the run.
        records: the iterations, with their loss and time; at least one.
        num_corrected: optimistic steps that validation has corrected since the run began.
    """
    last, train_iters = records[-1], settings.train_iters
    losses = [record.loss for record in records if record.result.is_stepped and math.isfinite(record.loss)] or [last.loss]
    seconds = sum(record.seconds for record in records) / len(records)
    tokens_per_s = sum(record.tokens for record in records) / len(records) / seconds
    result = last.result
    parts = [
        f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {last.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {last.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {seconds * 1000.0:.1f}",
        f"learning rate: {result.lr:.6E}",
        f"global batch size: {settings.global_batch_size:5d}",
        f"lm loss: {sum(losses) / len(losses):.6E}",
        f"loss scale: {float(result.loss_scale) if settings.precision.fp16 else 1.0:.1f}",
    ]
    if result.grad_norm is not None:
        parts.append(f"grad norm: {result.grad_norm:.3f}")
    parts += [
        f"number of skipped iterations: {sum(not record.result.is_stepped for record in records):3d}",
        f"number of nan iterations: {sum(not math.isfinite(record.loss) for record in records):3d}",
        f"tokens/s: {tokens_per_s:.0f}",
        f"tokens/s/GPU: {tokens_per_s / settings.world_size:.0f}",
        f"time left: {time_left(train_iters - last.iteration, seconds)}",
    ]
    if settings.zero_bubble.enable_optimizer_post_validation:
        parts.append(f"corrected steps: {num_corrected}")
    return " | ".join(parts) + " |"


def time_left(num_iterations: int, seconds: float) -> timedelta:
    """How long `num_iterations` take at `seconds` each, in whole seconds; evaluations and checkpoints come on top."""
    return timedelta(seconds=round(num_iterations * seconds))
