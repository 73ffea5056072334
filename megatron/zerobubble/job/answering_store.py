"""The job's store for code that must come to an end: its calls raise where the machine that hosts it is gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, cast

import torch

from megatron.zerobubble.job.key_value_store import Store
from megatron.zerobubble.runtime.threads import start_thread

__all__ = ["answering"]


def answering(store: Store, limit_s: float) -> Store:
    """The store with calls that end: with RuntimeError where it has not answered for some seconds, now and in all later calls.

    By itself a call waits for the timeout of the job, if the machine that hosts the store has lost its power or its network.

    Args:
        store: the store.
        limit_s: seconds in which it has to answer.
    """
    return cast("Store", _AnsweringStore(store, limit_s))


class _AnsweringStore:
    def __init__(self, store: Store, limit_s: float) -> None:
        self._store, self._limit_s, self._is_lost = store, limit_s, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._store, name)
        return lambda *args: self._ask(partial(method, *args))

    def _ask(self, call: Callable[[], Any]) -> Any:
        answers: SimpleQueue[Any] = SimpleQueue()

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
