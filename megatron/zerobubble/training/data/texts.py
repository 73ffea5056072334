"""Reads documents: the values of JSON lines, or the source files of the Python standard library. Standard library only.

A compressed file may be a bomb: some kilobytes of it become terabytes. So a line, and what is decompressed, have a limit.
"""

from __future__ import annotations

import gzip
import json
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

from megatron.zerobubble.errors import DataError

__all__ = ["Document", "json_texts", "stdlib_texts"]

_GZIP = b"\x1f\x8b"
"""The first bytes of a gzip file, which may have any name."""
_LONGEST_LINE = 2**26
"""Most bytes of a line: it is in memory several times."""
_LARGEST_RATIO, _FREE_BYTES = 200, 2**26
"""How many times as large as its file a decompressed text may be, beyond 64 MiB; of real text it is less than 20."""

_SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3", "idlelib", "turtledemo")
)
"""Directories of the standard library that contain tests or demonstrations, or are not part of it."""


class Document(NamedTuple):
    """A text to tokenize."""

    text: str
    """The text."""
    place: str = "a document"
    """Where it was read, for errors."""
    end: int = 0
    """Bytes of the input that were read when it was complete: of a compressed file, compressed ones."""


def json_texts(path: str, keys: Sequence[str]) -> Iterator[Document]:
    """The documents of a JSON-lines file: the values of `keys` of each line. A file compressed by gzip is decompressed.

    Raises:
        DataError: the file cannot be read, or a line is not UTF-8 text or not an object with the keys; the message has the line
            number.
    """
    if not Path(path).is_file():
        raise DataError(f"--input {path} does not exist, or is no regular file; give a file with one JSON object a line")
    number = num_bytes = 0
    try:
        with Path(path).open("rb") as file, closing(_decompressed(file)) as lines:
            for number, line in enumerate(iter(partial(lines.readline, _LONGEST_LINE + 1), b""), start=1):
                place = f"--input {path}, line {number}"
                num_bytes += len(line)
                if len(line) > _LONGEST_LINE:
                    raise DataError(f"{place} is longer than {_LONGEST_LINE:,} bytes; split the document")
                if num_bytes > max(_FREE_BYTES, _LARGEST_RATIO * file.tell()):
                    raise DataError(
                        f"{place}: the file is decompressed to more than {_LARGEST_RATIO} times its size, which no text is; "
                        "give the text itself if it is one"
                    )
                text = _text(line, place)
                if text.strip():
                    for value in _values(text, keys, place):
                        yield Document(value, place, file.tell())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"--input {path} is a damaged gzip file after line {number} ({error}); compress the text again") from None
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror or error}") from None


def _decompressed(file: IO[bytes]) -> IO[bytes] | gzip.GzipFile:
    start = file.read(len(_GZIP))
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if start == _GZIP else file


def _text(line: bytes, place: str) -> str:
    try:
        return line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: byte {error.start + 1} of the line, {line[error.start]:#04x}, is not UTF-8; convert the file, for example "
            "with iconv -f latin1 -t utf-8"
        ) from None


def _values(text: str, keys: Sequence[str], place: str) -> list[str]:
    """The texts of one line."""
    try:
        values = json.loads(text)
        return [str(values[key]) for key in keys]
    except RecursionError:
        raise DataError(f"{place}: JSON that is nested too deeply") from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{place}: not a JSON object with the key(s) {', '.join(keys)} ({error!r})") from None


def stdlib_texts(root: Path | None = None) -> Iterator[Document]:
    """The Python standard library's source files, sorted by path, so that every run makes the same dataset.

    Args:
        root: directory of the library; None: that of the running Python.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    end = 0
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        folders = path.relative_to(root).parts[:-1]
        if _SKIPPED_FOLDERS.isdisjoint(folders) and not any(folder.startswith("config-") for folder in folders):
            text = path.read_text(encoding="utf-8", errors="replace")
            end += len(text)
            if text.strip():
                yield Document(text, str(path), end)
