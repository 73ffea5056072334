"""Tokenizes the conversations of --sft once, into an indexed dataset that all ranks read.

A tokenizer with a chat template (a Hugging Face one) renders the messages by it. With any other a line of prompt and response is
the one text right behind the other, and messages are, with an end-of-document token behind each answer::

    System: You are brief.
    User: What is 2 + 2?
    Assistant: 4.<end of document>User: And 3 + 3?
    Assistant: 6.<end of document>

Prompts and answers are tokenized apart, so that no token has a part of both. A token that does not count as a label is stored as
its complement, -1 - id. The files lie beside the JSON lines, or in --data-cache-path, and have a name of their own for every
tokenizer and every version of the file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.machine import usable_cores
from megatron.zerobubble.mcore.tokenizers import chat_tokenizer
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.config.tokenizer import TokenizerConfig
from megatron.zerobubble.training.data.conversations import ASSISTANT, FLAG, Conversation, conversations
from megatron.zerobubble.training.data.processes import map_in_processes

__all__ = ["Segment", "conversation_ids", "tokenize_conversations", "tokenized_prefix"]

_log = logging.getLogger(__name__)

_FEW = 2_000
"""Conversations that are tokenized in this process: starting others takes seconds."""
_QUIET_IMPORTS = "megatron.zerobubble.training.data.encoding"
"""Imports what a process needs, without the warnings of megatron-core's optional packages."""
_PIECE = 100
"""Conversations that another process gets at a time."""
_VERSION = 1
"""Of the form of the tokens; part of the names of the files."""

Render = Callable[[Sequence[dict[str, str]], bool], str]
"""(messages, whether to add what begins an answer) -> text."""


class Segment(NamedTuple):
    """A part of a conversation's text."""

    text: str
    """The text."""
    is_answer: bool
    """Whether its tokens count in the loss."""


def tokenized_prefix(path: str, settings: Settings, tokenizer: Any) -> str:
    """Path prefix of the tokens of a file of conversations.

    Args:
        path: of the file.
        settings: the tokenizer's flags, and where to cache.
        tokenizer: of `tokenizers.build_tokenizer`.
    """
    file = Path(path)
    about = file.stat()
    chat = chat_tokenizer(tokenizer)
    known = [_VERSION, about.st_size, about.st_mtime_ns, dataclasses.asdict(settings.tokenizer), tokenizer.vocab_size]
    key = hashlib.sha256(json.dumps([*known, None if chat is None else chat.chat_template]).encode()).hexdigest()[:16]
    folder = file.parent if settings.data.data_cache_path is None else Path(settings.data.data_cache_path)
    return str(folder / f"{file.name}.{key}")


def tokenize_conversations(settings: Settings, tokenizer: Any, *, end: int) -> None:
    """Tokenize the files of --sft whose tokens are not there yet. One rank calls it, before the others build datasets.

    Args:
        settings: name the files.
        tokenizer: of `tokenizers.build_tokenizer`.
        end: the token that ends a document.

    Raises:
        DataError: a line cannot be rendered or tokenized, or the tokens cannot be written.
    """
    for path in settings.data.sources.prefixes:
        prefix = tokenized_prefix(path, settings, tokenizer)
        if Path(f"{prefix}.idx").is_file() and Path(f"{prefix}.bin").is_file():
            continue
        try:
            count = _write(prefix, _encoded(path, settings.tokenizer, tokenizer, end))
        except OSError as error:
            raise DataError(
                f"{FLAG} {path}: its tokens cannot be written to {prefix}.bin: {error.strerror or error}; give --data-cache-path "
                "DIR, a directory that can be written"
            ) from None
        _log.info("%s: tokenized %d conversations into %s.bin", path, count, prefix)


def _encoded(path: str, config: TokenizerConfig, tokenizer: Any, end: int) -> Iterator[np.ndarray[Any, Any]]:
    """The tokens of each conversation of a file, as of `conversation_ids`; if it has many, from processes on all cores."""
    lines = conversations(path)
    few = list(islice(lines, _FEW))
    num_processes = usable_cores()
    if len(few) < _FEW or num_processes == 1:
        for conversation in chain(few, lines):
            yield conversation_ids(conversation, tokenizer, end=end)
        return
    rest = chain(few, lines)
    pieces = map_in_processes(
        _encode_piece,
        iter(lambda: list(islice(rest, _PIECE)), []),
        num_processes=num_processes,
        preload=[_QUIET_IMPORTS, *(["transformers.models.auto"] if config.package == "transformers" else [])],
        initializer=_start_process,
        initargs=(config, end),
        remedy="tokenize a smaller file",
    )
    with closing(pieces):
        for piece in pieces:
            yield from piece


