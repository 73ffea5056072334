"""The store at which the ranks of a job meet, before there is a process group. torch is imported inside the functions."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

from megatron.zerobubble.job.key_value_store import Store
from megatron.zerobubble.job.launch import Launch, has_agent_store, has_master, use_agent_store

__all__ = ["Connection", "connect", "job_store", "share_store"]


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
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    store: Any
    if has_agent_store():
        store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size))
    else:  # the first rank would open the port on which the script's process group wants to listen
        store = dist.HashStore()  # type: ignore[attr-defined]
    shared: Any = c10d.PrefixStore(_of_attempt("job", launch), store)
    return shared


def share_store(launch: Launch) -> Store:
    """A store for processes that train nothing themselves and start the ranks of several jobs, one after the other.

    Without torchrun rank 0 hosts it on MASTER_PORT. The ranks of the jobs connect to it as they do to torchrun's. All ranks must
    call this.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    store: Any
    if launch.world_size == 1 and not has_master():
        store = dist.HashStore()  # type: ignore[attr-defined]
    else:
        store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size))
        use_agent_store()
    shared: Any = c10d.PrefixStore("jobs", store)
    return shared


def connect(launch: Launch, *, timeout_minutes: float) -> Connection:
    """Meet the other ranks at the job's store. All ranks must call this, before `join_job`.

    Args:
        launch: which rank this process is.
        timeout_minutes: how long to wait for the store.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    store: Any
    if launch.world_size == 1 and not has_master():
        store = dist.HashStore()  # type: ignore[attr-defined]
    else:
        timeout = timedelta(minutes=timeout_minutes)
        store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
    return Connection(store, launch)


def _of_attempt(name: str, launch: Launch) -> str:
    """The name of a job's keys: torchrun hosts one store for all of its attempts, where keys of those that failed remain."""
    return name if launch.restart_count == 0 else f"{name}/restart {launch.restart_count}"
