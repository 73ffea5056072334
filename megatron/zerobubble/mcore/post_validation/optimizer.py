"""megatron-core's optimizers in the steps that post-validation takes them: prepare, apply, undo.

`MegatronOptimizer.step()` reduces overflow flags and norms over all pipeline ranks inside. Here its parts are called one by one:
gradients are copied and unscaled by its own functions, and statistics are reduced over the ranks of one stage only (tensor and
data parallel); what happens between stages is `optimizer.post_validation`'s business, with it and without.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, count_zeros_fp32, get_grad_norm_fp32

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.optimizer.post_validation import PostValidation, Relay, Statistics, group_of
from megatron.zerobubble.optimizer.rollback import ExactRollback, InverseRollback, Rollback

__all__ = ["StagedOptimizer", "post_validation"]


def post_validation(
    optimizer: Any,
    *,
    optimistic: bool,
    patience: int = 10,
    rollback: str = "exact",
    snapshot_on_host: bool = False,
    on_host: Callable[[], AbstractContextManager[object]] = nullcontext,
    timeout: timedelta | None = None,
) -> PostValidation:
    """Steps of a megatron-core optimizer with or without a barrier. All ranks of the world must call it at the same point.

    Args:
        optimizer: what `get_megatron_optimizer` returned.
        optimistic: step before the truth is known; see `PostValidation`.
        patience: see `PostValidation`.
        rollback: "exact", from a copy, or "inverse", without one; see `optimizer.rollback`.
        snapshot_on_host: keep the copy in host memory.
        on_host: to be entered around the optimizer's work, see `mcore.cpu.device`; nothing on a GPU.
        timeout: how long ranks wait for each other's statistics; None for the backend's default.

    Raises:
        ConfigError: an optimizer whose steps cannot be taken apart.
    """
    pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    relay = Relay(pipeline, parallel_state.get_pipeline_model_parallel_rank(), timeout=timeout)
    staged = StagedOptimizer(optimizer, rollback=rollback, snapshot_on_host=snapshot_on_host, on_host=on_host, timeout=timeout)
    return PostValidation(staged, relay, optimistic=optimistic, patience=patience)


class StagedOptimizer:
    """A `Steppable` over megatron-core's FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer or a chain."""

    def __init__(
        self,
        optimizer: Any,
        *,
        rollback: str,
        snapshot_on_host: bool,
        on_host: Callable[[], AbstractContextManager[object]],
        timeout: timedelta | None,
    ) -> None:
        self._optimizer = optimizer
        self._parts = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        self._busy = [part for part in self._parts if not getattr(part, "is_stub_optimizer", False)]
        self._refuse()
        self._stage_groups = _StageGroups(timeout)
        self._groups = [self._stage_groups.within(part.get_grad_stats_parallel_group()) for part in self._parts]
        stepping = [part.optimizer for part in self._busy]
        self._rollback: Rollback = (
            InverseRollback(stepping, agree=self._stage_groups.agree)
            if rollback == "inverse"
            else ExactRollback(stepping, on_host=snapshot_on_host)
        )
        self._on_host = on_host

    @torch.no_grad()
    def prepare(self) -> Statistics:
        """Copy gradients to where the optimizer wants them, unscaled; statistics of this stage."""
        with self._on_host():
            overflows = [self._prepare_part(part, group) for part, group in zip(self._parts, self._groups, strict=True)]
            squares = [
                get_grad_norm_fp32(
                    part.get_main_grads_for_grad_norm() if part in self._busy else [], grad_stats_parallel_group=group
                )
                ** 2
                for part, group in zip(self._parts, self._groups, strict=True)
            ]
            return Statistics(tuple(squares), tuple(overflows), self._zeros())

    def is_clipped(self, statistics: Statistics) -> bool:
        """By the rule of `clip_grad_by_total_norm_fp32`, where any part clips."""
        return any(_clip_factor(part, statistics.norm) < 1.0 for part in self._parts)

    @torch.no_grad()
    def apply(self, statistics: Statistics) -> None:
        """Clip and step."""
        if statistics.overflowed:
            return
        with self._on_host():
            for part in self._busy:
                if _clip_factor(part, statistics.norm) < 1.0:
                    clip_grad_by_total_norm_fp32(part.get_parameters(), part.config.clip_grad, statistics.norm)
            self._optimizer.step_with_ready_grads()

    def keep(self) -> bool:
        """As the rollback does; all ranks of the stage alike, as stepping may gather weights from all of them."""
        with self._on_host():
            return self._rollback.keep()

    @torch.no_grad()
    def amend(self, statistics: Statistics, *, undo: bool) -> None:
        """Take the step back where it was taken, with the 16-bit weights and the shards that follow from it, and step again.

        With overlapped parameter gathering some of the wrong weights may be on their way; they are waited for first, and the
        right ones are gathered at once, as forwards that ran will not wait for them again.
        """
        self._gather_overlapped()
        if undo:
            with self._on_host():
                self._rollback.undo()
                for part in self._busy:
                    if hasattr(part, "_copy_main_params_to_model_params"):
                        part._copy_main_params_to_model_params()
                    if hasattr(part, "model_chunks") and not _overlaps(part):
                        for chunk in part.model_chunks:
                            chunk.start_param_sync()
        self.apply(statistics)
        self._gather_overlapped()

    def _gather_overlapped(self) -> None:
        """Gather, or end the gathering of, all weights that forwards gather as they need them."""
        with self._on_host():
            for part in self._busy:
                for chunk in part.model_chunks if _overlaps(part) else ():
                    chunk.start_param_sync(force_sync=True)

    def forget(self) -> None:
        """Free the copies."""
        self._rollback.forget()

    def settle(self, statistics: Statistics) -> None:
        """Let every loss scale know."""
        for part, overflow in zip(self._parts, statistics.overflows, strict=True):
            scaler = getattr(part, "grad_scaler", None)
            if scaler:
                with self._on_host():
                    scaler.update(overflow > 0)

    def close(self) -> None:
        """Destroy the stage's process groups."""
        self._stage_groups.close()

    def _prepare_part(self, part: Any, group: dist.ProcessGroup) -> float:
        scaler = getattr(part, "grad_scaler", None)
        if not scaler:
            part.prepare_grads()
            return 0.0
        part.found_inf.fill_(0.0)
        if part in self._busy:
            part._copy_model_grads_to_main_grads()
            grads = part._collect_main_grad_data_for_unscaling()
            torch._amp_foreach_non_finite_check_and_unscale_(grads, part.found_inf, scaler.inv_scale)
        dist.all_reduce(part.found_inf, op=dist.ReduceOp.MAX, group=group)
        return float(part.found_inf.item())

    def _zeros(self) -> float:
        return sum(
            float(
                count_zeros_fp32(part.get_parameters(), grad_stats_parallel_group=group, tp_group=getattr(part, "tp_group", None))
            )
            for part, group in zip(self._parts, self._groups, strict=True)
            if part.config.log_num_zeros_in_grad
        )

    def _refuse(self) -> None:
        for part in self._parts:
            config = part.config
            for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
                if getattr(config, name, False):
                    raise ConfigError(f"{name} is not supported by our optimizer steps; leave it out or use the stock schedule")


