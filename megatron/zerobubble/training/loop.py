"""`pretrain`: from checked settings to a trained model.

Phases, in order: choose the device; join the job; make process groups; build the datasets and the model; load a checkpoint;
iterate; evaluate; save; log the pipeline's report. User errors that need no other rank are reported before the process group is
initialized.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state

from megatron.zerobubble.errors import UserError
from megatron.zerobubble.job.exit import exit_with_error
from megatron.zerobubble.job.failure import JobGuard
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.job.rendezvous import announce_exit, connect
from megatron.zerobubble.job.watchdog import Watchdog
from megatron.zerobubble.mcore.compat import destroy_model_parallel
from megatron.zerobubble.profiling.marks import Marks
from megatron.zerobubble.runtime.watch import Watch
from megatron.zerobubble.training.checkpoint.resume import start_from
from megatron.zerobubble.training.checkpoint.save import save_checkpoint
from megatron.zerobubble.training.checkpoint.save_lock import hold_save_directory
from megatron.zerobubble.training.checkpoint.shared import check_save_directory
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.data.build_tokenizer import build_tokenizer
from megatron.zerobubble.training.data.samples import Datasets, build_datasets, chunk_iterators, chunk_reads
from megatron.zerobubble.training.early_exit import EarlyExit
from megatron.zerobubble.training.initialize import (
    Job,
    choose_device,
    join_job,
    set_up_logging,
)
from megatron.zerobubble.training.metrics.logger import MetricsLogger
from megatron.zerobubble.training.metrics.progress_line import IterationRecord, description, schedule_name
from megatron.zerobubble.training.same_settings import check_same_settings, values_of
from megatron.zerobubble.training.setup import build_training_state
from megatron.zerobubble.training.step import ForwardStepProvider, ModelProvider, StepResult, Trainer, TrainingState, evaluate

__all__ = ["pretrain"]

_log = logging.getLogger(__name__)


@dataclass
class TrainingProgress:
    """How far training is. Updated after every iteration."""

    iteration: int = 0
    """Iterations done."""
    consumed_samples: int = 0
    """Samples of all finished iterations."""
    saved_iteration: int = -1
    """Iteration of the last checkpoint written; -1 before the first."""
    evaluated_iteration: int = -1
    """Iteration of the last evaluation; -1 before the first."""


class _Action(NamedTuple):
    """What is done at the end of some iterations, when no step is left to validate. All ranks do it."""

    act: Callable[[], object]
    interval: int | None
    """Iterations from one time to the next; None: not in between."""
    at_end: bool = False
    """Whether it is done after the last iteration, too."""

    def is_due(self, iteration: int, *, is_last: bool) -> bool:
        """Whether it is done at the end of this iteration."""
        return (is_last and self.at_end) or (self.interval is not None and iteration % self.interval == 0)


def pretrain(
    settings: Settings,
    launch: Launch,
    *,
    model_provider: ModelProvider,
    forward_step_provider: ForwardStepProvider,
    prog: str = "pretrain_gpt.py",
) -> None:
    """Train, evaluate and save as the settings request. All ranks must call this; it ends the process when a rank fails.

    Args:
        settings: checked flags.
        launch: which rank this process is.
        model_provider: builds the module of one stage.
        forward_step_provider: makes the function that runs one microbatch through a chunk.
        prog: program name in error lines.
    """
    set_up_logging(launch)
    for note in settings.notes if launch.rank == 0 else ():
        _log.warning("%s", note)
    if settings.ignored_flags and launch.rank == 0:
        _log.warning("the reference trainer ignores %s: they change no result", ", ".join(settings.ignored_flags))
    # each host has a screen of its own
    leave = partial(
        exit_with_error, rank=launch.rank, is_reporting=launch.local_rank == 0, prog=prog, error_file=launch.error_file
    )
    try:
        tokenizer = build_tokenizer(settings.tokenizer)
        host = choose_device(settings, launch)
        values = values_of(settings, launch)
    except UserError as error:
        leave(error, before_exit=partial(announce_exit, launch))
    timeout_s = 60.0 * settings.parallel.distributed_timeout_minutes
    try:
        connection = connect(launch, timeout_s=timeout_s)
        check_same_settings(values, settings, launch, connection)
    except UserError as error:
        leave(error)
    watch = Watch(host.device)
    world_size = 0 if settings.watchdog_s is None else launch.world_size
    guard = JobGuard(connection.of(), launch.rank, error_file=launch.error_file, world_size=world_size)
    guard.doing = watch.last
    dog: AbstractContextManager[object] = nullcontext()
    if settings.watchdog_s is not None:
        dog = Watchdog(watch, connection.of(), launch, limit_s=settings.watchdog_s, timeout_s=timeout_s)
    with guard, watch.phase("is between two phases"), dog, ExitStack() as held:
        with watch.phase("joins the job"):
            job = join_job(settings, launch, host, connection=connection, watch=watch)
            check_save_directory(settings.checkpoint.save)
            held.enter_context(hold_save_directory(settings.checkpoint.save, run=job.attempt.job))
        with watch.phase("builds the model"):
            training_state = build_training_state(
                settings,
                job,
                vocab_size=tokenizer.vocab_size,
                model_provider=model_provider,
                forward_step_provider=forward_step_provider,
            )
        with watch.phase("prepares data, checkpoint and logs"):
            run = _Run(training_state, job, tokenizer)
        run.run()
        with watch.phase("leaves the job"):
            _tear_down(job)


class _Run:
    """One call of `pretrain`, after the training state is built."""

    def __init__(self, training_state: TrainingState, job: Job, tokenizer: Any) -> None:
        self.training_state = training_state
        self.trainer = Trainer(training_state)
        self.engine = training_state.engine
        self.unvalidated: deque[Callable[..., IterationRecord]] = deque()
        """Iterations that are not logged yet because their steps may not be validated: they make a record of the result."""
        self.marks = Marks(training_state.device)
        self.settings = training_state.settings
        self.job = job
        self.reads_by_chunk = [chunk_reads(chunk) for chunk in training_state.chunks]
        self.datasets: Datasets = build_datasets(self.settings, tokenizer, reads=any(self.reads_by_chunk))
        run = self.settings.run
        self.early_exit = EarlyExit(job.store, handles_signal=run.exit_signal_handler, after_minutes=run.exit_duration_in_mins)
        self.run_id = job.attempt.job
        self.progress = TrainingProgress()
        with job.watch.phase("loads the checkpoint"):
            restored = start_from(training_state, job.attempt)
        if restored is not None:
            self.progress = TrainingProgress(restored.iteration, restored.consumed_samples)
            self.engine.resume(iteration=restored.iteration, consumed_samples=restored.consumed_samples)
        self.metrics = MetricsLogger(self.settings, rank=job.launch.rank, start_iteration=self.progress.iteration)
        evaluates = run.eval_iters > 0
        self.actions = (
            _Action(self._evaluate, interval=run.eval_interval if evaluates else None, at_end=evaluates),
            _Action(self.metrics.log, interval=self.settings.run.log_interval, at_end=True),
            _Action(self._save, interval=self.settings.checkpoint.save_interval),
        )

    def run(self) -> None:
        """Iterate, evaluate, save, log the pipeline's report."""
        _log.info("%s", description(self.settings, on_cpu=self.job.host.enabled))
        phase = self.job.watch.phase
        with phase("trains, between the passes of two iterations"):
            self._train()
        with phase("ends the run"):
            self._end()

    def _end(self) -> None:
        if self.settings.run.eval_iters > 0 and self.progress.evaluated_iteration < 0:
            self._evaluate()  # nothing was trained
        self._save()
        self.engine.write_plan()
        self.engine.report()
        self.engine.show_balance()
        _log.info("done: %d iterations, schedule: %s", self.progress.iteration, schedule_name(self.settings))
        self.metrics.close()
        self.early_exit.close()
        self.training_state.close()

    def _train(self) -> None:
        progress, num_iterations = self.progress, self.settings.train_iters
        data_iterator = self._iterators(self.datasets.train, consumed=progress.consumed_samples)
        is_last = progress.iteration >= num_iterations
        while not is_last:
            self._iterate(data_iterator)
            self._replan()
            is_last = self._exits_early() or progress.iteration == num_iterations
            due = [action for action in self.actions if action.is_due(progress.iteration, is_last=is_last)]
            if due:
                self._flush()
            for action in due:
                action.act()

    def _iterate(self, data_iterator: Any) -> None:
        settings = self.settings
        self.engine.begin(num_microbatches=settings.num_microbatches, micro_batch_size=settings.data.micro_batch_size)
        begin = self.marks.now()
        results = self.trainer.iterate(data_iterator)
        end = self.marks.now()
        samples = settings.global_batch_size
        self.progress.iteration += 1
        self.progress.consumed_samples += samples
        progress = self.progress
        self.unvalidated.append(
            partial(
                IterationRecord,
                iteration=progress.iteration,
                consumed_samples=progress.consumed_samples,
                tokens=samples * settings.model.seq_length,
                elapsed_ms=partial(self.marks.elapsed_ms, begin, end),
            )
        )
        self._add_metrics(results)

    def _replan(self) -> None:
        """At the end of a window of timed iterations, re-plan with the profiled timings, with no step left to validate."""
        if self.engine.is_due:
            self._flush()
        self.engine.end(num_microbatches=self.settings.num_microbatches)

    def _flush(self) -> None:
        """Validate the last step, before weights or results are used. All ranks must call this."""
        self._add_metrics(self.trainer.flush())

    def _add_metrics(self, results: list[StepResult]) -> None:
        for result in results:
            self.metrics.add(self.unvalidated.popleft()(result=result))

    def _evaluate(self) -> None:
        """Evaluate, unless little time is left. Always on the same samples, so that validation losses are comparable."""
        if self.early_exit.is_urgent:
            return
        with self.job.watch.phase("evaluates, between two passes"):
            loss = evaluate(self.training_state, self._iterators(self.datasets.valid, consumed=0))
        self.progress.evaluated_iteration = self.progress.iteration
        self.metrics.log(validation_loss=loss, iteration=self.progress.iteration)

    def _save(self) -> None:
        progress = self.progress
        if self.settings.checkpoint.save is None or progress.saved_iteration == progress.iteration:
            return
        self.metrics.log()
        with self.job.watch.phase(f"saves the checkpoint of iteration {progress.iteration}"):
            save_checkpoint(
                self.training_state,
                run=self.run_id,
                iteration=progress.iteration,
                consumed_samples=progress.consumed_samples,
            )
        progress.saved_iteration = progress.iteration

    def _exits_early(self) -> bool:
        """Whether to stop here, before the last iteration. All ranks return the same."""
        run = self.settings.run
        if run.exit_interval is not None and self.progress.iteration % run.exit_interval == 0:
            _log.info("exiting at iteration %d (--exit-interval)", self.progress.iteration)
            return True
        if not self.early_exit.is_due(self.progress.iteration):
            return False
        if self.progress.iteration < self.settings.train_iters:  # scripts that start the job again look for this line
            why = "on SIGTERM" if self.early_exit.is_urgent else "--exit-duration-in-mins"
            _log.info("exiting at iteration %d (%s)", self.progress.iteration, why)
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


def _tear_down(job: Job) -> None:
    """Undo what `pretrain` set up, so that the process could train again.

    The ranks wait for each other first: if one is stopped in its last phase, a rank that has left does not notice, and torchrun
    waits for ever.
    """
    torch.distributed.barrier()
    destroy_model_parallel()
    torch.distributed.destroy_process_group()
    job.host.uninstall()
