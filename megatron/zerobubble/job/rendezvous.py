"""The store at which the ranks of a job meet, before there is a process group. torch is imported inside the functions."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any, cast

from megatron.zerobubble.job.key_value_store import Store
from megatron.zerobubble.job.launch import Launch, has_agent_store, has_master, use_agent_store

__all__ = ["Connection", "connect", "job_store", "meet_in_attempt", "share_store"]


class Connection:
    """A rank's connection to the store at which the ranks meet, before there is a process group.

    Args:
        store: torch's.
        launch: which attempt of the job this is.
    """

    def __init__(self, store: Any, launch: Launch) -> None:
        self.store = store
        self._launch = launch

    def of(self, name: str = "job") -> Store:
        """The part of the store that belongs to a job."""
        from torch.distributed import distributed_c10d as c10d

        shared: Any = c10d.PrefixStore(_of_attempt(name, self._launch), self.store)  # `clone` is missing in torch's stubs
        return cast("Store", shared)


def job_store(launch: Launch) -> Store:
    """The store that ranks share without a process group: torchrun's own. Without torchrun, one for this rank alone."""
    # The first rank would otherwise open the port on which the script's process group wants to listen.
    return Connection(_store(launch, is_shared=has_agent_store()), launch).of()


def share_store(launch: Launch) -> Store:
    """A store for processes that train nothing themselves and start the ranks of several jobs, one after the other.

    Without torchrun rank 0 hosts it on MASTER_PORT. The ranks of the jobs connect to it as they do to torchrun's. All ranks must
    call this.
    """
    from torch.distributed import distributed_c10d as c10d

    is_shared = launch.world_size > 1 or has_master()
    store = _store(launch, is_shared=is_shared)
    if is_shared:
        use_agent_store()
    shared: Any = c10d.PrefixStore("jobs", store)
    return cast("Store", shared)


def meet_in_attempt(launch: Launch) -> None:
    """Let `init_process_group` of a script, from now on in this process, use the part of the store that belongs to this attempt.

    Several jobs that meet one after the other in one store would find each other's keys.
    """
    import torch.distributed as dist

    if not has_agent_store():
        return
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(
        backend: Any = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        **others: Any,
    ) -> None:
        if store is None and init_method in (None, "env://"):
            store = Connection(_store(launch, is_shared=True), launch).of("process_group")
            init_method, world_size, rank = None, launch.world_size, launch.rank
        original(backend, init_method, timeout, world_size, rank, store, **others)

    dist.init_process_group = init_process_group  # type: ignore[assignment]


def connect(launch: Launch, *, timeout_minutes: float) -> Connection:
    """Connect to the job's store and wait until all ranks have. All ranks must call this, before `join_job`.

    Args:
        launch: which rank this process is.
        timeout_minutes: how long to wait for the store.
    """
    is_shared = launch.world_size > 1 or has_master()
    return Connection(_store(launch, is_shared=is_shared, timeout=timedelta(minutes=timeout_minutes)), launch)


def _store(launch: Launch, *, is_shared: bool, **options: timedelta) -> Any:
    """The store of the rendezvous, or one for this rank alone."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    if not is_shared:
        return dist.HashStore()  # type: ignore[attr-defined]
    store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, **options))
    return store


def _of_attempt(name: str, launch: Launch) -> str:
    """The name of a job's keys: torchrun hosts one store for all of its attempts, where keys of those that failed remain."""
    return name if launch.restart_count == 0 else f"{name}/restart {launch.restart_count}"
