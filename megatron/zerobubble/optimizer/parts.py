"""The parts of a megatron-core optimizer."""

from __future__ import annotations

from typing import Any

__all__ = ["parts_of"]


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers of megatron-core's chain (of dense weights, and of experts), or the one that there is."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))
