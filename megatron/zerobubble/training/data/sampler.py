"""The order in which samples are read: a pure function of the number of consumed samples and the data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import Sampler

__all__ = ["ConsumedSamples"]


class ConsumedSamples(Sampler[list[int]]):
    """Yields the sample indices of each microbatch of one data-parallel rank, after the consumed samples.

    Microbatch k of rank r of dp has the b samples from ``consumed + (k * dp + r) * b`` on, so a global batch is the same set of
    samples for every data-parallel size.

    Args:
        consumed: samples consumed so far by all ranks together.
        total: samples of the dataset.
        micro_batch_size: samples per microbatch, b.
        rank: data-parallel rank, r.
        num_ranks: data-parallel size, dp.
    """

    def __init__(self, *, consumed: int, total: int, micro_batch_size: int, rank: int, num_ranks: int) -> None:
        self._starts = range(consumed + rank * micro_batch_size, total - micro_batch_size + 1, micro_batch_size * num_ranks)
        self._micro_batch_size = micro_batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for start in self._starts:
            yield list(range(start, start + self._micro_batch_size))

    def __len__(self) -> int:
        return len(self._starts)
