"""A training job that nvidia-resiliency-ext restarts in its processes, after faults at chosen points. Run it as a module.

Its argument is JSON: `flags` of the example, `options` of `install`, `faults` in the order of attempts, a free `port`, `output`.
A fault is {"rank": 0, "in": "forward_step", "call": 11}: that rank's eleventh call of that function of the example raises; or
{"in": "end"}: all ranks raise after the last iteration. Each rank writes to OUTPUT.RANK, for every attempt, its losses and what
was alive when it began. Annotations are no strings: the wrapper reads them.
"""

import gc
import json
import os
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from nvidia_resiliency_ext import inprocess

import megatron.zerobubble
from megatron.zerobubble.flags.loop_options import Seeds
from megatron.zerobubble.mcore.compat import destroy_model_parallel
from megatron.zerobubble.mcore.cpu.device import HostDevice
from tests.support.stock import example


class FaultError(Exception):
    """Stands for any error of a training step."""


class Forget(inprocess.finalize.Finalize):
    """What docs/reliability.md asks for: megatron-core's groups, and the frames of the attempt, which hold the model.

    nvidia-resiliency-ext keeps the error until all ranks have come, and a rank that waits on gloo comes when the rank that it
    waits for has freed their group. Every other time it uninstalls, with the groups gone and the model alive.
    """

    def __call__(self, state: Any) -> Any:
        if state.iteration % 2:
            megatron.zerobubble.uninstall()
        error = sys.exception()
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        destroy_model_parallel()
        gc.collect()
        return state


def _alive() -> dict[str, Any]:
    """What exists in this process. gloo has threads and sockets for each group."""
    gc.collect()
    objects = gc.get_objects()
    tensors = {each.data_ptr(): each.nbytes for each in objects if type(each) in (torch.Tensor, torch.nn.Parameter)}
    return {
        "models": sum(type(each) is DistributedDataParallel for each in objects),
        "bytes": sum(tensors.values()),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "status": str(megatron.zerobubble.status()),
    }


def _failing(fault: dict[str, Any]) -> AbstractContextManager[Any]:
    if fault.get("rank") != dist.get_rank():
        return nullcontext()
    original, calls = getattr(example(), fault["in"]), 0

    def function(*given: Any, **others: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fault["call"]:
            raise FaultError(fault["in"])
        return original(*given, **others)

    return mock.patch.object(example(), fault["in"], function)


def _attempt(job: dict, attempts: list, call: inprocess.CallWrapper = None) -> None:
    begun = _alive()
    attempts.append(begun)
    agent = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.PrefixStore(str(call.iteration), agent), rank=rank, world_size=size)
    megatron.zerobubble.install(**job["options"] | {"seeds": Seeds(**job["options"].get("seeds", {}))})
    fault = dict(enumerate(job["faults"])).get(call.iteration, {})
    with _failing(fault), HostDevice().on_host():
        history = example().train(example().parse(job["flags"].split()))
    begun["losses"] = [entry["losses"] for entry in history]
    if fault:
        raise FaultError("at the end")


def main() -> None:
    job = json.loads(sys.argv[1])
    rank, often = os.environ["RANK"], timedelta(milliseconds=50)
    HostDevice().install()
    attempts: list[dict[str, Any]] = []
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": job["port"]},
        initialize=inprocess.initialize.RetryController(max_iterations=len(job["faults"]) + 1),
        finalize=Forget(),
        monitor_thread_interval=often,
        monitor_process_interval=often,
        heartbeat_interval=often,
        progress_watchdog_interval=often,
        last_call_wait=often,
    )
    try:
        wrapper(_attempt)(job, attempts)
    finally:
        Path(f"{job['output']}.{rank}").write_text(json.dumps(attempts))
    megatron.zerobubble.uninstall()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
