"""The host-device layer: replaces CUDA functions while installed, restores everything, stays out of the passes."""

from __future__ import annotations

import contextlib
import logging
import warnings

import pytest
import torch

from megatron.zerobubble.errors import CompatibilityError
from megatron.zerobubble.mcore.cpu import device as host_module
from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties

pytestmark = pytest.mark.smoke

with quiet_third_parties():
    from megatron.core import tensor_parallel
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
]


def test_uninstall_restores_everything() -> None:
    before = [getattr(owner, name) for owner, name in REPLACED]
    with HostDevice():
        during = [getattr(owner, name) for owner, name in REPLACED]
        assert not any(a is b for a, b in zip(before, during, strict=True))
        assert len({id(replacement) for replacement in during}) == len(during) - 1, "only the stand-in serves two modules"
    assert [getattr(owner, name) for owner, name in REPLACED] == before


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


def test_disabled_does_nothing() -> None:
    before = torch.cuda.current_device
    with HostDevice(enabled=False) as host:
        assert torch.cuda.current_device is before
        assert isinstance(host.on_host(), contextlib.nullcontext)


def test_a_missing_function_raises_before_anything_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.cuda.current_device
    monkeypatch.delattr(mcore_random, "_set_cuda_rng_state")
    with pytest.raises(CompatibilityError, match="_set_cuda_rng_state does not exist"):
        HostDevice().install()
    assert torch.cuda.current_device is before


def test_cuda_functions_run_on_the_cpu() -> None:
    with HostDevice() as host:
        assert torch.cuda.current_device() == host.device == torch.device("cpu")
        torch.cuda.synchronize()
        torch.cuda.manual_seed(7)
        state = torch.cuda.get_rng_state()
        drawn = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), drawn)
        assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"


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


def test_the_replaced_torch_module_serves_the_passes() -> None:
    with HostDevice():
        assert schedules.torch.zeros([], dtype=torch.int, device="cuda").device.type == "cpu"
        assert schedules.torch.distributed is torch.distributed
        assert schedules.torch.zeros(2, 3).shape == (2, 3)
        mask = transformer_utils.get_default_causal_mask(3)
        assert mask.tolist() == [[False, True, True], [False, False, True], [False, False, False]]


def test_no_mode_is_active_outside_of_on_host() -> None:
    """The passes run with torch's own dispatch: installing pushes no function mode."""
    with HostDevice():
        assert torch.overrides._get_current_function_mode_stack() == []


def test_quiet_third_parties_drops_only_what_it_names() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet_third_parties():
            warnings.warn("Transformer Engine and Apex are not installed. Falling back to Torch optimizers.", stacklevel=1)
            warnings.warn("Apex is not installed. Falling back to Torch Norm", stacklevel=1)
            warnings.warn("something else is wrong", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["something else is wrong"]


def test_the_patched_names_are_those_megatron_core_uses() -> None:
    """If megatron-core stops calling one of these, the layer can shrink."""
    assert tensor_parallel.random is mcore_random
    assert {owner for owner, _ in REPLACED} <= {owner for owner, _, _ in host_module._replacements()}
