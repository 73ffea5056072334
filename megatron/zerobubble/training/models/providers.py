"""What builds the reference trainer's model and runs one microbatch through it: the types of its two providers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.step import ForwardStep


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """Arguments of model providers and forward step providers."""

    settings: Settings
    """The checked flags."""
    config: Any
    """megatron-core's TransformerConfig."""
    padded_vocab_size: int
    """Vocabulary size after padding: the rows of the word embeddings over all tensor-parallel ranks."""
    device: torch.device
    """Device of this rank's parameters and activations."""


ModelProvider = Callable[[ModelSetup, bool, bool, "int | None"], Any]
"""(setup, pre_process, post_process, vp_stage) -> the module of one stage."""

ForwardStepProvider = Callable[[ModelSetup], ForwardStep]
"""setup -> the function that runs one microbatch through one model chunk."""
