"""The memory of a run that measured it, out of its report.json: what turns the activation memory of a plan into bytes.

It holds for plans with as many stages as the run had: with others, a rank has other layers, and other weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.playground.limits import MAX_RANKS, number

_GIB = 2**30
_MOST_BYTES = 4096.0 * _GIB


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """Bytes of a run."""

    microbatch_bytes: float
    """Activation memory of one microbatch: the mean of all ranks."""
    static_bytes: tuple[float, ...]
    """Per rank, weights, gradients, optimizer state, and the temporary tensors of a pass."""
    device_bytes: float | None
    """Memory of the GPU; None: it ran on the CPU."""

    def memory(self, placement: Placement, num_stages: int, num_microbatches: int) -> dict[str, Any] | None:
        """As `ModelProblem.memory`, for a placement; None if the run had another number of stages or ranks."""
        p = placement.num_ranks
        if placement.num_stages != num_stages or len(self.static_bytes) != p:
            return None
        return {
            "static_bytes": list(self.static_bytes),
            "unit_bytes": self.microbatch_bytes * min(p, num_microbatches),
            "device_bytes": self.device_bytes,
        }


def read_measured(given: object) -> MeasuredMemory:
    """Read what the page sends back of `memory_of_report`, with ``device_gib``.

    Raises:
        ConfigError: a value is missing, of the wrong type or out of bounds.
    """
    if not isinstance(given, dict) or not isinstance(given.get("static_bytes"), list):
        raise ConfigError(f"run_memory must be an object with static_bytes, a list, got {quoted(given)}")
    if len(given["static_bytes"]) > MAX_RANKS:
        raise ConfigError(f"static_bytes has {len(given['static_bytes'])} values; the playground takes at most {MAX_RANKS}")
    return MeasuredMemory(
        microbatch_bytes=number("microbatch_bytes", given.get("microbatch_bytes"), _MOST_BYTES),
        static_bytes=tuple(number("static_bytes", value, _MOST_BYTES) for value in given["static_bytes"]),
        device_bytes=None
        if given.get("is_cpu")
        else number("device_gib", given.get("device_gib"), _MOST_BYTES / _GIB, 0.1) * _GIB,
    )


def memory_of_report(ranks: object, iteration: Mapping[str, Any], num_ranks: int, num_microbatches: int) -> dict[str, Any] | None:
    """The bytes of a report.json, for the page; None if the run did not measure its memory.

    Args:
        ranks: the report's ``memory``.
        iteration: the last of its iterations.
        num_ranks: p.
        num_microbatches: m.

    Raises:
        ConfigError: a value is of the wrong type or out of bounds.
    """
    planned = iteration.get("memory")
    peaks = planned.get("predicted") if isinstance(planned, dict) else None
    lists = [values for values in (ranks, peaks) if isinstance(values, list) and len(values) == num_ranks]
    if len(lists) < 2:
        return None

    def column(name: str) -> list[float]:
        rows = (row if isinstance(row, dict) else {} for row in lists[0])
        return [number(f"the report's {name}", row.get(name), _MOST_BYTES) for row in rows]

    units = math.fsum(number("the report's predicted memory", value, _MOST_BYTES) for value in lists[1])
    if not units:
        return None
    return {
        "microbatch_bytes": math.fsum(column("measured_bytes")) / units / min(num_ranks, num_microbatches),
        "static_bytes": [math.fsum(pair) for pair in zip(column("state_bytes"), column("workspace_bytes"), strict=True)],
        "is_cpu": isinstance(planned, dict) and planned.get("measured_bytes") is None,  # which CUDA's allocator counts
    }
