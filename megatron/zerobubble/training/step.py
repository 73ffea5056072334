"""One training iteration, and one evaluation.

The schedule's `forward_backward_func` runs all forward and backward passes. This module zeroes the gradients, steps the optimizer
and the learning rate, and sums the loss. The loss stays on the device and is not all-reduced here: that happens once per progress
line, so an iteration adds no synchronization of its own.

With post-validation an iteration ends before its optimizer step is validated. The global gradient statistics arrive during the
next iteration, between its first forwards and its first backward, or with `flush`; the learning rate advances and the gradients
are zeroed only then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron.zerobubble.optimizer.post_validation import PostValidation, Verdict
from megatron.zerobubble.plan.timeline import Activity
from megatron.zerobubble.training.config.settings import Settings

__all__ = [
    "LOSS",
    "ForwardStep",
    "ForwardStepProvider",
    "MeanLoss",
    "ModelProvider",
    "ModelSetup",
    "StepResult",
    "Trainer",
    "TrainingState",
    "evaluate",
    "run_passes",
]

LOSS = "lm loss"
"""Key under which the loss function reports [sum of losses, number of tokens] of a microbatch."""

ForwardStep = Callable[[Any, Any], tuple[torch.Tensor, Callable[..., Any]]]
"""(data iterator, model chunk) -> (output, loss function), as megatron-core's schedules call it."""


@dataclass(frozen=True, kw_only=True)
class ModelSetup:
    """Arguments of model providers and forward step providers."""

    settings: Settings
    """The checked flags."""
    config: Any
    """megatron-core's TransformerConfig."""
    padded_vocab_size: int
    """Vocabulary size after padding: the rows of the word embeddings over all tensor-parallel ranks."""
    device: torch.device
    """Device of this rank's parameters and activations."""


ModelProvider = Callable[[ModelSetup, bool, bool, "int | None"], Any]
"""(setup, pre_process, post_process, vp_stage) -> the module of one stage."""

