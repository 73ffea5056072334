"""The collectives of a split linear under sequence parallelism (arXiv 2205.05198), started and waited for apart.

The input of a column-parallel linear is sharded along the sequence. B leaves the shard, and W all-gathers it. The output gradient
of a row-parallel linear is sharded, too, but B has to all-gather it anyway and leaves it whole. So a split linear communicates
what the fused backward does, and holds less from B to W. See ADR 15.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the two collectives and warns at every call of the old names, which older releases alone have.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Gathered:
    """An asynchronous all-gather along dimension 0, started by the constructor.

    Args:
        slice_: [n, ...], this rank's shard, of equal shape on all ranks of `group`.
        group: the tensor-parallel group; its ranks must construct instances in the same order.
    """

    __slots__ = ("_full", "_work")

    def __init__(self, slice_: Tensor, group: dist.ProcessGroup | None) -> None:
        self._full = slice_.new_empty(slice_.shape[0] * dist.get_world_size(group), *slice_.shape[1:])
        self._work: Any = _all_gather(self._full, slice_.contiguous(), group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return the gathered tensor, [n * ranks, ...]. On the CPU this blocks; on CUDA it makes the current stream wait."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._full


def reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Any]:
    """Start a reduce-scatter of `x` along dimension 0 over `group`.

    Args:
        x: [n * ranks, ...], of equal shape on all ranks of `group`.
        group: the tensor-parallel group.

    Returns:
        This rank's shard of the sum, [n, ...], and the work to wait for before it is read.
    """
    part = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    return part, _reduce_scatter(part, x.contiguous(), group=group, async_op=True)
