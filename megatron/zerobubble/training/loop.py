"""`pretrain`: from checked settings to a trained model.

Phases, in order: choose the device; meet the other ranks; make process groups; build data and model; load a checkpoint;
iterate; evaluate; save; say what happened. What can be refused is refused before the ranks meet.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    get_current_running_global_batch_size,
    get_num_microbatches,
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
    update_num_microbatches,
)

from megatron.zerobubble.errors import UserError
from megatron.zerobubble.mcore.model.layout import embedding_ranks
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.training.arguments import refuse
from megatron.zerobubble.training.checkpoint import load as checkpointing
from megatron.zerobubble.training.checkpoint.directory import iteration_directory
from megatron.zerobubble.training.checkpoint.save import Saver
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.data.samples import Datasets, build_datasets, chunk_iterators, chunk_reads
from megatron.zerobubble.training.data.tokenizers import build_tokenizer
from megatron.zerobubble.training.initialize import (
    Job,
    Launch,
    choose_device,
    join_job,
    set_up_logging,
    set_up_model_parallel,
)
from megatron.zerobubble.training.metrics.metrics import IterationRecord, Metrics
from megatron.zerobubble.training.metrics.trace import show_pipeline
from megatron.zerobubble.training.planning.auto import choose_schedule
from megatron.zerobubble.training.planning.balance import tell_balance
from megatron.zerobubble.training.planning.replan import PlanKeeper, make_replanner
from megatron.zerobubble.training.resilience.early_exit import Departure
from megatron.zerobubble.training.resilience.failure import JobGuard
from megatron.zerobubble.training.resilience.watchdog import watchdog
from megatron.zerobubble.training.setup import ForwardStepProvider, ModelProvider, assemble
from megatron.zerobubble.training.step import StepResult, Training, TrainingState, evaluate

__all__ = ["pretrain"]

_log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far training is. Changes with every iteration."""

    iteration: int = 0
    """Iterations done."""
    consumed_samples: int = 0
    """Samples of all finished iterations."""
    saved_iteration: int = -1
    """Iteration of the last checkpoint written."""
    evaluated_iteration: int = -1
    """Iteration of the last evaluation."""


class _Iteration(NamedTuple):
    """An iteration whose step may not be validated."""

    iteration: int
    consumed_samples: int
    samples: int
    seconds: float


def pretrain(
    settings: Settings, launch: Launch, *, model_provider: ModelProvider, forward_step_provider: ForwardStepProvider
) -> None:
    """Train, evaluate and save as the settings say. All ranks must call this; it ends the process when one fails.

    Args:
        settings: checked flags.
        launch: which rank this process is.
        model_provider: builds the module of one stage.
        forward_step_provider: makes the function that runs one microbatch through a chunk.
    """
    set_up_logging(launch)
    try:
        tokenizer = build_tokenizer(
            settings.data.tokenizer_type, model=settings.data.tokenizer_model, vocab_size=settings.data.vocab_size
        )
        host = choose_device(settings, launch)
    except UserError as error:
        refuse(error, rank=launch.rank)
    job = join_job(settings, launch, host)
    with JobGuard(job.store, launch.rank) as guard:
        if settings.zero_bubble.schedule == AUTO:
            settings = choose_schedule(
                settings,
                job,
                tokenizer=tokenizer,
                model_provider=model_provider,
                forward_step_provider=forward_step_provider,
            )
        spec = settings.schedule_spec
        set_up_model_parallel(settings, **({} if spec.is_stock else embedding_ranks(spec.placement)))
        init_num_microbatches_calculator(
            launch.rank,
            list(settings.batch.rampup_batch_size) or None,
            settings.global_batch_size,
            settings.batch.micro_batch_size,
            settings.data_parallel_size,
        )
        training_state = assemble(
            settings,
            job,
            spec,
            vocab_size=tokenizer.vocab_size,
            model_provider=model_provider,
            forward_step_provider=forward_step_provider,
        )
        watch = training_state.schedule.hooks.watch
        if watch is not None:
            guard.doing = watch.text
        with watchdog(settings, job, watch):
            _Run(training_state, job, tokenizer).to_the_end()
    _tear_down(job)


