"""One block of a contender on one rank: start the job, and measure at the calls of its schedule.

A job is a training script as its users start it (`jobs`). Nothing of it is edited. What is measured hangs on the two doors
through which every loop trains: `PipelineSchedule.forward_backward_func`, where a schedule is installed, and the functions that
megatron-core's `get_forward_backward_func` chooses from. An iteration lasts from one training call to the next, so data, the
optimizer step and logging count; evaluations in between do not. When enough iterations have been timed, the process ends.

The last iteration of a block's warm-up is recorded. A contender's first block also measures what the report explains the times
with. Its warm-up has one iteration without any measurement, then `contenders.PROFILED`, after which a searched order is planned,
and one in which memory is measured. Later blocks run the plan that the first one found. The timed iterations run as in training,
with nothing attached, one after the other: all ranks enter the first together.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron.zerobubble.bench.contenders import PROFILED, WARM_UP
from megatron.zerobubble.bench.jobs import Job
from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.mcore.replanner import Measured, Replanner, measured_costs
from megatron.zerobubble.mcore.state_memory import state_bytes
from megatron.zerobubble.mcore.stock_faults import wrong_gradients
from megatron.zerobubble.mcore.stock_loop.patches import ALL_SCHEDULES
from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.schedule_spec import STOCK
from megatron.zerobubble.plan.timeline import Activity, Timeline
from megatron.zerobubble.profiling.activation_memory import MemoryMeter
from megatron.zerobubble.profiling.profile import unit_bytes
from megatron.zerobubble.profiling.profiler import Profiler

__all__ = ["BlockRequest", "BlockResult", "Measurements", "Sizes", "run_block"]

_LOSS = "lm loss"
"""Megatron-LM's name of the loss in what the schedule returns."""


@dataclass(frozen=True, kw_only=True)
class BlockRequest:
    """What to run. The same on all ranks."""

    number: int
    """Counts the blocks of the comparison, from 0."""
    program: Job
    """The job under the contender."""
    is_first: bool
    """Whether it is the contender's first block, which measures and plans."""
    num_warm_up: int
    """Untimed iterations; in a first block at least `contenders.WARM_UP`."""
    num_timed: int
    """Timed iterations."""
    plan: str | None = None
    """JSON of the plan to run, which the contender's first block found."""
    no_sync: bool = False
    """See `Contender`."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What a first block measured. Bytes are those of the rank with the most."""

    state_bytes: int
    """Weights, gradients and optimizer state."""
    activation_bytes: int
    """Peak of the memory that the passes of one iteration allocate on top."""
    allocated_bytes: int | None
    """Peak of all memory that torch's allocator had given out, in the timed iterations; None on the CPU."""
    costs: CostModel | None
    """Profiled costs of the stages; None under megatron-core's own schedules."""
    unit_bytes: float
    """Bytes of one unit of the costs' activation memory; 0 without costs."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the job, as its process groups and the calls of its schedule have them."""

    pipeline: int
    tensor: int
    context: int
    data: int
    num_microbatches: int
    """Of an iteration, per data-parallel replica."""
    micro_batch_size: int
    seq_length: int
    """Of the schedule's call."""
    precision: str
    """fp32, bf16 or fp16."""
    has_dropout: bool
    """Whether the model's config has dropout."""

    @property
    def tokens(self) -> int:
        """Of an iteration, of all ranks together, where every sequence is full."""
        return self.data * self.num_microbatches * self.micro_batch_size * self.seq_length


@dataclass(frozen=True, kw_only=True)
class BlockResult:
    """What one block found; times and bytes are those of the slowest and the fullest rank."""

    seconds: float
    """Time of all timed iterations."""
    overhead: float
    """The share of it in which a rank reported its progress instead of training."""
    loss: float
    """Mean loss per token of the last iteration; NaN if the schedule's results have none."""
    num_parameters: int
    """Parameters of one data-parallel replica; tied ones count on every stage that holds them."""
    device: str
    """The name of rank 0's device."""
    sizes: Sizes
    """Of the job."""
    plan: str | None
    """JSON of the plan that the timed iterations ran; None under megatron-core's own schedules."""
    timeline: Timeline | None
    """The recorded iteration; None where nothing was recorded, and on ranks other than 0."""
    measured: Measurements | None
    """None, except in a first block."""
    warning: str | None = None
    """Why the losses are not to be compared with; one line."""


