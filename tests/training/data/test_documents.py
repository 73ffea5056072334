"""Documents as samples: what is in them, their order, how they are packed, and that their lengths are known without tokens."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron.zerobubble.errors import ConfigError, DataError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings
from tests.support.datasets import random_documents, write_documents
from tests.training.launch import TINY_MODEL

with quiet_third_parties():
    from megatron.zerobubble.mcore.microbatches.length_exchange import lengths_of
    from megatron.zerobubble.mcore.microbatches.ready import thd_tokens
    from megatron.zerobubble.training.data.build_tokenizer import build_tokenizer
    from megatron.zerobubble.training.data.documents import next_fit
    from megatron.zerobubble.training.data.microbatch_lengths import length_multiple, num_tokens
    from megatron.zerobubble.training.data.samples import build_datasets, chunk_iterators, next_batch

SEQ_LENGTH = 32
LENGTHS = [1, 2, 5, 9, 17, 32, 33, 34, 65, 100, 3, 8, 1, 20, 30, 12]
"""Tokens of the documents: too short, just as long as a sample, one more, several samples."""
DOCUMENTS = random_documents(LENGTHS)
NUM_LABELS = sum(length - 1 for length in LENGTHS)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_documents(tmp_path_factory.mktemp("documents") / "some", DOCUMENTS)


def settings(prefix: str, *flags: str, micro: int = 2, batch: int = 4, world_size: int = 1) -> Settings:
    argv = [*TINY_MODEL, "--micro-batch-size", str(micro), "--global-batch-size", str(batch), "--lr", "1e-3"]
    argv += ["--calculate-per-token-loss", "--train-iters", "40", "--eval-iters", "0", "--split", "1,0,0"]
    return settings_from_argv([*argv, "--data-path", prefix, *flags], world_size=world_size)


def sample_lengths(train: Any) -> Any:
    return train.lengths(np.arange(len(train)))


def dataset(given: Settings) -> Any:
    return build_datasets(given, build_tokenizer(given.tokenizer), reads=True).train


def pairs(sample: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    return list(zip(sample["tokens"].tolist(), sample["labels"].tolist(), strict=True))


@pytest.mark.claims(
    "Long runs",
    "documents as samples: every token with a label once per epoch, the order from the number of the sample, lengths known "
    "without tokens, tokens outside of the vocabulary",
    "works",
)
@pytest.mark.parametrize("flag", ["--variable-seq-lengths", "--pack-sequences"])
def test_an_epoch_reads_every_token_that_has_a_label_once(prefix: str, flag: str) -> None:
    train = dataset(settings(prefix, flag, micro=1))
    for epoch in range(2):
        samples = [train[epoch * train.num_rows + number] for number in range(train.num_rows)]
        read = Counter(pair for sample in samples for pair in pairs(sample))
        assert read == Counter(pair for document in DOCUMENTS for pair in pairwise(document))
        assert sum(int(sample["loss_mask"].sum()) for sample in samples) == NUM_LABELS


def test_a_long_document_becomes_several_samples(prefix: str) -> None:
    train = dataset(settings(prefix, "--variable-seq-lengths"))
    lengths = [len(train[number]["tokens"]) for number in range(train.num_rows)]
    pieces = [min(SEQ_LENGTH, length - 1 - begin) for length in LENGTHS for begin in range(0, length - 1, SEQ_LENGTH)]
    assert sorted(lengths) == sorted(pieces)
    assert max(lengths) == SEQ_LENGTH
    assert sample_lengths(train)[: train.num_rows].tolist() == lengths
    assert sample_lengths(train).dtype == np.int64


def test_the_order_follows_from_the_number_of_the_sample_and_the_seed(prefix: str) -> None:
    first, again = (dataset(settings(prefix, "--variable-seq-lengths")) for _ in range(2))
    numbers = [70, 3, 45, 100, 3]
    for number in numbers:  # whatever was read before
        assert first[number]["tokens"].tolist() == again[number]["tokens"].tolist()
        assert again[0]["tokens"].tolist() == first[0]["tokens"].tolist()
    rows = first.num_rows
    orders = [sample_lengths(first)[epoch * rows : (epoch + 1) * rows].tolist() for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    other = dataset(settings(prefix, "--variable-seq-lengths", "--seed", "7"))
    assert sample_lengths(other)[:rows].tolist() != orders[0]


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        ([4, 4, 4], [0, 2, 3]),
        ([8, 1, 8, 7, 1], [0, 1, 2, 3, 5]),
        ([3], [0, 1]),
        ([2, 2, 2, 2, 1], [0, 4, 5]),
        ([], [0]),
    ],
)
def test_rows_are_filled_in_order(lengths: list[int], starts: list[int]) -> None:
    assert next_fit(np.asarray(lengths, dtype=np.int64), 8).tolist() == starts


def test_packed_documents_restart_their_positions(prefix: str) -> None:
    train = dataset(settings(prefix, "--pack-sequences", micro=1))
    several = 0
    for number in range(train.num_rows):
        sample = train[number]
        bounds = sample["cu_seqlens"].tolist()
        assert bounds[0] == 0
        assert bounds[-1] == len(sample["tokens"]) <= SEQ_LENGTH
        lengths = [end - begin for begin, end in pairwise(bounds)]
        assert sample["position_ids"].tolist() == [position for length in lengths for position in range(length)]
        several += len(lengths) > 1
    assert several >= 3
    assert train.num_rows < dataset(settings(prefix, "--variable-seq-lengths")).num_rows


MODES = {
    "padded": (["--variable-seq-lengths"], 2),
    "packed": (["--variable-seq-lengths", "--pack-sequences"], 1),
    "packed, padded to --seq-length": (["--pack-sequences"], 1),
}


@pytest.mark.parametrize("mode", MODES)
def test_lengths_are_those_of_the_batches(prefix: str, mode: str) -> None:
    flags, micro = MODES[mode]
    given = settings(prefix, *flags, micro=micro)
    train = dataset(given)
    for batch in islice(chunk_iterators(train, given, reads_by_chunk=[True], consumed=0, rank=0, on_gpu=False), 3):
        length = batch["tokens"].shape[1]
        ends = batch.get("cu_seqlens", torch.tensor([[0, length]]))[0]
        assert int(ends[-1]) == length, "the padding is a sequence, too"
        assert lengths_of(thd_tokens, batch, 0) == (length, float((ends.diff().double() ** 2).sum()))
    assert num_tokens(train, given, consumed=4, samples=8) == sample_lengths(train)[4:12].sum()


def test_a_batch_is_padded_to_its_longest_sample(prefix: str) -> None:
    given = settings(prefix, "--variable-seq-lengths")
    train = dataset(given)
    iterator = chunk_iterators(train, given, reads_by_chunk=[True], consumed=0, rank=0, on_gpu=False)
    lengths = set()
    for number, batch in enumerate(islice(iterator, 8)):
        own = [len(train[2 * number + row]["tokens"]) for row in range(2)]
        length = max(own)
        lengths.add(length)
        names = ("tokens", "labels", "loss_mask", "position_ids")
        assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == dict.fromkeys(names, (2, length))
        assert batch["position_ids"].tolist() == [list(range(length))] * 2
        for row in range(2):
            assert batch["loss_mask"][row].tolist() == [1.0] * own[row] + [0.0] * (length - own[row])
            assert batch["tokens"][row, : own[row]].tolist() == train[2 * number + row]["tokens"].tolist()
            assert not batch["tokens"][row, own[row] :].any()
            assert not batch["labels"][row, own[row] :].any()
    assert len(lengths) > 1


def test_a_middle_stage_gets_where_documents_begin(prefix: str) -> None:
    given = settings(prefix, "--pack-sequences", micro=1)
    iterator = chunk_iterators(dataset(given), given, reads_by_chunk=[True], consumed=0, rank=0, on_gpu=False)
    batch = next_batch(iterator, device=torch.device("cpu"), embeds=False, is_last_stage=False)
    assert batch.tokens is None
    packed = batch.packed_seq_params
    assert packed is not None
    assert (packed.qkv_format, packed.cu_seqlens_q.dtype) == ("thd", torch.int32)
    assert packed.max_seqlen_q == packed.max_seqlen_kv == int(packed.cu_seqlens_q.diff().max())
    assert int(packed.cu_seqlens_kv[-1]) == SEQ_LENGTH


@pytest.mark.parametrize(
    ("flags", "world_size", "multiple"),
    [
        ("", 1, 1),
        ("--context-parallel-size 2", 2, 4),
        ("--tensor-model-parallel-size 2", 2, 1),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2, 2),
        ("--tensor-model-parallel-size 4 --sequence-parallel --context-parallel-size 2", 8, 8),
    ],
)
def test_lengths_divide_over_the_ranks_that_share_sequences(prefix: str, flags: str, world_size: int, multiple: int) -> None:
    given = settings(prefix, "--variable-seq-lengths", *flags.split(), micro=1, world_size=world_size)
    assert length_multiple(given.parallel) == multiple


def test_samples_are_read_by_other_processes(prefix: str) -> None:
    train = dataset(settings(prefix, "--variable-seq-lengths"))
    tokens = train[5]["tokens"].tolist()
    assert pickle.loads(pickle.dumps(train))[5]["tokens"].tolist() == tokens


def test_padding_in_a_dataset_does_not_count(tmp_path: Path) -> None:
    given = settings(write_documents(tmp_path / "padded", [[5, 6, -1, -1]]), "--variable-seq-lengths")
    sample = dataset(given)[0]
    assert sample["tokens"].tolist() == [5, 6, 0]
    assert sample["labels"].tolist() == [6, 0, 0]
    assert sample["loss_mask"].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("flag", ["--variable-seq-lengths", "--pack-sequences"])
def test_a_token_outside_of_the_vocabulary_is_found(tmp_path: Path, flag: str) -> None:
    documents = [[7, 8], [2] * 40 + [300, 3]]
    given = settings(write_documents(tmp_path / "wrong", documents), flag, micro=1)
    iterator = chunk_iterators(dataset(given), given, reads_by_chunk=[True], consumed=0, rank=0, on_gpu=False)
    with pytest.raises(DataError, match=r"wrong\.bin: a document has the token 300, and the vocabulary has 256"):
        list(islice(iterator, 4))


def test_documents_that_are_cut_or_left_out_are_counted(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        dataset(settings(prefix, "--variable-seq-lengths"))
        dataset(settings(prefix, "--variable-seq-lengths", "--split", "2,6,8", "--seq-length", "64"))
    said = [message for message in caplog.messages if "document(s)" in message]
    assert said == [
        "train: 3 document(s) were cut, which are longer than --seq-length 32",
        "train: 2 document(s) were left out, which have one token and so nothing to predict",
        "train: 1 document(s) were left out, which have one token and so nothing to predict",
    ]


def test_documents_without_labels(tmp_path: Path) -> None:
    short = write_documents(tmp_path / "short", [[5], [6], [7]])
    with pytest.raises(DataError, match=r"short: none of the 3 document\(s\) for train has a second token"):
        settings(short, "--variable-seq-lengths")


def test_equal_lengths_are_known_without_a_dataset(prefix: str) -> None:
    given = settings(prefix)
    assert num_tokens(None, given, consumed=0, samples=4) == 4 * 32


@pytest.mark.claims(
    "Long runs",
    "`--pack-sequences` with context parallelism, MLA, MTP, `--attention-backend local`; flags that do not go together",
    "rejected",
)
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pack-sequences --micro-batch-size 2", "--pack-sequences puts several documents into one row: give"),
        ("--pack-sequences --context-parallel-size 2", "--pack-sequences does not go with --context-parallel-size 2: ranks"),
        ("--pack-sequences --multi-latent-attention", "--pack-sequences does not go with --multi-latent-attention"),
        ("--pack-sequences --mtp-num-layers 1 --position-embedding-type rope", "does not go with --mtp-num-layers"),
        ("--pack-sequences --attention-backend local", "--pack-sequences does not go with --attention-backend local, which has"),
        ("--variable-seq-lengths --pipeline-model-parallel-size 2 --num-experts 2", "allgather; choose alltoall"),
    ],
)
def test_flags_that_do_not_go_together(prefix: str, flags: str, message: str) -> None:
    words = flags.split()
    with pytest.raises(ConfigError, match=message):
        settings(prefix, *words, micro=1, world_size=2 if any("parallel-size" in word for word in words) else 1)


def test_the_loss_must_be_per_token(prefix: str) -> None:
    argv = [*TINY_MODEL, "--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "4"]
    with pytest.raises(ConfigError, match=r"--pack-sequences needs --calculate-per-token-loss: .*; add it"):
        settings_from_argv([*argv, "--pack-sequences", "--data-path", prefix], world_size=1)
    with pytest.raises(ConfigError, match="--variable-seq-lengths reads documents, and --mock-data has none; give --data-path"):
        settings_from_argv([*argv, "--variable-seq-lengths", "--mock-data"], world_size=1)
