"""What every step runs on, and how large."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from megatron.zerobubble.errors import ConfigError
from tools.benchmarks.one_gpu.layer_shape import LayerShape, llama_3_8b


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Device and size of a run. On a CPU it is a rehearsal: the same code on a tiny model, whose times say nothing of a GPU."""

    device: torch.device
    scale: float = 1.0
    """Factor on the heads and tokens of a layer; 1 is Llama-3-8B's."""
    begun: float = field(default_factory=time.monotonic)
    budget_s: float = 450.0
    """Seconds after which no step begins."""

    @property
    def on_gpu(self) -> bool:
        """Whether times are those of a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations; main gradients are fp32. A CPU without instructions for bf16 is 30 times as slow in it."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    @property
    def left_s(self) -> float:
        """Seconds that are left of the budget."""
        return self.begun + self.budget_s - time.monotonic()

    def layer(self, tokens: int) -> LayerShape:
        """A layer of Llama-3-8B with one sample of this length, scaled."""
        return llama_3_8b(tokens).scaled(self.scale)


def choose_device(name: str | None) -> torch.device:
    """Choose the device; raises ConfigError if there is no such device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda is given and torch sees no GPU here; --device cpu --scale 0.016 rehearses")
    return torch.device("cuda", 0) if name != "cpu" and torch.cuda.is_available() else torch.device("cpu")
