"""Schedule, planner, trace and post-validation: the flags of the group "Zero bubble".

One frozen dataclass; the docstring under a field is the flag's help text (see `flags`). Names and meanings are those of the zero
bubble papers' own flags where those exist. `__post_init__` checks what can be checked alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.loaded_plan import check_stages, loaded_plan
from megatron.zerobubble.flags.memory_limit import MemoryLimit
from megatron.zerobubble.flags.require import at_most, not_negative, of_types, one_of, positive, refuse
from megatron.zerobubble.flags.targets import Target
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
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

__all__ = ["ZeroBubbleConfig"]

_V_SCHEDULES = {"zb": "zbv", "half": "v-half", "min": "v-min"}
_TIMED, _URGENT = (100, 10), (2, 2)
"""(First profiled iteration, how many follow it): by default, and if `auto`, a memory limit in bytes or pairs of
passes need it soon."""
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
    profiled timings. Default: 100 for schedules with a searched order, unless a plan is loaded; 2 with
    --zero-bubble-overlap-moe."""
    zero_bubble_pipeline_timers_end_iter: int | None = None
    """Last iteration whose passes are profiled. Default: ten after --zero-bubble-pipeline-timers-start-iter."""
    zero_bubble_replan_interval: int | None = None
    """Profile and re-plan again every this many iterations. Default: plan once."""
    zero_bubble_planning_seconds: float = 10.0
    """Time budget in seconds of the planner's search on one rank after profiling, while the other ranks wait; 0 disables
    the search, and profiling unless --zero-bubble-overlap-moe needs it."""
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
    it, bit for bit. Which passes are paired follows from the share of F and of B that all-to-alls take in iterations 2 to 4 (or
    those of --zero-bubble-pipeline-timers-start-iter), also in a schedule with a fixed order; where pairs gain less than 1 % none
    are made, after one line. A loaded plan has the pairs of its file. The order of passes may be another one, with one microbatch
    more in memory if there is no memory limit. Takes the alltoall dispatcher, and the flex one with DeepEP or HybridEP; other
    models run as without the flag, after one line. A model whose configuration has overlap_moe_expert_parallel_comm runs so
    anyway. Not run on a GPU."""
    zero_bubble_trace: str | None = field(default=None, metadata={"metavar": "DIR"})
    """Directory to write a trace to: trace.json (for Perfetto), report.json, and per recorded iteration its plan and a timeline
    of measured vs. planned. It is written after the last of --zero-bubble-trace-iterations; without them after the iterations
    2, 4, 7 and 12, by uninstall, and at the end of a script under zerobubble run. See docs/reading-the-trace.md."""
    zero_bubble_trace_iterations: str | None = field(default=None, metadata={"metavar": "N[,N...]"})
    """With --zero-bubble-trace: iterations to record, numbered from 1 on since the start of the process. Default: the last
    recorded one; the second, fourth, seventh and twelfth iteration are recorded, and every twentieth from the
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
    afterwards if they require it (post-validation). Results are those of the synchronous optimizer. A snapshot of weights and
    optimizer state is held from the step to its validation."""
    post_validation_patience: int = 10
    """After a corrected step, number of consecutive synchronous steps that would have needed no correction before steps are
    optimistic again. 0: every step is optimistic."""
    post_validation_snapshot: Literal["device", "host"] = field(default="device", metadata={"metavar": "device|host"})
    """Memory that holds the snapshot: the device's, or host memory."""

    def __post_init__(self) -> None:
        of_types(self, meant=meant_schedule)
        not_negative(self, "zero_bubble_watchdog_seconds")
        positive(self, "zero_bubble_p2p_max_ctas")
        at_most(self, 2**31 - 1, "zero_bubble_p2p_max_ctas")
        at_most(self, 10**6, "zero_bubble_planning_seconds")
        not_negative(self, "post_validation_patience")
        if self.trace_iterations and self.zero_bubble_trace is None:
            raise ConfigError("--zero-bubble-trace-iterations needs --zero-bubble-trace DIR")
        self._check_choice()
        self._check_memory()
        self._check_planning()
        self._check_slices()

    def _check_choice(self) -> None:
        given, v_schedule = self.zero_bubble_max_pending_backward, self.zero_bubble_v_schedule
        if given is not None:
            self.max_pending_microbatches(num_ranks=1)
        fixed = "are both given; the V schedule's memory is fixed, leave the first one out"
        refuse("--zero-bubble-max-pending-backward and --zero-bubble-v-schedule", {fixed: given is not None and v_schedule})
        has_others = self.enable_zero_bubble or given is not None or (v_schedule and self.zero_bubble_schedule != AUTO)
        named = (
            "already names the schedule; leave out --enable-zero-bubble, --zero-bubble-max-pending-backward and "
            "--zero-bubble-v-schedule"
        )
        name = self.zero_bubble_schedule
        refuse(f"--zero-bubble-schedule {name}", {named: name is not None and has_others})
        is_stock = self.schedule == "stock"
        paired = (
            "pairs passes of a plan, and the stock schedule has none: choose a schedule, or set "
            "overlap_moe_expert_parallel_comm, with virtual stages"
        )
        refuse("--zero-bubble-overlap-moe", {paired: self.zero_bubble_overlap_moe and is_stock})
        saved = "the stock schedule has no plan; choose a schedule of this package"
        refuse("--zero-bubble-save-plan:", {saved: self.zero_bubble_save_plan is not None and is_stock})
        if self.plan is not None:
            flag = f"--zero-bubble-load-plan {self.zero_bubble_load_plan}: its schedule"
            one_of(self.schedule, get_args(ScheduleName)[2:], flag)

    def _check_slices(self) -> None:
        given, number = self.zero_bubble_slices, self.num_slices
        if number == 1:
            problem = "needs slices: give --zero-bubble-slices, or leave it out"
            refuse("--zero-bubble-slice-positions", {problem: self.zero_bubble_slice_positions is not None})
            return
        sliced = [info.name for info in known_schedules() if info.takes_slices]
        loaded = number if self.plan is None else self.plan.num_slices
        flag = f"--zero-bubble-slices {given}" if given else f"--zero-bubble-load-plan with {number} slices"
        unsliced = f"schedule {self.schedule} has no order of slices; choose one of {', '.join(sliced)}"
        refuse(f"{flag}:", {unsliced: self.schedule not in sliced})
        problems = {
            "does not go with --zero-bubble-balance-stages, which compares layouts of whole microbatches; leave one of them "
            "out": self.zero_bubble_balance_stages,
            "needs profiled iterations and an order that is searched: give --zero-bubble-planning-seconds above 0, and a "
            "schedule such as zb or zbv, or a number of slices": self.chooses_slices and not self.searches,
        }
        refuse(flag, problems)
        other = f"the --zero-bubble-load-plan plan has {loaded} slices per microbatch; leave the number out, or load another plan"
        refuse(f"{flag}:", {other: self.plan is not None and (self.chooses_slices or loaded != number)})

    def _check_memory(self) -> None:
        setup, limit = self.zero_bubble_v_schedule_mem_setup, self.memory_limit
        is_other = setup != "zb"
        needs = {"needs --zero-bubble-v-schedule": is_other and not self.zero_bubble_v_schedule}
        refuse(f"--zero-bubble-v-schedule-mem-setup {setup}", needs)
        if limit is None:
            return
        given = f"--zero-bubble-memory-limit {self.zero_bubble_memory_limit}"
        replaced = "replaces --zero-bubble-max-pending-backward and --zero-bubble-v-schedule-mem-setup; leave those out"
        refuse(given, {replaced: is_other or self.zero_bubble_max_pending_backward is not None})
        fixed = f"schedule {self.schedule} has a fixed order; give {_searching()}"
        refuse(f"{given}:", {fixed: self.schedule == "stock" or not _is_searched(self.schedule)})
        profiled = (
            "needs profiled iterations: give --zero-bubble-planning-seconds above 0, and with --zero-bubble-load-plan a "
            "--zero-bubble-replan-interval"
        )
        refuse(given, {profiled: not limit.is_relative and not self.searches})

    def _check_planning(self) -> None:
        interval, (first, last) = self.zero_bubble_replan_interval, self._window
        positive(self, "zero_bubble_pipeline_timers_start_iter", "zero_bubble_replan_interval")
        not_negative(self, "zero_bubble_planning_seconds")
        can_replan = self._can_replan or self.zero_bubble_overlap_moe
        fixed = f"--zero-bubble-pipeline-timers-start-iter, -end-iter and --zero-bubble-replan-interval need {_searching()}"
        refuse(f"schedule {self.schedule} has a fixed order:", {fixed: self._asks_for_planning and not can_replan})
        early = f"is before the first profiled iteration {first} (--zero-bubble-pipeline-timers-start-iter)"
        refuse(f"--zero-bubble-pipeline-timers-end-iter {last}", {early: last < first})
        width = last - first + 1
        short = f"is shorter than the {width} iterations that are profiled; give at least that many, or a shorter window"
        refuse(f"--zero-bubble-replan-interval {interval}", {short: interval is not None and interval < width})
        none = "needs profiled iterations: give --zero-bubble-planning-seconds above 0, or choose a schedule by name"
        refuse("--zero-bubble-schedule auto", {none: self.schedule == AUTO and not self.searches})

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
        pairs = self.zero_bubble_overlap_moe and self.schedule != "stock" and self._replaces_plan
        return self._window if self.searches or pairs else None

    @property
    def searches(self) -> bool:
        """Whether the order of passes is searched for the times that were profiled."""
        return self._can_replan and self.zero_bubble_planning_seconds > 0 and self._replaces_plan

    @property
    def _replaces_plan(self) -> bool:
        """Whether the plan of a --zero-bubble-load-plan file may be replaced; True without one."""
        return self.plan is None or self._asks_for_planning

    @property
    def _asks_for_planning(self) -> bool:
        start, end = self.zero_bubble_pipeline_timers_start_iter, self.zero_bubble_pipeline_timers_end_iter
        return (start, end, self.zero_bubble_replan_interval) != (None, None, None)

    @property
    def _window(self) -> tuple[int, int]:
        start, end = self.zero_bubble_pipeline_timers_start_iter, self.zero_bubble_pipeline_timers_end_iter
        is_urgent = self.limits_bytes or self.schedule == AUTO or self.chooses_slices or self.zero_bubble_overlap_moe
        usual = _URGENT if is_urgent else _TIMED
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
        """The plan of the --zero-bubble-load-plan file; None without the flag. Raises as `loaded_plan`."""
        return self._given[0]

    @property
    def plan_costs(self) -> CostModel | None:
        """The costs that the --zero-bubble-load-plan plan was made for; None if the file has none. Raises as `loaded_plan`."""
        return self._given[1]

    @cached_property
    def _given(self) -> tuple[Plan | None, CostModel | None]:
        """The --zero-bubble-load-plan file, read once."""
        return (None, None) if self.zero_bubble_load_plan is None else loaded_plan(self.zero_bubble_load_plan)

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
            num_slices=self.num_slices,
            loaded_plan=self.plan,
        )
        if self.zero_bubble_load_plan is not None:
            check_stages(self.zero_bubble_load_plan, spec, self.schedule)
        return spec

    def max_pending_microbatches(self, *, num_ranks: int) -> int | None:
        """--zero-bubble-max-pending-backward in microbatches on p pipeline ranks; None if not given. Raises ConfigError."""
        given = self.zero_bubble_max_pending_backward
        return None if given is None else parse_max_pending_backward("--zero-bubble-max-pending-backward", given, num_ranks)


def _is_searched(name: str) -> bool:
    return name == AUTO or schedule_info(name).is_searched


def _searching() -> str:
    """The flags that choose a schedule whose order the planner searches for."""
    names = ", ".join([AUTO, *(info.name for info in known_schedules() if info.is_searched)])
    return f"--enable-zero-bubble, --zero-bubble-v-schedule, or --zero-bubble-schedule with one of {names}"
