"""Files that are replaced whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["replace_text", "sync"]


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
