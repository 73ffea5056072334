"""One gloo device per process, in place of one per process group.

A device of gloo is a thread that polls the sockets of its groups and wakes up a hundred times a second. torch gives each group a
device of its own, and a rank has dozens of groups (megatron-core makes one per kind of parallelism, and the links of a pipeline
are groups, too): where ranks share cores, idle groups take a noticeable share of them (ADR 8 has the numbers). Groups that are
made inside `one_device_per_process` share the device of their process.

The device is made with the first group and belongs to the process that made it: a fork leaves its thread behind, so a forked
process makes another. A group keeps its own worker threads and timeout. torch offers neither option in public; a release
without the private one leaves each group its own device, and one line in the log says so.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

__all__ = ["one_device_per_process", "shared_device"]

_log = logging.getLogger(__name__)

_NEEDED = ("create_device", "create_default_device", "_Options")
_OPTIONS = ("_devices", "_threads", "_timeout")


@contextlib.contextmanager
def one_device_per_process() -> Iterator[None]:
    """A context in which new gloo groups share one device. They may outlive it."""
    replacements = shared_device()
    undo = [(owner, name, inspect.getattr_static(owner, name)) for owner, name, _ in replacements]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)
    try:
        yield
    finally:
        for owner, name, original in undo:
            setattr(owner, name, original)


def shared_device() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, replacement): what makes new gloo groups share a device; nothing where torch does not allow it."""
    groups: Any = getattr(c10d, "ProcessGroupGloo", None)
    if groups is None:  # a torch without gloo
        return []
    options: Any = getattr(groups, "_Options", None)
    missing = [name for owner, names in ((groups, _NEEDED), (options, _OPTIONS)) for name in names if not hasattr(owner, name)]
    if missing:
        _log.warning(
            "gloo: this torch (%s) has no ProcessGroupGloo %s, so each process group has a polling thread of its own, and ranks "
            "that share cores are slower",
            torch.__version__,
            ", ".join(missing),
        )
        return []
    return [(groups, "__init__", _with_shared_device(groups.__init__))]


def _with_shared_device(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of gloo groups. Where options are given, they hold."""
    devices_of: dict[int, list[Any]] = {}  # by process id; a parent's are kept, because to free one is to wait for its thread

    @functools.wraps(original)
    def initialize(group: Any, store: Any, rank: int, size: int, *options: Any, timeout: timedelta | None = None) -> None:
        if options and not isinstance(options[0], timedelta):
            return original(group, store, rank, size, *options)
        if os.getpid() not in devices_of:
            devices_of[os.getpid()] = _devices(type(group))
        shared = type(group)._Options()
        shared._devices = devices_of[os.getpid()]
        shared._threads = 2 * len(shared._devices)  # as torch
        given = options[0] if options else timeout
        if given is not None:
            shared._timeout = given
        return original(group, store, rank, size, shared)

    return initialize


def _devices(groups: Any) -> list[Any]:
    """A device for each network interface that a group of torch's would use."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [groups.create_device(interface=name) for name in interfaces] or [groups.create_default_device()]
