"""The file of --metrics-jsonl: JSON objects, one per line, appended.

A disk that is full, a quota or a lost mount must not end a training run that needs none of it: the first failed write is logged,
and training goes on. Later objects are tried again, so a file that can be written again has a gap and no torn line.
"""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["JsonLines"]

_log = logging.getLogger(__name__)


class JsonLines:
    """Writes JSON objects to a file. Only one rank may have one.

    Args:
        path: the file; directories that are missing are made.
        is_continued: whether to keep what an existing file has.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str, *, is_continued: bool) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)  # a line that is not written now is not kept for later either
        self._is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        self._has_failed = False
        if self._is_regular and not is_continued:
            self._file.truncate(0)

    def write(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Append objects, all of them or none. NaN and infinity become null, because JSON has neither."""
        text = "".join(json.dumps({key: _finite_or_none(value) for key, value in each.items()}) + "\n" for each in objects)
        rest, size = memoryview(text.encode()), None
        try:
            size = os.fstat(self._file.fileno()).st_size
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            if self._is_regular and size is not None:
                with suppress(OSError):
                    self._file.truncate(size)
            self._report(error)

    def close(self) -> None:
        """Close the file."""
        try:
            self._file.close()
        except OSError as error:  # where a write fails only when the file is closed, such as on NFS
            self._report(error)

    def _report(self, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.warning(
                "--metrics-jsonl %s cannot be written: %s; training goes on, and iterations are missing in it while that lasts",
                self._path,
                error.strerror or error,
            )


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
