"""Who holds up a job, from what the ranks said last."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.zerobubble.job.heartbeats import Beat, Process, is_gone, publish, published, this_process
from megatron.zerobubble.job.stragglers import Stragglers
from megatron.zerobubble.job.tcp_connections import Connections
from megatron.zerobubble.job.verdict import HangVerdict, decide


def beat(doing: str | None = "runs 1F0", **changes: Any) -> Beat:
    values: dict[str, Any] = {
        "count": 7,
        "process": Process(host="node boot", pid=41, born="1"),
        "doing": doing,
        "place": " (in step, loop.py:3)",
        "is_waiting": False,
        "waits_for": None,
        "is_shared": False,
        "still_s": 9.0,
        "silence_of_next_s": 0.0,
        "interval_s": 1.0,
        "busy_s": 0.0,
        "num_iterations": 0,
    }
    return Beat(**values | changes)


WAITS = {"is_waiting": True}


def decided(beats: dict[int, Beat], silent_s: dict[int, float] | None = None, *, world_size: int | None = None) -> HangVerdict:
    world = len(beats) if world_size is None else world_size
    return decide(beats, silent_s=silent_s or {}, world_size=world, least_still_s=5.0, waited_s=60.0)


def test_a_rank_that_says_nothing_is_named_with_its_last_words() -> None:
    """Even if others are at the same activity for longer: they may wait in it."""
    verdict = decided({0: beat(still_s=20.0), 1: beat(**WAITS), 2: beat("saves")}, {2: 10.0})
    assert verdict.rank == 2
    assert verdict.num_silent == 1
    assert verdict.reason == (
        "rank 2 (process 41 on node) has said nothing for 10.0 s: it is stopped, or its machine is gone; when last heard of, "
        "it saves (in step, loop.py:3)"
    )


def test_of_several_the_one_that_was_silent_first_is_named() -> None:
    verdict = decided({0: beat(), 1: beat(), 2: beat(), 3: beat()}, {1: 10.0, 3: 12.5})
    assert verdict.rank == 3
    assert verdict.num_silent == 2
    assert verdict.reason.endswith("; the same is true of rank 1")


def test_ranks_that_never_joined() -> None:
    verdict = decided({0: beat(**WAITS)}, world_size=12)
    assert verdict.rank == 1
    assert verdict.num_silent == 11
    also = "; the same is true of ranks 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"
    assert verdict.reason == f"rank 1 has not joined the job: it has said nothing for 60.0 s{also}"


def test_the_rank_that_works_is_named_not_those_that_wait_longer_for_it() -> None:
    beats = {
        0: beat("waits", still_s=30.0, waits_for=1, **WAITS),
        1: beat("runs 1F0"),
        2: beat("steps", still_s=20.0, is_shared=True),
    }
    verdict = decided(beats)
    assert (verdict.rank, verdict.num_silent) == (1, 0)
    assert verdict.reason == "rank 1 makes no progress: it runs 1F0, for 9.0 s (in step, loop.py:3)"


def test_a_rank_that_has_just_begun_something_is_not_stuck() -> None:
    assert decided({0: beat(still_s=1.0), 1: beat("steps", is_shared=True)}).rank == 1


def test_two_that_wait_for_each_other_have_lost_a_message() -> None:
    peers = {0: 1, 1: 2, 2: 1, 3: 2}
    beats = {rank: beat(f"waits for {peer}", waits_for=peer, **WAITS) for rank, peer in peers.items()}
    verdict = decided(beats)
    assert verdict.rank == 1
    assert verdict.reason.startswith(
        "ranks 1 and 2 wait for each other, so a message between them is lost: rank 1 waits for 2, for 9"
    )


def test_a_connection_without_answers_is_named() -> None:
    beats = {
        rank: beat("saves", connections=Connections((f"{rank}A", f"{rank}B"), ("3B", "nobody") if rank == 1 else ()), **WAITS)
        for rank in range(4)
    }
    assert decided(beats).reason.startswith(
        "ranks 1 and 3 have lost their connection: data that was sent is not acknowledged; rank 1"
    )


def test_all_wait_and_nothing_else_is_known() -> None:
    beats = {rank: beat("saves", still_s=9.0 + rank % 2, **WAITS) for rank in range(4)}
    assert decided(beats).reason.startswith("every rank waits for others, first rank 1: it saves, for 10.0 s")


def test_beats_come_back_as_they_were_published() -> None:
    store = torch.distributed.HashStore()
    said = {0: beat(connections=Connections(("a", "b"), ("c",))), 2: beat(None)}
    for rank, each in said.items():
        publish(store, rank, each)  # type: ignore[arg-type]
    assert published(store, range(4)) == said  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_is_gone_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as other:
        here = this_process()
        born = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
        theirs = replace(here, pid=other.pid, born=born)
        assert not is_gone(here)
        assert not is_gone(theirs)
        assert is_gone(replace(theirs, born="1")), "another process that has its number"
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # still a zombie, as for a moment under torchrun
        assert is_gone(theirs)
        other.wait()
        assert is_gone(theirs)


def test_a_slow_rank_is_named_once() -> None:
    stragglers, lines = Stragglers(), []
    for look in range(6):
        beats = {rank: beat(num_iterations=5 * look, busy_s=5 * look * (0.3 if rank == 2 else 0.1)) for rank in range(4)}
        lines += stragglers.look(beats)
    assert lines == [
        "rank 2 (node) is slow: its passes take 3.0 times as long as those of the median rank (300 ms and 100 ms per iteration, "
        "iteration 10)"
    ]


def test_unequal_stages_and_one_slow_iteration_are_no_stragglers() -> None:
    stragglers, lines = Stragglers(), []
    for look in range(6):
        times = {rank: 5 * look * (0.1 + 0.02 * rank) + (5.0 if rank == 1 and look >= 3 else 0.0) for rank in range(4)}
        lines += stragglers.look({rank: beat(num_iterations=5 * look, busy_s=busy_s) for rank, busy_s in times.items()})
    assert lines == []
