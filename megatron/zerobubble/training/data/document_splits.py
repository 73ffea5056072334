"""The datasets of documents of a run: one per split, of one source or of a blend through megatron-core's BlendedDataset.

All ranks build them, for the lengths of the samples; tokens are opened where they are read.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.utils import Split

from megatron.zerobubble.training.config.data_blend import Blend
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.data.corpus import split_documents
from megatron.zerobubble.training.data.documents import DocumentDataset, DocumentOptions
from megatron.zerobubble.training.data.index import DatasetIndex, check_dataset

__all__ = ["DocumentBlend", "document_datasets"]

_log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]


class DocumentBlend(BlendedDataset):
    """megatron-core's blend of datasets, with the lengths of its samples."""

    datasets: list[DocumentDataset]
    dataset_index: Array
    dataset_sample_index: Array

    def lengths(self, numbers: Array) -> Array:
        """As `DocumentDataset.lengths`."""
        return self._gathered("lengths", numbers, np.int64)

    def squares(self, numbers: Array) -> Array:
        """As `DocumentDataset.squares`."""
        return self._gathered("squares", numbers, np.float64)

    def find(self, number: int, size: int) -> tuple[str, int, int, int] | None:
        """As `DocumentDataset.find`."""
        return self.datasets[self.dataset_index[number]].find(int(self.dataset_sample_index[number]), size)

    def _gathered(self, what: str, numbers: Array, dtype: Any) -> Array:
        found = np.empty(np.shape(numbers), dtype=dtype)
        sources, own = self.dataset_index[numbers], self.dataset_sample_index[numbers]
        for source in np.unique(sources):
            here = sources == source
            found[here] = getattr(self.datasets[source], what)(own[here])
        return found


def document_datasets(
    settings: Settings, tokenizer: Any, sizes: tuple[int, int, int]
) -> tuple[Any | None, Any | None, Any | None]:
    """Training, validation and test samples; None for a split that the run does not read.

    Args:
        settings: paths and splits of the data.
        tokenizer: of the run.
        sizes: samples of each split.

    Raises:
        DataError: a dataset is damaged, or a split has no document with two tokens.
    """
    sources, evaluates = settings.data.sources, settings.run.eval_iters > 0
    train, valid, test = sources.per_split if sources.divided is None else (sources.divided, sources.divided, None)
    blends = (None if settings.run.skip_train else train, valid if evaluates else None, test if evaluates else None)
    built = (
        None if blend is None else _dataset(settings, tokenizer, blend, split, size)
        for blend, split, size in zip(blends, Split, sizes, strict=True)
    )
    first, second, third = built
    return first, second, third


def _dataset(settings: Settings, tokenizer: Any, blend: Blend, split: Split, size: int) -> Any:
    options = DocumentOptions(
        seq_length=settings.model.seq_length,
        seed=settings.run.seed,
        packs=settings.data.pack_sequences,
        mmap_bin_files=settings.data.mmap_bin_files,
    )
    config = BlendedMegatronDatasetConfig(random_seed=options.seed, sequence_length=options.seq_length, tokenizer=tokenizer)
    once = blend.weights is None and len(blend.prefixes) > 1
    parts = [
        DocumentDataset(*_documents(settings, path, split), size=size, options=options, config=config, split=split)
        for path in blend.prefixes
    ]
    rows = sum(part.num_rows for part in parts)
    _log.info("%s: %d samples per epoch, documents of %s", split.name, rows, ", ".join(blend.prefixes))
    cut, left_out = sum(part.num_cut for part in parts), sum(part.num_left_out for part in parts)
    if cut:
        _log.info("%s: %d document(s) were cut, which are longer than --seq-length %d", split.name, cut, options.seq_length)
    if left_out:
        _log.info("%s: %d document(s) were left out, which have one token and so nothing to predict", split.name, left_out)
    if len(parts) == 1:
        return parts[0]
    weights = [part.num_rows for part in parts] if blend.weights is None else list(blend.weights)
    logging.getLogger("megatron.core.datasets.blended_dataset").setLevel(logging.ERROR)  # it warns that indices are not cached
    return DocumentBlend(parts, weights, None if once else size, config)


def _documents(settings: Settings, prefix: str, split: Split) -> tuple[DatasetIndex, range]:
    """The index of one dataset, and the numbers of the split's documents."""
    index = check_dataset(prefix, reads_all=False)
    if settings.data.sources.divided is None:
        return index, range(index.num_sequences)
    return index, split_documents(index.num_sequences, settings.data.split_weights)[split.value]
