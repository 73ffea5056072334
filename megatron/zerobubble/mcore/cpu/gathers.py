"""One all-gather of weights at a time per process group of gloo.

Two coalesced all-gathers in flight in one gloo group crash some processes with SIGSEGV or SIGABRT inside torch 2.13's own
threads: thousands of small ones do so within half a minute, without megatron-core. With `--overlap-param-gather` megatron-core
has several in flight, one per chunk. So each all-gather first waits for the previous one of its group; all members of the group
start them in the same order. Passes still overlap with it. NCCL orders them itself and needs no change.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any


def one_at_a_time(start_param_sync: Callable[..., None]) -> Callable[..., None]:
    """Wrap `start_param_sync` of bucket groups: it first waits for the previous all-gather of the same process group."""
    latest: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()

    @functools.wraps(start_param_sync)
    def start(buckets: Any, *args: Any, **kwargs: Any) -> None:
        group = buckets.intra_distributed_optimizer_instance_group
        before = latest[group]() if group in latest else None
        if before is not None:  # otherwise it has been waited for and freed
            before.wait()
        start_param_sync(buckets, *args, **kwargs)
        if buckets.param_gather_handle is not None:
            latest[group] = weakref.ref(buckets.param_gather_handle)

    return start
