"""Conversations of --sft: what lines may be, what counts in the loss, and that they are tokenized once."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.zerobubble.errors import ConfigError, DataError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.config.tokenizer import TokenizerConfig
from megatron.zerobubble.training.data.conversations import Conversation, Message, conversations, count_conversations
from tests.support.datasets import write_lines
from tests.training.launch import TINY_MODEL

with quiet_third_parties():
    from megatron.zerobubble.training.data.build_tokenizer import build_tokenizer, check_data_matches, end_of_document
    from megatron.zerobubble.training.data.conversation_tokens import conversation_ids, tokenized_prefix
    from megatron.zerobubble.training.data.microbatch_lengths import sample_lengths
    from megatron.zerobubble.training.data.samples import build_datasets

PAIR = {"prompt": "1 + 1 = ", "response": "2"}
CHAT = {
    "messages": [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "Thanks."},
    ]
}


def settings(path: str, *flags: str) -> Settings:
    argv = [*TINY_MODEL, "--micro-batch-size", "1", "--global-batch-size", "2", "--lr", "1e-3", "--calculate-per-token-loss"]
    argv += ["--train-iters", "4", "--eval-iters", "0", "--split", "1,0,0", "--sft", "--data-path", path]
    return settings_from_argv([*argv, *flags], world_size=1)


def ids_of(line: dict[str, Any], tokenizer: Any, folder: Path) -> tuple[list[int], list[bool]]:
    """The tokens of a line, and which of them count."""
    (conversation,) = conversations(write_lines(folder / "line.jsonl", [line]))
    ids = conversation_ids(conversation, tokenizer, end=end_of_document(tokenizer, "a test looks"))
    assert ids.dtype == np.int32
    return np.where(ids < 0, -1 - ids, ids).tolist(), (ids >= 0).tolist()


def test_both_forms_are_read(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "both.jsonl", [PAIR, "", CHAT])
    pair, chat = conversations(path)
    assert pair == Conversation(
        (Message("user", "1 + 1 = "), Message("assistant", "2")), is_pair=True, place=f"--sft --data-path {path}, line 1"
    )
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert (chat.is_pair, chat.place) == (False, f"--sft --data-path {path}, line 3")
    assert count_conversations(path) == 2
    packed = tmp_path / "both.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(path).read_bytes()))
    assert count_conversations(str(packed)) == 2


def test_only_answers_count(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(TokenizerConfig())
    ids, counts = ids_of(PAIR, tokenizer, tmp_path)
    assert bytes(ids) == b"1 + 1 = 2\0"
    assert bytes(np.asarray(ids)[counts].tolist()) == b"2\0"
    ids, counts = ids_of(CHAT, tokenizer, tmp_path)
    assert bytes(ids) == b"System: Count.\nUser: 1 + 1?\nAssistant: two\0User: 1 + 2?\nAssistant: three\0"
    assert bytes(np.asarray(ids)[counts].tolist()) == b"two\0three\0"


ANSWER = {"role": "assistant", "content": "yes"}
ASK = {"role": "user", "content": "Well?"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2: not JSON \("),
        ("[" * 100_000, r"line 2: not JSON \("),
        ("[1]", r"line 2: not an object with messages, or with prompt and response"),
        ({"text": "a"}, r"line 2: not an object with messages, or with prompt and response"),
        ({"messages": [ASK, ANSWER], "prompt": "a"}, r"line 2: not an object with messages, or with prompt and response"),
        ({"messages": []}, r"line 2: messages must be a list that is not empty"),
        ({"messages": "a"}, r"line 2: messages must be a list that is not empty"),
        ({"messages": [ASK, {"content": "a"}]}, r"line 2, message 2: no role; give an object with role and content"),
        ({"messages": [ASK, "a"]}, r"line 2, message 2: no role; give an object with role and content"),
        ({"messages": [{"role": "asistant", "content": "a"}]}, r"line 2, message 1: the role 'asistant' is not one of system, "),
        ({"messages": [{"role": "user", "content": None}]}, r"line 2, message 1: content must be a text"),
        ({"messages": [ASK, {"role": "assistant", "content": ""}]}, r"line 2, message 2: the content of an answer must not be"),
        ({"messages": [ASK]}, r"line 2: no message has the role assistant: nothing but a prompt"),
        ({"messages": [ANSWER, ASK]}, r"line 2: the first message has the role assistant, and answers nothing"),
        ({"prompt": "a"}, r"line 2: response must be a text that is not empty"),
        ({"prompt": "a", "response": ""}, r"line 2: response must be a text that is not empty"),
        ({"prompt": 1, "response": "a"}, r"line 2: prompt must be a text that is not empty"),
    ],
)
def test_a_bad_line_is_named_before_anything_starts(tmp_path: Path, line: object, message: str) -> None:
    path = write_lines(tmp_path / "bad.jsonl", [PAIR, line])
    with pytest.raises(DataError, match=rf"--sft --data-path \S*bad\.jsonl, {message}"):
        settings(path)


def test_files_that_have_no_conversations(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.jsonl does not exist; give a file with one JSON object a line"):
        settings(str(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match=r"empty\.jsonl has no lines"):
        settings(write_lines(tmp_path / "empty.jsonl", ["", " "]))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl, line 1: byte 13 of the line, 0xe9, is not UTF-8"):
        settings(str(tmp_path / "latin.jsonl"))
    with pytest.raises(DataError, match=r"--split '1,0,0' leaves|--split '9,1,0' leaves none of the 1 document\(s\)"):
        settings(write_lines(tmp_path / "one.jsonl", [PAIR]), "--split", "9,1,0", "--eval-iters", "1")


def test_conversations_are_tokenized_once(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "some.jsonl", [PAIR] * 3)
    given = settings(path)
    tokenizer = build_tokenizer(given.tokenizer)
    with pytest.raises(DataError, match=r"some\.jsonl\.\w+\.idx is not on this machine; rank 0 tokenizes for all ranks"):
        build_datasets(given, tokenizer, reads=True)
    check_data_matches(given, tokenizer, is_first=False)
    assert [file.name for file in tmp_path.iterdir()] == ["some.jsonl"], "one rank writes"
    check_data_matches(given, tokenizer)
    prefix = tokenized_prefix(path, given, tokenizer)
    assert {file.name for file in tmp_path.iterdir()} == {"some.jsonl", *(Path(f"{prefix}.{end}").name for end in ("bin", "idx"))}
    written = Path(f"{prefix}.idx").stat().st_mtime_ns
    check_data_matches(given, tokenizer)
    assert Path(f"{prefix}.idx").stat().st_mtime_ns == written
    train = build_datasets(given, tokenizer, reads=True).train
    assert sample_lengths(train).tolist() == [9] * 8
    assert bytes(train[0]["tokens"].tolist()) == b"1 + 1 = 2"
    assert bytes(train[0]["labels"].tolist()) == b" + 1 = 2\0"
    assert train[0]["loss_mask"].tolist() == [0.0] * 7 + [1.0, 1.0]
    write_lines(Path(path), [PAIR] * 4)
    assert tokenized_prefix(path, given, tokenizer) != prefix, "another version of the file"


@pytest.mark.slow
def test_other_processes_tokenize_a_large_file_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [PAIR | {"response": str(number)} for number in range(250)]
    path = write_lines(tmp_path / "large.jsonl", lines)
    module = "megatron.zerobubble.training.data.conversation_tokens"
    given = settings(path)
    tokenizer = build_tokenizer(given.tokenizer)
    check_data_matches(given, tokenizer)
    prefix = tokenized_prefix(path, given, tokenizer)
    alone = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.idx").unlink()
    monkeypatch.setattr(f"{module}._FEW", 10)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    check_data_matches(given, tokenizer)
    assert Path(f"{prefix}.bin").read_bytes() == alone
    assert Path(f"{prefix}.idx").is_file()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "some.jsonl", [PAIR])
    given = settings(path)
    tokenizer = build_tokenizer(given.tokenizer)
    Path(f"{tokenized_prefix(path, given, tokenizer)}.{os.getpid()}.bin").mkdir()  # in place of a folder that is read-only
    with pytest.raises(DataError, match=r"some\.jsonl: its tokens cannot be written to .*; give --data-cache-path DIR"):
        check_data_matches(given, tokenizer)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--pack-sequences --micro-batch-size 2",
            "--pack-sequences puts several documents into one row: give --micro-batch-size 1",
        ),
        (
            "--pack-sequences --context-parallel-size 2",
            "--pack-sequences does not go with --context-parallel-size 2: ranks share",
        ),
        ("--pack-sequences --multi-latent-attention", "--pack-sequences does not go with --multi-latent-attention"),
        (
            "--pack-sequences --mtp-num-layers 1 --position-embedding-type rope",
            "--pack-sequences does not go with --mtp-num-layers",
        ),
        ("--pack-sequences --attention-backend local", "--pack-sequences does not go with --attention-backend local, which has"),
        (
            "--eod-mask-loss",
            "--eod-mask-loss is for samples with parts of several documents|--eod-mask-loss is for samples that run",
        ),
        (
            "--reset-position-ids",
            "--reset-position-ids is for samples that run across documents, and --sft keeps documents apart",
        ),
        ("--log-throughput", "--log-throughput counts the FLOPs of samples of --seq-length tokens, and with --sft they differ"),
        ("--pad-length-multiple 4", "--pad-length-multiple 4 needs --variable-seq-lengths"),
        ("--pad-length-multiple 0", "--pad-length-multiple 0 must be greater than 0"),
        (
            "--variable-seq-lengths --pad-length-multiple 5",
            "--seq-length 32 is not divisible by --pad-length-multiple 5, .* 30 would be",
        ),
        (
            "--variable-seq-lengths --pipeline-model-parallel-size 2 --num-experts 2",
            "--variable-seq-lengths does not go with --moe-token-dispatcher-type allgather; choose alltoall",
        ),
    ],
)
def test_flags_that_do_not_go_together(tmp_path: Path, flags: str, message: str) -> None:
    path = write_lines(tmp_path / "some.jsonl", [PAIR] * 4)
    words = flags.split()
    with pytest.raises(ConfigError, match=message):
        settings_with_ranks(path, words, world_size=2 if any("parallel-size" in word for word in words) else 1)


def settings_with_ranks(path: str, flags: list[str], *, world_size: int) -> Settings:
    argv = [*TINY_MODEL, "--micro-batch-size", "1", "--global-batch-size", "4", "--lr", "1e-3", "--calculate-per-token-loss"]
    argv += ["--train-iters", "4", "--eval-iters", "0", "--split", "1,0,0", "--sft", "--data-path", path]
    return settings_from_argv([*argv, *flags], world_size=world_size)


def test_the_loss_must_be_per_token(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "some.jsonl", [PAIR])
    argv = [*TINY_MODEL, "--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "4", "--sft", "--data-path", path]
    with pytest.raises(ConfigError, match=r"--sft needs --calculate-per-token-loss: .*; add it"):
        settings_from_argv(argv, world_size=1)
    with pytest.raises(ConfigError, match="--variable-seq-lengths reads documents, and --mock-data has none; give --data-path"):
        settings_from_argv([*argv[:-3], "--mock-data", "--variable-seq-lengths"], world_size=1)
