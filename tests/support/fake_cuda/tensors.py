"""Tensors of a fake CUDA device: ordinary CPU tensors whose storage is registered as device memory.

Least magic that works: kernels, views, `.data`, autograd and gloo see plain CPU tensors. A dispatch mode on every thread turns
``device="cuda"`` into the CPU, registers what is made there and what ops make from it, and refuses what CUDA refuses: kernels
over tensors of both places. `attributes` replaces those attributes of `torch.Tensor` that answer where a tensor is or move it
(`device`, `is_cuda`, `to`, `cpu`, `type` ...).

The host waits, and it is recorded, in: `.item()` and what comes down to it (`bool`, `float`, `int`, formatting), `.tolist()`,
`.cpu()`, copies to host memory that is not pinned or not `non_blocking`, copies from host memory that are not `non_blocking`
(`torch.tensor(..., device="cuda")` is one), `nonzero` and others whose result has a size that depends on values, and indices in
host memory.

What this cannot show: kernels of CUDA (other rounding, other supported dtypes, no limit on index types), the allocator's blocks
(bytes are those of the storages, and a storage that is resized keeps its first size), gradients that cross between host and
device memory (the gradient stays where it is), and what C++ decides by the device itself: the backward of a CUDA tensor runs on
a thread of its own, here on the caller's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.fake_cuda.machine import FakeCudaError, Machine
from tests.support.fake_cuda.streams import Stream, current_stream, device_index

__all__ = ["DeviceMemory", "DeviceMode", "attributes"]

_CPU = torch.device("cpu")
_REAL_DEVICE = torch._C.TensorBase.device.__get__  # type: ignore[attr-defined]

_SIZE_DEPENDS_ON_VALUES = ("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount")
_READS_ON_HOST = {"_local_scalar_dense": "Tensor.item", "equal": "torch.equal"}
_TAKES_BOTH = ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "set_", "lift_fresh", "lift")
"""Ops that take tensors of the host and of the device together."""


class DeviceMemory:
    """Which storages are device memory, which are pinned, and how many bytes are allocated.

    Args:
        machine: the devices.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.allocated = self.peak = 0
        self._lock = threading.RLock()
        """Reentrant: where memory is added the garbage collector may run, and free some."""
        self._device: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._pinned: dict[int, weakref.ref[Any]] = {}

    def index_of(self, tensor: Tensor) -> int | None:
        """Index of the device whose memory the tensor is in; None for host memory."""
        if tensor.layout != torch.strided or _REAL_DEVICE(tensor).type != "cpu" or torch._is_functional_tensor(tensor):
            return None
        found = self._device.get(tensor.untyped_storage()._cdata)
        return None if found is None else found[1]

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def add(self, tensor: Tensor, index: int) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._device:
            return

        def freed(_: object) -> None:
            with self._lock:
                self.allocated -= size
                self._device.pop(key, None)

        with self._lock:
            self._device[key] = weakref.ref(storage, freed), index
            self.allocated += size
            self.peak = max(self.peak, self.allocated)

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._pinned[key] = weakref.ref(storage, lambda _: self._pinned.pop(key, None))
        return tensor

    def host_waits(self, call: str) -> None:
        """The host waits for the current stream."""
        self.machine.called(call)
        self.machine.host_waits(call)


class _Target(threading.local):
    """Where `Tensor.to` copies to on this thread, and whether ops are those of a backend that takes the place of another."""

    index: int | None = None
    is_set = False
    is_backend = False


