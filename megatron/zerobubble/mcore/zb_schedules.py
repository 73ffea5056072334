"""The door: a schedule with the same call signature as what megatron-core's `get_forward_backward_func()` returns.

    ScheduleSpec -> Plan (planned and validated once per number of microbatches) -> Program (transfers placed) -> IterationRunner

With the schedule "stock" megatron-core's own function runs, untouched: the baseline. In iterations that are recorded its timers
are (`stock_recording`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from torch import nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.agreement import check_same_program, refusing_together
from megatron.zerobubble.mcore.ddp.record_buckets import record_buckets
from megatron.zerobubble.mcore.ddp.wrap import overlaps_reductions
from megatron.zerobubble.mcore.expert_pairs import can_pair, wgrad_beside
from megatron.zerobubble.mcore.iteration_runner import IterationHooks, IterationRunner
from megatron.zerobubble.mcore.microbatches.iteration_plans import Arranged, UnequalMicrobatches, UnequalOptions
from megatron.zerobubble.mcore.microbatches.programs import Programs
from megatron.zerobubble.mcore.model.dispatchers import token_dispatchers
from megatron.zerobubble.mcore.model.graph_replays import LayerGraphs
from megatron.zerobubble.mcore.model.layer_graphs import IMPLEMENTATION
from megatron.zerobubble.mcore.model.stage_layout import output_lengths
from megatron.zerobubble.mcore.model.timed_dispatchers import timed_dispatchers
from megatron.zerobubble.mcore.post_validation.token_count import TokenCount
from megatron.zerobubble.mcore.schedule_call import Call
from megatron.zerobubble.mcore.slices.current_slice import SlicePart
from megatron.zerobubble.mcore.slices.slice_options import SliceOptions
from megatron.zerobubble.mcore.stock_recording import PipelineGroupLinks, recorded_passes
from megatron.zerobubble.mcore.warm_up import warm_up_groups
from megatron.zerobubble.plan.communication import Program, longest_messages, place_communication, speculative_forwards
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.deadlock import stuck_ranks
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.registry import initial_plan, stock_plan
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.timeline import Activity, Timeline
from megatron.zerobubble.plan.transforms import executed_plan
from megatron.zerobubble.plan.transforms import forward_only as only_forward
from megatron.zerobubble.plan.validate import validate
from megatron.zerobubble.profiling.recorder import OpRecorder
from megatron.zerobubble.profiling.recordings import Recordings
from megatron.zerobubble.runtime.clock import clock_offset_ms
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from megatron.zerobubble.wgrad.store import WeightGradStore


def program_of(plan: Plan, *, costs: CostModel | None = None, fence: Sequence[int] = ()) -> Program:
    """The plan with its transfers.

    Args:
        plan: a validated plan.
        costs: for the timeline on which receives are posted, the same on all ranks; None: F, B and W take the same time.
        fence: per rank the step before which the iteration may have to start over; see `place_communication`.

    Raises:
        ConfigError: the program can deadlock on a GPU (ADR 3). No valid plan is known that does.
    """
    program = place_communication(plan, costs=costs, fence=fence)
    stuck = stuck_ranks(program)
    if stuck:
        waits = "; ".join(each.text(program.steps[each.rank][each.step].ops) for each in stuck[:2])
        raise ConfigError(
            f"schedule {plan.schedule!r} with {plan.num_ranks} ranks and {plan.num_microbatches} microbatches can deadlock on a "
            f"GPU ({waits}): choose another schedule or number of microbatches"
        )
    return program


class PipelineSchedule:
    """One rank's schedule for the whole run. Every rank of the world must construct it at the same point.

    Args:
        spec: which schedule; see `plan.registry.schedule_spec`.
        chunks: this rank's model chunks, wrapped by DDP.
        store: the store the chunks' linears were split into; None for stock.
        config: the chunks' TransformerConfig.
        p2p_max_ctas: most CTAs of a transfer between stages on NCCL; None leaves it to NCCL.
        batch_p2p_comm: whether transfers between two ops are one batch that is over before the next op.
        unequal: microbatches have lengths of their own, and each iteration is planned for them; None: all have the sequence
            length of the call. A stock schedule takes None: megatron-core has a way of its own.
        slicing: how microbatches are cut, where the schedule has slices; None: into slices of equal length, by `cut_batch`.
        overlap_moe: whether all-to-alls of experts run beside computation (`expert_exchanges`): of the other pass of a pair where
            the plan has pairs, which re-planning adds, and of W.

    Raises:
        ConfigError: a schedule of ours without a store, or slices of a model that they do not go with.
    """

    def __init__(
        self,
        spec: ScheduleSpec,
        chunks: Sequence[nn.Module],
        *,
        store: WeightGradStore | None,
        config: Any,
        p2p_max_ctas: int | None = None,
        batch_p2p_comm: bool = False,
        unequal: UnequalOptions | None = None,
        slicing: SliceOptions | None = None,
        overlap_moe: bool = False,
    ) -> None:
        overlaps = any(overlaps_reductions(chunk) for chunk in chunks)
        self.overlaps_pairs = overlap_moe and can_pair(config, spec, is_unequal=unequal is not None)
        """Whether the passes of a pair compute beside each other's all-to-alls of experts."""
        self.wgrad_beside = wgrad_beside(config) if self.overlaps_pairs else 0.0
        """How much of a W is computed beside those of single passes."""
        self.spec = spec = replace(spec, overlaps_reductions=overlaps)
        self.hooks = IterationHooks()
        """What else happens in this rank's iterations; the owner sets its fields."""
        self.device = torch.device(torch.cuda.current_device())
        """Where tensors live."""
        self.recorder = OpRecorder(self.device)
        """Holds the last recorded iteration; owners of what happens around the passes record spans with it."""
        self.recordings = Recordings(self.recorder, self._clock_offset_ms)
        """Which training iterations are recorded."""
        self._chunks = list(chunks)
        self._config = config
        self._costs: CostModel | None = None
        """Profiled, on whose timeline receives are posted; None before profiling."""
        self._plan_for: Callable[[int], Plan] = partial(initial_plan, spec)
        self._plans: dict[int, Plan] = {}
        self._programs = Programs()
        self._has_begun: set[bool] = set()
        """Whether calls with forward passes only, and training ones, were checked by all ranks together."""
        self._compared: set[tuple[int, bool]] = set()
        """Programs that are the same on all ranks of the pipeline."""
        self._rank = parallel_state.get_pipeline_model_parallel_rank()
        shared = parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
        self.slicing = slicing or SliceOptions()
        self.slicing = replace(self.slicing, rule=replace(self.slicing.rule, multiple=shared))
        """How microbatches are cut, where they are."""
        self.slice_lengths: tuple[int, ...] = ()
        """Tokens of each slice in the last iteration; empty before it, and where microbatches are not cut."""
        self._output_lengths = (1,) * spec.placement.num_stages if spec.is_stock else output_lengths(config, spec.placement)
        self._message: tuple[tuple[int, ...], torch.dtype] | None = None
        """Shape and dtype of the longest message between stages in front of MTP layers, from the first iteration on."""
        self._links: ProcessGroupLinks | None = None
        self._runner: IterationRunner | None = None
        self.unequal: UnequalMicrobatches | None = None
        """Plans every iteration for the lengths of its microbatches; None: they are equal."""
        self.graphs: LayerGraphs | None = None
        """The CUDA graphs of this rank's layers, which a training loop captures; None: the layers have none."""
        if store is not None and getattr(config, "cuda_graph_impl", None) == IMPLEMENTATION:
            self.graphs = LayerGraphs(self._chunks, config, store)
        record_buckets(self._chunks, spec.placement.rank_to_stages[self._rank], self.recorder)
        if not spec.is_stock:
            warm_up_groups(config, self._chunks, self.device)
            self._runner = self._make_runner(store, p2p_max_ctas, batch_p2p_comm)
            if unequal is not None:
                programs, place = self._programs, self._placed
                self.unequal = UnequalMicrobatches(spec, unequal, programs, plan=self.plan, place=place, slicing=self.slicing)

    def _make_runner(self, store: WeightGradStore | None, max_ctas: int | None, batched: bool) -> IterationRunner:
        spec = self.spec
        if store is None:
            raise ConfigError(f"schedule {spec.name!r} needs the weight-gradient store its chunks were split into")
        pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
        self._links = ProcessGroupLinks(
            spec.placement,
            pipeline=pipeline,
            rank=self._rank,
            device=self.device,
            max_ctas=max_ctas,
            batched=batched,
        )
        with refusing_together():  # a layer that slices do not go with
            return IterationRunner(
                spec,
                self._chunks,
                store=store,
                config=self._config,
                links=self._links,
                recorder=self.recorder,
                recordings=self.recordings,
                device=self.device,
                rank=self._rank,
                positions=self.slicing.positions,
                overlap_moe=self.overlaps_pairs,
            )

    # -- plans ------------------------------------------------------------------------------------------------------------

    def plan(self, num_microbatches: int) -> Plan:
        """The plan that training runs for this many microbatches. Planned on first use."""
        if num_microbatches not in self._plans:
            self._plans[num_microbatches] = executed_plan(self.spec, self._plan_for(num_microbatches))
        return self._plans[num_microbatches]

    def replan(self, plan_for: Callable[[int], Plan], costs: CostModel | None = None) -> None:
        """From the next iteration on, run the plan that `plan_for` returns for a number of microbatches, on the same placement.

        Every rank of the world must call it at the same point between two iterations, and get the same plans. `plan_for` is
        called once for each number of microbatches, by all ranks at the same point. Receives are posted on the timeline that the
        plans have under `costs`, which are the same on all ranks, too.
        """
        self._plan_for, self._costs = plan_for, costs
        self._plans.clear()
        self._programs.clear()
        self._compared.clear()
        if self.unequal is not None:
            self.unequal.forget()

    def program(self, num_microbatches: int, *, forward_only: bool = False) -> Program:
        """The plan that runs for this many microbatches, with its transfers. Placed on first use."""

        def make() -> Program:
            is_evaluation = forward_only and num_microbatches not in self._plans  # nothing to search for
            plan = initial_plan(self.spec, num_microbatches) if is_evaluation else self.plan(num_microbatches)
            if plan.num_slices != self.spec.num_slices:
                raise ConfigError(
                    f"the plan for {num_microbatches} microbatches has {plan.num_slices} slices of each, and schedule "
                    f"{self.spec.name!r} was given {self.spec.num_slices}: choose another number of slices, or another schedule"
                )
            if not forward_only:
                return self._placed(plan, self._costs)
            plan = only_forward(plan)
            validate(plan, forward_only=True)
            return program_of(plan, costs=self._costs)

        return self._programs.of(num_microbatches, make, forward_only=forward_only)

    def capture_order(self, num_microbatches: int) -> list[int]:
        """This rank's F and B in their order, for the capture of CUDA graphs (`LayerGraphs.order`), which fixes the plan."""
        assert self.graphs is not None
        assert self._runner is not None
        if self.hooks.watch is not None:
            self.hooks.watch.quiesce()
        plan = self.plan(num_microbatches)
        return self.graphs.order(plan, self._rank, self._runner.tail(plan))

    @property
    def is_fixed(self) -> bool:
        """Whether CUDA graphs were captured in the plan's order, so that no other one may run."""
        return self.graphs is not None and self.graphs.num_microbatches is not None

    def _agreed_program(self, num_microbatches: int, *, forward_only: bool) -> Program:
        """`program`, compared with the other ranks' before it runs for the first time. All ranks of the pipeline must call it."""
        program, key = self.program(num_microbatches, forward_only=forward_only), (num_microbatches, forward_only)
        if key not in self._compared:
            pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
            with nullcontext() if self.hooks.watch is None else self.hooks.watch.doing("compares plans with its pipeline"):
                check_same_program(program, ranks=pipeline, forward_only=forward_only)
            self._compared.add(key)
        return program

    def _placed(self, plan: Plan, costs: CostModel | None) -> Program:
        """A training plan with its transfers."""
        return program_of(plan, costs=costs, fence=() if self.hooks.before_gradients is None else speculative_forwards(plan))

    # -- what was measured ------------------------------------------------------------------------------------------------

    def link_times(self) -> dict[tuple[int, int], LinkTime]:
        """Times of the longest message on each link from this rank; empty before the first iteration.

        Every rank of the world must call it between two iterations.
        """
        if self._links is None or self._message is None:
            return {}
        (sequence, *others), dtype = self._message
        lengths = longest_messages(self.spec.placement, self._output_lengths)
        shapes = {link: (sequence * length, *others) for link, length in lengths.items()}
        return self._links.times(shapes, dtype)

    def timelines(self) -> list[Timeline]:
        """The chosen iterations of this pipeline that ran, or else the last recorded one, on the clock of its first rank.

        Every rank must call it, between two iterations. Empty if nothing was recorded: before a second iteration, and with a
        stock schedule on one rank.
        """
        group = parallel_state.get_pipeline_model_parallel_group()
        return self.recordings.gather(group, num_ranks=self.spec.num_ranks)

    def close(self) -> None:
        """Destroy the process groups of the links. Every rank of the world must call it."""
        for close in self.closers():
            close()
        self.hooks.token_count = None
        self.restore_model()

    def closers(self) -> list[Callable[[], None]]:
        """What destroys the process groups that exist so far when the model is gone, without a reference to it.

        Every rank of the world must call them, in this order.
        """
        owners = (self._links, None if self.unequal is None else self.unequal.exchange, self.hooks.token_count)
        return [owner.close for owner in owners if owner is not None]

    def _clock_offset_ms(self) -> float:
        links = self._links or PipelineGroupLinks(parallel_state.get_pipeline_model_parallel_group())  # None: stock
        with self._waits("compares its clock with those of its neighbors"):
            return clock_offset_ms(links, rank=self._rank, num_ranks=self.spec.num_ranks, device=self.device)

    # -- the call ---------------------------------------------------------------------------------------------------------

    @property
    def forward_backward_func(self) -> Callable[..., list[Any]]:
        """What a training loop calls; the keywords are megatron-core's."""
        if self.spec.is_stock:
            return schedules.get_forward_backward_func() if self.spec.num_ranks == 1 else self._stock_forward_backward
        return self._forward_backward

    def _stock_forward_backward(self, *, num_microbatches: int, forward_only: bool = False, **others: Any) -> list[Any]:
        """megatron-core's own function, with its passes recorded if it is the turn of this iteration."""
        function: Callable[..., list[Any]] = schedules.get_forward_backward_func()
        recorder = None
        if not forward_only:
            if num_microbatches not in self._plans:
                sizes = {"num_ranks": self.spec.num_ranks, "num_chunks": self.spec.num_chunks}
                self._plans[num_microbatches] = stock_plan(num_microbatches, **sizes)
            recorder = self.recordings.begin(self._plans[num_microbatches])
        if recorder is None:
            return function(num_microbatches=num_microbatches, forward_only=forward_only, **others)
        dispatchers, own = [token_dispatchers(chunk) for chunk in self._chunks], self._plans[num_microbatches].ops[self._rank]
        with recorded_passes(self._config, recorder, own), timed_dispatchers(dispatchers, self._config, recorder):
            return function(num_microbatches=num_microbatches, forward_only=forward_only, **others)

    def _forward_backward(self, **given: Any) -> list[Any]:
        """A call with megatron-core's arguments (`Call`)."""
        assert self._runner is not None
        call, hooks = Call(**given), self.hooks
        with nullcontext() if call.forward_only in self._has_begun else refusing_together():
            iterators = call.checked(self.spec.name, self._chunks)
        self._has_begun.add(call.forward_only)
        if self.graphs is not None:
            self.graphs.begin(call.num_microbatches, forward_only=call.forward_only)
        with self._timed():
            arranged = self._arranged(iterators, call.num_microbatches, forward_only=call.forward_only)
            slicing = None if self._runner.sliced is None else self.slicing
            iteration = call.iteration(
                arranged, self._config, schedule=self.spec.name, output_lengths=self._output_lengths, slicing=slicing
            )
            self._message = iteration.longest_message, self._config.pipeline_dtype
            self._count_tokens(forward_only=call.forward_only)
            if not call.forward_only:
                alike = iteration.parts[:1] if self.unequal is None else ()
                self.slice_lengths = tuple(part.length for parts in alike for part in parts)
            with nullcontext() if hooks.watch is None else hooks.watch.passes(forward_only=call.forward_only):
                with self._without_timers():
                    work = self._runner.run(arranged.program, iteration, hooks)
                if self._config.finalize_model_grads_func is not None and not call.forward_only:
                    self._finalize_gradients(work.num_tokens, call.pg_collection, call.force_all_reduce)
        return arranged.restored(work.losses)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """megatron-core's timer of the whole call, if the loop has timers."""
        timers = self._config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=self._config.barrier_with_L1_time)
        yield
        if timers is not None:
            timers("forward-backward").stop()

    def _arranged(self, iterators: Sequence[Any], num_microbatches: int, *, forward_only: bool) -> Arranged:
        """What the call runs: the program for its microbatches, and their data in the program's order."""
        equal = partial(self._agreed_program, num_microbatches, forward_only=forward_only)
        if self.unequal is None:
            return Arranged(program=equal(), iterators=iterators, order=tuple(range(num_microbatches)))
        with nullcontext() if self.hooks.watch is None else self.hooks.watch.doing("exchanges the lengths of microbatches"):
            return self.unequal.arrange(iterators, num_microbatches, equal=equal, forward_only=forward_only)

    def _count_tokens(self, *, forward_only: bool) -> None:
        """With post-validation and per-token loss, from the first training iteration on, send the number of tokens early."""
        config, hooks = self._config, self.hooks
        if forward_only or hooks.token_count is not None or hooks.before_gradients is None:
            return
        if not config.calculate_per_token_loss or not getattr(config.finalize_model_grads_func, "takes_total", False):
            return  # a training loop's own function takes the number from megatron-core's broadcast
        hooks.token_count = TokenCount(
            pipeline=dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group()),
            replicas=dist.get_process_group_ranks(parallel_state.get_data_parallel_group(with_context_parallel=True)),
            rank=self._rank,
            source=self.spec.placement.stage_to_rank[-1],
            device=self.device,
        )

    @contextmanager
    def _without_timers(self) -> Iterator[None]:
        """On CUDA passes have no timers: each would wait for all that the device has to do. Recordings have their times."""
        timers = self._config.timers
        if self.device.type == "cuda":
            self._config.timers = None
        try:
            yield
        finally:
            self._config.timers = timers

    def _finalize_gradients(self, num_tokens: torch.Tensor, pg_collection: Any, force_all_reduce: bool | None) -> None:
        """megatron-core's last reductions. `num_tokens` is an int32 scalar, this rank's share of the per-token loss."""
        if self.hooks.watch is not None:
            self.hooks.watch.report("makes its gradients final with other ranks", is_waiting=True)
        counted: torch.Tensor | int | None = num_tokens if self._config.calculate_per_token_loss else None
        with self.recorder.span(Activity.GRADIENTS):
            if self.hooks.token_count is not None:
                with self._waits("waits for the number of tokens of the global batch"):
                    counted = self.hooks.token_count.total()
            self._config.finalize_model_grads_func(
                self._chunks, counted, pg_collection=pg_collection, force_all_reduce=force_all_reduce
            )

    def _waits(self, text: str) -> AbstractContextManager[None]:
        return nullcontext() if self.hooks.watch is None else self.hooks.watch.waits(text)

    def cut(self, lengths: tuple[int, ...]) -> None:
        """From the next iteration on, cut sequences of their sum into slices of these lengths, or with one not at all.

        Every rank of the world must call it at the same point between two iterations, and then `replan`.
        """
        self.slicing = self.slicing.of_lengths(lengths)
        self.spec = replace(self.spec, num_slices=len(lengths))

    @property
    def slice_part(self) -> SlicePart | None:
        """The slice that the model runs now; None outside of F and B, and where microbatches are not cut."""
        sliced = None if self._runner is None else self._runner.sliced
        return None if sliced is None else sliced.current.part

    def restore_model(self) -> None:
        """Leave the model's layers as they were before the schedule was constructed."""
        if self._runner is not None:
            self._runner.restore_model()
