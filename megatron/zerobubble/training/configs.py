"""megatron-core's configurations, by the flags and what this machine has.

megatron-core checks the values of its own fields. What it raises becomes a `ConfigError` of one line, before a process group
exists.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.dataclass_flags import from_namespace
from megatron.zerobubble.messages import one_line
from megatron.zerobubble.training.core_flags import given_fields
from megatron.zerobubble.training.tokenizer import TokenizerConfig

__all__ = ["Configs", "make_configs", "refused_in_one_line"]


@dataclass(frozen=True, kw_only=True)
class Configs:
    """The flags, and megatron-core's configurations that they make."""

    args: argparse.Namespace
    """The trainer's own flags, with `on_cpu` and what `arguments` derives from them."""
    model: Any
    """TransformerConfig."""
    optimizer: OptimizerConfig
    """Of the optimizer, clipping and loss scaling."""
    ddp: DistributedDataParallelConfig
    """How gradients are accumulated and reduced."""
    tokenizer: TokenizerConfig
    """The tokenizer."""


def make_configs(args: argparse.Namespace) -> Configs:
    """The configurations that flags make. Raises ConfigError for values that megatron-core refuses."""
    with refused_in_one_line():
        of_optimizer, of_ddp = (given_fields(each, args) for each in (OptimizerConfig, DistributedDataParallelConfig))
        return Configs(
            args=args,
            model=_model(args),
            optimizer=OptimizerConfig(**of_optimizer, params_dtype=_dtype(args)),
            ddp=DistributedDataParallelConfig(**{"grad_reduce_in_fp32": getattr(args, "bf16", False)} | of_ddp),
            tokenizer=from_namespace(TokenizerConfig, args),
        )


@contextmanager
def refused_in_one_line() -> Iterator[None]:
    """Inside, any exception of megatron-core is raised again as a ConfigError of one line."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"megatron-core refuses these flags: {one_line(str(error)) or type(error).__name__}") from error


def _dtype(args: argparse.Namespace) -> torch.dtype:
    if getattr(args, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(args, "fp16", False) else torch.float32


def _model(args: argparse.Namespace) -> TransformerConfig:
    config_class = MLATransformerConfig if getattr(args, "multi_latent_attention", False) else TransformerConfig
    given = given_fields(config_class, args)
    if not args.group_query_attention:
        given.pop("num_query_groups", None)
    if args.recompute_activations:
        given.setdefault("recompute_granularity", "selective")
    if args.swiglu:
        given |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
        given.setdefault("ffn_hidden_size", max(1, int(4 * args.hidden_size * 2 / 3) // 64) * 64)
    if isinstance(each := given.get("moe_layer_freq", 1), int):
        given["moe_layer_freq"] = [int(number % each == 0) for number in range(args.num_layers)]
    has_engine = not args.on_cpu and _is_installed("transformer_engine")
    given.setdefault("transformer_impl", "transformer_engine" if has_engine else "local")
    overlaps = args.num_chunks > 1
    defaults = {
        "virtual_pipeline_model_parallel_size": args.num_chunks if overlaps else None,
        "params_dtype": _dtype(args),
        "pipeline_dtype": _dtype(args),
        "overlap_p2p_comm": overlaps,
        "batch_p2p_comm": not overlaps,
        "deallocate_pipeline_outputs": not (args.on_cpu and overlaps),
        "cuda_graph_scope": [],
        **({} if args.on_cpu else _fused_kernels(args, with_engine=given["transformer_impl"] == "transformer_engine")),
    }
    return config_class(**defaults | given)


def _fused_kernels(args: argparse.Namespace, *, with_engine: bool) -> dict[str, Any]:
    """Fused kernels of a GPU that are installed. Transformer Engine adds to `main_grad` without apex."""
    softmax = all(map(_is_installed, ("scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda")))
    return {
        "bias_activation_fusion": args.swiglu or getattr(args, "add_bias_linear", True),
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": softmax,
        "apply_rope_fusion": with_engine
        and args.position_embedding_type == "rope"
        and not hasattr(args, "multi_latent_attention"),
        "gradient_accumulation_fusion": with_engine or _is_installed("fused_weight_gradient_mlp_cuda"),
    }


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
