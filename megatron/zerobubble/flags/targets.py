"""Checks that what a run writes can be written, before any rank waits for another.

A run of hours should not end at its first checkpoint because --save names a file. Nothing is left behind: directories that do not
exist are not made, existing files keep their content, and what is written to try a directory is deleted at once.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.zerobubble.errors import ConfigError

__all__ = ["Target", "check_targets"]


@dataclass(frozen=True)
class Target:
    """A flag that names what a run writes."""

    flag: str
    given: str | None
    is_file: bool = False
    """Whether it is a file, not a directory."""
    is_replaced: bool = False
    """Whether the file is replaced by a new one, in a directory that must exist, and not written in place."""

    @property
    def text(self) -> str:
        """The flag and its value, in error messages."""
        return f"{self.flag} {self.given}"


def check_targets(targets: Sequence[Target], *, tries: bool) -> None:
    """Raise unless every file and directory that flags name for writing can be written.

    Args:
        targets: what the flags name.
        tries: whether to try it. Else only empty names are refused.

    Raises:
        ConfigError: one cannot; the message says why.
    """
    for target in targets:
        if target.given is None:
            continue
        if not target.given.strip():
            kind = "file" if target.is_file else "directory"
            raise ConfigError(f"{target.flag} {target.given!r} is empty; give the {kind} to write, or leave it out")
        if tries:
            _check(target, Path(os.path.realpath(target.given)))


def _check(target: Target, path: Path) -> None:
    """Raise unless `path`, which has no symbolic links, can be written."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        _check_new(target, path)
        return
    except OSError as error:
        raise ConfigError(f"{target.text} cannot be written: {error.strerror}") from None
    if not target.is_file:
        if not stat.S_ISDIR(mode):
            raise ConfigError(f"{target.text} is a file; give a directory")
        _try_directory(target, path)
        return
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{target.text} is a directory; give the file to write in it, such as {path / 'NAME'}")
    if not stat.S_ISREG(mode) and target.is_replaced:
        raise ConfigError(f"{target.text} is a device or a pipe, which cannot be replaced; give a file")
    if target.is_replaced:
        _try_directory(target, path.parent)
    elif not stat.S_ISFIFO(mode):  # a pipe's reader would take the closed file for the end
        _try_file(target, path)


def _check_new(target: Target, path: Path) -> None:
    """Raise unless `path`, which does not exist, can be made, with its parents unless those must exist."""
    existing = next(parent for parent in path.parents if os.path.lexists(parent))
    if target.is_replaced and existing != path.parent:
        raise ConfigError(f"{target.text}: {path.parent} is not a writable directory: it does not exist; make it first")
    if not existing.is_dir():
        raise ConfigError(f"{target.text}: {existing} is not a writable directory: it is a file")
    _try_directory(target, existing)


def _try_directory(target: Target, folder: Path) -> None:
    """Write a file without a name, or one that is deleted at once, to a directory."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\n")
    except OSError as error:
        raise ConfigError(f"{target.text}: {folder} is not a writable directory: {error.strerror}") from None


def _try_file(target: Target, path: Path) -> None:
    """Open an existing file or device for appending, and write nothing; /dev/full refuses that, too."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, b"")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"{target.text} cannot be written: {error.strerror}") from None
