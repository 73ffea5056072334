"""A model of torch's caching allocator on CUDA: what it reserves for a sequence of allocations and frees.

It follows the documented behavior of `CUDACachingAllocator` (torch 2.13) with default settings, on a device that never runs out:

- sizes are rounded up to 512 B; up to 1 MiB they come from the small pool, others from the large one;
- the smallest free block of the pool and stream is taken, and among equal ones that of the lowest address;
- it is split if at least 512 B (small pool) or more than 1 MiB (large pool) are left;
- without such a block a segment is reserved: 2 MiB in the small pool, 20 MiB for less than 10 MiB, else rounded up to 2 MiB;
- a freed block merges with free neighbors of its segment; a segment is never given back (only `empty_cache` would);
- a block with `record_stream` is free when its events have completed (`complete`).

With `expandable` (`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`) a pool has one segment per stream, which grows at its end
by pages of 2 MiB (small pool) or 20 MiB (large pool). Any rest of 512 B is split off, and the block at the end is taken last.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Block", "CachingAllocator", "Event", "replayed"]

MIB = 2**20
_ROUND, _SMALL, _SMALL_SEGMENT, _MIN_LARGE, _LARGE_SEGMENT, _ROUND_LARGE = 512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 2 * MIB

Event = tuple[str, int, int, int]
"""(allocate, free or record_stream; number of the storage; bytes; stream)."""


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    address: int
    size: int
    pool: tuple[bool, int]
    """(Whether it is the small one, stream)."""
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None
    recorded: set[int] = field(default_factory=set)
    """Streams of `record_stream`."""


class CachingAllocator:
    """Allocates and frees blocks. All sizes are bytes.

    Args:
        expandable: `expandable_segments:True`.

    Attributes:
        allocated: of all blocks in use, rounded as the allocator does.
        reserved: of all segments.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self._expandable = expandable
        self._free: dict[tuple[bool, int], list[tuple[int, int, Block]]] = {}
        self._end: dict[tuple[bool, int], Block] = {}
        """Of expandable segments, the last block."""
        self._pending: list[Block] = []
        self._addresses = itertools.count(step=2**50)
        self.allocated = self.reserved = 0

    def allocate(self, size: int, stream: int = 0) -> Block:
        """A block of at least `size` for a tensor of `stream`."""
        size = max(1, -(-size // _ROUND)) * _ROUND
        pool = size <= _SMALL, stream
        block = self._best_fit(pool, size) or (self._grown(pool, size) if self._expandable else self._segment(pool, size))
        rest = block.size - size
        if rest >= _ROUND if pool[0] or self._expandable else rest > _SMALL:
            other = Block(block.address + size, rest, pool, before=block, after=block.after)
            if other.after is not None:
                other.after.before = other
            block.size, block.after = size, other
            if self._end.get(pool) is block:
                self._end[pool] = other
            self._add(other)
        self.allocated += block.size
        return block

    def record_stream(self, block: Block, stream: int) -> None:
        """A kernel on `stream` uses the block."""
        if stream != block.pool[1]:
            block.recorded.add(stream)

    def free(self, block: Block) -> None:
        """The block's tensor is gone."""
        self.allocated -= block.size
        if block.recorded:
            self._pending.append(block)
        else:
            self._merge(block)

    def complete(self) -> None:
        """All kernels issued so far have run."""
        for block in self._pending:
            block.recorded.clear()
            self._merge(block)
        self._pending.clear()

    def _best_fit(self, pool: tuple[bool, int], size: int) -> Block | None:
        free = self._free.get(pool, [])
        at = bisect_left(free, (size, 0))
        if at + 1 < len(free) and free[at][2] is self._end.get(pool):
            at += 1  # it could grow: its size for a best fit is that of the address space
        if at == len(free):
            return None
        block = free.pop(at)[2]
        block.is_free = False
        return block

    def _segment(self, pool: tuple[bool, int], size: int) -> Block:
        is_large = not pool[0] and size >= _MIN_LARGE
        size = -(-size // _ROUND_LARGE) * _ROUND_LARGE if is_large else _SMALL_SEGMENT if pool[0] else _LARGE_SEGMENT
        self.reserved += size
        return Block(next(self._addresses), size, pool)

    def _grown(self, pool: tuple[bool, int], size: int) -> Block:
        """The end of the pool's segment, grown until it holds `size`."""
        end = self._end.get(pool)
        if end is None or not end.is_free:
            address = next(self._addresses) if end is None else end.address + end.size
            new = Block(address, 0, pool, before=end)
            if end is not None:
                end.after = new
            end = self._end[pool] = new
        else:
            self._remove(end)
        page = _SMALL_SEGMENT if pool[0] else _LARGE_SEGMENT
        more = -(-(size - end.size) // page) * page
        end.size += more
        self.reserved += more
        return end

    def _merge(self, block: Block) -> None:
        for other in (block.before, block.after):
            if other is None or not other.is_free:
                continue
            self._remove(other)
            first, second = (other, block) if other is block.before else (block, other)
            first.size, first.after = first.size + second.size, second.after
            if second.after is not None:
                second.after.before = first
            if self._end.get(block.pool) is second:
                self._end[block.pool] = first
            block = first
        self._add(block)

    def _add(self, block: Block) -> None:
        block.is_free = True
        insort(self._free.setdefault(block.pool, []), (block.size, block.address, block))

    def _remove(self, block: Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]
        block.is_free = False


def replayed(events: Iterable[Event], *, expandable: bool = False) -> tuple[int, int]:
    """Bytes (allocated, reserved) at their peaks. What another stream does with a freed block is over at the next allocation."""
    allocator = CachingAllocator(expandable=expandable)
    blocks: dict[int, Block] = {}
    allocated = 0
    for what, storage, size, stream in events:
        if what == "allocate":
            allocator.complete()
            blocks[storage] = allocator.allocate(size, stream)
            allocated = max(allocated, allocator.allocated)
        elif what == "record_stream":
            allocator.record_stream(blocks[storage], stream)
        else:
            allocator.free(blocks.pop(storage))
    return allocated, allocator.reserved
