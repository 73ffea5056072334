"""--manual-gc: Python collects no garbage by itself while a job trains."""

from __future__ import annotations

import gc

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.config.run import RunConfig
from megatron.zerobubble.training.garbage import collecting_by_hand


@pytest.mark.parametrize("is_manual", [False, True])
def test_python_chooses_when_to_collect_unless_asked_not_to(is_manual: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    with collecting_by_hand(is_manual=is_manual):
        assert gc.isenabled() is not is_manual
        assert len(collected) == is_manual
    assert gc.isenabled()


def test_after_an_error_python_chooses_again() -> None:
    with pytest.raises(ZeroDivisionError), collecting_by_hand(is_manual=True):
        raise ZeroDivisionError
    assert gc.isenabled()


def test_its_interval_needs_it() -> None:
    with pytest.raises(ConfigError, match="needs --manual-gc"):
        RunConfig(train_iters=1, manual_gc_interval=5)
