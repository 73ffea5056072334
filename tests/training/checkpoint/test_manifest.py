"""The manifest of a checkpoint: every kind of damage is found, by file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    damaged_content,
    damaged_names,
    first_damage,
    record_of,
    share_of_rank,
)

SIZES = {"__0_0.distcp": 3500, "__1_0.distcp": 2000, "common.pt": 70, "empty": 0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory of files of which one is empty."""
    for name, size in SIZES.items():
        (tmp_path / name).write_bytes(hashlib.shake_128(name.encode()).digest(size))
    Manifest(run="run1", iteration=3, files={name: record_of(tmp_path / name) for name in SIZES}).write(tmp_path)
    return tmp_path


def damage_of(directory: Path) -> dict[str, str]:
    manifest = Manifest.read(directory)
    assert manifest is not None
    return damaged_names(directory, manifest) or damaged_content(directory, manifest.files)


def test_an_intact_checkpoint_has_no_damage(checkpoint: Path) -> None:
    assert damage_of(checkpoint) == {}
    assert {path.name for path in checkpoint.iterdir()} == {*SIZES, MANIFEST}, "nothing unfinished is left"


def test_a_record_has_the_checksum_of_the_file(tmp_path: Path) -> None:
    """Of more bytes than are read at a time."""
    data = hashlib.shake_128(b"long").digest(2**20 + 17)
    (tmp_path / "file").write_bytes(data)
    record = record_of(tmp_path / "file")
    assert (record.num_bytes, record.digest) == (len(data), xxhash.xxh3_128(data).hexdigest())


@pytest.mark.parametrize("name", [name for name, size in SIZES.items() if size])
def test_any_flipped_bit_is_found(name: str, checkpoint: Path) -> None:
    intact = (checkpoint / name).read_bytes()
    for at in {0, len(intact) // 2, len(intact) - 1}:
        for bit in (0, 7):
            damaged = bytearray(intact)
            damaged[at] ^= 1 << bit
            (checkpoint / name).write_bytes(damaged)
            assert damage_of(checkpoint) == {name: "is damaged or of another run: its content is not what was saved"}


def missing(directory: Path) -> None:
    (directory / "__1_0.distcp").unlink()


def longer(directory: Path) -> None:
    with (directory / "common.pt").open("ab") as stream:
        stream.write(b"x")


def additional(directory: Path) -> None:
    (directory / "__2_0.distcp").write_bytes(b"x")


def folder(directory: Path) -> None:
    missing(directory)
    (directory / "__1_0.distcp").mkdir()


def fifo(directory: Path) -> None:
    missing(directory)
    os.mkfifo(directory / "__1_0.distcp")


def circle(directory: Path) -> None:
    missing(directory)
    (directory / "__1_0.distcp").symlink_to("__1_0.distcp")


def link(directory: Path) -> None:
    elsewhere = directory.parent / f"{directory.name} elsewhere"
    (directory / "__1_0.distcp").rename(elsewhere)
    (directory / "__1_0.distcp").symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (missing, "__1_0.distcp is missing"),
        (longer, "common.pt has 71 bytes instead of 70"),
        (additional, "__2_0.distcp was not saved with this checkpoint"),
        (folder, "__1_0.distcp is not a regular file"),
        (fifo, "__1_0.distcp is not a regular file"),
        (circle, "__1_0.distcp is missing"),
        (link, "__1_0.distcp is a link out of the checkpoint"),
    ],
)
def test_files_that_do_not_belong_together_are_named(change: Callable[[Path], None], expected: str, checkpoint: Path) -> None:
    change(checkpoint)
    assert first_damage(damage_of(checkpoint)) == expected


def test_notes_beside_the_data_are_no_damage(checkpoint: Path) -> None:
    (checkpoint / "README").write_text("the good one")
    assert damage_of(checkpoint) == {}


def test_a_file_that_cannot_be_read_is_named(checkpoint: Path) -> None:
    manifest = Manifest.read(checkpoint)
    assert manifest is not None
    missing(checkpoint)  # after names were compared
    found = damaged_content(checkpoint, manifest.files)
    assert found == {"__1_0.distcp": f"cannot be read: {os.strerror(2)}"}


def test_many_damaged_files_are_one_line() -> None:
    text = first_damage({f"__{rank}_0.distcp": "is missing" for rank in range(9)})
    assert text == "__0_0.distcp is missing, __1_0.distcp is missing, __2_0.distcp is missing, and 6 more files"


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 64])
def test_ranks_share_the_files(world_size: int, checkpoint: Path) -> None:
    manifest = Manifest.read(checkpoint)
    assert manifest is not None
    shares = [share_of_rank(manifest.files, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(name for share in shares for name in share) == sorted(SIZES), "each by one rank"
    assert [sum(record.num_bytes for record in share.values()) for share in shares] == sorted(
        (sum(record.num_bytes for record in share.values()) for share in shares), reverse=True
    )


def test_a_checkpoint_without_a_manifest_has_none(tmp_path: Path) -> None:
    assert Manifest.read(tmp_path) is None
    assert Manifest.read(tmp_path / "absent") is None


def test_a_flipped_bit_in_the_manifest_is_found(checkpoint: Path) -> None:
    """Each byte matters, but for white space between values."""
    path = checkpoint / MANIFEST
    intact = path.read_bytes()
    for at in range(0, len(intact), 7):
        if intact[at : at + 1].isspace():
            continue
        damaged = bytearray(intact)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"{MANIFEST} is damaged"):
            Manifest.read(checkpoint)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"7", b"\xff", b"[" * 100_000, b'{"xxh3_128": "x"}', b"9" * 5000])
def test_other_content_of_the_manifest_is_one_line(content: bytes, checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{MANIFEST} is damaged") as caught:
        Manifest.read(checkpoint)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": "other/2"}, "has format 'other/2'; this version reads"),
        ({"files": {"a": {"bytes": "many", "xxh3_128": "x"}}}, "is damaged: it is not a manifest"),
        ({"files": {"a": {"bytes": 1}}}, "is damaged: it is not a manifest"),
        ({"files": {"../a": {"bytes": 1, "xxh3_128": "x"}}}, "is damaged: it is not a manifest"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_one_line(change: dict[str, object], expected: str, checkpoint: Path) -> None:
    """Its own checksum is right."""
    path = checkpoint / MANIFEST
    named = {name: value for name, value in json.loads(path.read_text()).items() if name != "xxh3_128"} | change
    own = xxhash.xxh3_128(json.dumps(named, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps(named | {"xxh3_128": own}))
    with pytest.raises(CheckpointError, match=expected):
        Manifest.read(checkpoint)
