"""One real GPT under several schedules in one process group: megatron-core's own, unmodified, and ours.

All contenders are built once and live side by side, so that every round runs one iteration of each; building them anew for every
round would put seconds, and cold memory, between the two halves of every ratio. All share one set of megatron-core's process
groups. Contenders differ in the number of chunks, which is set before each iteration by megatron-core's own setter, and in the
ranks that hold embedding and head, which makes no difference as the two are not tied.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.mcore.model.embeddings import FinalizeGradients
from megatron.zerobubble.mcore.model.float16 import StageFloat16Module
from megatron.zerobubble.mcore.model.stage_layout import StageLayout
from megatron.zerobubble.mcore.model.wgrad_split import split_weight_gradients
from megatron.zerobubble.mcore.stock_loop.adoption import make_store
from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.registry import schedule_info, schedule_spec
from megatron.zerobubble.plan.schedule_spec import STOCK, ScheduleSpec
from megatron.zerobubble.plan.simulate import TimedOp
from megatron.zerobubble.plan.timeline import Activity
from megatron.zerobubble.wgrad.store import WeightGradStore
from tools.benchmarks.schedules.contenders import ContenderSpec, Runtime, Sizes

VOCABULARY = 256
"""Vocabulary size: tokens are bytes."""
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 0.01
SEED = 1234


def set_up(host: HostDevice, num_ranks: int) -> None:
    """Create megatron-core's process groups for a pipeline over all ranks. Every rank must call it once."""
    host.install()
    parallel_state.initialize_model_parallel(1, num_ranks)


def tear_down(host: HostDevice) -> None:
    """Undo `set_up`. Every rank must call it after it has closed its contenders."""
    parallel_state.destroy_model_parallel()
    host.uninstall()


