"""The reference trainer on the fake CUDA: its flags behind a folder for the record of host synchronizations, a file per rank.

    torchrun --nproc-per-node 2 tests/support/fake_cuda/pretrain.py FOLDER --pipeline-model-parallel-size 2 ...
    torchrun --nproc-per-node 2 tests/support/fake_cuda/pretrain.py FOLDER example --pipeline-model-parallel-size 2 ...

The second is the loop of `examples/stock_megatron_core.py` with its flags, which `install` makes run a schedule. The kernel of
the weight gradients is the CPU's (`PLAIN`), and one generator serves host and device, so that a run gives the bits of a run on
the CPU. `ZB_FAKE_CUDA_FAULT` names a fault to put in: see `FAULTS`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.zerobubble.training.entry import run
from megatron.zerobubble.training.models.gpt import forward_step_provider, model_provider

__all__ = ["FAULTS", "main"]


def main(folder: str, argv: list[str], fault: str | None) -> None:
    """Train, and write the record."""
    from megatron.zerobubble.mcore.cpu.device import quiet_third_parties

    with quiet_third_parties():  # first: imports of torch and megatron-core read more of torch.cuda than training does
        for name in ("megatron.zerobubble.training.loop", "megatron.core.models.gpt", "megatron.core.dist_checkpointing"):
            importlib.import_module(name)
    from tests.support.fake_cuda.install import fake_cuda

    with fake_cuda(num_devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) as fake:
        _count_iterations(fake.log)
        _compute_as_on_cpu()
        if fault is not None:
            FAULTS[fault]()
        try:
            if argv[0] == "example":
                _run_example(argv[1:])
            else:
                run(model_provider, forward_step_provider, argv=argv)
        finally:
            Path(folder, f"syncs_{os.environ['RANK']}.json").write_text(json.dumps(fake.log.to_json()))


def _count_iterations(log: Any) -> None:
    from megatron.zerobubble.mcore.stock_loop.stock_loop import StockLoop
    from megatron.zerobubble.training.step import Trainer

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            log.iteration += 1
            return function(*args, **kwargs)

        return call

    Trainer.iterate = counted(Trainer.iterate)  # type: ignore[method-assign]
    StockLoop.run = counted(StockLoop.run)  # type: ignore[method-assign]


def _run_example(argv: list[str]) -> None:
    from tests.support.stock import example

    example().main(argv)
    leftover = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    assert not leftover, f"threads outlive uninstall: {leftover}"


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
    import torch

    torch.cuda.synchronize()


def _read_tokens(work: Any) -> None:
    work.num_tokens.item()


def _ask_for_a_graph(work: Any) -> None:
    import torch

    torch.cuda.graph_pool_handle()


def _threads_without_device() -> None:
    import torch

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
