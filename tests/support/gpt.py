"""A small real GPT and its training steps, unpipelined and through a schedule, for comparisons on a pool's ranks.

Everything here runs inside the ranks of a `RankPool`. Both sides build megatron-core's GPTModel, DDP and optimizer as a loop
does, one of them under `install`. Its schedule is made and called here, so that tests can reach into it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.layers import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

import megatron.zerobubble
from megatron.zerobubble.flags.loop_options import Seeds
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore.agreement import refusing_together
from megatron.zerobubble.mcore.attention.torch_attention import TorchDotProductAttention
from megatron.zerobubble.mcore.compat import router_loss_entries
from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.mcore.cpu.rotary import own_positions
from megatron.zerobubble.mcore.model.embeddings import FinalizeGradients
from megatron.zerobubble.mcore.stock_loop import patches
from megatron.zerobubble.mcore.stock_loop.stock_loop import StockLoop
from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.plan.registry import schedule_spec
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.training.models.layer_specs import stage_layers
from tests.support.process_groups import destroy_groups

SEQUENCE = 12
MICRO_BATCH = 2
VOCABULARY = 48

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    trainer_class: ClassVar[type[Trainer]]
    schedule: str
    num_ranks: int
    num_microbatches: int
    num_chunks: int = 1
    tensor_parallel: int = 1
    num_layers: int = 8
    layout: str | None = None
    """Which stage holds which layers, in the words of --pipeline-model-parallel-layout; None spreads them evenly."""
    max_pending_backward: int | None = None
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    tied: bool = False
    llama: bool = False
    dropout: float = 0.0
    per_token_loss: bool = False
    recompute: str | None = None
    """`full`, `block`, `selective`, or the modules of the last."""
    different_data: bool = False
    dtype: torch.dtype = torch.float32
    num_steps: int = 2
    gradient_step: int = 0
    """Whose gradients are compared."""
    clip_grad: float = 0.0
    optimizer: str = "adam"
    adam_eps: float = 1e-8
    sequence_parallel: bool = False
    context_parallel: int = 1
    own_attention: bool = False
    """Whether layers have megatron-core's own attention in place of torch's."""
    reduce_in_fp32: bool = True
    """Whether main gradients are float32, whatever the dtype."""
    loss_scale: float | None = None
    """With float16 a constant one; None scales dynamically."""
    initial_loss_scale: float = 1024.0

    def __str__(self) -> str:
        """The schedule, and the fields that have other values than their defaults."""
        own = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}
        first = f"{own.pop('schedule')}-p{own.pop('num_ranks')}-m{own.pop('num_microbatches')}"
        return "-".join([first, *(name if value is True else f"{name}={value}" for name, value in own.items())])

    @property
    def spec(self) -> ScheduleSpec:
        return schedule_spec(
            self.schedule,
            num_ranks=self.num_ranks,
            num_chunks=self.num_chunks,
            max_pending_backward=self.max_pending_backward,
        )

    def trainer(self, initial: Tensors | None = None) -> Trainer:
        return self.trainer_class(self, initial)

    @property
    def unpipelined(self) -> Case:
        return replace(self, schedule="stock", num_ranks=1, num_chunks=1, layout=None)


@dataclass
class Outcome:
    """What a training run of one rank left behind. Parameters by their name in the unpipelined model."""

    losses: list[list[float]]
    """Per step the loss of each microbatch; empty lists where the last stage is not."""
    gradients: Tensors
    """``main_grad`` after forward and backward of the case's `gradient_step`."""
    weights: Tensors
    """After the last step."""
    grad_norms: list[float]


