"""Training steps of a real model, with a ledger of the tensors that each iteration leaves behind."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.gpt import Case, Trainer
from tools.benchmarks.memory.ledger import RankLedger, watch


def train_watched(rank: int, case: Case, num_iterations: int, warmup: int, leaks: bool = False) -> RankLedger:
    """Train the case. With `leaks` every step leaves a tensor of a pass behind."""
    trainer = Trainer(case)
    leaked: list[torch.Tensor] = []
    step = 0

    def iterate() -> None:
        nonlocal step
        trainer.zero_gradients()
        trainer.forward_backward(step)
        with trainer.host.on_host():
            trainer.optimizer.step()
        step += 1

    if leaks:

        def leak(work: Any, op: Any) -> None:
            if op.microbatch == 0:
                leaked.append(torch.empty(100))

        trainer.schedule.hooks.observe = leak
    found = watch(trainer.schedule, iterate, num_microbatches=case.num_microbatches, num_iterations=num_iterations, warmup=warmup)
    trainer.close()
    return found
