"""The lengths of an iteration's microbatches, known to every rank before its first pass.

A receive needs the shape of what arrives, and ranks in the middle of the pipeline read no data. So lengths are exchanged once per
iteration, from host to host, and no message between passes carries a shape. All ranks of the world learn the lengths of all
data-parallel replicas: one plan runs on all of them, because replicas meet in collectives whose order follows from it.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zerobubble.errors import ConfigError, ExecutionError
from megatron.zerobubble.flags.loop_options import TokensOf
from megatron.zerobubble.mcore.agreement import program_digest
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.communication import Program

__all__ = [
    "GIVE_LENGTHS",
    "LengthExchange",
    "Lengths",
    "LengthsOfReplicas",
    "lengths_of",
]

_FAILED = -1.0
"""In place of the tokens of a first microbatch: the rank cannot read its data."""

GIVE_LENGTHS = (
    "give megatron.zerobubble.install lengths=MicrobatchLengths('thd') for packed sequences, 'nested' for nested tensors, or a "
    "function (zerobubble run takes the names, --microbatch-tokens)"
)
"""For messages about lengths that are not known."""


class Lengths(NamedTuple):
    """How long a microbatch is."""

    tokens: int
    """Length of its rows, padding included: the sequence dimension of its tensors, before context parallelism divides it."""
    squares: float
    """Sum of the squared lengths of the sequences of a row; `tokens` squared where a row is one sequence."""


LengthsOfReplicas = tuple[tuple[Lengths, ...], ...]
"""Lengths per data-parallel replica and microbatch, in the order in which the data comes."""


def lengths_of(tokens_of: TokensOf, item: Any, microbatch: int) -> Lengths:
    """The lengths of one item of a data iterator. Raises ConfigError if `tokens_of` returns something else than lengths."""
    found = tokens_of(item)
    tokens, squares = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if isinstance(tokens, bool) or not isinstance(tokens, numbers.Integral) or tokens < 1:
        raise ConfigError(
            f"microbatch {microbatch}: the lengths' function returned {quoted(found)}; it must return the length of the rows, a "
            "whole number of 1 or more, or that and the sum of the squared lengths of their sequences"
        )
    if squares is None:
        squares = float(tokens) ** 2
    if not isinstance(squares, numbers.Real) or not 0 < squares < float("inf"):
        raise ConfigError(
            f"microbatch {microbatch}: the lengths' function returned {quoted(squares)} squared lengths; give a number above 0"
        )
    return Lengths(int(tokens), float(squares))


class LengthExchange:
    """Exchanges lengths between all ranks of the world, through host memory.

    Every rank of the world must construct it at the same point: it makes a gloo group.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._num_replicas = parallel_state.get_data_parallel_world_size()
        self._replica = parallel_state.get_data_parallel_rank()
        self._replicas: list[int] = []
        """Per rank of the world its replica, from the first exchange on."""

    def __call__(self, own: Sequence[Lengths] | None, num_microbatches: int) -> LengthsOfReplicas:
        """The lengths of all replicas. All ranks of the world must call it, or `fail`.

        Args:
            own: lengths of this rank's microbatches; None if it reads no data.
            num_microbatches: of every replica.

        Raises:
            ConfigError: on every rank: no rank of a replica reads data, two read different lengths, or replicas have different
                numbers of microbatches.
            ExecutionError: another rank has called `fail`.
        """
        values = [0.0] * (2 * num_microbatches) if own is None else [float(value) for each in own for value in each]
        received = self._gathered(num_microbatches, values)
        failed = [rank for rank, each in enumerate(received) if each[:1] == [_FAILED]]
        if failed:
            ranks = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}"
            raise ExecutionError(f"{ranks} could not read the microbatches of this iteration; the error there says why")
        found: dict[int, dict[int, list[float]]] = {}
        for rank, each in enumerate(received):
            if each[0]:
                found.setdefault(self._replicas[rank], {})[rank] = each
        return tuple(self._of_replica(replica, found.get(replica, {})) for replica in range(self._num_replicas))

    def fail(self, num_microbatches: int) -> None:
        """Instead of a call, on a rank that cannot read its microbatches: the others raise an error and do not wait for it."""
        self._gathered(num_microbatches, [_FAILED] + [0.0] * (2 * num_microbatches - 1))

    def check_same(self, program: Program) -> None:
        """Raise ConfigError on all ranks if they have planned an iteration differently. All ranks of the world must call it."""
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, program_digest(program), group=self._group)
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise ConfigError(
                f"ranks 0 and {other} have planned an iteration of {program.plan.num_microbatches} microbatches of unequal "
                "length differently: give all ranks the same options and versions"
            )

    def _gathered(self, num_microbatches: int, values: list[float]) -> list[list[float]]:
        """The values of all ranks."""
        received: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(received, (self._replica, num_microbatches, values), group=self._group)
        self._replicas = [replica for replica, *_ in received]
        other = next((rank for rank, (_, number, _) in enumerate(received) if number != received[0][1]), None)
        if other is not None:
            raise ConfigError(
                f"the schedule was called with {received[0][1]} microbatches on rank 0 and with {received[other][1]} on rank "
                f"{other}: all ranks run one order of ops, so give each replica the same number, for example the largest"
            )
        return [each for *_, each in received]

    def _of_replica(self, replica: int, found: dict[int, list[float]]) -> tuple[Lengths, ...]:
        if not found:
            raise ConfigError(f"no rank of data-parallel replica {replica} has a data iterator, so its lengths are unknown")
        (rank, first), *others = found.items()
        for other, values in others:
            if values != first:
                at = next(index for index, (a, b) in enumerate(zip(first, values, strict=True)) if a != b)
                raise ConfigError(
                    f"ranks {rank} and {other} of data-parallel replica {replica} read different data: microbatch {at // 2} has "
                    f"{first[at]:.15g} {'squared lengths' if at % 2 else 'tokens'} on one and {values[at]:.15g} on the other; "
                    "their iterators must be over the same samples"
                )
        return tuple(Lengths(int(tokens), squares) for tokens, squares in zip(first[::2], first[1::2], strict=True))

    def close(self) -> None:
        """Destroy the group. Every rank of the world must call it."""
        dist.destroy_process_group(self._group)
