"""Copies at peers, on four ranks: kept, found, sent to machines that lack them, and training continues bit for bit.

A folder per machine stands for its host memory. What it cannot show: that the machines' memory is not shared, and a network.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.training.restarts import in_memory
from megatron.zerobubble.training.restarts.copies import Copies, CopyRecord
from megatron.zerobubble.training.restarts.in_memory import InMemoryCheckpoints
from megatron.zerobubble.training.restarts.local_state import state_bytes
from tests.support.ranks import RankPool
from tests.support.training_states import train, training_state_of

DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
P2D2 = ["--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"]
LAYOUTS = {
    "replicas": [*P2D2, "--bf16", "--enable-zero-bubble"],
    "overlapped": [*P2D2, "--overlap-grad-reduce", "--overlap-param-gather", "--bf16"],
    "V": ["--pipeline-model-parallel-size", "4", "--zero-bubble-v-schedule", "--enable-optimizer-post-validation", "--fp16"],
    "tensor": ["--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2", "--optimizer", "sgd"],
}


def folder_of(rank: int, root: str, ranks_per_machine: int) -> Path:
    return Path(root) / f"machine{rank // ranks_per_machine}"


@contextmanager
def attempt(
    rank: int, flags: Sequence[str], root: str, *, ranks_per_machine: int = 2
) -> Iterator[tuple[Any, InMemoryCheckpoints]]:
    with training_state_of(rank, [*DROPOUT, *flags]) as (training_state, _):
        yield training_state, InMemoryCheckpoints(training_state, folder_of(rank, root, ranks_per_machine), job="job")


def kept(rank: int, flags: Sequence[str], root: str) -> list[float]:
    """Two sets are kept; losses of the iterations after the second."""
    with attempt(rank, flags, root) as (training_state, memory):
        memory.check_room()
        for iteration in (1, 2):
            train(training_state, first=iteration, last=iteration)
            assert memory.keep(iteration=iteration, consumed_samples=8 * iteration)
        dist.barrier()
        (own,) = folder_of(rank, root, 2).glob(f"state-0000002-of-{rank:05d}-by-{rank:05d}.pt")
        assert own.stat().st_size < 1.5 * state_bytes(training_state) + 400_000, "no tensor drags its buffer along"
        return train(training_state, first=3, last=4)


def continued(rank: int, flags: Sequence[str], root: str) -> tuple[int, list[float]]:
    """How many states were sent, and losses of the iterations after what was found, with other weights before."""
    with attempt(rank, flags, root) as (training_state, memory):
        train(training_state, first=7, last=7)
        found, why = memory.find()
        assert found is not None, why
        assert (found.iteration, found.consumed_samples) == (2, 16)
        num_sent = memory.restore(found)
        memory.remove(but=2)
        return num_sent, train(training_state, first=3, last=4)


def reason(rank: int, flags: Sequence[str], root: str) -> str:
    with attempt(rank, flags, root) as (_, memory):
        found, why = memory.find()
        assert found is None
        return why


def names(root: Path, machine: int) -> list[str]:
    """ "owner@holder" of each copy on a machine, all of the same iteration."""
    parts = [path.stem.split("-") for path in sorted((root / f"machine{machine}").glob("*.json"))]
    assert {each[1] for each in parts} <= {"0000002"}
    return [f"{int(each[3])}@{int(each[5])}" for each in parts]


@pytest.mark.sampled(0.3)
@pytest.mark.parametrize("layout", ["overlapped", "V", "tensor"])
def test_training_continues_bit_for_bit(four_ranks: RankPool, tmp_path: Path, layout: str) -> None:
    expected = four_ranks.run(kept, LAYOUTS[layout], str(tmp_path))
    assert names(tmp_path, 0) + names(tmp_path, 1) == ["0@0", "1@1", "2@0", "3@1", "0@2", "1@3", "2@2", "3@3"]
    assert four_ranks.run(continued, LAYOUTS[layout], str(tmp_path)) == [(0, losses) for losses in expected]


def test_lost_and_damaged_copies_come_from_peers(four_ranks: RankPool, tmp_path: Path) -> None:
    flags = LAYOUTS["replicas"]
    expected = four_ranks.run(kept, flags, str(tmp_path))
    damaged = tmp_path / "machine0" / "state-0000002-of-00001-by-00001.pt"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert four_ranks.run(continued, flags, str(tmp_path)) == [(1, losses) for losses in expected]
    shutil.rmtree(tmp_path / "machine1")
    assert four_ranks.run(continued, flags, str(tmp_path)) == [(2, losses) for losses in expected], "a machine was replaced"
    other = [*flags, "--num-layers", "4"]
    assert set(four_ranks.run(reason, other, str(tmp_path))) == {"the copies in memory are of another layout or other flags"}
    shutil.rmtree(tmp_path / "machine0")  # before the one that was replaced has copies of it again
    why = "the state of rank 0 after iteration 2 is in no memory, or damaged there"
    assert set(four_ranks.run(reason, flags, str(tmp_path))) == {why}


@contextmanager
def full_memory(name: str) -> Iterator[None]:
    """Writing fails: any file in the middle, for which a limit on file sizes stands, or only the copy that a peer sends."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with pytest.MonkeyPatch.context() as patch:
        if name == "own":
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        else:
            patch.setattr(Copies, "take", received_in_vain)
        yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    signal.signal(signal.SIGXFSZ, old)


def received_in_vain(copies: Copies, record: CopyRecord, *, holder: int, write: Callable[[None], object]) -> str:
    """Stands for `Copies.take` where no file can be opened."""
    write(None)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def kept_with_full_memory(rank: int, root: str) -> list[bool]:
    """What `keep` returns before, while and after rank 2's machine has no memory left, for its own state or for its peer's."""
    with attempt(rank, P2D2, root, ranks_per_machine=1) as (training_state, memory):
        train(training_state, first=1, last=1)
        answers = [memory.keep(iteration=1, consumed_samples=8)]
        for name in ("own", "peer's"):
            with full_memory(name) if rank == 2 else nullcontext():
                answers.append(memory.keep(iteration=2, consumed_samples=16))
            found, _ = memory.find()
            assert found is not None
            assert found.iteration == 1
        return [*answers, memory.keep(iteration=2, consumed_samples=16)]


def test_full_memory_ends_nothing(four_ranks: RankPool, tmp_path: Path) -> None:
    answers = four_ranks.run(kept_with_full_memory, str(tmp_path))
    assert len(set(map(tuple, answers))) == 1, "all ranks agree"
    assert answers[0] == [True, False, False, True]
    assert {path.name[:13] for path in tmp_path.glob("machine*/state-*")} == {"state-0000002"}


def refused(rank: int, root: str) -> str:
    with attempt(rank, P2D2, root) as (_, memory), pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_memory, "_free_bytes", lambda folder: 5000 if rank == 3 else 10**12)
        with pytest.raises(ConfigError) as refusal:
            memory.check_room()
        return str(refusal.value)


def test_what_does_not_fit_is_refused_at_the_start(four_ranks: RankPool, tmp_path: Path) -> None:
    (said,) = set(four_ranks.run(refused, str(tmp_path)))
    assert said.startswith(
        "--in-memory-checkpoint-interval: the copies of the ranks on the machine of rank 3 need 0.00 GiB of host"
    )
    assert "\n" not in said
