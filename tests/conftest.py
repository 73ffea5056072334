"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.ranks import RankPool


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs GPUs that this machine does not have: `gpu` one, `multi_gpu(n)` n of them, two where n is left out."""
    several = item.get_closest_marker("multi_gpu")
    if several is None and item.get_closest_marker("gpu") is None:
        return
    import torch

    needed = (several.args[0] if several.args else 2) if several is not None else 1
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPU{'s' if needed > 1 else ''}, and torch sees {torch.cuda.device_count()} here")


def _pool(size: int, **options: Any) -> Iterator[RankPool]:
    pool = RankPool(size, **options)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four gloo ranks, started once."""
    yield from _pool(4)


@pytest.fixture(scope="module")
def four_ranks_on_gpus() -> Iterator[RankPool]:
    """Four gloo ranks with CUDA tensors, on one card where there is one."""
    yield from _pool(4, on_gpu=True)


@pytest.fixture(scope="module")
def nccl_ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """NCCL ranks with a GPU each, as many as the parameter says."""
    yield from _pool(request.param, backend="nccl", on_gpu=True)


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
