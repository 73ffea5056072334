"""The loop of `examples/stock_megatron_core.py` with its flags, on the fake CUDA or on the CPU.

    torchrun --nproc-per-node 2 tests/support/fake_cuda/run_example.py FOLDER --pipeline-model-parallel-size 2 ...
    torchrun --nproc-per-node 2 tests/support/fake_cuda/run_example.py cpu --pipeline-model-parallel-size 2 ...

On the fake CUDA the folder gets the record of host synchronizations, a file per rank. The kernel of the weight gradients is the
CPU's (`PLAIN`), and one generator serves host and device, so that a run gives the bits of a run on the CPU. `ZB_FAKE_CUDA_FAULT`
names a fault to put in: see `FAULTS`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties
from tests.support.stock import example

__all__ = ["FAULTS", "main"]


def main(folder: str, argv: list[str], fault: str | None) -> None:
    """Train, and write the record."""
    with quiet_third_parties():  # first: imports of torch and megatron-core read more of torch.cuda than training does
        loop = example()
    if folder == "cpu":
        torch.distributed.init_process_group("gloo")
        with HostDevice() as host, host.on_host():
            loop.main(argv)
        return
    from tests.support.fake_cuda.install import fake_cuda

    with fake_cuda(num_devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) as fake:
        _count_iterations(fake.log)
        _compute_as_on_cpu()
        if fault is not None:
            FAULTS[fault]()
        try:
            loop.main(argv)
            leftover = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
            assert not leftover, f"threads outlive uninstall: {leftover}"
        finally:
            Path(folder, f"syncs_{os.environ['RANK']}.json").write_text(json.dumps(fake.log.to_json()))


def _count_iterations(log: Any) -> None:
    from megatron.zerobubble.mcore.stock_loop.stock_loop import StockLoop

    run = StockLoop.run

    def counted(*args: Any, **kwargs: Any) -> Any:
        log.iteration += 1
        return run(*args, **kwargs)

    StockLoop.run = counted  # type: ignore[method-assign]


def _compute_as_on_cpu() -> None:
    from megatron.zerobubble.wgrad import gemm

    gemm._torch_kernels = lambda *dtypes: [gemm.WgradKernel(gemm.KernelKind.PLAIN, gemm.plain_accumulate)]  # type: ignore[assignment]


# -- faults ---------------------------------------------------------------------------------------------------------------


def _in_every_forward(act: Callable[[Any], None]) -> None:
    from megatron.zerobubble.mcore.stage_work import ChunkWork

    forward = ChunkWork.forward

    def faulty(self: ChunkWork, *args: Any) -> Any:
        act(self)
        return forward(self, *args)

    ChunkWork.forward = faulty  # type: ignore[method-assign]


def _synchronize(work: Any) -> None:
    torch.cuda.synchronize()


def _read_tokens(work: Any) -> None:
    work.num_tokens.item()


def _ask_for_a_graph(work: Any) -> None:
    torch.cuda.graph_pool_handle()


def _threads_without_device() -> None:
    torch.cuda.set_device, real = lambda device: None, torch.cuda.set_device  # for all threads but this one
    real(int(os.environ["LOCAL_RANK"]))


FAULTS: dict[str, Callable[[], None]] = {
    "synchronize": lambda: _in_every_forward(_synchronize),
    "item": lambda: _in_every_forward(_read_tokens),
    "unknown name": lambda: _in_every_forward(_ask_for_a_graph),
    "threads without device": _threads_without_device,
}
"""Name -> puts the fault in."""


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:], os.environ.get("ZB_FAKE_CUDA_FAULT"))
