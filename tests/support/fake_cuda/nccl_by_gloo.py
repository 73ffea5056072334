"""Process groups of "nccl" made of gloo's, which say that they are NCCL's.

What this cannot show is all that NCCL does on streams of its own: here `Work.wait` blocks the host, a send is buffered, and every
group has its own order. gloo's copies of results are not those of NCCL, so ops inside `Work.wait` are not seen; nor are those of
torch's coalescing manager, which waits in the same way.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.support.fake_cuda.tensors import DeviceMode

__all__ = ["nccl_by_gloo"]


class _Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas=None, min_ctas=None, cga_cluster_size=None)
        self._timeout: Any = None


def nccl_by_gloo() -> list[tuple[Any, str, Any]]:
    """(owner, name, replacement) of what makes, names and waits for process groups."""
    served: set[Any] = set()
    real_init, real_new, real_get = c10d.init_process_group, c10d.new_group, c10d.get_backend
    real_wait = dist.Work.wait

    def wait(self: dist.Work, *args: Any, **kwargs: Any) -> Any:
        with DeviceMode.in_backend():
            return real_wait(self, *args, **kwargs)

    @functools.wraps(real_init)
    def init_process_group(backend: Any = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        real_init("gloo" if backend == "nccl" else backend, *args, **kwargs)
        if backend == "nccl":
            served.add(c10d.GroupMember.WORLD)

    @functools.wraps(real_new)
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **kwargs: Any) -> Any:
        is_nccl = backend == "nccl" or (backend is None and c10d.GroupMember.WORLD in served)
        if pg_options is not None and not (is_nccl and isinstance(pg_options, _Options)):
            raise TypeError(f"{pg_options} are no options of the backend")
        group = real_new(ranks, timeout, "gloo" if backend == "nccl" else backend, **kwargs)
        if is_nccl:
            served.add(group)
        return group

    @functools.wraps(real_get)
    def get_backend(group: Any = None) -> Any:
        return "nccl" if (group or c10d.GroupMember.WORLD) in served else real_get(group)

    functions = (init_process_group, new_group, get_backend)
    return [
        *((owner, function.__name__, function) for owner in (c10d, dist) for function in functions),
        (dist.Work, "wait", wait),
        (dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options)),
    ]
