"""Schedule, planner, trace and post-validation: the flags of the group "Zero bubble".

One frozen dataclass; the docstring under a field is the flag's help text (see `flags`). Names and meanings are those of the zero
bubble papers' own flags where those exist. `__post_init__` checks what can be checked alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.files import MOST_GIVEN, read_regular
from megatron.zerobubble.flags.memory_limit import MemoryLimit
from megatron.zerobubble.flags.require import at_most, not_negative, of_types, one_of, positive
from megatron.zerobubble.flags.targets import Target
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.planner import AUTO, AUTO_MEMORY_LIMIT
from megatron.zerobubble.plan.registry import (
    ScheduleName,
    known_schedules,
    meant_schedule,
    parse_max_pending_backward,
    parse_num_slices,
    schedule_info,
    schedule_spec,
)
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.simulate import read_plan

__all__ = ["ZeroBubbleConfig"]

_V_SCHEDULES = {"zb": "zbv", "half": "v-half", "min": "v-min"}
_TIMED, _URGENT = (100, 10), (2, 2)
"""(First profiled iteration, how many follow it): by default, and if `auto` or a memory limit in bytes needs it soon."""
_MEASURED_SLICES = 4
"""Slices in the profiled iterations of --zero-bubble-slices auto: `costs.slicing.unlike_lengths`."""


@dataclass(frozen=True, kw_only=True)
class ZeroBubbleConfig:
    """Zero bubble.

    Without any of these flags megatron-core's own 1F1B runs, or its interleaved 1F1B with
    --num-layers-per-virtual-pipeline-stage. F is a forward pass, B the input-gradient half of a backward pass (dgrad) and W its
    weight-gradient half (wgrad). The papers are arXiv 2401.10241 and 2405.15362.
    """

    enable_zero_bubble: bool = False
    """Run a zero-bubble schedule: split the backward pass into B (dgrad) and W (wgrad), and fill the bubble with W. Without
    another flag that chooses a schedule: ZB-H1 (ZB-1p), with the activation memory of 1F1B."""
    zero_bubble_max_pending_backward: str | None = field(default=None, metadata={"metavar": "1p|2p|N"})
    """Maximum number of microbatches per rank between F and W: 1p (ZB-H1, a third of 1F1B's bubble at its activation memory), 2p
    (ZB-H2, no bubble at twice the activation memory), or a number. Implies --enable-zero-bubble."""
    zero_bubble_v_schedule: bool = False
    """Run ZBV: two chunks per rank, placed in a V; no bubble at the activation memory of 1F1B. Implies --enable-zero-bubble."""
    zero_bubble_schedule: ScheduleName | None = field(default=None, metadata={"metavar": "NAME"})
    """Schedule by name: stock (megatron-core's own 1F1B); 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb, zbv, v-half, v-min, 1f1b-v,
    zb-w or zb-interleaved (interleaved ones take --num-virtual-stages-per-pipeline-rank, by default 2); or auto, which profiles
    iterations 2 to 4 and then runs the fastest order within --zero-bubble-memory-limit (by default 1F1B's) that the run's model
    chunks allow: one per rank, two in a V with --zero-bubble-v-schedule, or --num-virtual-stages-per-pipeline-rank. It says if
    other chunks would be faster. Excludes the other flags that choose a schedule."""
    zero_bubble_v_schedule_mem_setup: Literal["zb", "half", "min"] = field(default="zb", metadata={"metavar": "zb|half|min"})
    """Activation memory of --zero-bubble-v-schedule: that of 1F1B (zb, ZBV); half of it and a microbatch more (half, V-Half: 0.63
    of it for 8 pipeline ranks, 0.56 for 16); or the least (min, V-Min: 0.50 and 0.38)."""
    zero_bubble_memory_limit: str | None = field(default=None, metadata={"metavar": "X|BYTES|auto"})
    """Memory limit per rank under which the planner searches for the fastest order of passes. A number limits activation memory,
    in units of 1F1B's on the first rank. Bytes, such as 60GiB, limit the total: weights, gradients, optimizer state and
    activations. auto: the memory of the device. For bytes and auto, the memory of a microbatch is measured in iterations 2 to 4
    (or those of --zero-bubble-pipeline-timers-start-iter); until then the order of least memory runs. Needs a schedule with a
    searched order: --enable-zero-bubble, --zero-bubble-v-schedule or a name such as zb. Replaces
    --zero-bubble-max-pending-backward and --zero-bubble-v-schedule-mem-setup. Default: the limit of the schedule."""
    zero_bubble_pipeline_timers_start_iter: int | None = None
    """First iteration of the job whose passes are profiled. After the last one, the planner searches for a better order with the
    profiled timings. Default: 100 for schedules with a searched order, unless a plan is loaded."""
    zero_bubble_pipeline_timers_end_iter: int | None = None
    """Last iteration whose passes are profiled. Default: ten after --zero-bubble-pipeline-timers-start-iter."""
    zero_bubble_replan_interval: int | None = None
    """Profile and re-plan again every this many iterations. Default: plan once."""
    zero_bubble_planning_seconds: float = 10.0
    """Time budget in seconds of the planner's search on one rank after profiling, while the other ranks wait; 0 disables
    profiling and search."""
    zero_bubble_p2p_max_ctas: int | None = None
    """Most CTAs (thread blocks) of a transfer between stages on NCCL: what a waiting receive takes from the kernels beside it.
    Give a power of two; NCCL rounds others up. Default: 4 if all ranks of the pipeline are on one host, otherwise NCCL's choice
    (not timed on several GPUs; the reasons: docs/benchmarks/settled.md)."""
    zero_bubble_batch_p2p_comm: bool = False
    """To find out why a run hangs on GPUs: send and receive what the plan has between two ops in one batch_isend_irecv, on one
    communicator, and wait for it before the next op, as megatron-core's 1F1B does. No transfer then runs beside an op, and
    iterations are slower. Default: a communicator per link, and transfers beside the ops."""
    zero_bubble_save_plan: str | None = field(default=None, metadata={"metavar": "FILE"})
    """JSON file to write the last plan of the run to, with the costs it was made for. Read it with zerobubble show."""
    zero_bubble_load_plan: str | None = field(default=None, metadata={"metavar": "FILE"})
    """JSON file of a plan to run from the first iteration on. Without a flag that chooses a schedule, the plan's schedule runs;
    with one, the plan must place its stages on the same ranks."""
    zero_bubble_balance_stages: bool = False
    """Measure the time of one layer, the embedding and the head, and log the fastest --pipeline-model-parallel-layout of all
    schedules within the memory of the running plan."""
    zero_bubble_shard_gradients: int | None = field(default=None, metadata={"metavar": "K"})
    """Shard gradients over the data-parallel ranks while they accumulate (ZeRO-2): W of K microbatches of a layer run together,
    followed by one reduce-scatter. Gradient memory per rank is then its shard and two buckets; up to K-1 more microbatches wait
    between B and W, and each bucket is reduced (microbatches / K) times per step. Needs --use-distributed-optimizer. Default:
    off."""
    zero_bubble_slices: str | None = field(default=None, metadata={"metavar": "N|auto"})
    """Cut every microbatch into N slices along its sequence. A slice sees the keys and values of the slices before it, so losses
    and gradients are those of whole microbatches, up to the order of sums. Bubble and activation memory shrink with N; kernels
    run on shorter sequences. Of microbatches of unequal lengths the longest has N, and shorter ones have as many as make about
    the same work. For long sequences. Needs a schedule with slices: 1f1b, zb-h1, zb-h2, zb, zbv, v-half or v-min, and
    a loss function that returns the sum of the losses, the number of tokens and a report. auto measures slices of unlike lengths
    in the profiled iterations, then goes on with 1, 2, 4, 8 or 16, the fastest by the planner; a run that is repeated
    may choose another number. Default: those of the --zero-bubble-load-plan plan, else 1."""
    zero_bubble_slice_positions: Literal["absolute", "from-zero"] | None = field(
        default=None, metadata={"metavar": "absolute|from-zero"}
    )
    """With slices of a model that takes position ids (learned or multimodal ones): what those are that the loop gives it in every
    slice, absolute for positions in the whole sequence, as where they are cut with the batch, or from-zero where the loop counts
    the tokens of what it read. Default: found out in every slice from the values and the batch; on a GPU that waits for the
    device, and what could be both or is neither is refused."""
    zero_bubble_overlap_moe: bool = False
    """Hide the all-to-alls of experts: a forward and a backward pass that the plan has side by side are launched together, and
    each computes while the other one communicates; beside those of other passes W computes. Losses and weights are those without
    it, bit for bit. The order of passes may be another one, with one microbatch more in memory if there is no memory limit. Takes
    the alltoall dispatcher; other models run as without the flag, after one line. A model whose configuration has
    overlap_moe_expert_parallel_comm runs so anyway. Not run on a GPU."""
    zero_bubble_trace: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Directory to write a trace to at the end of the run: trace.json (for Perfetto), report.json, and per recorded iteration
    its plan and a timeline of measured vs. planned; with stock schedules, too. In a training loop of your own it is written
    after the last of --zero-bubble-trace-iterations; without them after the iterations 2, 4, 7 and 12, by uninstall, and at
    the end of a script under zerobubble run. See docs/reading-the-trace.md."""
    zero_bubble_trace_iterations: str | None = field(default=None, metadata={"metavar": "N[,N...]"})
    """With --zero-bubble-trace: iterations to record, numbered as in progress lines, and in a loop of your own from 1 on.
    Default: the last recorded one; the second, fourth, seventh and twelfth iteration are recorded, and every twentieth from the
    second on."""

    zero_bubble_watchdog_seconds: float | None = None
    """Watchdog timeout in seconds, from the first rendezvous to the end of the job: if nothing is heard of a rank for longer than
    this, or it spends longer in one op or waiting for one message, the rank that holds up the job is named, every rank logs what
    it is doing, and the job exits. The first iteration may take longer. 0 disables the watchdog. Default: half of
    --distributed-timeout-minutes. In a training loop of your own it watches from the first call of the schedule on, and what the
    loop does between two calls may take as long as it takes; default there: off, and half of the timeout of the process groups
    under zerobubble run."""

    zero_bubble_torch_attention: bool = False
    """In a training loop of your own: replace megatron-core's own attention, which keeps the scores of every query and key, by
    torch's fused attention in the model that the loop builds. The reference trainer does so anyway; see --attention-backend."""

    enable_optimizer_post_validation: bool = False
    """Step the optimizer optimistically, before the global gradient norm and overflow status are known, and correct the step
    afterwards if they require it (post-validation). Results are those of the synchronous optimizer. By default a snapshot of
    weights and optimizer state is held from the step to its validation."""
    post_validation_patience: int = 10
    """After a corrected step, number of consecutive synchronous steps that would have needed no correction before steps are
    optimistic again. 0: every step is optimistic."""
    post_validation_rollback: Literal["exact", "inverse"] = field(default="exact", metadata={"metavar": "exact|inverse"})
    """How an optimistic step is rolled back: from a snapshot, bit for bit (exact); or without one, by inverting Adam, with a
    small rounding error (inverse). Steps that could not be inverted accurately, with gradients far above Adam's moments, are
    synchronous."""
    post_validation_snapshot: Literal["device", "host"] = field(default="device", metadata={"metavar": "device|host"})
    """Memory that holds the snapshot of --post-validation-rollback exact: the device's, or host memory."""

    def __post_init__(self) -> None:
        of_types(self, meant=meant_schedule)
        not_negative(self, "zero_bubble_watchdog_seconds")
        positive(self, "zero_bubble_p2p_max_ctas")
        at_most(self, 2**31 - 1, "zero_bubble_p2p_max_ctas", "zero_bubble_shard_gradients")
        at_most(self, 10**6, "zero_bubble_planning_seconds")
        if self.post_validation_patience < 0:
            raise ConfigError(f"--post-validation-patience is {self.post_validation_patience}; give 0 or a number of steps")
        if self.trace_iterations and self.zero_bubble_trace is None:
            raise ConfigError("--zero-bubble-trace-iterations needs --zero-bubble-trace DIR")
        if self.zero_bubble_overlap_moe and self.schedule == "stock":
            raise ConfigError(
                "--zero-bubble-overlap-moe pairs passes of a plan, and the stock schedule has none: choose a schedule, or set "
                "overlap_moe_expert_parallel_comm, with virtual stages"
            )
        given = self.zero_bubble_max_pending_backward
        if given is not None:
            self.max_pending_microbatches(num_ranks=1)
        if given is not None and self.zero_bubble_v_schedule:
            raise ConfigError(
                "--zero-bubble-max-pending-backward and --zero-bubble-v-schedule are both given; "
                "the V schedule's memory is fixed, leave the first one out"
            )
        if self.zero_bubble_schedule is not None:
            is_v = self.zero_bubble_v_schedule and self.zero_bubble_schedule != AUTO
            if self.enable_zero_bubble or given is not None or is_v:
                raise ConfigError(
                    f"--zero-bubble-schedule {self.zero_bubble_schedule} already names the schedule; leave out "
                    "--enable-zero-bubble, --zero-bubble-max-pending-backward and --zero-bubble-v-schedule"
                )
        self._check_memory()
        self._check_planning()
        self._check_shards()
        self._check_slices()

    def _check_slices(self) -> None:
        given = self.zero_bubble_slices
        if self.zero_bubble_slice_positions is not None and self.num_slices == 1:
            raise ConfigError("--zero-bubble-slice-positions needs slices: give --zero-bubble-slices, or leave it out")
        if self.num_slices == 1:
            return
        sliced = [info.name for info in known_schedules() if info.takes_slices]
        flag = f"--zero-bubble-slices {given}" if given else f"--zero-bubble-load-plan with {self.num_slices} slices"
        if self.schedule not in sliced:
            raise ConfigError(f"{flag}: schedule {self.schedule} has no order of slices; choose one of {', '.join(sliced)}")
        if self.zero_bubble_shard_gradients is not None:
            raise ConfigError(
                f"{flag} does not go with --zero-bubble-shard-gradients, whose Ws of whole microbatches run together; leave one "
                "of them out"
            )
        if self.zero_bubble_balance_stages:
            raise ConfigError(
                f"{flag} does not go with --zero-bubble-balance-stages, which compares layouts of whole microbatches; leave one "
                "of them out"
            )
        if self.chooses_slices and self.timed_iterations is None:
            raise ConfigError(
                f"{flag} needs profiled iterations and an order that is searched: give --zero-bubble-planning-seconds above 0, "
                "and a schedule such as zb or zbv, or a number of slices"
            )
        if self.plan is not None and (self.chooses_slices or self.plan.num_slices != self.num_slices):
            raise ConfigError(
                f"{flag}: the --zero-bubble-load-plan plan has {self.plan.num_slices} slices per microbatch; leave the number "
                "out, or load another plan"
            )

    def _check_shards(self) -> None:
        positive(self, "zero_bubble_shard_gradients")
        given = f"--zero-bubble-shard-gradients {self.zero_bubble_shard_gradients}"
        if self.zero_bubble_shard_gradients is None:
            return
        if self.schedule in ("stock", AUTO):
            raise ConfigError(
                f"{given} needs a schedule of this package that is chosen before the model is profiled, not {self.schedule}: add "
                "--enable-zero-bubble, --zero-bubble-v-schedule, or --zero-bubble-schedule with another name"
            )
        if self.zero_bubble_shard_gradients > 1 and self.memory_limit is not None:
            raise ConfigError(
                f"{given}: a plan under --zero-bubble-memory-limit has no headroom for microbatches that wait for their group; "
                "leave one of them out, or give groups of 1"
            )

    def _check_memory(self) -> None:
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
        if self.schedule == "stock" or not _is_searched(self.schedule):
            raise ConfigError(
                f"--zero-bubble-memory-limit {limit}: schedule {self.schedule} has a fixed order; give --enable-zero-bubble, "
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
                f"schedule {self.schedule} has a fixed order: --zero-bubble-pipeline-timers-start-iter, -end-iter and "
                f"--zero-bubble-replan-interval need --enable-zero-bubble, --zero-bubble-v-schedule, or --zero-bubble-schedule "
                f"with one of {', '.join(_searched_names())}"
            )
        first, last = self._window
        if last < first:
            raise ConfigError(
                f"--zero-bubble-pipeline-timers-end-iter {last} is before the first profiled iteration {first} "
                "(--zero-bubble-pipeline-timers-start-iter)"
            )
        if interval is not None and interval < last - first + 1:
            raise ConfigError(
                f"--zero-bubble-replan-interval {interval} is shorter than the {last - first + 1} iterations that are profiled; "
                "give at least that many, or a shorter window"
            )
        if self.schedule == AUTO and self.timed_iterations is None:
            raise ConfigError(
                "--zero-bubble-schedule auto needs profiled iterations: give --zero-bubble-planning-seconds above 0, or choose a "
                "schedule by name"
            )
        if self.memory_limit is not None and not self.memory_limit.is_relative and self.timed_iterations is None:
            raise ConfigError(
                f"--zero-bubble-memory-limit {self.zero_bubble_memory_limit} needs profiled iterations: give "
                "--zero-bubble-planning-seconds above 0, and with --zero-bubble-load-plan a --zero-bubble-replan-interval"
            )
        if self.zero_bubble_save_plan is not None and self.schedule == "stock":
            raise ConfigError("--zero-bubble-save-plan: the stock schedule has no plan; choose a schedule of this package")
        if self.plan is not None:
            one_of(
                self.schedule, get_args(ScheduleName)[2:], f"--zero-bubble-load-plan {self.zero_bubble_load_plan}: its schedule"
            )

    @property
    def num_slices(self) -> int:
        """Slices of each microbatch, n; with auto those that are measured."""
        if self.zero_bubble_slices is not None:
            return parse_num_slices("--zero-bubble-slices", self.zero_bubble_slices) or _MEASURED_SLICES
        return 1 if self.plan is None else self.plan.num_slices

    @property
    def chooses_slices(self) -> bool:
        """Whether the number of slices follows from what is measured in the run."""
        return self.zero_bubble_slices == AUTO

    @property
    def slice_lengths(self) -> tuple[int, ...]:
        """Tokens of each slice, for which the --zero-bubble-load-plan plan was made; empty if it does not say."""
        costs = self.plan_costs
        return costs.table.tokens if costs is not None and costs.table.is_alike else ()

    @property
    def timed_iterations(self) -> tuple[int, int] | None:
        """First and last iteration of the job that are profiled for re-planning; None: no re-planning."""
        given = (self.zero_bubble_pipeline_timers_start_iter, self.zero_bubble_pipeline_timers_end_iter)
        asked = (*given, self.zero_bubble_replan_interval) != (None, None, None)
        if not self._can_replan or self.zero_bubble_planning_seconds == 0 or (self.plan is not None and not asked):
            return None
        return self._window

    @property
    def _window(self) -> tuple[int, int]:
        start, end = self.zero_bubble_pipeline_timers_start_iter, self.zero_bubble_pipeline_timers_end_iter
        usual = _URGENT if self.limits_bytes or self.schedule == AUTO or self.chooses_slices else _TIMED
        first = usual[0] if start is None else start
        return first, first + usual[1] if end is None else end

    @cached_property
    def memory_limit(self) -> MemoryLimit | None:
        """--zero-bubble-memory-limit, parsed; None if not given. Raises ConfigError if it is malformed."""
        return None if self.zero_bubble_memory_limit is None else MemoryLimit.parse(self.zero_bubble_memory_limit)

    @property
    def limits_bytes(self) -> bool:
        """Whether --zero-bubble-memory-limit is in bytes, with weights, gradients and optimizer state, or auto."""
        return self.memory_limit is not None and not self.memory_limit.is_relative

    @property
    def _can_replan(self) -> bool:
        """Whether the planner may change the order. ZB-H1 and ZB-H2 are fixed orders if chosen by --zero-bubble-schedule; chosen
        by --zero-bubble-max-pending-backward they are where the search for ZB starts."""
        if self.schedule == "stock":
            return False
        return _is_searched(self.schedule) or self.zero_bubble_schedule is None

    @property
    def plan(self) -> Plan | None:
        """The plan of the --zero-bubble-load-plan file; None without the flag. Raises as `plan_costs`."""
        return self._given[0]

    @property
    def plan_costs(self) -> CostModel | None:
        """The costs that the --zero-bubble-load-plan plan was made for; None if the file has none.

        Raises:
            ConfigError: the file cannot be read.
            PlanError: it is not a plan, or its costs do not fit its stages.
        """
        return self._given[1]

    @cached_property
    def _given(self) -> tuple[Plan | None, CostModel | None]:
        """The --zero-bubble-load-plan file, read once."""
        if self.zero_bubble_load_plan is None:
            return None, None
        try:
            plan, costs = read_plan(read_regular(Path(self.zero_bubble_load_plan), most=MOST_GIVEN))
            if costs is not None:
                costs.check_fits(plan.placement)
            if plan.assignment or plan.slice_counts or (costs is not None and costs.num_microbatches is not None):
                raise PlanError(
                    "it plans microbatches of certain lengths, and a run plans each iteration for its own; plan without "
                    "--microbatch-tokens"
                )
            return plan, costs
        except OSError as error:
            raise ConfigError(f"--zero-bubble-load-plan {self.zero_bubble_load_plan}: {error.strerror}") from None
        except (PlanError, ConfigError) as error:
            raise PlanError(f"--zero-bubble-load-plan {self.zero_bubble_load_plan}: {error}") from None

    @property
    def schedule(self) -> str:
        """The schedule's name: `stock`, `auto`, or a name in the plan registry."""
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
    def written(self) -> list[Target]:
        """The file and the directory that a run writes."""
        return [
            Target("--zero-bubble-save-plan", self.zero_bubble_save_plan, is_file=True, is_replaced=True),
            Target("--zero-bubble-trace", self.zero_bubble_trace),
        ]

    def family(self, num_chunks: int) -> str:
        """The schedule's name in the plan registry; for `auto` that of the searched orders with the run's chunks.

        Args:
            num_chunks: model chunks per rank, as the run was started.
        """
        if self.schedule != AUTO:
            return self.schedule
        if self.zero_bubble_v_schedule:
            return "zbv"
        return "zb" if num_chunks == 1 else "zb-interleaved"

    @property
    def trace_iterations(self) -> frozenset[int]:
        """--zero-bubble-trace-iterations, parsed; empty if not given. Raises ConfigError if it is malformed."""
        given = self.zero_bubble_trace_iterations
        if given is None:
            return frozenset()
        words = [word.strip() for word in given.split(",")]
        if not all(word.isdecimal() and len(word) < 16 and int(word) > 0 for word in words):
            raise ConfigError(f"--zero-bubble-trace-iterations {quoted(given)} must be iterations from 1 on, for example 100,200")
        return frozenset(map(int, words))

    def schedule_spec(self, *, num_ranks: int, num_chunks: int, memory_limit: float | None) -> ScheduleSpec:
        """The schedule that these flags choose, on a pipeline of this size; for `auto` the one that is profiled.

        Args:
            num_ranks: pipeline ranks, p.
            num_chunks: stages per rank, v.
            memory_limit: limit of plans before memory is measured, in units of 1F1B's activation memory on the first rank; None:
                the schedule's own.

        Raises:
            ConfigError: --zero-bubble-max-pending-backward is malformed, or the schedule does not support these sizes, or the
                plan of the --zero-bubble-load-plan file is for other ones.
            PlanError: the --zero-bubble-load-plan file is not a plan.
        """
        if self.schedule == AUTO and memory_limit is None:
            memory_limit = AUTO_MEMORY_LIMIT
        spec = schedule_spec(
            self.family(num_chunks),
            num_ranks=num_ranks,
            num_chunks=num_chunks,
            max_pending_backward=self.max_pending_microbatches(num_ranks=num_ranks) if self.schedule == "zb" else None,
            memory_limit=memory_limit,
            shard_gradients=self.zero_bubble_shard_gradients,
            num_slices=self.num_slices,
            loaded_plan=self.plan,
        )
        if self.plan is not None and self.plan.placement != spec.placement:
            raise ConfigError(
                f"--zero-bubble-load-plan {self.zero_bubble_load_plan}: the plan's stages are on ranks "
                f"{_listed(self.plan.placement)}, those of schedule {self.schedule} on {num_ranks} pipeline ranks on "
                f"{_listed(spec.placement)}; choose another schedule, pipeline size or plan"
            )
        return spec

    def max_pending_microbatches(self, *, num_ranks: int) -> int | None:
        """--zero-bubble-max-pending-backward in microbatches on `num_ranks` pipeline ranks; None if not given.

        Raises:
            ConfigError: it is neither a number nor a multiple of the pipeline size such as 2p.
        """
        if self.zero_bubble_max_pending_backward is None:
            return None
        try:
            return parse_max_pending_backward(self.zero_bubble_max_pending_backward, num_ranks)
        except ConfigError as error:
            raise ConfigError(f"--zero-bubble-max-pending-backward: {error}") from None


def _listed(placement: Placement) -> str:
    return f"{', '.join(map(str, placement.stage_to_rank))} ({placement.name} placement)"


def _is_searched(name: str) -> bool:
    return name == AUTO or schedule_info(name).is_searched


def _searched_names() -> tuple[str, ...]:
    """Names of schedules whose order the planner searches for."""
    return (AUTO, *(info.name for info in known_schedules() if info.is_searched))
