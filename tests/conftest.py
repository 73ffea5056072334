"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import RankPool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four gloo ranks, started once."""
    pool = RankPool(4)
    yield pool
    pool.stop()


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
