"""Samples: megatron-core's GPT datasets, in an order that depends only on the number of consumed samples.

Every rank that needs a batch reads it itself: the sampler is a pure function of (consumed samples, data-parallel rank), so
the ranks of a tensor-parallel group, and the first and last stage of a pipeline, read the same samples without a broadcast.
A run that continues from a checkpoint continues in the data where it stopped.

The ranks of a context-parallel group read the same samples, too, and each takes its slices of every sequence.

Shapes: b microbatch size, s sequence length on this rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.utils import get_attr_wrapped_model
from torch.utils.data import DataLoader, Sampler

from megatron.zerobubble.mcore.attention.sequence_parts import WHOLE, SequenceParts, slices
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.data.token_ids import checked_batches, vocabulary_size

__all__ = ["Batch", "ConsumedSamples", "Datasets", "build_datasets", "chunk_iterators", "chunk_reads", "next_batch"]

DataIterator = Iterator[dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Datasets:
    """Training and validation samples; None on ranks that read none."""

    train: Any | None
    """Samples of --train-iters global batches."""
    valid: Any | None
    """Samples of --eval-iters global batches."""


@dataclass(frozen=True)
class Batch:
    """One microbatch on the device of the rank. Tensors that a stage does not need are None."""

    tokens: torch.Tensor | None = None
    """[b, s], int64: token ids, for a stage that embeds."""
    position_ids: torch.Tensor | None = None
    """[b, s], int64: positions, for a stage that embeds."""
    labels: torch.Tensor | None = None
    """[b, s], int64: the next token ids, for the stage that computes the loss."""
    loss_mask: torch.Tensor | None = None
    """[b, s], float32: 1 for tokens whose loss counts, else 0."""


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


def build_datasets(settings: Settings, tokenizer: Any, *, reads: bool) -> Datasets:
    """Build the sample indices, in the memory of each rank that reads samples. All ranks must call this.

    Args:
        settings: paths and splits of the data, and the number of samples.
        tokenizer: provides the token ids of end of document and padding.
        reads: whether this rank reads samples.
    """
    data, run = settings.data, settings.run
    sizes = [max(1, samples) for samples in (settings.train_samples, run.eval_iters * settings.global_batch_size)]
    config = GPTDatasetConfig(
        random_seed=run.seed,
        sequence_length=settings.model.seq_length,
        blend=None if data.data_path is None else ([data.data_path], None),
        split=None if data.data_path is None else data.split_text,
        path_to_cache="",  # in memory; None is a directory beside the dataset, which rank 0 alone writes
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    if config.split_matrix is not None:  # splits that are not read are not built
        train, valid, _ = config.split_matrix
        config.split_matrix = [train, valid if run.eval_iters > 0 else None, None]
    dataset_class = MockGPTDataset if data.mock_data else GPTDataset
    logging.getLogger("megatron.core.datasets.gpt_dataset").setLevel(logging.ERROR)  # warns of indices that it builds in memory
    built = BlendedMegatronDatasetBuilder(dataset_class, [*sizes, 1], lambda: reads, config).build()
    for dataset in built:
        if dataset is not None:
            # megatron-core keeps the first sample's loss mask for the others, and then masks that sample's padding tokens in it:
            # at those places no other sample counts any more, so the loss depends on where the process began to read.
            dataset.masks_and_position_ids_are_cacheable = False
    return Datasets(built[0], built[1])


def chunk_reads(chunk: Any) -> bool:
    """Whether a chunk reads samples: the first stage reads tokens, the last one labels."""
    stage = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    return bool(stage.pre_process or stage.post_process)


def chunk_iterators(
    dataset: Any | None,
    settings: Settings,
    *,
    reads_by_chunk: Sequence[bool],
    consumed: int,
    rank: int,
    on_gpu: bool,
) -> DataIterator | list[DataIterator | None] | None:
    """One iterator over microbatches per model chunk, in the form that megatron-core's schedules take.

    Args:
        dataset: samples, or None on a rank that reads none.
        settings: microbatch size and data loader processes.
        reads_by_chunk: per chunk of this rank, whether it reads samples.
        consumed: samples consumed so far by all ranks together.
        rank: data-parallel rank.
        on_gpu: whether to pin host memory.

    Returns:
        One iterator if the rank has one chunk, else a list of them; None for a chunk that reads no samples. They raise DataError
        for tokens outside of the vocabulary.
    """

    def iterate() -> DataIterator:
        assert dataset is not None
        sampler = ConsumedSamples(
            consumed=consumed,
            total=len(dataset),
            micro_batch_size=settings.data.micro_batch_size,
            rank=rank,
            num_ranks=settings.data_parallel_size,
        )
        loader = iter(
            DataLoader(
                dataset,
                batch_sampler=sampler,
                num_workers=settings.data.num_workers,
                pin_memory=on_gpu,
                generator=torch.Generator(),  # its own: reading samples must not advance the rank's generator
            )
        )
        if settings.data.data_path is None:
            return loader
        size = vocabulary_size(settings, dataset.config.tokenizer)
        return checked_batches(loader, prefix=settings.data.data_path, size=size)

    iterators = [iterate() if reads else None for reads in reads_by_chunk]
    return iterators if len(iterators) > 1 else iterators[0]


def next_batch(
    iterator: DataIterator | None,
    *,
    device: torch.device,
    embeds: bool,
    is_last_stage: bool,
    parts: SequenceParts = WHOLE,
) -> Batch:
    """Read the next microbatch and copy the tensors that the stage needs, in the slices of this rank, to the device.

    Args:
        iterator: samples of this model chunk; None if it reads none.
        device: device of the tensors.
        embeds: whether the stage embeds tokens: the first one, and one with MTP layers.
        is_last_stage: whether the stage computes the loss.
        parts: which slices of a sequence this rank holds; by default all of it.
    """
    if iterator is None:
        return Batch()
    sample = next(iterator)
    wanted: list[str] = []
    if embeds:
        wanted += ["tokens", "position_ids"]
    if is_last_stage:
        wanted += ["labels", "loss_mask"]
    own = {name: slices(sample[name], parts, dim=1) for name in wanted}
    return Batch(**{name: tensor.to(device, non_blocking=True) for name, tensor in own.items()})
