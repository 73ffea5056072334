"""Samples: megatron-core's GPT datasets, in an order that depends only on the number of consumed samples.

Every rank that needs a batch reads it itself: which samples it has follows from the consumed samples and the data-parallel rank.
So the ranks of a tensor-parallel group, and the first and last stage of a pipeline, read the same ones without a broadcast, and a
run that continues from a checkpoint continues in the data where it stopped.

Shapes: b microbatch size, s sequence length on this rank.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import _IndexReader
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from torch.utils.data import DataLoader

from megatron.zerobubble.errors import ConfigError, DataError
from megatron.zerobubble.mcore.compat import with_arguments
from megatron.zerobubble.messages import one_line

__all__ = ["Batches", "build_datasets", "check_dataset", "chunk_reads", "iterators", "next_batch", "proportions"]

Batches = Iterator[dict[str, torch.Tensor]]


def check_dataset(prefix: str, split: Sequence[float]) -> None:
    """Check that the index of a dataset describes its tokens, and that the first split has documents.

    megatron-core takes the index at its word: lengths that are all 0, or a split without documents, make it search forever, and a
    wrong pointer reads other tokens without an error.

    Args:
        prefix: path of the dataset, without .idx and .bin.
        split: proportions of training, validation and test documents; the first ones must have some.

    Raises:
        DataError: a file is missing or damaged, or the two do not belong together.
    """
    for suffix in (".idx", ".bin"):
        if not Path(prefix + suffix).is_file():
            raise DataError(
                f"--data-path {prefix}: {prefix}{suffix} does not exist; make the dataset by tools/preprocess_data.py"
            )
    try:
        index = _IndexReader(f"{prefix}.idx", multimodal=False)
        lengths, pointers = index.sequence_lengths, index.sequence_pointers
        ends = np.cumsum(lengths, dtype=np.int64) * index.dtype_size
        is_whole = lengths.min() > 0 and np.array_equal(pointers, ends - lengths * np.int64(index.dtype_size))
        is_whole = is_whole and ends[-1] == Path(f"{prefix}.bin").stat().st_size and index.document_indices[-1] == len(lengths)
    except Exception as error:  # megatron-core and numpy raise several kinds on a file that is cut short or is no index
        raise DataError(f"{prefix}.idx cannot be read: {one_line(str(error)) or type(error).__name__}") from error
    if not is_whole:
        raise DataError(f"{prefix}.idx is damaged or does not belong to {prefix}.bin: preprocess the text again")
    shares = itertools.accumulate((share / sum(split) for share in split), initial=0.0)
    cuts = [round(share * float(len(lengths))) for share in shares]  # as megatron-core cuts
    for name, share, (begin, end) in zip(("training", "validation"), split, itertools.pairwise(cuts), strict=False):
        if share and begin == end:
            raise DataError(f"--split leaves none of the {len(lengths)} documents of {prefix} for {name}; give a larger share")


def proportions(text: str) -> list[float]:
    """The three proportions of --split. Raises ConfigError."""
    try:
        weights = [float(word) for word in text.replace("/", ",").split(",")]
    except ValueError:
        weights = []
    if not (0 < len(weights) <= 3 and min(weights) >= 0 and 0 < weights[0] < float("inf") and sum(weights) < float("inf")):
        raise ConfigError(f"--split {text!r} must be up to three proportions, of which the first is for training, such as 98,2,0")
    return [*weights, 0.0, 0.0][:3]


def build_datasets(args: argparse.Namespace, tokenizer: Any, *, reads: bool) -> tuple[Any, Any]:
    """Training and validation samples; None on ranks that read none. All ranks must call this.

    Args:
        args: the flags.
        tokenizer: has the token ids of end of document and padding.
        reads: whether this rank reads samples.
    """
    sizes = [args.train_iters * args.global_batch_size, args.eval_iters * args.global_batch_size]
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=([args.data_path], None) if args.data_path else None,
        split=args.split if args.data_path else None,
        path_to_cache="",  # in memory; None is a directory beside the dataset, which rank 0 alone writes
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    if config.split_matrix is not None:  # splits that are not read are not built
        train, valid, _ = config.split_matrix
        config.split_matrix = [train, valid if args.eval_iters > 0 else None, None]
    logging.getLogger("megatron.core.datasets.gpt_dataset").setLevel(logging.ERROR)  # warns of indices in memory
    kind = MockGPTDataset if args.mock_data else GPTDataset
    built = BlendedMegatronDatasetBuilder(kind, [*map(_at_least_one, sizes), 1], lambda: reads, config).build()
    for dataset in built:
        if dataset is not None:
            # megatron-core keeps the first sample's loss mask for the others, and then masks that sample's padding tokens in it:
            # at those places no other sample counts any more, so the loss depends on where the process began to read.
            dataset.masks_and_position_ids_are_cacheable = False
    return built[0], built[1]


def _at_least_one(size: int) -> int:
    return max(1, size)


def chunk_reads(chunk: Any) -> bool:
    """Whether a chunk reads samples: the first stage reads tokens, the last one labels, and MTP layers both."""
    stage = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    return bool(stage.pre_process or stage.post_process or getattr(stage, "mtp_process", False))


def iterators(dataset: Any, args: argparse.Namespace, chunks: Sequence[Any], *, consumed: int, vocab_size: int) -> Any:
    """One iterator over microbatches per model chunk, in the form that megatron-core's schedules take.

    Microbatch k of data-parallel rank r of dp has the b samples from ``consumed + (k * dp + r) * b`` on, so a global batch is the
    same set of samples for every data-parallel size.

    Args:
        dataset: samples; None on a rank that reads none.
        args: the flags.
        chunks: this rank's.
        consumed: samples consumed so far by all ranks together.
        vocab_size: token ids that data may have.
    """
    b, ranks = args.micro_batch_size, args.data_parallel_size
    starts = range(
        consumed + parallel_state.get_data_parallel_rank() * b, 0 if dataset is None else len(dataset) - b + 1, b * ranks
    )

    def read() -> Batches:
        loader = DataLoader(
            dataset,
            batch_sampler=[list(range(start, start + b)) for start in starts],
            num_workers=args.num_workers,
            pin_memory=not args.on_cpu,
            generator=torch.Generator(),  # its own: reading samples must not advance the rank's generator
        )
        return _checked(iter(loader), args.data_path, vocab_size)

    found = [read() if chunk_reads(chunk) else None for chunk in chunks]
    return found if len(found) > 1 else found[0]


def _checked(batches: Batches, prefix: str | None, vocab_size: int) -> Batches:
    """Raise DataError for token ids outside of the vocabulary: an embedding would name no data, or train on in its padding."""
    for batch in batches:
        for name in ("tokens", "labels"):
            low, high = map(int, torch.aminmax(batch[name]))
            if low < 0 or high >= vocab_size:
                raise DataError(
                    f"{prefix}.bin has the token {low if low < 0 else high}, and the vocabulary has {vocab_size}, from 0 on: "
                    "give the tokenizer and --vocab-size that the data was made with, or preprocess the text again"
                )
        yield batch


def next_batch(batches: Batches | None) -> dict[str, Any]:
    """This rank's part of the next microbatch on its device, each [b, s]; None for each where a chunk reads no samples."""
    names = ("tokens", "position_ids", "labels", "loss_mask")
    if batches is None:
        return dict.fromkeys(names)
    read = next(batches)
    own = {name: read[name].to(torch.cuda.current_device(), non_blocking=True) for name in names}
    context = parallel_state.get_context_parallel_group()
    return dict(with_arguments(get_batch_on_this_cp_rank, {"is_hybrid_cp": False})(own, cp_group=context))
