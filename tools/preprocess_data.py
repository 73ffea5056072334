#!/usr/bin/env python3
"""Tokenize text into an indexed dataset for megatron-core: PREFIX.bin and PREFIX.idx, with PREFIX.corpus.json beside them.

    python tools/preprocess_data.py --input books.jsonl --json-keys text --append-eod --output-prefix data/books
    python tools/preprocess_data.py --python-stdlib --output-prefix data/python-stdlib

A document is one value of a JSON line, or with --python-stdlib one source file of the Python standard library: real text that
every machine has. The output is deterministic and replaces an old dataset atomically. PREFIX.corpus.json records tokenizer and
vocabulary size, so that training can reject others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.zerobubble.errors import DataError, UserError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.data.corpus import CorpusInfo, corpus_info_path

_SKIPPED_FOLDERS = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3", "idlelib", "turtledemo")
)
"""Directories of the standard library that contain tests or demonstrations, or are not part of it."""


@dataclass(frozen=True)
class Encoder:
    """Arguments of a tokenizer; without the tokenizer itself, so that it can be pickled to worker processes."""

    tokenizer_type: str
    """As for --tokenizer-type."""
    tokenizer_model: str | None
    """Path or name of the tokenizer, for the types that have one."""
    vocab_size: int | None
    """Vocabulary size; None: the tokenizer's."""

    def build(self) -> Any:
        """The tokenizer."""
        with quiet_third_parties():
            from megatron.zerobubble.training.data.tokenizers import build_tokenizer
        return build_tokenizer(self.tokenizer_type, model=self.tokenizer_model, vocab_size=self.vocab_size)


def main(argv: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    options = _parse(argv)
    try:
        info = preprocess(
            documents=stdlib_texts() if options.python_stdlib else json_texts(options.input, options.json_keys),
            encoder=Encoder(options.tokenizer_type, options.tokenizer_model, options.vocab_size),
            prefix=options.output_prefix,
            appends_eod=options.append_eod,
            num_workers=options.workers,
        )
    except UserError as error:
        print(f"preprocess_data.py: error: {error}", file=sys.stderr)
        return 2
    print(
        f"{options.output_prefix}: {info.num_documents} documents, {info.num_tokens} tokens, "
        f"{info.tokenizer_type} with a vocabulary of {info.vocab_size}"
    )
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = parser.add_argument_group("text").add_mutually_exclusive_group(required=True)
    text.add_argument("--input", metavar="FILE.jsonl", help="JSON lines: one object per line")
    text.add_argument("--python-stdlib", action="store_true", help="the Python standard library's own source files")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of the texts (default: text)")
    tokens = parser.add_argument_group("tokens")
    tokens.add_argument(
        "--tokenizer-type",
        default="ByteLevelTokenizer",
        choices=("ByteLevelTokenizer", "NullTokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer"),
        help="ByteLevelTokenizer (the default) needs no files",
    )
    tokens.add_argument("--tokenizer-model", metavar="PATH", help="path or name, for the Hugging Face and SentencePiece types")
    tokens.add_argument("--vocab-size", type=int, metavar="N", help="vocabulary size, required by NullTokenizer")
    tokens.add_argument("--append-eod", action="store_true", help="append an end-of-document token to each document")
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx")
    output.add_argument("--workers", type=int, default=1, metavar="N", help="number of tokenizing processes (default: 1)")
    return parser.parse_args(argv)


def preprocess(*, documents: Iterator[str], encoder: Encoder, prefix: str, appends_eod: bool, num_workers: int) -> CorpusInfo:
    """Tokenize documents and write the dataset.

    Args:
        documents: their texts; empty ones are skipped.
        encoder: the tokenizer.
        prefix: path prefix of the dataset.
        appends_eod: whether to append an end-of-document token to each document.
        num_workers: tokenizing processes.

    Returns:
        The contents of PREFIX.corpus.json.

    Raises:
        DataError: there is no text, or it cannot be read or tokenized.
    """
    tokenizer = encoder.build()
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    temporary = f"{prefix}.{os.getpid()}.writing"
    ends_with = [tokenizer.eod] if appends_eod else []
    try:
        num_documents, num_tokens = _write(
            (ids + ends_with for ids in _encode(documents, encoder, num_workers)), temporary, tokenizer.vocab_size
        )
        info = CorpusInfo(
            tokenizer_type=encoder.tokenizer_type,
            vocab_size=encoder.vocab_size or tokenizer.vocab_size,
            num_documents=num_documents,
            num_tokens=num_tokens,
        )
        corpus_info_path(temporary).write_text(info.to_json(), encoding="utf-8")
        for written, final in zip(_files(temporary), _files(prefix), strict=True):
            written.replace(final)
    finally:
        for leftover in _files(temporary):
            leftover.unlink(missing_ok=True)
    return info


def _files(prefix: str) -> tuple[Path, ...]:
    """The files of a dataset. The index is the last one: a dataset that has it is complete."""
    return Path(f"{prefix}.bin"), corpus_info_path(prefix), Path(f"{prefix}.idx")


def _write(documents: Iterator[list[int]], prefix: str, vocab_size: int) -> tuple[int, int]:
    """Write .bin and .idx; return the number of documents and of tokens. Empty documents are skipped."""
    with quiet_third_parties():
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(vocab_size))
    num_documents = num_tokens = 0
    with builder.data_file:
        for ids in documents:
            if ids:
                builder.add_document(ids, [len(ids)])
                num_documents += 1
                num_tokens += len(ids)
        if num_documents == 0:
            raise DataError("there is no text to tokenize")
        builder.finalize(f"{prefix}.idx")
    return num_documents, num_tokens


def _encode(documents: Iterator[str], encoder: Encoder, num_workers: int) -> Iterator[list[int]]:
    """Token ids of each document, in order."""
    if num_workers <= 1:
        tokenize = encoder.build().tokenize
        yield from (_as_ids(tokenize(text)) for text in documents)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_workers, initializer=_start_worker, initargs=(encoder,)) as pool:
        yield from pool.imap(_work, documents, chunksize=16)


def _start_worker(encoder: Encoder) -> None:
    """Give the worker's `_work` its tokenizer, once per process."""
    _work.tokenize = encoder.build().tokenize  # type: ignore[attr-defined]


def _work(text: str) -> list[int]:
    return _as_ids(_work.tokenize(text))  # type: ignore[attr-defined]


def _as_ids(ids: Any) -> list[int]:
    return [int(token) for token in ids]


def json_texts(path: str, keys: list[str]) -> Iterator[str]:
    """The text of each document of a JSON-lines file.

    Raises:
        DataError: the file does not exist, or a line is not an object with the keys; the message has the line number.
    """
    if not Path(path).is_file():
        raise DataError(f"--input {path} does not exist; give a file with one JSON object a line")
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                values = [json.loads(line)[key] for key in keys]
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"--input {path}, line {number}: not a JSON object with the key(s) {', '.join(keys)} ({error!r})"
                ) from None
            yield from (str(value) for value in values)


def stdlib_texts(root: Path | None = None) -> Iterator[str]:
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
                yield text


if __name__ == "__main__":
    sys.exit(main())
