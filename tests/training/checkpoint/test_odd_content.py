"""Checkpoints without a manifest whose common state is not what this version saves: one line, whatever is wrong in it."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint import load
from megatron.zerobubble.training.checkpoint.directory import iteration_directory
from megatron.zerobubble.training.checkpoint.manifest import MANIFEST
from megatron.zerobubble.training.checkpoint.save import save_checkpoint
from megatron.zerobubble.training.step import TrainingState
from tests.support.training_states import train, training_state_of

pytestmark = [
    pytest.mark.usefixtures("world_of_one"),
    pytest.mark.claims(
        "Long runs",
        "checkpoints without a manifest whose common state has other types anywhere (10 odd values in every place, 150 drawn "
        "in `make test-slow`)",
        "loaded, or rejected in one line",
    ),
]

ODD = [None, True, -1, 7, 2.5, "x", [], [None], {}, {"x": None}]


@pytest.fixture
def loading(tmp_path: Path) -> Iterator[tuple[TrainingState, dict[str, Any]]]:
    """A training state that loads a checkpoint without a manifest, and the checkpoint's common state."""
    with training_state_of(0, ["--save", str(tmp_path), "--load", str(tmp_path)]) as training_state:
        train(training_state, first=1, last=1)
        save_checkpoint(training_state, run="a", iteration=1, consumed_samples=8)
        directory = iteration_directory(tmp_path, 1)
        (directory / MANIFEST).unlink()
        common = load._load_common(directory)
        del common["header"]["run"]
        yield training_state, common


def reason(training_state: TrainingState, common: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Why a checkpoint with this common state is refused; None if it is loaded."""
    monkeypatch.setattr(load, "_load_common", lambda _: common)
    try:
        load.load_checkpoint(training_state)
    except CheckpointError as error:
        return str(error)
    return None


def paths(tree: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Keys and indices that lead to every value, at most four of them."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*before, key)
        if len(before) < 3:
            yield from paths(value, (*before, key))


def changed(common: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A copy with another value at `path`."""
    result = copy.deepcopy(common)
    inner: Any = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return result


@pytest.mark.parametrize("num_cases", [6, pytest.param(150, marks=pytest.mark.slow)])
def test_any_change_is_loaded_or_refused_in_one_line(
    num_cases: int, loading: tuple[TrainingState, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    training_state, common = loading
    assert reason(training_state, common, monkeypatch) is None, "unchanged"
    cases = [(path, value) for path in paths(common) for value in ODD]
    for path, value in random.Random(os.environ["ZB_TEST_SEED"]).sample(cases, num_cases):
        refused = reason(training_state, changed(common, path, value), monkeypatch)
        assert refused is None or "\n" not in refused, (path, value)


def test_the_place_is_named(loading: tuple[TrainingState, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[tuple[str, ...], Any]] = [
        *((("header", "iteration"), value) for value in ("x", -1, True)),
        (("header", "consumed_samples"), 2.5),
        (("header", "layout"), [1]),
        (("header", "model"), None),
        (("optimizer",), [7]),
        (("opt_param_scheduler",), "x"),
    ]
    for path, value in cases:
        refused = reason(loading[0], changed(loading[1], path, value), monkeypatch)
        assert refused is not None
        assert f"is damaged: {path[-1]} in its common state is {value!r}" in refused
