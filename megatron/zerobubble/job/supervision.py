"""Watchdog and failure report in a training loop, of which only its calls of the schedule and of the optimizer are known.

A loop builds datasets, evaluates and saves for as long as it takes. So nothing is judged between two calls: a rank that is
outside raises no alarm, and those that wait for it are patient until the process groups are about to give up. Inside of a call
the passes, transfers and steps are watched (`watchdog`).

It begins at the first call, because the loop has initialized torch.distributed by then, on the store of the default process
group. It ends with the interpreter, or when an exception leaves a call: who catches it may go on, even with other process groups.
The next call begins again.
"""

from __future__ import annotations

import atexit
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.failure import JobGuard
from megatron.zerobubble.job.launch import read_launch
from megatron.zerobubble.job.watchdog import Watchdog
from megatron.zerobubble.runtime.watch import Watch

__all__ = ["Supervision"]


class Supervision:
    """One rank's supervision.

    Args:
        limit_s: --zero-bubble-watchdog-seconds. 0: none; None: by default, which is none unless there is a `guard`.
    """

    def __init__(self, limit_s: float | None) -> None:
        self.guard: JobGuard | None = None
        """Around the whole script, if that was started by `zerobubble run`; else one that reports what nothing catches."""
        self.watch: Watch | None = None
        """Where to report what this rank does; None: nobody looks."""
        self._limit_s = limit_s
        self._store: Any = None
        self._dog: Any = None

    @contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Watch a part of the loop that every rank of the world runs.

        Args:
            text: what the rank does there when it does not report anything else; a predicate whose subject is the rank.

        Raises:
            ConfigError: the limit is above the timeout of the process groups.
        """
        if self._limit_s == 0 or (self._limit_s is None and self.guard is None):
            yield
            return
        store = c10d._get_default_store()
        if self.watch is None or store is not self._store:
            self.stop()
            self.watch = self._start(store, text)
        try:
            with self.watch.phase(text):
                self._dog.beat_now()  # a rank that is stopped from now on was inside of a call
                yield
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop watching, until the next call."""
        if self._dog is not None:
            self._dog.__exit__(*sys.exc_info())  # does not wait for its threads after an error
        self._dog = self._store = self.watch = None

    def close(self) -> None:
        """Stop watching for good."""
        self.stop()
        atexit.unregister(self.stop)
        if self.guard is not None:
            self.guard.leave_uncaught()

    def _start(self, store: Any, text: str) -> Watch:
        device = torch.device(torch.cuda.current_device())
        rank, world_size = c10d.get_rank(), c10d.get_world_size()
        options = getattr(c10d._get_default_group()._get_backend(device), "options", None)
        timeout_s: float = getattr(options, "_timeout", c10d.default_pg_timeout).total_seconds()
        limit_s = self._limit_s or timeout_s / 2.0
        if limit_s >= timeout_s:
            raise ConfigError(
                f"--zero-bubble-watchdog-seconds {limit_s:g} must be less than the timeout of the process groups, "
                f"{timeout_s:g} s, after which they end the job without it: lower it, or raise the timeout"
            )
        ours: Any = c10d.PrefixStore("zero_bubble", store)
        watch, launch = Watch(device), read_launch()
        if self.guard is None:
            self.guard = JobGuard(ours, rank, error_file=launch.error_file)
            self.guard.take_uncaught()
        self.guard.follow(ours, rank, world_size=world_size, doing=watch.last)
        launch = dataclasses.replace(launch, rank=rank, world_size=world_size)
        self._dog = Watchdog(watch, ours, launch, limit_s=limit_s, timeout_s=timeout_s)
        with watch.phase(text):  # the first beat says it
            self._dog.__enter__()
        self._store = store
        atexit.unregister(self.stop)
        atexit.register(self.stop)
        return watch
