"""megatron-core on ranks that are threads: its module state, what a rank has installed there, and torch's random state change
hands with the thread that runs.

Only one thread runs at a time, so that each rank can find its own state in the modules whenever it goes on.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import random as tensor_parallel_random

from megatron.zerobubble.mcore import agreement, zb_schedules
from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.mcore.stock_loop import patches
from tests.support.fake_nccl.engine import HostThread
from tests.support.fake_nccl.ranks import run_ranks

_MODULES = (parallel_state, tensor_parallel_random)


def _state_of(module: types.ModuleType) -> dict[str, Any]:
    """The variables of a module, that is, what is neither code nor a type."""
    no_state = types.FunctionType | types.ModuleType | type | types.BuiltinFunctionType
    return {name: value for name, value in vars(module).items() if not name.startswith("__") and not isinstance(value, no_state)}


class _RankStates:
    """What each rank finds when it goes on; at first what there is when this is made."""

    def __init__(self) -> None:
        self._initial = [_state_of(module) for module in _MODULES]
        self._random = torch.get_rng_state()
        self._saved: dict[int, tuple[list[dict[str, Any]], torch.Tensor]] = {}
        self._installed: dict[int, list[tuple[Any, str, Any]]] = {}
        """(owner, name, value) of what each rank has replaced in megatron-core by `install`."""
        self._rank: int | None = None

    def resumed(self, thread: HostThread) -> None:
        """A thread goes on."""
        if thread.rank == self._rank:
            return
        if self._rank is not None:
            self._saved[self._rank] = [_state_of(module) for module in _MODULES], torch.get_rng_state()
            self._installed[self._rank] = _set_back()
        saved = self._saved.get(thread.rank)
        self._load(*((_copied(self._initial), self._random) if saved is None else saved))
        for owner, name, value in self._installed.get(thread.rank, ()):
            setattr(owner, name, value)
        self._rank = thread.rank

    def restore(self) -> None:
        """As it was when this was made."""
        _set_back()
        self._load(self._initial, self._random)

    def _load(self, states: list[dict[str, Any]], generator: torch.Tensor) -> None:
        for module, state in zip(_MODULES, states, strict=True):
            vars(module).update(state)
        torch.set_rng_state(generator)


def _set_back() -> list[tuple[Any, str, Any]]:
    """Undo what is installed; what was there, as (owner, name, value)."""
    loop = patches._installed()
    replaced = [] if loop is None else loop.undo
    found = [(owner, name, vars(owner)[name]) for owner, name, _ in replaced]
    for owner, name, original in reversed(replaced):
        setattr(owner, name, original)
    return found


def _copied(states: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """No rank may add to a list of another one."""
    kinds = list | dict | set
    return [{name: copy.copy(value) if isinstance(value, kinds) else value for name, value in each.items()} for each in states]


def run_megatron(size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """`run_ranks` for functions that use megatron-core on the CPU.

    Plans are not compared between ranks here, nor refusals exchanged: that waits for a store, where these threads must wait for
    nothing else than each other. `tests/mcore/test_agreement.py` and `tests/mcore/stock_loop/test_refusals.py` have it.
    """
    states = _RankStates()
    try:
        with (
            HostDevice(),
            warnings.catch_warnings(),
            mock.patch.object(zb_schedules, "check_same_program"),
            mock.patch.object(agreement, "_raise_first"),
        ):
            warnings.simplefilter("ignore")  # megatron-core's and torch's own, as in the ranks of a pool
            return run_ranks(size, function, *args, resumed=states.resumed, **options)
    finally:
        states.restore()
