"""The copies in a folder: whole or not there, whoever dies, and whatever becomes of them."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.restarts import copies as module
from megatron.zerobubble.training.restarts.copies import Copies, CopyRecord

STATE = bytes(range(256)) * 40
RECORD = CopyRecord(job="job", iteration=40, consumed_samples=320, owner=3, fingerprint="f")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 4096)


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    return Copies(tmp_path / "job")


def write(stream: IO[bytes] | None) -> None:
    if stream is not None:
        stream.write(STATE)


def files(copies: Copies) -> set[str]:
    return {path.name for path in copies.folder.iterdir()}


def test_a_copy_is_found_as_it_was_written(copies: Copies) -> None:
    name, record = copies.add(RECORD, holder=3, write=write)
    assert name == "state-0000040-of-00003-by-00003"
    assert copies.names() == [name]
    assert copies.record(name) == record
    assert (record.owner, record.iteration, record.num_bytes, len(record.digests)) == (3, 40, len(STATE), 3)
    assert copies.path(name).read_bytes() == STATE
    assert copies.num_bytes > len(STATE)
    assert copies.folder.stat().st_mode & 0o077 == 0, "other users cannot read it"


def test_a_copy_that_was_sent_is_compared_with_the_senders_record(copies: Copies) -> None:
    name, record = copies.add(RECORD, holder=3, write=write)
    taken = copies.take(record, holder=1, write=write)
    assert copies.record(taken) == record
    with pytest.raises(CheckpointError, match="its bytes 4,096 to 8,191 are not those that were saved"):
        copies.take(record, holder=2, write=lambda stream: stream and stream.write(STATE[:5000] + b"?" + STATE[5001:]))
    assert copies.names() == [taken, name]
    assert len(files(copies)) == 4, "nothing is left of it"


def flipped_bit(copies: Copies, name: str) -> None:
    held = bytearray(copies.path(name).read_bytes())
    held[5000] ^= 4
    copies.path(name).write_bytes(held)


def cut_short(copies: Copies, name: str) -> None:
    os.truncate(copies.path(name), 5000)


def lost(copies: Copies, name: str) -> None:
    copies.path(name).unlink()


def cut_record(copies: Copies, name: str) -> None:
    path = copies.folder / f"{name}.json"
    path.write_text(path.read_text()[:100])


def changed_record(copies: Copies, name: str) -> None:
    path = copies.folder / f"{name}.json"
    path.write_text(path.read_text().replace('"iteration": 40', '"iteration": 50'))


def of_another_iteration(copies: Copies, name: str) -> None:
    newer = CopyRecord(job="job", iteration=50, consumed_samples=400, owner=3, fingerprint="f")
    other, _ = copies.add(newer, holder=3, write=lambda stream: stream.write(STATE[::-1]))
    copies.path(other).replace(copies.path(name))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flipped_bit, "its bytes 4,096 to 8,191 are not those that were saved"),
        (cut_short, "it has 5,000 bytes instead of 10,240"),
        (lost, "it cannot be read: No such file"),
        (cut_record, "its record is damaged"),
        (changed_record, "its record is damaged"),
        (of_another_iteration, "are not those that were saved"),
    ],
)
def test_a_damaged_copy_is_not_used(copies: Copies, damage: Callable[[Copies, str], None], reason: str) -> None:
    name, _ = copies.add(RECORD, holder=3, write=write)
    damage(copies, name)
    with pytest.raises(CheckpointError, match=reason):
        copies.record(name)


def test_a_rank_that_dies_while_it_writes_leaves_no_copy(copies: Copies) -> None:
    before, _ = copies.add(RECORD, holder=3, write=write)
    newer = CopyRecord(job="job", iteration=50, consumed_samples=400, owner=3, fingerprint="f")

    def die(stream: IO[bytes]) -> None:
        stream.write(STATE[:6000])
        stream.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        copies.add(newer, holder=3, write=die)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert "state-0000050-of-00003-by-00003.pt.writing" in files(copies)
    assert copies.names() == [before]
    copies.remove(but=40)
    assert files(copies) == {f"{before}.pt", f"{before}.json"}, "and the next attempt clears what it left"


def test_full_memory_leaves_the_copies_before(copies: Copies) -> None:
    """The limit of the size of a file stands for a full tmpfs: a write fails in the middle."""
    before, record = copies.add(RECORD, holder=3, write=write)
    newer = CopyRecord(job="job", iteration=50, consumed_samples=400, owner=3, fingerprint="f")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, limit[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            copies.add(newer, holder=3, write=write)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, old)
    assert files(copies) == {f"{before}.pt", f"{before}.json"}
    assert copies.record(before) == record


def test_what_cannot_be_written_is_received_all_the_same(copies: Copies) -> None:
    """Or the rank that sends it would wait."""
    (copies.folder / "state-0000040-of-00003-by-00001.pt.writing").mkdir()
    streams: list[object] = []
    with pytest.raises(OSError, match="directory"):
        copies.take(RECORD, holder=1, write=streams.append)
    assert streams == [None]


def test_older_copies_are_removed_and_other_files_are_not(copies: Copies) -> None:
    for iteration in (40, 50, 60):
        copies.add(
            CopyRecord(job="job", iteration=iteration, consumed_samples=0, owner=0, fingerprint="f"), holder=0, write=write
        )
    (copies.folder / "job").write_text("job")
    copies.remove(until=60)
    assert copies.names() == ["state-0000060-of-00000-by-00000"]
    copies.discard(60, holder=1)
    assert copies.names() == ["state-0000060-of-00000-by-00000"], "of another holder"
    copies.discard(60, holder=0)
    copies.remove()
    assert files(copies) == {"job"}
