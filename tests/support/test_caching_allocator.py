"""The model of torch's caching allocator, on cases worked out by hand."""

from __future__ import annotations

import pytest

from tests.support.fake_tensors.allocator import MIB, CachingAllocator, replayed

pytestmark = pytest.mark.claims(
    "Long runs",
    "what torch's caching allocator reserves for the allocations of whole ranks, in a model of it: "
    "[the table](benchmarks/fake_tensors.md#what-the-allocator-would-reserve)",
    "a model; **not run on a GPU**",
)


def test_sizes_are_rounded_to_512_bytes_in_a_segment_of_2_mib() -> None:
    allocator = CachingAllocator()
    assert [allocator.allocate(size).size for size in (0, 1, 512, 513)] == [512, 512, 512, 1024]
    assert (allocator.allocated, allocator.reserved) == (2560, 2 * MIB)


@pytest.mark.parametrize(
    ("size", "reserved"),
    [(MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12), (33 * MIB, 34)],
    ids=str,
)
def test_a_segment_has_the_documented_size(size: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved == reserved * MIB


def test_a_large_block_is_split_only_where_more_than_1_mib_is_left() -> None:
    allocator = CachingAllocator()
    whole = allocator.allocate(19 * MIB)  # of 20: 1 MiB stays in it
    assert whole.size == 20 * MIB
    allocator.free(whole)
    assert allocator.allocate(18 * MIB).size == 18 * MIB
    assert allocator.allocate(2 * MIB).size == 2 * MIB
    assert allocator.reserved == 20 * MIB


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(24 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(22 * MIB).address == small.address
    assert allocator.allocate(24 * MIB).address == large.address
    assert allocator.reserved == 64 * MIB


def test_free_neighbors_merge() -> None:
    allocator = CachingAllocator()
    first, second, third = (allocator.allocate(5 * MIB) for _ in range(3))  # of one segment of 20 MiB
    for block in (first, third, second):
        allocator.free(block)
    assert allocator.allocate(20 * MIB).address == first.address
    assert allocator.reserved == 20 * MIB


def test_memory_of_freed_tensors_between_live_ones_is_fragmented_but_for_expandable_segments() -> None:
    """Every second block of 30 MiB is freed, and one of 60 MiB fits none of them; a segment that grows reuses its end."""
    events = [("allocate", number, 30 * MIB, 0) for number in range(4)]
    events += [("free", number, 30 * MIB, 0) for number in (1, 3)]
    events += [("allocate", 4, 60 * MIB, 0)]
    assert replayed(events) == (120 * MIB, (120 + 60) * MIB)
    assert replayed(events, expandable=True) == (120 * MIB, (120 + 40) * MIB)  # 30 at its end are free: two more pages of 20


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    allocator = CachingAllocator(expandable=True)
    hole, _ = allocator.allocate(12 * MIB), allocator.allocate(4 * MIB)  # 4 MiB are free at the end
    allocator.free(hole)
    assert allocator.allocate(3 * MIB).address == hole.address
    assert allocator.reserved == 20 * MIB


def test_a_stream_does_not_take_the_blocks_of_another() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(12 * MIB, stream=0))
    allocator.allocate(12 * MIB, stream=1)
    assert allocator.reserved == 24 * MIB


def test_a_block_in_use_on_another_stream_is_free_after_its_events() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(12 * MIB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    assert allocator.allocated == 0
    assert allocator.allocate(12 * MIB).address != block.address
    allocator.complete()
    assert allocator.allocate(12 * MIB).address == block.address
