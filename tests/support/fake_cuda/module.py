"""The names of `torch.cuda`, answered as CUDA would, on the streams and tensors of this package.

A name that the installed torch.cuda has and this one lacks fails when it is used, with its name: nothing is answered by accident.
Every name here exists in the installed torch, with the same parameters (`tests/support/test_fake_cuda.py`). A call that would
make a context on device 0 from a thread that has not called `set_device` fails with the thread and the call.

What this cannot show: CUDA graphs, memory pools, IPC, more than one process's devices (each process numbers its own), memory
that runs out, and how long anything takes.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.cuda import nccl

from tests.support.fake_cuda import streams
from tests.support.fake_cuda.machine import FakeCudaError
from tests.support.fake_cuda.streams import device_index
from tests.support.fake_cuda.tensors import DeviceMemory

__all__ = ["REAL", "FakeTorchCuda", "fake_names"]

REAL = torch.cuda
"""The installed torch.cuda."""

_TAKEN_OVER = ("OutOfMemoryError", "AcceleratorError", "amp", "_utils", "FloatTensor", "HalfTensor", "BFloat16Tensor", "Any")
"""Names that are the same with and without CUDA."""


class FakeTorchCuda(types.ModuleType):
    """A module object with the given names alone."""

    def __init__(self, names: dict[str, Any], *, name: str = "torch.cuda", real: Any = REAL) -> None:
        super().__init__(name, "A double of torch.cuda.")
        self.__dict__.update(names)
        self.__dict__["_real"] = real
        self.__dict__["__path__"] = getattr(real, "__path__", [])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(self.__dict__["_real"], name):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise FakeCudaError(f"{self.__name__}.{name} is used, and the fake does not define it")


def fake_names(memory: DeviceMemory, generators: tuple[torch.Generator, ...]) -> dict[str, Any]:
    """The names of the fake `torch.cuda`.

    Args:
        memory: which tensors are on a device, and how many bytes; its machine has the devices.
        generators: of each device.
    """
    return {
        **_devices(memory),
        **_memory(memory),
        **_random(memory, generators),
        **{name: getattr(streams, name) for name in ("Event", "Stream", "StreamContext", "current_stream", "default_stream")},
        **{name: getattr(streams, name) for name in ("set_stream", "stream")},
        **{name: getattr(REAL, name) for name in _TAKEN_OVER if hasattr(REAL, name)},
        "nccl": FakeTorchCuda({"version": lambda: (2, 27, 3)}, name="torch.cuda.nccl", real=nccl),
    }


def _devices(memory: DeviceMemory) -> dict[str, Any]:
    machine = memory.machine

    def set_device(device: Any) -> None:
        index = device_index(device, machine.thread().device)
        machine.thread().device = index

    def synchronize(device: Any = None) -> None:
        device_index(device, machine.called("torch.cuda.synchronize").device)
        machine.host_waits("torch.cuda.synchronize")

    def get_device_properties(device: Any = None) -> Any:
        return types.SimpleNamespace(name="fake", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132)

    def _lazy_call(callable: Callable[[], Any], **kwargs: Any) -> None:
        callable()

    return {
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_call": _lazy_call,
        "_lazy_init": lambda: None,
        "current_device": lambda: machine.called("torch.cuda.current_device").device,
        "device_count": lambda: machine.num_devices,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": get_device_properties,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: True,
        "set_device": set_device,
        "synchronize": synchronize,
    }


def _memory(memory: DeviceMemory) -> dict[str, Any]:
    machine = memory.machine

    def empty_cache() -> None:
        """cudaFree waits for the device."""
        machine.called("torch.cuda.empty_cache")
        machine.host_waits("torch.cuda.empty_cache")

    def counter(name: str, attribute: str) -> Callable[..., int]:
        def read(device: Any = None) -> int:
            machine.called(f"torch.cuda.{name}")
            return int(getattr(memory, attribute))

        return read

    def reset_peak_memory_stats(device: Any = None) -> None:
        machine.called("torch.cuda.reset_peak_memory_stats")
        memory.peak = memory.allocated

    return {
        "empty_cache": empty_cache,
        "max_memory_allocated": counter("max_memory_allocated", "peak"),
        "memory_allocated": counter("memory_allocated", "allocated"),
        "reset_peak_memory_stats": reset_peak_memory_stats,
    }


def _random(memory: DeviceMemory, generators: tuple[torch.Generator, ...]) -> dict[str, Any]:
    machine = memory.machine

    def chosen(device: Any, name: str) -> torch.Generator:
        return generators[device_index(device, machine.called(f"torch.cuda.{name}").device)]

    def get_rng_state(device: Any = "cuda") -> torch.Tensor:
        return chosen(device, "get_rng_state").get_state()

    def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
        if memory.index_of(new_state) is not None:
            raise TypeError("RNG state must be a torch.ByteTensor")
        chosen(device, "set_rng_state").set_state(new_state)

    def manual_seed(seed: int) -> None:
        chosen(None, "manual_seed").manual_seed(int(seed))

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(int(seed))

    names = {
        "default_generators": generators,
        "get_rng_state": get_rng_state,
        "initial_seed": lambda: chosen(None, "initial_seed").initial_seed(),
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "set_rng_state": set_rng_state,
    }
    own = {name: value for name, value in names.items() if name != "default_generators"}
    return {**names, "random": FakeTorchCuda(own, name="torch.cuda.random", real=REAL.random)}
