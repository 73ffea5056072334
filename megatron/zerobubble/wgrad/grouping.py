"""The GEMMs of one W, or of the Ws of several microbatches that run together, in the order in which they run.

B leaves one `DeferredGemm` per use of a weight. `WgradGroup` sorts them by weight and hands them out in parts of about the same
size; `Operands` gathers what sequence parallelism has sliced, one GEMM ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from megatron.zerobubble.wgrad.sharing import Gathered
from megatron.zerobubble.wgrad.split_weight import SplitWeight

__all__ = ["DeferredGemm", "GemmStep", "Operands", "WgradGroup"]


class DeferredGemm(NamedTuple):
    """One weight gradient that B has left for W: ``grad_output^T @ input``."""

    split: SplitWeight
    grad_output: Tensor
    """[tokens, out], or this rank's slice of the tokens."""
    input: Tensor
    """[tokens, in], or this rank's slice of the tokens."""
    gather_grad_over: dist.ProcessGroup | None = None
    """If `grad_output` is a slice: the group whose ranks hold the other slices."""
    gather_input_over: dist.ProcessGroup | None = None
    """If `input` is a slice: the group whose ranks hold the other slices."""

    @property
    def is_whole(self) -> bool:
        """Whether this rank holds both operands in full."""
        return self.gather_grad_over is None and self.gather_input_over is None


class GemmStep(NamedTuple):
    """One GEMM of a W; without one for a weight all of whose GEMMs have run ahead, so that its hooks are still called."""

    split: SplitWeight
    gemm: DeferredGemm | None
    is_first: bool
    """Whether it is the weight's first step in this W or group of Ws."""
    is_last: bool
    """Whether it is the weight's last step in this W or group of Ws."""


class Operands:
    """The operands of one step, gathered over the tensor-parallel ranks if they are slices. Gathering starts at once."""

    __slots__ = ("_grad_output", "_input", "step")

    def __init__(self, step: GemmStep) -> None:
        self.step = step._replace(gemm=None)  # its tensors are released one by one
        self._grad_output: Tensor | Gathered | None = None
        self._input: Tensor | Gathered | None = None
        if step.gemm is not None:
            _, grad_output, input_, grad_group, input_group = step.gemm
            self._grad_output = grad_output if grad_group is None else Gathered(grad_output, grad_group)
            self._input = input_ if input_group is None else Gathered(input_, input_group)

    def wait(self) -> tuple[Tensor, Tensor] | None:
        """(grad_output [tokens, out], input [tokens, in]) of all tokens; None for a step without a GEMM."""
        if self._grad_output is None or self._input is None:
            return None
        grad_output, input_ = (each.wait() if isinstance(each, Gathered) else each for each in (self._grad_output, self._input))
        return grad_output, input_


class WgradGroup:
    """The GEMMs that are left of the Ws of several microbatches, weight by weight.

    Args:
        microbatches: whose Ws run together.
        gemms: for each microbatch what its B left, in B's order.
        ahead: weights that have had a GEMM of these Ws run ahead.
    """

    __slots__ = ("left", "microbatches", "num_parts", "size")

    def __init__(self, microbatches: Sequence[int], gemms: Sequence[list[DeferredGemm]], ahead: Iterable[SplitWeight]) -> None:
        self.microbatches = tuple(microbatches)
        self.num_parts = len(self.microbatches)
        weights = {id(split): _WeightGemms(split, []) for split in ahead}
        for of_microbatch in gemms:
            for gemm in of_microbatch:
                weights.setdefault(id(gemm.split), _WeightGemms(gemm.split, [])).gemms.append(gemm)
        # Reversed, to be popped: each weight's tensors are free before the next one's GEMM starts.
        self.left = sorted(weights.values(), key=lambda each: each.split.position)[::-1]
        self.size = self._size_left()

    def take(self, part: int) -> list[GemmStep]:
        """The steps of one part, the last one first, to be popped. Parts have about the same size; the last is the rest."""
        leave = self.size * (self.num_parts - 1 - part) / self.num_parts
        steps: list[GemmStep] = []
        while self.left and (part == self.num_parts - 1 or self._size_left() > leave):
            steps += self.left.pop().steps()
        return steps[::-1]

    def _size_left(self) -> int:
        return sum(each.size for each in self.left)


class _WeightGemms(NamedTuple):
    """What is left of one weight in a group of Ws."""

    split: SplitWeight
    gemms: list[DeferredGemm]
    """In the order of their Bs; empty if all have run ahead."""

    @property
    def size(self) -> int:
        """Elements of the weight times its GEMMs."""
        return self.split.weight.numel() * len(self.gemms)

    def steps(self) -> list[GemmStep]:
        """One step per GEMM, or one without a GEMM."""
        gemms: Sequence[DeferredGemm | None] = self.gemms or [None]
        last = len(gemms) - 1
        return [GemmStep(self.split, gemm, index == 0, index == last) for index, gemm in enumerate(gemms)]
