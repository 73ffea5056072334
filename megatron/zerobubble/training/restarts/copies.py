"""The copies of ranks' states in one folder in host memory: written atomically, with checksums.

::

    state-0000040-of-00003-by-00001.pt           the state of rank 3 after iteration 40, kept by rank 1
    state-0000040-of-00003-by-00001.json         its record: whose it is, and a SHA-256 per block; written last
    state-0000050-of-00003-by-00001.pt.writing   a copy being written, or left behind by a rank that died

A copy counts if its record is as it was written and its content fits the record. So a torn file, a flipped bit, a copy of another
job or of another layout are not used. Ranks of one machine share the folder; each writes files of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint.manifest import Block, damaged_blocks, first_damage, record_of

__all__ = ["Copies", "CopyRecord"]

_NAME = re.compile(r"state-(\d{7,})-of-\d{5,}-by-\d{5,}")
_BLOCK_BYTES = 16 * 1024 * 1024
_NUM_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class CopyRecord:
    """What a copy is of, and what it holds."""

    job: str
    """Id of the job."""
    iteration: int
    """Iterations done."""
    consumed_samples: int
    """Samples consumed by then, by all ranks together."""
    owner: int
    """The rank whose state it is."""
    fingerprint: str
    """Of the owner's part of the model and of the flags; a state fits only a rank with the same."""
    num_bytes: int = 0
    """Size of the copy."""
    digests: tuple[str, ...] = ()
    """SHA-256 of each block of 16 MiB."""

    def to_text(self) -> str:
        """The record as JSON, with a checksum of itself."""
        named = asdict(self) | {"digests": list(self.digests)}
        return json.dumps(named | {"sha256": _digest_of(named)})

    @classmethod
    def from_text(cls, text: str) -> CopyRecord:
        """The inverse of `to_text`. Raises CheckpointError if it is damaged."""
        try:
            named: dict[str, Any] = json.loads(text)
            if named.pop("sha256") != _digest_of(named):
                raise CheckpointError("its record is damaged")
            return cls(**named | {"digests": tuple(named["digests"])})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError("its record is damaged") from error


class Copies:
    """The copies in a folder.

    Args:
        folder: in host memory; made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def folder(self) -> Path:
        """The folder."""
        return self._folder

    def path(self, name: str) -> Path:
        """The file that holds a copy's state."""
        return self._folder / f"{name}.pt"

    def names(self) -> list[str]:
        """Names of all copies that have a record."""
        found = (path.stem for path in self._folder.glob("state-*.json"))
        return sorted(name for name in found if _NAME.fullmatch(name))

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        total = 0
        for path in self._folder.iterdir():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
        return total

    def add(self, record: CopyRecord, *, holder: int, write: Callable[[IO[bytes]], object]) -> tuple[str, CopyRecord]:
        """Write a copy of this rank's own state; return its name and its record, with size and checksums.

        Args:
            record: what it is of.
            holder: this rank.
            write: writes the state to a file.

        Raises:
            OSError: it cannot be written; nothing is left of it.
        """
        name = _name(record, holder)
        with self._writing(name) as unfinished:
            with unfinished.open("wb") as stream:
                write(stream)
            content = record_of(unfinished, block_bytes=_BLOCK_BYTES)
            record = CopyRecord(**asdict(record) | {"num_bytes": content.num_bytes, "digests": content.digests})
            self._publish(name, unfinished, record)
        return name, record

    def take(self, record: CopyRecord, *, holder: int, write: Callable[[IO[bytes] | None], object]) -> str:
        """Write a copy that another rank sent, and compare it with its record; return its name.

        Args:
            record: the sender's.
            holder: this rank.
            write: writes what arrives to a file; called with None if there can be none, as what was sent has to be received.

        Raises:
            OSError: it cannot be written; nothing is left of it.
            CheckpointError: it is not what was sent; nothing is left of it.
        """
        name = _name(record, holder)
        with self._writing(name) as unfinished:
            try:
                opened = unfinished.open("wb")
            except OSError:
                write(None)
                raise
            with opened as stream:
                write(stream)
            _compare(unfinished, record)
            self._publish(name, unfinished, record)
        return name

    def record(self, name: str) -> CopyRecord:
        """The record of a copy whose content fits it.

        Raises:
            CheckpointError: the record or the content is damaged.
        """
        try:
            text = self._record_path(name).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise CheckpointError(f"its record cannot be read: {error.strerror}") from error
        record = CopyRecord.from_text(text)
        _compare(self.path(name), record)
        return record

    def remove(self, *, until: int | None = None, but: int | None = None) -> None:
        """Remove copies, and what ranks that died left of some. No other rank of the machine may be writing one that is chosen.

        Args:
            until: only those of an iteration below this one; None: all.
            but: not those of this iteration.
        """
        for path in sorted(self._folder.glob("state-*"), key=lambda path: path.suffix != ".json"):  # records first
            found = _NAME.match(path.name)
            if found and int(found[1]) != but and (until is None or int(found[1]) < until):
                path.unlink(missing_ok=True)

    def discard(self, iteration: int, *, holder: int) -> None:
        """Remove the copies of an iteration that this rank holds."""
        for path in self._folder.glob(f"state-{iteration:07d}-of-*-by-{holder:05d}.*"):
            path.unlink(missing_ok=True)

    def _record_path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    @contextlib.contextmanager
    def _writing(self, name: str) -> Any:
        """The path to write a copy to; removed if that fails."""
        unfinished = self._folder / f"{name}.pt.writing"
        self._record_path(name).unlink(missing_ok=True)
        try:
            yield unfinished
        finally:
            unfinished.unlink(missing_ok=True)

    def _publish(self, name: str, unfinished: Path, record: CopyRecord) -> None:
        unfinished.replace(self.path(name))
        text = self._folder / f"{name}.json.writing"
        try:
            text.write_text(record.to_text(), encoding="utf-8")
            text.replace(self._record_path(name))
        except OSError:
            text.unlink(missing_ok=True)
            self.path(name).unlink(missing_ok=True)
            raise


def _name(record: CopyRecord, holder: int) -> str:
    return f"state-{record.iteration:07d}-of-{record.owner:05d}-by-{holder:05d}"


def _compare(path: Path, record: CopyRecord) -> None:
    """Raise CheckpointError unless the content of a file is what a record says."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error.strerror}") from error
    if size != record.num_bytes:
        raise CheckpointError(f"it has {size:,} bytes instead of {record.num_bytes:,}")
    offsets = range(0, size, _BLOCK_BYTES)
    if len(offsets) != len(record.digests):
        raise CheckpointError("its record is damaged")
    blocks = [
        Block(path.name, offset, min(_BLOCK_BYTES, size - offset), digest)
        for offset, digest in zip(offsets, record.digests, strict=True)
    ]
    damage = damaged_blocks(path.parent, blocks, num_threads=_NUM_THREADS)
    if damage:
        raise CheckpointError(first_damage(damage))


def _digest_of(named: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
