"""What is trained and in which order: model, precision, schedule.

One frozen dataclass per group of flags; the docstring under a field is the flag's help text (see `flags`). Names, defaults
and meanings are Megatron-LM's. `__post_init__` checks what a group can check alone; `checks` does the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.registry import known_schedules, parse_max_pending_backward, schedule_info
from megatron.zerobubble.training.memory_limit import MemoryLimit
from megatron.zerobubble.training.require import not_negative, one_of, positive, within

__all__ = ["ModelConfig", "PrecisionConfig", "ZeroBubbleConfig"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Model."""

    num_layers: int
    """Number of transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    num_attention_heads: int
    """Number of attention heads."""
    seq_length: int
    """Tokens per sample."""
    ffn_hidden_size: int | None = None
    """Width of the MLP. Default: 4 * hidden size, or with --swiglu 8/3 of it, rounded down to a multiple of 64."""
    kv_channels: int | None = None
    """Width of one attention head. Default: hidden size / number of heads."""
    group_query_attention: bool = False
    """Share keys and values between groups of query heads."""
    num_query_groups: int = 1
    """Number of key/value groups with --group-query-attention."""
    max_position_embeddings: int | None = None
    """Number of learned positions; at least the sequence length. Default: the sequence length."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """How positions enter the model."""
    rotary_base: int = 10000
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Part of each head that is rotated."""
    rotary_interleaved: bool = False
    """Rotate neighbouring channels instead of the two halves of a head."""
    rotary_seq_len_interpolation_factor: float | None = None
    """Stretch rotary positions by this factor."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Normalization layer."""
    norm_epsilon: float = 1e-5
    """Epsilon inside the normalization."""
    qk_layernorm: bool = False
    """Normalize queries and keys before the attention scores."""
    swiglu: bool = False
    """Gated linear units with SiLU in the MLP instead of GELU."""
    squared_relu: bool = False
    """Squared ReLU in the MLP instead of GELU."""
    add_bias_linear: bool = field(default=True, metadata={"flag": "--disable-bias-linear"})
    """Linear layers without bias."""
    add_qkv_bias: bool = False
    """A bias in the QKV projection even with --disable-bias-linear."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weights instead of the embedding's."""
    make_vocab_size_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times the tensor-parallel size."""
    hidden_dropout: float = 0.1
    """Dropout after attention, MLP and embedding."""
    attention_dropout: float = 0.1
    """Dropout on attention probabilities."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights."""
    apply_query_key_layer_scaling: bool = False
    """Scale attention scores by 1 / layer number."""
    attention_softmax_in_fp32: bool = False
    """Run the attention mask and softmax in fp32."""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """Layers of megatron-core itself, or of Transformer Engine where it is installed."""
    use_cpu_initialization: bool = False
    """Draw the initial weights on the CPU, the same for every tensor-parallel size."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers, or core attention only."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With --recompute-granularity full: which layers."""
    recompute_num_layers: int | None = None
    """With --recompute-granularity full: how many layers."""
    gradient_accumulation_fusion: bool = True
    """Do not use Apex's fused weight gradient kernel where it is installed."""
    masked_softmax_fusion: bool = True
    """Do not use Apex's fused softmax where it is installed."""
    bias_gelu_fusion: bool = True
    """Do not compile bias and GELU into one kernel (only done on GPUs)."""
    bias_swiglu_fusion: bool = True
    """Do not compile bias and SwiGLU into one kernel (only done on GPUs)."""
    bias_dropout_fusion: bool = True
    """Do not compile bias, dropout and residual into one kernel (only done on GPUs)."""

    def __post_init__(self) -> None:
        positive(self, "num_layers", "hidden_size", "num_attention_heads", "seq_length", "num_query_groups")
        positive(self, "ffn_hidden_size", "kv_channels", "make_vocab_size_divisible_by", "recompute_num_layers")
        positive(self, "norm_epsilon", "init_method_std", "rotary_base", "rotary_seq_len_interpolation_factor")
        within(self, 0.0, 1.0, "hidden_dropout", "attention_dropout")
        if not 0.0 < self.rotary_percent <= 1.0:
            raise ConfigError(f"--rotary-percent {self.rotary_percent} must be in (0, 1]")
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
            raise ConfigError(
                f"--hidden-size {self.hidden_size} does not divide over --num-attention-heads "
                f"{self.num_attention_heads}; change one of them or give --kv-channels"
            )
        if self.group_query_attention and self.num_attention_heads % self.num_query_groups:
            raise ConfigError(
                f"--num-attention-heads {self.num_attention_heads} does not divide over --num-query-groups "
                f"{self.num_query_groups}"
            )
        if self.max_position_embeddings is not None and self.max_position_embeddings < self.seq_length:
            raise ConfigError(
                f"--max-position-embeddings {self.max_position_embeddings} is less than --seq-length {self.seq_length}"
            )
        if self.swiglu and self.squared_relu:
            raise ConfigError("--swiglu and --squared-relu are both given; the MLP has one activation")
        self._check_recompute()

    def _check_recompute(self) -> None:
        if self.recompute_granularity == "full":
            if self.recompute_method is None or self.recompute_num_layers is None:
                raise ConfigError(
                    "--recompute-granularity full needs --recompute-method (uniform or block) and --recompute-num-layers"
                )
        elif self.recompute_method is not None or self.recompute_num_layers is not None:
            raise ConfigError("--recompute-method and --recompute-num-layers need --recompute-granularity full")


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Precision."""

    bf16: bool = False
    """Compute in bfloat16, with fp32 master weights. Default: fp32."""
    fp16: bool = False
    """Compute in float16, with fp32 master weights and loss scaling."""
    loss_scale: float | None = None
    """Constant loss scale. Default: dynamic with --fp16, none otherwise."""
    initial_loss_scale: float = 2.0**32
    """First value of the dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Smallest value of the dynamic loss scale."""
    loss_scale_window: float = 1000
    """Iterations without overflow after which the dynamic loss scale doubles."""
    hysteresis: int = 2
    """Overflows after which the dynamic loss scale halves."""
    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32. Always so with --bf16, unless --grad-reduce-in-bf16."""
    grad_reduce_in_bf16: bool = False
    """With --bf16: accumulate and reduce gradients in bfloat16."""
    fp16_lm_cross_entropy: bool = False
    """With --fp16: compute the cross entropy in float16."""

    def __post_init__(self) -> None:
        positive(self, "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        if self.bf16 and self.fp16:
            raise ConfigError("--bf16 and --fp16 are both given; choose one")
        if self.loss_scale is not None and not self.fp16:
            raise ConfigError("--loss-scale needs --fp16")
        if self.fp16_lm_cross_entropy and not self.fp16:
            raise ConfigError("--fp16-lm-cross-entropy needs --fp16")
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
        """Whether main gradients are fp32."""
        return self.accumulate_allreduce_grads_in_fp32 or (self.bf16 and not self.grad_reduce_in_bf16)


_V_SCHEDULES = {"zb": "zbv", "half": "v-half", "min": "v-min"}
_TIMED, _URGENT = (100, 10), (2, 2)
"""First timed iteration and how many follow it: usually, and where memory waits for it."""


@dataclass(frozen=True, kw_only=True)
class ZeroBubbleConfig:
    """Zero bubble.

    Without any of these megatron-core's own 1F1B runs, or interleaved 1F1B with
    --num-layers-per-virtual-pipeline-stage. The papers are arXiv 2401.10241 and 2405.15362.
    """

    enable_zero_bubble: bool = False
    """Split the backward pass and fill the bubble with weight gradients. Alone: ZB-H1, with the memory of 1F1B."""
    zero_bubble_max_pending_backward: str | None = field(default=None, metadata={"metavar": "1p|2p|N"})
    """Microbatches that a rank may hold between forward pass and weight gradient: 1p (ZB-H1), 2p (ZB-H2, no bubble, twice
    the activation memory), or a number. Implies --enable-zero-bubble."""
    zero_bubble_v_schedule: bool = False
    """ZBV: two chunks per rank, placed in a V; no bubble with the memory of 1F1B. Implies --enable-zero-bubble."""
    zero_bubble_schedule: str | None = field(default=None, metadata={"metavar": "NAME"})
    """A schedule by name: stock (megatron-core's own 1F1B); one that our executor runs: 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb,
    zbv, v-half, v-min, 1f1b-v or zb-interleaved (the interleaved ones with --num-virtual-stages-per-pipeline-rank, 2 without); or
    auto: measure the model, then take the fastest within --zero-bubble-memory-limit, by default 1F1B's. Not together with the
    other flags that choose a schedule."""
    zero_bubble_v_schedule_mem_setup: str = field(default="zb", metadata={"metavar": "zb|half|min"})
    """Memory of --zero-bubble-v-schedule: zb, that of 1F1B (ZBV); half of it (V-Half); or min, a third (V-Min)."""
    zero_bubble_memory_limit: str | None = field(default=None, metadata={"metavar": "X|BYTES|auto"})
    """Memory under which the order of ops is searched for. A number: most activation memory on any rank, in units of what 1F1B
    holds on the first one. Bytes such as 60GiB: all that a rank holds, weights, gradients and optimizer state included. auto:
    what fits the device. What microbatches hold in bytes is measured, in iterations 2 to 4 unless others are timed; until then
    the order that holds least runs. With --enable-zero-bubble (ZB), --zero-bubble-v-schedule, or a schedule that is searched for;
    instead of --zero-bubble-max-pending-backward and --zero-bubble-v-schedule-mem-setup."""
    zero_bubble_pipeline_timers_start_iter: int | None = None
    """First iteration, counted from the start of the job, whose passes are timed. After the last one the order of ops is searched
    for the measured times. Default: 100, for schedules that are not one fixed order, unless a plan is loaded."""
    zero_bubble_pipeline_timers_end_iter: int | None = None
    """Last iteration whose passes are timed. Default: ten after the first."""
    zero_bubble_replan_interval: int | None = None
    """Time passes and search again after so many iterations more."""
    zero_bubble_planning_seconds: float = 10.0
    """About how long one rank searches after timing, while the others wait; 0 does not time or search."""
    zero_bubble_save_plan: str | None = field(default=None, metadata={"metavar": "FILE"})
    """Write the plan that runs last, with the costs it was made for, as JSON (see tools/plan.py show)."""
    zero_bubble_load_plan: str | None = field(default=None, metadata={"metavar": "FILE"})
    """Run this plan from the first iteration on. Alone it names the schedule, too; otherwise its stages must sit where the
    schedule's do."""
    zero_bubble_balance_stages: bool = False
    """Measure what a layer, the embedding and the head take, and say which --pipeline-model-parallel-layout would leave the
    busiest rank the least to do."""
    zero_bubble_trace: str | None = field(default=None, metadata={"metavar": "DIR"})
    """At the end of the run, write what recorded iterations looked like: trace.json (Perfetto), report.json, and for each its
    plan and a picture of plan and reality. See docs/reading-the-trace.md."""
    zero_bubble_trace_iterations: str | None = field(default=None, metadata={"metavar": "N[,N...]"})
    """With --zero-bubble-trace: record these iterations, numbered as in progress lines. Default: the last one that was recorded;
    the second is, and every twentieth after it."""

    enable_optimizer_post_validation: bool = False
    """Step the optimizer before all ranks' gradient norms and overflows are known, and correct the step afterwards where they
    say so. Changes nothing but the time; by default takes a copy of weights and optimizer state between the step and its
    validation."""
    post_validation_patience: int = 10
    """After a step that had to be corrected, how many steps wait for all ranks and turn out to need no correction before one is
    taken early again. 0: every step is taken early."""
    post_validation_rollback: str = field(default="exact", metadata={"metavar": "exact|inverse"})
    """How a step is taken back: from a copy, to the bit; or without one, by inverting Adam, with a small error, and where that
    would lose more than that (gradients far above what Adam has seen) the step waits for all ranks."""
    post_validation_snapshot: str = field(default="device", metadata={"metavar": "device|host"})
    """Where that copy is kept: beside the weights, or in host memory."""

    def __post_init__(self) -> None:
        one_of(self.post_validation_rollback, ("exact", "inverse"), "--post-validation-rollback")
        one_of(self.post_validation_snapshot, ("device", "host"), "--post-validation-snapshot")
        if self.post_validation_patience < 0:
            raise ConfigError(f"--post-validation-patience is {self.post_validation_patience}; give 0 or a number of steps")
        if self.trace_iterations and self.zero_bubble_trace is None:
            raise ConfigError("--zero-bubble-trace-iterations needs --zero-bubble-trace DIR")
        given = self.zero_bubble_max_pending_backward
        if given is not None:
            self.max_pending_microbatches(num_ranks=1)
        if given is not None and self.zero_bubble_v_schedule:
            raise ConfigError(
                "--zero-bubble-max-pending-backward and --zero-bubble-v-schedule are both given; "
                "the V schedule's memory is fixed, leave the first one out"
            )
        if self.zero_bubble_schedule is not None:
            one_of(self.zero_bubble_schedule, _schedule_names(), "--zero-bubble-schedule")
            if self.enable_zero_bubble or given is not None or self.zero_bubble_v_schedule:
                raise ConfigError(
                    f"--zero-bubble-schedule {self.zero_bubble_schedule} already names the schedule; leave out "
                    "--enable-zero-bubble, --zero-bubble-max-pending-backward and --zero-bubble-v-schedule"
                )
        self._check_memory()
        self._check_planning()

    def _check_memory(self) -> None:
        one_of(self.zero_bubble_v_schedule_mem_setup, tuple(_V_SCHEDULES), "--zero-bubble-v-schedule-mem-setup")
        setup = self.zero_bubble_v_schedule_mem_setup
        if setup != "zb" and not self.zero_bubble_v_schedule:
            raise ConfigError(f"--zero-bubble-v-schedule-mem-setup {setup} needs --zero-bubble-v-schedule")
        limit = self.zero_bubble_memory_limit
        if self.memory_limit is None:
            return
        if self.zero_bubble_max_pending_backward is not None or setup != "zb":
            raise ConfigError(
                f"--zero-bubble-memory-limit {limit} replaces --zero-bubble-max-pending-backward and "
                "--zero-bubble-v-schedule-mem-setup; leave those out"
            )
        if self.schedule == AUTO and not self.memory_limit.is_relative:
            raise ConfigError(
                f"--zero-bubble-memory-limit {limit}: with --zero-bubble-schedule auto give a number; 1 is 1F1B's memory"
            )
        if self.schedule == "stock" or not _is_searched(self.schedule):
            raise ConfigError(
                f"--zero-bubble-memory-limit {limit}: schedule {self.schedule} is one fixed order; give --enable-zero-bubble, "
                f"--zero-bubble-v-schedule, or --zero-bubble-schedule with one of {', '.join(_searched_names())}"
            )

    def _check_planning(self) -> None:
        start, end = self.zero_bubble_pipeline_timers_start_iter, self.zero_bubble_pipeline_timers_end_iter
        interval = self.zero_bubble_replan_interval
        positive(self, "zero_bubble_pipeline_timers_start_iter", "zero_bubble_replan_interval")
        not_negative(self, "zero_bubble_planning_seconds")
        asked = (start, end, interval) != (None, None, None)
        if asked and not self._can_replan:
            raise ConfigError(
                f"schedule {self.schedule} is one fixed order: --zero-bubble-pipeline-timers-start-iter, -end-iter and "
                f"--zero-bubble-replan-interval need --enable-zero-bubble, --zero-bubble-v-schedule, or --zero-bubble-schedule "
                f"with one of {', '.join(_searched_names())}"
            )
        first, last = self._window
        if last < first:
            raise ConfigError(
                f"--zero-bubble-pipeline-timers-end-iter {last} is before the first timed iteration {first} "
                "(--zero-bubble-pipeline-timers-start-iter)"
            )
        if interval is not None and interval < last - first + 1:
            raise ConfigError(
                f"--zero-bubble-replan-interval {interval} is shorter than the {last - first + 1} iterations that are timed; "
                "give at least that many, or a shorter window"
            )
        if self.memory_limit is not None and not self.memory_limit.is_relative and self.timed_iterations is None:
            raise ConfigError(
                f"--zero-bubble-memory-limit {self.zero_bubble_memory_limit} needs iterations that are measured: give "
                "--zero-bubble-planning-seconds above 0, and with --zero-bubble-load-plan a --zero-bubble-replan-interval"
            )
        if self.zero_bubble_save_plan is not None and self.schedule == "stock":
            raise ConfigError("--zero-bubble-save-plan: the stock schedule has no plan; choose one of ours")
        if self.plan is not None:
            one_of(self.schedule, _schedule_names()[2:], f"--zero-bubble-load-plan {self.zero_bubble_load_plan}: its schedule")

    @property
    def timed_iterations(self) -> tuple[int, int] | None:
        """First and last iteration of the job whose passes are timed to search for a better order; None: none are."""
        given = (self.zero_bubble_pipeline_timers_start_iter, self.zero_bubble_pipeline_timers_end_iter)
        asked = (*given, self.zero_bubble_replan_interval) != (None, None, None)
        if not self._can_replan or self.zero_bubble_planning_seconds == 0 or (self.plan is not None and not asked):
            return None
        return self._window

    @property
    def _window(self) -> tuple[int, int]:
        start, end = self.zero_bubble_pipeline_timers_start_iter, self.zero_bubble_pipeline_timers_end_iter
        is_urgent = self.memory_limit is not None and not self.memory_limit.is_relative
        first = (_URGENT if is_urgent else _TIMED)[0] if start is None else start
        return first, first + (_URGENT if is_urgent else _TIMED)[1] if end is None else end

    @cached_property
    def memory_limit(self) -> MemoryLimit | None:
        """What --zero-bubble-memory-limit says. Raises ConfigError where that is nothing we know."""
        return None if self.zero_bubble_memory_limit is None else MemoryLimit.parse(self.zero_bubble_memory_limit)

    @property
    def _can_replan(self) -> bool:
        """Whether the order is ours to choose. ZB-H1 and ZB-H2 by name are one order each; by memory they are where ZB begins."""
        if self.schedule == "stock":
            return False
        return _is_searched(self.schedule) or self.zero_bubble_schedule is None

    @cached_property
    def plan(self) -> Plan | None:
        """What --zero-bubble-load-plan holds; read once.

        Raises:
            ConfigError: it cannot be read.
            PlanError: it is not a plan.
        """
        if self.zero_bubble_load_plan is None:
            return None
        try:
            return Plan.from_json(Path(self.zero_bubble_load_plan).read_bytes())
        except OSError as error:
            raise ConfigError(f"--zero-bubble-load-plan {self.zero_bubble_load_plan}: {error.strerror}") from None
        except PlanError as error:
            raise PlanError(f"--zero-bubble-load-plan {self.zero_bubble_load_plan}: {error}") from None

    @property
    def schedule(self) -> str:
        """The schedule's name: `stock`, or a name the plan registry knows."""
        if self.zero_bubble_schedule is not None:
            return self.zero_bubble_schedule
        if self.zero_bubble_v_schedule:
            return _V_SCHEDULES[self.zero_bubble_v_schedule_mem_setup]
        given = self.zero_bubble_max_pending_backward
        if given is not None:
            return {"1p": "zb-h1", "2p": "zb-h2"}.get(given.strip().lower(), "zb")
        if self.enable_zero_bubble:
            return "zb-h1" if self.zero_bubble_memory_limit is None else "zb"
        return "stock" if self.plan is None else self.plan.schedule

    @property
    def trace_iterations(self) -> frozenset[int]:
        """What --zero-bubble-trace-iterations says; empty where it is not given."""
        given = self.zero_bubble_trace_iterations
        if given is None:
            return frozenset()
        words = [word.strip() for word in given.split(",")]
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            raise ConfigError(f"--zero-bubble-trace-iterations {given!r} must be iterations from 1 on, for example 100,200")
        return frozenset(map(int, words))

    def max_pending_microbatches(self, *, num_ranks: int) -> int | None:
        """What --zero-bubble-max-pending-backward says, in microbatches; None where it is not given."""
        if self.zero_bubble_max_pending_backward is None:
            return None
        try:
            return parse_max_pending_backward(self.zero_bubble_max_pending_backward, num_ranks)
        except ConfigError as error:
            raise ConfigError(f"--zero-bubble-max-pending-backward: {error}") from None


def _schedule_names() -> tuple[str, ...]:
    """What --zero-bubble-schedule takes."""
    return ("stock", AUTO, *(info.name for info in known_schedules()))


def _is_searched(name: str) -> bool:
    return name == AUTO or schedule_info(name).is_searched


def _searched_names() -> tuple[str, ...]:
    """Those whose order is searched for."""
    return (AUTO, *(info.name for info in known_schedules() if info.is_searched))
