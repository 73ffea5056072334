"""Logs iterations: progress lines, JSON lines.

Iterations are collected until the next progress line; then one all-reduce sums their losses, and rank 0 writes. So logging adds
no synchronization to an iteration.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.metrics.json_lines import JsonLines
from megatron.zerobubble.training.metrics.progress_line import IterationRecord, progress_line
from megatron.zerobubble.training.step import MeanLoss, StepResult, mean_losses

__all__ = ["MetricsLogger"]

_log = logging.getLogger(__name__)


class MetricsLogger:
    """Collects iterations and logs them. Every rank has one; only rank 0 writes.

    Args:
        settings: what to write, and where.
        rank: this rank.
        start_iteration: iterations done by earlier runs; above 0 an existing --metrics-jsonl file is appended to.
    """

    def __init__(self, settings: Settings, *, rank: int, start_iteration: int) -> None:
        self._settings = settings
        self._pending: list[IterationRecord] = []
        self._num_corrected = 0
        self._has_reported_without_loss = False
        path = settings.run.metrics_jsonl
        self._jsonl = None if path is None or rank != 0 else JsonLines(path, is_continued=start_iteration > 0)

    def close(self) -> None:
        """Close the file."""
        if self._jsonl is not None:
            self._jsonl.close()

    def add(self, record: IterationRecord) -> None:
        """Add an iteration, to be written by the next `log`.

        Raises:
            ExecutionError: the gradient norm is not finite although the optimizer stepped.
        """
        self._pending.append(record)
        if record.result.rolled_back is not None:
            self._num_corrected += 1
            _log.info("%s", _correction(record.iteration, record.result))
        if record.result.is_stepped:
            self._check_finite("gradient norm", record.result.grad_norm, record.iteration)

    def log(self, *, validation_loss: float | None = None, iteration: int = 0) -> None:
        """All-reduce the losses of the iterations added since the last call, and write them. All ranks must call this.

        Args:
            validation_loss: mean loss per token of an evaluation after `iteration`; None: there was none.
            iteration: the iteration before the evaluation.

        Raises:
            ExecutionError: a loss is not finite although the optimizer stepped.
        """
        records, self._pending = self._pending, []
        losses: list[MeanLoss] = []
        if records:
            losses = mean_losses(torch.stack([record.result.loss for record in records]))
            for record, loss in zip(records, losses, strict=True):
                record.loss, record.seconds = loss.value, record.elapsed_ms() / 1000.0
            _log.info("%s", progress_line(self._settings, records, num_corrected=self._num_corrected))
        objects = [record.to_json(self._settings) for record in records]
        if validation_loss is not None:
            if not objects:
                objects = [{"iteration": iteration, "schedule": self._settings.zero_bubble.schedule}]
            objects[-1]["validation_loss"] = validation_loss
            perplexity = math.exp(min(validation_loss, 700.0))
            _log.info("validation loss at iteration %d: %.4f (ppl %.2f)", iteration, validation_loss, perplexity)
        if self._jsonl is not None:
            self._jsonl.write(objects)
        for record, loss in zip(records, losses, strict=True):
            if not loss.has_tokens:
                self._report_without_loss(record.iteration)
            elif record.result.is_stepped:
                self._check_finite("loss", record.loss, record.iteration)

    def _report_without_loss(self, iteration: int) -> None:
        """Log the first iteration in which no token counts, whose loss is NaN."""
        if not self._has_reported_without_loss:
            self._has_reported_without_loss = True
            _log.info(
                "iteration %d has no token that counts in the loss, and so no loss; training goes on. Padding and "
                "masked tokens do not count: a larger --global-batch-size makes this rarer",
                iteration,
            )

    def _check_finite(self, what: str, value: float | None, iteration: int) -> None:
        if self._settings.run.check_for_nan_in_loss_and_grad and value is not None and not math.isfinite(value):
            raise ExecutionError(
                f"the {what} of iteration {iteration} is {value}; training stops. A smaller --lr, --clip-grad or --bf16 may "
                "help; --no-check-for-nan-in-loss-and-grad trains on"
            )


def _correction(iteration: int, result: StepResult) -> str:
    """A log line about an optimistic step that validation corrected."""
    what = "clipped" if result.is_stepped else "skipped for an overflow"
    how = "rolled back and redone" if result.is_stepped else "rolled back"
    ranks = _ranges(result.rolled_back or ())
    return f"iteration {iteration}: {what} by post-validation, " + (f"{how} on {ranks}" if ranks else "no rank had stepped")


def _ranges(ranks: Sequence[int]) -> str:
    """'ranks 0-2, 4' for 0, 1, 2, 4."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} {', '.join('-'.join(map(str, run)) for run in runs)}" if ranks else ""
