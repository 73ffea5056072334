"""One call of a schedule, as a training loop makes it: its arguments, checked, and the iteration that follows from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from torch import nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.compat import with_known_lengths
from megatron.zerobubble.mcore.ddp.frozen_weights import check_frozen
from megatron.zerobubble.mcore.given_groups import check_given_groups
from megatron.zerobubble.mcore.microbatches.iteration_plans import Arranged
from megatron.zerobubble.mcore.microbatches.length_exchange import GIVE_LENGTHS, Lengths
from megatron.zerobubble.mcore.slices.current_slice import SlicePart
from megatron.zerobubble.mcore.slices.refusals import check_sliced_call
from megatron.zerobubble.mcore.slices.slice_options import SliceOptions
from megatron.zerobubble.mcore.stage_work import Iteration

__all__ = ["Call"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """The arguments of megatron-core's schedules, by their names."""

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None
    p2p_communicator: Any = None
    pg_collection: Any = None
    force_all_reduce: bool | None = False

    def checked(self, schedule: str, chunks: Sequence[nn.Module]) -> Sequence[Any]:
        """Check the arguments, which may be wrong on one rank alone, for a schedule of this name and a rank's chunks.

        Nothing waits for other ranks.

        Returns:
            The data iterator of each chunk.

        Raises:
            ConfigError: an argument that the schedule cannot run, or weights that were frozen since DDP wrapped the model.
        """
        if self.adjust_tensor_shapes_fn is not None:
            raise ConfigError(
                f"adjust_tensor_shapes_fn is not supported by schedule {schedule!r}, whose messages have the shapes that "
                "follow from its arguments; leave it out or use --zero-bubble-schedule stock"
            )
        check_given_groups(schedule, pg_collection=self.pg_collection, p2p_communicator=self.p2p_communicator)
        given = self.model if isinstance(self.model, list) else [self.model]
        if len(given) != len(chunks) or any(a is not b for a, b in zip(given, chunks, strict=True)):
            raise ConfigError("the model given to the schedule is not the list of chunks that the schedule was built for")
        if not self.forward_only:
            check_frozen(chunks)
        if isinstance(self.data_iterator, list):
            if len(self.data_iterator) != len(chunks):
                raise ConfigError(f"{len(self.data_iterator)} data iterators were given for {len(chunks)} model chunks")
            return self.data_iterator
        if len(chunks) > 1:
            raise ConfigError(
                f"schedule {schedule!r} has {len(chunks)} model chunks per rank: give data_iterator as a list, one "
                "iterator for each chunk over the same samples (two chunks drawing from one iterator would see different data)"
            )
        return [self.data_iterator]

    def iteration(
        self,
        arranged: Arranged,
        config: Any,
        *,
        schedule: str,
        output_lengths: Sequence[int],
        slicing: SliceOptions | None,
    ) -> Iteration:
        """What runs.

        Args:
            arranged: the microbatches, with their data in the program's order.
            config: the model's TransformerConfig.
            schedule: its name, for messages.
            output_lengths: as in `Iteration`.
            slicing: how microbatches are cut; None: they are not.
        """
        lengths = arranged.lengths or (None,) * self.num_microbatches
        shapes = {each: self._tensor_shape(config, each, schedule) for each in dict.fromkeys(lengths)}
        parts: Sequence[tuple[SlicePart, ...]] = ()
        if slicing is not None:
            check_sliced_call(self.seq_length, self.decoder_seq_length, collect_non_loss_data=self.collect_non_loss_data)
            tokens = [self.seq_length if each is None else each.tokens for each in lengths]
            parts = slicing.parts_of(tokens, arranged.program.plan.passes.slices)
        return Iteration(
            forward_step_func=self.forward_step_func,
            data_iterators=arranged.iterators,
            num_microbatches=self.num_microbatches,
            tensor_shapes=[shapes[each] for each in lengths],
            output_lengths=output_lengths,
            order=arranged.order,
            lengths=arranged.lengths,
            parts=parts,
            cut=None if slicing is None else slicing.cut,
            forward_only=self.forward_only,
            collect_non_loss_data=self.collect_non_loss_data,
            first_val_step=self.first_val_step,
            context_parallel_size=parallel_state.get_context_parallel_world_size(),
        )

    def _tensor_shape(self, config: Any, lengths: Lengths | None, schedule: str) -> tuple[int, ...]:
        """Shape of what travels between stages for a microbatch of these lengths; None: of the call's sequence length."""
        seq_length, decoder_seq_length = self.seq_length, self.decoder_seq_length
        if lengths is not None:
            seq_length, decoder_seq_length = lengths.tokens, None
            _check_divides(config, seq_length)
        elif getattr(config, "variable_seq_lengths", False):
            raise ConfigError(
                f"variable_seq_lengths with schedule {schedule!r} needs the lengths before an iteration begins: "
                f"{GIVE_LENGTHS}, or pad to the sequence length and leave it out"
            )
        (shape,) = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=self.micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=with_known_lengths(config),
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            cp_group=parallel_state.get_context_parallel_group(),
        )
        return tuple(shape)


def _check_divides(config: Any, tokens: int) -> None:
    """Raise ConfigError if ranks cannot share the sequences of a microbatch."""
    context = parallel_state.get_context_parallel_world_size()
    by, why = (2 * context, f"context parallelism of {context}") if context > 1 else (1, "")
    if config.sequence_parallel:
        size = parallel_state.get_tensor_model_parallel_world_size()
        by, why = by * size, " and ".join(filter(None, [why, f"sequence parallelism over {size} ranks"]))
    if tokens % by:
        raise ConfigError(f"a microbatch has {tokens} tokens, and {why} needs a multiple of {by}: pad it")
