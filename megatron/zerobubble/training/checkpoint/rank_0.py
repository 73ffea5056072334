"""What rank 0 does for all ranks, and how its errors reach them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from megatron.zerobubble.errors import CheckpointError

__all__ = ["run_on_rank_0"]

T = TypeVar("T")


def run_on_rank_0(action: Callable[[], T]) -> T:
    """Run `action` on rank 0; all ranks must call this.

    Args:
        action: its result must be picklable.

    Returns:
        Its result, on every rank.

    Raises:
        CheckpointError: as `action` raised it on rank 0, on every rank.
    """
    outcome: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            outcome = [action(), None]
        except CheckpointError as error:
            outcome = [None, str(error)]
    torch.distributed.broadcast_object_list(outcome, src=0)
    result, failure = outcome
    if failure is not None:
        raise CheckpointError(failure)
    return result
