"""Limits of what the playground accepts. `zerobubble plan` takes much larger problems (`registry.MAX_OPS`)."""

from __future__ import annotations

import enum
from typing import TypeVar

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.messages import quoted

Choice = TypeVar("Choice", bound=enum.Enum)

MAX_RANKS = 64
MAX_MICROBATCHES = 512
MAX_STAGES_PER_RANK = 8
MAX_SLICES = 16
MAX_OPS = 64 * 512 * 6
"""Ops of one timeline: two stages per rank, each with F, B and W."""
MAX_TIME_MS = 1e6
MAX_MEMORY = 64.0
"""Memory limit, in units of 1F1B on rank 0; no plan within the other limits needs more."""
MAX_POINTS = 12
"""Points of a Pareto front."""
MAX_BODY_BYTES = 32 * 2**20
SILENT_SECONDS = 20.0
"""Longest pause within a request."""
WORKER_BYTES = 6 * 2**30
"""Address space of the process that answers a request."""


def number(name: str, value: object, most: float, least: float = 0.0) -> float:
    """Read a number. Raises ConfigError with its name on anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise ConfigError(f"{name} is {quoted(value)}; give a number from {least:g} to {most:g}")
    return float(value)


def whole(name: str, value: object, least: int, most: int) -> int:
    """Read a whole number. Raises ConfigError with its name on anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        remedy = "" if most > MAX_OPS else ", zerobubble plan takes larger ones"
        raise ConfigError(f"{name} is {quoted(value)}; the playground takes whole numbers from {least} to {most}{remedy}")
    return value


def choice(kind: type[Choice], name: str, value: object) -> Choice:
    """Read a member of an enumeration by its value. Raises ConfigError with its name on anything else."""
    known = [member.value for member in kind]
    if value not in known:
        raise ConfigError(f"{name} is {quoted(value)}; choose one of {', '.join(known)}")
    return kind(value)
