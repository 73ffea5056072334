"""The optimizer's step without a global barrier, validated afterwards (arXiv 2401.10241, section 4).

Whether a step must be clipped or left out depends on the gradients of all pipeline ranks. Waiting for them costs every rank the
stagger of the pipeline. Here the statistics travel from rank to rank instead:

    rank 0   | gradients | step on 0       | forwards ... | truth? go on, or undo, step, forwards again
    rank 1        | gradients | step on 0-1     | forwards | truth? ...
    rank 2             | gradients | step on 0-2: the truth -> back to 1, from there to 0

A rank adds its own statistics to those of the ranks before it, passes the sum on and steps as if it were all, which is right
unless a gradient must be clipped or has overflowed. A rank that sees by then that the step will be clipped, but not by how much,
leaves it for later. The last rank knows the truth; it travels back while the others run the first forwards of the next
iteration. A rank whose step was wrong undoes it and steps again, and all ranks run those forwards again.

Squares are added in the order of the ranks, in double precision, with and without post-validation: the sums have the same bits
either way, and so has everything that follows from them. docs/adr/0010 says why in this order under V, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

__all__ = ["PostValidation", "Relay", "Statistics", "Steppable", "Verdict", "group_of"]


@dataclass(frozen=True)
class Statistics:
    """What is known of the gradients of some ranks."""

    squares: tuple[float, ...]
    """For each optimizer the sum of squares of its gradients."""
    overflows: tuple[float, ...]
    """For each optimizer above 0 where a gradient is not finite; always 0 without loss scaling."""
    zeros: float = 0.0
    """Zeros in the gradients, where they are counted."""

    def __add__(self, later: Statistics) -> Statistics:
        """With the statistics of the next rank. Not commutative: sums of floats have the bits of their order."""
        return Statistics(
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
        """Whether the step must be left out."""
        return any(flag > 0 for flag in self.overflows)

    def to_list(self) -> list[float]:
        """Flat, for `of_list`."""
        return [*self.squares, *self.overflows, self.zeros]

    @staticmethod
    def of_list(values: Sequence[float]) -> Statistics:
        """From `to_list`."""
        count = len(values) // 2
        return Statistics(tuple(values[:count]), tuple(values[count : 2 * count]), values[-1])


class Steppable(Protocol):
    """What post-validation needs of an optimizer. `mcore.post_validation.optimizer` has megatron-core's."""

    def prepare(self) -> Statistics:
        """Make the gradients ready for `apply`; their statistics on this pipeline rank, summed over its tensor and data ranks."""

    def is_clipped(self, statistics: Statistics) -> bool:
        """Whether gradients of these statistics are scaled down."""

    def apply(self, statistics: Statistics) -> None:
        """Clip as the statistics say and step; nothing where they say overflow."""

    def keep(self) -> bool:
        """Get ready to take the next `apply` back; False where that could not be done."""

    def amend(self, statistics: Statistics, *, undo: bool) -> None:
        """Step as the statistics say, after putting back what was kept where `undo`. The gradients are those of `prepare`."""

    def forget(self) -> None:
        """Drop what was kept."""

    def settle(self, statistics: Statistics) -> None:
        """Take note of the truth, as a loss scale does."""

    def close(self) -> None:
        """Give back what it holds."""


@dataclass(frozen=True)
class Verdict:
    """The truth about one step."""

    is_stepped: bool
    """False where a gradient overflowed and the weights were left alone."""
    norm: float
    """2-norm of all gradients before clipping."""
    zeros: float
    """Zeros in all gradients, where they are counted."""
    is_amended: bool
    """Whether the step was taken without the truth and the truth was another: forwards that ran since ran with wrong weights, on
    this rank or another."""
    undone: tuple[int, ...]
    """Pipeline ranks that had stepped and stepped back."""


