"""What --zero-bubble-memory-limit says: activations relative to 1F1B, or all a rank holds in bytes, or as much as fits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from megatron.zerobubble.errors import ConfigError

__all__ = ["MemoryLimit"]

_UNITS = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """A limit on what a rank holds. At most one of the fields is given; neither of them: what fits the device."""

    relative: float | None = None
    """Activations in units of what 1F1B holds on the first rank."""
    total_bytes: int | None = None
    """Weights, gradients, optimizer state and activations, in bytes."""

    @property
    def is_relative(self) -> bool:
        """Whether it can be planned for before anything was measured."""
        return self.relative is not None

    @staticmethod
    def parse(text: str) -> MemoryLimit:
        """Read `0.75`, `60GiB` or `auto`. Raises ConfigError on anything else."""
        stripped = text.strip()
        if stripped.lower() == "auto":
            return MemoryLimit()
        sized = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMGT]i?B)", stripped, re.IGNORECASE)
        if sized:
            total = int(float(sized[1]) * _UNITS[sized[2].lower()])
            if total > 0:
                return MemoryLimit(total_bytes=total)
        try:
            relative = float(stripped)
        except ValueError:
            relative = math.nan
        if not (relative > 0 and math.isfinite(relative)):
            raise ConfigError(
                f"--zero-bubble-memory-limit {text!r} is none of: a number above 0 (1 is 1F1B's activation memory), bytes such "
                "as 60GiB (all a rank holds), auto (what fits the device)"
            )
        return MemoryLimit(relative=relative)
