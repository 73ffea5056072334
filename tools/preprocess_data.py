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
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.zerobubble.errors import DataError, UserError
from megatron.zerobubble.flags.dataclass_flags import add_group, from_namespace
from megatron.zerobubble.training.config.tokenizer import TokenizerConfig
from megatron.zerobubble.training.data.corpus import CorpusInfo, corpus_info_path
from megatron.zerobubble.training.data.texts import Document, json_texts, stdlib_texts

_LOG_INTERVAL_S = 10.0


def main(argv: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    options = _parser().parse_args(argv)
    begin = time.perf_counter()
    try:
        tokenizer = from_namespace(TokenizerConfig, options)
        num_bytes = None if options.python_stdlib else _size(options.input)
        with _Progress(num_bytes, options.log_interval) as progress:
            info = preprocess(
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
        f"{options.output_prefix}: {info.num_documents} documents, {info.num_tokens} tokens, "
        f"{info.tokenizer_type} with a vocabulary of {info.vocab_size}, in {seconds:.1f} s"
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
) -> CorpusInfo:
    """Tokenize documents and write the dataset.

    Args:
        documents: their texts; empty ones are skipped.
        tokenizer: the tokenizer.
        prefix: path prefix of the dataset.
        appends_eod: whether to append an end-of-document token to each document.
        progress: counts the documents.

    Returns:
        The contents of PREFIX.corpus.json.

    Raises:
        DataError: there is no text, or it cannot be read or tokenized.
    """
    from megatron.zerobubble.training.data.encoding import Encoder

    encoder = Encoder(tokenizer, appends_eod=appends_eod)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    temporary = f"{prefix}.{os.getpid()}.writing"
    try:
        num_documents, num_tokens = _write(map(encoder, documents), temporary, encoder.dtype, progress)
        info = CorpusInfo(
            tokenizer_type=tokenizer.tokenizer_type,
            vocab_size=tokenizer.known_vocab_size,
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
