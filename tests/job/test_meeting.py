"""Ranks agree on the name of an attempt in a store that still has the keys of earlier ones."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job import meeting
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.job.meeting import Attempt, meet, refuse


def launch(rank: int, *, num_ranks: int = 3) -> Launch:
    return Launch(rank=rank, local_rank=0, ranks_on_host=1, world_size=num_ranks)


def met(store: Any, ranks: range = range(3), *, timeout_s: float = 20.0) -> list[Any]:
    """What `meet` returns or raises, per rank."""

    def one(rank: int) -> Attempt | str:
        try:
            return meet(store, launch(rank), timeout_s=timeout_s)
        except ConfigError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_every_attempt_has_a_name_of_its_own_and_all_the_same_job() -> None:
    """Restart counts of torchrun, which differ between hosts, play no part."""
    store = dist.HashStore()
    attempts = [met(store) for _ in range(3)]
    for number, found in enumerate(attempts):
        assert found == [found[0]] * 3
        assert (found[0].number, found[0].is_restart) == (number, number > 0)
    assert len({found[0].name for found in attempts}) == 3
    assert len({found[0].job for found in attempts}) == 1


def test_a_process_of_an_earlier_attempt_is_left_out() -> None:
    """Rank 1 has come, dies while rank 2 is missing, and another process comes as rank 1."""
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as pool:
        word = meeting._come(store, 1, reason="")
        stale = pool.submit(meeting._follow, store, 1, word, time.monotonic() + 0.3)
        leader = pool.submit(meet, store, launch(0), timeout_s=20.0)
        assert stale.result() is None
        others = [pool.submit(meet, store, launch(rank), timeout_s=20.0) for rank in (1, 2)]
        assert {each.result().name for each in [leader, *others]} == {leader.result().name}


@pytest.mark.parametrize("refusing", [0, 2])
def test_the_reason_of_a_rank_that_ends_reaches_every_other_one_at_once(refusing: int) -> None:
    store, started = dist.HashStore(), time.monotonic()
    thread = threading.Thread(target=refuse, args=(store, launch(refusing), "no file /data/text.bin\nhere"))
    thread.start()
    lines = met(store, range(1, 3) if refusing == 0 else range(2))
    thread.join()
    assert time.monotonic() - started < meeting._LINGER_S
    assert len(set(lines)) == 1
    assert f"rank {refusing} on " in lines[0]
    assert "has ended before it joined the job: no file /data/text.bin here" in lines[0]
    assert all(isinstance(each, Attempt) for each in met(store)), "the next attempt does not find it"


def test_ranks_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or come and go, as one that was killed."""
    monkeypatch.setattr(meeting, "_LINGER_S", 1.0)
    store = dist.HashStore()
    with mock.patch.object(socket, "gethostname", return_value="node1"):
        meeting._come(store, 2, reason="")
    [line, _] = met(store, range(2), timeout_s=0.5)
    assert line.startswith("of 3 ranks these have not come: 2; the others are on ")
    assert "node1" not in line
    [line, other] = met(dist.HashStore(), range(2), timeout_s=0.5)
    assert line.startswith("of 3 ranks these have not come: 2; the others are on ")
    assert other == line
