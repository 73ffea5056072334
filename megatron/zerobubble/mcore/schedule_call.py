"""The arguments of one call of a schedule, as a training loop gives them, checked before the first pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from torch import nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.compat import with_known_lengths
from megatron.zerobubble.mcore.ddp.frozen_weights import check_frozen
from megatron.zerobubble.mcore.given_groups import check_given_groups
from megatron.zerobubble.mcore.microbatches.length_exchange import GIVE_LENGTHS, Lengths

__all__ = ["check_call", "tensor_shape"]


def check_call(
    schedule: str,
    chunks: Sequence[nn.Module],
    *,
    model: Any,
    data_iterator: Any,
    forward_only: bool,
    adjust_tensor_shapes_fn: Any,
    pg_collection: Any,
    p2p_communicator: Any,
) -> Sequence[Any]:
    """Check the arguments of a call; they may be wrong on one rank alone. Nothing waits for other ranks.

    Args:
        schedule: its name, for messages.
        chunks: this rank's model chunks that it was built for.
        model: the argument of megatron-core's schedules of that name, as all that follow.
        data_iterator: see there.
        forward_only: see there.
        adjust_tensor_shapes_fn: see there.
        pg_collection: see there.
        p2p_communicator: see there.

    Returns:
        The data iterator of each chunk.

    Raises:
        ConfigError: an argument that the schedule cannot run, or weights that were frozen since DDP wrapped the model.
    """
    if adjust_tensor_shapes_fn is not None:
        raise ConfigError(
            f"adjust_tensor_shapes_fn is not supported by schedule {schedule!r}, whose messages have the shapes that "
            "follow from its arguments; leave it out or use --zero-bubble-schedule stock"
        )
    check_given_groups(schedule, pg_collection=pg_collection, p2p_communicator=p2p_communicator)
    given = model if isinstance(model, list) else [model]
    if len(given) != len(chunks) or any(a is not b for a, b in zip(given, chunks, strict=True)):
        raise ConfigError("the model given to the schedule is not the list of chunks that the schedule was built for")
    if not forward_only:
        check_frozen(chunks)
    if isinstance(data_iterator, list):
        if len(data_iterator) != len(chunks):
            raise ConfigError(f"{len(data_iterator)} data iterators were given for {len(chunks)} model chunks")
        return data_iterator
    if len(chunks) > 1:
        raise ConfigError(
            f"schedule {schedule!r} has {len(chunks)} model chunks per rank: give data_iterator as a list, one "
            "iterator for each chunk over the same samples (two chunks drawing from one iterator would see different data)"
        )
    return [data_iterator]


def tensor_shape(
    config: Any,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    lengths: Lengths | None,
    *,
    schedule: str,
) -> tuple[int, ...]:
    """Shape of what travels between stages for a microbatch of these lengths; None: of the call's sequence length."""
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
        micro_batch_size=micro_batch_size,
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
