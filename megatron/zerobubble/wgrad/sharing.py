"""How weight gradients and tensor parallelism share the link: who gathers W's operands, and what runs while B's sum travels.

Under sequence parallelism (arXiv 2205.05198) an operand of W is a slice along the sequence that has to be gathered: of a
column-parallel linear the input, of a row-parallel one the output gradient, which B has to gather anyway. With n the bytes of the
whole operand and t ranks, a linear gathers it, and holds it from B to W:

==============  =======================  ============================
`WgradGather`   column-parallel          row-parallel
==============  =======================  ============================
KEEP            in B, n held             in B, n held
INPUT           in W, n/t held           in B, n held
BOTH            in W, n/t held           in B and again in W, n/t held
==============  =======================  ============================

KEEP and INPUT send the same. A transformer layer holds, in units of one activation [s, b, h] and without what is sharded anyway
(12/t): 4, 2 + 2/t, and 4/t. See ADR 15.
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
    """Which operands wait for W as slices, and are gathered by W."""

    KEEP = "keep"
    INPUT = "input"
    BOTH = "both"


@dataclass(frozen=True, kw_only=True)
class WgradPolicy:
    """What the split does with the tensor-parallel link."""

    gather: WgradGather = WgradGather.INPUT
    """Under sequence parallelism: what W gathers. By default as much as can be without sending more than the fused backward."""
    runs_ahead: bool = True
    """While B's input gradient is being summed over the tensor-parallel ranks, compute a product of a W that waits."""


class Gathered:
    """A tensor that is being gathered along dimension 0.

    Args:
        slice_: [n, ...], this rank's part, of equal shape on all ranks of `group`.
        group: the tensor-parallel group; its ranks must construct it in the same order.
    """

    __slots__ = ("_full", "_work")

    def __init__(self, slice_: Tensor, group: dist.ProcessGroup | None) -> None:
        self._full = slice_.new_empty(slice_.shape[0] * dist.get_world_size(group), *slice_.shape[1:])
        self._work: Any = _all_gather(self._full, slice_.contiguous(), group=group, async_op=True)

    def wait(self) -> Tensor:
        """[n * ranks, ...]: on the CPU it is there; on CUDA for what the current stream runs from here on."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._full


def own_slice(full: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A copy of this rank's part of `full` along dimension 0, which does not keep the rest alive."""
    return full.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()


def reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Any]:
    """This rank's part along dimension 0 of the sum of `x` over `group`, and the work to wait for."""
    part = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    return part, _reduce_scatter(part, x.contiguous(), group=group, async_op=True)
