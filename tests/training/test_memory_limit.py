"""What --zero-bubble-memory-limit says."""

from __future__ import annotations

import pytest

from megatron.zerobubble.training.memory_limit import MemoryLimit


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("0.75", MemoryLimit(relative=0.75)),
        ("2", MemoryLimit(relative=2.0)),
        ("60GiB", MemoryLimit(total_bytes=60 * 2**30)),
        ("1.5 tib", MemoryLimit(total_bytes=3 * 2**39)),
        ("512MB", MemoryLimit(total_bytes=512_000_000)),
        (" Auto ", MemoryLimit()),
    ],
)
def test_limits(text: str, limit: MemoryLimit) -> None:
    assert MemoryLimit.parse(text) == limit
    assert limit.is_relative is (limit.relative is not None)
