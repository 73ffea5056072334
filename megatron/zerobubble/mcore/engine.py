"""What runs one model of a loop under `install`: its schedule, and what goes with that from one iteration to the next.

    prepared chunks + RunOptions -> Engine -> PipelineSchedule, Replanner, LayoutDropout, trace, plan and layer files

`stock_loop` makes it at the model's first call of the schedule, and calls `begin` before the passes of a training iteration and
`end` after them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.job.heartbeats import this_process
from megatron.zerobubble.mcore.agreement import refusing_together
from megatron.zerobubble.mcore.microbatches.iteration_plans import UnequalOptions, operations
from megatron.zerobubble.mcore.model.layout_dropout import LayoutDropout, check_layout_dropout
from megatron.zerobubble.mcore.planning.chunk_advice import chunk_advice
from megatron.zerobubble.mcore.planning.layers_file import write_layers_file
from megatron.zerobubble.mcore.planning.layout_proposal import layout_proposal, measured_parts, recorded_costs
from megatron.zerobubble.mcore.planning.plan_file import PlanFileWriter
from megatron.zerobubble.mcore.planning.stage_contents import StageContents
from megatron.zerobubble.mcore.replanner import budget_of, make_replanner
from megatron.zerobubble.mcore.run_options import RunOptions
from megatron.zerobubble.mcore.slices.slice_options import SliceOptions
from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.slicing import TILE, CutRule
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.partition.layer_costs import LETTERS
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.schedule_spec import ScheduleSpec
from megatron.zerobubble.plan.search.core import library
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.profiling.report import PipelineReport
from megatron.zerobubble.profiling.trace_report import report_pipeline
from megatron.zerobubble.runtime.link_groups import chosen_ctas, is_on_one_host
from megatron.zerobubble.wgrad.store import WeightGradStore

__all__ = ["Engine"]

_log = logging.getLogger(__name__)


class Engine:
    """Runs a model. Every rank of the world must construct it, and call its methods, at the same points.

    Args:
        options: how it is run and planned.
        spec: the schedule.
        chunks: this rank's model chunks, wrapped by DDP, in the order of their stages.
        store: the store that the chunks' linears were split into.
        config: the chunks' TransformerConfig.
        num_microbatches: of most iterations.
        usual_tokens: sequence length of the microbatches where none are unequal; None: they always have lengths of their own.
        state_bytes: returns the bytes of weights, gradients and optimizer state on this rank.
        trains: whether the model is trained; False: it only runs forward.
        show: called on rank 0 with each line about what was measured, and about other layouts and chunks.

    Raises:
        ConfigError: an option does not go with the model, or a plan will be searched for and there is no search core.
    """

    def __init__(
        self,
        options: RunOptions,
        spec: ScheduleSpec,
        chunks: Sequence[nn.Module],
        *,
        store: WeightGradStore,
        config: Any,
        num_microbatches: int,
        usual_tokens: int | None,
        state_bytes: Callable[[], int] = int,
        trains: bool = True,
        show: Callable[[str], None] = _log.info,
    ) -> None:
        self.options = options
        self._show = show
        self.chunks = list(chunks)
        flags = options.flags
        unequal = None
        if options.microbatch_tokens is not None:
            unequal = UnequalOptions(
                tokens_of=options.microbatch_tokens,
                usual_tokens=usual_tokens,
                reorders=options.lengths is None or options.lengths.reorder,
                objective=options.objective,
            )
        if unequal is not None or (trains and flags.searches):
            with refusing_together():
                library()  # searches begin in the middle of the run
        self.schedule = PipelineSchedule(
            spec,
            chunks,
            store=store,
            config=config,
            p2p_max_ctas=_p2p_max_ctas(flags.zero_bubble_p2p_max_ctas),
            batch_p2p_comm=flags.zero_bubble_batch_p2p_comm,
            overlap_moe=flags.zero_bubble_overlap_moe,
            unequal=unequal,
            slicing=SliceOptions(
                lengths=flags.slice_lengths,
                cut=options.cut,
                positions=flags.zero_bubble_slice_positions,
                is_measured=flags.chooses_slices,
                rule=CutRule(work=operations(config), tile=TILE),
            ),
        )
        self.iterations = 0
        """Training iterations that have begun, since the model was started."""
        self.consumed_samples = 0
        """Samples of the training iterations so far, over all ranks."""
        self.replanner, self.dropout = None, None
        self._plan_file = PlanFileWriter(flags.zero_bubble_save_plan)
        self._num_microbatches = num_microbatches
        """Of the last training iteration, or of most where none has begun. Its plan is known: a new one is made by all ranks."""
        self._has_shown_layout = False
        if not trains:
            return
        if options.seeds.dropout is not None:
            check_layout_dropout(config)
            with refusing_together():  # a stage with the embedding and no layer
                self.dropout = LayoutDropout(
                    chunks, seed=options.seeds.dropout, device=self.schedule.device, slice_offset=self._slice_offset
                )
        self.replanner = make_replanner(
            flags,
            self.schedule,
            num_microbatches=num_microbatches,
            state_bytes=state_bytes,
            ranks_on_host=options.ranks_on_host,
            on_plan=self._plan_file.write_found,
        )
        self.schedule.recordings.choose(flags.trace_iterations)

    def _slice_offset(self) -> int:
        """Tokens before the slice that the model runs now; 0 where microbatches are not cut."""
        part = self.schedule.slice_part
        return 0 if part is None else part.offset

    def begin(self, *, num_microbatches: int, micro_batch_size: int) -> None:
        """Call it before the passes of a training iteration.

        Args:
            num_microbatches: of this iteration.
            micro_batch_size: rows of each.
        """
        if self.replanner is None and self.iterations == 2:  # the second one was recorded
            self.show_balance()
        self.iterations += 1
        self._num_microbatches = num_microbatches
        apart = parallel_state.get_data_parallel_world_size() * micro_batch_size
        if self.dropout is not None:
            own = self.consumed_samples + parallel_state.get_data_parallel_rank() * micro_batch_size
            self.dropout.begin(first_sample=own, samples_apart=apart)
        self.consumed_samples += num_microbatches * apart
        if self.replanner is not None:
            self.replanner.before(self.iterations, num_microbatches)

    @property
    def is_due(self) -> bool:
        """Whether `end` will plan after this iteration. No transfer between ranks may be in flight then."""
        return self.replanner is not None and self.replanner.is_due(self.iterations)

    def end(self) -> None:
        """Call it after the passes of a training iteration: at the end of a window of profiled ones it plans."""
        if self.replanner is None or not self.replanner.is_due(self.iterations):
            return
        self.replanner.after(self.iterations, self._num_microbatches)
        if self.options.flags.schedule == AUTO:
            self._advise(self.schedule.plan(self._num_microbatches))
        self.show_balance()

    def _advise(self, plan: Plan) -> None:
        """Under `auto`, show whether other chunks would be faster than the plan that runs."""
        contents, limit, costs = self._contents, self.options.flags.memory_limit, self.costs
        if dist.get_rank() != 0 or costs is None or costs.table.has_slices or len(set(contents.layer_kinds)) != 1:
            return
        options = SearchOptions(
            objective=self.options.objective,
            memory_limit=self.schedule.spec.memory_limit if limit is None else limit.relative,
            budget=budget_of(self.options.flags.zero_bubble_planning_seconds),
        )
        line = chunk_advice(plan, contents.layers, costs, options)
        if line is not None:
            self._show(line)

    def show_balance(self) -> None:
        """With --zero-bubble-balance-stages, show which layers per stage would be faster."""
        if not self.options.flags.zero_bubble_balance_stages:
            return
        schedule, contents, costs = self.schedule, self._contents, self.costs
        kinds, is_first = contents.layer_kinds, dist.get_rank() == 0
        if not kinds or kinds[0] in LETTERS:
            _log.warning("--zero-bubble-balance-stages: the model has no decoder of transformer layers to divide otherwise")
            return
        is_profiled = costs is not None
        if costs is None:
            costs = recorded_costs(schedule)
        if costs is None:
            _log.warning("stages: not measured, because no iteration after the first one was recorded")
            return
        is_shown, self._has_shown_layout = self._has_shown_layout, is_profiled
        plan = schedule.plan(self._num_microbatches)
        if is_first:
            try:
                self._show(measured_parts(kinds, contents.layers, schedule.spec.placement, costs))
                if not is_shown:
                    self._show(layout_proposal(plan, kinds, contents.layers, costs, self.options.objective))
            except (ConfigError, PlanError) as error:
                _log.warning("layouts: %s", error)

    @property
    def costs(self) -> CostModel | None:
        """The measured costs, with all-to-alls where pairs hide them; None before the first window of profiled iterations."""
        costs = None if self.replanner is None else self.replanner.costs
        return costs if costs is None or self.schedule.overlaps_pairs else replace(costs, all_to_all=(0.0, 0.0))

    @functools.cached_property
    def _contents(self) -> StageContents:
        """Gathered once; all ranks ask for it at the same points."""
        return StageContents.gather(self.chunks, self.schedule.spec.placement)

    def report(self) -> PipelineReport | None:
        """Log what was measured of the pipeline, and write the trace and the layers file.

        All ranks must call it between two iterations, when the last step has been validated.

        Returns:
            The report of the last recorded iteration, on rank 0; None if none was recorded, and on other ranks.
        """
        flags, replanner = self.options.flags, self.replanner
        seen = report_pipeline(
            self.schedule,
            flags.zero_bubble_trace,
            chosen=flags.trace_iterations,
            memory=None if replanner is None else replanner.memory,
            activations=None if replanner is None else replanner.activations,
            by_length=None if replanner is None else replanner.by_length,
            show=self._show,
        )
        if flags.zero_bubble_trace is not None and replanner is not None:
            contents = self._contents
            if dist.get_rank() == 0:
                write_layers_file(flags.zero_bubble_trace, contents, replanner, self.schedule.spec.placement)
        return seen

    def write_plan(self) -> None:
        """Write the --zero-bubble-save-plan file, unless a search has found a plan and written it. All ranks must call this."""
        self._plan_file.finish(self.schedule.plan(self._num_microbatches))

    def close(self) -> None:
        """Destroy process groups. Every rank of the world must call it."""
        self.schedule.close()


def _p2p_max_ctas(given: int | None) -> int | None:
    """Thread blocks per transfer. Links of other backends than NCCL have no such option, and a number that was given holds
    everywhere."""
    pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    asks = dist.get_backend() == "nccl" and given is None
    return chosen_ctas(given, is_one_host=asks and is_on_one_host(pipeline, this_process().host))
