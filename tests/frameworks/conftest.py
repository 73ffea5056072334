"""Skips what needs the frameworks where `make test-frameworks` has not installed them; ranks that have imported them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.zerobubble.mcore.compat import imported_version
from tests.frameworks.prepared import FOLDER
from tests.support.ranks import RankPool


@pytest.hookimpl(tryfirst=True)  # before pytest selects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of them are slow, and need an environment of their own."""
    reason = None
    if not FOLDER.is_dir():
        reason = "no frameworks are installed: make test-frameworks"
    elif not imported_version().startswith("0.19."):
        reason = "they need megatron-core 0.19: make test-frameworks"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def _ranks(size: int) -> Iterator[RankPool]:
    pool = RankPool(size, imports="tests.frameworks.rank_imports")
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankPool]:
    """Two gloo ranks with the frameworks."""
    yield from _ranks(2)


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[RankPool]:
    """Four gloo ranks with the frameworks."""
    yield from _ranks(4)
