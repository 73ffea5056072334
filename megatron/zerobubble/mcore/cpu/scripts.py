"""A whole training script for GPUs, such as Megatron-LM's pretrain_gpt.py, on a machine without CUDA.

The host-device layer (`device`) answers what `megatron.core` asks while it trains. A script asks more: whether there is a GPU,
how many, of which generation, and how much of its memory is in use. While `without_gpus` is active:

===================================================  ================================================================
`torch.cuda.is_available`                             True: scripts end otherwise
`torch.cuda.device_count`                             one per rank of this machine
`torch.cuda.get_device_name`, `..._capability`,       "CPU", and the oldest generation that megatron-core trains on:
`get_device_properties`                               nothing newer is chosen because of it
`torch.cuda.memory_stats` and its relatives           0 bytes
`torch.cuda.Stream`, `Event`, `current_stream` ...    streams that do nothing
`torch.accelerator.is_available`                      False: optimizers ask it whether a CUDA graph is being captured
functions under `torch.compile`                       run without it, which would ask CUDA for the device
`torch.distributed.init_process_group`                gloo in place of any other backend, and no device to bind to
`torch.compile`                                       functions run as they are: a compiler would ask for the GPU, too
`multiprocessing.spawn`                               a child, which runs the script's imports again, does without `triton`
                                                      as its parent does (`triton_import`)
`megatron.legacy.fused_kernels.load`                  nothing is compiled; up to 0.16 scripts ask for it
===================================================  ================================================================

What stays missing without CUDA: kernels of Transformer Engine, Apex and Triton, fused kernels, CUDA graphs, FP8, profilers.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import multiprocessing.spawn
import os
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties
from megatron.zerobubble.mcore.cpu.malloc import keep_freed_memory
from megatron.zerobubble.mcore.cpu.streams import cuda_without_streams

__all__ = ["script_device", "without_gpus"]

_GENERATION = (8, 0)
"""Compute capability of the GPU that a script believes in."""


@contextlib.contextmanager
def script_device(launch: Launch, *, on_cpu: bool) -> Iterator[None]:
    """The device of the script. On the CPU all of it, passes included, runs inside the host-device layer.

    Raises:
        ConfigError: there is no GPU, and the CPU was not asked for.
    """
    if not on_cpu:
        if not torch.cuda.is_available():
            raise ConfigError(
                f"torch {torch.__version__} sees no GPU, and megatron-core needs one per rank; to try the script on the CPU, add "
                "--cpu before it, and the flags that it has for gloo"
            )
        yield
        return
    keep_freed_memory()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron-LM wants it with tensor or context parallelism
    warnings.filterwarnings("ignore", module=r"megatron\.(core|training)\.")  # missing or deprecated features, on every rank
    with quiet_third_parties(), HostDevice() as host, without_gpus(launch.ranks_on_host), host.on_host():
        yield


@contextlib.contextmanager
def without_gpus(ranks_on_host: int = 1) -> Iterator[None]:
    """A context in which a script finds what it expects of `torch.cuda`. Enter it inside the host-device layer.

    Args:
        ranks_on_host: number of ranks on this machine.
    """
    replacements = _replacements(ranks_on_host)
    undo = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    for owner, name, replacement in replacements:
        setattr(owner, name, replacement)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for owner, name, original in reversed(undo):
            setattr(owner, name, original)


def _replacements(ranks_on_host: int) -> list[tuple[Any, str, Any]]:
    inert = cuda_without_streams()
    answers = {
        "is_available": True,
        "device_count": ranks_on_host,
        "get_device_name": "CPU",
        "get_device_capability": _GENERATION,
        "get_device_properties": types.SimpleNamespace(
            name="CPU", major=_GENERATION[0], minor=_GENERATION[1], total_memory=0, multi_processor_count=1
        ),
        "mem_get_info": (0, 0),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "set_stream", "ipc_collect"), None),
    }
    return [
        *((torch.cuda, name, functools.partial(_answer, answer)) for name, answer in answers.items()),
        (torch.cuda, "memory_stats", _no_memory),
        (torch.accelerator, "is_available", functools.partial(_answer, False)),
        *((torch.cuda, name, getattr(inert, name)) for name in ("Stream", "Event", "current_stream", "default_stream", "stream")),
        (torch.distributed, "init_process_group", _with_gloo(torch.distributed.init_process_group)),
        (torch._dynamo.config, "disable", True),
        (multiprocessing.spawn, "get_command_line", _without_triton(multiprocessing.spawn.get_command_line)),
        *((module, "load", functools.partial(_answer, None)) for module in _legacy_kernels()),
    ]


def _without_triton(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(original)
    def get_command_line(**given: Any) -> list[str]:
        command = original(**given)
        program = command.index("-c") + 1
        return [*command[:program], f"import megatron.zerobubble.mcore; {command[program]}", *command[program + 1 :]]

    return get_command_line


def _legacy_kernels() -> list[Any]:
    try:
        return [importlib.import_module("megatron.legacy.fused_kernels")]
    except ModuleNotFoundError:
        return []


def _answer(answer: Any, *_args: object, **_kwargs: object) -> Any:
    return answer


def _no_memory(device: object = None) -> dict[str, int]:
    return collections.defaultdict(int)


def _with_gloo(original: Any) -> Any:
    @functools.wraps(original)
    def init_process_group(backend: object = None, *args: Any, device_id: object = None, **kwargs: Any) -> Any:
        return original("gloo", *args, **kwargs)

    return init_process_group
