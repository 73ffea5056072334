"""The lengths of an iteration's microbatches, known to every rank before its first pass.

A receive needs the shape of what arrives, and ranks in the middle of the pipeline read no data. So lengths are exchanged once per
iteration, from host to host, and no message between passes carries a shape. All ranks of the world learn the lengths of all
data-parallel replicas: one plan runs on all of them, because replicas meet in collectives whose order follows from it.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zerobubble.errors import ConfigError, ExecutionError
from megatron.zerobubble.messages import quoted

__all__ = ["LengthExchange", "Lengths", "LengthsOfReplicas", "TokensOf", "lengths_of", "most_of_replicas", "ranked"]

_FAILED = -1.0
"""In place of the tokens of a first microbatch: the rank cannot read its data."""


class Lengths(NamedTuple):
    """How long a microbatch is."""

    tokens: int
    """Length of its rows, padding included: the sequence dimension of its tensors, before context parallelism divides it."""
    squares: float
    """Sum of the squared lengths of the sequences of a row; `tokens` squared where a row is one sequence."""


LengthsOfReplicas = tuple[tuple[Lengths, ...], ...]
"""Lengths per data-parallel replica and microbatch, in the order in which the data comes."""

TokensOf = Callable[[Any], int | tuple[int, float]]
"""An item of the data iterator -> its tokens, or (tokens, sum of the squared lengths of its sequences). See `Lengths`."""


def lengths_of(tokens_of: TokensOf, item: Any, microbatch: int) -> Lengths:
    """The lengths of one item of a data iterator. Raises ConfigError if `tokens_of` returns something else than lengths."""
    found = tokens_of(item)
    tokens, squares = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if isinstance(tokens, bool) or not isinstance(tokens, numbers.Integral) or tokens < 1:
        raise ConfigError(
            f"microbatch {microbatch}: microbatch_tokens returned {quoted(found)}; it must return the length of the rows, a "
            "whole number of 1 or more, or that and the sum of the squared lengths of their sequences"
        )
    if squares is None:
        squares = float(tokens) ** 2
    if not isinstance(squares, numbers.Real) or not 0 < squares < float("inf"):
        raise ConfigError(
            f"microbatch {microbatch}: microbatch_tokens returned {quoted(squares)} squared lengths; give a number above 0"
        )
    return Lengths(int(tokens), float(squares))


def most_of_replicas(replicas: LengthsOfReplicas) -> tuple[Lengths, ...]:
    """The most tokens, and the most squared lengths, of each microbatch over the replicas, which wait for each other."""
    return tuple(
        Lengths(max(each.tokens for each in column), max(each.squares for each in column))
        for column in zip(*replicas, strict=True)
    )


def ranked(lengths: Sequence[Lengths]) -> list[int]:
    """The microbatches from the longest to the shortest; equal ones stay in the order in which they come."""
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index].tokens, -lengths[index].squares))


class LengthExchange:
    """Exchanges lengths between all ranks of the world, through host memory.

    Every rank of the world must construct it at the same point: it makes a gloo group.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._num_replicas = parallel_state.get_data_parallel_world_size()
        self._replica = parallel_state.get_data_parallel_rank()

    def __call__(self, own: Sequence[Lengths] | None, num_microbatches: int) -> LengthsOfReplicas:
        """The lengths of all replicas. All ranks of the world must call it, or `fail`.

        Args:
            own: lengths of this rank's microbatches; None if it reads no data.
            num_microbatches: of every replica.

        Raises:
            ConfigError: on every rank: no rank of a replica reads data, or two read different lengths.
            ExecutionError: another rank has called `fail`.
        """
        sent = torch.zeros(num_microbatches * 2 + 1, dtype=torch.float64)
        sent[-1] = self._replica
        if own is not None:
            sent[:-1] = torch.tensor(own, dtype=torch.float64).reshape(-1)
        received = self._gathered(sent)
        failed = [rank for rank, values in enumerate(received) if values[0] == _FAILED]
        if failed:
            ranks = f"rank{'s' if len(failed) > 1 else ''} {', '.join(map(str, failed))}"
            raise ExecutionError(f"{ranks} could not read the microbatches of this iteration; the error there says why")
        found: dict[int, dict[int, list[float]]] = {}
        for rank, values in enumerate(received):
            if values[0]:
                found.setdefault(int(values[-1]), {})[rank] = values[:-1]
        return tuple(self._of_replica(replica, found.get(replica, {})) for replica in range(self._num_replicas))

    def fail(self, num_microbatches: int) -> None:
        """Instead of a call, on a rank that cannot read its microbatches: the others raise an error and do not wait for it."""
        sent = torch.zeros(num_microbatches * 2 + 1, dtype=torch.float64)
        sent[0] = _FAILED
        self._gathered(sent)

    def _gathered(self, sent: torch.Tensor) -> list[list[float]]:
        received = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(received, sent, group=self._group)
        return [each.tolist() for each in received]

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