class Trainer:
    """A rank's model, optimizer and schedule for one case. Creates and destroys megatron-core's parallel state.

    A subclass names with `trains` the cases that it is for.
    """

    config_type = TransformerConfig
    weights_seed: int | None = None
    """First weights are drawn by this seed and their names; None: as megatron-core does."""

    def __init_subclass__(cls, *, trains: type[Case] | None = None) -> None:
        if trains is not None:
            trains.trainer_class = cls

    def __init__(self, case: Case, initial: Tensors | None = None, *, seed: int = 1234) -> None:
        self.case = case
        self.device = torch.device(torch.cuda.current_device())
        self.host = HostDevice(enabled=self.device.type == "cpu")
        spec = case.spec
        virtual = case.num_chunks if case.num_chunks > 1 else None
        _leave()  # by a test that ended early
        self.loop = self._install()
        parallel_state.initialize_model_parallel(
            case.tensor_parallel,
            case.num_ranks,
            virtual,
            context_parallel_size=case.context_parallel,
            **self._parallel_sizes(),
        )
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        self.config = self._config()
        with self.host.on_host():
            self.chunks = self._wrapped(self._models())
            if initial is not None:
                self._load(initial)
            self.optimizer = self._optimizer()
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        self.store = None
        if not spec.is_stock:
            with refusing_together():
                self.store = self.loop.adopted.find(self.chunks).store
            self.config.finalize_model_grads_func = FinalizeGradients(spec.placement, finalize_model_grads)
        self.schedule = PipelineSchedule(spec, self.chunks, store=self.store, config=self.config, **self._schedule_options())

    def close(self) -> None:
        """Destroy every process group, and everything that refers to one. The trainer cannot be used afterwards."""
        # Autograd nodes whose hooks refer back to the chunk, and the distributed optimizer's shards, whose history holds such
        # nodes: cycles that Python cannot see.
        for chunk in self.chunks:
            chunk.grad_accs.clear()
        for part in self.optimizer.chained_optimizers:
            vars(part).clear()
        router_loss_entries().clear()  # megatron-core's, one for the process: the next model has other layers
        case = self.case
        vars(self).clear()
        self.case = case
        _leave()

    def _install(self) -> StockLoop | None:
        """The schedule's installation, as `install` makes it; None for megatron-core's own schedules."""
        case = self.case
        if case.spec.is_stock and self.weights_seed is None:
            return None
        slices = str(case.spec.num_slices) if case.spec.num_slices > 1 else None
        own = "zb-h1" if case.num_chunks == 1 else "zb-interleaved"  # for the weights of a stock schedule
        name = own if case.spec.is_stock else case.schedule
        flags = ZeroBubbleConfig(zero_bubble_schedule=name, zero_bubble_slices=slices)
        megatron.zerobubble.install(flags, seeds=Seeds(weights=self.weights_seed), checkpoints_by_parameter=True)
        return patches._installed()

    def _parallel_sizes(self) -> dict[str, Any]:
        return {}

    def _schedule_options(self) -> dict[str, Any]:
        return {}

    # -- construction -----------------------------------------------------------------------------------------------------

    def _config(self) -> TransformerConfig:
        case = self.case
        shape: dict[str, Any] = {}
        if case.llama:
            shape = {
                "num_query_groups": 2,
                "gated_linear_unit": True,
                "activation_func": torch.nn.functional.silu,
                "normalization": "RMSNorm",
                "add_bias_linear": False,
                "ffn_hidden_size": 48,
            }
        if case.recompute == "full":
            shape |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        elif case.recompute == "block":
            shape |= {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
        elif case.recompute is not None:
            modules = None if case.recompute == "selective" else case.recompute.split()
            shape |= {"recompute_granularity": "selective", "recompute_modules": modules}
        options: dict[str, Any] = {
            "num_layers": case.num_layers,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "transformer_impl": "local",
            "tensor_model_parallel_size": case.tensor_parallel,
            "sequence_parallel": case.sequence_parallel,
            "context_parallel_size": case.context_parallel,
            "pipeline_model_parallel_size": case.num_ranks,
            "virtual_pipeline_model_parallel_size": case.num_chunks if case.num_chunks > 1 else None,
            "pipeline_model_parallel_layout": self._layout(),
            "pipeline_dtype": case.dtype,
            "params_dtype": case.dtype,
            "bf16": case.dtype is torch.bfloat16,
            "fp16": case.dtype is torch.float16,
            "hidden_dropout": case.dropout,
            "attention_dropout": case.dropout,
            "calculate_per_token_loss": case.per_token_loss,
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            # On gloo megatron-core's overlapped sends read an output after it was deallocated, and report wrong losses.
            "deallocate_pipeline_outputs": not (case.schedule == "stock" and case.num_chunks > 1),
            # Without overlap megatron-core's interleaved schedule mixes up the two directions between two ranks.
            "overlap_p2p_comm": case.schedule == "stock" and case.num_chunks > 1,
            "batch_p2p_comm": not (case.schedule == "stock" and case.num_chunks > 1),
        }
        return self.config_type(**(options | shape | self._config_changes()))

    def _layout(self, num_mtp_layers: int = 0) -> str | None:
        return self.case.layout and self.case.layout.removesuffix("L") + "m" * num_mtp_layers + "L"

    def _config_changes(self) -> dict[str, Any]:
        return {}

    def _model_options(self, vp_stage: int | None) -> dict[str, Any]:
        return {"position_embedding_type": "rope" if self.case.llama else "learned_absolute"}

    def _ddp_config(self) -> DistributedDataParallelConfig:
        return DistributedDataParallelConfig(
            grad_reduce_in_fp32=self.case.reduce_in_fp32,
            overlap_grad_reduce=self.case.overlap_grad_reduce,
            overlap_param_gather=self.case.overlap_param_gather,
            use_distributed_optimizer=self.case.distributed_optimizer,
            bucket_size=2000 if self.case.overlap_grad_reduce else None,
        )

    def _optimizer(self) -> Any:
        return get_megatron_optimizer(self._optimizer_config(), self.chunks)

    def _optimizer_config(self) -> OptimizerConfig:
        return OptimizerConfig(
            optimizer=self.case.optimizer,
            lr=1e-2,
            min_lr=1e-2,
            adam_eps=self.case.adam_eps,
            weight_decay=0.01,
            clip_grad=self.case.clip_grad,
            bf16=self.case.dtype is torch.bfloat16,
            fp16=self.case.dtype is torch.float16,
            initial_loss_scale=self.case.initial_loss_scale,
            hysteresis=1,
            loss_scale=self.case.loss_scale,
            params_dtype=self.case.dtype,
            use_distributed_optimizer=self.case.distributed_optimizer,
            overlap_param_gather=self.case.overlap_param_gather,
        )

    def _models(self) -> list[Any]:
        """This rank's chunks, as a loop builds them."""
        models = []
        for number in range(self.case.num_chunks):
            vp_stage = number if self.case.num_chunks > 1 else None
            first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
            ends = {"ignore_virtual": False, "vp_stage": vp_stage}
            model = self._provide(first(**ends), last(**ends), vp_stage)
            for parameter in model.parameters():
                set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
            models.append(model.to(self.device))
        return [Float16Module(self.config, model) if model.config.fp16 or model.config.bf16 else model for model in models]

    def _wrapped(self, models: list[Any]) -> list[Any]:
        given: dict[str, Any] = {"config": self.config, "ddp_config": self._ddp_config()}
        chunks = [DistributedDataParallel(module=each, disable_bucketing=index > 0, **given) for index, each in enumerate(models)]
        if self.case.overlap_grad_reduce:
            syncs = [chunk.no_sync for chunk in chunks]
            self.config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        return chunks

    def _provide(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
        return GPTModel(
            config=self.config,
            transformer_layer_spec=self._layers(vp_stage),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=self.case.tied,
            vp_stage=vp_stage,
            **self._model_options(vp_stage),
        )

    def _layers(self, vp_stage: int | None) -> Any:
        if self.case.sequence_parallel:
            return stage_layers(self.config, vp_stage=vp_stage)
        layer = get_gpt_layer_local_spec(normalization=self.config.normalization)
        if not self.case.own_attention:
            layer.submodules.self_attention.submodules.core_attention = TorchDotProductAttention
        return layer

    def _load(self, initial: Tensors) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters():
                parameter.copy_(initial[name])

    # -- names ------------------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Every parameter with its name in the unpipelined model (layers by global index)."""
        for chunk in self.chunks:
            model = chunk.module.module if hasattr(chunk.module, "module") else chunk.module
            for name, parameter in model.named_parameters():
                words = name.split(".")
                if words[:2] == ["decoder", "layers"]:
                    words[2] = str(model.decoder.layers[int(words[2])].layer_number - 1)
                elif words[0] == "output_layer" and self.case.tied:
                    words = ["embedding", "word_embeddings", "weight"]
                yield ".".join(words), parameter

    def snapshot(self) -> Tensors:
        return {name: parameter.detach().clone() for name, parameter in self.parameters()}

    # -- training ---------------------------------------------------------------------------------------------------------

    def zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def train(self) -> Outcome:
        losses, norms = [], []
        gradients: Tensors = {}
        for step in range(self.case.num_steps):
            self.zero_gradients()
            losses.append(self.forward_backward(step))
            if step == self.case.gradient_step:
                gradients = {
                    name: parameter.main_grad.detach().clone()
                    for name, parameter in self.parameters()
                    if hasattr(parameter, "main_grad")  # not where gradients are sharded
                }
            with self.host.on_host():
                _, norm, _ = self.optimizer.step()
            norms.append(float(norm or 0.0))
        for chunk in self.chunks if self.case.overlap_param_gather else ():
            chunk.disable_forward_pre_hook(param_sync=True)
        return Outcome(losses, gradients, self.snapshot(), norms)

    def forward_backward(self, step: int, *, forward_only: bool = False) -> list[float]:
        """One call of the schedule; the losses of its microbatches, where the last stage is."""
        chunks = self.chunks
        iterators = [self.batches(step) for _ in chunks]
        forward_step = self.forward_step
        if self.loop is not None and self.loop.options.is_v:
            forward_step = self.loop.questions.answering(forward_step, chunks)
        results = self.schedule.forward_backward_func(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=self.case.num_microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH,
            forward_only=forward_only,
        )
        return [self.loss_of(result) for result in results]

    def loss_of(self, result: Any) -> float:
        return float(result["lm loss"])

    def batches(self, step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(tokens, labels) of each microbatch, the same on every rank unless `different_data`."""
        replica = parallel_state.get_data_parallel_rank() % 2 if self.case.different_data else 0
        for microbatch in range(self.case.num_microbatches):
            generator = torch.Generator().manual_seed(100_000 * replica + 1000 * step + microbatch)
            text = torch.randint(0, VOCABULARY, (MICRO_BATCH, SEQUENCE + 1), generator=generator).to(self.device)
            yield self._part(text[:, :-1]), self._part(text[:, 1:])

    def _part(self, sequences: torch.Tensor) -> torch.Tensor:
        """This context-parallel rank's part of [batch, sequence]."""
        if self.case.context_parallel == 1:
            return sequences
        return own_positions(sequences, 1, parallel_state.get_context_parallel_group())

    def forward_step(self, iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
        """megatron-core's contract: the output and a loss function."""
        tokens, labels = next(iterator)
        length = tokens.size(1) * self.case.context_parallel
        positions = self._part(torch.arange(length, device=self.device).expand(MICRO_BATCH, length))
        output = model(tokens, positions, None, labels=labels)

        def loss_func(per_token: torch.Tensor) -> tuple[Any, ...]:
            total = per_token.float().sum()
            mean = total.detach() / per_token.numel()
            if self.case.per_token_loss:
                return total, torch.tensor(per_token.numel(), dtype=torch.int, device=per_token.device), {"lm loss": mean}
            return total / per_token.numel() / self.case.context_parallel, {"lm loss": mean}

        return output, loss_func


Case.trainer_class = Trainer


def _leave() -> None:
    """Undo what a trainer has installed, and destroy its groups."""
    megatron.zerobubble.uninstall()
    if parallel_state.model_parallel_is_initialized():
        destroy_groups()
