"""The host-device layer: replaces CUDA functions while installed, restores everything, stays out of the passes."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing.spawn
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import distributed_c10d

from megatron.zerobubble.errors import CompatibilityError
from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties
from megatron.zerobubble.mcore.cpu.gathers import one_at_a_time
from megatron.zerobubble.mcore.cpu.malloc import keep_freed_memory
from megatron.zerobubble.mcore.cpu.scripts import without_gpus

with quiet_third_parties():
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer import utils as transformer_utils


REPLACED = [
    (torch.cuda, "current_device"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "get_rng_state"),
    (torch.cuda, "set_rng_state"),
    (torch.cuda, "manual_seed"),
    (torch.cuda.random, "get_rng_state"),
    (mcore_random, "_get_cuda_rng_state"),
    (mcore_random, "_set_cuda_rng_state"),
    (schedules, "torch"),
    (transformer_utils, "torch"),
    (distributed_c10d.ProcessGroupGloo, "__init__"),
]


@pytest.mark.smoke
def test_uninstall_restores_everything() -> None:
    before = [getattr(owner, name) for owner, name in REPLACED]
    with HostDevice():
        during = [getattr(owner, name) for owner, name in REPLACED]
        assert not any(a is b for a, b in zip(before, during, strict=True))
        assert len({id(replacement) for replacement in during}) == len(during) - 1, "only the stand-in serves two modules"
    assert [getattr(owner, name) for owner, name in REPLACED] == before


@pytest.mark.smoke
def test_install_is_idempotent_across_instances() -> None:
    before = torch.cuda.current_device
    first, second = HostDevice(), HostDevice()
    first.install()
    installed = torch.cuda.current_device
    first.install()
    second.install()
    assert torch.cuda.current_device is installed
    second.uninstall()
    assert torch.cuda.current_device is installed, "the second did not install, so it does not uninstall"
    first.uninstall()
    first.uninstall()
    assert torch.cuda.current_device is before


@pytest.mark.smoke
def test_disabled_does_nothing() -> None:
    before = torch.cuda.current_device
    with HostDevice(enabled=False) as host:
        assert torch.cuda.current_device is before
        assert isinstance(host.on_host(), contextlib.nullcontext)


@pytest.mark.smoke
def test_a_missing_function_raises_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.cuda.current_device
    monkeypatch.delattr(mcore_random, "_set_cuda_rng_state")
    with pytest.raises(CompatibilityError, match="_set_cuda_rng_state does not exist"):
        HostDevice().install()
    assert torch.cuda.current_device is before


@pytest.mark.smoke
def test_megatron_cores_tracker_forks_the_cpu_generator(caplog: pytest.LogCaptureFixture) -> None:
    with HostDevice(), caplog.at_level(logging.WARNING):
        tracker = mcore_random.CudaRNGStatesTracker()
        torch.manual_seed(1)
        tracker.add("apart", 99)
        outside = torch.get_rng_state()
        with tracker.fork("apart"):
            first = torch.rand(4)
        assert torch.equal(torch.get_rng_state(), outside), "a fork leaves the default generator alone"
        with tracker.fork("apart"):
            second = torch.rand(4)
        assert not torch.equal(first, second), "the fork's own generator moves on"
    assert "CPU RNG state changed" not in caplog.text, "the tracker takes the two for different generators"


@pytest.mark.smoke
def test_the_mode_redirects_to_the_cpu() -> None:
    with HostDevice() as host:
        with host.on_host():
            made = torch.tensor([1.0], device="cuda")
            zeros = torch.zeros(2, device=torch.device("cuda", 0))
            assert made.device.type == zeros.device.type == "cpu"
            assert made.cuda() is made
            assert made.to("cuda").device.type == "cpu"
            assert made.to("cuda", torch.float16).dtype == torch.float16
            assert made.type() == "torch.cuda.FloatTensor"
            assert made.half().type() == "torch.cuda.HalfTensor"
            assert made.type(torch.float64).dtype == torch.float64
            assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
        assert made.type() == "torch.FloatTensor", "outside of the mode nothing is different"


@pytest.mark.smoke
def test_quiet_third_parties_drops_only_what_it_names() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet_third_parties():
            warnings.warn("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.", stacklevel=1)
            warnings.warn("Apex is not installed. Falling back to Torch Norm", stacklevel=1)
            warnings.warn("something else is wrong", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["something else is wrong"]


class Group:
    """Of ranks."""


def buckets(group: Any) -> SimpleNamespace:
    return SimpleNamespace(intra_distributed_optimizer_instance_group=group, param_gather_handle=None)


def test_an_all_gather_waits_for_the_previous_one_of_its_group_only() -> None:
    log: list[str] = []

    def gather(buckets: Any, name: str, *, is_waited_for: bool = True) -> None:
        log.append(f"start {name}")
        buckets.param_gather_handle = mock.Mock(wait=lambda: log.append(f"wait {name}")) if is_waited_for else None

    start = one_at_a_time(gather)
    one, two, other = (buckets(group) for group in [Group()] * 2 + [Group()])
    start(one, "one")
    start(other, "other")
    start(two, "two")
    assert log == ["start one", "start other", "wait one", "start two"]
    two.param_gather_handle = None  # as after its wait
    gc.collect()
    start(one, "again", is_waited_for=False)
    start(two, "last")
    assert log[4:] == ["start again", "start last"]


COUNT_FAULTS = """
import resource, sys, torch
from megatron.zerobubble.mcore.cpu.malloc import keep_freed_memory

