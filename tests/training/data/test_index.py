"""Damaged datasets: each is refused in one line that names the file; whole ones pass."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.data.index import check_dataset

with quiet_third_parties():
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

pytestmark = pytest.mark.claims(
    "Long runs",
    "damaged datasets: header, version, dtype, lengths, pointers, document boundaries, sizes of `.idx` and `.bin`: "
    "one line before any process group; tokens outside of the vocabulary: named in the batch that reads them",
    "rejected",
    also=("training/data/test_samples.py",),
)

LENGTHS = (5, 1, 7, 3)
"""Tokens of the sequences of each dataset here; the second document has two, the third none."""
N = len(LENGTHS)
HEAD, POINTERS, BOUNDARIES = 34, 34 + 4 * N, 34 + 12 * N


def write(folder: Path, *, dtype: type = np.uint16, multimodal: bool = False) -> str:
    """A small dataset, written by megatron-core; its prefix."""
    prefix = str(folder / "data")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    tokens = np.arange(sum(LENGTHS))
    begin = 0
    for document in ((5,), (1, 7), (), (3,)):
        size = sum(document)
        modes = [0] * len(document) if multimodal else None
        builder.add_document(tokens[begin : begin + size], list(document), modes)
        begin += size
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_what_megatron_core_writes_is_whole(tmp_path: Path, dtype: type, multimodal: bool) -> None:
    prefix = write(tmp_path, dtype=dtype, multimodal=multimodal)
    assert check_dataset(prefix) == N


def put(offset: int, form: str, *values: int) -> Callable[[bytes], bytes]:
    """Overwrites values of an index."""

    def change(data: bytes) -> bytes:
        new = struct.pack(form, *values)
        return data[:offset] + new + data[offset + len(new) :]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", r"idx is not the index of a dataset"),
        (lambda data: data[:20], r"idx is not the index of a dataset"),
        (put(0, "<B", 0), r"idx is not the index of a dataset"),
        (put(9, "<Q", 2), r"idx has version 2 of the format, and megatron-core reads version 1"),
        (put(17, "<B", 0), r"idx has dtype code 0; token ids have one of 1 \(uint8\), .*8 \(uint16\)"),
        (put(17, "<B", 255), r"idx has dtype code 255; token ids"),
        (put(17, "<B", 7), r"idx has dtype code 7 \(float32\); token ids"),
        (put(17, "<B", 4), r"sequence 1 does not begin where the one before it ends, in int32: .* dtype"),
        (put(18, "<Q", 0), r"idx has no documents; leave .*data out"),
        (put(26, "<Q", 0), r"idx has no documents"),
        (put(18, "<Q", N - 1), r"idx has 122 bytes, and 3 sequences with 5 document boundaries take 110: it is cut short or"),
        (put(18, "<Q", 2**64 - 1), r"idx has 122 bytes, and 18446744073709551615 sequences"),
        (put(26, "<Q", 2**63), r"and 4 sequences with 9223372036854775808 document boundaries take"),
        (lambda data: data[:-1], r"idx has 121 bytes, and 4 sequences with 5 document boundaries take 122"),
        (lambda data: data + bytes(N + 1), r"idx has 127 bytes"),
        (put(HEAD, "<4i", 0, 0, 0, 0), r"sequence 0 has a length of 0; it must be above 0"),
        (put(HEAD, "<4i", -1, -1, -1, -1), r"sequence 0 has a length of -1; it must be above 0"),
        (put(HEAD + 8, "<i", -7), r"sequence 2 has a length of -7"),
        (put(HEAD + 4, "<i", 2), r"sequence 2 does not begin where the one before it ends, in uint16"),
        (put(HEAD + 12, "<i", 4), r"bin has 32 bytes, and the last sequence of its index, in uint16, ends at byte 34"),
        (put(HEAD, "<i", 2**31 - 1), r"sequence 1 does not begin"),
        (put(POINTERS, "<q", 2), r"sequence 0 does not begin"),
        (put(POINTERS + 16, "<q", -2), r"sequence 2 does not begin"),
        (put(POINTERS + 24, "<q", 2**62), r"sequence 3 does not begin"),
        *((put(BOUNDARIES + at, "<q", to), r"its documents do not follow") for at, to in ((0, 1), (32, 5), (8, 4), (16, -1))),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, change: Callable[[bytes], bytes], message: str) -> None:
    prefix = write(tmp_path)
    path = Path(f"{prefix}.idx")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError) as refused:
        check_dataset(prefix)
    assert re.search(message, str(refused.value)), str(refused.value)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "change", [lambda data: b"", lambda data: data[:-1], lambda data: data[: len(data) // 2], lambda data: data * 2]
)
def test_a_bin_of_another_size_is_refused(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    prefix = write(tmp_path)
    path = Path(f"{prefix}.bin")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=rf"data\.bin has {path.stat().st_size} bytes, .* ends at byte 32: one of the two"):
        check_dataset(prefix)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_file_that_is_not_there_or_is_none(tmp_path: Path, suffix: str) -> None:
    prefix = write(tmp_path)
    path = Path(f"{prefix}{suffix}")
    path.unlink()
    for make in (lambda: None, path.mkdir):
        make()
        with pytest.raises(DataError, match=rf"data\{suffix} does not exist; give the prefix of a dataset"):
            check_dataset(prefix)


def test_names_that_no_file_can_have() -> None:
    for prefix in ("x" * 300, "a\0b"):
        with pytest.raises(DataError, match=r"cannot be read: File name too long|does not exist"):
            check_dataset(prefix)
