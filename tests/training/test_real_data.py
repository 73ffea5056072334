"""Training on text: what is read, and jobs on datasets that cannot be."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training import config
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.config.tokenizer import TokenizerConfig
from tests.training.launch import TINY_BATCH, TINY_MODEL, metrics, train
from tests.training.test_same_settings import two_hosts
from tools.preprocess_data import Document, preprocess

with quiet_third_parties():
    from megatron.zerobubble.training.data.build_tokenizer import build_tokenizer
    from megatron.zerobubble.training.data.samples import build_datasets

RUN = [*TINY_MODEL, *TINY_BATCH, "--train-iters", "8", "--eval-interval", "8", "--eval-iters", "1"]
ZERO_BUBBLE = ["--pipeline-model-parallel-size", "2", "--enable-zero-bubble"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of this package's Python files; its prefix."""
    prefix = str(tmp_path_factory.mktemp("corpus") / "code")
    texts = (path.read_text(encoding="utf-8") for path in sorted(Path(config.__path__[0]).glob("*.py")))
    preprocess(documents=map(Document, texts), tokenizer=TokenizerConfig(), prefix=prefix, appends_eod=True)
    return prefix


def settings(*flags: str) -> Settings:
    return settings_from_argv([*RUN, *flags], world_size=1)


@pytest.mark.parametrize("is_mock", [False, True])
def test_a_loss_mask_does_not_depend_on_the_sample_that_was_read_first(is_mock: bool, corpus: str) -> None:
    """megatron-core masks the first sample's padding tokens in all others; a run that continues begins with another sample."""
    given = settings(*(["--mock-data"] if is_mock else ["--data-path", corpus, "--split", "80,20"]))
    tokenizer = build_tokenizer(given.tokenizer)
    with_padding = _WithPadding(tokenizer, int(build_datasets(given, tokenizer, reads=True).train[0]["labels"][3]))
    masks = []
    for first in (0, 8):
        train = build_datasets(given, with_padding, reads=True).train
        masks.append({sample: train[sample]["loss_mask"] for sample in range(first, 16)})
    assert not masks[0][0].all(), "the first sample has a padding token"
    assert all(torch.equal(masks[0][sample], masks[1][sample]) for sample in masks[1])


class _WithPadding:
    """A tokenizer whose padding token is in the text, as one that ends documents is."""

    def __init__(self, tokenizer: Any, pad: int) -> None:
        self._tokenizer, self.pad = tokenizer, pad

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.mark.claims("Long runs", "a dataset of which each host has its own copy", "works, losses bit for bit")
@pytest.mark.sampled(0.25, group="two hosts")
def test_a_host_with_its_own_copy_of_the_data_builds_its_own_indices(tmp_path: Path, corpus: str) -> None:
    """Two hosts with a rank each, of which none sees the other's directory; the losses are those of one host."""
    shared = [*RUN, *ZERO_BUBBLE, "--split", "80,20"]
    train([*shared, "--data-path", corpus, "--metrics-jsonl", tmp_path / "shared.jsonl"])
    flags = []
    for number in range(2):
        folder = tmp_path / f"host {number}"
        folder.mkdir()
        for suffix in (".bin", ".idx"):
            shutil.copy(f"{corpus}{suffix}", folder / f"code{suffix}")
        flags.append([*shared, "--data-path", str(folder / "code"), "--metrics-jsonl", str(tmp_path / f"{number}.jsonl")])
    for code, said in two_hosts((flags[0], flags[1]), tmp_path):
        assert code == 0, said
    alone, apart = metrics(tmp_path / "shared.jsonl"), metrics(tmp_path / "0.jsonl")
    assert [apart[number]["loss"] for number in apart] == [alone[number]["loss"] for number in alone]


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
