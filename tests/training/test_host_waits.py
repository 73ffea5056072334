"""An iteration adds no wait of the host for the device: what the log needs is read with the losses of a progress line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron.zerobubble.training.step import LOSS, Trainer, TrainingState
from tests.training.launch import TINY_BATCH, TINY_MODEL, launch_warm

READS = {"item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__"}


class _NoReads(TorchFunctionMode):
    """Fails where the host would wait for a tensor on the device. Copies that `print` or C++ make are not seen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert getattr(func, "__name__", "") not in READS, f"{func.__name__} waits for the device"
        return func(*args, **(kwargs or {}))


class _Optimizer:
    """Steps, and doubles its loss scale in place, as a scaler does."""

    param_groups = ({"default_config": True, "lr": 0.5},)

    def __init__(self) -> None:
        self.scale = torch.tensor([64.0])

    def get_loss_scale(self) -> torch.Tensor:
        return self.scale

    def step(self) -> tuple[bool, float, None]:
        self.scale.mul_(2.0)
        return True, 1.0, None

    def zero_grad(self) -> None:
        """There are no gradients."""


def _training_state(optimizer: _Optimizer) -> TrainingState:
    reports: list[dict[str, torch.Tensor]] = [{LOSS: torch.tensor([3.0, 2.0])}]
    passes: Callable[..., Any] = lambda **_: reports  # noqa: E731
    hooks = SimpleNamespace(watch=None, before_gradients=None)
    recorder = SimpleNamespace(span=lambda _: nullcontext())
    timer = SimpleNamespace(start=lambda **_: None, stop=lambda: None)
    model, batch = SimpleNamespace(seq_length=1), SimpleNamespace(micro_batch_size=1)
    sizes: Any = SimpleNamespace(model=model, batch=batch, num_microbatches=1, global_batch_size=1)
    return TrainingState(
        settings=sizes,
        chunks=[],
        schedule=SimpleNamespace(forward_backward_func=passes, hooks=hooks, recorder=recorder),
        optimizer=optimizer,
        post_validation=None,
        scheduler=SimpleNamespace(step=lambda increment: None),
        forward_step=lambda *_: pytest.fail("not called"),
        timers=lambda name, log_level=None: timer,
        device=torch.device("cpu"),
        on_host=nullcontext,
    )


def test_the_loss_scale_is_that_of_the_step_and_not_read_in_it() -> None:
    trainer = Trainer(_training_state(_Optimizer()))
    with _NoReads():
        results = [result for _ in range(3) for result in trainer.iterate(None)]
    assert [float(result.loss_scale) for result in results] == [64.0, 128.0, 256.0]


SCRIPT = """
import os, pathlib, pretrain_gpt
from megatron.core.timers import Timer

started, start = [], Timer.start

def counted(self, *args, **kwargs):
    started.append(self.name)
    return start(self, *args, **kwargs)

if __name__ == "__main__":
    Timer.start = counted
    pretrain_gpt.run(pretrain_gpt.model_provider, pretrain_gpt.forward_step_provider)
    pathlib.Path(__file__).with_suffix("." + os.environ["RANK"]).write_text(" ".join(started))
"""


@pytest.mark.parametrize("more", [["--bf16"], ["--enable-optimizer-post-validation"]], ids=["synchronous", "optimistic"])
def test_no_timer_that_synchronizes_the_device_runs_unless_asked_for(tmp_path: Path, more: list[str]) -> None:
    """megatron-core's timers synchronize the device at start and stop."""
    script = tmp_path / "counted.py"
    script.write_text(SCRIPT)
    flags = [*TINY_MODEL, *TINY_BATCH, "--mock-data", "--pipeline-model-parallel-size", "2", "--enable-zero-bubble", *more]
    done = launch_warm([*flags, "--train-iters", "3", "--eval-iters", "0"], num_ranks=2, script=script)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert [script.with_suffix(f".{rank}").read_text() for rank in range(2)] == ["", ""]
    assert "elapsed time per iteration (ms)" in done.stdout + done.stderr
