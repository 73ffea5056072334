"""Fixtures shared by all tests, and which of many like cases run this time.

A test with the mark `sampled(share)` runs a random share of its parameters, at least one; the rest run with `-m slow`. The seed
is in the header; ZB_TEST_SEED=N repeats it.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.ranks import RankPool


def pytest_configure(config: pytest.Config) -> None:
    """One seed for everything that is sampled."""
    os.environ.setdefault("ZB_TEST_SEED", str(random.SystemRandom().randrange(1_000_000)))


def pytest_report_header(config: pytest.Config) -> str:
    """How to repeat what was sampled."""
    return f"ZB_TEST_SEED={os.environ['ZB_TEST_SEED']}"


@pytest.hookimpl(tryfirst=True)  # before the marks are looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is not drawn is slow. What was asked for by its own id runs."""
    if any("::" in argument for argument in config.args):
        return
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        mark = cases[0].get_closest_marker("sampled")
        assert mark is not None
        generator = random.Random(f"{os.environ['ZB_TEST_SEED']} {name}")
        drawn = generator.sample(range(len(cases)), math.ceil(mark.args[0] * len(cases)))
        for place, case in enumerate(cases):
            if place not in drawn:
                case.add_marker(pytest.mark.slow)


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
