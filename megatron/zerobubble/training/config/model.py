"""Architecture and precision of the model: the flags of the groups "Model" and "Precision".

Every group of flags is one frozen dataclass; the docstring under a field is the flag's help text (see `flags`). Names, defaults
and meanings are Megatron-LM's. `__post_init__` checks what a group can check alone, and its method `check` what it needs others
for. Each failure is an error of one line: what was given, what is allowed, what to do.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass, field, replace
from typing import Literal

from packaging.version import Version

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.require import at_most, divides, one_of, positive, within
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore.model.transformer_engine import OLDEST_TRANSFORMER_ENGINE
from megatron.zerobubble.training.config.parallel import ParallelConfig

__all__ = ["ModelConfig", "PrecisionConfig"]

_WIDEST = 2**24
"""Most channels, heads and groups."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model."""

    num_layers: int
    """Number of transformer layers."""
    hidden_size: int
    """Hidden size: the width of the residual stream."""
    num_attention_heads: int
    """Number of attention heads."""
    seq_length: int
    """Sequence length: tokens per sample."""
    max_position_embeddings: int | None = None
    """Positions of learned position embeddings, at least --seq-length. No effect with other position embeddings. Default:
    --seq-length."""
    ffn_hidden_size: int | None = None
    """Intermediate width of the MLP. Default: 4 * --hidden-size, or with --swiglu 8/3 of it, rounded down to a multiple of 64."""
    group_query_attention: bool = False
    """Use grouped-query attention: share keys and values between groups of query heads."""
    num_query_groups: int = 1
    """Number of key/value groups with --group-query-attention."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """Position embedding: learned absolute, rotary (rope) or none."""
    rotary_base: int = 10000
    """Base period of rotary position embeddings."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Normalization layer."""
    qk_layernorm: bool = False
    """Normalize queries and keys before the attention scores."""
    swiglu: bool = False
    """Use SwiGLU (gated linear units with SiLU) in the MLP instead of GELU."""
    add_bias_linear: bool = field(default=True, metadata={"flag": "--disable-bias-linear"})
    """Linear layers without bias. By default they have one."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weights. By default it shares those of the word embeddings."""
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary size to a multiple of this value times --tensor-model-parallel-size."""
    hidden_dropout: float = 0.1
    """Dropout probability after attention, MLP and embedding."""
    attention_dropout: float = 0.1
    """Dropout probability of the attention weights."""
    init_method_std: float = 0.02
    """Standard deviation of the normal distribution of the initial weights."""
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] = "auto"
    """Kernels that may compute attention. With --transformer-impl local these are torch's: flash attention (flash), cuDNN's or
    memory-efficient ones (fused, on GPUs), plain operations (unfused), or any (auto); local is megatron-core's own attention,
    which keeps the scores of every query and key in memory. With transformer_engine they are Transformer Engine's."""
    transformer_impl: Literal["local", "transformer_engine"] | None = None
    """Layer implementation: megatron-core's own (local), or Transformer Engine's, which must be installed and needs CUDA. By
    default transformer_engine if --distributed-backend nccl is given and it is installed, but for --attention-backend local."""
    use_cpu_initialization: bool = False
    """Initialize the weights on the CPU, which makes them the same for every tensor-parallel size."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole transformer layers (full), or the submodules that --recompute-modules
    lists (selective). Default: no recomputation."""
    recompute_activations: bool = False
    """The same as --recompute-granularity selective."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With --recompute-granularity full: checkpoint the input of every --recompute-num-layers layers (uniform), or recompute only
    the first --recompute-num-layers layers of each stage (block)."""
    recompute_num_layers: int | None = None
    """With --recompute-granularity full: layers per checkpointed unit (uniform), or recomputed layers per stage (block)."""
    recompute_modules: tuple[str, ...] = ()
    """With --recompute-granularity selective: the submodules to recompute, of core_attn, mla_up_proj, mlp, moe, shared_experts
    and layernorm. Default: core_attn."""
    mtp_num_layers: int | None = None
    """Number of multi-token prediction (MTP) layers. They run on the stage that computes the loss, and each predicts one more
    future token. Default: none."""
    gradient_accumulation_fusion: bool = True
    """Do not fuse gradient accumulation into the wgrad GEMM. By default Apex's kernel does, on GPUs where Apex is installed."""
    bias_gelu_fusion: bool = True
    """Do not fuse bias and GELU into one kernel. By default they are fused, on GPUs."""
    bias_dropout_fusion: bool = True
    """Do not fuse bias, dropout and residual into one kernel. By default they are fused, on GPUs."""

    def __post_init__(self) -> None:
        positive(self, "num_layers", "hidden_size", "num_attention_heads", "seq_length", "num_query_groups")
        positive(self, "ffn_hidden_size", "make_vocab_size_divisible_by", "recompute_num_layers", "max_position_embeddings")
        positive(self, "mtp_num_layers", "init_method_std", "rotary_base")
        at_most(self, 10_000, "num_layers", "mtp_num_layers")
        at_most(self, _WIDEST, "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size")
        at_most(self, 2**31 - 1, "seq_length", "max_position_embeddings", "make_vocab_size_divisible_by", "recompute_num_layers")
        at_most(self, 2**53, "rotary_base")
        within(self, 0.0, 1.0, "hidden_dropout", "attention_dropout")
        if self.num_positions < self.seq_length:
            raise ConfigError(
                f"--max-position-embeddings {self.max_position_embeddings} is less than --seq-length {self.seq_length}; give at "
                "least that, or leave it out"
            )
        if self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"--hidden-size {self.hidden_size} does not divide over --num-attention-heads "
                f"{self.num_attention_heads}; change one of them"
            )
        if self.group_query_attention and self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"--num-attention-heads {self.num_attention_heads} does not divide over --num-query-groups "
                f"{self.num_query_groups}"
            )
        if self.attention_backend == "local" and self.transformer_impl == "transformer_engine":
            raise ConfigError(
                "--attention-backend local is megatron-core's own attention, which --transformer-impl transformer_engine does "
                "not have; choose auto, flash, fused or unfused"
            )
        self._check_mtp()
        self._check_recompute()

    def check(self, parallel: ParallelConfig, zero_bubble: ZeroBubbleConfig) -> None:
        """Raise ConfigError unless the layers can be sharded, have kernels on this device, and their packages are installed."""
        self._check_attention(parallel, zero_bubble)
        needs = {"--num-attention-heads": self.num_attention_heads}
        if self.group_query_attention:
            needs["--num-query-groups"] = self.num_query_groups
        if self.ffn_hidden_size is not None:
            needs["--ffn-hidden-size"] = self.ffn_hidden_size
        if parallel.sequence_parallel:
            needs["--seq-length"] = self.seq_length
        divides(parallel.tensor_model_parallel_size, "--tensor-model-parallel-size", needs)
        self._check_context(parallel)
        self._check_installed(parallel, zero_bubble)

    def check_rotary(self) -> None:
        """Raise ConfigError unless rotary position embeddings can rotate the channels of a head in pairs."""
        rotated = self.hidden_size // self.num_attention_heads
        if self.position_embedding_type == "rope" and rotated % 2:
            raise ConfigError(
                f"--hidden-size {self.hidden_size} / --num-attention-heads {self.num_attention_heads} = {rotated} rotated "
                "channels per attention head; --position-embedding-type rope rotates pairs and needs an even number"
            )

    def _check_attention(self, parallel: ParallelConfig, zero_bubble: ZeroBubbleConfig) -> None:
        """Raise unless torch has the kernels of --attention-backend on this device."""
        if self.attention_backend == "local" and zero_bubble.zero_bubble_torch_attention:
            raise ConfigError(
                "--attention-backend local is megatron-core's own attention, and --zero-bubble-torch-attention replaces it: "
                "leave one of them out"
            )
        if parallel.distributed_backend != "gloo" or self.transformer_impl != "local":
            return
        if self.attention_backend == "fused":
            raise ConfigError(
                "--attention-backend fused needs CUDA, and --distributed-backend is gloo: choose auto, flash, unfused or local"
            )
        if self.attention_backend == "flash" and self.attention_dropout > 0:
            raise ConfigError(
                f"--attention-backend flash with --attention-dropout {self.attention_dropout} needs CUDA, and "
                "--distributed-backend is gloo: give --attention-dropout 0, or choose auto"
            )

    def _check_context(self, parallel: ParallelConfig) -> None:
        """Raise unless sequences divide over the context-parallel ranks and every layer can shard them."""
        size, tensor = parallel.context_parallel_size, parallel.tensor_model_parallel_size
        if size == 1:
            return
        flag = f"--context-parallel-size {size}"
        if self.seq_length % (2 * size):
            near = self.seq_length // (2 * size) * 2 * size or 2 * size
            raise ConfigError(
                f"--seq-length {self.seq_length} is not divisible by 2 x {flag} = {2 * size}: each rank holds two slices of "
                f"equal length; {near} would be"
            )
        if parallel.sequence_parallel and self.seq_length // size % tensor:
            raise ConfigError(
                f"--seq-length {self.seq_length} over {flag} is {self.seq_length // size} tokens per rank, which "
                f"--sequence-parallel cannot divide over --tensor-model-parallel-size {tensor}"
            )
        if self.attention_backend == "local":
            raise ConfigError(f"{flag}: --attention-backend local needs whole sequences; choose auto, flash, fused or unfused")

    def with_layers(self, parallel: ParallelConfig) -> ModelConfig:
        """With the default of --transformer-impl, unless it was given."""
        if self.transformer_impl is not None:
            return self
        is_engine = parallel.distributed_backend == "nccl" and self.attention_backend != "local"
        is_engine = is_engine and importlib.util.find_spec("transformer_engine") is not None
        return replace(self, transformer_impl="transformer_engine" if is_engine else "local")

    def _check_installed(self, parallel: ParallelConfig, zero_bubble: ZeroBubbleConfig) -> None:
        engine = f"pip install 'transformer-engine[pytorch]>={OLDEST_TRANSFORMER_ENGINE}'"
        if self.transformer_impl == "local":
            return
        flag = "--transformer-impl transformer_engine"
        if importlib.util.find_spec("transformer_engine") is None:
            raise ConfigError(
                f"{flag} needs the package transformer_engine, which is not installed: {engine} on a machine with CUDA, or leave "
                "it out to use megatron-core's layers"
            )
        if parallel.distributed_backend == "gloo":
            raise ConfigError(f"{flag} needs CUDA, and --distributed-backend is gloo: leave one of them out")
        installed = Version(importlib.metadata.version("transformer_engine"))
        if zero_bubble.schedule != "stock" and installed < OLDEST_TRANSFORMER_ENGINE:
            raise ConfigError(
                f"{flag}: version {installed} is installed, whose deferred weight gradients DDP cannot follow; schedule "
                f"{zero_bubble.schedule} needs {OLDEST_TRANSFORMER_ENGINE} or later ({engine}), or leave it out"
            )

    @property
    def num_positions(self) -> int:
        """Rows of the table of learned position embeddings: --max-position-embeddings or its default."""
        return self.seq_length if self.max_position_embeddings is None else self.max_position_embeddings

    @property
    def recomputed(self) -> Literal["full", "selective"] | None:
        """What is recomputed: --recompute-granularity, or what --recompute-activations stands for."""
        return "selective" if self.recompute_activations else self.recompute_granularity

    @property
    def mlp_width(self) -> int:
        """Intermediate width of the MLP: --ffn-hidden-size or its default."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return max(1, int(4 * self.hidden_size * 2 / 3) // 64) * 64 if self.swiglu else 4 * self.hidden_size

    def _check_mtp(self) -> None:
        if self.mtp_num_layers is not None and self.position_embedding_type == "learned_absolute":
            raise ConfigError(
                "--mtp-num-layers does not support learned position embeddings: the MTP layers would have a second copy whose "
                "gradients nothing all-reduces; choose --position-embedding-type rope or none"
            )

    def _check_recompute(self) -> None:
        if self.recompute_activations and self.recompute_granularity == "full":
            raise ConfigError(
                "--recompute-activations is --recompute-granularity selective, and full is given; leave one of them out"
            )
        if self.recompute_granularity == "full":
            if self.recompute_method is None or self.recompute_num_layers is None:
                raise ConfigError(
                    "--recompute-granularity full needs --recompute-method (uniform or block) and --recompute-num-layers"
                )
        elif self.recompute_method is not None or self.recompute_num_layers is not None:
            raise ConfigError("--recompute-method and --recompute-num-layers need --recompute-granularity full")
        if self.recompute_modules and self.recomputed != "selective":
            raise ConfigError("--recompute-modules needs --recompute-granularity selective")
        for name in self.recompute_modules:
            one_of(name, ("core_attn", "mla_up_proj", "mlp", "moe", "shared_experts", "layernorm"), "--recompute-modules")
        if "layernorm" in self.recompute_modules and self.transformer_impl == "local":
            raise ConfigError(
                "--recompute-modules layernorm needs --transformer-impl transformer_engine: megatron-core recomputes "
                "normalization layers with its modules; leave layernorm out"
            )
        if "mlp" in self.recompute_modules and self.add_bias_linear:
            raise ConfigError(
                "--recompute-modules mlp needs --disable-bias-linear: the MLP returns a bias of its own, which megatron-core's "
                "recomputation would take for a result, and the backward pass would never end"
            )
        is_one_by_one = (self.recompute_method, self.recompute_num_layers) == ("uniform", 1)
        if self.mtp_num_layers is not None and self.recompute_granularity == "full" and not is_one_by_one:
            raise ConfigError(
                "--mtp-num-layers with --recompute-granularity full needs --recompute-method uniform and --recompute-num-layers 1"
            )


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision."""

    bf16: bool = False
    """Train in bfloat16 with fp32 master weights. Default: fp32."""
    fp16: bool = False
    """Train in float16 with fp32 master weights and loss scaling. Default: fp32."""
    loss_scale: float | None = None
    """Static loss scale, with --fp16. Default: dynamic loss scaling."""
    initial_loss_scale: float = 2.0**32
    """Initial value of the dynamic loss scale."""
    loss_scale_window: float = 1000
    """Number of iterations without overflow after which the dynamic loss scale doubles."""
    hysteresis: int = 2
    """Number of iterations with overflow after which the dynamic loss scale halves."""
    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32. Implied by --bf16, unless --grad-reduce-in-bf16 is given."""
    grad_reduce_in_bf16: bool = False
    """With --bf16: accumulate and reduce gradients in bfloat16."""

    def __post_init__(self) -> None:
        positive(self, "loss_scale", "initial_loss_scale", "loss_scale_window", "hysteresis")
        at_most(self, 2**127, "loss_scale", "initial_loss_scale")  # scaled losses are fp32
        at_most(self, 2**31 - 1, "loss_scale_window", "hysteresis")
        if self.loss_scale is not None and self.loss_scale < 2.0**-126:
            raise ConfigError(f"--loss-scale {self.loss_scale} is 0 in fp32; give a larger one, such as 1")
        if self.initial_loss_scale < 1.0:
            raise ConfigError(f"--initial-loss-scale {self.initial_loss_scale:g} is less than 1, the least that it becomes")
        if self.bf16 and self.fp16:
            raise ConfigError("--bf16 and --fp16 are both given; choose one")
        if self.loss_scale is not None and not self.fp16:
            raise ConfigError("--loss-scale needs --fp16")
        if self.grad_reduce_in_bf16 and not self.bf16:
            raise ConfigError("--grad-reduce-in-bf16 needs --bf16")
        if self.grad_reduce_in_bf16 and self.accumulate_allreduce_grads_in_fp32:
            raise ConfigError("--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 contradict each other")

    @property
    def name(self) -> str:
        """`fp32`, `bf16` or `fp16`."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @property
    def reduce_grads_in_fp32(self) -> bool:
        """Whether gradients are accumulated and reduced in fp32 (`main_grad` is fp32)."""
        return self.accumulate_allreduce_grads_in_fp32 or (self.bf16 and not self.grad_reduce_in_bf16)
