"""What the logs say of one iteration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.estimate.flops import tflops_per_gpu
from megatron.zerobubble.training.step import StepResult


@dataclass(kw_only=True)
class IterationRecord:
    """One iteration, to be logged. `loss` and `seconds` are filled in with the losses' all-reduce, which waits for the device."""

    iteration: int
    """From 1."""
    consumed_samples: int
    """Samples consumed by the end of this iteration."""
    samples: int
    """Samples of this iteration."""
    result: StepResult
    """Loss and optimizer step of this rank."""
    tokens: int | None = None
    """Tokens of this iteration, without padding; None: --seq-length of every sample."""
    elapsed_ms: Callable[[], float]
    """Reads the iteration time in milliseconds, once the device has done the iteration."""
    seconds: float = field(default=math.nan)
    """Iteration time in seconds."""
    loss: float = field(default=math.nan)
    """Mean loss per token over all ranks."""

    def num_tokens(self, settings: Settings) -> int:
        """Tokens of this iteration."""
        return self.samples * settings.model.seq_length if self.tokens is None else self.tokens

    def to_json(self, settings: Settings, *, flops_per_sample: float | None = None) -> dict[str, Any]:
        """The JSON object of this iteration in --metrics-jsonl; with TFLOP/s if the FLOPs of a sample are given."""
        flops = None if flops_per_sample is None else flops_per_sample * self.samples
        rate = {} if flops is None else {"tflops_per_gpu": tflops_per_gpu(flops, self.seconds, world_size=settings.world_size)}
        return {
            "iteration": self.iteration,
            "loss": self.loss,
            "lr": self.result.lr,
            "grad_norm": self.result.grad_norm,
            "skipped": not self.result.is_stepped,
            "redone": self.result.rolled_back is not None,
            "tokens_per_s": self.num_tokens(settings) / self.seconds,
            "iteration_ms": self.seconds * 1000.0,
            "schedule": settings.zero_bubble.schedule,
            **rate,
        }
