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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.errors import DataError, UserError
from megatron.zerobubble.flags.dataclass_flags import add_group, from_namespace
from megatron.zerobubble.training.tokenizer import TokenizerConfig

_GZIP = b"\x1f\x8b"
"""The first bytes of a gzip file, which may have any name."""
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
        documents = stdlib_texts() if options.python_stdlib else json_texts(options.input, options.json_keys)
        num_documents, num_tokens = preprocess(
            documents=documents, tokenizer=tokenizer, prefix=options.output_prefix, appends_eod=options.append_eod
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
    return parser


class Document(NamedTuple):
    """A text to tokenize."""

    text: str
    place: str = "a document"
    """Where it was read, for errors."""


def json_texts(path: str, keys: Sequence[str]) -> Iterator[Document]:
    """The documents of a JSON-lines file: the values of `keys` of each line. A file compressed by gzip is decompressed.

    Raises:
        DataError: the file cannot be read, or a line is not UTF-8 text or not an object with the keys; the message has the line
            number.
    """
    if not Path(path).is_file():
        raise DataError(f"--input {path} does not exist, or is no regular file; give a file with one JSON object a line")
    number = 0
    try:
        with Path(path).open("rb") as file:
            is_compressed = file.read(len(_GZIP)) == _GZIP
            file.seek(0)
            for number, line in enumerate(gzip.GzipFile(fileobj=file) if is_compressed else file, start=1):
                yield from _documents(line, keys, f"--input {path}, line {number}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"--input {path} is a damaged gzip file after line {number} ({error}); compress the text again") from None
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror or error}") from None


def _documents(line: bytes, keys: Sequence[str], place: str) -> Iterator[Document]:
    """The texts of one line."""
    try:
        text = line.decode("utf-8-sig")
        values = json.loads(text) if text.strip() else None
        if values is not None:
            yield from [Document(str(values[key]), place) for key in keys]
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place}: byte {error.start + 1} of the line, {line[error.start]:#04x}, is not UTF-8; convert the file, for example "
            "with iconv -f latin1 -t utf-8"
        ) from None
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
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        folders = path.relative_to(root).parts[:-1]
        if _SKIPPED_FOLDERS.isdisjoint(folders) and not any(folder.startswith("config-") for folder in folders):
            text = path.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield Document(text, str(path))


def preprocess(*, documents: Iterable[Document], tokenizer: TokenizerConfig, prefix: str, appends_eod: bool) -> tuple[int, int]:
    """Tokenize documents and write the dataset, whose files appear when all is written.

    Args:
        documents: their texts; empty ones are skipped.
        tokenizer: the tokenizer.
        prefix: path prefix of the dataset.
        appends_eod: whether to append an end-of-document token to each document.

    Returns:
        The number of documents and of tokens.

    Raises:
        DataError: there is no text, or it cannot be read or tokenized.
    """
    from megatron.zerobubble.mcore.cpu.device import quiet_third_parties

    with quiet_third_parties():  # torch and megatron-core, which --help does without
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        from megatron.zerobubble.training.tokenizer import build_tokenizer

    built = build_tokenizer(tokenizer)
    dtype = DType.optimal_dtype(built.vocab_size)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    temporary = f"{prefix}.{os.getpid()}.writing"
    num_documents = num_tokens = 0
    try:
        builder = IndexedDatasetBuilder(f"{temporary}.bin", dtype=dtype)
        with builder.data_file:
            for document in track(documents, "documents"):
                ids = _tokens(document, built, appends_eod=appends_eod)
                if len(ids):
                    builder.add_document(ids.astype(dtype), [len(ids)])
                    num_documents += 1
                    num_tokens += len(ids)
            if num_documents == 0:
                raise DataError("there is no text to tokenize")
            builder.finalize(f"{temporary}.idx")
        for written, final in zip(_files(temporary), _files(prefix), strict=True):
            written.replace(final)
    finally:
        for leftover in _files(temporary):
            leftover.unlink(missing_ok=True)
    return num_documents, num_tokens


def _tokens(document: Document, tokenizer: Any, *, appends_eod: bool) -> np.ndarray[Any, Any]:
    """A document's tokens, [n]. Raises DataError, with the document's place, if it cannot be tokenized."""
    try:
        ids = np.asarray([*tokenizer.tokenize(document.text), *([int(tokenizer.eod)] if appends_eod else [])], dtype=np.int64)
    except Exception as error:  # libraries raise all kinds, for texts of all kinds
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{document.place} cannot be tokenized: {reason or type(error).__name__}") from error
    if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise DataError(f"{document.place} has the token {ids.max()}, outside of the vocabulary of {tokenizer.vocab_size}")
    return ids


def _files(prefix: str) -> tuple[Path, ...]:
    """The files of a dataset. The index is the last one: a dataset that has it is complete."""
    return Path(f"{prefix}.bin"), Path(f"{prefix}.idx")


if __name__ == "__main__":
    sys.exit(main())
