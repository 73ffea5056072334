"""Writes the plan file (--zero-bubble-save-plan)."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from megatron.zerobubble.files import replace_text
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.simulate import Simulation

__all__ = ["PlanFileWriter"]

_log = logging.getLogger(__name__)


class PlanFileWriter:
    """Writes the --zero-bubble-save-plan file: every plan that is found, or else the one that runs. Rank 0 writes.

    Args:
        file: the JSON file, replaced atomically; None: write nothing. If it cannot be written, that is logged once.
    """

    def __init__(self, file: str | None) -> None:
        self._file = None if file is None else Path(file)
        self._is_written = False
        self._has_failed = False

    def write_found(self, found: Simulation) -> None:
        """Write a plan that the search found, with the profiled costs and the simulated metrics."""
        self._write(found.plan.to_json(costs=found.costs.to_json(), metrics=found.metrics()))

    def finish(self, ran: Plan) -> None:
        """Write the plan that ran last, unless `write_found` wrote one."""
        if not self._is_written and dist.get_rank() == 0:
            self._write(ran.to_json())

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        try:
            replace_text(self._file, text)
        except OSError as error:  # training does not need the file
            if not self._has_failed:
                _log.warning("--zero-bubble-save-plan %s cannot be written: %s", self._file, error.strerror or error)
            self._has_failed = True
        else:
            self._is_written = True
