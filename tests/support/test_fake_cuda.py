"""The fake CUDA against the installed torch: names and parameters."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest
import torch

from tests.support.fake_cuda import streams
from tests.support.fake_cuda.machine import Machine
from tests.support.fake_cuda.module import REAL, fake_names
from tests.support.fake_cuda.tensors import DeviceMemory

_MEMORY = DeviceMemory(Machine())
_NAMES = fake_names(_MEMORY, (torch.Generator(),))


# -- the installed torch --------------------------------------------------------------------------------------------------


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


def same_parameters(fake: Any, real: Any) -> bool:
    """Whether a call that the fake takes is one that torch takes: the same names, kinds and defaults."""
    return parameters(fake) == parameters(real)


def test_every_name_is_one_of_torch_cuda_with_its_parameters() -> None:
    for owner, real in ((_NAMES, REAL), (vars(_NAMES["random"]), REAL.random), (vars(_NAMES["nvtx"]), REAL.nvtx)):
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
