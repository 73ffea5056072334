"""Samples that are documents, each at its own length, or several of them packed into one row.

A document of n tokens has n - 1 tokens with a label, the next token. They are one sample, or where they are more than
--seq-length several: pieces of --seq-length and the rest. So every token that has a label is read once per epoch; a document of
one token has none, and is left out. Documents are the sequences of the dataset, as in megatron-core's GPTDataset.

The order of an epoch is a permutation by the seed and the epoch. Packed rows are filled once, in an order by the seed, and their
order is permuted per epoch. So a sample is a function of its number alone, and all lengths follow from PREFIX.idx: ranks that
read no tokens know them, too.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from torch.utils.data import Dataset

from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.data.index import DatasetIndex, check_dataset, split_documents

__all__ = ["DocumentDataset", "document_dataset", "next_fit"]

_log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

_PACKING = 2**32
"""In place of the number of an epoch, for the order in which rows are filled."""
_PADDING = -1
"""megatron-core's padding in a dataset, which does not count in the loss."""


def document_dataset(settings: Settings, tokenizer: Any, split: Split, size: int) -> DocumentDataset:
    """The samples of a split. All ranks build them, for their lengths; tokens are opened where they are read.

    Args:
        settings: path and splits of the data.
        tokenizer: of the run.
        split: training or validation.
        size: number of samples.

    Raises:
        DataError: the dataset is damaged.
    """
    index = check_dataset(str(settings.data.data_path), reads_all=False)
    documents = split_documents(index.num_sequences, settings.data.split_weights)[split.value]
    seq_length = settings.model.seq_length
    config = BlendedMegatronDatasetConfig(random_seed=settings.run.seed, sequence_length=seq_length, tokenizer=tokenizer)
    dataset = DocumentDataset(index, documents, size=size, settings=settings, config=config)
    tokens = index.entries()[0][documents.start : documents.stop]
    cut, left_out = int((tokens > seq_length + 1).sum()), int((tokens < 2).sum())
    _log.info("%s: %d samples per epoch, documents of %s", split.name, dataset.num_rows, index.prefix)
    if cut:
        _log.info("%s: %d document(s) were cut, which are longer than --seq-length %d", split.name, cut, seq_length)
    if left_out:
        _log.info("%s: %d document(s) were left out, which have one token and so nothing to predict", split.name, left_out)
    return dataset


