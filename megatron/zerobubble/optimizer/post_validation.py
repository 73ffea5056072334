"""Optimizer steps without a global barrier, validated afterwards: post-validation (arXiv 2401.10241, section 4).

Whether a step must be clipped or skipped depends on the gradients of all pipeline ranks. An all-reduce of these statistics would
make every rank wait for the slowest and lose the stagger of the pipeline. Post-validation sends them from rank to rank instead:

    rank 0   | gradients | step on 0       | forwards ... | global: keep, or roll back, redo, rerun forwards
    rank 1        | gradients | step on 0-1     | forwards | global: ...
    rank 2             | gradients | step on 0-2 = global -> sent back to 1, from there to 0

A rank adds its own statistics to those of the ranks before it (the prefix), sends the sum on and takes an optimistic step.
That is right unless a gradient must be clipped or has overflowed. A rank whose prefix already shows clipping or overflow takes no
step yet. The last rank's sum is the global gradient statistics; they travel back while the other ranks run the first forwards of
the next iteration. A rank whose optimistic step was wrong rolls it back and redoes it, and all ranks rerun those forwards.

Squares are added in the order of the ranks, in double precision, with and without post-validation, so that both give the same
bits. docs/adr/0010 explains why the same order is used for V placements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.zerobubble.errors import ExecutionError

__all__ = ["GradientStatistics", "PostValidation", "Relay", "RollbackOptimizer", "Verdict", "Waits", "group_of"]

Waits = Callable[[str, int], AbstractContextManager[object]]
"""(predicate whose subject is this rank, global rank that it waits for) -> a context manager to enter around a wait."""


@dataclass(frozen=True)
class GradientStatistics:
    """What clipping and loss scaling need to know about the gradients of some pipeline ranks."""

    squares: tuple[float, ...]
    """Per optimizer: the sum of squares of its gradients."""
    overflows: tuple[float, ...]
    """Per optimizer: above 0 if a gradient is not finite; always 0 without loss scaling."""
    zeros: float = 0.0
    """Number of zeros in the gradients; 0 unless they are counted."""

    def __add__(self, later: GradientStatistics) -> GradientStatistics:
        """The sum with the next rank's statistics. Not commutative: the bits of a float sum depend on the order."""
        return GradientStatistics(
            tuple(a + b for a, b in zip(self.squares, later.squares, strict=True)),
            tuple(max(a, b) for a, b in zip(self.overflows, later.overflows, strict=True)),
            self.zeros + later.zeros,
        )

    @property
    def norm(self) -> float:
        """2-norm of the gradients."""
        return math.sqrt(sum(self.squares))

    @property
    def overflowed(self) -> bool:
        """Whether the step must be skipped."""
        return any(flag > 0 for flag in self.overflows)

    def to_list(self) -> list[float]:
        """The numbers as a flat list, for `from_list`."""
        return [*self.squares, *self.overflows, self.zeros]

    @staticmethod
    def from_list(values: Sequence[float]) -> GradientStatistics:
        """The statistics that `to_list` flattened."""
        count = len(values) // 2
        return GradientStatistics(tuple(values[:count]), tuple(values[count : 2 * count]), values[-1])


class RollbackOptimizer(Protocol):
    """An optimizer whose step is split into phases and can be rolled back, as `PostValidation` needs it.

    `mcore.post_validation.optimizer` implements it over megatron-core's optimizers.
    """

    def prepare(self) -> GradientStatistics:
        """Make the gradients ready for `apply`.

        Returns:
            The statistics of this pipeline rank, reduced over its tensor-parallel and data-parallel ranks.
        """

    def is_clipped(self, statistics: GradientStatistics) -> bool:
        """Whether gradients with these statistics are scaled down."""

    def apply(self, statistics: GradientStatistics) -> None:
        """Clip by these statistics and step; do nothing if they overflowed."""

    def snapshot(self) -> None:
        """Prepare for a rollback of the next `apply`."""

    def redo(self, statistics: GradientStatistics, *, roll_back: bool) -> None:
        """Step again by the global statistics, with the gradients of `prepare`.

        Args:
            statistics: the global gradient statistics.
            roll_back: whether to roll back to the snapshot first, because an optimistic step was taken.
        """

    def drop_snapshot(self) -> None:
        """Free the snapshot."""

    def note_tensors(self) -> None:
        """Note gradients and weights as a step leaves them that is not validated yet, for `check_tensors`."""

    def check_tensors(self, *, is_redone: bool) -> None:
        """Raise ExecutionError if gradients or weights were moved or changed since `note_tensors`.

        Args:
            is_redone: whether the step is to be redone, so that the content of the gradients counts, too.
        """

    def finalize(self, statistics: GradientStatistics) -> None:
        """Update the loss scale by the global statistics."""

    def closers(self) -> Sequence[Callable[[], None]]:
        """Functions that destroy its process groups, without references to the optimizer."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one step by the global gradient statistics. The same on all pipeline ranks."""

    is_stepped: bool
    """False if a gradient overflowed and the step was skipped."""
    norm: float
    """2-norm of all gradients before clipping."""
    zeros: float
    """Number of zeros in all gradients; 0 unless they are counted."""
    is_redone: bool
    """Whether an optimistic step was wrong and has been rolled back or redone. Forwards that ran since then used wrong weights,
    on this rank or another, and must be rerun."""


