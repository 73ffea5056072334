"""One iteration, and one evaluation.

The schedule's function does all forward and backward passes; what is left is to zero the gradients, to step the optimizer
and the learning rate, and to add up the loss. The loss stays on the device and is not told to the other ranks here: that is
done once per progress line, so that an iteration has no synchronisation of its own.

With post-validation an iteration ends before the truth about its step is known. The truth comes in the next iteration, between
its first forwards and its first backward, or with `flush`; so the learning rate moves and gradients are zeroed only there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size, get_num_microbatches

from megatron.zerobubble.optimizer.post_validation import PostValidation, Verdict
from megatron.zerobubble.plan.timeline import Activity
from megatron.zerobubble.training.config.settings import Settings

__all__ = ["LOSS", "ForwardStep", "StepResult", "Training", "TrainingState", "evaluate", "run_passes"]

LOSS = "lm loss"
"""Under this name the loss function reports [sum of losses, number of tokens] of a microbatch."""

ForwardStep = Callable[[Any, Any], tuple[torch.Tensor, Callable[..., Any]]]
"""(data iterator, model chunk) -> (output, loss function), as megatron-core's schedules call it."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What is trained on this rank, put together: see `assembly`."""

    settings: Settings
    """What was asked for."""
    chunks: list[Any]
    """The model chunks of this rank, each wrapped in DistributedDataParallel."""
    schedule: Any
    """The `PipelineSchedule`: its `forward_backward_func` runs all passes of an iteration."""
    optimizer: Any
    """megatron-core's optimizer."""
    steps: PostValidation | None
    """Steps of the optimizer, early or not; None where megatron-core's own step is taken (the stock schedule)."""
    scheduler: Any
    """megatron-core's OptimizerParamScheduler."""
    forward_step: ForwardStep
    """What a microbatch does in a chunk."""
    timers: Any
    """megatron-core's Timers."""
    device: torch.device
    """Where this rank computes."""
    on_host: Callable[[], AbstractContextManager[object]]
    """To be entered around optimizer steps and checkpoints (see `mcore.cpu.device`)."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one iteration did."""

    loss: torch.Tensor
    """[sum of losses, number of tokens] of this rank's microbatches, float64; zeros where the loss is not computed."""
    is_stepped: bool
    """False where a gradient overflowed and the optimizer left the weights alone."""
    grad_norm: float | None
    """Norm of all gradients before clipping; None where the optimizer did not say."""
    num_zeros: int | None
    """Zeros in the gradients, where asked for."""
    lr: float
    """Learning rate of this step."""
    loss_scale: float
    """Loss scale of this step; 1 without."""
    rolled_back: tuple[int, ...] | None = None
    """If an optimistic step was wrong and redone: the pipeline ranks that had taken it and rolled it back; else None."""


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """A step whose outcome is not known."""

    loss: torch.Tensor
    samples: int
    lr: float
    loss_scale: float


class Training:
    """Iterations of one rank.

    Args:
        training_state: what is trained.
    """

    def __init__(self, training_state: TrainingState) -> None:
        self._training_state = training_state
        self._taken: _Taken | None = None
        self._results: list[StepResult] = []
        self._optimistic = training_state.steps is not None and training_state.steps.optimistic
        if self._optimistic:
            training_state.schedule.hooks.before_gradients = self._before_gradients

    def iterate(self, data_iterator: Any) -> list[StepResult]:
        """Forward, backward, optimizer. All ranks must call this.

        Returns:
            The results that became known: of the iteration before, of this one, both or neither, in order.
        """
        training_state = self._training_state
        if not self._optimistic:
            self._zero_gradients()
        reports = run_passes(training_state, data_iterator, num_microbatches=get_num_microbatches(), forward_only=False)
        self._taken = _Taken(
            loss=_total(reports, training_state.device),
            samples=get_current_running_global_batch_size(),
            lr=_learning_rate(training_state.optimizer),
            loss_scale=float(training_state.optimizer.get_loss_scale().item()),
        )
        training_state.timers("optimizer", log_level=1).start(barrier=False)
        watch = training_state.schedule.hooks.watch
        with (
            training_state.schedule.recorder.span(Activity.OPTIMIZER),
            nullcontext() if watch is None else watch.doing("steps its optimizer with other ranks"),
        ):
            self._step()
        training_state.timers("optimizer").stop()
        return self._told()

    def _step(self) -> None:
        training_state = self._training_state
        if training_state.steps is None:
            with training_state.on_host():
                is_stepped, norm, zeros = training_state.optimizer.step()
            self._finish(bool(is_stepped), norm, zeros, rolled_back=None)
        else:
            training_state.steps.step()
            if not training_state.steps.is_unvalidated:
                self._finalize(training_state.steps.validate())

    def flush(self) -> list[StepResult]:
        """After this the weights are those of the synchronous optimizer. All ranks must call this; returns what became known."""
        self._finalize(self._training_state.steps.flush() if self._training_state.steps is not None else None)
        return self._told()

    def _before_gradients(self) -> bool:
        assert self._training_state.steps is not None
        verdict = self._training_state.steps.validate()
        self._finalize(verdict)
        self._zero_gradients()
        return verdict is not None and verdict.is_redone

    def _finalize(self, verdict: Verdict | None) -> None:
        if verdict is not None:
            logs = self._training_state.settings.logging
            zeros = verdict.zeros if logs.log_num_zeros_in_grad else None
            norm = verdict.norm if verdict.is_stepped else None
            self._finish(verdict.is_stepped, norm, zeros, rolled_back=verdict.rolled_back if verdict.is_redone else None)

    def _finish(self, is_stepped: bool, norm: float | None, zeros: float | None, *, rolled_back: tuple[int, ...] | None) -> None:
        taken, self._taken = self._taken, None
        assert taken is not None
        if is_stepped:
            self._training_state.scheduler.step(increment=taken.samples)
        self._results.append(
            StepResult(
                loss=taken.loss,
                is_stepped=is_stepped,
                grad_norm=None if norm is None else float(norm),
                num_zeros=None if zeros is None else int(zeros),
                lr=taken.lr,
                loss_scale=taken.loss_scale,
                rolled_back=rolled_back,
            )
        )

    def _zero_gradients(self) -> None:
        for chunk in self._training_state.chunks:
            chunk.zero_grad_buffer()
        self._training_state.optimizer.zero_grad()

    def _told(self) -> list[StepResult]:
        results, self._results = self._results, []
        return results


