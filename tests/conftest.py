"""Fixtures shared by all tests, and random sampling of parametrized tests.

A test with the mark `sampled(share)` runs a random share of its cases, at least one; the rest run with `-m slow`. Tests with
`sampled(share, group=NAME)`, in any files, are drawn from together, by the smallest share that one of them gives: that is for
tests that take long. All shares are taken times THINNED, the one number by which `make test` takes more time or less. The seed
is in the header; ZB_TEST_SEED=N repeats a run. `--sample-files 0.3` runs a random 30 % of the test files, by the same seed.
"""

from __future__ import annotations

import math
import os
import random
import re
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import megatron.zerobubble.mcore  # noqa: F401 -- first: makes megatron.core importable without triton
from megatron.zerobubble.mcore.compat import imported_version
from tests.support.ranks import RankPool
from tests.support.transformer_engine import chosen_version, unpacked

THINNED = 0.26


def pytest_configure(config: pytest.Config) -> None:
    """Choose one seed for all sampling. Cap oneDNN's instruction set together with torch's: with AMX beside a torch without
    AVX-512, torch's attention in bf16 raises. `torch.compile` keeps code of each in a cache of its own."""
    os.environ.setdefault("ZB_TEST_SEED", str(random.SystemRandom().randrange(1_000_000)))
    capability = os.environ.get("ATEN_CPU_CAPABILITY")
    if capability:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{os.getuid()}-{capability}")
    cap = {"default": "SSE41", "avx2": "AVX2"}.get(capability or "")
    if cap is not None:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", cap)


def pytest_addoption(parser: pytest.Parser) -> None:
    """--sample-files."""
    parser.addoption("--sample-files", type=float, metavar="SHARE", help="run this share of the test files, drawn at random")


def pytest_report_header(config: pytest.Config) -> str:
    """Print the seed, the instruction sets if some were chosen, and the megatron-core that is imported, in the header."""
    chosen = ("ZB_TEST_SEED", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
    variables = " ".join(f"{name}={os.environ[name]}" for name in chosen if name in os.environ)
    return f"{variables}, megatron-core {imported_version()}"


@pytest.hookimpl(tryfirst=True)  # before pytest selects by mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that are not sampled as slow. A case that is selected by its id always runs.

    A set in a test's id is refused: its order, and so the id, differs between the processes that share the tests.
    """
    for item in items:
        if re.search(r"[{]'[^:]*', '", item.nodeid):
            raise pytest.UsageError(f"{item.nodeid}: the id holds a set, whose order is random; pass a list")
    if any("::" in argument for argument in config.args):
        return
    share = config.getoption("--sample-files")
    if share is not None:
        files = sorted({item.path for item in items})
        drawn = random.Random(os.environ["ZB_TEST_SEED"]).sample(files, math.ceil(share * len(files)))
        config.hook.pytest_deselected(items=[item for item in items if item.path not in drawn])
        items[:] = [item for item in items if item.path in drawn]
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            tests.setdefault(mark.kwargs.get("group") or item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        share = THINNED * min(mark.args[0] for case in cases if (mark := case.get_closest_marker("sampled")) is not None)
        generator = random.Random(f"{os.environ['ZB_TEST_SEED']} {name}")
        sampled = generator.sample(range(len(cases)), math.ceil(share * len(cases)))
        for place, case in enumerate(cases):
            if place not in sampled:
                case.add_marker(pytest.mark.slow)
    # Files with whole jobs are the longest: begun last, one of them would keep one process busy when the others are done.
    long = {item.path for item in items if "group" in getattr(item.get_closest_marker("sampled"), "kwargs", {})}
    items.sort(key=lambda item: item.path not in long)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need a GPU where there is none."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.device_count():
        pytest.skip("needs a GPU, and torch sees none here")


def _pool(size: int, **options: Any) -> Iterator[RankPool]:
    pool = RankPool(size, **options)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    """Four gloo ranks, started once."""
    yield from _pool(4)


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    """Two gloo ranks, started once."""
    yield from _pool(2)


@pytest.fixture(scope="module")
def compiling_ranks() -> Iterator[RankPool]:
    """Two gloo ranks in which torch compiles."""
    yield from _pool(2, imports="tests.support.compiling_rank_imports")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small dataset of real text; its prefix.

    The text is source of Python's own library: not this package's, so that no commit changes the losses of another test's job.
    """
    from megatron.zerobubble.training.tokenizer import TokenizerConfig
    from tools.preprocess_data import Document, preprocess

    prefix = tmp_path_factory.mktemp("corpus") / "source"
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for package in ("asyncio", "email") for path in (library / package).rglob("*.py"))
    preprocess(
        documents=(Document(Path(file).read_text(encoding="utf-8")) for file in files),
        tokenizer=TokenizerConfig(),
        prefix=str(prefix),
        appends_eod=True,
    )
    return str(prefix)


@pytest.fixture(scope="session")
def engine_wheel() -> None:
    """Skips what needs Transformer Engine's Python where it was not fetched; in CI that is a failure."""
    if unpacked() is None:
        reason = f"Transformer Engine's Python was not fetched: python -m tools.releases te {chosen_version()}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def engine_ranks(engine_wheel: None) -> Iterator[RankPool]:
    """Four gloo ranks with Transformer Engine's Python, started once."""
    yield from _pool(4, imports="tests.support.transformer_engine.rank_imports")


@pytest.fixture(scope="module")
def nccl_ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """NCCL ranks, four or as many as the parameter says; where there are fewer GPUs, all share the first one."""
    yield from _pool(getattr(request, "param", 4), on_gpu=True)


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """A process group with only this process."""
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
