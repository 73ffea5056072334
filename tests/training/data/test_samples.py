"""The order of samples, the tensors that a stage reads, and token ids outside of the vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.data.index import split_documents
from tests.training.launch import TINY_BATCH, TINY_MODEL

with quiet_third_parties():
    from megatron.core.datasets.blended_megatron_dataset_config import convert_split_vector_to_split_matrix
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from megatron.zerobubble.training.data.build_tokenizer import build_tokenizer
    from megatron.zerobubble.training.data.samples import Batch, ConsumedSamples, build_datasets, chunk_iterators, next_batch


def microbatches(*, consumed: int, num_ranks: int, total: int = 48, micro: int = 2) -> list[list[list[int]]]:
    """The microbatches of each data-parallel rank."""
    return [
        list(ConsumedSamples(consumed=consumed, total=total, micro_batch_size=micro, rank=rank, num_ranks=num_ranks))
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_global_batch_is_the_same_set_of_samples_for_every_data_parallel_size(num_ranks: int) -> None:
    batch, per_rank = 16, 16 // 2 // num_ranks
    for step in range(3):
        samples = [
            sample
            for rank in microbatches(consumed=0, num_ranks=num_ranks)
            for microbatch in rank[step * per_rank : (step + 1) * per_rank]
            for sample in microbatch
        ]
        assert sorted(samples) == list(range(step * batch, (step + 1) * batch))


def test_a_run_continues_in_the_data_where_it_stopped() -> None:
    from_start = microbatches(consumed=0, num_ranks=2)
    resumed = microbatches(consumed=16, num_ranks=2)
    assert resumed == [rank[4:] for rank in from_start]


def test_the_data_parallel_size_may_change_in_between() -> None:
    """16 samples read by two ranks, then four continue: no sample is read twice or skipped."""
    first = [sample for rank in microbatches(consumed=0, num_ranks=2) for microbatch in rank[:4] for sample in microbatch]
    rest = [sample for rank in microbatches(consumed=16, num_ranks=4) for microbatch in rank for sample in microbatch]
    assert sorted(first + rest) == list(range(48))


def test_a_microbatch_is_never_short() -> None:
    sampler = ConsumedSamples(consumed=0, total=7, micro_batch_size=2, rank=0, num_ranks=1)
    assert list(sampler) == [[0, 1], [2, 3], [4, 5]]
    assert len(sampler) == 3


@pytest.mark.parametrize(
    ("first", "last", "names"),
    [
        (True, False, {"tokens", "position_ids"}),
        (False, True, {"labels", "loss_mask"}),
        (True, True, {"tokens", "position_ids", "labels", "loss_mask"}),
    ],
)
def test_a_stage_gets_what_it_needs(first: bool, last: bool, names: set[str]) -> None:
    sample = {name: torch.zeros(1) for name in Batch.__dataclass_fields__}
    batch = next_batch(iter([sample]), device=torch.device("cpu"), embeds=first, is_last_stage=last)
    assert {name for name in Batch.__dataclass_fields__ if getattr(batch, name) is not None} == names


def test_a_stage_in_the_middle_reads_nothing() -> None:
    batch = next_batch(None, device=torch.device("cpu"), embeds=False, is_last_stage=False)
    assert batch == Batch()


@pytest.mark.parametrize("num_documents", [1, 3, 50, 499, 500])
def test_splits_are_counted_as_megatron_core_cuts_them(num_documents: int) -> None:
    for weights in ((969.0, 30.0, 1.0), (90.0, 10.0, 0.0), (0.5, 0.25, 0.25), (0.0, 100.0, 0.0), (1.0, 1.0, 1.0)):
        matrix = convert_split_vector_to_split_matrix([weight / sum(weights) for weight in weights])
        cut = [0 if ends is None else round(ends[1] * num_documents) - round(ends[0] * num_documents) for ends in matrix]
        assert [len(documents) for documents in split_documents(num_documents, weights)] == cut


VOCABULARY = 100
DOCUMENTS, LENGTH = 40, 50


def write(folder: Path, *, at: tuple[int, int] = (0, 0), token: int = 5, dtype: type = np.int32) -> str:
    """A dataset of 40 documents of 50 tokens, with `token` in document and at position `at`; its prefix."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (DOCUMENTS, LENGTH)).astype(dtype)
    tokens[at] = token
    prefix = str(folder / "data")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in tokens:
        builder.add_document(document, [LENGTH])
    builder.finalize(f"{prefix}.idx")
    return prefix


def settings(prefix: str, flags: tuple[str, ...] = ()) -> Settings:
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCABULARY)]
    run = ["--train-iters", "6", "--eval-iters", "0", "--split", "100,0,0", *flags]
    return settings_from_argv([*TINY_MODEL, *TINY_BATCH, *tokenizer, *run, "--data-path", prefix], world_size=1)


def batches(given: Settings) -> list[dict[str, Any]]:
    datasets = build_datasets(given, build_tokenizer(given.tokenizer), reads=True)
    iterator = chunk_iterators(datasets.train, given, reads_by_chunk=[True], consumed=0, rank=0, on_gpu=False)
    assert iterator is not None
    return list(iterator)  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", [(), ("--num-workers", "1")])
def test_a_batch_with_a_token_outside_of_the_vocabulary_is_an_error(tmp_path: Path, flags: tuple[str, ...]) -> None:
    bad = write(tmp_path, at=(slice(None), 10), token=4711)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=rf"^{bad}\.bin has the token 4711, and the vocabulary has 10"):
        batches(settings(bad, flags=flags))


def test_batches_are_what_the_dataset_has(tmp_path: Path) -> None:
    given = settings(write(tmp_path))
    dataset = build_datasets(given, build_tokenizer(given.tokenizer), reads=True).train
    assert dataset is not None
    read = batches(given)
    assert len(read) == len(dataset) // 2
    for number, batch in enumerate(read):
        for row in range(2):
            assert batch["labels"][row].tolist() == dataset[2 * number + row]["labels"].tolist()
