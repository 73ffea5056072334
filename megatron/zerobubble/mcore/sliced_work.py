"""What the ops of a plan compute where each microbatch is cut into slices: F, B and W of a slice."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from megatron.zerobubble.mcore.slices.batches import SlicedBatches
from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice, SlicePart
from megatron.zerobubble.mcore.slices.losses import SlicedLosses
from megatron.zerobubble.mcore.stage_work import ChunkWork
from megatron.zerobubble.plan.ir import Op

__all__ = ["SlicedWork"]


class SlicedWork(ChunkWork):
    """The work of one rank in one iteration, slice by slice.

    Args:
        *given: those of `ChunkWork`, with an iteration that has `parts`.
        slices: the slice that the chunks run, with the keys and values of those in flight.
        **others: see there.
    """

    def __init__(self, *given: Any, slices: CurrentSlice, **others: Any) -> None:
        super().__init__(*given, **others)
        self._slices, iteration = slices, self._iteration
        rows = [shape[1] for shape in iteration.tensor_shapes]
        self._sliced_losses = SlicedLosses(iteration.parts, rows, per_token=self._config.calculate_per_token_loss)
        self._iterators = [None if each is None else SlicedBatches(each, slices, iteration.cut) for each in self._iterators]

    def _part(self, op: Op) -> SlicePart:
        return self._iteration.parts[op.microbatch][op.slice]

    def _running(self, op: Op) -> AbstractContextManager[None]:
        """Inside, the model runs the op's slice."""
        return self._slices.running(self._chunk_of[op.stage], op.microbatch, self._part(op))

    def _shape(self, stage: int, microbatch: int, slice: int) -> tuple[int, ...]:
        length, *others = super()._shape(stage, microbatch, slice)
        part = self._iteration.parts[microbatch][slice]
        return length * part.length // part.whole, *others

    def _forward(self, op: Op, activation: Tensor | None) -> tuple[Any, Tensor]:
        function, is_last_stage = self._iteration.forward_step_func, op.stage == self._last_stage
        if is_last_stage:
            function = self._sliced_losses.around(function, op.microbatch)
        with self._running(op):
            output, num_tokens = self._forward_step(op, activation, function, [], is_first=False)
        if is_last_stage:
            num_tokens = self._sliced_losses.counted(op.microbatch)
            self.losses += self._sliced_losses.report(op.microbatch)
        if self._iteration.forward_only and self._part(op).is_last:
            self._slices.release(self._chunk_of[op.stage], op.microbatch)
        return output, num_tokens

    def _backward(self, op: Op, activation: Tensor | None, output: Tensor, gradient: Tensor | None) -> Tensor | None:
        if op.stage == self._last_stage:
            output = self._sliced_losses.scaled(op.microbatch, output)
        with self._running(op):
            grad = super()._backward(op, activation, output, gradient)
        if op.slice == 0:
            self._slices.release(self._chunk_of[op.stage], op.microbatch)
        return grad

    def abandon(self) -> None:
        """As `ChunkWork.abandon`."""
        super().abandon()
        self._slices.clear()

    def finish(self) -> None:
        """As `ChunkWork.finish`."""
        super().finish()
        self._slices.clear()
