"""Which models of a stock loop run, for as long as they exist, and the process groups of those that do not any more.

A loop drops a model by letting go of it. So nothing here keeps one alive: what runs a model (its schedule, its hooks, its
optimizer's steps) is an attribute of the model's first chunk and is garbage-collected with it; the list of this installation has
weak references.

Process groups are not garbage: other ranks may still use them, and each rank collects its garbage at a time of its own. So they
are destroyed at a point that all ranks pass together, when the next model is started or the schedule is uninstalled: the ranks
exchange which models they have lost, and destroy the groups of those that none of them has any more, in the same order (ADR 43).

An in-process restart destroys all process groups at once, and makes new ones in the same process. What ran on the old ones is
never touched again, and as soon as a model of theirs is gone its groups are let go of: on gloo that is what ends the wait of
another rank for a message of this one.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from megatron.zerobubble.mcore.stock_loop.running import Running

__all__ = ["RunningModels", "World"]

_log = logging.getLogger(__name__)

_RUNNING = "_zero_bubble_running"
"""Attribute of a model's first chunk: what runs the model."""


class _Holder:
    """What runs a model, on the model. A copy or a pickle of the model has an empty one."""

    def __init__(self, running: Running | None = None) -> None:
        self.running = running

    def __reduce__(self) -> tuple[type[_Holder], tuple[()]]:
        return _Holder, ()


class World:
    """The default process group of the time at which this was made. `on_end` is called when it is gone."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._group = weakref.ref(dist.group.WORLD, lambda _: on_end())

    @property
    def exists(self) -> bool:
        """Whether it has not been destroyed."""
        group = self._group()
        return group is not None and group is dist.group.WORLD


@dataclass(eq=False)
class _Entry:
    """A model that was started, and what destroys its process groups, without a reference to it."""

    running: weakref.ref[Running]
    world: World
    closers: Sequence[Callable[[], None]]


class RunningModels:
    """The models that this installation runs."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    @property
    def has_groups(self) -> bool:
        """Whether a model was started on process groups that exist; it need not exist any more."""
        return any(each.world.exists for each in self._entries)

    def __iter__(self) -> Iterator[Running]:
        """Those that exist and whose process groups do, in the order in which they were started."""
        current = [each for each in self._entries if each.world.exists]
        return iter([running for each in current if (running := each.running()) is not None])

    def of(self, chunks: Sequence[nn.Module]) -> Running | None:
        """What runs the model of exactly these chunks; None: nothing yet."""
        return next((each for each in self if each.chunks == list(chunks)), None)

    def add(self, running: Running) -> None:
        """Take a model that was started."""
        holder: Any = vars(running.chunks[0])
        holder[_RUNNING] = _Holder(running)
        self._entries.append(_Entry(weakref.ref(running, lambda _: self._forget()), World(self._forget), ()))
        self.note_groups(running)

    def note_groups(self, running: Running) -> None:
        """Call it after anything that may have made process groups of a model."""
        for each in self._entries:
            if each.running() is running:
                each.closers = running.closers()

    def destroy_unused_groups(self) -> None:
        """Destroy the process groups of the models that no rank has any more. Every rank of the world must call it."""
        self._entries = [each for each in self._entries if each.world.exists]
        if not self._entries:
            return
        lost = _on_every_rank({number for number, each in enumerate(self._entries) if each.running() is None})
        for number in sorted(lost):
            for close in self._entries[number].closers:
                close()
        self._entries = [each for number, each in enumerate(self._entries) if number not in lost]

    def close(self) -> None:
        """Stop running models and destroy all process groups that exist. Every rank of the world must call it.

        A last step is validated where every rank still has its model.
        """
        current = [each for each in self._entries if each.world.exists]
        alive = {number for number, each in enumerate(current) if each.running() is not None}
        if current:
            alive = _on_every_rank(alive)
        for number, each in enumerate(current):
            running = each.running()
            if running is None:
                for close in each.closers:
                    close()
            else:
                running.close(validates=number in alive)
        for each in self._entries:
            running = each.running()
            if running is not None:
                if not each.world.exists and running.steps is not None and running.steps.is_unvalidated:
                    _log.warning("a last optimizer step was not validated: the process groups were destroyed before")
                running.remove_hooks()
                vars(running.chunks[0]).pop(_RUNNING, None)
        self._entries.clear()

    def _forget(self) -> None:
        """A model or the process groups are gone: let go of a model's groups if both are."""
        self._entries = [each for each in self._entries if each.world.exists or each.running() is not None]


def _on_every_rank(numbers: set[int]) -> set[int]:
    """The numbers that every rank of the world has. All of them must call it."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, numbers)
    return set.intersection(*everybody)
