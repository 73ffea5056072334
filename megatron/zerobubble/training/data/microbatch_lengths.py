"""Which samples microbatches have, and how long they are.

Shapes: b microbatch size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from megatron.zerobubble.training.config.parallel import ParallelConfig
from megatron.zerobubble.training.config.settings import Settings

__all__ = ["ConsumedSamples", "length_multiple", "num_tokens"]


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


def length_multiple(parallel: ParallelConfig) -> int:
    """What padded lengths are multiples of: what ranks that share sequences divide them by."""
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    return math.lcm(2 * context if context > 1 else 1, tensor * context if parallel.sequence_parallel else 1)


def num_tokens(dataset: Any, settings: Settings, *, consumed: int, samples: int) -> int:
    """Tokens of the next samples, without padding.

    Args:
        dataset: of `samples.build_datasets`. Not read, and may be None, where settings do not read documents.
        settings: of the run.
        consumed: samples consumed so far by all ranks together.
        samples: how many.
    """
    if not settings.data.reads_documents:
        return samples * settings.model.seq_length
    return int(dataset.lengths(np.arange(consumed, consumed + samples)).sum())
