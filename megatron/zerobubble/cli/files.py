"""Writing the files of a command: whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_whole"]

_DESCRIPTORS = ("/dev/std", "/dev/fd/", "/proc/")
"""Begins the name of an open file, whose content can be replaced but not the file."""


def write_whole(target: str, text: str) -> None:
    """Write text to a file.

    Whoever reads the file meanwhile, or after the command was killed or the disk was full, finds what it had before or all of the
    text. Pipes and devices are written to directly.

    Raises:
        OSError: it cannot be written; the error names the target.
    """
    given = Path(target)
    is_special = given.exists() and not (given.is_file() and os.access(given, os.W_OK))
    if is_special or target.startswith(_DESCRIPTORS):
        given.write_text(text, encoding="utf-8")
        return
    file = given.resolve()  # a link stays one
    unfinished = file.with_name(f".zerobubble-{os.getpid()}.new")
    try:
        with unfinished.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, target) from None
    finally:
        unfinished.unlink(missing_ok=True)
