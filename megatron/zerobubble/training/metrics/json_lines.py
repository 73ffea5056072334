"""The file of --metrics-jsonl: JSON objects, one per line, appended.

A disk that is full, a quota or a lost mount must not end a training run that needs none of it: the first failed write is logged,
and training goes on. What was not written is tried again with later objects.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
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
        self._file = self._path.open("ab" if is_continued else "wb")
        self._has_failed = False

    def write(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """Append objects. NaN and infinity become null, because JSON has neither."""
        text = "".join(json.dumps({key: _finite_or_none(value) for key, value in each.items()}) + "\n" for each in objects)
        try:
            self._file.write(text.encode())
            self._file.flush()
        except OSError as error:
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
