"""Scalars per iteration, for TensorBoard and Weights & Biases."""

from __future__ import annotations

import dataclasses
import importlib
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from megatron.zerobubble.training.config.settings import Settings

__all__ = ["Curves"]

_log = logging.getLogger(__name__)


class Curves:
    """Writes scalars to TensorBoard (--tensorboard-dir) and Weights & Biases (--wandb-project). Only one rank may have one.

    Args:
        settings: where to write.
        start_iteration: iterations done by earlier runs; later points of theirs are dropped from TensorBoard.
    """

    def __init__(self, settings: Settings, *, start_iteration: int) -> None:
        self._resources = ExitStack()
        self._events: _Events | None = None
        self._run: Any | None = None
        logs = settings.logging
        if logs.tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = _Events(SummaryWriter(logs.tensorboard_dir, purge_step=start_iteration + 1), logs.tensorboard_dir)
            self._resources.callback(self._events.close)
        if logs.wandb_project is not None:
            self._run = _open_wandb(settings)
        if self._run is not None:
            self._resources.callback(self._run.finish)

    def add(self, values: Mapping[str, Any], iteration: int) -> None:
        """Add a point at `iteration` for each of `values` that is a number; others are ignored."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if self._events is not None:
            for name, value in numbers.items():
                self._events.add_scalar(name, value, iteration)
        if self._run is not None:
            self._run.log(numbers | {"iteration": iteration})

    def flush(self) -> None:
        """Make the added points visible to readers of the files."""
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Close the TensorBoard files and finish the Weights & Biases run."""
        self._resources.close()


class _Events:
    """TensorBoard's SummaryWriter, without which training goes on: the first failed write is logged, and is the last one.

    Args:
        writer: the SummaryWriter. Its thread writes, and reports a failure by the next call.
        folder: --tensorboard-dir.
    """

    def __init__(self, writer: Any, folder: str) -> None:
        self._writer: Any | None = writer
        self._folder = folder

    def add_scalar(self, name: str, value: float, iteration: int) -> None:
        """Add a point to a curve."""
        self.act(lambda writer: writer and writer.add_scalar(name, value, iteration))

    def flush(self) -> None:
        """Make the added points visible to readers."""
        self.act(lambda writer: writer and writer.flush())

    def close(self) -> None:
        """Close the file."""
        self.act(lambda writer: writer and writer.close())

    def act(self, write: Callable[[Any | None], object]) -> None:
        """Call `write` with the SummaryWriter, or with None after a failure."""
        try:
            write(self._writer)
        except OSError as error:
            failed, self._writer = self._writer, None
            _log.warning(
                "--tensorboard-dir %s cannot be written: %s; training goes on, and its curves end here",
                self._folder,
                error.strerror or error,
            )
            open_writers = getattr(failed, "all_writers", None) or {}
            for writer in open_writers.values():  # SummaryWriter.close would fail before it ends the thread
                with suppress(OSError):
                    writer.close()


def _open_wandb(settings: Settings) -> Any | None:
    """Start a run of Weights & Biases. None, with a warning, if the package is missing: training continues without."""
    logs = settings.logging
    try:
        wandb = importlib.import_module("wandb")
    except ImportError:
        _log.warning("--wandb-project %s: wandb is not installed (pip install wandb); it gets no curves", logs.wandb_project)
        return None
    config = dataclasses.asdict(settings)
    run = wandb.init(project=logs.wandb_project, name=logs.wandb_exp_name, dir=logs.wandb_save_dir, config=config)
    # wandb's own steps may only grow, and pipeline reports of earlier iterations are logged at the end of the run.
    run.define_metric("*", step_metric="iteration")
    return run
