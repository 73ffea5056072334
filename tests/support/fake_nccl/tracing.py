"""Every torch op as a kernel on the compute stream: what it reads and writes is checked against transfers and copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.fake_nccl.device import Device


class TracedOps(TorchDispatchMode):
    """A mode in which torch ops are accesses of the compute stream. Views are none; reading a number makes the host wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads, writes = _accesses(func._schema, args, kwargs)
        device = Device.current()
        result = func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            device.host().join(device.compute_stream.clock)
        if not any(given.alias_info for given in func._schema.returns):
            writes += [tensor for tensor in tree_leaves(result) if isinstance(tensor, Tensor)]
        if reads or writes:
            device.compute(str(func), reads=reads, writes=writes)
        return result


def _accesses(schema: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    names = {argument.name: argument for argument in schema.arguments}
    given = [*zip(schema.arguments, args, strict=False), *((names[name], value) for name, value in kwargs.items())]
    for argument, value in given:
        alias = argument.alias_info
        if alias is not None and not alias.is_write:
            continue  # a view
        tensors = [tensor for tensor in tree_leaves(value) if isinstance(tensor, Tensor)]
        (reads if alias is None else writes).extend(tensors)
    return reads, writes
