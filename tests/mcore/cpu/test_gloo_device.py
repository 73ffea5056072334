"""One polling thread of gloo per process: groups share it, a forked process makes its own, and torch may not allow it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron.zerobubble.mcore.cpu.gloo_device import one_device_per_process
from tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts Linux's threads")


def num_devices(expected: int) -> int:
    """Polling threads of this process. A thread names itself a moment after it was started, so wait for those expected."""
    for _ in range(500):
        found = sum(_name(task) == "gloo_tcp_loop" for task in os.listdir("/proc/self/task"))
        if found == expected:
            break
        time.sleep(0.01)
    return found


def _name(task: str) -> str:
    with contextlib.suppress(OSError):  # it has just ended
        return Path("/proc/self/task", task, "comm").read_text().strip()
    return ""


def group(*given: Any, **named: Any) -> Any:
    """Of this process alone."""
    return c10d.ProcessGroupGloo(dist.HashStore(), 0, 1, *given, **named)  # type: ignore[attr-defined]


def test_groups_share_a_device_inside_only() -> None:
    gc.collect()
    before = num_devices(0)
    with one_device_per_process():
        inside = [group(timeout=timedelta(seconds=5)) for _ in range(4)]
        assert num_devices(before + 1) == before + 1
        assert all(isinstance(each, c10d.ProcessGroupGloo) for each in inside)
    outside = [group() for _ in range(2)]
    assert num_devices(before + 3) == before + 3
    value = torch.ones(3)
    for each in inside + outside:
        each.allreduce([value]).wait()
    del each, inside, outside
    assert num_devices(before) == before


def test_timeout_and_options_of_a_group_are_its_own() -> None:
    with one_device_per_process():
        assert group().options._timeout == c10d.default_pg_timeout
        assert group(timedelta(seconds=5)).options._timeout == timedelta(seconds=5)
        assert group(timeout=timedelta(seconds=6)).options._timeout == timedelta(seconds=6)
        options = c10d.ProcessGroupGloo._Options()
        options._devices, options._timeout = [c10d.ProcessGroupGloo.create_default_device()], timedelta(seconds=7)
        assert group(options).options._timeout == timedelta(seconds=7)


def test_each_interface_that_the_environment_names_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = num_devices(0)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    with one_device_per_process():
        both = [group(), group()]
        assert num_devices(before + 2) == before + 2
        del both


def in_a_fork(rank: int) -> tuple[int, int, int]:
    """Devices of this process with several groups, and of a forked one before and after its first group."""
    several = [dist.new_group() for _ in range(3)]
    reader, writer = os.pipe()
    if not (child := os.fork()):
        inherited = num_devices(0)
        own = group(timeout=timedelta(seconds=5))
        own.allreduce([torch.ones(1)]).wait()
        os.write(writer, bytes([inherited, num_devices(1)]))
        os._exit(0)
    os.waitpid(child, 0)
    for each in several:
        dist.destroy_process_group(each)
    return (num_devices(1), *os.read(reader, 2))


def test_a_rank_has_one_device_and_a_process_that_it_forks_makes_its_own(two_ranks: RankPool) -> None:
    assert two_ranks.run(in_a_fork) == [(1, 0, 1)] * 2


def test_a_torch_without_the_options_says_so_and_keeps_its_groups(caplog: pytest.LogCaptureFixture) -> None:
    without = SimpleNamespace(__init__=None, create_device=None, _Options=SimpleNamespace(_devices=None, _threads=None))
    with mock.patch.object(c10d, "ProcessGroupGloo", without), caplog.at_level(logging.WARNING), one_device_per_process():
        assert without.__init__ is None
    assert [record.getMessage().partition(", so")[0].partition(") ")[2] for record in caplog.records] == [
        "has no ProcessGroupGloo create_default_device, _timeout"
    ]
