"""The job's key-value store."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Store"]


class Store(Protocol):
    """The methods of torch.distributed's key-value stores that training uses."""

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
