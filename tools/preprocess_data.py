#!/usr/bin/env python3
"""Tokenize text into an indexed dataset for megatron-core: PREFIX.bin and PREFIX.idx.

    python tools/preprocess_data.py --input books.jsonl --json-keys text --append-eod --output-prefix data/books
    python tools/preprocess_data.py --python-stdlib --output-prefix data/python-stdlib

A document is one value of a JSON line, or with --python-stdlib one source file of the Python standard library: real text that
every machine has. The output is deterministic and replaces an old dataset atomically.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import sysconfig
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from megatron.zerobubble.errors import DataError, UserError
from megatron.zerobubble.flags.dataclass_flags import add_group, from_namespace
from megatron.zerobubble.training.config.tokenizer import TokenizerConfig

_LOG_INTERVAL_S = 10.0
_GZIP = b"\x1f\x8b"
"""The first bytes of a gzip file, which may have any name."""
_LONGEST_LINE = 2**26
"""Most bytes of a line: it is in memory several times."""
_LARGEST_RATIO, _FREE_BYTES = 200, 2**26
"""How many times as large as its file a decompressed text may be, beyond 64 MiB; of real text it is less than 20. A gzip bomb of
some kilobytes becomes terabytes."""

_SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3", "idlelib", "turtledemo")
)
"""Directories of the standard library that contain tests or demonstrations, or are not part of it."""


def main(argv: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    options = _parser().parse_args(argv)
    begin = time.perf_counter()
    try:
        tokenizer = from_namespace(TokenizerConfig, options)
        num_bytes = None if options.python_stdlib else _size(options.input)
        with _Progress(num_bytes, options.log_interval) as progress:
            num_documents, num_tokens = preprocess(
                documents=stdlib_texts() if options.python_stdlib else json_texts(options.input, options.json_keys),
                tokenizer=tokenizer,
                prefix=options.output_prefix,
                appends_eod=options.append_eod,
                progress=progress,
            )
    except UserError as error:
        print(f"preprocess_data.py: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"preprocess_data.py: error: {error.filename or options.output_prefix}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("preprocess_data.py: interrupted; nothing was written", file=sys.stderr)
        return 130
    seconds = time.perf_counter() - begin
    print(
        f"{options.output_prefix}: {num_documents} documents, {num_tokens} tokens, "
        f"{tokenizer.tokenizer_type} with a vocabulary of {tokenizer.known_vocab_size}, in {seconds:.1f} s"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = parser.add_argument_group("text").add_mutually_exclusive_group(required=True)
    text.add_argument("--input", metavar="FILE.jsonl", help="JSON lines: one object per line; .jsonl.gz is decompressed")
    text.add_argument("--python-stdlib", action="store_true", help="the Python standard library's own source files")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of the texts (default: text)")
    parser.add_argument("--append-eod", action="store_true", help="append an end-of-document token to each document")
    add_group(parser, TokenizerConfig)
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    output.add_argument(
        "--log-interval", type=int, metavar="N", help="documents between progress lines in a log (default: one every 10 s)"
    )
    return parser


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}") from None


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


class Encoded(NamedTuple):
    """A document's tokens."""

    ids: np.ndarray[Any, Any]
    """[n] token ids, in the smallest dtype of a dataset that holds the vocabulary: uint16 or int32."""
    end: int
    """Bytes of the input that were read when the document was complete."""


class Encoder:
    """Tokenizes documents.

    Args:
        config: the tokenizer.
        appends_eod: whether to append an end-of-document token to each document.
    """

    def __init__(self, config: TokenizerConfig, *, appends_eod: bool) -> None:
        from megatron.zerobubble.mcore.cpu.device import quiet_third_parties

        with quiet_third_parties():  # torch and megatron-core, which --help does without
            from megatron.core.datasets.indexed_dataset import DType

            from megatron.zerobubble.training.data.build_tokenizer import build_tokenizer

        tokenizer = build_tokenizer(config)
        self.vocab_size: int = tokenizer.vocab_size
        """Vocabulary size before padding."""
        self.dtype = DType.optimal_dtype(self.vocab_size)
        """numpy's type of the token ids."""
        self._tokenize = tokenizer.tokenize
        self._suffix = [int(tokenizer.eod)] if appends_eod else []

    def __call__(self, document: Document) -> Encoded:
        """The document's tokens. Raises DataError, with the document's place, if it cannot be tokenized."""
        try:
            ids = np.asarray([*self._tokenize(document.text), *self._suffix], dtype=np.int64)
        except Exception as error:  # libraries raise all kinds, for texts of all kinds
            reason = " ".join(str(error).split())[:200]
            raise DataError(f"{document.place} cannot be tokenized: {reason or type(error).__name__}") from error
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise DataError(f"{document.place} has the token {ids.max()}, outside of the vocabulary of {self.vocab_size}")
        return Encoded(ids.astype(self.dtype), document.end)