class DeviceMode(TorchDispatchMode):
    """Runs ops of one thread on the fake device. Every thread needs an instance of its own.

    Args:
        memory: shared by all threads.
    """

    target = _Target()

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__()
        self._memory = memory

    @classmethod
    @contextmanager
    def copying_to(cls, index: int | None) -> Iterator[None]:
        """Inside, `_to_copy` makes memory of this device; None: of the host."""
        cls.target.index, cls.target.is_set = index, True
        try:
            yield
        finally:
            cls.target.is_set = False

    @classmethod
    @contextmanager
    def in_backend(cls) -> Iterator[None]:
        """Inside, ops run unseen: gloo copies tensors where NCCL would not."""
        cls.target.is_backend = True
        try:
            yield
        finally:
            cls.target.is_backend = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self.target.is_backend:
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        places = [self._memory.index_of(each) for each in given]
        index = next((place for place in places if place is not None), None)
        result_index = self._result_index(name, kwargs, index)
        if kwargs.pop("pin_memory", False):
            return self._memory.pin(func(*args, **kwargs))
        if index is None and result_index is None:
            return func(*args, **kwargs)
        if name.startswith("c10d::") or name == "record_stream":
            return func(*args, **kwargs)
        if index is not None:
            self._check_places(name, given, places, args)
        if getattr(func, "is_view", False) or name.startswith("prim"):
            return func(*args, **kwargs)
        current_stream()  # a kernel needs one, and so a device
        self._record_waits(name, args, kwargs, given, places)
        result = func(*args, **kwargs)
        if result_index is not None:
            inputs = {each.untyped_storage()._cdata for each, place in zip(given, places, strict=True) if place is None}
            for each in tree_leaves(result):
                if isinstance(each, Tensor) and each.untyped_storage()._cdata not in inputs:
                    self._memory.add(each, result_index)
        return result

    def _result_index(self, name: str, kwargs: dict[str, Any], index: int | None) -> int | None:
        """The device of what the op makes; None for the host. Rewrites the argument `device`."""
        if name == "_to_copy" and self.target.is_set:
            return self.target.index
        device = kwargs.get("device")
        if device is None or (
            name == "_to_copy" and device.type == "cpu"
        ):  # C++ takes it from a tensor: for us that is no answer
            return index
        if device.type == "cuda":
            kwargs["device"] = _CPU
            return device_index(device, self._memory.machine.called(f"torch.{name}").device)
        in_backward = torch._C._current_graph_task_id() != -1  # C++ of autograd takes it from a gradient
        return (index if index is not None else self._memory.machine.thread().device) if in_backward else None

    def _check_places(self, name: str, given: list[Tensor], places: list[int | None], args: Any) -> None:
        """Refuse a kernel over tensors of both places, as CUDA does; host tensors without dimensions are scalars to it."""
        if name in _TAKES_BOTH:
            return
        on_host = [each for each, place in zip(given, places, strict=True) if place is None]
        is_into_host = name.endswith("_") and bool(args) and isinstance(args[0], Tensor) and places[0] is None
        if is_into_host or any(each.dim() > 0 for each in on_host):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (aten::{name})"
            )

    def _record_waits(self, name: str, args: Any, kwargs: Any, given: list[Tensor], places: list[int | None]) -> None:
        waits = self._memory.host_waits
        if name in _READS_ON_HOST:
            waits(_READS_ON_HOST[name])
        elif name in _SIZE_DEPENDS_ON_VALUES:
            waits(f"torch.{name}")
        elif name == "copy_":
            target, source = places[:2] if len(places) > 1 else (places[0], places[0])
            is_async = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            if target is None and source is not None and not (is_async and self._memory.is_pinned(given[0])):
                waits("Tensor.copy_ to the host")
            elif target is not None and source is None and not is_async and given[1].dim() > 0:
                waits("Tensor.copy_ from the host")
        elif name == "repeat_interleave" and kwargs.get("output_size") is None:
            waits("torch.repeat_interleave")
        elif name.strip("_").startswith("index") and name in _TAKES_BOTH:
            indices = [each for each in tree_leaves(args[1]) if isinstance(each, Tensor)]
            fills = name != "index" and args[2].numel() == 1
            if any(each.dtype in (torch.bool, torch.uint8) for each in indices) and not fills:
                waits("an index by a mask")
            elif any(self._memory.index_of(each) is None for each in indices):
                waits("an index in host memory")


# -- attributes of torch.Tensor -------------------------------------------------------------------------------------------