def run_block(request: BlockRequest, launch: Launch, *, tick: Callable[[], None], end: Callable[[BlockResult], None]) -> None:
    """Run one block in this process, which must not have run one before. All ranks must call it.

    Args:
        request: what to run.
        launch: which rank this process is. torchrun's store must be open.
        tick: called after every iteration.
        end: called with the result; it ends the process.

    Raises:
        ConfigError: the job ended before the block did.
    """
    block = _Block(request, tick, end)
    block.attach()
    try:
        request.program.run(launch)
    except SystemExit as exit:
        if exit.code:
            raise
    raise ConfigError(
        f"{request.program.name} ended after {block.iterations} training iterations, and a block runs "
        f"{block.num_iterations}, and begins one more: let it train longer, or give fewer --timed-iters"
    )


class _Block:
    """The iterations of one block on one rank."""

    def __init__(self, request: BlockRequest, tick: Callable[[], None], end: Callable[[BlockResult], None]) -> None:
        self._request, self._tick, self._end = request, tick, end
        self.num_iterations = request.num_warm_up + request.num_timed
        self.iterations = 0
        """Training iterations whose passes have begun."""
        self._is_inside = False
        self._model: Any = None
        """The first chunk of the model that trains."""
        self._stock: PipelineSchedule | None = None
        """Records passes of megatron-core's own schedules."""
        self._profiler: Profiler | None = None
        self._meter: MemoryMeter | None = None
        self._rest = ExitStack()
        """Open from the end of the passes of the recorded iteration to the next call."""
        self._timeline: Timeline | None = None
        self._costs: CostModel | None = None
        self._unit_bytes = 0.0
        self._seconds = self._own_seconds = 0.0
        """Of the timed iterations; and of reporting progress in them."""
        self._since: float | None = None
        """When the clock was started; None while it stands."""
        self._results: list[Any] = []
        """Of the last timed iteration."""

    # -- the calls of the schedule ----------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Route the training calls of every loop in this process through this object. For the life of the process."""
        for name in ALL_SCHEDULES:
            setattr(schedules, name, self._around(getattr(schedules, name)))
        door: Any = PipelineSchedule.forward_backward_func
        PipelineSchedule.forward_backward_func = property(  # type: ignore[method-assign,assignment]
            lambda schedule: functools.partial(self._called, door.fget(schedule), schedule)
        )
        if not self._request.is_first:  # the plan is the first block's
            replanner: Any = Replanner
            replanner.before, replanner.is_due = (lambda *_: None), (lambda *_: False)

    def _around(self, original: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        @functools.wraps(original)
        def forward_backward(**given: Any) -> list[Any]:
            return self._called(original, None, **given)

        return forward_backward

    def _called(self, original: Callable[..., list[Any]], schedule: PipelineSchedule | None, **given: Any) -> list[Any]:
        """A call of a schedule. Of calls within each other the outermost counts."""
        if self._is_inside:
            return original(**given)
        self._is_inside = True
        try:
            if given.get("forward_only"):
                self._stop_clock()
                return original(**given)
            return self._train(original, schedule, given)
        finally:
            self._is_inside = False

    def _train(
        self, original: Callable[..., list[Any]], schedule: PipelineSchedule | None, given: Mapping[str, Any]
    ) -> list[Any]:
        model = given["model"] if isinstance(given["model"], list) else [given["model"]]
        if self._model is not None and self._model is not model[0]:
            return original(**given)  # of a script with several models, the first one counts
        if schedule is None:
            self._stock = self._stock or _recording(model)
            schedule, original = self._stock, self._stock.forward_backward_func
        if self._model is None:
            self._begin(schedule, model)
        self._before(schedule, model, given)
        self.iterations += 1
        results = self._passes(original, schedule, given)
        self._after(schedule)
        if self.iterations == self.num_iterations:
            self._results = results
        return results

    # -- what is measured -------------------------------------------------------------------------------------------------

    def _begin(self, schedule: PipelineSchedule, model: Sequence[Any]) -> None:
        """The first iteration of the model."""
        program = self._request.program
        if schedule.spec.is_stock and program.zero_bubble.schedule != STOCK:
            raise ConfigError(
                f"{program.name} trains with megatron-core's own schedule, not with {program.zero_bubble.schedule}, on "
                f"{schedule.spec.num_ranks} pipeline rank(s): give it two or more, and leave it to zerobubble bench to install "
                "the schedule"
            )
        self._model = model[0]
        if self._request.no_sync:
            get_model_config(model[0]).batch_p2p_sync = False
        self._meter = MemoryMeter(schedule.device)
        schedule.recordings.choose({self._request.num_warm_up})
        schedule.recordings.only_chosen = True
        if self._request.plan is not None:
            plan = Plan.from_json(self._request.plan)
            schedule.replan(lambda _: plan)

    def _before(self, schedule: PipelineSchedule, model: Sequence[Any], given: Mapping[str, Any]) -> None:
        """The end of one iteration and the begin of the next."""
        if self.iterations > 0:
            before = time.perf_counter()
            self._tick()
            self._own_seconds += 0.0 if self._since is None else time.perf_counter() - before
        if self.iterations == self._request.num_warm_up:
            self._end_warm_up(schedule)
        if self.iterations == self.num_iterations:
            self._stop_clock()
            self._end(self._result(schedule, model, given))
        if self.iterations >= self._request.num_warm_up and self._since is None:
            self._synchronize()
            self._since = time.perf_counter()

    def _stop_clock(self) -> None:
        self._rest.close()
        if self._since is not None:
            self._synchronize()
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def _synchronize(self) -> None:
        if _on_cuda():
            torch.cuda.synchronize()

    def _passes(self, original: Callable[..., list[Any]], schedule: PipelineSchedule, given: Mapping[str, Any]) -> list[Any]:
        if not self._request.is_first:
            return original(**given)
        if self.iterations == WARM_UP - 1:
            assert self._meter is not None
            with self._meter:
                return original(**given)
        if schedule.spec.is_stock or not PROFILED[0] <= self.iterations <= PROFILED[1]:
            return original(**given)
        if isinstance(schedule.hooks.profiler, Profiler):  # a re-planner's
            self._profiler = schedule.hooks.profiler
        self._profiler = self._profiler or Profiler(schedule.device)
        schedule.hooks.profiler = self._profiler
        try:
            return original(**given)
        finally:
            schedule.hooks.profiler = None

    def _after(self, schedule: PipelineSchedule) -> None:
        """After the passes of an iteration, before its optimizer step."""
        request = self._request
        if self._profiler is not None and self.iterations == PROFILED[1]:
            own = Measured(profile=self._profiler.profile(), links=schedule.link_times())
            everybody, placement = own.gathered(), schedule.spec.placement
            self._costs = replace(measured_costs(everybody, placement), wgrad_beside=schedule.wgrad_beside)
            self._unit_bytes = unit_bytes([each.profile for each in everybody], placement)
        if self.iterations == request.num_warm_up:
            self._rest.enter_context(schedule.recorder.span(Activity.OPTIMIZER))

    def _end_warm_up(self, schedule: PipelineSchedule) -> None:
        self._stop_clock()
        timelines = schedule.timelines()
        self._timeline = timelines[-1] if timelines and dist.get_rank() == 0 else None
        gc.collect()  # the garbage of the warm-up is not theirs
        if _on_cuda():
            torch.cuda.reset_peak_memory_stats()
        self._synchronize()
        dist.barrier()

    # -- the result -------------------------------------------------------------------------------------------------------

    def _result(self, schedule: PipelineSchedule, model: Sequence[Any], given: Mapping[str, Any]) -> BlockResult:
        """Reduce over all ranks. They must all call this."""
        allocated = torch.cuda.max_memory_allocated() if _on_cuda() else 0
        state = state_bytes(model, SimpleNamespace(chained_optimizers=_optimizers())) if self._request.is_first else 0
        assert self._meter is not None
        own = [self._seconds, self._own_seconds, state, self._meter.most_bytes, allocated]
        most = torch.tensor(own, dtype=torch.float64, device=schedule.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        parameters = torch.tensor([sum(p.numel() for chunk in model for p in chunk.parameters())], device=schedule.device)
        dist.all_reduce(parameters, group=parallel_state.get_model_parallel_group())
        loss = _loss(self._results, schedule.device)
        dist.all_reduce(loss)
        measured = None
        if self._request.is_first:
            measured = Measurements(
                state_bytes=int(most[2]),
                activation_bytes=int(most[3]),
                allocated_bytes=int(most[4]) if _on_cuda() else None,
                costs=self._costs,
                unit_bytes=self._unit_bytes,
            )
        config = get_model_config(model[0])
        sizes = _sizes(config, given)
        return BlockResult(
            seconds=float(most[0]),
            overhead=float(most[1] / most[0]),
            loss=float(loss[0] / loss[1]),
            num_parameters=int(parameters[0]),
            device=torch.cuda.get_device_name() if _on_cuda() else "CPU",
            sizes=sizes,
            plan=None if schedule.spec.is_stock else schedule.plan(sizes.num_microbatches).to_json(),
            timeline=self._timeline,
            measured=measured,
            warning=wrong_gradients(config, len(model)) if schedule.spec.is_stock else None,
        )


def _recording(model: Sequence[Any]) -> PipelineSchedule:
    """megatron-core's own schedule with a recorder."""
    spec = ZeroBubbleConfig(zero_bubble_schedule="stock").schedule_spec(
        num_ranks=parallel_state.get_pipeline_model_parallel_world_size(), num_chunks=len(model), memory_limit=None
    )
    return PipelineSchedule(spec, model, store=None, config=get_model_config(model[0]))


def _on_cuda() -> bool:
    """Whether this rank computes on a GPU. A script on the CPU believes that there is one."""
    return torch.device(torch.cuda.current_device()).type == "cuda"


def _optimizers() -> list[MegatronOptimizer]:
    """megatron-core's optimizers in this process, without chains of them."""
    kinds = [(each, type(each)) for each in gc.get_objects()]
    return [each for each, kind in kinds if issubclass(kind, MegatronOptimizer) and not issubclass(kind, ChainedOptimizer)]


def _loss(results: Sequence[Any], device: torch.device) -> torch.Tensor:
    """[sum, count] of the losses in what the schedule returned, float64; zeros on ranks that compute none.

    A microbatch's loss is a sum and a number of tokens, or a mean, as Megatron-LM takes them.
    """
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for result in results:
        named = result if isinstance(result, Mapping) else {_LOSS: result}
        numbers = list(_numbers(named.get(_LOSS, next(iter(named.values()), ()))))
        if len(numbers) in (1, 2):
            total += torch.tensor([*numbers, 1.0][:2], dtype=torch.float64, device=device)
    return total


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, torch.Tensor):
        yield from map(float, value.detach().flatten().tolist())
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield float(value)


def _sizes(config: Any, given: Mapping[str, Any]) -> Sizes:
    return Sizes(
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        data=parallel_state.get_data_parallel_world_size(),
        num_microbatches=given["num_microbatches"],
        micro_batch_size=given["micro_batch_size"],
        seq_length=given["seq_length"],
        precision="bf16" if config.bf16 else "fp16" if config.fp16 else "fp32",
        has_dropout=bool(config.hidden_dropout or config.attention_dropout),
    )
