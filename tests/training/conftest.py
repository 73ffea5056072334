"""Fixtures of the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.launch import ROOT


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small dataset of real text (this package's own source); its prefix."""
    from megatron.zerobubble.training.config.tokenizer import TokenizerConfig
    from megatron.zerobubble.training.data.texts import Document
    from tools.preprocess_data import preprocess

    prefix = tmp_path_factory.mktemp("corpus") / "source"
    files = sorted((ROOT / "megatron" / "zerobubble" / "training").rglob("*.py"))
    preprocess(
        documents=(Document(Path(file).read_text(encoding="utf-8")) for file in files),
        tokenizer=TokenizerConfig(),
        prefix=str(prefix),
        appends_eod=True,
    )
    return str(prefix)