@torch.no_grad()
def evaluate(training_state: TrainingState, data_iterator: Any) -> float:
    """The mean loss over --eval-iters global batches, whole ones even while the batch size ramps up. All ranks must call this."""
    num_microbatches = training_state.settings.num_microbatches
    for chunk in training_state.chunks:
        chunk.eval()
    total = torch.zeros(2, dtype=torch.float64, device=training_state.device)
    with parameters_in_place(training_state):
        for _ in range(training_state.settings.run.eval_iters):
            total += _total(
                run_passes(training_state, data_iterator, num_microbatches=num_microbatches, forward_only=True),
                training_state.device,
            )
    for chunk in training_state.chunks:
        chunk.train()
    return mean_losses(total.unsqueeze(0))[0]


def mean_losses(totals: torch.Tensor) -> list[float]:
    """Mean losses from [n, 2] sums and token counts, summed over all ranks. All ranks must call this.

    Tensor-parallel ranks hold the same sums and count alike, and a rank without the last stage adds zero, so that one sum
    over the world serves every layout and placement.
    """
    totals = totals.to(torch.float64)
    torch.distributed.all_reduce(totals)
    return [float(loss / tokens) if tokens else float("nan") for loss, tokens in totals.tolist()]


@contextmanager
def parameters_in_place(training_state: TrainingState) -> Iterator[None]:
    """With --overlap-param-gather the weights of the last step arrive during the next forward pass; here they are waited for."""
    overlaps = training_state.settings.parallel.overlap_param_gather
    for chunk in training_state.chunks if overlaps else ():
        chunk.disable_forward_pre_hook(param_sync=True)
    yield
    for chunk in training_state.chunks if overlaps else ():
        chunk.enable_forward_pre_hook()


def run_passes(
    training_state: TrainingState, data_iterator: Any, *, num_microbatches: int, forward_only: bool
) -> list[dict[str, torch.Tensor]]:
    """All passes of an iteration or an evaluation, and no step. All ranks must call this.

    Returns:
        What the loss function reported of each microbatch; empty where the loss is not computed.
    """
    settings = training_state.settings
    return list(
        training_state.schedule.forward_backward_func(
            forward_step_func=training_state.forward_step,
            data_iterator=data_iterator,
            model=training_state.chunks,
            num_microbatches=num_microbatches,
            seq_length=settings.model.seq_length,
            micro_batch_size=settings.batch.micro_batch_size,
            decoder_seq_length=settings.model.seq_length,
            forward_only=forward_only,
        )
    )


def _total(reports: list[dict[str, torch.Tensor]], device: torch.device) -> torch.Tensor:
    """[sum of losses, number of tokens] over microbatches."""
    if not reports:
        return torch.zeros(2, dtype=torch.float64, device=device)
    return torch.stack([report[LOSS] for report in reports]).to(torch.float64).sum(dim=0)


def _learning_rate(optimizer: Any) -> float:
    """The learning rate of the parameters that follow the default schedule."""
    for group in optimizer.param_groups:
        if group.get("default_config", False):
            return float(group["lr"])
    return float("nan")
