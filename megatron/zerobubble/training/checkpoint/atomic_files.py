"""Atomic replacement of small files."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["replace_text", "sync"]


def replace_text(file: Path, text: str) -> None:
    """Replace `file` atomically and sync it to disk: a reader, or a crash, finds the old content or the new.

    Only one process at a time may write a file. The unfinished file's name begins with a dot.
    """
    unfinished = file.with_name(f".{file.name}.new")
    unfinished.write_text(text, encoding="utf-8")
    sync(unfinished)
    unfinished.replace(file)
    sync(file.absolute().parent)


def sync(path: Path) -> None:
    """fsync a file's content, or a directory's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
