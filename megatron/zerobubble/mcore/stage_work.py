"""What the ops of a plan compute, over megatron-core's model chunks: F, B and W of one microbatch.

Forward and backward of one microbatch are megatron-core's own `forward_step` and `backward_step`; they are given tensors and
give tensors, and never communicate along the pipeline.

Freeing, as early as stock 1F1B frees: a stage's output is only needed for its grad_fn once it has been handed on, so with
`config.deallocate_pipeline_outputs` its data is dropped at once; the alias that travels keeps the storage alive until the send
is retired. The input is dropped when its B has run (the model, which keeps the one it was given last, is told to forget it), the
weight gradient's operands when W has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from megatron.zerobubble.mcore.model.aux_loss_scale import set_auxiliary_scales
from megatron.zerobubble.mcore.model.rng import ChunkStreams
from megatron.zerobubble.plan.communication import Message
from megatron.zerobubble.plan.ir import Op, OpKind, Placement
from megatron.zerobubble.plan.transforms import wgrad_group
from megatron.zerobubble.wgrad.store import WeightGradStore


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What one call of the schedule was given. Names as in megatron-core's schedule signature."""

    forward_step_func: Callable[..., Any]
    data_iterators: Sequence[Any]
    num_microbatches: int
    tensor_shape: tuple[int, ...]
    """(sequence, batch, hidden) of what travels between stages, as this rank holds it."""
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    context_parallel_size: int


class ChunkWork:
    """The work of one rank in one iteration.

    Args:
        chunks: this rank's model chunks, wrapped by DDP, in the order of their stages.
        placement: stage -> rank.
        store: where B leaves weight gradients.
        config: the model's TransformerConfig.
        iteration: what the schedule was called with.
        device: where tensors live.
        wgrad_group_size: Ws of so many microbatches run together; the plan has them next to each other.
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
        wgrad_group_size: int = 1,
    ) -> None:
        self._chunks = chunks
        self._chunk_of = [placement.chunk_of(stage) for stage in range(placement.num_stages)]
        self._last_stage = placement.num_stages - 1
        self._virtual = len(chunks) > 1
        self._store = store
        self._config = config
        self._iteration = iteration
        self._device = device
        self._wgrad_group_size = wgrad_group_size
        self._inflight: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._streams = ChunkStreams(0 if iteration.forward_only else len(chunks), device)
        self._sync: list[_GradSync] = []
        """By chunk, from the first B on: before that the caller zeroes the gradients, which would undo what these do."""
        self.losses: list[Any] = []
        """What the loss function returned for each microbatch; filled where the last stage is."""
        self.num_tokens = torch.zeros([], dtype=torch.int, device=device)
        """Sum of the token counts that the loss function returned."""

    @property
    def live(self) -> frozenset[tuple[int, int]]:
        """The (chunk, microbatch) pairs whose activations, or what is left of them for W, are held."""
        return frozenset(self._inflight) | self._store.pending

    def buffer(self, message: Message) -> Tensor:
        """Memory for an activation or a gradient to be received, in the pipeline's dtype."""
        return torch.empty(self._iteration.tensor_shape, dtype=self._config.pipeline_dtype, device=self._device)

    def forward(self, op: Op, activation: Tensor | None, last: bool) -> Tensor | None:
        """F of one microbatch; returns an alias of the output for the next stage."""
        iteration, chunk = self._iteration, self._chunk_of[op.stage]
        if activation is not None and not iteration.forward_only:
            activation.requires_grad_()
        self._streams.enter(chunk)
        first = op.microbatch == 0
        if iteration.forward_only and iteration.first_val_step is not None:
            first = first and iteration.first_val_step
        output, num_tokens = schedules.forward_step(
            iteration.forward_step_func,
            iteration.data_iterators[chunk],
            self._chunks[chunk],
            iteration.num_microbatches,
            activation,
            self.losses,
            self._config,
            cp_group_size=iteration.context_parallel_size,
            collect_non_loss_data=iteration.collect_non_loss_data,
            is_first_microbatch=first,
            current_microbatch=op.microbatch,
            vp_stage=chunk if self._virtual else None,
            is_last_stage=op.stage == self._last_stage,
        )
        # The model keeps the input it was given until its next F, and with the input, after B, the input's gradient.
        get_attr_wrapped_model(self._chunks[chunk], "set_input_tensor")([None])
        if op.stage == self._last_stage:
            self.num_tokens += num_tokens
            handed_on = None
        else:
            handed_on = output.detach()
        if not iteration.forward_only:
            self._inflight[chunk, op.microbatch] = activation, output
            if handed_on is not None:
                schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)
        return handed_on

    def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor | None:
        """B, or with an op of kind BW the fused backward; returns the gradient of the stage's input."""
        chunk = self._chunk_of[op.stage]
        activation, output = self._inflight.pop((chunk, op.microbatch))
        if not self._sync:
            self._sync = [_GradSync(each) for each in self._chunks]
        if last:
            self._sync[chunk].allow()
        set_auxiliary_scales(
            self._config,
            num_microbatches=self._iteration.num_microbatches,
            context_parallel_size=self._iteration.context_parallel_size,
            device=self._device,
        )
        self._store.begin(chunk, op.microbatch, fused=op.kind is OpKind.BW)
        grad = schedules.backward_step(activation, output, gradient, ModelType.encoder_or_decoder, self._config)
        self._store.end()
        if last and op.kind is OpKind.B:  # its W is still to come
            self._sync[chunk].forbid()
        return grad

    def weight_gradient(self, op: Op, last: bool) -> None:
        """W of one microbatch, or one part of a group's Ws."""
        chunk = self._chunk_of[op.stage]
        group = wgrad_group(op.microbatch, self._wgrad_group_size, self._iteration.num_microbatches)
        if group[-1] == self._iteration.num_microbatches - 1:  # each part of the last group finishes some of the weights
            self._sync[chunk].allow()
        self._store.run_together(chunk, group, part=op.microbatch - group[0])

    def abandon(self) -> None:
        """Let go of forwards whose backward will not come."""
        self._inflight.clear()

    def finish(self) -> None:
        """After the last op: check that nothing was left, and allow gradients to be reduced again."""
        for sync in self._sync:
            sync.allow()
        self._streams.finish()
        self._store.check_empty()


class _GradSync:
    """Lets DDP see "this gradient is final" exactly when it is.

    DDP starts to reduce a bucket when each of its gradients has been reported while synchronisation is allowed. With B and W
    split, the last B of a chunk reports norms and biases, and the last W the rest; between the two, Ws of earlier microbatches
    may run and must not count. So synchronisation is allowed during the last op of each kind only.
    """

    def __init__(self, chunk: nn.Module) -> None:
        self._chunk: Any = chunk
        self._forbidden: contextlib.AbstractContextManager[Any] | None = None
        self.forbid()

    def allow(self) -> None:
        """Gradients reported from here on are final."""
        if self._forbidden is not None:
            self._forbidden.__exit__(None, None, None)
            self._forbidden = None

    def forbid(self) -> None:
        """Gradients reported from here on may still grow."""
        if hasattr(self._chunk, "no_sync"):
            self._forbidden = self._chunk.no_sync()
            self._forbidden.__enter__()