def group_of(ranks: Sequence[int], *, backend: str | None = None) -> dist.ProcessGroup:
    """A new process group of the global `ranks`, which must include this process.

    Every rank of the world must call it at the same point, the members of a group with the same ranks.

    Args:
        ranks: global ranks of the group.
        backend: as for `torch.distributed.new_group`.
    """
    wanted: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(wanted, tuple(ranks))
    groups = {others: dist.new_group(list(others), backend=backend) for others in sorted(set(wanted))}
    return groups[tuple(ranks)]


class Relay:
    """Point-to-point transfers of gradient statistics between the ranks of one pipeline, through host memory.

    The host needs the numbers to decide what to do next. On a gloo group of their own, the transfers never queue behind a kernel,
    and their order relative to the pipeline's transfers does not matter.

    Args:
        ranks: global ranks of this pipeline, by pipeline rank.
        rank: this process's pipeline rank.
        waits: reports the waits of a transfer, for a watchdog; None: nobody looks.

    Every rank of the world must construct it at the same point: it creates a gloo group.
    """

    def __init__(self, ranks: Sequence[int], rank: int, *, waits: Waits | None = None) -> None:
        self._ranks = tuple(ranks)
        self._waits = waits or _unreported
        self.rank = rank
        self._group: dist.ProcessGroup | None = None
        if dist.get_world_size() > 1:
            self._group = group_of(self._ranks, backend="gloo")
        self._sends: list[tuple[dist.Work | None, torch.Tensor, int]] = []
        self._length = 0
        """Numbers in the statistics."""

    @property
    def is_last(self) -> bool:
        """Whether this is the last pipeline rank, whose prefix is the global statistics."""
        return self.rank == len(self._ranks) - 1

    def all_reduce(self, own: GradientStatistics) -> GradientStatistics:
        """The global statistics, summed in the order of the ranks. A barrier: all ranks of the pipeline must call it."""
        if self._group is None:
            return own
        values = torch.tensor(own.to_list(), dtype=torch.float64)
        gathered = [torch.empty_like(values) for _ in self._ranks]
        dist.all_gather(gathered, values, group=self._group)
        total, *others = (GradientStatistics.from_list(row.tolist()) for row in gathered)
        for other in others:
            total = total + other
        return total

    def recv_prefix(self, own: GradientStatistics) -> GradientStatistics:
        """Receive from the previous rank, waiting for it.

        Args:
            own: this rank's statistics.

        Returns:
            The sum of the statistics of all ranks up to this one.
        """
        self._length = len(own.to_list())
        return own if self.rank == 0 else self._receive(self.rank - 1) + own

    def send_next(self, prefix: GradientStatistics) -> None:
        """Send the prefix to the next rank."""
        self._send(self.rank + 1, prefix)

    def send_prev(self, statistics: GradientStatistics) -> None:
        """Send the global statistics to the previous rank; nothing on rank 0."""
        if self.rank > 0:
            self._send(self.rank - 1, statistics)

    def recv_global(self) -> GradientStatistics:
        """Receive the global statistics from the next rank."""
        return self._receive(self.rank + 1)

    def close(self) -> None:
        """Destroy the group. Every rank of the pipeline must call it, after its last step has been validated."""
        self.wait()
        self.abandon()

    def abandon(self) -> None:
        """Destroy the group, even if statistics were sent that no rank will receive. Every rank of the pipeline must call it."""
        self._sends.clear()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _send(self, rank: int, statistics: GradientStatistics) -> None:
        self.wait()
        values = torch.tensor(statistics.to_list(), dtype=torch.float64)
        peer = self._ranks[rank]
        self._sends.append((dist.isend(values, peer, group=self._group), values, peer))

    def _receive(self, rank: int) -> GradientStatistics:
        values = torch.empty(self._length, dtype=torch.float64)
        peer = self._ranks[rank]
        with self._waits(f"waits to receive gradient statistics from rank {peer}", peer):
            dist.recv(values, peer, group=self._group)
        return GradientStatistics.from_list(values.tolist())

    def wait(self) -> None:
        """Wait for earlier sends. Cannot deadlock: their receivers do not wait for this rank before they receive."""
        for work, _, peer in self._sends:
            if work is not None:
                with self._waits(f"waits until it has sent gradient statistics to rank {peer}", peer):
                    work.wait()
        self._sends.clear()


def _unreported(text: str, peer: int) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass
class _Pending:
    """A step that has not been validated yet."""

    statistics: GradientStatistics | None
    """The global statistics; None except on the last rank."""
    is_stepped: bool
    """Whether this rank took an optimistic step."""


