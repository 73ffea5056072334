"""The job's key-value store, at which its ranks meet. What is in it is JSON: nothing of it is unpickled."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

__all__ = ["Store", "answered"]

Value = TypeVar("Value")


class Store(Protocol):
    """The methods of torch.distributed's key-value stores that are used here."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set `key` to `desired` if its value is `expected` (or it is unset and `expected` is empty); return its value after."""

    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the counter `key`, which starts at 0; return its value after."""

    def set(self, key: str, value: str) -> None:
        """Set a key to a value."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are set."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set."""

    def get(self, key: str) -> bytes:
        """The value of a key."""

    def clone(self) -> Store:
        """The same store over a connection of its own, for another thread."""


def answered(ask: Callable[[], Value], limit_s: float) -> Value:
    """What a function returns that asks the store, which by itself waits for as long as the store's machine does not answer.

    Args:
        ask: called in another thread.
        limit_s: seconds in which it has to return.

    Raises:
        RuntimeError: it has not returned, as where the machine has lost its power or its network; or what `ask` raises.
    """
    import torch

    from megatron.zerobubble.runtime.threads import start_thread

    answers: SimpleQueue[tuple[Value | None, Exception | None]] = SimpleQueue()

    def answer() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:  # noqa: BLE001 - raised again below, where it was asked for
            answers.put((None, error))

    start_thread(answer, name="store", device=torch.device("cpu"))
    try:
        value, error = answers.get(timeout=limit_s)
    except Empty:
        raise RuntimeError(f"the job's store does not answer within {limit_s:.0f} s") from None
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
