"""Checkpoints in host memory (--in-memory-checkpoint-interval): each rank's state, kept by itself and by a peer.

Between two iterations each rank writes its state into a file in its machine's tmpfs, sends it to its peer and receives that of
another one, over a gloo process group of its own. Once every rank has its new copies whole, older ones are removed: at any moment
there is a complete set. A copy that cannot be written ends nothing: the set before it remains.

After a restart all ranks list what their machine has, agree on the newest complete set (see `agreement`), and those whose machine
lacks their state receive it from one that has it. Runs on GPUs the same way, from a copy in host memory; not run on a GPU yet.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.zerobubble.errors import CheckpointError, ConfigError
from megatron.zerobubble.training.restarts.agreement import Agreement, Offer, agree
from megatron.zerobubble.training.restarts.copies import Copies, CopyRecord
from megatron.zerobubble.training.restarts.local_state import fingerprint, load_state, save_state, state_bytes
from megatron.zerobubble.training.restarts.peers import peers
from megatron.zerobubble.training.step import TrainingState

__all__ = ["InMemoryCheckpoints"]

_log = logging.getLogger(__name__)

_MESSAGE_BYTES = 16 * 1024 * 1024
_GIB = 1024**3


class _Part(NamedTuple):
    """One direction of a transfer."""

    stream: IO[bytes] | None
    """Where the bytes come from or go to; None drops them."""
    num_bytes: int
    """How many there are."""
    rank: int
    """The other rank."""


class InMemoryCheckpoints:
    """The copies of a job with --in-memory-checkpoint-interval. Every rank needs one, and all must call the same methods.

    Args:
        training_state: what is kept and restored.
        folder: of the job on this machine, in host memory.
        job: id of the job.
    """

    def __init__(self, training_state: TrainingState, folder: Path, *, job: str) -> None:
        self._training_state = training_state
        self._copies = Copies(folder)
        self._job = job
        minutes = training_state.settings.parallel.distributed_timeout_minutes
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        host = f"{socket.gethostname()}:{folder.resolve()}"
        rings = (
            tuple(dist.get_process_group_ranks(parallel_state.get_data_parallel_group())),
            tuple(dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())),
        )
        everywhere = self._gather((host, rings, fingerprint(training_state)))
        self._hosts = [each[0] for each in everywhere]
        self._fingerprints = [each[2] for each in everywhere]
        data, pipeline = (sorted({each[1][kind] for each in everywhere}) for kind in range(2))
        self._peers = peers(self._hosts, data_parallel=data, pipelines=pipeline)
        self._has_failed = False

    def check_room(self) -> None:
        """Raise ConfigError on all ranks if two copies of all states of a machine do not fit into its free memory."""
        sizes = self._gather(state_bytes(self._training_state))
        local = [rank for rank, host in enumerate(self._hosts) if host == self._host]
        held = [owner for owner, peer in enumerate(self._peers) if peer in local and peer != owner]
        needed = 2 * sum(sizes[rank] for rank in (*local, *held)) + sum(sizes[rank] for rank in local)
        rooms = self._gather((needed, _free_bytes(self._copies.folder) + self._copies.num_bytes))
        for rank, (needed, free) in enumerate(rooms):
            if needed > free:
                raise ConfigError(
                    f"--in-memory-checkpoint-interval: the copies of the ranks on the machine of rank {rank} need "
                    f"{needed / _GIB:.2f} GiB of host memory, and {free / _GIB:.2f} GiB are free in "
                    f"{self._copies.folder.parent}; use fewer ranks per machine, a larger tmpfs, or checkpoints with --save"
                )

    def keep(self, *, iteration: int, consumed_samples: int) -> bool:
        """Keep the state of all ranks; return whether that succeeded. All ranks must call this.

        Args:
            iteration: iterations done. The optimizer step of the last one must be validated.
            consumed_samples: samples consumed so far by all ranks together.
        """
        record = CopyRecord(
            job=self._job,
            iteration=iteration,
            consumed_samples=consumed_samples,
            owner=self._rank,
            fingerprint=self._fingerprints[self._rank],
        )
        written: tuple[str, CopyRecord] | str
        try:
            written = self._copies.add(record, holder=self._rank, write=partial(save_state, self._training_state))
        except OSError as error:
            written = str(error)
        everywhere = self._gather(written)
        failed = {rank: each for rank, each in enumerate(everywhere) if isinstance(each, str)}
        if not failed:
            failed = {rank: why for rank, why in enumerate(self._gather(self._exchange(everywhere))) if why is not None}
        if failed:
            self._copies.discard(iteration, holder=self._rank)
            self._report(iteration, failed)
        elif self._is_first_on_host:
            self._copies.remove(until=iteration)
        return not failed

    def find(self) -> tuple[Agreement | None, str]:
        """The newest complete set that an earlier attempt left, or None and why there is none. All ranks must call this."""
        local = [rank for rank, host in enumerate(self._hosts) if host == self._host]
        offers = []
        for name in self._copies.names()[local.index(self._rank) :: len(local)]:
            try:
                record = self._copies.record(name)
            except CheckpointError as error:
                _log.warning("%s in %s is not used: %s", name, self._copies.folder, error)
            else:
                offers.append(Offer(name=name, record=record, rank=self._rank, host=self._host))
        together = [offer for each in self._gather(offers) for offer in each]
        return agree(together, job=self._job, hosts=self._hosts, fingerprints=self._fingerprints)

    def restore(self, agreement: Agreement) -> int:
        """Load the state of an agreement on every rank; return how many came from other machines. All ranks must call this."""
        name = agreement.sources[self._rank].name
        for rank, source in enumerate(agreement.sources):
            if source.is_sent and self._rank == source.rank:
                with self._copies.path(source.name).open("rb") as stream:
                    self._transfer(_Part(stream, source.record.num_bytes, rank), None)
            elif source.is_sent and self._rank == rank:
                name = self._receive(source.record, source.rank, None)
        load_state(self._training_state, self._copies.path(name))
        return sum(source.is_sent for source in agreement.sources)

    def remove(self, *, but: int | None = None) -> None:
        """Remove all copies, but those of iteration `but`, once no rank needs them. All ranks must call this."""
        dist.barrier(group=self._group)
        if self._is_first_on_host:
            self._copies.remove(but=but)
        dist.barrier(group=self._group)

    @property
    def _host(self) -> str:
        return self._hosts[self._rank]

    @property
    def _is_first_on_host(self) -> bool:
        return self._hosts.index(self._host) == self._rank

    def _gather(self, value: Any) -> list[Any]:
        everywhere: list[Any] = [None] * self._world_size
        dist.all_gather_object(everywhere, value, group=self._group)
        return everywhere

    def _exchange(self, written: list[tuple[str, CopyRecord]]) -> str | None:
        """Send this rank's new copy to its peer and receive another's; return why that failed, or None."""
        owner, peer = self._peers.index(self._rank), self._peers[self._rank]
        if peer == self._rank:
            return None
        name, own = written[self._rank]
        with self._copies.path(name).open("rb") as stream:
            try:
                self._receive(written[owner][1], owner, _Part(stream, own.num_bytes, peer))
            except (OSError, CheckpointError) as error:
                return str(error)
        return None

    def _receive(self, record: CopyRecord, source: int, sent: _Part | None) -> str:
        """Receive a copy from rank `source` while `sent` is sent; return its name. Raises what `Copies.take` does."""
        return self._copies.take(
            record, holder=self._rank, write=lambda stream: self._transfer(sent, _Part(stream, record.num_bytes, source))
        )

    def _transfer(self, sent: _Part | None, received: _Part | None) -> None:
        """Send and receive at the same time. A write that fails is raised at the end, once all messages have arrived."""
        failure: OSError | None = None
        sizes = [0 if part is None else part.num_bytes for part in (sent, received)]
        buffers = [torch.empty(min(_MESSAGE_BYTES, size), dtype=torch.uint8) for size in sizes]
        for done in range(0, max(sizes), _MESSAGE_BYTES):
            outgoing, incoming = (buffer[: max(0, size - done)] for buffer, size in zip(buffers, sizes, strict=True))
            works = []
            if sent is not None and sent.stream is not None and len(outgoing):
                sent.stream.readinto(outgoing.numpy())  # type: ignore[attr-defined]
                works.append(dist.isend(outgoing, sent.rank, group=self._group))
            if received is not None and len(incoming):
                works.append(dist.irecv(incoming, received.rank, group=self._group))
            for work in works:
                assert work is not None
                work.wait()
            if received is not None and received.stream is not None and len(incoming) and failure is None:
                try:
                    received.stream.write(incoming.numpy().data)
                except OSError as error:
                    failure = error
        if failure is not None:
            raise failure

    def _report(self, iteration: int, failed: dict[int, str]) -> None:
        """Log the first failure to keep a set of copies."""
        if self._rank == 0 and not self._has_failed:
            rank, why = next(iter(failed.items()))
            _log.warning(
                "no copies of iteration %d are kept in memory: rank %d: %s; training goes on, with the copies before it",
                *(iteration, rank, why),
            )
        self._has_failed = True


def _free_bytes(folder: Path) -> int:
    """Bytes that may be written to `folder`, in host memory: free in the file system, and in the machine."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            free = min(free, 1024 * int(line.split()[1]))
    return free
