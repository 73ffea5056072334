"""FP8 training with Transformer Engine: the flags of the group "FP8", spelled and defaulted as in Megatron-LM."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.dataclass_flags import flag_of
from megatron.zerobubble.flags.require import at_most, not_negative, positive

__all__ = ["Fp8Config"]


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """FP8.

    Needs --transformer-impl transformer_engine. Weight gradients that run in W read the operands that F and B quantized.
    """

    fp8_format: Literal["e4m3", "hybrid"] | None = None
    """Compute the GEMMs of transformer layers in FP8: e4m3 everywhere (e4m3), or e5m2 for gradients (hybrid)."""
    fp8_recipe: Literal["delayed", "tensorwise", "mxfp8", "blockwise", "custom"] = "delayed"
    """How tensors are scaled: by the largest magnitudes of earlier microbatches (delayed), by that of the tensor itself
    (tensorwise), or per block (mxfp8, blockwise). custom takes --fp8-quantizer-factory."""
    fp8_quantizer_factory: str | None = None
    """With --fp8-recipe custom: the quantizer factory, as package.module.function."""
    fp8_margin: int = 0
    """With --fp8-recipe delayed: scale down by 2 to this power."""
    fp8_amax_history_len: int = 1
    """With --fp8-recipe delayed: number of past magnitudes (amax) of each tensor that are kept."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """With --fp8-recipe delayed: which of the past magnitudes gives the scale."""
    fp8_wgrad: bool = field(default=True, metadata={"flag": "--no-fp8-wgrad"})
    """With --fp8-recipe delayed: compute weight gradients in higher precision."""
    fp8_param_gather: bool = False
    """Keep weights in FP8, and all-gather them in FP8. Needs --use-distributed-optimizer."""
    tp_only_amax_red: bool = False
    """Reduce magnitudes only over the tensor-parallel ranks."""
    first_last_layers_bf16: bool = False
    """Compute the first and last layers in bf16. Not with --fp8-recipe delayed."""
    num_layers_at_start_in_bf16: int = 1
    """With --first-last-layers-bf16: number of layers at the start."""
    num_layers_at_end_in_bf16: int = 1
    """With --first-last-layers-bf16: number of layers at the end."""

    def __post_init__(self) -> None:
        not_negative(self, "fp8_margin", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        positive(self, "fp8_amax_history_len")
        at_most(self, 127, "fp8_margin")  # a power of 2, in fp32
        at_most(self, 2**20, "fp8_amax_history_len")
        if self.fp8_format is None:
            for given in self._given():
                raise ConfigError(f"{given} needs --fp8-format e4m3 or hybrid")
        if self.fp8_recipe != "delayed":
            for given in self._given("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_wgrad"):
                raise ConfigError(f"{given} has no effect with --fp8-recipe {self.fp8_recipe}; it belongs to delayed scaling")
        elif self.first_last_layers_bf16:
            raise ConfigError(
                "--first-last-layers-bf16 does not go with --fp8-recipe delayed, which updates the scales of all layers at once: "
                "choose tensorwise, blockwise or mxfp8"
            )
        if (self.fp8_recipe == "custom") != (self.fp8_quantizer_factory is not None):
            raise ConfigError("--fp8-recipe custom and --fp8-quantizer-factory need each other")
        for given in (
            () if self.first_last_layers_bf16 else self._given("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
        ):
            raise ConfigError(f"{given} needs --first-last-layers-bf16")

    def _given(self, *names: str) -> list[str]:
        """Flags, all or those named, that differ from their default."""
        fields = [each for each in dataclasses.fields(self) if not names or each.name in names]
        return [flag_of(each) for each in fields if getattr(self, each.name) != each.default]

    def model_options(self) -> dict[str, Any]:
        """The fields of megatron-core's TransformerConfig."""
        if self.fp8_format is None:
            return {}
        renamed = {"fp8_format": "fp8", "fp8_param_gather": "fp8_param"}
        return {renamed.get(each.name, each.name): getattr(self, each.name) for each in dataclasses.fields(self)}