def _start_process(config: TokenizerConfig, end: int) -> None:
    """Make the process's own tokenizer, once. Ctrl-C is the first process's affair."""
    from megatron.zerobubble.training.data.build_tokenizer import build_tokenizer  # which imports this module

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encode_piece.encode = partial(conversation_ids, tokenizer=build_tokenizer(config), end=end)  # type: ignore[attr-defined]


def _encode_piece(piece: list[Conversation]) -> list[np.ndarray[Any, Any]]:
    return [_encode_piece.encode(conversation) for conversation in piece]  # type: ignore[attr-defined]


def _write(prefix: str, conversations_ids: Iterable[np.ndarray[Any, Any]]) -> int:
    """Write .bin and .idx under other names, then rename them: whoever sees the index sees all. Returns the number of lines."""
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    bin_path, index_path = (Path(f"{prefix}.{os.getpid()}.{kind}") for kind in ("bin", "idx"))
    count = 0
    try:
        builder = IndexedDatasetBuilder(str(bin_path), dtype=np.int32)
        for ids in conversations_ids:
            builder.add_document(torch.from_numpy(ids), [len(ids)])
            count += 1
        builder.finalize(str(index_path))
        bin_path.replace(f"{prefix}.bin")
        index_path.replace(f"{prefix}.idx")
    finally:
        bin_path.unlink(missing_ok=True)
        index_path.unlink(missing_ok=True)
    return count


def conversation_ids(conversation: Conversation, tokenizer: Any, *, end: int) -> np.ndarray[Any, Any]:
    """The tokens of a conversation: [n] int32, those that do not count as labels as their complement.

    Args:
        conversation: of `conversations`.
        tokenizer: of `tokenizers.build_tokenizer`.
        end: the token that ends a document.

    Raises:
        DataError: the conversation cannot be rendered or tokenized.
    """
    chat = chat_tokenizer(tokenizer)
    has_template = chat is not None and bool(chat.chat_template)
    ids: list[int] = []
    try:
        segments = _by_template(chat, conversation) if has_template else _plain(conversation)
        for segment in segments:
            own = _ids(segment.text, tokenizer, chat)
            if own and not 0 <= min(own) <= max(own) < tokenizer.vocab_size:
                raise ValueError(f"a token outside of the vocabulary of {tokenizer.vocab_size}")
            if segment.is_answer:
                ids += own if has_template else [*own, end]
            else:
                ids += [-1 - each for each in own]
    except DataError:
        raise
    except Exception as error:  # templates and libraries raise all kinds
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{conversation.place} cannot be tokenized: {reason or type(error).__name__}") from error
    if not any(each >= 0 for each in ids[1:]):
        raise DataError(f"{conversation.place} has no token of an answer behind its first token, and so none to train on")
    return np.asarray(ids, dtype=np.int32)


def _ids(text: str, tokenizer: Any, chat: Any | None) -> list[int]:
    """The tokens of a part of a text, without special tokens around it."""
    if not text:
        return []
    return list(tokenizer.tokenize(text) if chat is None else chat.encode(text, add_special_tokens=False))


def _plain(conversation: Conversation) -> Iterator[Segment]:
    """The text of a conversation for a tokenizer without a chat template; answers without the token that ends them."""
    for message in conversation.messages:
        is_answer, name = message.role == ASSISTANT, "" if conversation.is_pair else f"{message.role.capitalize()}: "
        if is_answer:
            yield from (Segment(name, False), Segment(message.content, True))
        else:
            yield Segment(message.content if conversation.is_pair else f"{name}{message.content}\n", False)


def _by_template(chat: Any, conversation: Conversation) -> list[Segment]:
    """The text of a conversation by the chat template of a tokenizer of `transformers`."""

    def render(messages: Sequence[dict[str, str]], begins_answer: bool) -> str:
        text: str = chat.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=begins_answer)
        return text

    return _rendered(render, conversation)


def _rendered(render: Render, conversation: Conversation) -> list[Segment]:
    """Cut a rendered conversation where its answers begin and end."""
    messages = [dataclasses.asdict(message) for message in conversation.messages]
    segments, text = [], ""
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, after = render(messages[:number], True), render(messages[: number + 1], False)
        if not (before.startswith(text) and after.startswith(before)):
            raise DataError(
                f"{conversation.place}, message {number + 1}: the tokenizer's chat template writes earlier messages anew "
                "where more follow, so that answers cannot be told from prompts; give each answer a line of its own, as the last "
                "message"
            )
        segments += [Segment(before[len(text) :], False), Segment(after[len(before) :], True)]
        text = after
    return segments
