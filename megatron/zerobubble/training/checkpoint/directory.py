"""The --save directory: how a checkpoint becomes the latest one atomically, and the manifest by which damage is found.

::

    SAVE/iter_0000100/                       a complete checkpoint
    SAVE/iter_0000100/manifest.json          size and checksum of each of its files; the last one to be written
    SAVE/iter_0000200.writing/               a checkpoint being written, or left behind by a job that died
    SAVE/iter_0000100.replaced/              an older checkpoint of the same iteration, while a new one replaces it
    SAVE/latest_checkpointed_iteration.txt   the iteration of the latest checkpoint, updated last

Every step of `publish` is a rename of files that are synced to disk. So a job that dies at any moment leaves the checkpoint that
the text file names: as `iter_N`, or, between two renames, as `iter_N.replaced`.

torch's and megatron-core's formats have no checksums: overwritten bytes of a tensor, a flipped bit, or a file of another run with
the same layout load without an error. Checksums are XXH3's of 128 bits, which cost next to nothing beside loading. No torch here:
`zerobubble checkpoint verify` does without.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.files import read_regular, replace_text, sync

__all__ = [
    "MANIFEST",
    "TRACKER",
    "damage",
    "existing_directory",
    "first_damage",
    "iteration_directory",
    "prepare",
    "publish",
    "read_manifest",
    "record_of",
    "tracked_iteration",
    "writing_directory",
]

MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
_FORMAT = "megatron-zerobubble-manifest/2"
_CHECKSUM = "xxh3_128"
_READ_BYTES = 2**20
_MAX_BYTES = 2**26
_NUM_NAMED = 3

Files = Mapping[str, Mapping[str, Any]]
"""Name of a file -> its size and checksum."""


def iteration_directory(folder: str | Path, iteration: int) -> Path:
    """Path of the checkpoint of an iteration."""
    return Path(folder) / f"iter_{iteration:07d}"


def writing_directory(folder: str | Path, iteration: int) -> Path:
    """Path that the checkpoint of an iteration is written to before it is published."""
    return _beside(iteration_directory(folder, iteration), ".writing")


def existing_directory(folder: str | Path, iteration: int) -> Path:
    """Path to read the checkpoint of an iteration from, even if a job died while replacing it."""
    final = iteration_directory(folder, iteration)
    replaced = _beside(final, ".replaced")
    return replaced if replaced.is_dir() and not final.is_dir() else final


def tracked_iteration(folder: str | Path) -> int | None:
    """The iteration of the latest checkpoint; None if the directory has none. Raises CheckpointError if the file is damaged."""
    tracker = Path(folder) / TRACKER
    try:
        text = read_regular(tracker, most=_MAX_BYTES).decode("ascii", errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{tracker} cannot be read: {error.strerror}") from error
    if not text.isdecimal() or len(text) > 18:
        raise CheckpointError(f"{tracker} is damaged: it holds {text[:40]!r}, not an iteration")
    return int(text)


def prepare(folder: str | Path, iteration: int) -> None:
    """Make an empty directory to write the checkpoint of an iteration to, and remove what jobs that died left behind."""
    for path in Path(folder).glob("iter_*.writing"):
        shutil.rmtree(path)
    writing_directory(folder, iteration).mkdir(parents=True)


def publish(folder: str | Path, iteration: int, *, run: str, files: Files) -> None:
    """Make what was written to `writing_directory` the latest checkpoint.

    Args:
        folder: the --save directory.
        iteration: iteration of the checkpoint.
        run: id of the job.
        files: `record_of` each file.

    Raises:
        OSError: a file cannot be written; the previous checkpoint remains the latest.
    """
    final = iteration_directory(folder, iteration)
    writing, replaced = writing_directory(folder, iteration), _beside(final, ".replaced")
    named: dict[str, Any] = {"format": _FORMAT, "run": run, "iteration": iteration, "files": dict(files)}
    replace_text(writing / MANIFEST, json.dumps(named | {_CHECKSUM: _digest_of(named)}, indent=1) + "\n")
    for path in (*writing.iterdir(), writing):
        sync(path)
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)  # left by a job that died after `final` was in place
        final.rename(replaced)
    writing.rename(final)
    sync(final.parent)
    replace_text(final.parent / TRACKER, f"{iteration}\n")
    shutil.rmtree(replaced, ignore_errors=True)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a checkpoint: `run`, `iteration` and `files`.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = directory / MANIFEST
    try:
        named: dict[str, Any] = json.loads(read_regular(path, most=_MAX_BYTES))
        if named.pop(_CHECKSUM) != _digest_of(named) or named["format"] != _FORMAT:
            raise ValueError("its checksum is not that of its content")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return named


def record_of(path: Path) -> dict[str, Any]:
    """Read a file once: its size and its checksum. Raises OSError if it cannot be read."""
    hasher, num_bytes = xxhash.xxh3_128(), 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            hasher.update(buffer[:count])
            num_bytes += count
    return {"bytes": num_bytes, _CHECKSUM: hasher.hexdigest()}


def damage(directory: Path, files: Files, names: Iterable[str]) -> dict[str, str]:
    """What is wrong with each of the files `names`, of those in a manifest: missing, cut short, or of other content."""
    found = {}
    for name in names:
        path = directory / name
        try:
            if not path.is_file():
                found[name] = "is not a regular file" if path.exists() else "is missing"
            elif (num_bytes := path.stat().st_size) != files[name]["bytes"]:
                found[name] = f"has {num_bytes:,} bytes instead of {files[name]['bytes']:,}"
            elif record_of(path) != files[name]:
                found[name] = "is damaged or of another run: its content is not what was saved"
        except OSError as error:
            found[name] = f"cannot be read: {error.strerror}"
    return found


def first_damage(found: Mapping[str, str]) -> str:
    """One line about damaged files, by name: the first ones, and how many more there are."""
    named = [f"{name} {reason}" for name, reason in sorted(found.items())]
    more = len(named) - _NUM_NAMED
    return ", ".join(named[:_NUM_NAMED]) + (f", and {more} more files" if more > 0 else "")


def _digest_of(named: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(named, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