class _Run:
    """One call of `pretrain`, after everything is put together."""

    def __init__(self, training_state: TrainingState, job: Job, tokenizer: Any) -> None:
        self.training_state = training_state
        self.training = Training(training_state)
        self.keeper = PlanKeeper(training_state.settings.zero_bubble.zero_bubble_save_plan)
        self.replanner = make_replanner(training_state, self.keeper, ranks_on_host=job.launch.ranks_on_host)
        self.iterations_here = 0
        self.untold: deque[_Iteration] = deque()
        self.settings = training_state.settings
        self.job = job
        self.reads_by_chunk = [chunk_reads(chunk, training_state.settings) for chunk in training_state.chunks]
        self.datasets: Datasets = build_datasets(self.settings, tokenizer, reads=any(self.reads_by_chunk))
        run = self.settings.run
        self.departure = Departure(job.store, handles_signal=run.exit_signal_handler, after_minutes=run.exit_duration_in_mins)
        self.saver = None if self.settings.checkpoint.save is None else Saver(training_state, job.store)
        self.progress = Progress()
        if self.settings.checkpoint.load is not None:
            restored = checkpointing.load(training_state)
            if restored is not None:
                self.progress = Progress(restored.iteration, restored.consumed_samples)
        self.metrics = Metrics(
            self.settings, rank=job.launch.rank, start_iteration=self.progress.iteration, timers=training_state.timers
        )

    def to_the_end(self) -> None:
        """Iterate, evaluate, save, summarize."""
        _log.info("%s", self._what_runs())
        if not self.settings.run.skip_train:
            self._train()
        if self.settings.run.eval_iters > 0 and self.progress.evaluated_iteration < 0 and not self.departure.is_urgent:
            self._evaluate()  # nothing was trained
        self._save()
        if self.saver is not None:
            self.saver.finish()
        if self.settings.zero_bubble.schedule != "stock":
            self.keeper.finish(self.training_state.schedule, self.settings.num_microbatches)
        self._summarize()
        self.metrics.close()
        self.departure.close()
        self.training_state.schedule.close()
        if self.training_state.steps is not None:
            self.training_state.steps.close()

    def _train(self) -> None:
        run, logs, progress = self.settings.run, self.settings.logging, self.progress
        self.training_state.schedule.recordings.choose(self.settings.zero_bubble.trace_iterations, done=progress.iteration)
        data_iterator = self._iterators(self.datasets.train, consumed=progress.consumed_samples)
        while progress.iteration < run.train_iters:
            self._iterate(data_iterator)
            self._replan()
            if self.saver is not None:
                self.saver.poll(progress.iteration)
            is_last = self._leaves() or progress.iteration == run.train_iters
            interval = self.settings.checkpoint.save_interval
            evaluates = run.eval_iters > 0 and (is_last or progress.iteration % run.eval_interval == 0)
            evaluates = evaluates and not self.departure.is_urgent
            saves = interval is not None and progress.iteration % interval == 0
            tells = progress.iteration % logs.log_interval == 0
            if is_last or evaluates or saves or tells:
                self._flush()
            if self.replanner is None and self.iterations_here == 2 and not is_last:  # the first one that is recorded
                self._tell_balance()
            if evaluates:
                self._evaluate()
            elif is_last or tells:
                self.metrics.tell()
            if saves:
                self._save()
            if is_last:
                break

    def _iterate(self, data_iterator: Any) -> None:
        self._ramp_up()
        self.iterations_here += 1
        if self.replanner is not None:
            self.replanner.before(self.iterations_here, get_num_microbatches())
        timer = self.training_state.timers("iteration", log_level=0)
        timer.start(barrier=False)
        results = self.training.iterate(data_iterator)
        timer.stop()
        samples = get_current_running_global_batch_size()
        self.progress.iteration += 1
        self.progress.consumed_samples += samples
        progress = self.progress
        self.untold.append(_Iteration(progress.iteration, progress.consumed_samples, samples, timer.elapsed(reset=True)))
        self._keep(results)

    def _ramp_up(self) -> None:
        """--rampup-batch-size: as many microbatches as the samples so far allow."""
        before = get_num_microbatches()
        update_num_microbatches(self.progress.consumed_samples, consistency_check=True)
        if get_num_microbatches() != before:
            self._flush()  # a plan for another number may be searched for, which nothing under way must wait for
            _log.info("%d microbatches from iteration %d on", get_num_microbatches(), self.progress.iteration + 1)
            if self.settings.zero_bubble.schedule != "stock":
                self.training_state.schedule.plan(get_num_microbatches())

    def _replan(self) -> None:
        """At the end of a window of timed iterations: plan from what was measured, with nothing under way between the ranks."""
        if self.replanner is not None and self.replanner.is_due(self.iterations_here):
            self._flush()
            self.replanner.after(self.iterations_here, get_num_microbatches())
            self._tell_balance()

    def _flush(self) -> None:
        """Before anyone sees weights or results: the truth about the last step. All ranks must call this."""
        self._keep(self.training.flush())

    def _keep(self, results: list[StepResult]) -> None:
        for result in results:
            done = self.untold.popleft()
            self.metrics.add(
                IterationRecord(
                    iteration=done.iteration,
                    consumed_samples=done.consumed_samples,
                    samples=done.samples,
                    seconds=done.seconds,
                    result=result,
                )
            )

    def _evaluate(self) -> None:
        """Every evaluation reads the same samples, so that its losses can be compared."""
        loss = evaluate(self.training_state, self._iterators(self.datasets.valid, consumed=0))
        self.progress.evaluated_iteration = self.progress.iteration
        self.metrics.tell(validation_loss=loss, iteration=self.progress.iteration)

    def _save(self) -> None:
        progress = self.progress
        if self.saver is None or progress.saved_iteration == progress.iteration:
            return
        if self.settings.run.skip_train:
            return
        self.metrics.tell()
        self.saver.save(iteration=progress.iteration, consumed_samples=progress.consumed_samples)
        progress.saved_iteration = progress.iteration

    def _leaves(self) -> bool:
        """Whether to stop here, before --train-iters. All ranks decide alike."""
        run = self.settings.run
        if run.exit_interval is not None and self.progress.iteration % run.exit_interval == 0:
            _log.info("leaving at iteration %d (--exit-interval)", self.progress.iteration)
            return True
        if not self.departure.is_due(self.progress.iteration):
            return False
        why = "on SIGTERM" if self.departure.is_urgent else "--exit-duration-in-mins"
        _log.info("leaving at iteration %d (%s)", self.progress.iteration, why)
        return True

    def _iterators(self, dataset: Any | None, *, consumed: int) -> Any:
        return chunk_iterators(
            dataset,
            self.settings,
            reads_by_chunk=self.reads_by_chunk,
            consumed=consumed,
            rank=parallel_state.get_data_parallel_rank(),
            on_gpu=not self.job.host.enabled,
        )

    def _what_runs(self) -> str:
        settings = self.settings
        return (
            f"training with {self._schedule_name()}: {settings.world_size} ranks = {settings.pipeline_size} pipeline x "
            f"{settings.parallel.tensor_model_parallel_size} tensor x {settings.data_parallel_size} data, "
            f"{settings.num_microbatches} microbatches of {settings.batch.micro_batch_size} x {settings.model.seq_length} "
            f"tokens, {settings.precision.name} on {'CPU' if self.job.host.enabled else 'GPU'}"
        )

    def _schedule_name(self) -> str:
        settings = self.settings
        if settings.zero_bubble.schedule != "stock":
            return f"the {settings.zero_bubble.schedule.upper()} schedule"
        if settings.pipeline_size == 1:
            return "no pipeline"
        return f"megatron-core's own {'interleaved ' if settings.num_chunks > 1 else ''}1F1B schedule"

    def _summarize(self) -> None:
        _log.info("done: %d iterations, schedule: %s", self.progress.iteration, self._schedule_name())
        speed = self.metrics.tokens_per_second()
        if speed is not None:
            _log.info("speed: %.0f tokens per second", speed)
        memory = None if self.replanner is None else self.replanner.memory
        if show_pipeline(self.training_state.schedule, self.settings, self.metrics, memory=memory):
            self._warn_of_shared_cores()
        self._tell_balance()
        if self.settings.checkpoint.save is not None:
            where = iteration_directory(self.settings.checkpoint.save, self.progress.iteration)
            _log.info("checkpoint: %s", where)

    def _tell_balance(self) -> None:
        """Which layout of stages would be faster, if asked for. All ranks must call this."""
        if not self.settings.zero_bubble.zero_bubble_balance_stages:
            return
        layers = self.settings.stage_layers(self.training_state.schedule.spec.placement)
        tell_balance(self.training_state.schedule, layers, None if self.replanner is None else self.replanner.costs)

    def _warn_of_shared_cores(self) -> None:
        """On the CPU of one machine the ranks may take turns on its cores; no schedule can then be faster than another."""
        cores = os.cpu_count() or 1
        if self.job.host.enabled and self.settings.world_size > cores:
            _log.info("(%d ranks take turns on %d cores here, which counts as bubble)", self.settings.world_size, cores)


def _tear_down(job: Job) -> None:
    """Leave nothing behind, so that a process could train again."""
    unset_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    job.host.uninstall()
