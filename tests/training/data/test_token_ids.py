"""Token ids outside of the vocabulary are named with document and position: before the job starts, and in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings
from tests.training.launch import TINY_BATCH, TINY_MODEL

with quiet_third_parties():
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from megatron.zerobubble.training.data.build_tokenizer import build_tokenizer
    from megatron.zerobubble.training.data.samples import build_datasets, chunk_iterators
    from megatron.zerobubble.training.data.token_ids import check_small_dataset

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


class Tokenizer:
    """Only the vocabulary's size, which megatron-core's null tokenizer counts differently from release to release."""

    vocab_size = VOCABULARY


@pytest.mark.parametrize(("at", "token"), [((0, 0), 100), ((7, 49), 4711), ((39, 49), -2), ((20, 0), 2**31 - 1)])
def test_a_small_dataset_is_searched_before_the_job_starts(tmp_path: Path, at: tuple[int, int], token: int) -> None:
    given = settings(write(tmp_path, at=at, token=token))
    document, position = at
    with pytest.raises(
        DataError,
        match=rf"data\.bin: document {document} has the token {token} at position {position}, and the vocabulary has 100",
    ):
        check_small_dataset(given, Tokenizer())
    check_small_dataset(given, Tokenizer(), at_most_bytes=DOCUMENTS * LENGTH * 4 - 1)  # too large to be searched


@pytest.mark.parametrize("token", [0, 99, -1])
def test_tokens_of_the_vocabulary_and_padding_pass(tmp_path: Path, token: int) -> None:
    check_small_dataset(settings(write(tmp_path, at=(3, 3), token=token)), Tokenizer())


def batches(given: Settings) -> list[dict[str, Any]]:
    datasets = build_datasets(given, build_tokenizer(given.tokenizer), reads=True)
    iterator = chunk_iterators(datasets.train, given, reads_by_chunk=[True], consumed=0, rank=0, on_gpu=False)
    assert iterator is not None
    return list(iterator)  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", [(), ("--num-workers", "1"), ("--no-mmap-bin-files",)])
def test_a_batch_names_the_document(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """6 iterations of 8 samples of 32 tokens read 1536 of 2000 tokens."""
    found = None
    for document in (7, 8, 9, 10, 11):  # samples are shuffled; not all of them are read
        bad = write(tmp_path, at=(document, 10), token=4711)
        try:
            batches(settings(bad, flags=flags))
        except DataError as error:
            found = str(error)
            break
    assert found is not None
    assert f"{bad}.bin: document {document} has the token 4711 at position 10, and the vocabulary has 10" in found
    assert "\n" not in found


def test_batches_are_what_the_dataset_has(tmp_path: Path) -> None:
    given = settings(write(tmp_path))
    dataset = build_datasets(given, build_tokenizer(given.tokenizer), reads=True).train
    assert dataset is not None
    read = batches(given)
    assert len(read) == len(dataset) // 2
    for number, batch in enumerate(read):
        for row in range(2):
            assert batch["labels"][row].tolist() == dataset[2 * number + row]["labels"].tolist()