class PostValidation:
    """The optimizer steps of one rank, with or without post-validation.

    Call `step` when the gradients are final; `validate` before anything changes the gradients again, and before the weights are
    used outside of training (a checkpoint, an evaluation, the end). `mcore.stock_loop.optimistic_steps` does so in a stock loop.

    Args:
        optimizer: the optimizer to step.
        relay: transfers to the other ranks of the pipeline.
        optimistic: False: every step waits for the global statistics. `validate` still returns its outcome, and never redoes it.
        patience: number of consecutive synchronous steps without clipping or overflow, after a step was redone, before steps are
            optimistic again. 0: every step is optimistic.
    """

    def __init__(self, optimizer: RollbackOptimizer, relay: Relay, *, optimistic: bool, patience: int = 10) -> None:
        self.optimistic = optimistic
        self._optimizer = optimizer
        self._relay = relay
        self._patience = patience
        self._num_clean_steps = patience
        """Consecutive steps without clipping or overflow since the last one with either."""
        self._pending: _Pending | None = None
        self._verdict: Verdict | None = None

    @property
    def is_unvalidated(self) -> bool:
        """Whether the last step may still be rolled back or redone. The same on all ranks."""
        return self._pending is not None

    @property
    def known(self) -> GradientStatistics | None:
        """The global gradient statistics of a step that is not validated yet; None on all but the last rank."""
        return None if self._pending is None else self._pending.statistics

    def step(self) -> None:
        """Step. The previous step must have been validated. All ranks of the pipeline must call it."""
        assert self._pending is None
        assert self._verdict is None
        own = self._optimizer.prepare()
        if self.optimistic and self._num_clean_steps >= self._patience:
            self._step_optimistically(own)
        else:
            statistics = self._relay.all_reduce(own)
            self._optimizer.apply(statistics)
            self._optimizer.finalize(statistics)
            is_clean = not statistics.overflowed and not self._optimizer.is_clipped(statistics)
            self._num_clean_steps = self._num_clean_steps + 1 if is_clean else 0
            self._verdict = _verdict(statistics, is_redone=False)

    def validate(self) -> Verdict | None:
        """Validate the last step, and redo it if it was wrong: the weights are then those of the synchronous optimizer.

        All ranks of the pipeline must call it. Waits for the next rank, which does not wait for this one. With
        `--overlap-param-gather` the weights still have to be gathered, as after any step.

        Returns:
            The outcome of the step; None if it has been returned before.

        Raises:
            ExecutionError: gradients or weights were moved or changed since a step that may have to be redone.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            verdict, self._verdict = self._verdict, None
            return verdict
        if pending.statistics is not None:
            statistics = pending.statistics
        else:
            statistics = self._relay.recv_global()
            self._relay.send_prev(statistics)
        is_redone = statistics.overflowed or self._optimizer.is_clipped(statistics)
        try:
            # of every step, not of wrong ones alone: a loop that moves gradients learns it in its second iteration
            self._optimizer.check_tensors(is_redone=is_redone)
        except ExecutionError:
            self._relay.wait()  # so that the ranks before this one come to the same, and not to a lost connection
            raise
        if is_redone:
            self._num_clean_steps = 0
        if pending.statistics is None:
            if is_redone:
                self._optimizer.redo(statistics, roll_back=pending.is_stepped)
            self._optimizer.finalize(statistics)
        self._optimizer.drop_snapshot()
        return _verdict(statistics, is_redone=is_redone)

    def close(self) -> None:
        """Destroy all process groups. Every rank of the pipeline must call it, after the last step has been validated."""
        self._relay.close()
        for close in self._optimizer.closers():
            close()

    def closers(self) -> Sequence[Callable[[], None]]:
        """What destroys all process groups when the optimizer is gone, whose last step is then never validated.

        The functions have no reference to the optimizer. Every rank of the pipeline must call them, in this order.
        """
        return (self._relay.abandon, *self._optimizer.closers())

    def _step_optimistically(self, own: GradientStatistics) -> None:
        if not self._relay.is_last:
            self._optimizer.snapshot()  # before waiting for the previous rank
        prefix = self._relay.recv_prefix(own)
        if self._relay.is_last:
            self._relay.send_prev(prefix)
            self._optimizer.apply(prefix)
            self._optimizer.finalize(prefix)
            self._pending = _Pending(prefix, is_stepped=False)
            self._optimizer.note_tensors()
            return
        steps = not prefix.overflowed and not self._optimizer.is_clipped(prefix)
        self._relay.send_next(prefix)
        if steps:
            self._optimizer.apply(prefix)
        else:
            self._optimizer.drop_snapshot()
        self._pending = _Pending(None, is_stepped=steps)
        self._optimizer.note_tensors()


def _verdict(statistics: GradientStatistics, *, is_redone: bool) -> Verdict:
    return Verdict(is_stepped=not statistics.overflowed, norm=statistics.norm, zeros=statistics.zeros, is_redone=is_redone)
