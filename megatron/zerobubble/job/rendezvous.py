"""The store at which the ranks of a job meet, before there is a process group. torch is imported inside the functions."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any, cast

from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.job.key_value_store import Store
from megatron.zerobubble.job.launch import Launch, has_agent_store, master, store_name, use_agent_store
from megatron.zerobubble.job.meeting import Attempt, meet, new_id, refuse

__all__ = ["Connection", "announce_exit", "connect", "share_store"]

_ANNOUNCE_S = 30.0
"""Seconds that a rank which ends before it joins the job tries to reach the store."""
_TIMEOUT_S = 600.0
"""Seconds to wait for the store, and for the last rank."""


class Connection:
    """A rank's connection to the store at which the ranks met, before there is a process group.

    Args:
        store: torch's, with all keys of the job.
        attempt: which attempt of the job this is.
    """

    def __init__(self, store: Any, attempt: Attempt) -> None:
        self._store, self.attempt = store, attempt

    def of(self, name: str = "job") -> Store:
        """The keys of one name and this attempt."""
        return cast("Store", _part(self._store, f"{name}/{self.attempt.name}"))

    def use_for_process_group(self, launch: Launch) -> None:
        """Let `init_process_group` of a script use keys of this attempt, from now on in this process.

        By itself it finds those of earlier attempts, which torchrun's store still has, and waits for ranks that are gone.
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
                store, init_method, world_size, rank = self.of("process_group"), None, launch.world_size, launch.rank
            original(backend, init_method, timeout, world_size, rank, store, **others)

        dist.init_process_group = init_process_group  # type: ignore[assignment]


def connect(launch: Launch, *, hosts_store: bool = True) -> Connection:
    """Connect to the job's store, and wait until all ranks have. All ranks must call this, or `announce_exit`.

    Args:
        launch: which rank this process is.
        hosts_store: whether rank 0 hosts a store where torchrun does not; without one a rank has a store for itself, because the
            first rank would otherwise open the port on which a script's process group wants to listen.

    Raises:
        ConfigError: the store cannot be reached, a rank ended before or did not come.
    """
    import torch.distributed as dist

    if not (has_agent_store() or (hosts_store and (launch.world_size > 1 or master() is not None))):
        return Connection(dist.HashStore(), Attempt("alone", new_id()))  # type: ignore[attr-defined]
    store = _reach(launch, _TIMEOUT_S)
    try:
        return Connection(store, meet(_part(store, "meeting"), launch, timeout_s=_TIMEOUT_S))
    except dist.DistError as error:
        raise ConfigError(f"{store_name()} is gone: see the output of that host ({_first_line(error)})") from error


def announce_exit(launch: Launch, error: UserError) -> None:
    """Give the reason why this rank ends before it joins the job to ranks on other hosts, which would wait for it.

    Args:
        launch: which rank this process is.
        error: the reason.
    """
    if launch.world_size == launch.ranks_on_host:
        return  # torchrun ends them
    import torch.distributed as dist

    try:
        refuse(_part(_reach(launch, _ANNOUNCE_S), "meeting"), launch, str(error))
    except (ConfigError, dist.DistError):
        return  # the store is gone, and with it the job


def share_store(launch: Launch) -> Store:
    """A store for processes that train nothing themselves and start the ranks of several jobs, one after the other.

    Without torchrun rank 0 hosts it on MASTER_PORT. The ranks of the jobs connect to it as they do to torchrun's. All ranks must
    call this.
    """
    connection = connect(launch)
    if launch.world_size > 1 or master() is not None:
        use_agent_store()
    return connection.of("jobs")


def _reach(launch: Launch, timeout_s: float) -> Any:
    """The job's part of the store of the rendezvous: keys of all of its attempts. Raises ConfigError."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=timeout_s)
    address = master() if has_agent_store() else None
    try:
        if address is not None:  # torch before 2.13 would put the restart count of this host's torchrun before each key
            tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]
            store = tcp_store(*address, launch.world_size, is_master=False, timeout=timeout)
        else:
            store, _, _ = next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))
    except (dist.DistError, OSError, ValueError) as error:
        raise ConfigError(f"{store_name()} cannot be reached within {timeout_s:.0f} s ({_first_line(error)})") from error
    return _part(store, f"zerobubble/{launch.run_id}/{launch.world_size}")


def _part(store: Any, name: str) -> Any:
    from torch.distributed import distributed_c10d as c10d

    return c10d.PrefixStore(name, store)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
