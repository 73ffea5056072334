"""Which slice of which microbatch a rank's model runs now, and the keys and values of the microbatches in flight.

A slice of causal attention sees the keys and values of all slices before it. Per layer and microbatch they lie in one buffer for
the whole sequence, from the first F of the microbatch to its last B: each F writes its own part and attends to a view up to its
end, so nothing is copied twice. B runs backwards through the slices. The gradients of keys and values that the last slice's B
computes are those of the whole sequence; the Bs of the slices before add theirs. A slice's own part is complete when its B has
added to it, since only later slices see its keys.

Shapes: ``s`` tokens of a slice, ``S`` of the sequence, ``b`` microbatch, ``g`` key and value heads per rank, ``d`` head size of
keys, ``e`` head size of values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megatron.zerobubble.errors import ExecutionError

__all__ = ["CurrentSlice", "PrefixKeys", "SlicePart"]


@dataclass(frozen=True)
class SlicePart:
    """Which tokens of its microbatch a slice has."""

    index: int
    """Number of the slice."""
    offset: int
    """Tokens of the slices before it."""
    length: int
    """Tokens of the slice."""
    whole: int
    """Tokens of the microbatch."""

    @property
    def end(self) -> int:
        """Tokens up to the end of the slice."""
        return self.offset + self.length

    @property
    def is_last(self) -> bool:
        """Whether it is the microbatch's last slice."""
        return self.end == self.whole


class Kept(Protocol):
    """What the slices of a microbatch share in one module."""

    nbytes: int
    """Bytes of keys and values, which a plan counts apart from activations."""


Shared = TypeVar("Shared", bound=Kept)


class PrefixKeys:
    """The keys and values of one layer and microbatch, and in B the sum of their gradients.

    Args:
        key: [s, b, g, d], of any slice: gives the shape, dtype and device.
        value: [s, b, g, e], likewise.
        whole: S.
    """

    def __init__(self, key: Tensor, value: Tensor, whole: int) -> None:
        # In one storage: torch's attention copies values that are a view of a storage of their own.
        num_keys, num_values = (whole * each[0].numel() for each in (key, value))
        buffer = key.new_empty(num_keys + num_values)
        self._key = buffer[:num_keys].view(whole, *key.shape[1:])
        self._value = buffer[num_keys:].view(whole, *value.shape[1:])
        self._gradients: tuple[Tensor, Tensor] | None = None
        self.nbytes = buffer.nbytes
        """Bytes of the keys and values."""

    def append(self, part: SlicePart, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write a slice's keys and values, when a layer is recomputed with the values that are there already.

        Returns:
            Views up to the end of the slice, [end, b, g, d] and [end, b, g, e].
        """
        self._key[part.offset : part.end] = key
        self._value[part.offset : part.end] = value
        # By `data` with a version counter of their own: later slices write to other tokens of the buffer.
        return self._key.data[: part.end], self._value.data[: part.end]

    def add_gradients(self, part: SlicePart, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradients that a slice's B has computed, in the reverse order of the slices.

        Args:
            part: the slice.
            key: [end, b, g, d]; those of the last slice are kept, and the others are added to them.
            value: [end, b, g, e], likewise.

        Returns:
            The complete gradients of the slice's own keys and values, views of [s, b, g, d] and [s, b, g, e].
        """
        if self._gradients is None:
            self._gradients = key, value
        else:
            for total, gradient in zip(self._gradients, (key, value), strict=True):
                total[: part.end] += gradient
        own_key, own_value = (total[part.offset : part.end] for total in self._gradients)
        if part.offset == 0:
            self._gradients = None
            self._key = self._value = key.new_empty(0)
        return own_key, own_value


class CurrentSlice:
    """The slice that one rank's model runs now. The schedule sets it around F and B; layers and batches read it."""

    def __init__(self) -> None:
        self.part: SlicePart | None = None
        """None outside of the schedule's F and B: layers then compute as if there were no slices."""
        self.passes = 0
        """Number of Fs and Bs that have begun."""
        self.batch: Any = None
        """The slice's part of the last batch that the forward step has read; None before it reads one."""
        self._of: tuple[int, int] = (0, 0)
        self._kept: dict[tuple[int, int], dict[int, Kept]] = {}
        """By (chunk, microbatch): what the slices of a microbatch share in each module, by the module's identity."""
        self.key_bytes: dict[int, int] = {}
        """By chunk: the bytes of keys and values of the last microbatch of which all were allocated."""

    @contextmanager
    def running(self, chunk: int, microbatch: int, part: SlicePart) -> Iterator[None]:
        """Inside, the model chunk `chunk` runs F or B of a slice."""
        self.part, self._of = part, (chunk, microbatch)
        self.passes += 1
        try:
            yield
        finally:
            self.part = self.batch = None

    def keys(self, attention: object, key: Tensor, value: Tensor) -> PrefixKeys:
        """The buffer of an attention for the microbatch that runs now; allocated in the F of its first slice."""
        assert self.part is not None
        whole = self.part.whole
        with torch.no_grad():
            return self.kept(attention, lambda: PrefixKeys(key, value, whole))

    def kept(self, module: object, make: Callable[[], Shared]) -> Shared:
        """What the slices of the microbatch that runs now share in a module; made in the F of the first one."""
        assert self.part is not None
        modules = self._kept.setdefault(self._of, {})
        if id(module) not in modules:
            if self.part.offset:
                raise ExecutionError(
                    f"microbatch {self._of[1]}: a {type(module).__name__} runs slice {self.part.index} and did not run the "
                    "slices before it"
                )
            modules[id(module)] = make()
        return modules[id(module)]  # type: ignore[return-value]

    def release(self, chunk: int, microbatch: int) -> None:
        """Free the keys and values of a microbatch, of which no slice is left to run."""
        layers = self._kept.pop((chunk, microbatch), None)
        if layers is not None:
            self.key_bytes[chunk] = sum(each.nbytes for each in layers.values())

    def clear(self) -> None:
        """Free the keys and values of all microbatches, after an error or before forward passes are run again."""
        self._kept.clear()