def group_of(ranks: Sequence[int], *, backend: str | None = None, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A new process group of the global `ranks`, which this process is one of; `timeout` None is the backend's default.

    Every rank of the world must call it at the same point, the members of a group with the same ranks.
    """
    wanted: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(wanted, tuple(ranks))
    groups = {others: dist.new_group(list(others), backend=backend, timeout=timeout) for others in sorted(set(wanted))}
    return groups[tuple(ranks)]


class Relay:
    """Statistics between the ranks of one pipeline, through host memory.

    The numbers decide what the host does next, so they have to come to the host anyway; on a CPU group they never queue behind
    a kernel, and their order against the pipeline's transfers does not matter.

    Args:
        ranks: global ranks of this pipeline, by pipeline rank.
        rank: this process's pipeline rank.
        timeout: how long a message may take; None for gloo's default.

    Every rank of the world must construct it at the same point: it creates a gloo group of its own.
    """

    def __init__(self, ranks: Sequence[int], rank: int, *, timeout: timedelta | None = None) -> None:
        self._ranks = tuple(ranks)
        self.rank = rank
        self._group: dist.ProcessGroup | None = None
        if dist.get_world_size() > 1:
            self._group = group_of(self._ranks, backend="gloo", timeout=timeout)
        self._sends: list[tuple[dist.Work | None, torch.Tensor]] = []
        self._length = 0
        """Numbers in the statistics."""

    @property
    def is_last(self) -> bool:
        """Whether this rank is the first to know the truth."""
        return self.rank == len(self._ranks) - 1

    def total(self, own: Statistics) -> Statistics:
        """The truth, at once, for which all ranks wait for all."""
        if self._group is None:
            return own
        values = torch.tensor(own.to_list(), dtype=torch.float64)
        everyone = [torch.empty_like(values) for _ in self._ranks]
        dist.all_gather(everyone, values, group=self._group)
        first, *others = (Statistics.of_list(row.tolist()) for row in everyone)
        for other in others:
            first = first + other
        return first

    def until_here(self, own: Statistics) -> tuple[tuple[int, ...], Statistics]:
        """Which earlier ranks step at once, and the statistics of the ranks up to this one. Waits for the rank before."""
        self._length = len(own.to_list())
        if self.rank == 0:
            return (), own
        stepped, before = self._receive(self.rank - 1)
        return stepped, before + own

    def pass_on(self, stepped: tuple[int, ...], statistics: Statistics) -> None:
        """To the next rank."""
        self._send(self.rank + 1, stepped, statistics)

    def pass_back(self, stepped: tuple[int, ...], statistics: Statistics) -> None:
        """To the rank before, if there is one."""
        if self.rank > 0:
            self._send(self.rank - 1, stepped, statistics)

    def truth(self) -> tuple[tuple[int, ...], Statistics]:
        """What the next rank passes back."""
        return self._receive(self.rank + 1)

    def close(self) -> None:
        """Destroy the group. Every rank of the pipeline must call it, after its last step was validated."""
        self._wait()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _send(self, rank: int, stepped: tuple[int, ...], statistics: Statistics) -> None:
        self._wait()
        flags = [float(other in stepped) for other in range(len(self._ranks))]
        values = torch.tensor([*flags, *statistics.to_list()], dtype=torch.float64)
        self._sends.append((dist.isend(values, self._ranks[rank], group=self._group), values))

    def _receive(self, rank: int) -> tuple[tuple[int, ...], Statistics]:
        size = len(self._ranks)
        values = torch.empty(size + self._length, dtype=torch.float64)
        dist.recv(values, self._ranks[rank], group=self._group)
        flags, others = values[:size].tolist(), values[size:].tolist()
        return tuple(other for other, flag in enumerate(flags) if flag), Statistics.of_list(others)

    def _wait(self) -> None:
        """For sends of earlier steps and of this step's other direction. Their receivers wait for nothing of ours before."""
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        self._sends.clear()


@dataclass
class _Pending:
    """A step taken and not validated."""

    truth: Statistics | None
    """On the last rank."""
    stepped: tuple[int, ...]
    """Ranks that stepped before the truth was known; only the last rank knows."""
    is_stepped: bool
    """Whether this rank stepped on what it knew."""


class PostValidation:
    """One rank's optimizer steps.

    `step` when the gradients are final; `validate` before anything touches the gradients again; `flush` before anyone is shown
    weights (a checkpoint, an evaluation, the end). A training loop of your own, around a `PipelineSchedule`::

        steps = megatron.zerobubble.post_validation(optimizer, optimistic=True)

        def learn(verdict):                    # the truth about a step, once each
            if verdict is not None and verdict.is_stepped:
                scheduler.step(increment=global_batch_size)

        def before_gradients():                # called after an iteration's first forwards
            verdict = steps.validate()
            learn(verdict)
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            return verdict is not None and verdict.is_amended     # True: those forwards run again

        schedule.hooks.before_gradients = before_gradients
        for iteration in range(1, 1 + train_iters):
            schedule.forward_backward_func(forward_step_func=forward_step, data_iterator=data, model=chunks, **sizes)
            steps.step()
            if iteration % save_interval == 0 or iteration == train_iters:
                learn(steps.flush())
                save(iteration)
        steps.close()

    Args:
        optimizer: what steps.
        relay: to the other ranks of the pipeline.
        optimistic: False: every step waits for the truth. `validate` still tells it, and never amends.
        patience: after an amended step, how many steps wait for the truth and find nothing to clip and no overflow before one
            is taken without it again. 0: every step is taken without it.
    """

    def __init__(self, optimizer: Steppable, relay: Relay, *, optimistic: bool, patience: int = 10) -> None:
        self.optimistic = optimistic
        self._optimizer = optimizer
        self._relay = relay
        self._patience = patience
        self._calm = patience
        self._pending: _Pending | None = None
        self._verdict: Verdict | None = None

    @property
    def is_unvalidated(self) -> bool:
        """Whether the weights may still change without a step. The same on all ranks."""
        return self._pending is not None

    def step(self) -> None:
        """Step. Everything before must have been validated. All ranks of the pipeline must call it."""
        assert self._pending is None
        assert self._verdict is None
        own = self._optimizer.prepare()
        if self.optimistic and self._calm >= self._patience:
            self._step_now(own)
        else:
            truth = self._relay.total(own)
            self._optimizer.apply(truth)
            needs_all = truth.overflowed or self._optimizer.is_clipped(truth)
            self._calm = 0 if needs_all else self._calm + 1
            self._verdict = self._settled(truth, is_amended=False, undone=())

    def validate(self) -> Verdict | None:
        """The truth about the last step, which by then has been taken; None where it was asked for before.

        All ranks of the pipeline must call it. Waits for the next rank, which does not wait for this one.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            verdict, self._verdict = self._verdict, None
            return verdict
        if pending.truth is not None:
            stepped, truth = pending.stepped, pending.truth
        else:
            stepped, truth = self._relay.truth()
            self._relay.pass_back(stepped, truth)
        is_amended = truth.overflowed or self._optimizer.is_clipped(truth)
        if is_amended:
            self._calm = 0
            if pending.truth is None:
                self._optimizer.amend(truth, undo=pending.is_stepped)
        self._optimizer.forget()
        return self._settled(truth, is_amended=is_amended, undone=stepped if is_amended else ())

    def flush(self) -> Verdict | None:
        """`validate` at the end of an iteration: afterwards the weights are those of the synchronous optimizer.

        With `--overlap-param-gather` they still have to be gathered, as after any step.
        """
        return self.validate()

    def close(self) -> None:
        """Give back every process group. Every rank of the pipeline must call it, with nothing left to validate."""
        self._relay.close()
        self._optimizer.close()

    def _step_now(self, own: Statistics) -> None:
        can_undo = not self._relay.is_last and self._optimizer.keep()  # while the rank before is not ready yet
        stepped, known = self._relay.until_here(own)
        if self._relay.is_last:
            self._relay.pass_back(stepped, known)
            self._optimizer.apply(known)
            self._pending = _Pending(known, stepped, is_stepped=False)
            return
        steps = can_undo and not known.overflowed and not self._optimizer.is_clipped(known)
        self._relay.pass_on((*stepped, self._relay.rank) if steps else stepped, known)
        if steps:
            self._optimizer.apply(known)
        else:
            self._optimizer.forget()
        self._pending = _Pending(None, (), is_stepped=steps)

    def _settled(self, truth: Statistics, *, is_amended: bool, undone: tuple[int, ...]) -> Verdict:
        self._optimizer.settle(truth)
        return Verdict(
            is_stepped=not truth.overflowed,
            norm=truth.norm,
            zeros=truth.zeros,
            is_amended=is_amended,
            undone=undone,
        )
