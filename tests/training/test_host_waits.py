"""An iteration adds no wait of the host for the device: what the log needs is read with the losses of a progress line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron.zerobubble.training.step import LOSS, Trainer, TrainingState

pytestmark = pytest.mark.claims(
    "Long runs",
    "an iteration without a wait for the device: no timer that synchronizes, the loss scale read with the losses",
    "works; **not run on a GPU**",
)

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
    model, batch = SimpleNamespace(seq_length=1), SimpleNamespace(micro_batch_size=1)
    sizes: Any = SimpleNamespace(model=model, batch=batch, num_microbatches=1, global_batch_size=1)
    return TrainingState(
        settings=sizes,
        chunks=[],
        engine=SimpleNamespace(schedule=SimpleNamespace(forward_backward_func=passes, hooks=hooks, recorder=recorder)),
        optimizer=optimizer,
        post_validation=None,
        scheduler=SimpleNamespace(step=lambda increment: None),
        forward_step=lambda *_: pytest.fail("not called"),
        device=torch.device("cpu"),
        on_host=nullcontext,
    )


def test_the_loss_scale_is_that_of_the_step_and_not_read_in_it() -> None:
    trainer = Trainer(_training_state(_Optimizer()))
    with _NoReads():
        results = [result for _ in range(3) for result in trainer.iterate(None)]
    assert [float(result.loss_scale) for result in results] == [64.0, 128.0, 256.0]
