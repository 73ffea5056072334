"""Which part of a sequence a context-parallel rank holds.

A sequence is cut into 2 * n slices of equal length for n ranks, and rank r holds slices r and 2n - 1 - r, as megatron-core and
Transformer Engine have it. In causal attention a late token has more keys than an early one; with one early and one late slice
all ranks have the same work:

    n = 2      slice   0   1   2   3
               rank    0   1   1   0
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["WHOLE", "SequenceParts", "slices"]


@dataclass(frozen=True, kw_only=True)
class SequenceParts:
    """The place of one rank in a context-parallel group."""

    rank: int
    """Of this rank in the group."""
    size: int
    """Number of ranks of the group, n."""

    @property
    def numbers(self) -> tuple[int, int]:
        """The numbers of the two slices that this rank holds, in the order it holds them."""
        return self.rank, 2 * self.size - 1 - self.rank


WHOLE = SequenceParts(rank=0, size=1)
"""Without context parallelism."""


def slices(tensor: Tensor, parts: SequenceParts, *, dim: int) -> Tensor:
    """The two slices of a whole sequence that a rank holds, one behind the other; the tensor itself without context parallelism.

    Args:
        tensor: its length along `dim` must be divisible by twice the number of ranks.
        parts: the place of the rank.
        dim: the sequence.
    """
    if parts.size == 1:
        return tensor
    length = tensor.shape[dim] // (2 * parts.size)
    return torch.cat([tensor.narrow(dim, number * length, length) for number in parts.numbers], dim=dim)
