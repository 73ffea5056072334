"""Writes small datasets of given documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.zerobubble.mcore.cpu.device import quiet_third_parties

with quiet_third_parties():
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def write_documents(prefix: Path, documents: Sequence[Sequence[int]], *, dtype: Any = np.int32) -> str:
    """An indexed dataset of these token ids; its prefix."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(list(document), dtype=torch.int32), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def random_documents(lengths: Sequence[int], *, vocabulary: int = 250, seed: int = 0) -> list[list[int]]:
    """Documents of these lengths, of random tokens from 2 on."""
    generator = np.random.RandomState(seed)
    return [generator.randint(2, vocabulary, size=length).tolist() for length in lengths]
