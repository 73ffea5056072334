"""`torch.cuda.CUDAGraph` on the CPU: records the aten operations of a capture, and replays them into the same memory.

What a capture allocates lies in a pool that all graphs share, and is given to a later capture as soon as no tensor holds it. On a
GPU, too, lifetimes in the capture decide which memory the replays of other graphs overwrite. So a tensor that leaves a graph
holds another graph's values if it is read too late, and a replay out of the order of captures computes other numbers. Python
does not run in a replay. Reading a value in a capture raises, as a synchronization would.

A size of blocks has a list of its own, the last one freed first. Memory that was allocated before a capture stays alive, which on
a GPU nobody ensures. Streams and the graphs' own generators are missing: captured dropout draws from the CPU's generator.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["CUDAGraph", "graph", "handed_out_again", "is_capturing", "make_weak_ref"]

_ALIGNED = 64
_READS = ("_local_scalar_dense", "item", "equal", "nonzero")
"""Operations whose result or its shape is needed on the host."""


class _Pool:
    """Blocks of memory that captures allocate from."""

    def __init__(self) -> None:
        self._free: dict[int, list[bytearray]] = {}
        self._blocks: dict[int, bytearray] = {}
        """By address, all blocks that ever were."""
        self.handed_out_again = 0
        """How often a capture got memory that an earlier tensor had."""

    def empty(self, like: Tensor) -> Tensor:
        """A tensor of this shape, strides and dtype. Its block is free when the tensor and its views are gone."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
        size = -(-extent * like.element_size() // _ALIGNED) * _ALIGNED
        free = self._free.setdefault(size, [])
        self.handed_out_again += bool(free)
        block = free.pop() if free else bytearray(size)
        holder = (ctypes.c_char * size).from_buffer(block)
        self._blocks[ctypes.addressof(holder)] = block
        weakref.finalize(holder, free.append, block)
        return torch.frombuffer(holder, dtype=like.dtype, count=extent).as_strided(like.shape, like.stride())

    def block(self, tensor: Tensor) -> bytearray | None:
        """The memory of a tensor; None if it is not in the pool."""
        return self._blocks.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None

    def without_claim(self, tensor: Tensor) -> Tensor:
        """The same memory, which the result does not keep from being handed out if it is in the pool."""
        block = self.block(tensor)
        if block is None:
            return tensor.detach()
        holder = (ctypes.c_char * len(block)).from_buffer(block)
        whole = torch.frombuffer(holder, dtype=tensor.dtype, count=len(block) // tensor.element_size())
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


_POOL = _Pool()
_CAPTURING: list[CUDAGraph] = []


class CUDAGraph:
    def __init__(self) -> None:
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def replay(self) -> None:
        """Run them again, on what their operands' memory holds now."""
        with torch.no_grad():
            for function, args, kwargs, results in self._operations:
                new = _done(function, function(*args, **kwargs))
                for place, value in zip(tree_leaves(results), tree_leaves(new), strict=True) if results is not None else ():
                    if isinstance(place, Tensor):
                        place.copy_(value)

    def reset(self) -> None:
        self._operations.clear()

    def add(self, function: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Record an operation; `results` is None if it writes into its operands."""
        recorded = tree_map(lambda each: _POOL.without_claim(each) if isinstance(each, Tensor) else each, (args, kwargs, results))
        self._operations.append((function, *recorded))


class _Capture(TorchDispatchMode):
    def __init__(self, graph: CUDAGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if func.overloadpacket.__name__ in _READS and any(_POOL.block(each) is not None for each in operands):
            raise RuntimeError(f"{func} in a capture: the host would wait for the device")
        results = _done(func, func(*args, **kwargs))
        if func._schema.is_mutable or func.namespace == "c10d":
            self._graph.add(func, args, kwargs, None)
            return results
        given = {each.untyped_storage()._cdata for each in operands}
        if any(isinstance(each, Tensor) and each.untyped_storage()._cdata in given for each in tree_leaves(results)):
            return results  # a view
        results = tree_map(lambda each: _pooled(each) if isinstance(each, Tensor) else each, results)
        self._graph.add(func, args, kwargs, results)
        return results


def _done(function: Any, results: Any) -> Any:
    """The results of an operation; of a collective when it has ended, because gloo writes some when they are waited for."""
    if function.namespace != "c10d":
        return results

    def waited(work: Any) -> Any:
        if isinstance(work, torch.ScriptObject):
            work.wait()
            return FakeWork().boxed()
        return work

    return tree_map(waited, results)


def _pooled(value: Tensor) -> Tensor:
    return _POOL.empty(value).copy_(value) if value.numel() else value


@contextlib.contextmanager
def graph(cuda_graph: CUDAGraph, pool: object = None, **_options: object) -> Iterator[None]:
    """`torch.cuda.graph`. All pools are one."""
    gc.collect()
    _CAPTURING.append(cuda_graph)
    try:
        with _Capture(cuda_graph):
            yield
    finally:
        _CAPTURING.pop()


def handed_out_again() -> int:
    """How often captures of this process got memory that an earlier tensor had."""
    return _POOL.handed_out_again


def is_capturing() -> bool:
    return bool(_CAPTURING)


def make_weak_ref(value: Any) -> Any:
    """Replaces Transformer Engine's function of this name: the same memory, given back to the pool."""
    return tree_map(lambda each: _POOL.without_claim(each) if isinstance(each, Tensor) else each, value)
