"""A pytest plugin for Megatron-LM's own schedule tests: two CPU ranks take the place of eight GPUs, with a schedule installed.

`tests/cli/test_megatron_lm_checkout.py` starts pytest with it in a process per rank. It is outside of this repository's
package `tests`, whose name is that of the checkout's. ZERO_BUBBLE_SCHEDULE names the schedule (empty: megatron-core's own), and
outcomes by test are written to ZERO_BUBBLE_OUTCOMES, a folder, in a file per rank.

A pipeline of four or eight ranks becomes one of two, without tensor parallelism; two ranks without a pipeline stay two.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import types
import typing
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import megatron.zerobubble.mcore  # first: makes megatron.core importable without triton

if not hasattr(typing, "override"):  # all of Python 3.12 that the checkout needs
    typing.override = lambda method: method  # type: ignore[attr-defined]

import torch
from megatron.core import parallel_state

import megatron.zerobubble
from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.mcore.cpu.scripts import without_gpus

_SIZE = 2
_SCHEDULE = os.environ["ZERO_BUBBLE_SCHEDULE"]
_outcomes: dict[str, str] = {}
_until_the_end = contextlib.ExitStack()


@pytest.fixture
def mocker() -> Iterator[Any]:
    """What these tests use of pytest-mock's fixture."""
    undo: list[Any] = []

    def start(patcher: Any) -> Any:
        undo.append(patcher)
        return patcher.start()

    def patch(*given: Any, **more: Any) -> Any:
        return start(mock.patch(*given, **more))

    def patch_object(*given: Any, **more: Any) -> Any:
        return start(mock.patch.object(*given, **more))

    patch.object = patch_object  # type: ignore[attr-defined]
    yield types.SimpleNamespace(patch=patch)
    for patcher in reversed(undo):
        patcher.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Make the CPU a GPU, before test files ask for one."""
    HostDevice().install()
    _until_the_end.enter_context(without_gpus(_SIZE))
    init = torch.distributed.init_process_group
    torch.distributed.init_process_group = functools.partial(init, timeout=timedelta(seconds=60))
    if "pytest_mock" not in sys.modules:
        stand_in: Any = types.ModuleType("pytest_mock")
        stand_in.mocker = mocker
        sys.modules["pytest_mock"] = stand_in


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Fit the sizes that the test file asks for to two ranks."""
    for module in {item.module for item in items}:
        utils = module.Utils
        utils.initialize_model_parallel = staticmethod(_smaller(utils.initialize_model_parallel))
        for name, fitted in (("ModelParallelConfig", _smaller), ("HyperCommGrid", _smaller_grid)):
            if hasattr(module, name):
                setattr(module, name, fitted(getattr(module, name)))


def _smaller(original: Any) -> Any:
    @functools.wraps(original, updated=())
    def fitted(**sizes: Any) -> Any:
        if sizes.get("pipeline_model_parallel_size", 1) > 1:
            sizes["pipeline_model_parallel_size"] = _SIZE
            sizes.pop("tensor_model_parallel_size", None)
        return original(**sizes)

    return fitted


def _smaller_grid(original: Any) -> Any:
    def fitted(shape: list[int], names: list[str]) -> Any:
        split = "pp" if shape[names.index("pp")] > 1 else "tp"
        return original([_SIZE if name == split else 1 for name in names], names)

    return fitted


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    parallel_state.destroy_model_parallel()
    if _SCHEDULE:
        megatron.zerobubble.install(schedule=_SCHEDULE)
    with HostDevice().on_host():
        yield
    megatron.zerobubble.uninstall()


def pytest_runtest_logreport(report: Any) -> None:
    """Take down how each test ended."""
    if report.when == "call" or report.failed or report.skipped:
        name = report.nodeid.rpartition("::")[2]
        text = report.outcome if report.passed else f"{report.outcome}: {report.longreprtext[-2000:]}"
        if _outcomes.get(name, "passed") == "passed":
            _outcomes[name] = text


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the outcomes. Tests that fail end a rank with 0: torchrun would stop the other rank, which writes its own."""
    _until_the_end.close()
    Path(os.environ["ZERO_BUBBLE_OUTCOMES"], os.environ["RANK"]).write_text(json.dumps(_outcomes))
    if session.exitstatus == pytest.ExitCode.TESTS_FAILED:
        session.exitstatus = pytest.ExitCode.OK