class _Progress:
    """Documents per second: a bar in a terminal, plain lines in a log; both on standard error.

    Args:
        num_bytes: size of the input; None if it is not known.
        log_interval: documents between lines; None for a line every 10 s.
    """

    def __init__(self, num_bytes: int | None, log_interval: int | None) -> None:
        self._num_bytes = num_bytes
        self._log_interval = log_interval
        self._bar: Any = None
        self._documents = self._last_documents = 0
        self._begin = self._last = time.perf_counter()

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._num_bytes, unit="B", unit_scale=True, unit_divisor=1024, dynamic_ncols=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, end: int) -> None:
        """Count a document that ends at byte `end` of the input."""
        if self._documents == 0:
            self._begin = self._last = time.perf_counter()  # without the time that loading the tokenizer took
        self._documents += 1
        if self._bar is not None:
            self._bar.update(end - self._bar.n)
            if self._documents % 64 == 1:
                self._bar.set_postfix_str(self._speed(), refresh=False)
            return
        now = time.perf_counter()
        by_time = self._log_interval is None and now - self._last >= _LOG_INTERVAL_S
        if by_time or (self._log_interval and self._documents % self._log_interval == 0):
            share = f", {100.0 * end / self._num_bytes:.0f} % of the input" if self._num_bytes else ""
            print(f"Processed {self._documents} documents ({self._speed()}){share}", file=sys.stderr, flush=True)
            self._last = now

    def _speed(self) -> str:
        return f"{self._documents / max(time.perf_counter() - self._begin, 1e-9):.0f} docs/s"


def preprocess(
    *,
    documents: Iterable[Document],
    tokenizer: TokenizerConfig,
    prefix: str,
    appends_eod: bool,
    progress: _Progress | None = None,
) -> tuple[int, int]:
    """Tokenize documents and write the dataset.

    Args:
        documents: their texts; empty ones are skipped.
        tokenizer: the tokenizer.
        prefix: path prefix of the dataset.
        appends_eod: whether to append an end-of-document token to each document.
        progress: counts the documents.

    Returns:
        The number of documents and of tokens.

    Raises:
        DataError: there is no text, or it cannot be read or tokenized.
    """
    encoder = Encoder(tokenizer, appends_eod=appends_eod)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    temporary = f"{prefix}.{os.getpid()}.writing"
    try:
        written_numbers = _write(map(encoder, documents), temporary, encoder.dtype, progress)
        for written, final in zip(_files(temporary), _files(prefix), strict=True):
            written.replace(final)
    finally:
        for leftover in _files(temporary):
            leftover.unlink(missing_ok=True)
    return written_numbers


def _files(prefix: str) -> tuple[Path, ...]:
    """The files of a dataset. The index is the last one: a dataset that has it is complete."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


def _write(encoded: Iterable[Any], prefix: str, dtype: Any, progress: _Progress | None) -> tuple[int, int]:
    """Write .bin and .idx; return the number of documents and of tokens. Empty documents are skipped."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    num_documents = num_tokens = 0
    with builder.data_file:
        for ids, end in encoded:
            if progress is not None:
                progress.update(end)
            if len(ids):
                builder.add_document(ids, [len(ids)])
                num_documents += 1
                num_tokens += len(ids)
        if num_documents == 0:
            raise DataError("there is no text to tokenize")
        builder.finalize(f"{prefix}.idx")
    return num_documents, num_tokens


if __name__ == "__main__":
    sys.exit(main())
