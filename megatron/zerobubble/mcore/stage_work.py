"""What the ops of a plan compute over megatron-core's model chunks: F, B and W of one microbatch (of a slice: `sliced_work`).

Forward and backward are megatron-core's own `forward_step` and `backward_step`. They take and return tensors, and never
communicate along the pipeline.

Memory is freed as early as in stock 1F1B. A stage's output is needed only for its grad_fn once it has been passed to the send,
so with `config.deallocate_pipeline_outputs` its data is dropped at once; the alias that is sent keeps the storage alive until
the send has completed. The stage's input is freed after its B (the model, which keeps its last input, is made to drop it, and
so are dispatchers of experts), and the saved tensors of a wgrad GEMM after its W.

With expert parallelism, F and B of a stage contain collectives between data-parallel replicas of the pipeline; W never does. All
replicas run the same plan and, with post-validation, come to the same verdicts; docs/adr/0013 shows why that cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.flags.loop_options import Cut
from megatron.zerobubble.mcore.compat import backward_step
from megatron.zerobubble.mcore.ddp.final_gradients import FinalGradients
from megatron.zerobubble.mcore.model.aux_loss_scale import set_auxiliary_scales
from megatron.zerobubble.mcore.model.dispatchers import drop_graphs
from megatron.zerobubble.mcore.model.expert_exchanges import ExpertExchanges
from megatron.zerobubble.mcore.model.layer_graphs import IMPLEMENTATION
from megatron.zerobubble.mcore.model.rng import ChunkStreams
from megatron.zerobubble.mcore.model.shared_experts import between_streams
from megatron.zerobubble.mcore.slices.current_slice import SlicePart
from megatron.zerobubble.plan.communication import Message, Payload
from megatron.zerobubble.plan.ir import Op, OpKind, Placement
from megatron.zerobubble.plan.tail import Tail
from megatron.zerobubble.runtime.executor import Pass, StageWork
from megatron.zerobubble.wgrad.deferring import WgradKey
from megatron.zerobubble.wgrad.final import FinalGradient
from megatron.zerobubble.wgrad.store import WeightGradStore


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The arguments of one call of the schedule. Names as in megatron-core's schedule signature."""

    forward_step_func: Callable[..., Any]
    data_iterators: Sequence[Any]
    num_microbatches: int
    tensor_shapes: Sequence[tuple[int, ...]]
    """Per microbatch of the plan, (sequence, batch, hidden) of the activations sent between stages, as sharded on this rank."""
    output_lengths: Sequence[int]
    """Per stage, how many such sequences its output is long: more than one behind MTP layers."""
    order: Sequence[int]
    """Per microbatch of the plan, its number in the order in which the data came."""
    lengths: Sequence[tuple[int, float]] = ()
    """Per microbatch of the plan, its tokens and squared lengths; empty: all are equal."""
    parts: Sequence[tuple[SlicePart, ...]] = ()
    """Per microbatch of the plan, its slices; empty: microbatches are not cut."""
    cut: Cut | None = None
    """As in `SliceOptions`."""
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    context_parallel_size: int

    @property
    def longest_message(self) -> tuple[int, ...]:
        """Shape of the longest activation that travels between stages in front of MTP layers: of a slice where they are cut."""
        shares = [max((part.length / part.whole for part in own), default=1) for own in self.parts] or [1] * self.num_microbatches
        return max((round(shape[0] * share), *shape[1:]) for shape, share in zip(self.tensor_shapes, shares, strict=True))

    @property
    def pass_lengths(self) -> Sequence[Sequence[tuple[int, float]]]:
        """Per microbatch of the plan and slice, its tokens and the squared lengths that it adds; empty: all are equal."""
        if not self.lengths or not self.parts:
            return [[each] for each in self.lengths]
        return [[(part.length, float(part.end**2 - part.offset**2)) for part in parts] for parts in self.parts]


