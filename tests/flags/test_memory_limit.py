"""--zero-bubble-memory-limit: parsing, and the memory of the device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron.zerobubble.flags.memory_limit import MemoryLimit
from megatron.zerobubble.mcore import state_memory as memory
from megatron.zerobubble.mcore.state_memory import usable_bytes


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


def test_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU belongs to one rank, the machine's memory is shared by its ranks; a fraction of either is reserved."""
    sizes = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(memory.os, "sysconf", sizes.__getitem__)
    assert usable_bytes(torch.device("cpu"), ranks_on_host=4) == 942_080
    properties = mock.Mock(total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert usable_bytes(torch.device("cuda"), ranks_on_host=8) == pytest.approx(73.6e9)
