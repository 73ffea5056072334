"""What a microbatch was when a forward read it, so that the forward can run again.

A forward step may take keys out of its batch, set attributes of it, or change its tensors in place. What it read is put back in
place, not replaced: a view, a list of the loop, or a later microbatch that shares a tensor with this one is then as it was, too.

Containers are copied as they are read, without what is in them, at any depth: dictionaries, lists, sets, deques, and the
attributes of objects. Of tensors only small ones are copied, which takes a few microseconds. Of a large one (an image, a mask)
the version counter is noted, which costs nothing: it tells whether the forward step changes tensors at all. Whoever does so does
it in the first iteration, too, which is never done again; from then on large ones are copied as well. An array of numpy has no
counter and is always copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron.zerobubble.errors import ExecutionError

__all__ = ["Contents", "put_back", "refill"]

_SMALL = 1 << 20
"""Largest number of bytes of a tensor that is copied whenever it is read: a row of 131072 token numbers."""
_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size)
"""What cannot change."""
_NOT_DATA = (ModuleType, Iterator, Dataset, torch.Generator)
"""What a batch may refer to, and what is not looked into, as callable objects (modules, tokenizers) are not."""


@dataclass(frozen=True)
class _TensorRead:
    """A tensor as it was read."""

    name: str
    tensor: Tensor
    version: int | None
    """None: it has none, and cannot be changed in place (inference mode)."""
    copy: Tensor | None

    @property
    def is_lost(self) -> bool:
        """Whether it was changed in place without a copy of it."""
        return self.copy is None and self.version is not None and self.tensor._version != self.version


class Contents:
    """What is in an item of a data iterator at the time of construction.

    Args:
        item: of any kind.
        number: of the item in its iteration, for messages.
        copies_all: whether large tensors are copied, too.
    """

    def __init__(self, item: Any, number: int, *, copies_all: bool) -> None:
        self._number = number
        self._copies_all = copies_all
        self._tensors: list[_TensorRead] = []
        self._undo: list[Callable[[], None]] = []
        self._taken: set[int] = set()
        self._take(item, "batch")

    @property
    def is_lost(self) -> bool:
        """Whether a tensor that was not copied has been changed in place."""
        return any(each.is_lost for each in self._tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back. Raises ExecutionError for a tensor that was changed in place and not copied."""
        for each in reversed(self._tensors):
            if each.is_lost:
                raise ExecutionError(
                    f"forward_step changed {each.name} of microbatch {self._number}, a tensor of shape "
                    f"{tuple(each.tensor.shape)}, in place, for the first time where post-validation has to run it again: "
                    "change a copy of it, or leave out post-validation"
                )
            if each.copy is not None:
                put_back(each.tensor, each.copy)
        for undo in reversed(self._undo):
            undo()

    def _take(self, value: Any, name: str) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._taken:
            return
        self._taken.add(id(value))
        if isinstance(value, Tensor):
            is_copied = self._copies_all or value.numel() * value.element_size() <= _SMALL
            version = None if value.is_inference() else value._version
            self._tensors.append(_TensorRead(name, value, version, value.detach().clone() if is_copied else None))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._undo.append(partial(np.copyto, value, value.copy()))
            if value.dtype.hasobject:
                self._take_each(enumerate(value.flat), name)
        else:
            self._take_container(value, name)

    def _take_container(self, value: Any, name: str) -> None:
        if isinstance(value, dict):
            self._undo.append(partial(refill, value, dict(value)))
            self._take_each(value.items(), name)
        elif isinstance(value, list | set | deque):
            self._undo.append(partial(_refill_collection, value, list(value)))
        if isinstance(value, tuple | list | set | deque):
            self._take_each(enumerate(value), name)
        elif callable(value) or isinstance(value, _NOT_DATA):
            return
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):  # changed as it is, not as its class would: that may be frozen
            self._undo.append(partial(refill, own, dict(own)))
            self._take_each(own.items(), name)
        for slot in _slots(type(value)):
            if hasattr(value, slot):
                found = getattr(value, slot)
                self._undo.append(partial(object.__setattr__, value, slot, found))
                self._take(found, f"{name}.{slot}")

    def _take_each(self, entries: Iterable[tuple[Any, Any]], name: str) -> None:
        for key, each in entries:
            if not isinstance(each, _PLAIN):
                self._take(each, f"{name}[{key!r}]")


def refill(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Make a dictionary what it was, if it is not."""
    if not (_are_same(value, before) and _are_same(value.values(), before.values())):
        value.clear()
        value.update(before)


def put_back(tensor: Tensor, copy: Tensor) -> None:
    """Make a tensor what it was when `copy` was made of it: in its own memory, unless something has changed its shape or type."""
    if tensor.is_nested and tensor.shape == copy.shape:
        tensor.detach().copy_(copy)
    elif _layout(tensor) != _layout(copy):
        tensor.data = copy
    elif not torch.equal(tensor, copy):
        tensor.detach().copy_(copy)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.is_nested or tensor.stride(), tensor.dtype, tensor.device


def _refill_collection(value: Any, before: list[Any]) -> None:
    if not _are_same(value, before):
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(before)


def _are_same(some: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether both have the same objects, which need not be comparable, in the same order."""
    return [*map(id, some)] == [*map(id, others)]


def _slots(kind: type) -> list[str]:
    named = (vars(each).get("__slots__", ()) for each in kind.__mro__)
    return [slot for each in named for slot in ((each,) if isinstance(each, str) else each) if not slot.startswith("__")]
