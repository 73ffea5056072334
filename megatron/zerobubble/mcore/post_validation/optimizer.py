"""megatron-core's optimizers, with the step split into the phases of post-validation: prepare, apply, roll back and redo.

`MegatronOptimizer.step()` all-reduces overflow flags and norms over all pipeline ranks. Here its phases are called one by one:
its own functions copy and unscale the gradients, and the statistics are all-reduced over the tensor-parallel and data-parallel
ranks of one stage only. `optimizer.post_validation` combines them across stages, with post-validation and without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, count_zeros_fp32
from torch import Tensor

from megatron.zerobubble.errors import ConfigError, ExecutionError
from megatron.zerobubble.mcore.compat import gradients_for_norm
from megatron.zerobubble.mcore.post_validation.norms import sum_of_squares
from megatron.zerobubble.optimizer.parts import parts_of
from megatron.zerobubble.optimizer.post_validation import GradientStatistics, PostValidation, Relay, Waits, group_of
from megatron.zerobubble.optimizer.rollback import Rollback

__all__ = ["MegatronRollbackOptimizer", "post_validation"]


def post_validation(
    optimizer: Any,
    *,
    optimistic: bool,
    patience: int = 10,
    snapshot_on_host: bool = False,
    waits: Waits | None = None,
) -> PostValidation:
    """The steps of a megatron-core optimizer, with or without a barrier. All ranks of the world must call it at the same point.

    Args:
        optimizer: what `get_megatron_optimizer` returned.
        optimistic: step before the global gradient statistics are known; see `PostValidation`.
        patience: see `PostValidation`.
        snapshot_on_host: keep the snapshot in host memory.
        waits: reports these waits, for example `runtime.watch.Watch.waits`; None: they are not reported.

    Raises:
        ConfigError: an optimizer whose step cannot be split.
    """
    pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    relay = Relay(pipeline, parallel_state.get_pipeline_model_parallel_rank(), waits=waits)
    steps = MegatronRollbackOptimizer(optimizer, snapshot_on_host=snapshot_on_host)
    return PostValidation(steps, relay, optimistic=optimistic, patience=patience)


class MegatronRollbackOptimizer:
    """A `RollbackOptimizer` over a megatron-core optimizer.

    That is an FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer, or a ChainedOptimizer of them. Arguments as
    of `post_validation`.
    """

    def __init__(self, optimizer: Any, *, snapshot_on_host: bool) -> None:
        self._optimizer = optimizer
        self._parts = parts_of(optimizer)
        self._active = [part for part in self._parts if not getattr(part, "is_stub_optimizer", False)]
        self._check_options()
        self._stage_groups = _StageGroups()
        self._groups = [self._stage_groups.within(part.get_grad_stats_parallel_group()) for part in self._parts]
        self._rollback = Rollback([part.optimizer for part in self._active], on_host=snapshot_on_host)
        self._own_squares = torch.zeros(0)
        """Per optimizer: this rank's share of its sum of squares, as the gradients are since they were prepared or clipped."""
        self._noted: list[tuple[Tensor, tuple[int, ...]]] = []

    @torch.no_grad()
    def prepare(self) -> GradientStatistics:
        """Copy the gradients to the main parameters and unscale them; returns the statistics of this stage.

        On a GPU this is where the host waits for the passes, once per step: it reads all numbers together. Counting zeros
        (--log-num-zeros-in-grad) waits once more for each optimizer of a chain.
        """
        overflows = [self._prepare_part(part, group) for part, group in zip(self._parts, self._groups, strict=True)]
        self._own_squares = self._squares()
        squares = list(self._own_squares.clone().split(1))
        for each, group in zip(squares, self._groups, strict=True):
            dist.all_reduce(each, group=group)
        numbers = torch.cat([*squares, *(each for each in overflows if each is not None)]).tolist()
        flags = iter(numbers[len(squares) :])
        return GradientStatistics(
            tuple(numbers[: len(squares)]),
            tuple(0.0 if each is None else next(flags) for each in overflows),
            self._zeros(),
        )

    def is_clipped(self, statistics: GradientStatistics) -> bool:
        """Whether `clip_grad_by_total_norm_fp32` would scale the gradients of any optimizer of the chain."""
        return any(_clip_factor(part, statistics.norm) < 1.0 for part in self._parts)

    @torch.no_grad()
    def apply(self, statistics: GradientStatistics) -> None:
        """Clip by these statistics and step; do nothing if they overflowed."""
        if statistics.overflowed:
            return
        for number, part in enumerate(self._parts):
            factor = _clip_factor(part, statistics.norm)
            if factor < 1.0 and part in self._active:
                clip_grad_by_total_norm_fp32(part.get_parameters(), part.config.clip_grad, statistics.norm)
                self._own_squares[number] *= factor**2
        self._optimizer.step_with_ready_grads()

    def _squares(self) -> Tensor:
        return torch.cat([sum_of_squares(gradients_for_norm(part) if part in self._active else []) for part in self._parts])

    def snapshot(self) -> None:
        """Copy parameters and optimizer state."""
        self._rollback.snapshot()

    @torch.no_grad()
    def redo(self, statistics: GradientStatistics, *, roll_back: bool) -> None:
        """Roll back the optimistic step, if there was one, with the 16-bit weights and gathered shards made from it; step again.

        With --overlap-param-gather, all-gathers of wrong weights may be in flight. They are awaited first, and the right weights
        are gathered at once, as forwards that ran will not wait for them again.

        Args:
            statistics: the global gradient statistics.
            roll_back: whether an optimistic step was taken.
        """
        self._gather_overlapped()
        if roll_back:
            self._rollback.rollback()
            for part in self._active:
                if hasattr(part, "_copy_main_params_to_model_params"):
                    part._copy_main_params_to_model_params()
                if hasattr(part, "model_chunks") and not _overlaps(part):
                    for chunk in part.model_chunks:
                        chunk.start_param_sync()
        self.apply(statistics)
        self._gather_overlapped()

    def _gather_overlapped(self) -> None:
        """All-gather the weights that forwards gather as they need them; waits for gathers in flight."""
        for part in self._active:
            for chunk in part.model_chunks if _overlaps(part) else ():
                chunk.start_param_sync(force_sync=True)

    def drop_snapshot(self) -> None:
        """Free the snapshot."""
        self._rollback.drop_snapshot()

    def note_tensors(self) -> None:
        """As `RollbackOptimizer.note_tensors`: the place and version of gradients, the version of weights.

        Weights and Adam's state may be moved away and back: a rollback writes them anew. Nothing is noted where no step is ever
        redone.
        """
        self._noted = []
        if any(part.config.clip_grad > 0.0 or getattr(part, "grad_scaler", None) for part in self._parts):
            weights = [weight for part in self._active for weight in part.get_parameters()]
            self._noted = [(weight, _state_of(weight)) for weight in weights]

    @torch.no_grad()
    def check_tensors(self, *, is_redone: bool) -> None:
        """As `RollbackOptimizer.check_tensors`. Memory that was unmapped and came back has its address, and other content."""
        noted, self._noted = self._noted, []
        for weight, (version, *of_gradient) in noted:
            now, *gradient_now = _state_of(weight)
            if gradient_now != of_gradient:
                raise _moved("gradients")
            if now != version:
                raise _moved("weights")
        # 1e-3: squares of clipped gradients have their own rounding errors
        if is_redone and not torch.allclose(self._squares(), self._own_squares, rtol=1e-3, atol=0.0, equal_nan=True):
            raise _moved("gradients")

    def finalize(self, statistics: GradientStatistics) -> None:
        """Update the loss scale of every optimizer of the chain."""
        for part, overflow in zip(self._parts, statistics.overflows, strict=True):
            scaler = getattr(part, "grad_scaler", None)
            if scaler:
                scaler.update(overflow > 0)

    def closers(self) -> Sequence[Callable[[], None]]:
        """What destroys the stage's process groups, without a reference to the optimizer."""
        return (self._stage_groups.close,)

    def _prepare_part(self, part: Any, group: dist.ProcessGroup) -> Tensor | None:
        """Returns the number, on the device, that is above 0 if a gradient overflowed; None without loss scaling."""
        scaler = getattr(part, "grad_scaler", None)
        if not scaler:
            part.prepare_grads()
            return None
        part.found_inf.fill_(0.0)
        if part in self._active:
            part._copy_model_grads_to_main_grads()
            grads = part._collect_main_grad_data_for_unscaling()
            torch._amp_foreach_non_finite_check_and_unscale_(grads, part.found_inf, scaler.inv_scale)
        dist.all_reduce(part.found_inf, op=dist.ReduceOp.MAX, group=group)
        found: Tensor = part.found_inf
        return found

    def _zeros(self) -> float:
        return sum(
            float(
                count_zeros_fp32(part.get_parameters(), grad_stats_parallel_group=group, tp_group=getattr(part, "tp_group", None))
            )
            for part, group in zip(self._parts, self._groups, strict=True)
            if part.config.log_num_zeros_in_grad
        )

    def _check_options(self) -> None:
        for part in self._parts:
            config = part.config
            for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
                if getattr(config, name, False):
                    raise ConfigError(f"{name} works with the stock schedule only; leave it out or use that schedule")
            if getattr(config, "grad_norm_skip_threshold", math.inf) < math.inf:
                raise ConfigError(
                    "grad_norm_skip_threshold works with the stock schedule only; leave it at inf or use that schedule"
                )
        for part in self._active:
            if any(getattr(parameter, "grad_norm_group", None) is not None for parameter in part.get_parameters()):
                raise ConfigError(
                    "mtp_detach_heads clips MTP layers by a norm of their own; it works with the stock schedule only"
                )


