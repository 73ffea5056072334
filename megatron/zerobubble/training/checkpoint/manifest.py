"""The manifest of a checkpoint: the size and the checksums of every file, by which damage is found before anything is loaded.

torch's and megatron-core's formats have no checksums: overwritten bytes of a tensor, a flipped bit, or a data file of another run
with the same layout load without an error. ``manifest.json`` lists a checksum per block of every file, and the id of the run that
saved it. Blocks, and not whole files, so that any number of ranks and threads verify a checkpoint in parallel. It ends with a
checksum of itself. Checksums are XXH3's of 128 bits: verifying must cost next to nothing beside loading.

It is the last file to be written into a checkpoint, before the checkpoint is published (see `directory`): one that has it is
complete. No torch here: `zerobubble checkpoint verify` does without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import xxhash

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.files import replace_text

__all__ = [
    "MANIFEST",
    "FileBlock",
    "FileRecord",
    "Manifest",
    "blocks_of_rank",
    "damaged_blocks",
    "damaged_names",
    "first_damage",
    "record_of",
]

MANIFEST = "manifest.json"
"""Name of the manifest in the directory of a checkpoint."""

_FORMAT = "megatron-zerobubble-manifest/1"
_CHECKSUM = "xxh3_128"
"""Key of checksums in the file."""
_BLOCK_BYTES = 64 * 1024 * 1024
_READ_BYTES = 1024 * 1024
_NUM_NAMED = 3
_OTHER_DATA = frozenset({"common.pt", ".metadata", "metadata.json"})
"""Files beside `*.distcp` that are read when a checkpoint is loaded."""


@dataclass(frozen=True)
class FileRecord:
    """What a file held when it was saved."""

    num_bytes: int
    """Size of the file."""
    digests: tuple[str, ...]
    """Checksum of each block, in hexadecimal digits. All blocks but the last have the same size."""


@dataclass(frozen=True)
class FileBlock:
    """A part of a file, and what it held when it was saved."""

    file: str
    """Name of the file."""
    offset: int
    """Bytes before the block."""
    num_bytes: int
    """Size of the block."""
    digest: str
    """Its checksum, in hexadecimal digits."""


@dataclass(frozen=True)
class Manifest:
    """All files of a checkpoint when it was saved."""

    run: str
    """Id of the job that saved it."""
    iteration: int
    """Iterations done."""
    files: Mapping[str, FileRecord]
    """What each file held, by name."""
    block_bytes: int = _BLOCK_BYTES
    """Size of all blocks of a file but the last."""

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """The manifest of a checkpoint; None if it has none.

        Raises:
            CheckpointError: it is damaged, or cannot be read.
        """
        path = directory / MANIFEST
        try:
            named = json.loads(path.read_bytes())
            own = named.pop(_CHECKSUM)
            if own != _digest_of(named):
                raise CheckpointError(f"{path} is damaged: its checksum is not that of its content")
            if named["format"] != _FORMAT:
                raise CheckpointError(f"{path} has format {str(named['format'])[:80]!r}; this version reads {_FORMAT!r}")
            manifest = cls(
                run=named["run"],
                iteration=named["iteration"],
                files={name: FileRecord(each["bytes"], tuple(each[_CHECKSUM])) for name, each in named["files"].items()},
                block_bytes=named["block_bytes"],
            )
            if any(Path(name).name != name for name in manifest.files):
                raise ValueError("a file outside of the checkpoint")
            manifest.blocks()  # raises if sizes and numbers of checksums do not agree
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{path} is damaged: it is not a manifest ({type(error).__name__})") from error
        return manifest

    def write(self, directory: Path) -> None:
        """Write the manifest of a checkpoint atomically, and sync it to disk.

        Raises:
            OSError: it cannot be written.
        """
        named: dict[str, Any] = {
            "format": _FORMAT,
            "run": self.run,
            "iteration": self.iteration,
            "block_bytes": self.block_bytes,
            "files": {name: {"bytes": each.num_bytes, _CHECKSUM: each.digests} for name, each in sorted(self.files.items())},
        }
        replace_text(directory / MANIFEST, json.dumps(named | {_CHECKSUM: _digest_of(named)}, indent=1) + "\n")

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(each.num_bytes for each in self.files.values())

    def blocks(self) -> list[FileBlock]:
        """All blocks of all files, in the order of names and offsets."""
        return [
            FileBlock(name, offset, min(self.block_bytes, each.num_bytes - offset), digest)
            for name, each in sorted(self.files.items())
            for offset, digest in zip(range(0, each.num_bytes, self.block_bytes), each.digests, strict=True)
        ]


def record_of(path: Path, *, block_bytes: int = _BLOCK_BYTES) -> FileRecord:
    """Read a file once and compute the checksum of each block.

    Args:
        path: the file.
        block_bytes: size of all blocks but the last.

    Raises:
        OSError: it cannot be read.
    """
    digests, num_bytes = [], 0
    with path.open("rb", buffering=0) as stream:
        while (block := _read_block(stream, block_bytes))[0]:
            num_bytes += block[0]
            digests.append(block[1])
    return FileRecord(num_bytes, tuple(digests))


def blocks_of_rank(blocks: Sequence[FileBlock], *, rank: int, world_size: int) -> list[FileBlock]:
    """The blocks that a rank verifies: neighbors, of about the same number of bytes on each rank.

    Args:
        blocks: of the whole checkpoint.
        rank: this rank.
        world_size: ranks that share the work.
    """
    total, before, own = sum(block.num_bytes for block in blocks), 0, []
    for block in blocks:
        middle = before + block.num_bytes / 2
        if int(middle * world_size / total) == rank:
            own.append(block)
        before += block.num_bytes
    return own


def damaged_names(directory: Path, manifest: Manifest) -> dict[str, str]:
    """What is wrong with each file by its name and size alone: missing, of another size, or not of this checkpoint.

    Files that loading does not read may be added.
    """
    damage = {}
    for name, record in manifest.files.items():
        path = directory / name
        if not path.is_file():
            damage[name] = "is missing"
        elif (found := path.stat().st_size) != record.num_bytes:
            damage[name] = f"has {found:,} bytes instead of {record.num_bytes:,}"
    for path in sorted(directory.iterdir()):
        if path.name not in manifest.files and (path.suffix == ".distcp" or path.name in _OTHER_DATA):
            damage[path.name] = "was not saved with this checkpoint"
    return damage


def damaged_blocks(
    directory: Path,
    blocks: Sequence[FileBlock],
    *,
    num_threads: int,
    shown: Callable[[Sequence[Future[str | None]]], Iterable[Future[str | None]]] = iter,
) -> dict[str, str]:
    """What is wrong with each file by its content, for the first of its blocks that differs.

    Args:
        directory: the checkpoint.
        blocks: what to compare.
        num_threads: threads that read them.
        shown: yields the results it is given, and shows progress.
    """
    damage: dict[str, str] = {}
    pool = ThreadPoolExecutor(max(1, num_threads))
    try:
        compared = [pool.submit(_difference, directory, block) for block in blocks]
        for block, each in zip(blocks, shown(compared), strict=True):
            if (reason := each.result()) is not None:
                damage.setdefault(block.file, reason)
    finally:
        pool.shutdown(cancel_futures=True)
    return damage


def first_damage(damage: Mapping[str, str]) -> str:
    """One line about damaged files, by name: the first ones, and how many more there are."""
    named = [f"{name} {reason}" for name, reason in sorted(damage.items())]
    more = len(named) - _NUM_NAMED
    return ", ".join(named[:_NUM_NAMED]) + (f", and {more} more files" if more > 0 else "")


def _difference(directory: Path, block: FileBlock) -> str | None:
    try:
        with (directory / block.file).open("rb", buffering=0) as stream:
            stream.seek(block.offset)
            found = _read_block(stream, block.num_bytes)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if found == (block.num_bytes, block.digest):
        return None
    last = block.offset + block.num_bytes - 1
    return f"is damaged or of another run: its bytes {block.offset:,} to {last:,} are not those that were saved"


def _read_block(stream: RawIOBase, limit: int) -> tuple[int, str]:
    """(bytes read, their checksum) of the next `limit` bytes, or up to the end of the file."""
    hasher, left = xxhash.xxh3_128(), limit
    buffer = memoryview(bytearray(min(_READ_BYTES, limit)))
    while left and (count := stream.readinto(buffer[:left])):
        hasher.update(buffer[:count])
        left -= count
    return limit - left, hasher.hexdigest()


def _digest_of(named: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(named, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
