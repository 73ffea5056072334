"""`fake_cuda()`: everything of this package in place for the length of a `with` block.

    with fake_cuda(num_devices=2) as fake:
        torch.cuda.set_device(rank)
        ...                              # any loop for CUDA
        fake.log.syncs                   # where the host waited for the device

Besides `torch.cuda` it replaces a few names elsewhere in torch that would look for a driver: `torch.accelerator`, functions that
take a device number (a build without CUDA does not know what a number means), `torch.device` of a number, and NCCL
(`nccl_by_gloo`). Compiled functions run as they are.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # else the first op imports it, which reads all of torch.cuda
from torch.nn.attention.bias import CausalBias
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from tests.support.fake_cuda import machine as machines
from tests.support.fake_cuda.machine import FakeCudaError, Machine
from tests.support.fake_cuda.module import REAL, FakeTorchCuda, fake_names
from tests.support.fake_cuda.nccl_by_gloo import nccl_by_gloo
from tests.support.fake_cuda.syncs import SyncLog
from tests.support.fake_cuda.tensors import DeviceMemory, DeviceMode, attributes

__all__ = ["FakeCuda", "fake_cuda"]

_LIKE = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided")


@dataclass(frozen=True)
class FakeCuda:
    """What a test asks the installed fake.

    Attributes:
        machine: devices, streams and threads.
        memory: which tensors are on a device.
        log: the host synchronizations.
    """

    machine: Machine
    memory: DeviceMemory
    log: SyncLog


@contextmanager
def fake_cuda(*, num_devices: int = 1) -> Iterator[FakeCuda]:
    """A context in which CUDA seems to be there. The calling thread, too, has to choose its device.

    An error in another thread, which the context's body may not see, is raised at its end.

    Args:
        num_devices: what `torch.cuda.device_count` returns.
    """
    machine = Machine(num_devices=num_devices)
    memory, log = DeviceMemory(machine), SyncLog()
    machine.host_syncs.append(log)
    generators = (torch.default_generator,) * num_devices  # as on the CPU, to compare runs bit for bit
    fake = FakeCuda(machine, memory, log)

    def mode() -> DeviceMode:
        return DeviceMode(memory)

    module = FakeTorchCuda(fake_names(memory, generators))
    replaced: list[tuple[Any, str, Any]] = [
        (REAL, "_initialized", True),  # for functions of the real module that others have imported by name
        (torch, "cuda", module),
        *((torch.Tensor, name, value) for name, value in attributes(memory).items()),
        *_accelerator(module),
        *_factories(memory),
        *_types(),
        (torch._C._nn, "_parse_to", _with_device_numbers(torch._C._nn._parse_to)),
        (threading.Thread, "start", _start_in_mode(threading.Thread.start, mode)),
        (CausalBias, "__new__", _without_modes(CausalBias.__new__)),
        *nccl_by_gloo(),
    ]
    before = machines.install(machine)
    with ExitStack() as undo:
        undo.callback(machines.install, before)
        for owner, name, value in replaced:
            _replace(undo, owner, name, value)
        undo.callback(sys.modules.__setitem__, "torch.cuda", REAL)
        sys.modules["torch.cuda"] = module
        undo.enter_context(patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"))  # for what is decorated from here on
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        undo.enter_context(mode())
        yield fake
        if machine.errors:
            raise FakeCudaError(machine.errors[0])


def _replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    own = vars(owner)
    if name in own:
        undo.callback(setattr, owner, name, own[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes a subclass of Tensor which no dispatch mode may see."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _accelerator(module: Any) -> list[tuple[Any, str, Any]]:
    names = {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "current_device_index": module.current_device,
        "current_stream": module.current_stream,
        "device_count": module.device_count,
        "is_available": module.is_available,
        "set_device_index": module.set_device,
        "synchronize": module.synchronize,
    }
    return [(torch.accelerator, name, value) for name, value in names.items()]


# -- device numbers -------------------------------------------------------------------------------------------------------


def _numbered(device: Any) -> Any:
    return torch.device("cuda", device) if isinstance(device, int) else device


def _with_device_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _numbered(kwargs["device"])
        elif function.__name__ == "_parse_to":
            args = (_numbered(args[0]), *args[1:]) if args else args
        return function(*args, **kwargs)

    return call


def _copied(function: Callable[..., Any], memory: DeviceMemory) -> Callable[..., Any]:
    """`torch.tensor` and `as_tensor`: C++ copies to the device past all modes, and reads numbers of a list from it one by one."""

    @functools.wraps(function)
    def call(*args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Any:
        data = kwargs.get("data", args[0] if args else None)
        if isinstance(data, torch.Tensor) and memory.index_of(data) is not None:
            made = data.detach().clone() if function.__name__ == "tensor" else data
            made = made.to(kwargs.get("dtype", made.dtype))
        else:
            for each in tree_leaves(data):
                if isinstance(each, torch.Tensor) and memory.index_of(each) is not None:
                    memory.host_waits(f"torch.{function.__name__} of numbers on the device")
            made = function(*args, **kwargs)
        made = made if device is None else made.to(_numbered(device))
        return made.requires_grad_() if requires_grad else made

    return call


def _factories(memory: DeviceMemory) -> list[tuple[Any, str, Any]]:
    made = [function.__name__ for function in _device_constructors() if getattr(torch, function.__name__, None) is function]
    copied = ("tensor", "as_tensor")
    return [
        *((torch, name, _with_device_numbers(getattr(torch, name))) for name in (*made, *_LIKE) if name not in copied),
        *((torch, name, _copied(getattr(torch, name), memory)) for name in copied),
        *((torch.Tensor, name, _with_device_numbers(getattr(torch.Tensor, name))) for name in _NEW),
    ]


def _type_of(real: Any, make: Callable[..., Any]) -> Any:
    """A class whose instances are those of `real`, made by `make`: a type of C++ has no attribute to replace."""

    class Made(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, real)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return make(*args, **kwargs)

    return Made(real.__name__, (), {"__module__": "torch", "__doc__": real.__doc__})


def _types() -> list[tuple[Any, str, Any]]:
    real_device, real_generator = torch.device, torch.Generator

    def device(*args: Any, **kwargs: Any) -> Any:
        return real_device("cuda", *args) if [*map(type, args)] == [int] and not kwargs else real_device(*args, **kwargs)

    def generator(device: Any = None) -> torch.Generator:  # the host's algorithm, on any device
        return real_generator()

    return [(torch, "device", _type_of(real_device, device)), (torch, "Generator", _type_of(real_generator, generator))]


# -- threads -------------------------------------------------------------------------------------------


def _start_in_mode(start: Callable[[threading.Thread], None], mode: Callable[[], DeviceMode]) -> Any:
    """`Thread.start`: ops of the new thread run in the mode."""

    @functools.wraps(start)
    def start_in_mode(self: threading.Thread) -> None:
        run = self.run

        def run_in_mode() -> None:
            with mode():
                run()

        self.run = run_in_mode  # type: ignore[method-assign]
        start(self)

    return start_in_mode
