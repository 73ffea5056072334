"""Process groups of links: with NCCL, transfers on streams of high priority, and on no more of the GPU than they are given.

A send or receive on NCCL is a kernel that spins until the other rank's kernel runs. Its blocks (CTAs) take streaming
multiprocessors from the GEMMs beside it, and where all of these are busy it starts late, and with it the next op of another rank.
A high priority lets its blocks start first; a limit of CTAs bounds what they take: docs/benchmarks/settled.md has the
reasons for the default, and what passes lose beside held multiprocessors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

__all__ = ["chosen_ctas", "is_on_one_host", "link_group"]

_ON_ONE_HOST = 4
"""Most CTAs of a transfer on NVLink, by default. NCCL takes up to 16 for a large message."""

_log = logging.getLogger(__name__)


def chosen_ctas(given: int | None, *, is_one_host: bool) -> int | None:
    """Most CTAs of a transfer; None leaves it to NCCL. A number that NCCL changes is logged.

    Args:
        given: the user's; None: the default.
        is_one_host: whether all ranks of the pipeline are on one host. Between hosts NCCL takes a few per NIC.
    """
    if given is None:
        return _ON_ONE_HOST if is_one_host else None
    if given & (given - 1):
        used = 1 << given.bit_length()
        _log.warning("--zero-bubble-p2p-max-ctas is %d, no power of two: NCCL takes %d CTAs for a transfer", given, used)
    return given


def is_on_one_host(pipeline: Sequence[int], host: str) -> bool:
    """Whether all ranks of this rank's pipeline are on one host. Every rank of the world must call it.

    Where communicators are opened eagerly, one of the whole world serves a link of every pipeline, and its ranks need the same
    options: then it is whether every pipeline is on one host.

    Args:
        pipeline: the global ranks of the pipeline.
        host: this rank's host, by a name that no other host has.
    """
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    is_own = len({hosts[rank] for rank in pipeline}) == 1
    if not _opens_eagerly():
        return is_own
    everybody: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(everybody, is_own)
    return all(everybody)


def _opens_eagerly() -> bool:
    """Whether torch opens the communicator of a group when it is made."""
    return getattr(dist.group.WORLD, "bound_device_id", None) is not None


def link_group(max_ctas: int | None) -> dist.ProcessGroup | None:
    """A new process group over the world for links. Every rank of the world must call it at the same point.

    Args:
        max_ctas: most CTAs of a transfer on NCCL; None leaves it to NCCL.
    """
    return dist.new_group(pg_options=_options(max_ctas))


def _options(max_ctas: int | None) -> Any | None:
    """NCCL's options; None for other backends. They replace the defaults of `new_group`."""
    if dist.get_backend() != "nccl":
        return None
    options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options