class _StageGroups:
    """For a group over pipeline ranks, its members on this rank's stage. All ranks of the world must ask in the same order."""

    def __init__(self, timeout: timedelta | None) -> None:
        self._timeout = timeout
        self._known: dict[tuple[int, ...], dist.ProcessGroup] = {}
        stages: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(stages, parallel_state.get_pipeline_model_parallel_rank())
        self._stages = stages

    def within(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
        """The subgroup; None stands for the world."""
        members = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
        here = self._stages[dist.get_rank()]
        ranks = tuple(rank for rank in members if self._stages[rank] == here)
        if ranks not in self._known:
            self._known[ranks] = group_of(ranks, timeout=self._timeout)
        return self._known[ranks]

    def agree(self, answer: bool) -> bool:
        """Whether every member of every subgroup asked for says yes. All of them must call it at the same point."""
        flag = torch.tensor([float(answer)], device=torch.cuda.current_device())
        for group in self._known.values():
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
        return bool(flag.item())

    def close(self) -> None:
        """Destroy the groups."""
        for group in self._known.values():
            dist.destroy_process_group(group)
        self._known.clear()


def _overlaps(part: Any) -> bool:
    """Whether a distributed optimizer leaves gathering its weights to the next forwards."""
    return hasattr(part, "ddp_config") and bool(part.ddp_config.overlap_param_gather)


def _clip_factor(part: Any, norm: float) -> float:
    """What `clip_grad_by_total_norm_fp32` multiplies by where it is below 1; NaN gradients are not clipped there either."""
    return float(part.config.clip_grad / (norm + 1.0e-6)) if part.config.clip_grad > 0.0 else 1.0
