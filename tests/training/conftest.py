"""Fixtures of the training tests."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small dataset of real text; its prefix.

    The text is source of Python's own library: not this package's, so that no commit changes the losses of another test's job.
    """
    from megatron.zerobubble.training.config.tokenizer import TokenizerConfig
    from tools.preprocess_data import Document, preprocess

    prefix = tmp_path_factory.mktemp("corpus") / "source"
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for package in ("asyncio", "email") for path in (library / package).rglob("*.py"))
    preprocess(
        documents=(Document(Path(file).read_text(encoding="utf-8")) for file in files),
        tokenizer=TokenizerConfig(),
        prefix=str(prefix),
        appends_eod=True,
    )
    return str(prefix)
