"""Which schedule runs, how it is planned, and what is recorded of it.

One frozen dataclass; the docstring under a field is the flag's help text (see `flags`). Names and meanings are those of the zero
bubble papers' own flags where those exist. `__post_init__` checks what can be checked alone; `checks` does the rest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.registry import known_schedules, parse_max_pending_backward, schedule_info, schedule_spec
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.training.config.memory_limit import MemoryLimit
from megatron.zerobubble.training.config.require import not_negative, one_of, positive

__all__ = ["ZeroBubbleConfig"]

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
    """Write the plan that runs last, with the costs it was made for, as JSON (see zerobubble show)."""
    zero_bubble_load_plan: str | None = field(default=None, metadata={"metavar": "FILE"})
    """Run this plan from the first iteration on. Alone it names the schedule, too; otherwise its stages must sit where the
    schedule's do."""
    zero_bubble_balance_stages: bool = False
    """Measure what a layer, the embedding and the head take, and say which --pipeline-model-parallel-layout would leave the
    busiest rank the least to do."""
    zero_bubble_shard_gradients: int | None = field(default=None, metadata={"metavar": "K"})
    """Keep gradients sharded over the data-parallel ranks while they are accumulated (ZeRO-2): W of K microbatches of a layer run
    together and are reduced once. A rank then holds its share of the gradients and two buckets instead of all, up to K-1
    microbatches more between B and W, and reduces microbatches / K times a step. Needs --use-distributed-optimizer."""
    zero_bubble_trace: str | None = field(default=None, metadata={"metavar": "DIR"})
    """At the end of the run, write what recorded iterations looked like: trace.json (Perfetto), report.json, and for each its
    plan and a picture of plan and reality. See docs/reading-the-trace.md."""
    zero_bubble_trace_iterations: str | None = field(default=None, metadata={"metavar": "N[,N...]"})
    """With --zero-bubble-trace: record these iterations, numbered as in progress lines. Default: the last one that was recorded;
    the second is, and every twentieth after it."""

    zero_bubble_watchdog_seconds: float | None = None
    """When a rank has been in one op for so long, or waiting for one message, every rank says where it stands, and the job ends.
    0: nobody looks. Default: half of --distributed-timeout-minutes. The first iteration may take longer."""

    zero_bubble_wgrad_gather: str | None = field(default=None, metadata={"metavar": "keep|input|both"})
    """With --sequence-parallel: what W gathers over the tensor-parallel ranks, instead of keeping what B gathered. keep: nothing.
    input (the default): inputs of column-parallel layers, which B then does not gather: as much is sent, and less held from B to
    W. both: also the output gradients of row-parallel layers, a second time: least is held, and more sent."""
    zero_bubble_overlap_tensor_parallel: bool = True
    """With tensor parallelism: while B's input gradient is summed over the tensor-parallel ranks, wait, instead of computing
    a product of a W that is due later. The results are the same bits."""

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
        if self.zero_bubble_wgrad_gather is not None:
            one_of(self.zero_bubble_wgrad_gather, ("keep", "input", "both"), "--zero-bubble-wgrad-gather")
        one_of(self.post_validation_rollback, ("exact", "inverse"), "--post-validation-rollback")
        one_of(self.post_validation_snapshot, ("device", "host"), "--post-validation-snapshot")
        not_negative(self, "zero_bubble_watchdog_seconds")
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
        self._check_shards()

    def _check_shards(self) -> None:
        positive(self, "zero_bubble_shard_gradients")
        given = f"--zero-bubble-shard-gradients {self.zero_bubble_shard_gradients}"
        if self.zero_bubble_shard_gradients is None:
            return
        if self.schedule in ("stock", AUTO):
            raise ConfigError(
                f"{given} needs a schedule of ours, and one that is known before the model is measured, not {self.schedule}: add "
                "--enable-zero-bubble, --zero-bubble-v-schedule, or --zero-bubble-schedule with another name"
            )
        if self.zero_bubble_shard_gradients > 1 and self.memory_limit is not None:
            raise ConfigError(
                f"{given}: a plan under --zero-bubble-memory-limit has no room for microbatches that wait for their group; leave "
                "one of them out, or give groups of 1"
            )

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

    @property
    def plan(self) -> Plan | None:
        """The plan that --zero-bubble-load-plan holds. Raises as `plan_costs`."""
        return None if self._given is None else self._given.plan

    @property
    def plan_costs(self) -> CostModel | None:
        """What it was made for; None where the file does not say.

        Raises:
            ConfigError: the file cannot be read.
            PlanError: it is not a plan, or its costs are not those of its stages.
        """
        return None if self._given is None else self._given.costs

    @cached_property
    def _given(self) -> _GivenPlan | None:
        """The file, read once."""
        if self.zero_bubble_load_plan is None:
            return None
        try:
            return _GivenPlan.parse(Path(self.zero_bubble_load_plan).read_bytes())
        except OSError as error:
            raise ConfigError(f"--zero-bubble-load-plan {self.zero_bubble_load_plan}: {error.strerror}") from None
        except (PlanError, ConfigError) as error:
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

    def schedule_spec(self, *, num_ranks: int, num_chunks: int, memory_limit: float | None) -> ScheduleSpec:
        """The schedule that these flags name, on a pipeline of this size. Not for `auto`, which names none.

        Args:
            num_ranks: pipeline ranks, p.
            num_chunks: stages per rank, v.
            memory_limit: of plans before anything was measured, relative to 1F1B's activation memory; None: the schedule's own.

        Raises:
            ConfigError: --zero-bubble-max-pending-backward is no number, or the schedule does not take these sizes.
            PlanError: the file of --zero-bubble-load-plan holds no plan.
        """
        return schedule_spec(
            self.schedule,
            num_ranks=num_ranks,
            num_chunks=num_chunks,
            max_pending_backward=self.max_pending_microbatches(num_ranks=num_ranks) if self.schedule == "zb" else None,
            memory_limit=memory_limit,
            shard_gradients=self.zero_bubble_shard_gradients,
            loaded_plan=self.plan,
        )

    def max_pending_microbatches(self, *, num_ranks: int) -> int | None:
        """What --zero-bubble-max-pending-backward says, in microbatches; None where it is not given."""
        if self.zero_bubble_max_pending_backward is None:
            return None
        try:
            return parse_max_pending_backward(self.zero_bubble_max_pending_backward, num_ranks)
        except ConfigError as error:
            raise ConfigError(f"--zero-bubble-max-pending-backward: {error}") from None


@dataclass(frozen=True, kw_only=True)
class _GivenPlan:
    """A plan file."""

    plan: Plan
    costs: CostModel | None

    @staticmethod
    def parse(text: bytes) -> _GivenPlan:
        plan, body = Plan.from_json(text), json.loads(text)
        if "costs" not in body:
            return _GivenPlan(plan=plan, costs=None)
        costs = CostModel.from_json(body["costs"])
        costs.check_fits(plan.placement)
        return _GivenPlan(plan=plan, costs=costs)


def _schedule_names() -> tuple[str, ...]:
    """What --zero-bubble-schedule takes."""
    return ("stock", AUTO, *(info.name for info in known_schedules()))


def _is_searched(name: str) -> bool:
    return name == AUTO or schedule_info(name).is_searched


def _searched_names() -> tuple[str, ...]:
    """Those whose order is searched for."""
    return (AUTO, *(info.name for info in known_schedules() if info.is_searched))
