"""Optimizer post-validation in a loop that is written for megatron-core's synchronous optimizer.

Such a loop steps, advances the learning rate and zeroes the gradients before the step is validated, inside the next call of the
schedule. A step that turns out to be wrong is redone as if the loop had done none of that:

====================================  =============================================================================
the loop                              until the step is validated
====================================  =============================================================================
zeroes gradients                      zeroing waits; it runs right before the first backward
changes learning rate, weight decay   a redone step uses the values of its own iteration; the loop's are kept for the next
asks whether the step succeeded       the last pipeline rank knows; others answer that it did
asks for the gradient norm            the last pipeline rank has it and returns it; others return None, as ranks without
                                      parameters do, and a loop's own maximum over ranks is right
asks for the loss scale               the last pipeline rank has updated it, others will before their first backward
saves a checkpoint, evaluates,        the step is validated first (the model's or the optimizer's state must be read before a
offloads as megatron-core does        scheduler's, which does not validate)
reads weights by their names          gets them as they are; one warning asks for `megatron.zerobubble.settle`, which validates
reads weights in Megatron-LM's loop   its flags say in which iterations (`megatron_lm`): their steps are synchronous
moves or changes weights, gradients   an error asks for `settle`
====================================  =============================================================================

With loss scaling a step is skipped if a gradient overflowed. Ranks that answered otherwise take back what their
`OptimizerParamScheduler` advanced since. Their learning rates, counts of skipped iterations and loss scales that were logged in
between stay as they were: those of the last pipeline rank are right. A scheduler that is not megatron-core's cannot be taken
back, and is refused.

A loop that all-reduces the norm or the outcome over the pipeline in every iteration makes all ranks wait for each other there:
its numbers are right, but nothing is saved.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import nn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore.post_validation.optimizer import post_validation
from megatron.zerobubble.mcore.stock_loop.megatron_lm import reads_weights_after_step
from megatron.zerobubble.mcore.zb_schedules import PipelineSchedule
from megatron.zerobubble.optimizer.parts import parts_of
from megatron.zerobubble.optimizer.post_validation import PostValidation, Verdict

__all__ = ["OptimisticSteps", "StepOutcome"]

_log = logging.getLogger(__name__)

StepOutcome = tuple[bool, float | None, int | None]
"""What megatron-core's `step()` returns: whether it stepped, the gradient norm, the number of zeros; None: not known here, or not
stepped."""

_KINDS = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer, ChainedOptimizer)
_TOUCHES_WEIGHTS = (
    *("state_dict", "sharded_state_dict", "state_dict_for_save_checkpoint", "save_parameter_state"),
    *("load_state_dict", "load_parameter_state"),  # what is loaded must not be rolled back
    *("offload_grad_buffers", "offload_to_cpu"),
)


class OptimisticSteps:
    """The optimizer steps of one model in a stock loop.

    Args:
        flags: how steps are taken and rolled back.
        schedule: runs the model; its `before_gradients` hook is set.
        chunks: this rank's model chunks, wrapped by DDP.
    """

    def __init__(self, flags: ZeroBubbleConfig, schedule: PipelineSchedule, chunks: Sequence[nn.Module]) -> None:
        self._flags = flags
        self._chunks = list(chunks)
        self._optimizer: Any = None
        self._scales_loss = False
        self._steps: PostValidation | None = None
        self._used: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """(parameter group, its values when the step was taken)."""
        self._advanced: list[tuple[Any, int]] = []
        """(scheduler, increment) of megatron-core's schedulers since the step was taken."""
        self._zeroing: dict[int, Callable[[], None]] = {}
        self._undo: list[Callable[[], None]] = []
        self._hooks = schedule.hooks
        schedule.hooks.before_gradients = self._before_gradients
        self._is_loops_turn = False
        """Whether the loop runs, not the schedule."""
        self._has_warned = False
        for module in _nested(chunks):
            self._validate_before(module)
            self._replace(module, "named_parameters", self._warning)

    @property
    def is_unvalidated(self) -> bool:
        """Whether the last step may still be rolled back."""
        return self._steps is not None and self._steps.is_unvalidated

    def trains(self, optimizer: Any) -> bool:
        """Whether the optimizer has parameters of the model; one without parameters, if it was stepped first."""
        return optimizer is self._optimizer or trains(optimizer, self._chunks, without_any=self._optimizer is None)

    def owns(self, zeroed: Any) -> bool:
        """Whether these are the model's gradients: one of its chunks, its optimizer or a part of that."""
        return zeroed is self._optimizer or any(zeroed is each for each in (*self._chunks, *parts_of(self._optimizer)))

    def defer(self, zeroed: Any, zero: Callable[[], None]) -> None:
        """Call `zero`, which zeroes the gradients that `zeroed` holds, when they are not needed for a redone step any more."""
        self._zeroing[id(zeroed)] = zero

    def advanced(self, scheduler: Any, increment: int) -> None:
        """Note that an `OptimizerParamScheduler` has advanced: if the last step turns out to be skipped, that is taken back."""
        groups = [group for group, _ in self._used]
        drives = any(group is each for group in scheduler.optimizer.param_groups for each in groups)
        if self.is_unvalidated and (drives or scheduler.optimizer is self._optimizer):
            self._advanced.append((scheduler, increment))

    def step(self, optimizer: Any) -> StepOutcome:
        """Step, optimistically or not. All ranks of the world must call it at the same point.

        Raises:
            ConfigError: the optimizer is not the model's, its step cannot be split, or the learning rate of the step before it
                cannot be taken back.
        """
        if self._steps is None:
            self._steps = self._take(optimizer)
        elif optimizer is not self._optimizer:
            raise ConfigError("post-validation steps one optimizer per model, and a second one was stepped; chain them")
        self.flush()
        self._steps.optimistic = not reads_weights_after_step()
        self._steps.step()
        self._is_loops_turn = True
        if not self._steps.is_unvalidated:
            verdict = self._steps.validate()
            assert verdict is not None
            return self._outcome(verdict.norm, verdict.zeros) if verdict.is_stepped else (False, None, None)
        self._used = [(group, _values(group)) for group in optimizer.param_groups]
        known = self._steps.known
        if known is None:
            return True, None, None
        return (False, None, None) if known.overflowed else self._outcome(known.norm, known.zeros)

    def _outcome(self, norm: float, zeros: float) -> StepOutcome:
        counts = any(part.config.log_num_zeros_in_grad for part in parts_of(self._optimizer))
        return True, norm, int(zeros) if counts else None

    def passes_begin(self) -> None:
        """The schedule is called: what is read from here on is read again if the step is redone."""
        self._is_loops_turn = False

    def flush(self) -> None:
        """Validate the last step, if it was not: afterwards the weights are final. All ranks of the pipeline must call it."""
        self._validate()
        self._zero()

    def close(self, *, validates: bool = True) -> None:
        """Destroy process groups, and validate the last step before, unless some rank of the world has lost the model.

        Every rank that has the model must call it.
        """
        if validates:
            self.flush()
        if validates and self._steps is not None:
            self._steps.close()
        else:
            for close in self.closers():
                close()
        self._steps = None

    def remove_hooks(self) -> None:
        """Let checkpoints be read without a validation before."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def closers(self) -> Sequence[Callable[[], None]]:
        """What destroys the process groups when the model is gone, without a reference to it; see `PostValidation.closers`."""
        return () if self._steps is None else self._steps.closers()

    def _take(self, optimizer: Any) -> PostValidation:
        for part in (optimizer, *parts_of(optimizer)):
            if type(part) not in _KINDS:
                raise ConfigError(
                    f"post-validation cannot split the step of a {type(part).__name__}; leave it out, or use megatron-core's "
                    "Adam or SGD, plain or distributed"
                )
        if reads_weights_after_step() and dist.get_rank() == 0:
            _log.warning(
                "Megatron-LM's loop reads weights behind its optimizer steps (--log-params-norm, --qk-clip, or others): these "
                "steps wait for the global gradient norm, and post-validation saves nothing there"
            )
        flags, watch = self._flags, self._hooks.watch
        steps = post_validation(
            optimizer,
            optimistic=True,
            patience=flags.post_validation_patience,
            snapshot_on_host=flags.post_validation_snapshot == "host",
            waits=None if watch is None else watch.waits,  # holds nothing of the model, which process groups outlive
        )
        self._optimizer = optimizer
        self._scales_loss = any(getattr(part, "grad_scaler", None) for part in parts_of(optimizer))
        self._validate_before(optimizer)
        return steps

    def _before_gradients(self) -> bool:
        verdict = self._validate()
        self._zero()
        return verdict is not None and verdict.is_redone

    def _validate(self) -> Verdict | None:
        if not self.is_unvalidated:
            return None
        assert self._steps is not None
        used, self._used = self._used, []
        advanced, self._advanced = self._advanced, []
        changed = [(group, {name: group[name] for name in values if name in group}) for group, values in used]
        if self._scales_loss and not advanced:
            _check_unchanged(used)
        for group, values in used:
            group.update(values)
        verdict = self._steps.validate()
        for group, values in changed:
            group.update(values)
        if verdict is not None and not verdict.is_stepped:
            for scheduler, increment in advanced:
                scheduler.num_steps -= increment
                scheduler.step(0)
        return verdict

    def _zero(self) -> None:
        waiting, self._zeroing = self._zeroing, {}
        for zero in waiting.values():
            zero()

    def _validate_before(self, owner: Any) -> None:
        """Validate before a checkpoint or megatron-core's offloading touches the weights of `owner`, a module or an optimizer."""
        for name in _TOUCHES_WEIGHTS:
            if hasattr(owner, name):
                self._replace(owner, name, self._flushing)

    def _replace(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        setattr(owner, name, around(getattr(owner, name)))
        self._undo.append(functools.partial(delattr, owner, name))

    def _flushing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def validated(*args: Any, **kwargs: Any) -> Any:
            self.flush()
            return function(*args, **kwargs)

        return validated

    def _warning(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Validating here would make a rank that reads alone wait forever."""

        @functools.wraps(function)
        def warned(*args: Any, **kwargs: Any) -> Any:
            if self._is_loops_turn and self.is_unvalidated and not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "parameters were asked for behind an optimizer step that is not validated yet, so their values may be "
                    "those of a step that is redone: where they matter, call megatron.zerobubble.settle() before, on all ranks"
                )
            return function(*args, **kwargs)

        return warned


def trains(optimizer: Any, chunks: Sequence[nn.Module], *, without_any: bool = True) -> bool:
    """Whether the optimizer has parameters of the model of `chunks`; `without_any`: the answer for one without parameters."""
    if any(chunk is each for part in parts_of(optimizer) for chunk in getattr(part, "model_chunks", ()) for each in chunks):
        return True
    # not by `parameters`, which warns
    modules = (module for chunk in chunks for module in chunk.modules())
    weights = [weight for module in modules for weight in module._parameters.values() if weight is not None]
    own = {id(each) for each in (*weights, *(getattr(weight, "main_param", None) for weight in weights)) if each is not None}
    given = [weight for group in optimizer.param_groups for weight in group["params"]]
    return any(id(weight) in own for weight in given) or (not given and without_any)


def _nested(chunks: Sequence[Any]) -> Iterator[Any]:
    """Every chunk, and what it wraps."""
    for chunk in chunks:
        module = chunk
        while module is not None:
            yield module
            module = getattr(module, "module", None)


def _values(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a parameter group. Its count of steps is the optimizer's own."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name not in ("params", "step")
    }


def _check_unchanged(used: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Raise ConfigError if a parameter group has not the learning rate and weight decay that its step used."""
    for group, values in used:
        for name in ("lr", "weight_decay"):
            if name in values and group.get(name) != values[name]:
                raise ConfigError(
                    f"after a step that may still be skipped, {name} changed from {float(values[name]):g} to "
                    f"{float(group[name]):g} by something other than megatron-core's OptimizerParamScheduler: post-validation "
                    "with loss scaling (fp16) cannot take that back. Use OptimizerParamScheduler or bf16, or leave out "
                    "post-validation"
                )
