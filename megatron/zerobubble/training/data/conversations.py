"""Conversations to fine-tune on, from JSON lines. Each line is one of ::

    {"messages": [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4."}]}
    {"prompt": "What is 2 + 2?", "response": "4."}

The assistant's messages, and the response, are the answers: only their tokens count in the loss. Standard library only: lines are
checked before torch is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.training.data.texts import json_lines

__all__ = ["ASSISTANT", "FLAG", "ROLES", "Conversation", "Message", "conversations", "count_conversations"]

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", "tool", ASSISTANT)
"""Who may speak in a message."""
FLAG = "--sft --data-path"
"""Names the files in errors."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    """One of `ROLES`."""
    content: str
    """The text; of an answer, not empty."""


@dataclass(frozen=True)
class Conversation:
    """Messages of which the last one is an answer, and the first one is not."""

    messages: tuple[Message, ...]
    """In order."""
    is_pair: bool
    """Whether the line has a prompt and a response, instead of messages."""
    place: str
    """File and line, for errors."""


def count_conversations(path: str) -> int:
    """The number of conversations of a file, all lines of which are checked. Raises DataError as `conversations`."""
    count = sum(1 for _ in conversations(path))
    if not count:
        raise DataError(f"{FLAG} {path} has no lines; give one JSON object a line, with messages, or prompt and response")
    return count


def conversations(path: str) -> Iterator[Conversation]:
    """The conversations of a file of JSON lines, which may be compressed by gzip. What follows the last answer is left out.

    Raises:
        DataError: the file cannot be read, or a line has no conversation; the message has the line number.
    """
    for line in json_lines(path, FLAG):
        try:
            value = json.loads(line.text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{line.place}: not JSON ({' '.join(str(error).split())[:80]})") from None
        if not isinstance(value, dict) or ("messages" in value) == ("prompt" in value or "response" in value):
            raise DataError(f"{line.place}: not an object with messages, or with prompt and response")
        is_pair = "messages" not in value
        messages = _pair(value, line.place) if is_pair else _messages(value["messages"], line.place)
        yield Conversation(messages, is_pair, line.place)


def _pair(value: dict[str, Any], place: str) -> tuple[Message, ...]:
    for key in ("prompt", "response"):
        if not isinstance(value.get(key), str) or not value[key]:
            raise DataError(f"{place}: {key} must be a text that is not empty")
    return Message("user", value["prompt"]), Message(ASSISTANT, value["response"])


def _messages(values: Any, place: str) -> tuple[Message, ...]:
    if not isinstance(values, list) or not values:
        raise DataError(f"{place}: messages must be a list that is not empty")
    messages = [_message(value, f"{place}, message {number}") for number, value in enumerate(values, start=1)]
    answers = [number for number, message in enumerate(messages) if message.role == ASSISTANT]
    if not answers:
        raise DataError(f"{place}: no message has the role assistant: nothing but a prompt, and no token would count in the loss")
    if answers[0] == 0:
        raise DataError(f"{place}: the first message has the role assistant, and answers nothing; put the prompt before it")
    return tuple(messages[: answers[-1] + 1])


def _message(value: Any, place: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise DataError(f"{place}: no role; give an object with role and content")
    role, content = value["role"], value.get("content")
    if role not in ROLES:
        raise DataError(f"{place}: the role {quoted(role)} is not one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise DataError(f"{place}: content must be a text")
    if role == ASSISTANT and not content:
        raise DataError(f"{place}: the content of an answer must not be empty")
    return Message(role, content)
