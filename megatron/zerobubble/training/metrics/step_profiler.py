"""--profile: a few iterations under NVIDIA's nsys or torch's profiler, as in Megatron-LM's training loop.

nsys must have started the job with ``--capture-range=cudaProfilerApi``; it then records between the two calls made here.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import torch

from megatron.zerobubble.training.config.logging import LoggingConfig

__all__ = ["StepProfiler"]

_log = logging.getLogger(__name__)


class StepProfiler:
    """Profiles the iterations that the flags choose, on the ranks that they choose. Inert on others.

    Args:
        logs: the flags.
        rank: this rank.
    """

    def __init__(self, logs: LoggingConfig, *, rank: int) -> None:
        self._logs = logs
        self._rank = rank
        self._is_chosen = logs.profile and rank in logs.profile_ranks
        self._running = ExitStack()

    def before(self, done: int) -> None:
        """Call before every iteration, with the number of those done."""
        if self._is_chosen and done == self._logs.profile_step_start:
            if self._logs.use_pytorch_profiler:
                self._running.enter_context(self._torch_profiler())
            else:
                torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
                self._running.callback(lambda: torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop()))
                self._running.enter_context(torch.autograd.profiler.emit_nvtx(record_shapes=True))

    def after(self, done: int) -> None:
        """Call after every iteration, with the number of those done."""
        if self._is_chosen and done == self._logs.profile_step_end:
            self.close()

    def close(self) -> None:
        """Stop, if the run ends before the last iteration to profile."""
        self._running.close()

    def _torch_profiler(self) -> Any:
        folder = self._logs.tensorboard_dir
        assert folder is not None, "checked with the flags"
        _log.info("profile: %s, with the iterations after %d", folder, self._logs.profile_step_start)
        write = torch.profiler.tensorboard_trace_handler(folder, worker_name=f"rank{self._rank}")
        return torch.profiler.profile(on_trace_ready=write, record_shapes=True)
