"""Fixtures of the training tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.launch import ROOT


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small dataset of real text (this package's own source); its prefix."""
    from tools.preprocess_data import Encoder, preprocess

    prefix = tmp_path_factory.mktemp("corpus") / "source"
    files = sorted((ROOT / "megatron" / "zerobubble" / "training").rglob("*.py"))
    preprocess(
        documents=(Path(file).read_text(encoding="utf-8") for file in files),
        encoder=Encoder("ByteLevelTokenizer", None, None),
        prefix=str(prefix),
        appends_eod=True,
        num_workers=1,
    )
    return str(prefix)
