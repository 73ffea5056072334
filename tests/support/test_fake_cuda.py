"""The fake CUDA against the installed torch: names, parameters, where tensors are, and what makes the host wait."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.fake_cuda import streams
from tests.support.fake_cuda.install import FakeCuda, fake_cuda
from tests.support.fake_cuda.machine import Machine
from tests.support.fake_cuda.module import REAL, FakeTorchCuda, fake_names
from tests.support.fake_cuda.tensors import DeviceMemory

_MEMORY = DeviceMemory(Machine())
_NAMES = fake_names(_MEMORY, (torch.Generator(),))


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    with fake_cuda(num_devices=2) as installed:
        torch.cuda.set_device(0)
        yield installed


def calls(fake: FakeCuda) -> list[str]:
    """Calls that waited since the last look."""
    found = [sync.call for sync in fake.log.syncs]
    fake.log.syncs.clear()
    return found


# -- the installed torch --------------------------------------------------------------------------------------------------


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def same_parameters(fake: Any, real: Any) -> bool:
    """Whether a call that the fake takes is one that torch takes: the same names, kinds and defaults."""
    return parameters(fake) == parameters(real)


def test_every_name_is_one_of_torch_cuda_with_its_parameters() -> None:
    for owner, real in ((_NAMES, REAL), (vars(_NAMES["random"]), REAL.random)):
        for name, value in owner.items():
            if name in ("_real", "__path__") or (name.startswith("__") and name.endswith("__")):
                continue
            assert hasattr(real, name), f"torch.cuda has no {name}"
            if callable(value) and value is not getattr(real, name) and not isinstance(value, types.ModuleType):
                assert same_parameters(value, getattr(real, name)), (
                    f"{name}{inspect.signature(getattr(real, name))} in torch.cuda"
                )


@pytest.mark.parametrize("kind", ["Stream", "Event"])
def test_streams_and_events_have_methods_of_torchs(kind: str) -> None:
    real, ours = getattr(REAL, kind), getattr(streams, kind)
    bases = (real, getattr(torch, kind))
    for name, method in vars(ours).items():
        if name.startswith("_") or not callable(method):
            continue
        assert any(hasattr(base, name) for base in bases), f"torch.cuda.{kind} has no {name}"
        if hasattr(real, name):
            assert same_parameters(method, getattr(real, name)), name


def test_everything_is_as_before_afterwards() -> None:
    before = {name: getattr(torch, name) for name in ("cuda", "device", "Generator", "tensor", "zeros")}
    start, wait, device = threading.Thread.start, torch.distributed.Work.wait, torch.Tensor.device
    with fake_cuda(), fake_cuda(num_devices=2) as inner:
        assert isinstance(torch.cuda, FakeTorchCuda)
        assert inner.machine.num_devices == torch.cuda.device_count() == 2
    assert {name: getattr(torch, name) for name in before} == before
    assert (threading.Thread.start, torch.distributed.Work.wait, torch.Tensor.device) == (start, wait, device)
    assert not torch.cuda.is_available()
    assert torch.zeros(1).device.type == "cpu"


# -- tensors --------------------------------------------------------------------------------------------------------------


def test_kernels_over_both_places_are_refused(fake: FakeCuda) -> None:
    x = torch.ones(2, device="cuda")
    for mixed in (lambda: x + torch.ones(2), lambda: torch.ones(2).add_(x), lambda: torch.stack([x, torch.ones(2)])):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    assert (x * torch.tensor(2.0)).is_cuda, "a host tensor without dimensions is a number"
    with pytest.raises(TypeError, match="can't convert cuda"):
        x.numpy()


# -- host synchronizations ------------------------------------------------------------------------------------------------


def test_reads_on_the_host_wait(fake: FakeCuda) -> None:
    x = torch.ones(3, device="cuda")
    assert calls(fake) == []
    for read, name in (
        (lambda: x.sum().item(), "Tensor.item"),
        (lambda: bool((x > 0).all()), "Tensor.item"),
        (lambda: float(x[0]), "Tensor.item"),
        (lambda: x.tolist(), "Tensor.tolist"),
        (lambda: x.cpu(), "Tensor.to the host"),
        (lambda: torch.ones(3).copy_(x, non_blocking=True), "Tensor.copy_ to the host"),
        (lambda: x.nonzero(), "torch.nonzero"),
        (lambda: x[x > 0], "an index by a mask"),
        (lambda: x[torch.tensor([0, 1])], "an index in host memory"),
        (lambda: torch.equal(x, x), "torch.equal"),
        (lambda: torch.tensor([1.0], device="cuda"), "Tensor.to the device"),
        (lambda: torch.tensor([x[0], 2.0]), "torch.tensor of numbers on the device"),
        (lambda: x.copy_(torch.ones(3)), "Tensor.copy_ from the host"),
        (lambda: torch.cuda.synchronize(), "torch.cuda.synchronize"),
        (lambda: torch.cuda.empty_cache(), "torch.cuda.empty_cache"),
    ):
        read()
        assert calls(fake) == [name]
