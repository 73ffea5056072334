"""Weight gradients and tensor-parallel communication: whether B or W all-gathers W's operands, and what overlaps B's all-reduce.

Under sequence parallelism (arXiv 2205.05198) one operand of W is sharded along the sequence and has to be all-gathered: the input
of a column-parallel linear, the output gradient of a row-parallel one, which B has to all-gather anyway. With n the bytes of the
whole operand and t ranks, a linear all-gathers it, and holds it from B to W, as follows:

==============  =======================  ============================
`WgradGather`   column-parallel          row-parallel
==============  =======================  ============================
KEEP            in B, n held             in B, n held
INPUT           in W, n/t held           in B, n held
BOTH            in W, n/t held           in B and again in W, n/t held
==============  =======================  ============================

KEEP and INPUT communicate the same number of bytes. In units of one activation [s, b, h], a transformer layer holds 4, 2 + 2/t,
and 4/t, plus 12/t that are sharded in all three. See ADR 15.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the two collectives and warns at every call of the old names, which older releases alone have.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class WgradGather(enum.Enum):
    """Which operands are held as shards from B to W, and all-gathered by W."""

    KEEP = "keep"
    INPUT = "input"
    BOTH = "both"


@dataclass(frozen=True, kw_only=True)
class WgradPolicy:
    """Options for weight gradients under tensor parallelism."""

    gather: WgradGather = WgradGather.INPUT
    """Under sequence parallelism: the operands that W all-gathers. The default saves memory without communicating more than the
    fused backward."""
    runs_ahead: bool = True
    """Overlap B's tensor-parallel all-reduce (or reduce-scatter) with a deferred wgrad GEMM."""


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


def own_slice(full: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A copy of this rank's shard of `full` along dimension 0, which does not keep the rest alive."""
    return full.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


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