@dataclass(frozen=True)
class _Pieces:
    """The pieces of the documents of a split, in their order in the dataset."""

    document: Array
    """[n] int64, number in the dataset."""
    begin: Array
    """[n] int64, position of the first token in the document."""
    length: Array
    """[n] int64, tokens that have a label."""

    @classmethod
    def of(cls, tokens: Array, documents: range, seq_length: int) -> _Pieces:
        """The pieces of `documents`, of which document d has tokens[d] tokens."""
        labeled = tokens[documents.start : documents.stop].astype(np.int64) - 1
        counts = -(-labeled // seq_length)
        document = np.repeat(np.arange(len(labeled)), counts)
        before = np.repeat(np.cumsum(counts) - counts, counts)
        begin = (np.arange(len(document)) - before) * seq_length
        length = np.minimum(labeled[document] - begin, seq_length)
        return cls(document + documents.start, begin, length)

    def __getitem__(self, order: Array) -> _Pieces:
        return _Pieces(self.document[order], self.begin[order], self.length[order])


class DocumentDataset(Dataset[dict[str, Any]]):
    """The samples of some documents of one dataset, repeated epoch by epoch.

    Args:
        index: of the dataset, which `index.check_dataset` has checked.
        documents: the numbers of the split's documents, one of which has two tokens or more.
        size: samples, over as many epochs as it takes.
        settings: how documents become samples.
        config: megatron-core's, with the tokenizer.
    """

    def __init__(self, index: DatasetIndex, documents: range, *, size: int, settings: Settings, config: Any) -> None:
        self._seed = settings.run.seed
        self.config = config
        """As given."""
        self.dataset_path = index.prefix
        """Path prefix."""
        seq_length = settings.model.seq_length
        pieces = _Pieces.of(index.entries()[0], documents, seq_length)
        if settings.data.pack_sequences:
            pieces = pieces[_permutation(self._seed, _PACKING, len(pieces.length))]
            self._starts = next_fit(pieces.length, seq_length)
        else:
            self._starts = np.arange(len(pieces.length) + 1)
        self._pieces = pieces
        self.num_rows = len(self._starts) - 1
        """Samples of an epoch."""
        self._size = size
        self._row_lengths = np.add.reduceat(pieces.length, self._starts[:-1])
        self._epochs: OrderedDict[int, Array] = OrderedDict()

    def __len__(self) -> int:
        return self._size

    def lengths(self, numbers: Array) -> Array:
        """Tokens of samples, without padding: int64, in the shape of `numbers`."""
        lengths: Array = self._row_lengths[self._rows(numbers)]
        return lengths

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """One sample of n tokens.

        Returns:
            tokens, labels and position_ids, [n] int64; loss_mask, [n] float32; cu_seqlens, int32, where each of the packed
            documents begins, from 0 on, and n.
        """
        row = int(self._rows(np.asarray(number)))
        places = range(int(self._starts[row]), int(self._starts[row + 1]))
        tokens = [self._read(place) for place in places]
        lengths = self._pieces.length[places.start : places.stop]
        inputs, labels = (np.concatenate([each[cut] for each in tokens]) for cut in (slice(None, -1), slice(1, None)))
        return {
            "tokens": torch.from_numpy(_ids(inputs)),
            "labels": torch.from_numpy(_ids(labels)),
            "loss_mask": torch.from_numpy((labels != _PADDING).astype(np.float32)),
            "position_ids": torch.cat([torch.arange(int(length)) for length in lengths]),
            "cu_seqlens": torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        }

    def _read(self, place: int) -> Array:
        """The tokens of a piece and its last label: [length + 1] int64."""
        pieces = self._pieces
        document, begin, length = (int(each[place]) for each in (pieces.document, pieces.begin, pieces.length))
        tokens: Array = self._tokens.get(document, offset=begin, length=length + 1).astype(np.int64)
        return tokens

    @functools.cached_property
    def _tokens(self) -> IndexedDataset:
        """Opened when a sample is read, which ranks in the middle of a pipeline never do."""
        return IndexedDataset(self.dataset_path)

    def _rows(self, numbers: Array) -> Array:
        """The rows of samples."""
        epochs, places = np.divmod(numbers, self.num_rows)
        rows = np.empty(np.shape(numbers), dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            rows[here] = self._order(int(epoch))[places[here]]
        return rows

    def _order(self, epoch: int) -> Array:
        """The rows of an epoch in their order; the last two that were asked for are kept."""
        if epoch not in self._epochs:
            self._epochs[epoch] = _permutation(self._seed, epoch, self.num_rows)
            while len(self._epochs) > 2:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]


def next_fit(lengths: Array, capacity: int) -> Array:
    """Cut a sequence of pieces into rows, in order: a piece begins a new row where it does not fit into the one being filled.

    Args:
        lengths: [n] tokens of each piece, above 0 and at most `capacity`.
        capacity: tokens of a row, at most.

    Returns:
        [r + 1] int64: the first piece of each row, and n.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    starts, first, used = [0], 0, 0
    while first < len(ends):
        first = int(np.searchsorted(ends, used + capacity, side="right"))
        used = int(ends[first - 1])
        starts.append(first)
    return np.asarray(starts, dtype=np.int64)


def _ids(tokens: Array) -> Array:
    """Token ids; padding becomes token 0."""
    return np.where(tokens == _PADDING, 0, tokens)


def _permutation(seed: int, epoch: int, num: int) -> Array:
    """A permutation of `num` numbers that numpy keeps the same in all of its versions."""
    generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch))))
    return generator.permutation(num)
