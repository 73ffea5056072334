"""`cuda:0` for FakeTensors: the names of `torch.cuda`, and a mode that counts what each op of torch would do on a GPU.

A kernel is an op of torch below autograd that is neither a view nor an allocation. Some ops launch several kernels on a GPU, and
compiled fusions make one of several ops; two counts of the same ops compare all the same. Bytes are those of storages, without
the allocator's rounding and fragments. Reading a value on the host is recorded with its place, and gives 0 or True.
"""

from __future__ import annotations

import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron.zerobubble.mcore.cpu.streams import InertStream
from tests.support.fake_tensors.allocator import Event

__all__ = ["DEVICE", "Counts", "FakeDevice"]

DEVICE = torch.device("cuda", 0)

_NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh", "resize_", "set_"),
    *("detach_", "is_pinned", "_pin_memory", "device"),
}
"""Ops that are no views and launch nothing."""
_VALUES = {"_local_scalar_dense", "equal"}
"""Ops whose result is a value on the host."""
_SIZES = {"nonzero", "masked_select", "_unique2", "unique_dim", "bincount"}
"""Ops whose result has a size that the host waits for."""


@dataclass
class Counts:
    """What a stretch of a program does."""

    kernels: Counter[str] = field(default_factory=Counter)
    """Name of an op of torch -> how often."""
    collectives: Counter[str] = field(default_factory=Counter)
    """Name of a collective or transfer -> how often."""
    reads: Counter[str] = field(default_factory=Counter)
    """Op and place -> how often the host waits for a value of the device there."""
    elsewhere: Counter[str] = field(default_factory=Counter)
    """Op, device and place of tensors made on another device than `cuda:0`."""


