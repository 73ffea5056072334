"""What ranks run on, and how large their layers are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.zerobubble.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Device and size of a run. On a CPU it is a rehearsal: the same code on a tiny model, whose times say nothing of a GPU."""

    device: torch.device
    scale: float = 1.0
    """Factor on the heads and tokens of a layer; 1 is Llama-3-8B's with 4,096 tokens."""

    def __post_init__(self) -> None:
        if not 0 < self.scale <= 1:
            raise ConfigError(f"--scale is {self.scale}; it must be more than 0 and at most 1, where 1 is the whole layer")

    @property
    def on_gpu(self) -> bool:
        """Whether times are those of a GPU, in bf16. A CPU without instructions for bf16 is 30 times as slow in it: fp32."""
        return self.device.type == "cuda"

    @property
    def num_heads(self) -> int:
        """Attention heads of a layer, each 128 wide: a multiple of four, which share a KV head."""
        return 4 * max(1, round(8 * self.scale))

    @property
    def num_tokens(self) -> int:
        """Tokens of a sample."""
        return max(8, round(4096 * self.scale))

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding and of the head."""
        return 32000 if self.on_gpu else 512


def choose_device(name: str | None) -> torch.device:
    """Choose the device; raises ConfigError if there is no such device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda is given and torch sees no GPU here; --device cpu --scale 0.016 rehearses")
    return torch.device("cuda", 0) if name != "cpu" and torch.cuda.is_available() else torch.device("cpu")
