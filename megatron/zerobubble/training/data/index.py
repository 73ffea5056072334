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

Rank 0 reads the whole index. Ranks whose files differ from its own are refused elsewhere (`same_settings`).
"""

from __future__ import annotations

import itertools
import os
import struct
from pathlib import Path

from megatron.zerobubble.errors import DataError

__all__ = ["check_dataset", "split_documents"]

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_ITEM_BYTES = {"uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "int64": 8}
"""numpy's names of megatron-core's dtype codes, and the bytes of a token in those that hold token ids."""
_REMEDY = "preprocess the text again, or copy both files again"


def check_dataset(prefix: str) -> int:
    """Check that the index of a dataset is whole and describes its .bin.

    Args:
        prefix: path prefix of the dataset, without .idx and .bin.

    Returns:
        Number of sequences, which are documents unless the text was split into sentences.

    Raises:
        DataError: a file is missing, damaged, of another version or dtype, or the two do not belong together.
    """
    path, bin_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    num_bytes, bin_bytes = _file_bytes(path), _file_bytes(bin_path)
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
            f"{wanted}: it is cut short or damaged; {_REMEDY}"
        )
    end = _check_entries(path, dtype, num_sequences, num_boundaries)
    if end != bin_bytes:
        raise DataError(
            f"{bin_path} has {bin_bytes} bytes, and the last sequence of its index, in {dtype}, ends at byte {end}: one of the "
            f"two files is cut short, damaged or of another dataset; {_REMEDY}"
        )
    return int(num_sequences)


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


def _file_bytes(path: Path) -> int:
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


def _check_entries(path: Path, dtype: str, num_sequences: int, num_boundaries: int) -> int:
    """Raise unless all lengths are above 0, sequences begin where those before them end, and documents follow each other.

    A document may be empty. Returns the byte of .bin after the last sequence.
    """
    import numpy as np  # not at the top: flags are checked before anything large is imported

    offset = _HEADER.size
    lengths = np.memmap(path, dtype="<i4", mode="r", offset=offset, shape=(num_sequences,))
    pointers = np.memmap(path, dtype="<i8", mode="r", offset=offset + 4 * num_sequences, shape=(num_sequences,))
    boundaries = np.memmap(path, dtype="<i8", mode="r", offset=offset + 12 * num_sequences, shape=(num_boundaries,))
    ends = np.cumsum(lengths, dtype=np.int64) * _ITEM_BYTES[dtype]
    problem = None
    if lengths.min() <= 0:
        bad = int(np.argmax(lengths <= 0))
        problem = f"sequence {bad} has a length of {lengths[bad]}; it must be above 0"
    elif pointers[0] != 0 or not np.array_equal(pointers[1:], ends[:-1]):
        bad = int(np.argmax(pointers != np.concatenate([[0], ends[:-1]])))
        problem = f"sequence {bad} does not begin where the one before it ends, in {dtype}"
    elif boundaries[0] != 0 or boundaries[-1] != num_sequences or np.any(np.diff(boundaries) < 0):
        problem = f"its documents do not follow each other from sequence 0 to {num_sequences}"
    if problem is not None:
        raise DataError(f"{path}: {problem}: lengths, pointers, document boundaries or dtype are damaged; {_REMEDY}")
    return int(ends[-1])
