"""--manual-gc: when garbage is collected, and that Python collects none in between."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.config.run import RunConfig
from megatron.zerobubble.training.garbage import GarbageCollection


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was collected, in order."""
    calls: list[str] = []

    def collect(generation: int = 2) -> int:
        calls.append(f"generation {generation}")
        return 0

    monkeypatch.setattr(gc, "collect", collect)
    return calls


def _train(collected: list[str], **flags: Any) -> bool:
    """Four iterations, with an evaluation after the third; whether Python collects by itself meanwhile."""
    garbage = GarbageCollection(RunConfig(train_iters=4, **flags))
    with garbage:
        is_on = gc.isenabled()
        for iteration in range(1, 5):
            collected.append(str(iteration))
            garbage.after_iteration(iteration)
            if iteration == 3:
                with garbage.evaluation():
                    collected.append("evaluation")
    assert gc.isenabled()
    return is_on


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ["1", "2", "3", "generation 2", "evaluation", "generation 0", "4"]),
        (
            {"manual_gc_interval": 2},
            ["1", "2", "generation 2", "3", "generation 2", "evaluation", "generation 0", "4", "generation 2"],
        ),
    ],
)
def test_garbage_is_collected_where_the_flags_say(collected: list[str], flags: dict[str, Any], expected: list[str]) -> None:
    assert not _train(collected, manual_gc=True, **flags)
    assert collected == ["generation 2", *expected]


def test_without_the_flag_python_chooses(collected: list[str]) -> None:
    assert _train(collected)
    assert collected == ["1", "2", "3", "evaluation", "4"]


def test_after_an_error_python_chooses_again() -> None:
    with pytest.raises(ZeroDivisionError), GarbageCollection(RunConfig(train_iters=1, manual_gc=True)):
        raise ZeroDivisionError
    assert gc.isenabled()


def test_its_interval_needs_it() -> None:
    with pytest.raises(ConfigError, match="needs --manual-gc"):
        RunConfig(train_iters=1, manual_gc_interval=5)
