"""What the ops of a plan compute where each microbatch is cut into slices: F, B and W of a slice."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.zerobubble.mcore.slices.batches import SlicedBatches
from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice, SlicePart
from megatron.zerobubble.mcore.slices.losses import SlicedLosses
from megatron.zerobubble.mcore.stage_work import ChunkWork, Iteration
from megatron.zerobubble.plan.ir import Op, Placement
from megatron.zerobubble.wgrad.store import WeightGradStore

__all__ = ["SlicedWork"]


class SlicedWork(ChunkWork):
    """The work of one rank in one iteration, slice by slice.

    Args:
        chunks: as `ChunkWork`.
        placement: see there.
        store: see there.
        config: see there.
        iteration: with `parts`.
        device: see there.
        slices: the slice that the chunks run, with the keys and values of those in flight.
        **others: see there.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        placement: Placement,
        store: WeightGradStore,
        config: Any,
        iteration: Iteration,
        device: torch.device,
        *,
        slices: CurrentSlice,
        **others: Any,
    ) -> None:
        super().__init__(chunks, placement, store, config, iteration, device, **others)
        self._slices = slices
        rows = [shape[1] for shape in iteration.tensor_shapes]
        self._sliced_losses = SlicedLosses(iteration.parts, rows, per_token=config.calculate_per_token_loss)
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
            return super()._backward(op, activation, output, gradient)

    def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor | None:
        """Run B or BW of a slice, as `ChunkWork.backward`."""
        grad = super().backward(op, gradient, last)
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