def attributes(memory: DeviceMemory) -> dict[str, Any]:
    """The attributes of `torch.Tensor` that answer where a tensor is, or move it."""
    real = {name: getattr(Tensor, name) for name in ("to", "type", "tolist", "numpy", "__array__", "new_tensor", "is_pinned")}

    def device(self: Tensor) -> torch.device:
        index = memory.index_of(self)
        return _REAL_DEVICE(self) if index is None else torch.device("cuda", index)

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        place, dtype, is_async, copies, rest = _destination(args, kwargs)
        index = memory.index_of(self)
        if place is None or place.type not in ("cpu", "cuda"):
            return real["to"](self, *args, **kwargs)
        target = device_index(place, memory.machine.called("Tensor.to").device) if place.type == "cuda" else None
        if target == index:
            return real["to"](self, dtype or self.dtype, copy=copies, **rest)
        if not is_async:
            memory.host_waits("Tensor.to the host" if target is None else "Tensor.to the device")
        with DeviceMode.copying_to(target):
            moved = real["to"](self, _CPU, dtype or self.dtype, copy=True, **rest)
        return memory.pin(moved) if target is None and is_async else moved  # as torch: pinned, or the copy were not asynchronous

    def cuda(self: Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format) -> Tensor:
        return to(self, torch.device("cuda") if device is None else device, non_blocking=non_blocking)

    def cpu(self: Tensor, memory_format: Any = torch.preserve_format) -> Tensor:
        return to(self, _CPU)

    def type(self: Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        if dtype is not None:
            return real["type"](self, dtype, non_blocking, **kwargs)
        name = real["type"](self)
        return name if memory.index_of(self) is None else name.replace("torch.", "torch.cuda.", 1)

    def on_host(name: str) -> Callable[..., Any]:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            if memory.index_of(self) is not None:
                raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
            return real[name](self, *args, **kwargs)

        return read

    def tolist(self: Tensor) -> Any:
        if memory.index_of(self) is not None:
            memory.host_waits("Tensor.tolist")
        return real["tolist"](self)

    def new_tensor(self: Tensor, data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        index = memory.index_of(self)
        place = device if device is not None else (_CPU if index is None else torch.device("cuda", index))
        return to(real["new_tensor"](self, data, **kwargs), place)

    def pin_memory(self: Tensor, device: Any = None) -> Tensor:
        if memory.index_of(self) is not None:
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
        return self if memory.is_pinned(self) else memory.pin(self.clone())

    def record_stream(self: Tensor, stream: Stream) -> None:
        if memory.index_of(self) is None or not isinstance(stream, Stream):
            raise FakeCudaError(f"record_stream of a tensor on {self.device} with {stream!r}")

    return {
        "device": property(device),
        "is_cuda": property(lambda self: memory.index_of(self) is not None),
        "is_cpu": property(lambda self: _REAL_DEVICE(self).type == "cpu" and memory.index_of(self) is None),
        "get_device": lambda self: -1 if memory.index_of(self) is None else memory.index_of(self),
        "is_pinned": lambda self, device=None: memory.is_pinned(self),
        "numpy": on_host("numpy"),
        "__array__": on_host("__array__"),
        **{f.__name__: f for f in (to, cuda, cpu, type, tolist, new_tensor, pin_memory, record_stream)},
    }


def _destination(args: Any, kwargs: Any) -> tuple[torch.device | None, torch.dtype | None, bool, bool, dict[str, Any]]:
    """What `Tensor.to` is asked for: device, dtype, non_blocking, copy, and the rest."""
    kwargs = dict(kwargs)
    place, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
    is_async, copies = kwargs.pop("non_blocking", False), kwargs.pop("copy", False)
    other = kwargs.pop("other", None)
    flags = []
    for each in args:
        if isinstance(each, Tensor):
            other = each
        elif isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, bool):
            flags.append(each)
        elif each is not None:
            place = each
    is_async, copies = ([*flags, *(is_async, copies)[len(flags) :]])[:2]
    if other is not None:
        place, dtype = other.device, other.dtype
    if isinstance(place, int):
        place = torch.device("cuda", place)
    return (None if place is None else torch.device(place)), dtype, is_async, copies, kwargs
