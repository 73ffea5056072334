"""FP8 training with Transformer Engine: the flags of the group "FP8", spelled and defaulted as in Megatron-LM."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.dataclass_flags import flag_of
from megatron.zerobubble.flags.require import at_most, positive
from megatron.zerobubble.training.config.model import ModelConfig, PrecisionConfig

__all__ = ["Fp8Config"]


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """FP8.

    Needs --transformer-impl transformer_engine. Weight gradients that run in W read the operands that F and B quantized.
    """

    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Compute the GEMMs of transformer layers in FP8: e4m3 everywhere (e4m3), or e5m2 for gradients (hybrid)."""
    fp8_recipe: Literal["delayed", "tensorwise", "mxfp8", "blockwise"] = "delayed"
    """How tensors are scaled: by the largest magnitudes of earlier microbatches (delayed), by that of the tensor itself
    (tensorwise), or per block (mxfp8, blockwise)."""
    fp8_amax_history_len: int = 1
    """With --fp8-recipe delayed: number of past magnitudes (amax) of each tensor that are kept."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """With --fp8-recipe delayed: which of the past magnitudes gives the scale."""

    def __post_init__(self) -> None:
        positive(self, "fp8_amax_history_len")
        at_most(self, 2**20, "fp8_amax_history_len")
        given = [flag_of(each) for each in dataclasses.fields(self) if getattr(self, each.name) != each.default]
        if self.fp8_format is None and given:
            raise ConfigError(f"{given[0]} needs --fp8-format e4m3 or hybrid")
        of_history = [flag for flag in given if flag.startswith("--fp8-amax")]
        if self.fp8_recipe != "delayed" and of_history:
            raise ConfigError(f"{of_history[0]} has no effect with --fp8-recipe {self.fp8_recipe}; it belongs to delayed scaling")

    def check(self, model: ModelConfig, precision: PrecisionConfig) -> None:
        """Raise ConfigError unless layers and precision allow GEMMs in FP8."""
        if self.fp8_format is None:
            return
        flag = f"--fp8-format {self.fp8_format}"
        if model.transformer_impl != "transformer_engine":
            raise ConfigError(f"{flag} needs --transformer-impl transformer_engine, not {model.transformer_impl}")
        if not (precision.bf16 or precision.fp16):
            raise ConfigError(f"{flag} needs --bf16 or --fp16: FP8 GEMMs add up to 16-bit results")
        if self.fp8_recipe == "delayed" and "layernorm" in model.recompute_modules:
            raise ConfigError(
                "--recompute-modules layernorm does not go with --fp8-recipe delayed, whose scales would advance twice: leave it "
                "out, or choose tensorwise"
            )

    def model_options(self) -> dict[str, Any]:
        """The fields of megatron-core's TransformerConfig."""
        if self.fp8_format is None:
            return {}
        own = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "fp8_format"}
        return {"fp8": self.fp8_format, **own}
