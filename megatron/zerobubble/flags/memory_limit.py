"""--zero-bubble-memory-limit: activation memory relative to 1F1B, total bytes per rank, or the memory of the device."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.messages import quoted

__all__ = ["MemoryLimit", "bytes_of"]

_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{0,9})?)\s*([KMGT]i?B)", re.ASCII | re.IGNORECASE)
_MOST_BYTES = 2**60


def bytes_of(text: str) -> float | None:
    """The bytes of `60GiB`, `1.5 GB` and the like; None of anything else, and of what no machine has."""
    sized = _SIZE.fullmatch(text.strip())
    size = float(sized[1]) * _UNITS[sized[2].lower()] if sized else 0.0
    return size if 1 <= size <= _MOST_BYTES else None


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """A memory limit per rank. At most one of the fields is given; neither of them: the memory of the device (`auto`)."""

    relative: float | None = None
    """Activation memory in units of 1F1B's on the first rank."""
    total_bytes: int | None = None
    """Total of weights, gradients, optimizer state and activations, in bytes."""

    @property
    def is_relative(self) -> bool:
        """Whether the planner can honor it before memory is measured."""
        return self.relative is not None

    @staticmethod
    def parse(text: str) -> MemoryLimit:
        """Read `0.75`, `60GiB` or `auto`. Raises ConfigError on anything else."""
        stripped = text.strip()
        if stripped.lower() == "auto":
            return MemoryLimit()
        total = bytes_of(stripped)
        if total is not None:
            return MemoryLimit(total_bytes=int(total))
        try:
            relative = float(stripped)
        except ValueError:
            relative = math.nan
        if not (relative > 0 and math.isfinite(relative)):
            raise ConfigError(
                f"--zero-bubble-memory-limit {quoted(text)} is none of: a number above 0 (1 is 1F1B's activation memory), bytes "
                "such as 60GiB (the total per rank), auto (the memory of the device)"
            )
        return MemoryLimit(relative=relative)
