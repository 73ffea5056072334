"""What a rank reports about a wait inside of what it does."""

from __future__ import annotations

import pytest
import torch

from megatron.zerobubble.runtime.watch import Watch


@pytest.fixture
def watch() -> Watch:
    return Watch(torch.device("cpu"))


def test_a_wait_ends_with_the_activity_around_it(watch: Watch) -> None:
    with watch.doing("steps"):
        before = watch.current()
        with watch.waits("waits for rank 3", 3):
            doing = watch.current()
            assert doing is not None
            assert (doing.text, doing.is_waiting, doing.waits_for, doing.is_limited) == ("waits for rank 3", True, 3, True)
        after = watch.current()
        assert before is not None
        assert after is not None
        assert after is not before, "what follows the wait is progress"
        assert (after.text, after.is_waiting, after.is_shared) == ("steps", False, True)
    assert watch.current() is None


def test_a_wait_in_a_phase_has_no_limit_of_its_own(watch: Watch) -> None:
    with watch.phase("saves"):
        with watch.waits("waits for its peers"):
            doing = watch.current()
            assert doing is not None
            assert (doing.is_limited, doing.is_waiting, doing.waits_for) == (False, True, None)
        assert watch.last().text == "saves"


def test_after_an_error_the_wait_is_the_last_report(watch: Watch) -> None:
    with pytest.raises(ZeroDivisionError), watch.waits("waits for rank 1", 1):
        raise ZeroDivisionError
    assert watch.last().text == "waits for rank 1"