def fresh_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        tensors = [torch.ones(2**20) for _ in range(10)]  # 4 MiB each
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    assert keep_freed_memory()
fresh_pages()
print(fresh_pages())
"""
MAPS_EACH = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""glibc's own threshold, which it would raise with use; what lies on top of its heap depends on what the process did before."""
PAGES = 10 * 4 * 2**20 // 4096
"""Of ten tensors."""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="counts Linux's pages")
def test_freed_tensors_are_not_mapped_anew() -> None:
    def fresh_pages(how: str) -> int:
        command = [sys.executable, "-c", COUNT_FAULTS, how]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | MAPS_EACH)
        return int(done.stdout)

    assert fresh_pages("as it is") > PAGES, "else there is nothing to keep"
    assert fresh_pages("keep") < PAGES // 100


def test_other_systems_return_false(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()


def _names() -> dict[str, Any]:
    return {**vars(torch.cuda), **vars(multiprocessing.spawn), "init": torch.distributed.init_process_group}


def test_a_script_finds_gpus_and_none_is_left() -> None:
    before = _names()
    with without_gpus(ranks_on_host=4):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 4
        assert torch.cuda.get_device_properties(0).major == 8
        assert torch.cuda.memory_stats()["reserved_bytes.all.current"] == torch.cuda.memory_allocated() == 0
        with torch.cuda.stream(torch.cuda.Stream()):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            torch.cuda.current_stream().wait_event(event)
            assert event.query()
    assert _names() == before


def test_a_script_that_asks_for_nccl_gets_gloo() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    with without_gpus():
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    assert torch.distributed.get_backend() == "gloo"
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not hasattr(multiprocessing.spawn, "get_command_line"), reason="another multiprocessing")
def test_a_spawned_child_imports_the_stand_in_for_triton_first() -> None:
    with without_gpus():
        command = multiprocessing.spawn.get_command_line(tracker_fd=1, pipe_handle=2)  # type: ignore[attr-defined]
    program = command[command.index("-c") + 1]
    assert program.startswith("import megatron.zerobubble.mcore; from multiprocessing.spawn import spawn_main")


_ROOT = Path(__file__).parents[3]
_PAGED_STASH = """
import triton
import triton.language as tl
from megatron.core import fusion

@triton.jit
def copy_kernel(source, BLOCK: tl.constexpr, count: tl.int64):
    pass
"""
_FUSION = """
try:
    import triton
    HAVE_TRITON = True
except ImportError:
    HAVE_TRITON = False
"""
_USE = """
import megatron.zerobubble.mcore
from megatron.core.transformer.moe.paged_stash import copy_kernel
from megatron.core.transformer.moe.ops.paged_stash import copy_kernel
from megatron.core.fusion import HAVE_TRITON
print(HAVE_TRITON)
try:
    import triton
except ModuleNotFoundError as error:
    print(error)
try:
    copy_kernel[(1,)](None, BLOCK=8, count=1)
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """A `megatron.core` of the few modules in question, in a folder that comes first on the path."""
    folder = tmp_path / "megatron" / "core"
    (folder / "transformer" / "moe" / "ops").mkdir(parents=True)
    for package in (folder, folder / "transformer", folder / "transformer" / "moe", folder / "transformer" / "moe" / "ops"):
        (package / "__init__.py").write_text("")
    (folder / "transformer" / "moe" / "paged_stash.py").write_text(_PAGED_STASH)
    (folder / "transformer" / "moe" / "ops" / "paged_stash.py").write_text(_PAGED_STASH)
    (folder / "fusion.py").write_text(_FUSION)
    return tmp_path


def _run(code: str, *folders: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*folders, _ROOT]))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_one_module_alone_sees_the_stand_in(core: Path) -> None:
    if "None" not in _run("import importlib.util; print(importlib.util.find_spec('triton'))"):
        pytest.skip("triton is installed here")
    assert _run(_USE, core) == [
        "False",
        "No module named 'triton'",
        "the kernel copy_kernel needs triton, which is not installed: pip install triton",
    ]


def test_an_installed_triton_is_used(core: Path) -> None:
    (core / "triton").mkdir()
    (core / "triton" / "__init__.py").write_text("def jit(function):\n    return 'compiled'\n")
    (core / "triton" / "language.py").write_text("constexpr = int64 = int\n")
    code = """
import megatron.zerobubble.mcore
from megatron.core.transformer.moe.paged_stash import copy_kernel
print(copy_kernel)
"""
    assert _run(code, core) == ["compiled"]
