"""Files that are replaced whole or not at all, and files from elsewhere, which may be anything."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

__all__ = ["MOST_GIVEN", "disk_error", "read_given", "read_regular", "replace_text", "sync"]

MOST_GIVEN = 2**28
"""Bytes of the largest file that a command reads whole, many times those of the largest plan."""
_PIECE = 2**20
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a disk that is full, or fails."""


def read_given(source: str, *, may_be_stdin: bool = True) -> str:
    """The text of what a user names: a file in UTF-8, or a pipe.

    Args:
        source: its path.
        may_be_stdin: whether `-` is standard input, not a file of that name.

    Raises:
        OSError: it cannot be read, or has more than 256 MiB, as a device without an end has.
        UnicodeDecodeError: it is not text.
    """
    pieces: list[Any] = []
    left, is_stdin = MOST_GIVEN, may_be_stdin and source == "-"
    with contextlib.nullcontext(sys.stdin) if is_stdin else open(source, "rb") as stream:
        while piece := stream.read(_PIECE):
            left -= len(piece)
            if left < 0:
                raise OSError(errno.EFBIG, f"it has more than {MOST_GIVEN:,} bytes", source)
            pieces.append(piece)
    return "".join(pieces) if is_stdin else b"".join(pieces).decode("utf-8")


def disk_error(error: BaseException) -> OSError | None:
    """The error of a full or failing disk in consequence of which another one was raised; None: there is none.

    torch's writer of zip files ends with an error about its own position when a write has failed.
    """
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, OSError) and reason.errno in _OF_DISKS:
            return reason
        reason = reason.__cause__ or reason.__context__
    return None


def read_regular(file: Path, *, most: int) -> bytes:
    """The content of a regular file, or of one that `file` links to.

    Args:
        file: the file.
        most: bytes that it may have.

    Raises:
        OSError: it cannot be read, has more bytes, or is something else, such as a FIFO, which would wait for a writer.
    """
    with open(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(file))
        content = stream.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(file))
    return content


def replace_text(file: Path, text: str, *, unfinished: str | None = None) -> None:
    """Replace `file` atomically and sync it to disk: a reader, or a crash, finds the old content or the new.

    An existing file keeps its permissions.

    Args:
        file: the file.
        text: its new content.
        unfinished: name of the file beside it that is written first; None: one for `file`, which only one process at a time may
            write then, and which a process that was killed leaves behind for the next one to replace.

    Raises:
        OSError: it cannot be written; the file is as before.
    """
    new = file.with_name(unfinished or f".{file.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        sync(new)
        if file.exists():
            shutil.copymode(file, new)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
    sync(file.absolute().parent)


def sync(path: Path) -> None:
    """fsync a file's content, or a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
