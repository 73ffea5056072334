"""The log of a run: a line per --log-interval, as Megatron-LM's loop prints them, and JSON lines.

Iterations are collected until the next line; then one all-reduce sums their losses, and the last rank, which alone knows the
gradient norm and the outcome of every optimizer step, writes. So logging adds no synchronization to an iteration. Times are the
host's: with --log-interval 1 each is that of its iteration on a GPU, too.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.zerobubble.errors import ConfigError, ExecutionError

__all__ = ["LoggedIteration", "RunLog", "mean_losses"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LoggedIteration:
    """One iteration on this rank."""

    number: int
    """From 1."""
    loss: torch.Tensor
    """[sum of losses, number of tokens] of this rank's microbatches, float64; zeros where no loss is computed."""
    is_stepped: bool
    """False if a gradient overflowed and the optimizer skipped the step."""
    grad_norm: float | None
    """2-norm of all gradients before clipping; None if it is not known here."""
    lr: float
    """Learning rate of its step."""
    loss_scale: float
    """1 without loss scaling."""
    seconds: float
    """Its time on the host."""


def mean_losses(totals: torch.Tensor) -> list[float]:
    """Mean losses per token, 0 where no token counts, from [n, 2] loss sums and token counts of this rank. All ranks call it.

    One all-reduce over the world serves every layout: ranks that hold equal sums and counts leave their ratio unchanged.
    """
    dist.all_reduce(totals)
    return [loss / tokens if tokens else 0.0 for loss, tokens in totals.tolist()]


class RunLog:
    """Collects iterations and logs them. Every rank has one; the last one writes.

    Args:
        args: the flags.
        schedule: name of the schedule, for the JSON lines.
        start: iterations done by earlier runs; above 0 an existing file of JSON lines is continued.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, args: argparse.Namespace, schedule: str, *, start: int) -> None:
        self._args = args
        self._schedule = schedule
        self._pending: list[LoggedIteration] = []
        self._file = None if args.metrics_jsonl is None or not _writes() else Path(args.metrics_jsonl)
        try:
            if self._file is not None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._file.open("a" if start else "w").close()
        except OSError as error:
            raise ConfigError(f"--metrics-jsonl {self._file} cannot be written: {error.strerror}") from error

    def add(self, iteration: LoggedIteration) -> None:
        """Add an iteration, to be written by the next `log`."""
        self._pending.append(iteration)

    def log(self, *, validation_loss: float | None = None) -> None:
        """All-reduce the losses of the iterations since the last call, and write them. All ranks must call this.

        Args:
            validation_loss: mean loss per token of an evaluation after the last of them; None: there was none.

        Raises:
            ExecutionError: a loss or gradient norm is not finite although the optimizer stepped.
        """
        iterations, self._pending = self._pending, []
        if not iterations:
            return
        losses = mean_losses(torch.stack([each.loss for each in iterations]))
        if not _writes():
            return
        _log.info("%s", self._line(iterations, losses))
        objects = [self._fields(each, loss) for each, loss in zip(iterations, losses, strict=True)]
        if validation_loss is not None:
            perplexity = math.exp(min(validation_loss, 700.0))
            _log.info("validation loss at iteration %d: %.4f (ppl %.2f)", iterations[-1].number, validation_loss, perplexity)
            objects[-1]["validation_loss"] = validation_loss
        self._write(objects)
        for each, loss in zip(iterations, losses, strict=True):
            finite = math.isfinite(loss) and math.isfinite(each.grad_norm or 0.0)
            if each.is_stepped and not finite and getattr(self._args, "check_for_nan_in_grad", True):
                raise ExecutionError(
                    f"iteration {each.number} has the loss {loss} and the gradient norm {each.grad_norm}; training stops. A "
                    "smaller --lr, --clip-grad or --bf16 may help; --no-check-for-nan-in-loss-and-grad trains on"
                )

    def _line(self, iterations: list[LoggedIteration], losses: list[float]) -> str:
        args, last = self._args, iterations[-1]
        seconds = sum(each.seconds for each in iterations) / len(iterations)
        good = [loss for each, loss in zip(iterations, losses, strict=True) if each.is_stepped and math.isfinite(loss)]
        tokens_per_s = args.global_batch_size * args.seq_length / seconds
        left = timedelta(seconds=round((args.train_iters - last.number) * seconds))
        return " | ".join(
            [
                f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] iteration {last.number:8d}/{args.train_iters:8d}",
                f"consumed samples: {last.number * args.global_batch_size:12d}",
                f"elapsed time per iteration (ms): {seconds * 1000.0:.1f}",
                f"learning rate: {last.lr:.6E}",
                f"global batch size: {args.global_batch_size:5d}",
                f"lm loss: {sum(good) / len(good) if good else losses[-1]:.6E}",
                f"loss scale: {last.loss_scale:.1f}",
                *([] if last.grad_norm is None else [f"grad norm: {last.grad_norm:.3f}"]),
                f"number of skipped iterations: {sum(not each.is_stepped for each in iterations):3d}",
                f"number of nan iterations: {sum(not math.isfinite(loss) for loss in losses):3d}",
                f"tokens/s: {tokens_per_s:.0f}",
                f"tokens/s/GPU: {tokens_per_s / dist.get_world_size():.0f}",
                f"time left: {left} |",
            ]
        )

    def _fields(self, iteration: LoggedIteration, loss: float) -> dict[str, Any]:
        return {
            "iteration": iteration.number,
            "loss": loss,
            "lr": iteration.lr,
            "grad_norm": iteration.grad_norm,
            "skipped": not iteration.is_stepped,
            "tokens_per_s": self._args.global_batch_size * self._args.seq_length / iteration.seconds,
            "iteration_ms": iteration.seconds * 1000.0,
            "schedule": self._schedule,
        }

    def _write(self, objects: list[dict[str, Any]]) -> None:
        """Append JSON lines; NaN and infinity become null. A disk that is full ends no run that needs none of it."""
        if self._file is None:
            return
        text = "".join(json.dumps({key: _finite_or_none(value) for key, value in each.items()}) + "\n" for each in objects)
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            _log.warning("--metrics-jsonl %s cannot be written: %s; training goes on", self._file, error.strerror or error)


def _writes() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
