"""The job's store for code that must come to an end: its calls raise where the machine that hosts it is gone."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch

from megatron.zerobubble.job.key_value_store import Store
from megatron.zerobubble.runtime.threads import start_thread

__all__ = ["AnsweringStore"]

Value = TypeVar("Value")


class AnsweringStore:
    """A store whose calls end: with RuntimeError where it has not answered for some seconds, now and in all later calls.

    By itself a call waits for the timeout of the job, if the machine that hosts the store has lost its power or its network.

    Args:
        store: the store.
        limit_s: seconds in which it has to answer.
    """

    def __init__(self, store: Store, limit_s: float) -> None:
        self._store, self._limit_s, self._is_lost = store, limit_s, False

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """See `Store`, as for the other methods."""
        return self._ask(lambda: self._store.compare_set(key, expected, desired))

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda: self._store.add(key, amount))

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._ask(lambda: self._store.multi_get(keys))

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda: self._store.check(keys))

    def get(self, key: str) -> bytes:
        return self._ask(lambda: self._store.get(key))

    def clone(self) -> Store:
        return AnsweringStore(self._store.clone(), self._limit_s)

    def _ask(self, call: Callable[[], Value]) -> Value:
        answers: SimpleQueue[Value | Exception] = SimpleQueue()

        def answer() -> None:
            try:
                answers.put(call())
            except Exception as error:  # noqa: BLE001 - raised again below, where it was asked for
                answers.put(error)

        try:
            if not self._is_lost:
                start_thread(answer, name="store", device=torch.device("cpu"))
            found = answers.get(timeout=0.0 if self._is_lost else self._limit_s)
        except Empty:
            self._is_lost = True
            raise RuntimeError(f"the job's store does not answer within {self._limit_s:.0f} s") from None
        if isinstance(found, Exception):
            raise found
        return found
