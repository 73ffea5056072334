"""Writing the files of a command: whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from megatron.zerobubble.files import replace_text

__all__ = ["write_whole"]

_DESCRIPTORS = ("/dev/std", "/dev/fd/", "/proc/")
"""Begins the name of an open file, whose content can be replaced but not the file."""


def write_whole(target: str, text: str) -> None:
    """Write text to a file.

    Whoever reads the file meanwhile, or after the command was killed or the disk was full, finds what it had before or all of the
    text. An existing file keeps its permissions, and a link stays one. Where a file can be written but not replaced (pipes,
    devices, hard links, files of other users, folders that cannot be written) it is written directly.

    Raises:
        OSError: it cannot be written; the error names the target.
    """
    try:
        file = Path(target).resolve()
        if target.startswith(_DESCRIPTORS) or not _is_replaceable(file):
            Path(target).write_text(text, encoding="utf-8")
        else:
            replace_text(file, text, unfinished=f".zerobubble-{secrets.token_hex(8)}.new")
    except RuntimeError:  # a loop of symbolic links, in Python 3.11 and 3.12
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), target) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, target) from None


def _is_replaceable(file: Path) -> bool:
    if not os.access(file.parent, os.R_OK | os.W_OK | os.X_OK):
        return False
    if not file.exists():
        return True
    status = file.stat()
    return file.is_file() and os.access(file, os.W_OK) and status.st_nlink == 1 and status.st_uid == os.geteuid()


def write_text(target: str, text: str) -> None:
    """Write a text and a line's end to a file, or print it for `-`."""
    if target == "-":
        print(text)
    else:
        write_whole(target, text + "\n")