class FakeDevice(TorchDispatchMode):
    """Counts. Use `entered`, which also makes torch take FakeTensors for what it allocates.

    Args:
        routed: (token, expert) pairs of a microbatch on this rank, which are spread evenly over all experts.
        selected: which share of all pairs of a token and an expert these are.

    Attributes:
        counts: of the ops since it was last replaced.
        live_bytes: of all storages on the device.
        most_bytes: peak of it.
        events: every allocation, free and `record_stream` of a storage, for `allocator.replayed`.
    """

    def __init__(self, *, routed: int = 0, selected: float = 0.0) -> None:
        super().__init__()
        self._routed, self._selected = routed, selected
        self.counts = Counts()
        self.live_bytes = self.most_bytes = 0
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._stream = 0
        self.events: list[Event] = []

    @contextmanager
    def entered(self) -> Iterator[FakeDevice]:
        """On entry tensors are fake, on `cuda:0` where a device is asked for, and ops are counted."""
        with ExitStack() as stack:
            for owner, name, value in self._replacements():
                stack.enter_context(mock.patch.object(owner, name, value, create=not hasattr(owner, name)))
            stack.enter_context(_WithoutDevice(allow_non_fake_inputs=True))
            stack.enter_context(self)
            yield self

    def reset_peak(self) -> None:
        """Reset `most_bytes` to the bytes alive now."""
        self.most_bytes = self.live_bytes

    def read(self, what: str) -> None:
        """Record that the host waits for the device."""
        self.counts.reads[f"{what} at {_place()}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        on_device = any(each.device.type == "cuda" for each in given)
        if name in _VALUES:
            if on_device:
                self.read(name)
            if name == "equal" or given[0].dtype == torch.bool:
                return True
            value = 0 if on_device else 1  # no overflow; optimizers divide by the number of their step
            return float(value) if given[0].is_floating_point() else value
        if namespace == "c10d" and name.endswith("_coalesced_"):  # without an implementation for FakeTensors; made by others
            self.counts.collectives[name] += 1
            return FakeWork().boxed()
        if name == "masked_select":  # a routing map
            result = given[0].new_empty(round(given[1].numel() * self._selected))
        else:
            result = func(*args, **kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        if namespace == "c10d":
            self.counts.collectives[name] += 1
        elif not func.is_view and name not in _NO_KERNEL and (on_device or any(each.device == DEVICE for each in made)):
            self.counts.kernels[name] += 1
            if name in _SIZES or (on_device and any(each.device.type == "cpu" for each in made) and not _is_async(kwargs)):
                self.read(name)
        foreign = {each.untyped_storage()._cdata for each in given}
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata in foreign or storage._cdata in self._alive:
                continue
            if tensor.device == DEVICE:
                self._add(storage)
            elif not func.is_view and tensor.dim():  # else a number
                self.counts.elsewhere[f"{name} on {tensor.device} at {_place()}"] += 1
        return result

    def _listed(self, tensor: torch.Tensor) -> Any:
        """The values of a tensor: of integers an even share of what is routed, or else zeros."""
        if tensor.device == DEVICE:
            self.read("tolist")
        if sys._getframe(2).f_locals.get("sorted_idxs") is tensor:  # the order of chunks, all of one size
            return list(range(tensor.numel()))
        if tensor.is_floating_point():
            return np.zeros(tuple(tensor.shape)).tolist()
        return np.full(tuple(tensor.shape), self._routed // max(1, tensor.numel())).tolist()

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.live_bytes += size
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        number, stream = len(self.events), self._stream
        self.events.append(("allocate", number, size, stream))

        def freed(_: object) -> None:
            self.live_bytes -= size
            del self._alive[key]
            self.events.append(("free", number, size, stream))

        self._alive[key] = number, weakref.ref(storage, freed)

    def _recorded(self, tensor: torch.Tensor, stream: object) -> None:
        number, _ = self._alive[tensor.untyped_storage()._cdata]
        self.events.append(("record_stream", number, tensor.untyped_storage().nbytes(), id(stream)))

    @contextmanager
    def _on_stream(self, stream: object) -> Iterator[None]:
        before, self._stream = self._stream, id(stream)
        yield
        self._stream = before

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        """(owner, name, replacement): what torch without CUDA lacks, and what has no value on a fake tensor."""
        import megatron.core.models.gpt  # noqa: F401 -- before names change, of which torch's compiler keeps a table
        from megatron.core.models.common.embeddings import rotary_pos_embedding as rotary
        from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as yarn
        from megatron.core.tensor_parallel import random as mcore_random
        from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

        from megatron.zerobubble.mcore.attention import attention_masks
        from megatron.zerobubble.mcore.cpu.rotary import own_positions
        from megatron.zerobubble.mcore.model import rng

        stream = type("Stream", (InertStream,), {"synchronize": lambda _: self.read("synchronize")})
        cuda: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "synchronize": lambda *_: self.read("synchronize"),
            "current_stream": stream,
            "default_stream": stream,
            "stream": self._on_stream,
            "memory_allocated": lambda *_: self.live_bytes,
            "max_memory_allocated": lambda *_: self.most_bytes,
            "reset_peak_memory_stats": lambda *_: self.reset_peak(),
            "get_device_capability": lambda *_: (9, 0),
            "get_device_properties": lambda *_: types.SimpleNamespace(name="a fake", major=9, minor=0, multi_processor_count=132),
            "get_rng_state": lambda *_, **__: _rng_state(),
        }
        return [
            *((torch.cuda, name, value) for name, value in cuda.items()),
            *((torch.cuda, name, _nothing()) for name in ("set_device", "_lazy_init", "init", "empty_cache", "manual_seed")),
            *((owner, "set_rng_state", _nothing()) for owner in (torch.cuda, torch.cuda.random)),
            (torch.cuda, "Stream", stream),
            (torch.cuda, "Event", _Event),
            (torch.cuda.random, "get_rng_state", _rng_state),
            (mcore_random, "_get_cuda_rng_state", _rng_state),
            (mcore_random, "_set_cuda_rng_state", _nothing()),
            (MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", stream()),
            (rng, "_derived", lambda state, number, device: state),
            *((owner, "get_pos_emb_on_this_cp_rank", own_positions) for owner in (rotary, yarn)),  # without pinned memory
            (fake_tensor, "init_gpu_context", _nothing()),
            (torch.nn.functional, "scaled_dot_product_attention", _attention),
            (torch.nn.functional, "rms_norm", partial(_rms_norm, self)),
            (attention_masks, "causal_lower_right", _causal_lower_right),
            (torch.nn.Module, "_apply", _apply),
            (torch.distributed, "all_gather_object", _all_gather_object),
            (torch.distributed, "new_group", partial(_new_group, torch.distributed.new_group)),
            (fake_tensor.FakeTensor, "tolist", lambda tensor: self._listed(tensor)),
            (fake_tensor.FakeTensor, "numpy", lambda tensor, **_: np.array(self._listed(tensor))),
            (torch.Tensor, "record_stream", lambda tensor, stream: self._recorded(tensor, stream)),
        ]


class _WithoutDevice(FakeTensorMode):
    avoid_device_init = True
    """Constants are never made on the device itself, though it says that it is there."""


class _Event(InertStream):
    def elapsed_time(self, end: object) -> float:
        """Milliseconds."""
        return 1.0


def _nothing() -> Callable[..., None]:
    """A function of its own: torch's compiler keeps rules by object."""
    return lambda *_, **__: None


def _apply(module: torch.nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
    """As torch's, which exchanges the C++ tensors of parameters: those of fake ones are in use elsewhere."""
    for each in module.modules() if recurse else (module,):
        for name, given in [*each._parameters.items(), *each._buffers.items()]:
            made = given if given is None else convert(given.detach())
            if made is None or (made.dtype, made.device) == (given.dtype, given.device):
                continue
            if name in each._buffers:
                each._buffers[name] = made
                continue
            each._parameters[name] = torch.nn.Parameter(made, requires_grad=given.requires_grad)
            own = vars(each._parameters[name])
            own.update({key: value for key, value in vars(given).items() if key not in own})
    return module


def _new_group(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A group whose collectives end at once, in place of one of gloo."""
    return real(*args, **(kwargs | {"backend": "fake"}))


def _all_gather_object(objects: list[Any], own: Any, group: Any = None) -> None:
    """Every rank has what this one has."""
    objects[:] = [own] * len(objects)


def _causal_lower_right(*shape: int) -> Any:
    with _disable_current_modes():  # a tensor, of another subclass, without entries
        return causal_lower_right(*shape)


def _rng_state(*_: object, **__: object) -> torch.Tensor:
    with _disable_current_modes():
        return torch.default_generator.get_state()


def _is_async(kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking", False))


def _place() -> str:
    """The innermost line of megatron-core or of the package that runs now."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "megatron" in path.parts:
            return f"{'/'.join(path.parts[path.parts.index('megatron') + 1 :])}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "autograd"


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The kernel that torch chooses on a GPU: flash attention where it can run, or else the memory-efficient one."""
    if isinstance(attn_mask, CausalBias):
        attn_mask, is_causal = None, True
    if attn_mask is None and query.shape[-1] == value.shape[-1] <= 256 and query.dtype in (torch.bfloat16, torch.float16):
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    assert not enable_gqa, "torch would compute all scores, and keep them"
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def _rms_norm(device: FakeDevice, x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    """The fused kernel, which a torch without CUDA has not: it would run, and save, many small ops."""
    return _FusedRmsNorm.apply(x, weight, device)


class _FusedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, device: FakeDevice) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        ctx.device = device
        device.counts.kernels["_fused_rms_norm"] += 1
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, _ = ctx.saved_tensors
        ctx.device.counts.kernels["_fused_rms_norm_backward"] += 1
        return torch.empty_like(x), torch.empty_like(weight), None
