"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["replace_text", "sync"]


def replace_text(file: Path, text: str) -> None:
    """Write `file` and put it on disk; whoever reads it, or loses power meanwhile, finds the old content or the new.

    One process at a time may write a file. The name of the unfinished one begins with a dot.
    """
    unfinished = file.with_name(f".{file.name}.new")
    unfinished.write_text(text, encoding="utf-8")
    sync(unfinished)
    unfinished.replace(file)
    sync(file.absolute().parent)


def sync(path: Path) -> None:
    """Return when the file's content, or the folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