class _StageGroups:
    """For a process group that spans pipeline ranks: the subgroup of the ranks on this rank's stage.

    All ranks of the world must construct it, and call `within`, at the same points.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        stages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(stages, parallel_state.get_pipeline_model_parallel_rank())
        self._stages = stages

    def within(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """The subgroup of `group` on this stage; None stands for the world."""
        members = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
        here = self._stages[dist.get_rank()]
        ranks = tuple(rank for rank in members if self._stages[rank] == here)
        if ranks not in self._groups:
            self._groups[ranks] = group_of(ranks)
        return self._groups[ranks]

    def close(self) -> None:
        """Destroy the subgroups."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()


def _state_of(weight: Tensor) -> tuple[int, ...]:
    """(version of the weight, and of its gradient: version, address, bytes of memory behind it)."""
    gradient = weight.grad
    if gradient is None:
        return (weight._version,)
    return weight._version, gradient._version, gradient.data_ptr(), gradient.untyped_storage().nbytes()


def _moved(what: str) -> ExecutionError:
    return ExecutionError(
        f"between an optimizer step and its validation something moved or changed {what}, which post-validation needs to redo "
        "the step: call megatron.zerobubble.settle() right after optimizer.step(), before anything does, or leave out "
        "post-validation"
    )


def _overlaps(part: Any) -> bool:
    """Whether a distributed optimizer leaves the all-gather of its weights to the next forwards (--overlap-param-gather)."""
    return hasattr(part, "ddp_config") and bool(part.ddp_config.overlap_param_gather)


def _clip_factor(part: Any, norm: float) -> float:
    """The factor of `clip_grad_by_total_norm_fp32`, which applies it only below 1; so NaN norms do not clip."""
    return float(part.config.clip_grad / (norm + 1.0e-6)) if part.config.clip_grad > 0.0 else 1.0
