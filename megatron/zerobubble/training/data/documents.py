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

from megatron.zerobubble.training.config.data import DataConfig
from megatron.zerobubble.training.data.index import DatasetIndex, check_dataset, split_documents

__all__ = ["DocumentDataset", "PaddedDocuments", "document_dataset", "next_fit"]

_log = logging.getLogger(__name__)

Array = np.ndarray[Any, Any]

_PACKING = 2**32
"""In place of the number of an epoch, for the order in which rows are filled."""
_PADDING = -1
"""megatron-core's padding in a dataset, which does not count in the loss."""


def document_dataset(data: DataConfig, split: Split, size: int, *, seq_length: int, seed: int, tokenizer: Any) -> DocumentDataset:
    """The samples of a split. All ranks build them, for their lengths; tokens are opened where they are read.

    Args:
        data: path and splits of the data, and whether documents are packed.
        split: training, validation or test.
        size: number of samples.
        seq_length: tokens of a sample, at most.
        seed: of their order.
        tokenizer: of the run.

    Raises:
        DataError: the dataset is damaged.
    """
    index = check_dataset(str(data.data_path), reads_all=False)
    documents = split_documents(index.num_sequences, data.split_weights)[split.value]
    config = BlendedMegatronDatasetConfig(random_seed=seed, sequence_length=seq_length, tokenizer=tokenizer)
    dataset = DocumentDataset(index, documents, size=size, config=config, packs=data.pack_sequences)
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
        config: megatron-core's, with the seed, the most tokens of a sample, and the tokenizer.
        packs: whether a sample has several documents.
    """

    def __init__(self, index: DatasetIndex, documents: range, *, size: int, config: Any, packs: bool) -> None:
        self._seed = config.random_seed
        self.packs = packs
        """As given."""
        self.config = config
        """As given."""
        self.dataset_path = index.prefix
        """Path prefix."""
        pieces = _Pieces.of(index.entries()[0], documents, config.sequence_length)
        if packs:
            pieces = pieces[_permutation(self._seed, _PACKING, len(pieces.length))]
            self._starts = next_fit(pieces.length, config.sequence_length)
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


class PaddedDocuments(Dataset[dict[str, Any]]):
    """Documents in rows that are as long as the others of their microbatch, so that a data loader can stack them.

    Padding is token 0 and does not count in the loss. Behind packed documents it is a sequence of its own.

    Args:
        documents: the samples.
        micro_batch_size: samples per microbatch, b. Microbatches have samples that follow each other.
        first: number of the first sample of a microbatch, any of them.
        length: tokens of a row; None: of the longest sample of the microbatch, rounded up to a `multiple`.
        multiple: what sequence and context parallelism divide by.
        split: what they are samples of, for Megatron-LM's loop, whose microbatches of evaluation may have another size.
    """

    def __init__(
        self,
        documents: DocumentDataset,
        *,
        micro_batch_size: int,
        first: int,
        length: int | None,
        multiple: int,
        split: Split = Split.train,
    ) -> None:
        self._documents, self._micro_batch_size, self._first = documents, micro_batch_size, first
        self._length, self._multiple = length, multiple
        self.index_split = split
        """As given; megatron-core's datasets have it by this name."""

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """One row.

        Returns:
            tokens, labels, position_ids [s] int64 and loss_mask [s] float32, as megatron-core's GPTDataset has them. With packed
            documents also cu_seqlens [k + 1] int32, where each of the k sequences of the row begins, from 0 on, and s.
        """
        sample = self._documents[number]
        filled = len(sample["tokens"])
        length = self._length or self._longest(number)
        row = {name: _padded(sample[name], length) for name in ("tokens", "labels", "loss_mask")}
        if not self._documents.packs:
            return row | {"position_ids": torch.arange(length)}
        begins = sample["cu_seqlens"]
        return row | {
            "position_ids": torch.cat([sample["position_ids"], torch.arange(length - filled)]),
            "cu_seqlens": begins if filled == length else torch.cat([begins, begins.new_tensor([length])]),
        }

    def _longest(self, number: int) -> int:
        """Tokens per row of the microbatch of a sample."""
        begin = number - (number - self._first) % self._micro_batch_size
        longest = int(self._documents.lengths(np.arange(begin, begin + self._micro_batch_size)).max())
        return -(-longest // self._multiple) * self._multiple


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


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, length - len(tensor)))


def _ids(tokens: Array) -> Array:
    """Token ids; padding becomes token 0."""
    return np.where(tokens == _PADDING, 0, tokens)


def _permutation(seed: int, epoch: int, num: int) -> Array:
    """A permutation of `num` numbers that numpy keeps the same in all of its versions."""
    generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((seed, epoch))))
    return generator.permutation(num)
