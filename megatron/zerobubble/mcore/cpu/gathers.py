"""On gloo, one gather of weights at a time in a process group.

Two coalesced all-gathers that are under way in one group of gloo end some processes with SIGSEGV or SIGABRT inside of torch
2.13's own threads: thousands of small ones do so within half a minute, without megatron-core. With `--overlap-param-gather`
megatron-core has several under way, one a chunk. So the next one of a group waits for the one before, which every member of the
group starts in the same order. Passes still run beside it. NCCL orders them itself and is left alone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any


def one_at_a_time(start_param_sync: Callable[..., None]) -> Callable[..., None]:
    """A method of megatron-core's bucket groups: `start_param_sync`, once the process group's last gather is over."""
    latest: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(start_param_sync)
    def start(buckets: Any, *args: Any, **kwargs: Any) -> None:
        group = buckets.intra_distributed_optimizer_instance_group
        before = latest[group]() if group in latest else None
        if before is not None:  # otherwise it has been waited for and let go
            before.wait()
        start_param_sync(buckets, *args, **kwargs)
        if buckets.param_gather_handle is not None:
            latest[group] = weakref.ref(buckets.param_gather_handle)

    return start
