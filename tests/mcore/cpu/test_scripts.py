"""What a script for GPUs finds on a machine without CUDA, and that nothing of it is left afterwards."""

from __future__ import annotations

import multiprocessing.spawn
from typing import Any

import pytest
import torch

from megatron.zerobubble.mcore.cpu.scripts import without_gpus


def _names() -> dict[str, Any]:
    return {**vars(torch.cuda), **vars(multiprocessing.spawn), "init": torch.distributed.init_process_group}


def test_a_script_finds_gpus_and_none_is_left() -> None:
    before = _names()
    with without_gpus(ranks_on_host=4):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 4
        assert torch.cuda.get_device_properties(0).major == 8
        assert torch.cuda.memory_stats()["reserved_bytes.all.current"] == torch.cuda.memory_allocated() == 0
        with torch.cuda.stream(torch.cuda.Stream()):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            torch.cuda.current_stream().wait_event(event)
            assert event.query()
    assert _names() == before


def test_a_script_that_asks_for_nccl_gets_gloo() -> None:
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    with without_gpus():
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    assert torch.distributed.get_backend() == "gloo"
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not hasattr(multiprocessing.spawn, "get_command_line"), reason="another multiprocessing")
def test_a_spawned_child_imports_the_stand_in_for_triton_first() -> None:
    with without_gpus():
        command = multiprocessing.spawn.get_command_line(tracker_fd=1, pipe_handle=2)  # type: ignore[attr-defined]
    program = command[command.index("-c") + 1]
    assert program.startswith("import megatron.zerobubble.mcore; from multiprocessing.spawn import spawn_main")
