"""Megatron-Bridge's own `pretrain()` on its own recipes, run by the ranks of a `RankPool`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch

import megatron.zerobubble
from tests.frameworks.recipes import RECIPES
from tests.support.mamba import stand_ins
from tests.support.megatron_lm import loop_of_its_own
from tests.support.stock import example
from tests.support.transformer_engine import attention
from tests.support.transformer_engine.graphs import CUDAGraph
from tests.support.transformer_engine.userbuffers import initialized

__all__ = ["GPT", "INTERLEAVED", "SMALL", "VANILLA", "WITHOUT_CUDA", "Run", "pretrain", "set_fields", "train_recipe"]

WITHOUT_CUDA: dict[str, Any] = {
    "dist.distributed_backend": "gloo",
    "model.gradient_accumulation_fusion": False,
    "model.masked_softmax_fusion": False,
    "model.persist_layer_norm": False,
    "model.bias_dropout_fusion": False,
    "model.cross_entropy_loss_fusion": False,
    "model.apply_rope_fusion": False,
}
"""What Bridge gets on a machine without CUDA: fused kernels that are compiled for a GPU."""
SMALL: dict[str, Any] = {
    "model.seq_length": 32,
    "dataset.seq_length": 32,
    "dataset.num_workers": 0,
    "train.train_iters": 5,
    "train.global_batch_size": 8,
    "train.micro_batch_size": 2,
    "validation.eval_interval": 5,
    "validation.eval_iters": 1,
    "scheduler.lr_warmup_iters": 0,
    "scheduler.lr_decay_iters": 100,
    "optimizer.lr": 1e-2,
    "logger.log_interval": 1,
    "logger.tensorboard_dir": None,
    "checkpoint.save": None,
    "checkpoint.load": None,
    "checkpoint.save_interval": None,
    "checkpoint.async_save": False,
}
"""A short job on its mock data, for any recipe."""
GPT: dict[str, Any] = {
    "model.num_layers": 4,
    "model.hidden_size": 32,
    "model.num_attention_heads": 4,
    "model.hidden_dropout": 0.0,
    "model.attention_dropout": 0.0,
    "model.pipeline_model_parallel_size": 2,
    "model.vocab_size": None,
    "model.make_vocab_size_divisible_by": 4,
    "tokenizer.vocab_size": 90,
    "mixed_precision": None,
    "model.pipeline_dtype": torch.float32,
}
"""Sizes of the recipe `VANILLA`, in float32."""
VANILLA = "megatron.bridge.recipes.gpt.h100.vanilla_gpt:vanilla_gpt_pretrain_1gpu_h100_bf16_config"
INTERLEAVED: dict[str, Any] = {
    "model.virtual_pipeline_model_parallel_size": 2,
    # without it megatron-core's interleaved schedule trains on wrong gradients with two pipeline ranks
    "model.overlap_p2p_comm": True,
    "model.batch_p2p_comm": False,
    # on gloo its overlapped sends read an output after it was freed
    "model.deallocate_pipeline_outputs": False,
}
"""Two chunks per rank, right under megatron-core's own schedule, too."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What one rank saw of a job."""

    losses: dict[int, dict[str, float]]
    """iteration -> losses by name; none on ranks without a loss."""
    norms: dict[int, float]
    """iteration -> norm of the gradients."""
    schedule: str
    """The schedule that ran."""
    printed: str
    """Standard output."""
    replays: int = 0
    """How often a CUDA graph was replayed."""


def pretrain(rank: int, recipe: str, changes: Mapping[str, Any], schedule: str | None = None) -> Run:
    """Train on one rank.

    Args:
        rank: of the pool.
        recipe: "module:function".
        changes: what is set in the recipe's configuration, by dotted names.
        schedule: what is installed; None leaves megatron-core's own.
    """
    with loop_of_its_own(LOCAL_RANK=str(rank), CUDA_DEVICE_MAX_CONNECTIONS="1") as printed:
        warnings.simplefilter("ignore")
        if schedule is not None:
            megatron.zerobubble.install(schedule=schedule)
        losses, norms = _pretrain(configured(recipe, changes))
        status = megatron.zerobubble.status()
    return Run(losses, norms, "stock" if status is None else status.schedule, printed.getvalue())


def train_recipe(rank: int, name: str, changes: Mapping[str, Any], schedule: str | None = None) -> Run:
    """`pretrain` by a recipe of `recipes.RECIPES`, its model from there, with further `changes`."""
    import transformers
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge

    recipe = RECIPES[name]
    hub = dict(recipe.hub)
    kind = getattr(transformers, hub.pop("kind"))

    def from_hf_pretrained(_: str, **__: Any) -> Any:
        return AutoBridge.from_hf_config(kind(**hub))

    changes = {**recipe.changes, **changes}
    ring = attention.enabled() if changes.get("model.context_parallel_size", 1) > 1 else contextlib.nullcontext()
    with (
        mock.patch.object(AutoBridge, "from_hf_pretrained", from_hf_pretrained),
        mock.patch.object(CUDAGraph, "replay", autospec=True, side_effect=CUDAGraph.replay) as replay,
        userbuffers(),
        stand_ins(),
        ring,
    ):
        run = pretrain(rank, f"megatron.bridge.{recipe.function}", changes, schedule)
    return dataclasses.replace(run, replays=replay.call_count)


@contextlib.contextmanager
def userbuffers() -> Iterator[None]:
    """Transformer Engine's Userbuffers as doubles, once a framework has asked for them."""
    import transformer_engine.pytorch as te

    with contextlib.ExitStack() as stack:

        def initialize_ub(**_: Any) -> None:
            stack.enter_context(initialized())

        stack.enter_context(mock.patch.object(te, "initialize_ub", initialize_ub))
        yield


def initialize_weights(chunks: list[Any]) -> list[Any]:
    """Draw each matrix by its name and its layer's number: placements are then comparable."""
    for chunk in chunks:
        example().initialize_weights(chunk)
    return chunks


def configured(recipe: str, changes: Mapping[str, Any]) -> Any:
    """The recipe's configuration with these changes."""
    module, _, function = recipe.partition(":")
    config = getattr(importlib.import_module(module), function)()
    set_fields(config, {**SMALL, **WITHOUT_CUDA, **changes})
    config.model.register_pre_wrap_hook(initialize_weights)
    return config


def set_fields(config: Any, values: Mapping[str, Any]) -> None:
    """Set fields of a configuration by dotted names, as Bridge's overrides do."""
    for name, value in values.items():
        *owners, last = name.split(".")
        owner = functools.reduce(getattr, owners, config)
        if not hasattr(owner, last):
            raise AttributeError(f"the recipe has no {name}")
        setattr(owner, last, value)


def _pretrain(config: Any) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    losses: dict[int, dict[str, float]] = {}
    norms: dict[int, float] = {}

    class Digits(Callback):
        def on_train_step_end(self, context: Any) -> None:
            step = context.state.train_state.step
            losses[step] = {name: float(value) for name, value in (context.loss_dict or {}).items()}
            norms[step] = float(context.grad_norm)

    pretrain(config, forward_step, callbacks=[Digits()])
    return losses, norms
