"""How long microbatches are, from the lengths of their samples: nobody has to read tokens, and any rank knows those of all.

Shapes: b microbatch size, s padded tokens per row, over all context-parallel ranks together.
"""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np

from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.data.sampler import ConsumedSamples

__all__ = ["length_multiple", "microbatch_lengths", "num_tokens", "padded_length", "sample_lengths"]


def length_multiple(settings: Settings) -> int:
    """What padded lengths are multiples of: --pad-length-multiple, and what ranks that share sequences divide them by."""
    parallel = settings.parallel
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    return math.lcm(
        settings.data.pad_length_multiple,
        2 * context if context > 1 else 1,
        tensor * context if parallel.sequence_parallel else 1,
    )


def padded_length(longest: int, settings: Settings) -> int:
    """Tokens per row, s, of a microbatch whose longest sample has `longest` tokens."""
    if not settings.data.variable_seq_lengths:
        return settings.model.seq_length
    multiple = length_multiple(settings)
    return -(-longest // multiple) * multiple


def sample_lengths(dataset: Any) -> np.ndarray[Any, Any]:
    """Tokens of each sample of a dataset of documents, without padding: [n] int64.

    Args:
        dataset: of `samples.build_datasets`, from settings that read documents.
    """
    lengths: np.ndarray[Any, Any] = dataset.lengths(np.arange(len(dataset)))
    return lengths


def microbatch_lengths(
    dataset: Any, settings: Settings, *, consumed: int, num_microbatches: int, rank: int
) -> list[tuple[int, float]]:
    """The lengths of the next microbatches of a data-parallel rank, which any rank may ask for.

    Args:
        dataset: of `samples.build_datasets`. Not read, and may be None, where settings do not read documents.
        settings: of the run.
        consumed: samples consumed so far by all ranks together.
        num_microbatches: how many.
        rank: data-parallel rank.

    Returns:
        Per microbatch the padded tokens per row, s, and the sum over its rows of the squared lengths of the sequences that attend
        to themselves: b * s^2, or with --pack-sequences those of the documents, with the padding as one more.
    """
    seq_length, rows = settings.model.seq_length, settings.batch.micro_batch_size
    if not settings.data.reads_documents:
        return [(seq_length, float(rows * seq_length**2))] * num_microbatches
    sampler = ConsumedSamples(
        consumed=consumed, total=len(dataset), micro_batch_size=rows, rank=rank, num_ranks=settings.data_parallel_size
    )
    numbers = np.asarray(list(islice(sampler, num_microbatches)), dtype=np.int64).reshape(-1, rows)
    lengths = dataset.lengths(numbers)
    padded = [padded_length(int(longest), settings) for longest in lengths.max(axis=1, initial=0)]
    if not settings.data.pack_sequences:
        return [(each, float(rows * each**2)) for each in padded]
    squares = (dataset.squares(numbers) + (np.asarray(padded)[:, None] - lengths) ** 2.0).sum(axis=1)
    return list(zip(padded, squares.tolist(), strict=True))


def num_tokens(dataset: Any, settings: Settings, *, consumed: int, samples: int) -> int:
    """Tokens of the next `samples` samples, without padding. Arguments as in `microbatch_lengths`."""
    if not settings.data.reads_documents:
        return samples * settings.model.seq_length
    return int(dataset.lengths(np.arange(consumed, consumed + samples)).sum())
