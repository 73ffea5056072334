"""Fixtures of the training tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.training.launch import ROOT


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small dataset of real text (this package's own source); its prefix."""
    from tools.preprocess_data import Encoder, preprocess

    prefix = tmp_path_factory.mktemp("corpus") / "source"
    files = sorted((ROOT / "megatron" / "zerobubble" / "training").glob("*.py"))
    preprocess(
        documents=(Path(file).read_text(encoding="utf-8") for file in files),
        encoder=Encoder("ByteLevelTokenizer", None, None),
        prefix=str(prefix),
        appends_eod=True,
        num_workers=1,
    )
    return str(prefix)
