"""Memory of one rank's device: who read and wrote which bytes, and blocks that are handed out again as soon as they are free.

`Memory` checks every access against the conflicting ones before it: a write against earlier reads and writes of the same bytes, a
read against earlier writes. One that is not ordered after the other by streams, events and waits is an error, even if it came
later in this run. Bytes keep their history when they are freed and handed out again, because that is what makes early reuse an
error: the next owner writes where a transfer may still read.

`Arena` is a caching allocator that reuses at once: the block freed last is handed out first, and a free block holds NaN.
Other tensors are torch's own; the moment at which one is freed counts as the next owner's write.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.fake_nccl.clocks import Access, Timeline
from tests.support.fake_nccl.engine import FakeNcclError, here, is_here

POISON = 0xFF
"""Every byte of free memory: NaN in every floating-point dtype."""


class OrderError(FakeNcclError):
    """Two accesses to the same bytes, at least one a write, that nothing orders. The message names both."""


class FreedError(FakeNcclError):
    """A transfer reads or writes a tensor of torch that is freed."""


def extent(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one after its last."""
    if tensor.numel() == 0:
        return 0, 0
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


@dataclass
class _History:
    writes: list[Access] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)


class Memory:
    """The accesses to one rank's memory.

    Args:
        rank: in messages.
        owner: the timeline whose allocations may reuse freed memory.
        host: returns the timeline of the host.
    """

    def __init__(self, rank: int, owner: Timeline, host: Callable[[], Timeline]) -> None:
        self._rank, self._owner, self._host = rank, owner, host
        self._histories: dict[int, _History] = {}
        self.kept: set[int] = set()
        """Addresses whose history outlives the tensor: an arena's."""
        self.late: list[OrderError] = []
        """Errors found when a tensor was freed, where none can be raised."""

    def read(self, tensor: Tensor, timeline: Timeline, text: str) -> None:
        """The timeline's next event reads a tensor."""
        history = self._history(tensor)
        start, end = extent(tensor)
        access = Access(timeline.number, timeline.tick(), start, end, f"{text} reads on {timeline.name}")
        self._check(access, timeline, history.writes)
        reads = history.reads
        reads[:] = [old for old in reads if old.start < start or old.end > end or not old.is_before(timeline)]
        reads.append(access)

    def write(self, tensor: Tensor, timeline: Timeline, text: str) -> None:
        """The timeline's next event writes a tensor."""
        history = self._history(tensor)
        start, end = extent(tensor)
        access = Access(timeline.number, timeline.tick(), start, end, f"{text} writes on {timeline.name}")
        for accesses in (history.writes, history.reads):
            self._check(access, timeline, accesses)
            accesses[:] = [old for old in accesses if old.start < start or old.end > end]
        history.writes.append(access)

    def _check(self, access: Access, timeline: Timeline, others: list[Access]) -> None:
        for other in others:
            if other.start < access.end and access.start < other.end and not other.is_before(timeline):
                raise OrderError(f"rank {self._rank}: {access.text}, and nothing orders it after: {other.text}")

    def _history(self, tensor: Tensor) -> _History:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._histories:
            self._histories[key] = _History()
            if key not in self.kept:
                weakref.finalize(storage, self._freed, key).atexit = False
        return self._histories[key]

    def _freed(self, key: int) -> None:
        """torch may hand the memory out again, to the host or on the compute stream."""
        history = self._histories.pop(key)
        if not is_here():
            return
        host = self._host() if here().rank == self._rank else self._owner  # a cycle may be collected on another rank's thread
        for old in (*history.writes, *history.reads):
            if not old.is_before(self._owner) and not old.is_before(host):
                self.late.append(OrderError(f"rank {self._rank}: a tensor is freed, and nothing orders that after: {old.text}"))


class Reference:
    """Where a kernel reads or writes: an address, which keeps nothing alive.

    Args:
        tensor: at that address now.
        arena: hands out memory that can be read when it is freed, as on a device.
        text: the kernel, in words.
    """

    __slots__ = ("_arena", "_shape", "_storage", "_text", "address")

    def __init__(self, tensor: Tensor, arena: Arena, text: str) -> None:
        self._storage, self._arena, self._text = StorageWeakRef(tensor.untyped_storage()), arena, text
        self._shape = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        self.address = tensor.untyped_storage().data_ptr()

    @property
    def size(self) -> tuple[torch.dtype, int]:
        """Dtype and number of elements: what both ends of a transfer must agree on."""
        return self._shape[0], self._shape[2].numel()

    def tensor(self) -> Tensor:
        """What is there now."""
        storage = self._arena.storage_at(self.address)
        if storage is None:
            storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            raise FreedError(f"{self._text}: its tensor is freed")
        dtype, offset, shape, stride = self._shape
        return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


class Arena:
    """Hands out memory, and hands it out again as soon as it is free.

    Args:
        memory: where the histories of its blocks are kept.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._blocks: dict[int, Any] = {}
        self._free: dict[int, list[int]] = {}
        self.num_reused = 0

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """As `torch.empty`, poisoned."""
        size = max(1, torch.Size(shape).numel()) * dtype.itemsize
        free = self._free.setdefault(size, [])
        if free:
            address = free.pop()
            self.num_reused += 1
        else:
            block = np.full(size, POISON, dtype=np.uint8)
            address = block.ctypes.data
            self._blocks[address] = block
            self._memory.kept.add(address)
        view = self._blocks[address][:]
        weakref.finalize(view, self._release, address).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)

    def storage_at(self, address: int) -> torch.UntypedStorage | None:
        """The memory of a block, whoever has it now; None for other addresses."""
        block = self._blocks.get(address)
        return None if block is None else torch.from_numpy(block).untyped_storage()

    def _release(self, address: int) -> None:
        block = self._blocks[address]
        block.fill(POISON)
        self._free[block.size].append(address)
