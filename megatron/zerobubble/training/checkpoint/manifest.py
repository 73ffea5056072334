"""The manifest of a checkpoint: the size and the checksum of every file, by which damage is found before anything is loaded.

torch's and megatron-core's formats have no checksums: overwritten bytes of a tensor, a flipped bit, or a data file of another run
with the same layout load without an error. ``manifest.json`` lists the checksum of every file, and the id of the run that saved
it. It ends with a checksum of itself. Checksums are XXH3's of 128 bits: verifying must cost next to nothing beside loading.

It is the last file to be written into a checkpoint, before the checkpoint is published (see `directory`): one that has it is
complete. No torch here: `zerobubble checkpoint verify` does without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.files import read_regular, replace_text

__all__ = [
    "MANIFEST",
    "FileRecord",
    "Manifest",
    "damaged_content",
    "damaged_names",
    "first_damage",
    "record_of",
    "share_of_rank",
]

MANIFEST = "manifest.json"
"""Name of the manifest in the directory of a checkpoint."""

_FORMAT = "megatron-zerobubble-manifest/2"
_CHECKSUM = "xxh3_128"
"""Key of checksums in the file."""
_READ_BYTES = 1024 * 1024
_MAX_BYTES = 2**26
"""Of a manifest: that of a file takes about 120."""
_NUM_NAMED = 3
_OTHER_DATA = frozenset({"common.pt", ".metadata", "metadata.json"})
"""Files beside `*.distcp` that are read when a checkpoint is loaded."""


@dataclass(frozen=True)
class FileRecord:
    """What a file held when it was saved."""

    num_bytes: int
    """Size of the file."""
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

    @classmethod
    def read(cls, directory: Path) -> Manifest | None:
        """The manifest of a checkpoint; None if it has none.

        Raises:
            CheckpointError: it is damaged, or cannot be read.
        """
        path = directory / MANIFEST
        try:
            named = json.loads(read_regular(path, most=_MAX_BYTES))
            own = named.pop(_CHECKSUM)
            if own != _digest_of(named):
                raise CheckpointError(f"{path} is damaged: its checksum is not that of its content")
            if named["format"] != _FORMAT:
                raise CheckpointError(f"{path} has format {str(named['format'])[:80]!r}; this version reads {_FORMAT!r}")
            manifest = cls(
                run=named["run"],
                iteration=named["iteration"],
                files={name: FileRecord(int(each["bytes"]), str(each[_CHECKSUM])) for name, each in named["files"].items()},
            )
            if any(Path(name).name != name for name in manifest.files):
                raise ValueError("a file outside of the checkpoint")
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
            "files": {name: {"bytes": each.num_bytes, _CHECKSUM: each.digest} for name, each in sorted(self.files.items())},
        }
        replace_text(directory / MANIFEST, json.dumps(named | {_CHECKSUM: _digest_of(named)}, indent=1) + "\n")

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(each.num_bytes for each in self.files.values())


def record_of(path: Path) -> FileRecord:
    """Read a file once and compute its checksum.

    Raises:
        OSError: it cannot be read.
    """
    hasher, num_bytes = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            hasher.update(buffer[:count])
            num_bytes += count
    return FileRecord(num_bytes, hasher.hexdigest())


def share_of_rank(files: Mapping[str, FileRecord], *, rank: int, world_size: int) -> dict[str, FileRecord]:
    """The files that a rank verifies: dealt out to the ranks by size, the largest first.

    Args:
        files: of the whole checkpoint.
        rank: this rank.
        world_size: ranks that share the work.
    """
    return dict(sorted(files.items(), key=lambda each: (-each[1].num_bytes, each[0]))[rank::world_size])


def damaged_names(directory: Path, manifest: Manifest) -> dict[str, str]:
    """What is wrong with each file by its name and size alone: missing, of another size, or not of this checkpoint.

    Files that loading does not read may be added.
    """
    damage = {}
    for name, record in manifest.files.items():
        path = directory / name
        if not path.is_file():
            damage[name] = "is not a regular file" if path.exists() else "is missing"
        elif not path.resolve().is_relative_to(directory.resolve()):
            damage[name] = "is a link out of the checkpoint"
        elif (found := path.stat().st_size) != record.num_bytes:
            damage[name] = f"has {found:,} bytes instead of {record.num_bytes:,}"
    for path in sorted(directory.iterdir()):
        if path.name not in manifest.files and (path.suffix == ".distcp" or path.name in _OTHER_DATA):
            damage[path.name] = "was not saved with this checkpoint"
    return damage


def damaged_content(
    directory: Path, files: Mapping[str, FileRecord], *, shown: Callable[[Sequence[str]], Iterable[str]] = iter
) -> dict[str, str]:
    """What is wrong with each file by its content.

    Args:
        directory: the checkpoint.
        files: what to compare.
        shown: yields the names that it is given, and shows progress.
    """
    damage = {}
    for name in shown(list(files)):
        try:
            found = record_of(directory / name)
        except OSError as error:
            damage[name] = f"cannot be read: {error.strerror}"
        else:
            if found != files[name]:
                damage[name] = "is damaged or of another run: its content is not what was saved"
    return damage


def first_damage(damage: Mapping[str, str]) -> str:
    """One line about damaged files, by name: the first ones, and how many more there are."""
    named = [f"{name} {reason}" for name, reason in sorted(damage.items())]
    more = len(named) - _NUM_NAMED
    return ", ".join(named[:_NUM_NAMED]) + (f", and {more} more files" if more > 0 else "")


def _digest_of(named: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(named, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
