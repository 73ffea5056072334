"""Samples of the reference trainer: a dataset that is damaged is refused by name, and all samples count as they should."""

from __future__ import annotations

import importlib
import shutil
import struct
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.zerobubble.errors import ConfigError, DataError
from megatron.zerobubble.training.data import _checked, build_datasets, check_dataset, proportions
from megatron.zerobubble.training.tokenizer import TokenizerConfig, build_tokenizer


def cut(prefix: Path) -> None:
    content = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(content[:-1])


def cut_index(prefix: Path) -> None:
    content = Path(f"{prefix}.idx").read_bytes()
    Path(f"{prefix}.idx").write_bytes(content[: len(content) // 2])


def no_index(prefix: Path) -> None:
    Path(f"{prefix}.idx").write_text("text")


def no_lengths(prefix: Path) -> None:
    _write(prefix, 34, 0)


def wrong_pointer(prefix: Path) -> None:
    count = struct.unpack_from("<Q", Path(f"{prefix}.idx").read_bytes(), 18)[0]
    _write(prefix, 34 + 4 * count + 8, 1)


def _write(prefix: Path, offset: int, value: int) -> None:
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    struct.pack_into("<i", content, offset, value)
    Path(f"{prefix}.idx").write_bytes(content)


@pytest.mark.parametrize(
    "harm", [cut, cut_index, no_index, no_lengths, wrong_pointer, lambda prefix: Path(f"{prefix}.bin").unlink()]
)
def test_a_damaged_dataset_is_refused_by_name(harm: Callable[[Path], None], corpus: str, tmp_path: Path) -> None:
    prefix = tmp_path / "copy"
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", f"{prefix}{suffix}")
    check_dataset(str(prefix), [0.9, 0.1])
    harm(prefix)
    with pytest.raises(DataError, match=str(prefix)):
        check_dataset(str(prefix), [0.9, 0.1])


def test_a_split_without_documents_is_refused(corpus: str) -> None:
    """megatron-core would search in it forever."""
    with pytest.raises(DataError, match=r"leaves none of the .* documents of .* for validation"):
        check_dataset(corpus, [1.0, 1e-9])
    assert proportions("98,2") == [98.0, 2.0, 0.0]
    for text in ("", "a", "1,2,3,4", "0,1", "1,-1", "nan"):
        with pytest.raises(ConfigError, match="must be up to three proportions"):
            proportions(text)


class _WithPadding:
    """A tokenizer whose padding token is in the text, as one that ends documents is."""

    def __init__(self, tokenizer: Any, pad: int) -> None:
        self._tokenizer, self.pad = tokenizer, pad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("is_mock", [False, True])
def test_a_loss_mask_does_not_depend_on_the_sample_that_was_read_first(is_mock: bool, corpus: str) -> None:
    """megatron-core masks the first sample's padding tokens in all others; a run that continues begins with another sample."""
    args = Namespace(train_iters=8, eval_iters=1, global_batch_size=8, seed=1, seq_length=32, split="80,20", mock_data=is_mock)
    args.data_path = None if is_mock else corpus
    tokenizer = build_tokenizer(TokenizerConfig())
    with_padding = _WithPadding(tokenizer, int(build_datasets(args, tokenizer, reads=True)[0][0]["labels"][3]))
    masks = []
    for first in (0, 8):
        samples, _ = build_datasets(args, with_padding, reads=True)
        masks.append({number: samples[number]["loss_mask"] for number in range(first, 16)})
    assert not masks[0][0].all(), "the first sample has a padding token"
    assert all(torch.equal(masks[0][number], masks[1][number]) for number in masks[1])


def test_tokens_outside_of_the_vocabulary_end_the_run() -> None:
    good = {"tokens": torch.tensor([[0, 9]]), "labels": torch.tensor([[1, 2]])}
    bad = good | {"labels": torch.tensor([[1, 10]])}
    batches = _checked(iter([good, bad]), "data/books", 10)
    assert next(batches) is good
    with pytest.raises(DataError, match=r"data/books\.bin has the token 10, and the vocabulary has 10"):
        next(batches)


def test_transformers_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it takes seconds on every rank, and megatron-core would wherever it is installed."""
    package = importlib.import_module("megatron.core.tokenizers.text")
    monkeypatch.setattr(package, "libraries", package.libraries)  # what is imported anew below is taken away at the end
    for name in list(sys.modules):
        if name.split(".")[0] == "transformers" or name.startswith("megatron.core.tokenizers.text.libraries"):
            monkeypatch.delitem(sys.modules, name)
    (tmp_path / "transformers.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert build_tokenizer(TokenizerConfig()).vocab_size == 256