def text(sizes: Sizes, num_microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, int64 [num_microbatches * micro_batch_size, seq_length]: source code of the standard library."""
    count = num_microbatches * sizes.micro_batch_size * sizes.seq_length
    source = Path(argparse.__file__).read_bytes()
    stream = torch.frombuffer(bytearray(source * (count // len(source) + 1))[: count + 1], dtype=torch.uint8).long()
    return stream[:-1].view(-1, sizes.seq_length), stream[1:].view(-1, sizes.seq_length)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A GPT on a pipeline."""

    config: TransformerConfig
    """Its layers, and how they are placed."""
    optimizer: OptimizerConfig
    """How it is stepped."""
    vocabulary: int = VOCABULARY
    """Rows of the embedding and of the head, which are not tied."""
    positions: Any = "learned_absolute"
    """Kind of position embedding."""
    layers: Callable[[int | None], Any] = lambda _: get_gpt_layer_local_spec()
    """vp_stage -> the spec of a stage's layers."""


class GPTContender:
    """A rank's chunks of a model, their optimizer, and a schedule. Every rank must construct it at the same point.

    Args:
        spec: the schedule.
        model: is built for that schedule.
        sizes: of a microbatch.
        host: the installed host-device layer.
    """

    def __init__(self, spec: ScheduleSpec, model: Model, sizes: Sizes, host: HostDevice) -> None:
        self._spec, self._model, self._sizes, self._host = spec, model, sizes, host
        self._store: WeightGradStore | None = None
        self._losses: list[Any] = []
        self._set_num_chunks()
        torch.manual_seed(SEED)
        model_parallel_cuda_manual_seed(SEED)
        with host.on_host():
            self._chunks = self._build()
            self._optimizer = get_megatron_optimizer(model.optimizer, self._chunks, use_gloo_process_groups=False)
        self._schedule = PipelineSchedule(spec, self._chunks, store=self._store, config=model.config)
        self._schedule.recordings.every = 1

    def iterate(self, num_microbatches: int) -> None:
        """Run forward, backward and the optimizer step."""
        self._set_num_chunks()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        iterators = [self._batches(num_microbatches) for _ in self._chunks]
        self._losses = self._schedule.forward_backward_func(
            forward_step_func=self._forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._chunks if len(iterators) > 1 else self._chunks[0],
            num_microbatches=num_microbatches,
            seq_length=self._sizes.seq_length,
            micro_batch_size=self._sizes.micro_batch_size,
            forward_only=False,
        )
        with self._schedule.recorder.span(Activity.OPTIMIZER), self._host.on_host():
            self._optimizer.step()

    def timed_ops(self) -> list[TimedOp]:
        """The ops of the last iteration on the host's clock; empty for megatron-core's own schedules."""
        return self._schedule.recorder.timed_ops()

    @property
    def schedule(self) -> PipelineSchedule:
        """The schedule that runs the iterations."""
        return self._schedule

    def loss(self) -> float | None:
        """Mean loss of the last iteration on the rank with the last stage, otherwise None."""
        return sum(float(loss["loss"]) for loss in self._losses) / len(self._losses) if self._losses else None

    def close(self) -> None:
        """Destroy the schedule's process groups. Every rank must call it."""
        self._schedule.close()

    def _set_num_chunks(self) -> None:
        """Set the number of chunks per rank in megatron-core's global state, which its stock schedules read."""
        chunks = self._spec.num_chunks
        parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks if chunks > 1 else None)

    def _build(self) -> list[Any]:
        """This rank's chunks, wrapped by DDP; before that B and W are split, unless megatron-core schedules."""
        placement, config = self._spec.placement, self._model.config
        stages = placement.rank_to_stages[parallel_state.get_pipeline_model_parallel_rank()]
        models = [
            self._chunk(stage, placement.num_stages, vp_stage if len(stages) > 1 else None)
            for vp_stage, stage in enumerate(stages)
        ]
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, delay_wgrad_compute=not self._spec.is_stock)
        config.finalize_model_grads_func = FinalizeGradients(placement, finalize_model_grads)
        if not self._spec.is_stock:
            self._store = make_store(config, ddp_config, self._host.device)
            for model in models:
                split_weight_gradients(model, self._store)
        return [DistributedDataParallel(config=config, ddp_config=ddp_config, module=model) for model in models]

    def _chunk(self, stage: int, num_stages: int, vp_stage: int | None) -> Any:
        chunk = GPTModel(
            config=self._model.config,
            transformer_layer_spec=self._model.layers(vp_stage),
            vocab_size=self._model.vocabulary,
            max_sequence_length=self._sizes.seq_length,
            pre_process=stage == 0,
            post_process=stage == num_stages - 1,
            share_embeddings_and_output_weights=False,
            position_embedding_type=self._model.positions,
            vp_stage=vp_stage,
        ).to(self._host.device)
        return StageFloat16Module(self._model.config, chunk) if self._model.config.bf16 else chunk

    def _batches(self, num_microbatches: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        tokens, labels = (each.to(self._host.device) for each in text(self._sizes, num_microbatches))
        return zip(tokens.chunk(num_microbatches), labels.chunk(num_microbatches), strict=True)

    def _forward_step(self, iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
        tokens, labels = next(iterator)
        positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        return model(tokens, positions, None, labels=labels), _mean


def _mean(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = per_token.float().mean()
    return loss, {"loss": loss.detach().clone()}  # megatron-core divides the loss in place


def build(contender: ContenderSpec, sizes: Sizes, num_ranks: int, host: HostDevice) -> GPTContender:
    """A contender of megatron-core's runtime or ours, with the model of these sizes. Every rank must call it."""
    name = STOCK if contender.runtime is Runtime.STOCK else contender.schedule
    spec = schedule_spec(name, num_ranks=num_ranks, num_chunks=schedule_info(contender.schedule).default_num_chunks)
    model = Model(config=_transformer_config(sizes, spec), optimizer=_optimizer_config())
    return GPTContender(spec, model, sizes, host)


def placed(num_layers: int, spec: ScheduleSpec) -> dict[str, Any]:
    """Options of a TransformerConfig for a schedule's pipeline, with as many layers in each stage."""
    is_v = spec.placement.name not in ("linear", "loop")
    interleaves = spec.is_stock and spec.num_chunks > 1
    return {
        "num_layers": num_layers,
        "pipeline_model_parallel_size": spec.num_ranks,
        "virtual_pipeline_model_parallel_size": spec.num_chunks if spec.num_chunks > 1 else None,
        "pipeline_model_parallel_layout": StageLayout(StageLayers.spread(num_layers, spec.placement), spec.placement)
        if is_v
        else None,
        # Without overlap megatron-core's interleaved schedule mixes up the two directions between two ranks; with it, on gloo,
        # it reads outputs that were already deallocated.
        "overlap_p2p_comm": interleaves,
        "batch_p2p_comm": not interleaves,
        "deallocate_pipeline_outputs": not interleaves,
    }


def _optimizer_config() -> OptimizerConfig:
    """AdamW without clipping, which would only add the same global norm to every contender."""
    return OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        min_lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        clip_grad=0.0,
        params_dtype=torch.float32,
    )


def _transformer_config(sizes: Sizes, spec: ScheduleSpec) -> TransformerConfig:
    return TransformerConfig(
        **placed(sizes.num_layers, spec),
        hidden_size=sizes.hidden_size,
        num_attention_heads=sizes.num_attention_heads,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
