"""Two passes that take turns at their collectives, on threads, with random delays."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from megatron.zerobubble.runtime.turns import Side, Turns, Worker

CPU = torch.device("cpu")


class _Log:
    """What two passes do, in order; checks that one computes at a time, and one communicates."""

    def __init__(self, seed: int) -> None:
        self.events: list[str] = []
        self._random = random.Random(seed)
        self._computing, self._communicating = threading.Lock(), threading.Lock()

    def compute(self, what: str) -> None:
        assert self._computing.acquire(blocking=False), f"{what} beside other computation"
        self._sleep()
        self.events.append(what)
        self._computing.release()

    def communicate(self, what: str) -> None:
        assert self._communicating.acquire(blocking=False), f"{what} beside another collective"
        self.events.append(what)
        self._sleep()
        self._communicating.release()

    def _sleep(self) -> None:
        time.sleep(self._random.random() * 2e-3)


def _pass(turns: Turns, side: Side, log: _Log, ops: Sequence[str], *, blocks: bool) -> Callable[[], str]:
    def run() -> str:
        for op in ops:
            if not op.isupper():
                log.compute(op)
            elif blocks:
                pair = turns.leave(side)
                log.communicate(op)
                if pair is not None:
                    pair.come_back(side)
            else:
                log.communicate(op)
                turns.switch(side)
        return side.value

    return run


@pytest.mark.parametrize("blocks", [True, False], ids=["blocking", "issued"])
@pytest.mark.parametrize(("backward", "forward"), [("CeDaCeDa", "aDeCaDeC"), ("aCeDa", "aDe"), ("a", "aDeC"), ("CCe", "DDDa")])
def test_who_computes_follows_from_the_passes_alone(backward: str, forward: str, blocks: bool) -> None:
    """Collectives come in one order, however long anything takes; one pass computes at a time, and one is in a collective."""
    orders = []
    for seed in range(4):
        log, turns = _Log(seed), Turns(CPU)
        ops = [[name + letter for letter in given] for name, given in (("b", backward), ("f", forward))]
        ops = [[op.upper() if op[1].isupper() else op for op in row] for row in ops]
        sides = zip((Side.BACKWARD, Side.FORWARD), ops, strict=True)
        first, second = (_pass(turns, side, log, row, blocks=blocks) for side, row in sides)
        assert turns.run(second, first) == ("forward", "backward")
        orders.append([each for each in log.events if each.isupper()])
        for row in ops:
            assert [each for each in log.events if each[0].lower() == row[0][0].lower()] == row
    assert orders[1:] == orders[:-1]


def test_passes_alternate_as_drawn() -> None:
    log, turns = _Log(0), Turns(CPU)
    backward = _pass(turns, Side.BACKWARD, log, ["b0", "COMBINE", "b1", "DISPATCH", "b2"], blocks=False)
    forward = _pass(turns, Side.FORWARD, log, ["f0", "DISPATCH'", "f1", "COMBINE'", "f2"], blocks=False)
    turns.run(forward, backward)
    assert log.events == ["b0", "COMBINE", "f0", "DISPATCH'", "b1", "DISPATCH", "f1", "COMBINE'", "b2", "f2"]


def test_outside_of_a_pair_a_pass_keeps_its_turn() -> None:
    turns = Turns(CPU)
    assert not any(turns.leave(side) or turns.switch(side) for side in Side)
    turns.run(lambda: None, lambda: None)
    assert not any(turns.leave(side) or turns.switch(side) for side in Side)


@pytest.mark.parametrize("side", Side)
def test_the_error_of_either_pass_ends_the_other_at_its_next_collective(side: Side) -> None:
    turns, reached = Turns(CPU), []

    def fails() -> None:
        turns.switch(side)
        raise ValueError("the first error")

    def goes_on() -> None:
        for number in range(9):
            reached.append(number)
            turns.switch(side.other)

    passes = (fails, goes_on) if side is Side.BACKWARD else (goes_on, fails)
    with pytest.raises(ValueError, match="the first error"):
        turns.run(*passes[::-1])
    assert len(reached) < 9
    assert turns.run(lambda: 2, lambda: 1) == (2, 1)


def test_a_worker_computes_with_the_threads_of_its_maker_and_ends_with_its_owner() -> None:
    worker = Worker(CPU, "test")
    thread, count = worker.submit(lambda: (threading.current_thread(), torch.get_num_threads())).result()
    assert count == torch.get_num_threads()
    del worker
    thread.join(timeout=60)
    assert not thread.is_alive()