ForwardStepProvider = Callable[[ModelSetup], ForwardStep]
"""setup -> the function that runs one microbatch through one model chunk."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """Everything that one rank trains with: model chunks, schedule, optimizer. `setup.build_training_state` makes it."""

    settings: Settings
    """The checked flags."""
    chunks: list[Any]
    """The model chunks of this rank, each wrapped in DistributedDataParallel."""
    engine: Any
    """The `Engine`, which runs the model."""
    optimizer: Any
    """megatron-core's optimizer."""
    post_validation: PostValidation | None
    """Steps the optimizer, optimistically or not; None with the stock schedule, which calls megatron-core's own step."""
    scheduler: Any
    """megatron-core's OptimizerParamScheduler."""
    forward_step: ForwardStep
    """Runs one microbatch through one model chunk."""
    device: torch.device
    """Device of this rank's parameters and activations."""
    on_host: Callable[[], AbstractContextManager[object]]
    """Context manager to enter around optimizer steps and checkpoints: the CPU stands in for CUDA (see `mcore.cpu.device`)."""

    @property
    def schedule(self) -> Any:
        """The engine's `PipelineSchedule`: its `forward_backward_func` runs all passes of an iteration."""
        return self.engine.schedule

    def close(self) -> None:
        """End the threads and close the links of schedule and post-validation."""
        self.engine.close()
        if self.post_validation is not None:
            self.post_validation.close()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Loss and optimizer step of one iteration."""

    loss: torch.Tensor
    """[sum of losses, number of tokens] of this rank's microbatches, shape [2], float64; zeros on ranks that do not compute the
    loss."""
    is_stepped: bool
    """False if a gradient overflowed and the optimizer skipped the step."""
    grad_norm: float | None
    """2-norm of all gradients before clipping; None if the optimizer did not report it."""
    lr: float
    """Learning rate of this step."""
    loss_scale: torch.Tensor
    """Loss scale of this step, a number on the device; 1 without loss scaling. Reading it waits for the device."""
    rolled_back: tuple[int, ...] | None = None
    """None unless validation corrected an optimistic step; then the pipeline ranks that had stepped and were rolled back."""


@dataclass(frozen=True, kw_only=True)
class _PendingStep:
    """An iteration whose optimizer step is not validated yet."""

    loss: torch.Tensor
    lr: float
    loss_scale: torch.Tensor


class Trainer:
    """Runs training iterations on one rank.

    Args:
        training_state: model chunks, schedule and optimizer of this rank. With post-validation, the schedule's
            `before_gradients` hook is set.
    """

    def __init__(self, training_state: TrainingState) -> None:
        self._training_state = training_state
        self._pending: _PendingStep | None = None
        self._results: list[StepResult] = []
        self._optimistic = training_state.post_validation is not None and training_state.post_validation.optimistic
        if self._optimistic:
            training_state.schedule.hooks.before_gradients = self._before_gradients

    def iterate(self, data_iterator: Any) -> list[StepResult]:
        """Run forward, backward and the optimizer step of one iteration. All ranks must call this.

        Returns:
            The results validated during this call, in order: of the previous iteration, of this one, both or neither.
        """
        training_state = self._training_state
        if not self._optimistic:
            self._zero_gradients()
        reports = run_passes(training_state, data_iterator, forward_only=False)
        self._pending = _PendingStep(
            loss=_total(reports, training_state.device),
            lr=_learning_rate(training_state.optimizer),
            # A copy, because the step changes it. The host does not read it: it would wait here for all passes.
            loss_scale=training_state.optimizer.get_loss_scale().detach().clone(),
        )
        watch = training_state.schedule.hooks.watch
        with (
            training_state.schedule.recorder.span(Activity.OPTIMIZER),
            nullcontext() if watch is None else watch.doing("waits for other ranks in the optimizer step"),
        ):
            self._step()
        return self._take_results()

    def _step(self) -> None:
        training_state = self._training_state
        if training_state.post_validation is None:
            with training_state.on_host():
                is_stepped, norm, _ = training_state.optimizer.step()
            self._finish(bool(is_stepped), norm, rolled_back=None)
        else:
            with training_state.on_host():
                training_state.post_validation.step()
            if not training_state.post_validation.is_unvalidated:
                self._record_verdict(training_state.post_validation.validate())

    def flush(self) -> list[StepResult]:
        """Validate the last step, so that the weights are those of the synchronous optimizer. All ranks must call this.

        Returns:
            The result of the last iteration, if its step was not validated before.
        """
        if self._training_state.post_validation is not None:
            with self._training_state.on_host():
                self._record_verdict(self._training_state.post_validation.validate())
        return self._take_results()

    def _before_gradients(self) -> bool:
        assert self._training_state.post_validation is not None
        with self._training_state.on_host():
            verdict = self._training_state.post_validation.validate()
        self._record_verdict(verdict)
        self._zero_gradients()
        return verdict is not None and verdict.is_redone

    def _record_verdict(self, verdict: Verdict | None) -> None:
        if verdict is not None:
            norm = verdict.norm if verdict.is_stepped else None
            self._finish(verdict.is_stepped, norm, rolled_back=() if verdict.is_redone else None)

    def _finish(self, is_stepped: bool, norm: float | None, *, rolled_back: tuple[int, ...] | None) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        if is_stepped:
            self._training_state.scheduler.step(increment=self._training_state.settings.global_batch_size)
        self._results.append(
            StepResult(
                loss=pending.loss,
                is_stepped=is_stepped,
                grad_norm=None if norm is None else float(norm),
                lr=pending.lr,
                loss_scale=pending.loss_scale,
                rolled_back=rolled_back,
            )
        )

    def _zero_gradients(self) -> None:
        for chunk in self._training_state.chunks:
            chunk.zero_grad_buffer()
        self._training_state.optimizer.zero_grad()

    def _take_results(self) -> list[StepResult]:
        results, self._results = self._results, []
        return results


@torch.no_grad()
def evaluate(training_state: TrainingState, data_iterator: Any) -> float:
    """The mean loss per token over --eval-iters global batches. All ranks must call this."""
    for chunk in training_state.chunks:
        chunk.eval()
    total = torch.zeros(2, dtype=torch.float64, device=training_state.device)
    with parameters_in_place(training_state):
        for _ in range(training_state.settings.run.eval_iters):
            total += _total(
                run_passes(training_state, data_iterator, forward_only=True),
                training_state.device,
            )
    for chunk in training_state.chunks:
        chunk.train()
    return mean_losses(total.unsqueeze(0))[0].value


class MeanLoss(NamedTuple):
    """A loss over all ranks."""

    value: float
    """Mean per token; NaN if no token counts."""
    has_tokens: bool
    """Whether any token counts. A batch may be all padding or masked."""


def mean_losses(totals: torch.Tensor) -> list[MeanLoss]:
    """Mean losses per token from [n, 2] loss sums and token counts of this rank. All ranks must call this.

    One all-reduce over the world serves every layout and placement: tensor-parallel ranks hold equal sums and counts, so their
    ratio is unchanged, and ranks without the last stage add zero.
    """
    totals = totals.to(torch.float64)
    torch.distributed.all_reduce(totals)
    return [MeanLoss(float(loss / tokens) if tokens else float("nan"), bool(tokens)) for loss, tokens in totals.tolist()]


@contextmanager
def parameters_in_place(training_state: TrainingState) -> Iterator[None]:
    """Inside, all parameters are gathered. With --overlap-param-gather they would arrive only during the next forward pass."""
    overlaps = training_state.settings.parallel.overlap_param_gather
    for chunk in training_state.chunks if overlaps else ():
        chunk.disable_forward_pre_hook(param_sync=True)
    yield
    for chunk in training_state.chunks if overlaps else ():
        chunk.enable_forward_pre_hook()


def run_passes(
    training_state: TrainingState, data_iterator: Any, *, forward_only: bool, num_microbatches: int | None = None
) -> list[dict[str, torch.Tensor]]:
    """Run the forward (and backward) passes of one global batch, without an optimizer step. All ranks must call this.

    Args:
        training_state: model chunks and schedule of this rank.
        data_iterator: microbatches, as `data.samples.chunk_iterators` returns them.
        forward_only: skip the backward passes.
        num_microbatches: microbatches per data-parallel rank; None: those of an iteration.

    Returns:
        What the loss function reported for each microbatch; empty on ranks that do not compute the loss.
    """
    settings, schedule = training_state.settings, training_state.schedule
    reports_ops = schedule.hooks.watch is None or not schedule.spec.is_stock
    with nullcontext() if reports_ops else schedule.hooks.watch.phase("runs the passes of megatron-core's own schedule"):
        return list(
            schedule.forward_backward_func(
                forward_step_func=training_state.forward_step,
                data_iterator=data_iterator,
                model=training_state.chunks,
                num_microbatches=num_microbatches or settings.num_microbatches,
                seq_length=settings.model.seq_length,
                micro_batch_size=settings.data.micro_batch_size,
                decoder_seq_length=settings.model.seq_length,
                forward_only=forward_only,
            )
        )


def _total(reports: list[dict[str, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """[sum of losses, number of tokens] over microbatches, float64."""
    if not reports:
        return torch.zeros(2, dtype=torch.float64, device=device)
    return torch.stack([report[LOSS] for report in reports]).to(torch.float64).sum(dim=0)


def _learning_rate(optimizer: Any) -> float:
    """The learning rate of the parameters that follow the default schedule."""
    for group in optimizer.param_groups:
        if group.get("default_config", False):
            return float(group["lr"])
    return float("nan")
