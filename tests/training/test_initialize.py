"""Start-up before the process group is initialized: the environment, the device, and what it can compute."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.launch import Launch, read_launch
from megatron.zerobubble.mcore.cpu import malloc as host_heap
from megatron.zerobubble.training import initialize
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.initialize import choose_device, computes, join_job

pytestmark = [
    pytest.mark.claims(
        "Long runs",
        "`--eager-nccl-communicators`; links with streams of high priority and `--zero-bubble-p2p-max-ctas`",
        "the options arrive at torch, in doubles; **not run on a GPU**",
        also=("runtime/test_p2p.py",),
    ),
]


FLAGS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 10 --mock-data "
)
LAUNCH = Launch(rank=1, local_rank=1, ranks_on_host=2, world_size=2, has_threads_set=True)


def test_torchruns_environment() -> None:
    environment = {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "OMP_NUM_THREADS": "2"}
    assert read_launch(environment) == Launch(rank=3, local_rank=1, ranks_on_host=2, world_size=4, has_threads_set=True)


def test_a_process_alone_is_a_job_of_one() -> None:
    assert read_launch({}) == Launch(rank=0, local_rank=0, ranks_on_host=1, world_size=1, has_threads_set=False)


def test_a_broken_environment_is_an_error() -> None:
    with pytest.raises(ConfigError, match="WORLD_SIZE is 'two', not a number"):
        read_launch({"WORLD_SIZE": "two"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cpu_computes_every_format_of_this_torch(dtype: torch.dtype) -> None:
    assert computes(dtype, torch.device("cpu"))


def test_an_unsupported_dtype_is_detected() -> None:
    assert not computes(torch.float8_e4m3fn, torch.device("cpu"))


def test_fp16_on_a_device_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(initialize, "computes", lambda dtype, device: dtype is not torch.float16)
    with pytest.raises(ConfigError, match="--fp16 is given, but the device cpu cannot multiply fp16 matrices"):
        choose_device(settings_from_argv((FLAGS + "--fp16 --distributed-backend gloo").split(), world_size=2), LAUNCH)


def test_the_cpu_is_chosen_with_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    keep = mock.Mock()
    monkeypatch.setattr(host_heap, "keep_freed_memory", keep)
    host = choose_device(settings_from_argv((FLAGS + "--distributed-backend gloo").split(), world_size=2), LAUNCH)
    try:
        assert host.enabled
        keep.assert_called_once_with()
        assert torch.cuda.current_device() == torch.device("cpu")
    finally:
        host.uninstall()


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="this machine has a GPU for that rank")
def test_nccl_without_a_gpu_for_the_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a GPU per rank; rank 1 has local rank 1 on a machine with"):
        choose_device(settings_from_argv((FLAGS + "--distributed-backend nccl").split(), world_size=2), LAUNCH)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """This machine has a single GPU; which one was chosen."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    monkeypatch.setattr(initialize, "computes", lambda dtype, device: device == torch.device("cuda", 0))
    return chosen


def test_gloo_where_there_are_gpus_is_an_error(one_gpu: list[int]) -> None:
    with pytest.raises(ConfigError, match="sees 1 GPUs, where gloo cannot reduce gradients: leave it out for NCCL, or hide"):
        choose_device(settings_from_argv(f"{FLAGS} --distributed-backend gloo".split(), world_size=2), LAUNCH)
    assert one_gpu == []


@pytest.mark.parametrize(
    ("flags", "backend", "bound"),
    [("", "nccl", False), ("--eager-nccl-communicators", "nccl", True), ("", "gloo", False)],
)
def test_communicators_open_at_first_use_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, flags: str, backend: str, bound: bool
) -> None:
    """With `device_id` torch opens each at once, and makes every later group by a split over the whole world."""
    given: dict[str, object] = {}
    monkeypatch.setattr("torch.distributed.distributed_c10d.init_process_group", lambda *_, **kwargs: given.update(kwargs))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    device = torch.device("cuda", 1)
    parsed = settings_from_argv((FLAGS + f"--distributed-backend {backend} {flags}").split(), world_size=1)
    launch = Launch(rank=0, local_rank=0, ranks_on_host=1, world_size=1, has_threads_set=True)
    join_job(parsed, launch, mock.Mock(device=device))
    assert given["device_id"] == (device if bound else None)


def test_eager_communicators_are_nccls() -> None:
    with pytest.raises(ConfigError, match="--eager-nccl-communicators needs NCCL, and --distributed-backend is gloo"):
        settings_from_argv((FLAGS + "--distributed-backend gloo --eager-nccl-communicators").split(), world_size=1)


@pytest.mark.parametrize(
    ("version", "given", "expected"),
    [("2.7.1+cu126", None, "1"), ("2.7.1", "0", "0"), ("2.8.0", None, None), ("2.13.0", None, None)],
)
def test_an_early_torch_gives_nccls_memory_back_as_later_ones_do(
    monkeypatch: pytest.MonkeyPatch, version: str, given: str | None, expected: str | None
) -> None:
    name = "TORCH_NCCL_AVOID_RECORD_STREAMS"
    monkeypatch.setenv(name, given or "")  # so that it is restored
    if given is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch, "__version__", version)
    initialize._release_nccl_memory_early()
    assert os.environ.get(name) == expected
