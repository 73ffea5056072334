"""Files with the indices of samples, on every host: megatron-core lets rank 0 alone write them, maybe on a disk of its own.

So the first rank of each host looks for what rank 0 has written. Where the directory is not shared, it is not there, and that
rank builds the same from its host's copy of the data. A file appears whole or not at all: ranks of two hosts may write one, and a
job that is killed leaves no half of one.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

from megatron.zerobubble.files import replace_text
from megatron.zerobubble.training.checkpoint.shared import wait_for_files, why_unseen

__all__ = ["write_index_files"]


def write_index_files(dataset_class: type, sizes: list[int], config: Any, *, is_first_of_host: bool) -> None:
    """Write the indices of samples where they are missing. All ranks must call this, before they build the datasets.

    Args:
        dataset_class: megatron-core's GPTDataset, or a subclass.
        sizes: samples of each split.
        config: of the datasets.
        is_first_of_host: whether this rank writes for its host.

    Raises:
        OSError: they cannot be written.
    """
    writing = type(dataset_class.__name__, (_WritesIndices, dataset_class), {})  # the name is a part of the files' names
    BlendedMegatronDatasetBuilder(writing, sizes, lambda: is_first_of_host, config).build()


class _WritesIndices:
    """In front of a dataset class: builds the indices on any rank, unless there are files of them."""

    config: Any
    dataset: Any
    index_split: Any
    unique_description: str
    unique_description_hash: str

    def _build_document_sample_shuffle_indices(self) -> Any:
        name, given = type(self).__name__, self.config.path_to_cache
        folder = Path(given or Path(self.dataset.path_prefix, "cache", f"{name}_indices"))
        base = f"{self.unique_description_hash}-{name}-{self.index_split.name}"
        description = folder / f"{base}-description.txt"
        files = [folder / f"{base}-{each}_index.npy" for each in ("document", "sample", "shuffle")]
        if _are_missing([description, *files]):
            self.config.path_to_cache = ""  # megatron-core then builds them in memory, on any rank
            try:
                built = super()._build_document_sample_shuffle_indices()  # type: ignore[misc]
            finally:
                self.config.path_to_cache = given
            folder.mkdir(parents=True, exist_ok=True)
            for file, index in zip(files, built, strict=True):
                _replace(file, index)
            replace_text(description, self.unique_description, unfinished=f".{description.name}-{uuid.uuid4().hex}")
        return super()._build_document_sample_shuffle_indices()  # type: ignore[misc]


def _are_missing(files: list[Path]) -> bool:
    is_rank_0 = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0

    def amiss() -> bool:
        return any(why_unseen(file) for file in files)

    return amiss() if is_rank_0 else wait_for_files(amiss)


def _replace(file: Path, index: Any) -> None:
    new = file.with_name(f".{file.name}-{uuid.uuid4().hex}")
    try:
        with new.open("wb") as stream:
            np.save(stream, index)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
