"""Start-up of one rank: device, process groups, seeds.

torch is imported inside the functions: flags are checked before it is loaded.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.job.rendezvous import Connection, connect
from megatron.zerobubble.training.config.settings import Settings

if TYPE_CHECKING:
    import torch

    from megatron.zerobubble.job.key_value_store import Store
    from megatron.zerobubble.job.meeting import Attempt
    from megatron.zerobubble.mcore.cpu.device import HostDevice
    from megatron.zerobubble.runtime.watch import Watch

__all__ = [
    "Job",
    "choose_device",
    "join_job",
    "resolved_backend",
    "set_up_logging",
    "set_up_model_parallel",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A rank's connection to the job after `join_job`."""

    launch: Launch
    """Which rank this is."""
    attempt: Attempt
    """Which attempt of torchrun this is."""
    host: HostDevice
    """On the CPU, the layer that stands in for CUDA; inert on GPUs."""
    store: Store
    """The job's key-value store. With torchrun it outlives a rank that fails."""
    watch: Watch
    """Where this rank reports what it does."""


def set_up_logging(launch: Launch) -> None:
    """Log to standard output: everything from rank 0, only warnings from other ranks. megatron-core's info lines are muted."""
    is_first = launch.rank == 0
    logging.basicConfig(level=logging.INFO if is_first else logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("megatron.core").setLevel(logging.WARNING)
    logging.getLogger("torch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device")  # that is the one this rank has chosen
    if not is_first:
        warnings.simplefilter("ignore")  # rank 0 prints the same ones


def choose_device(settings: Settings, launch: Launch) -> HostDevice:
    """Choose and set up the device of this rank: a GPU if torch finds one, else the CPU with gloo.

    Each rank of a machine has a GPU of its own. On the CPU this installs the host-device layer and lets the allocator retain
    freed memory (`mcore.cpu.malloc`). Call it before any process group exists.

    Raises:
        ConfigError: gloo where there are GPUs, NCCL without a GPU for this rank, or a precision that the device does not
            support.
    """
    import torch

    from megatron.zerobubble.mcore.cpu.device import HostDevice
    from megatron.zerobubble.mcore.cpu.malloc import keep_freed_memory

    backend = resolved_backend(settings)
    host = HostDevice(enabled=not torch.cuda.is_available() and backend == "gloo")
    if not host.enabled:
        if backend == "gloo":
            raise ConfigError(
                f"--distributed-backend gloo is given, and torch sees {torch.cuda.device_count()} GPUs, where gloo cannot reduce "
                "gradients: leave it out for NCCL, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to train on the CPU"
            )
        if launch.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"--distributed-backend nccl needs a GPU per rank; rank {launch.rank} has local rank {launch.local_rank} on a "
                f"machine with {torch.cuda.device_count()} GPUs; hide them (CUDA_VISIBLE_DEVICES=) to train on the CPU"
            )
        torch.cuda.set_device(launch.local_rank)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[settings.precision.name]
    if not computes(dtype, host.device):
        raise ConfigError(
            f"--{settings.precision.name} is given, but the device {host.device} cannot multiply {settings.precision.name} "
            "matrices; leave it out to train in fp32"
        )
    host.install()
    if host.enabled:
        keep_freed_memory()
        if not launch.has_threads_set:
            torch.set_num_threads(1)  # as torchrun does: the ranks of a machine share its cores
    return host


def resolved_backend(settings: Settings) -> str:
    """--distributed-backend, or the one that fits this machine."""
    import torch

    return settings.parallel.distributed_backend or ("nccl" if torch.cuda.is_available() else "gloo")


def computes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `device` can multiply matrices of `dtype`. Tries a small GEMM."""
    import torch

    try:
        sample = torch.ones(8, 8, dtype=dtype, device=device)
        return bool(torch.isfinite(sample @ sample).all())
    except RuntimeError:  # NotImplementedError, for a dtype without a kernel, is a subclass
        return False


def join_job(
    settings: Settings,
    launch: Launch,
    host: HostDevice,
    *,
    connection: Connection | None = None,
    watch: Watch | None = None,
    name: str = "job",
) -> Job:
    """Initialize the default process group and the job's store. All ranks must call this.

    Args:
        settings: backend and timeout.
        launch: which rank this process is.
        host: its device.
        connection: to the store; None: made here.
        watch: where this rank reports what it does; None: a new one.
        name: tells this job from others on the same store.
    """
    from torch.distributed import distributed_c10d as c10d

    from megatron.zerobubble.runtime.watch import Watch as NewWatch

    _release_nccl_memory_early()
    connection = connection or connect(launch, timeout_s=60.0 * settings.parallel.distributed_timeout_minutes)
    backend = resolved_backend(settings)
    groups: Any = connection.of(f"{name}/process_group")
    c10d.init_process_group(
        backend,
        store=groups,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(minutes=settings.parallel.distributed_timeout_minutes),
        # With a device every later group would be made by a split over the whole world, the four of the links among them.
        device_id=host.device if backend == "nccl" and settings.parallel.eager_nccl_communicators else None,
    )
    return Job(
        launch=launch, attempt=connection.attempt, host=host, store=connection.of(name), watch=watch or NewWatch(host.device)
    )


def _release_nccl_memory_early() -> None:
    """Make torch before 2.8 hold a collective's tensors until it is waited for, as later releases do.

    By itself it marks them as used by NCCL's stream, and their memory cannot be used again before the device has got there.
    """
    import torch

    if Version(torch.__version__) < Version("2.8"):
        os.environ.setdefault("TORCH_NCCL_AVOID_RECORD_STREAMS", "1")


def set_up_model_parallel(settings: Settings) -> None:
    """Make megatron-core's process groups and seed every random number generator. All ranks must call this.

    Seeds are Megatron-LM's: different per pipeline rank, the same for all data-parallel replicas and context-parallel ranks.

    Args:
        settings: parallel sizes, seed, and the schedule, whose placement may move the embeddings to other pipeline ranks.
    """
    import numpy
    import torch
    from megatron.core import parallel_state, tensor_parallel

    from megatron.zerobubble.mcore.model.stage_layout import embedding_ranks

    spec = settings.schedule_spec
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=settings.parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=settings.pipeline_size,
        context_parallel_size=settings.parallel.context_parallel_size,
        virtual_pipeline_model_parallel_size=settings.virtual_pipeline_size,
        expert_model_parallel_size=settings.moe.expert_model_parallel_size,
        expert_tensor_parallel_size=settings.moe.expert_tensor_parallel_size,
        distributed_timeout_minutes=settings.parallel.distributed_timeout_minutes,
        create_gloo_process_groups=False,
        **({} if spec.is_stock else embedding_ranks(spec.placement)),
    )
    seed = settings.run.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