class ChunkWork(StageWork):
    """The executor's `StageWork` over model chunks: the work of one rank in one iteration.

    Args:
        chunks: this rank's model chunks, wrapped by DDP, in the order of their stages.
        placement: stage -> rank.
        store: holds the deferred weight gradients between B and W.
        config: the model's TransformerConfig.
        iteration: the arguments of the schedule's call.
        device: of activations and gradients.
        tail: how the last Ws of the rank run.
        on_counted: called with `num_tokens` once it is complete, behind the last F of the last stage.
        on_results: called there, too, once `losses` is complete.
        dispatchers: the `token_dispatchers` of each chunk; empty: no chunk has any.
        deferred: the weights of each chunk whose gradients W computes; empty: no chunk has any.
        side_streams: the streams of each chunk's shared experts; empty: none has one.
        has_rng_streams: whether each chunk draws from a stream of random numbers of its own.
        exchanges: the all-to-alls of the chunks' experts, beside which the other pass of a pair computes; None: the two passes of
            a pair run one after the other.
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
        tail: Tail | None = None,
        on_counted: Callable[[Tensor], None] | None = None,
        on_results: Callable[[], None] | None = None,
        dispatchers: Sequence[Sequence[Any]] = (),
        deferred: Sequence[Sequence[FinalGradient]] = (),
        side_streams: Sequence[Sequence[Any]] = (),
        has_rng_streams: bool = True,
        exchanges: ExpertExchanges | None = None,
    ) -> None:
        self._chunks = chunks
        self._set_input_tensor = [get_attr_wrapped_model(chunk, "set_input_tensor") for chunk in chunks]
        self._chunk_of = [placement.chunk_of(stage) for stage in range(placement.num_stages)]
        self._last_stage = placement.num_stages - 1
        self._virtual = len(chunks) > 1
        self._store = store
        self._config = config
        self._backward_step = backward_step()
        self._iteration = iteration
        self._device = device
        self._tail = tail or Tail()
        self._on_counted = on_counted
        self._on_results = on_results
        self._dispatchers = dispatchers
        self._deferred = deferred or [()] * len(chunks)
        self._side_streams = side_streams or [()] * len(chunks)
        self._exchanges = exchanges
        self._iterators = iteration.data_iterators
        self._inflight: dict[tuple[int, int, int], tuple[Tensor | None, Tensor]] = {}
        # The generators of a CUDA graph are those that it was captured with.
        has_rng_streams = has_rng_streams and getattr(config, "cuda_graph_impl", None) != IMPLEMENTATION
        self._streams = ChunkStreams(len(chunks) if has_rng_streams and not iteration.forward_only else 0, device)
        self._sync: list[FinalGradients] = []
        """Per chunk, from the first B on: before it the caller zeroes the gradients, which resets the state of DDP."""
        self.losses: list[Any] = []
        """The loss function's result for each microbatch; empty on ranks without the last stage."""
        self.num_tokens = torch.zeros([], dtype=torch.int, device=device)
        """Sum of the token counts that the loss function returned."""
        self.failure: Exception | None = None
        """The first error of the last stage's forward pass or loss function, where there are forward passes only."""

    def pair(self, forward: Pass, backward: Pass) -> tuple[Tensor | None, Tensor | None]:
        """Run both passes of a pair, which compute beside each other's all-to-alls of experts where they can."""
        if self._exchanges is None:
            return super().pair(forward, backward)
        return self._exchanges.pair(partial(self.forward, *forward), partial(self.backward, *backward))

    def buffer(self, message: Message) -> Tensor:
        """An uninitialized receive buffer for an activation or a gradient, in the pipeline's dtype."""
        sender = message.stage - 1 if message.payload is Payload.ACTIVATION else message.stage
        shape = self._shape(sender, message.microbatch, message.slice)
        return torch.empty(shape, dtype=self._config.pipeline_dtype, device=self._device)

    def _shape(self, stage: int, microbatch: int, slice: int) -> tuple[int, ...]:
        """Shape of the output of a stage, and of its gradient."""
        sequence, *others = self._iteration.tensor_shapes[microbatch]
        return sequence * self._iteration.output_lengths[stage], *others

    def forward(self, op: Op, activation: Tensor | None, last: bool) -> Tensor | None:
        """Run F of one microbatch.

        Args:
            op: the F op.
            activation: the stage's input; None on the first stage.
            last: whether this is the chunk's last F in the iteration.

        Returns:
            An alias of the output, to be sent to the next stage; None on the last stage.

        Raises:
            ExecutionError: the output cannot be sent to the next stage.
            Exception: what the loop's function raised, but for `failure`, which the caller raises after the last op.
        """
        iteration, chunk = self._iteration, self._chunk_of[op.stage]
        if activation is not None and not iteration.forward_only:
            activation.requires_grad_()
        self._streams.enter(chunk)
        is_last_stage = op.stage == self._last_stage
        try:
            output, num_tokens = self._forward(op, activation)
        except Exception as error:
            if not iteration.forward_only or not is_last_stage:
                raise
            # No stage waits for this one: the other passes run, so that no rank and no message is left waiting.
            self.failure = self.failure or error
            return None
        # Otherwise the model keeps its input until its next F, and with it, after B, the input's gradient.
        self._set_input_tensor[chunk]([None])
        if self._dispatchers:
            drop_graphs(self._dispatchers[chunk])
        if is_last_stage:
            self.num_tokens += num_tokens
            if last and self._on_counted is not None:
                self._on_counted(self.num_tokens)
            if last and self._on_results is not None:
                self._on_results()
            sent = None
        else:
            self._check_output(op, output)
            sent = output.detach()
        if not iteration.forward_only:
            self._inflight[chunk, op.microbatch, op.slice] = activation, output
            if sent is not None:
                schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)
        return sent

    def _forward(self, op: Op, activation: Tensor | None) -> tuple[Any, Tensor]:
        """megatron-core's own F, which puts what the loss function reports into `losses`.

        Returns:
            The stage's output, on the last stage the loss; and the number of tokens that the loss is over.
        """
        iteration = self._iteration
        is_first = op.microbatch == 0 and (not iteration.forward_only or iteration.first_val_step is not False)
        return self._forward_step(op, activation, iteration.forward_step_func, self.losses, is_first=is_first)

    def _forward_step(
        self, op: Op, activation: Tensor | None, function: Callable[..., Any], losses: list[Any], *, is_first: bool
    ) -> tuple[Any, Tensor]:
        iteration, chunk = self._iteration, self._chunk_of[op.stage]
        result: tuple[Any, Tensor] = schedules.forward_step(
            function,
            self._iterators[chunk],
            self._chunks[chunk],
            iteration.num_microbatches,
            activation,
            losses,
            self._config,
            cp_group_size=iteration.context_parallel_size,
            collect_non_loss_data=iteration.collect_non_loss_data,
            is_first_microbatch=is_first,
            current_microbatch=iteration.order[op.microbatch],
            vp_stage=chunk if self._virtual else None,
            is_last_stage=op.stage == self._last_stage,
        )
        return result

    def _check_output(self, op: Op, output: Any) -> None:
        """Raise ExecutionError if an output is not what the next stage's buffer takes: that rank would wait for the rest."""
        iteration = self._iteration
        expected, dtype = self._shape(op.stage, op.microbatch, op.slice), self._config.pipeline_dtype
        where = op._replace(microbatch=iteration.order[op.microbatch]).where
        if not isinstance(output, Tensor):
            given = f"a {type(output).__name__} of {len(output)}" if isinstance(output, tuple | list) else type(output).__name__
            raise ExecutionError(
                f"{where}: forward_step_func returned {given} as the stage's output, and every stage but the last must return "
                f"one tensor, the hidden states {expected} (sequence, batch, hidden), for the next stage: return that alone, and "
                "what the loss needs besides from the last stage"
            )
        if dtype is not None and output.dtype != dtype:
            raise ExecutionError(
                f"{where}: the output is {output.dtype}, and the next stage receives config.pipeline_dtype, {dtype}: set that to "
                "the dtype of what stages return"
            )
        if tuple(output.shape) == expected:
            return
        length, remedy = "the sequence length of the schedule's call", "pad it to that length"
        if iteration.lengths:
            length = f"the {iteration.lengths[op.microbatch][0]} tokens that the lengths' function returned"
            remedy = "return the length of its rows, padding included"
        raise ExecutionError(
            f"{where}: the output has shape {tuple(output.shape)} "
            f"(sequence, batch, hidden), and {expected} follows from {length}; {remedy}"
        )

    def backward(self, op: Op, gradient: Tensor | None, last: bool) -> Tensor | None:
        """Run B of one microbatch, or with an op of kind BW the full backward (B+W).

        Args:
            op: the B or BW op.
            gradient: of the stage's output; None on the last stage.
            last: whether this is the chunk's last op of its kind in the iteration.

        Returns:
            The gradient of the stage's input (dgrad); None on the first stage.
        """
        chunk = self._chunk_of[op.stage]
        activation, output = self._inflight.pop((chunk, op.microbatch, op.slice))
        if not self._sync:
            self._sync = [FinalGradients(*each) for each in zip(self._chunks, self._deferred, strict=True)]
        if last:
            self._sync[chunk].allow()
        set_auxiliary_scales(
            self._config,
            num_microbatches=self._iteration.num_microbatches,
            context_parallel_size=self._iteration.context_parallel_size,
            device=self._device,
        )
        is_tail = op == self._tail.fused
        is_fused = is_tail or op.kind is OpKind.BW
        if is_tail:
            self._sync[chunk].begin_last()
        self._store.begin(chunk, op.microbatch, op.slice, fused=is_fused, at_once=is_tail)
        grad = self._backward(op, activation, output, gradient)
        if last and is_fused and not is_tail:
            self._sync[chunk].begin_last()
        self._store.end()
        if last and is_fused:
            self._sync[chunk].end_last()
        if self._dispatchers:
            drop_graphs(self._dispatchers[chunk])  # of a recomputed F
        if last and not is_fused:  # its W is still to come
            self._sync[chunk].forbid()
        return grad

    def _backward(self, op: Op, activation: Tensor | None, output: Tensor, gradient: Tensor | None) -> Tensor | None:
        """megatron-core's own B."""
        return self._backward_step(activation, output, gradient, config=self._config)

    def weight_gradient(self, op: Op, last: bool) -> None:
        """Run W of one microbatch, or one part of those that run together at the end."""
        chunk = self._chunk_of[op.stage]
        if op == self._tail.done:
            return
        keys, part = self._group(op, chunk)
        # each part of the last ones completes some gradients
        is_last = keys[-1].microbatch == self._iteration.num_microbatches - 1 and keys[-1].slice == 0
        if is_last:
            self._sync[chunk].begin_last()
        with between_streams(self._side_streams[chunk]):
            if len(keys) == 1:
                self._store.run(*keys[0])
            else:
                self._store.run_together(keys, part=part, growing=self._sync[chunk].growing)
        if is_last and part == len(keys) - 1:
            self._sync[chunk].end_last()

    def _group(self, op: Op, chunk: int) -> tuple[tuple[WgradKey, ...], int]:
        """The Ws that run with a W, and its place among them."""
        if op in self._tail.parts:
            ops, part = self._tail.parts[op]
            return tuple(WgradKey(chunk, each.microbatch, each.slice) for each in ops), part
        return (WgradKey(chunk, op.microbatch, op.slice),), 0

    def abandon(self) -> None:
        """Free the activations of forwards that will be rerun or whose backward will not run."""
        self._inflight.clear()

    def finish(self) -> None:
        """Call after the last op: check that no deferred gradient is left, and let DDP reduce gradients again.

        Raises:
            WeightGradStoreError: a W never ran, or a gradient came too late to be reduced.
        """
        for sync in self._sync:
            sync.finish()
        self._streams.finish()
        self._store.check_empty()
