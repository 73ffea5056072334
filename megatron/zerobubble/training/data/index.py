"""Checks an indexed dataset, PREFIX.idx and PREFIX.bin, before anything reads it.

megatron-core takes the index at its word: lengths that are all 0 make it count epochs forever, and a wrong pointer, length or
dtype reads other tokens without an error. ``PREFIX.bin`` has the tokens of all sequences one after the other. ``PREFIX.idx``,
little-endian::

    9 bytes   MMIDIDX 00 00
    uint64    version, 1
    uint8     code of the token dtype
    uint64    number of sequences, n
    uint64    number of document boundaries, d
    n int32   tokens of each sequence
    n int64   byte of .bin at which it begins
    d int64   sequence at which each document begins, from 0 on; the last one is n
    n int8    modes, in multimodal datasets only

So the pointers follow from lengths and dtype, and the size of .bin from the last of them: a file that does not agree is damaged.

The header and the sizes of both files cost two reads and no import. The full check reads the whole index, with numpy.
"""

from __future__ import annotations

import itertools
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.zerobubble.errors import DataError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["DatasetIndex", "check_dataset", "file_bytes", "read_index", "split_documents"]

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_ITEM_BYTES = {"uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "int64": 8}
"""numpy's names of megatron-core's dtype codes, and the bytes of a token in those that hold token ids."""
_REMEDY = "preprocess the text again, or copy both files again"


@dataclass(frozen=True)
class DatasetIndex:
    """The header of PREFIX.idx, which agrees with the size of the file."""

    prefix: str
    """Path prefix of the dataset."""
    dtype: str
    """numpy's name of the dtype of the tokens in .bin."""
    num_sequences: int
    """Sequences, which are documents unless the text was split into sentences. Above 0."""
    num_boundaries: int
    """Documents + 1. Above 0."""

    @property
    def path(self) -> Path:
        """Path of the index."""
        return Path(f"{self.prefix}.idx")

    @property
    def bin_path(self) -> Path:
        """Path of the tokens."""
        return Path(f"{self.prefix}.bin")

    @property
    def item_bytes(self) -> int:
        """Bytes of a token."""
        return _ITEM_BYTES[self.dtype]

    def entries(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Lengths [n] int32 in tokens, pointers [n] int64 in bytes and document boundaries [d] int64, memory-mapped."""
        import numpy as np  # not at the top: flags are checked before anything large is imported

        def mapped(dtype: str, offset: int, size: int) -> np.ndarray[Any, Any]:
            return np.memmap(self.path, dtype=dtype, mode="r", offset=offset, shape=(size,))

        num, begin = self.num_sequences, _HEADER.size
        return (
            mapped("<i4", begin, num),
            mapped("<i8", begin + 4 * num, num),
            mapped("<i8", begin + 12 * num, self.num_boundaries),
        )


def read_index(prefix: str) -> DatasetIndex:
    """Read the header of an index and compare it with the size of the file.

    Args:
        prefix: path prefix of the dataset, without .idx.

    Raises:
        DataError: the index is missing, damaged, of another version or dtype, or has no documents.
    """
    path = Path(f"{prefix}.idx")
    num_bytes = file_bytes(path)
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise DataError(f"{path} is not the index of a dataset; preprocess the text again")
    _, version, code, num_sequences, num_boundaries = _HEADER.unpack(head)
    if version != 1:
        raise DataError(f"{path} has version {version} of the format, and megatron-core reads version 1; {_REMEDY}")
    dtype = _DTYPES.get(code)
    if dtype not in _ITEM_BYTES:
        allowed = ", ".join(f"{code} ({name})" for code, name in _DTYPES.items() if name in _ITEM_BYTES)
        raise DataError(
            f"{path} has dtype code {code}{f' ({dtype})' if dtype else ''}; token ids have one of {allowed}; {_REMEDY}"
        )
    if num_sequences == 0 or num_boundaries == 0:
        raise DataError(f"{path} has no documents; leave {prefix} out, or preprocess the text again")
    wanted = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
    if num_bytes not in (wanted, wanted + num_sequences):
        raise DataError(
            f"{path} has {num_bytes} bytes, and {num_sequences} sequences with {num_boundaries} document boundaries take "
            f"{wanted}: "
            f"it is cut short or damaged; {_REMEDY}"
        )
    return DatasetIndex(prefix, dtype, num_sequences, num_boundaries)


def check_dataset(prefix: str, *, reads_all: bool) -> DatasetIndex:
    """Check that the index of a dataset describes its .bin.

    Args:
        prefix: path prefix of the dataset, without .idx and .bin.
        reads_all: whether to read the whole index; else only its header, the last entry, and the sizes of both files.

    Returns:
        The header of the index.

    Raises:
        DataError: a file is missing, cannot be read or is damaged, or the two do not belong together.
    """
    index = read_index(prefix)
    bin_bytes = file_bytes(index.bin_path)
    if reads_all:
        _check_entries(index)
    end = _end_of_last(index)
    if end != bin_bytes:
        raise DataError(
            f"{index.bin_path} has {bin_bytes} bytes, and the last sequence of its index, in {index.dtype}, ends at byte "
            f"{end}: one of the two "
            f"files is cut short, damaged or of another dataset; {_REMEDY}"
        )
    return index


def split_documents(num_documents: int, weights: tuple[float, ...]) -> tuple[range, ...]:
    """The numbers of the documents in each split, as megatron-core cuts them.

    megatron-core rounds the boundaries between splits, so that a small proportion of few documents may be empty. On an empty
    split it never terminates: it repeats the split until there are enough tokens.

    Args:
        num_documents: documents of the dataset.
        weights: proportions of the splits, in any unit; not all of them 0.
    """
    shares = itertools.accumulate((weight / sum(weights) for weight in weights), initial=0.0)
    cuts = [round(share * float(num_documents)) for share in shares]
    return tuple(range(begin, end) for begin, end in itertools.pairwise(cuts))


def file_bytes(path: Path) -> int:
    """Size of a file that can be read. Raises DataError if there is none."""
    try:
        if path.is_file():  # not a pipe, which would wait for its other end
            with path.open("rb") as file:
                return file.seek(0, os.SEEK_END)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    raise DataError(
        f"--data-path {path.with_suffix('')}: {path} does not exist; give the prefix of a dataset made by "
        "tools/preprocess_data.py, without .bin or .idx"
    )


def _end_of_last(index: DatasetIndex) -> int:
    """The byte of .bin after the last sequence, by its own entry."""
    num = index.num_sequences
    with index.path.open("rb") as file:
        file.seek(_HEADER.size + 4 * (num - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(_HEADER.size + 4 * num + 8 * (num - 1))
        (pointer,) = struct.unpack("<q", file.read(8))
    return int(pointer) + int(length) * index.item_bytes


def _check_entries(index: DatasetIndex) -> None:
    """Raise unless all lengths are above 0, sequences begin where those before them end, and documents follow each other.

    A document may be empty.
    """
    import numpy as np

    lengths, pointers, boundaries = index.entries()
    num, ends = index.num_sequences, np.cumsum(lengths, dtype=np.int64) * index.item_bytes
    problem = None
    if lengths.min() <= 0:
        bad = int(np.argmax(lengths <= 0))
        problem = f"sequence {bad} has a length of {lengths[bad]}; it must be above 0"
    elif pointers[0] != 0 or not np.array_equal(pointers[1:], ends[:-1]):
        bad = int(np.argmax(pointers != np.concatenate([[0], ends[:-1]])))
        problem = f"sequence {bad} does not begin where the one before it ends, in {index.dtype}"
    elif boundaries[0] != 0 or boundaries[-1] != num or np.any(np.diff(boundaries) < 0):
        problem = f"its documents do not follow each other from sequence 0 to {num}"
    if problem is not None:
        raise DataError(f"{index.path}: {problem}: lengths, pointers, document boundaries or dtype are damaged; {_REMEDY}")
