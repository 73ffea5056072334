"""The patches behind the one line in a stock loop: `install` routes megatron-core's calls to a `StockLoop`, `uninstall` removes
it.

These names are replaced, because megatron-core has no extension point there, and restored in reverse order:

====================================================  =============================================================
`schedules.forward_backward_pipelining_*`              the two functions that `get_forward_backward_func` chooses from
`DistributedDataParallel.__init__`                     splits B and W before DDP registers hooks on the parameters
`TransformerConfig.__post_init__`                      layer layout of V; deferred wgrad of Transformer Engine
`cuda_graphs.convert_schedule_table_to_order`          order of captures of CUDA graphs, as in the plan
`cuda_graphs.make_graphed_callables`                   captures them, those of W too
`GPTModel.__init__`, `HybridModel.__init__`            options of Transformer Engine that were set since; under V which
                                                       chunk has the embedding, the output layer, and which layers
under V: `Float16Module.forward`                       which chunk's output is in fp32
under V: `parallel_state.default_embedding_ranks`      embedding and output layer are both on rank 0,
under V: `parallel_state.initialize_model_parallel`    also if the loop passes functions of its own
under V: `parallel_state.is_pipeline_first_stage`,     the ends of the running chunk (`stage_questions`)
`is_pipeline_last_stage`, `utils.get_pg_rank`
with post-validation: `step` and `zero_grad` of        optimistic steps; zeroing waits until a step is validated
optimizers, `DistributedDataParallel.zero_grad_buffer`,
`OptimizerParamScheduler.step`                         and what it advanced is taken back if the step is skipped
with a limit in bytes: `MegatronOptimizer.__init__`    whose state takes memory
with a seed of weights:                                hands on which init method draws a weight
`_initialize_affine_weight_cpu`
====================================================  =============================================================

megatron-core looks up each of them at every call, in a module or a class. So a loop may import `get_forward_backward_func`,
`GPTModel` or `DistributedDataParallel` before `install`. The installed `StockLoop` is an attribute of the replacements; this
module has no state.

From flags that were parsed until `install` is called, the schedules are replaced by an error (`expect_install`).
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
    MixedPrecisionOptimizer,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig, cuda_graphs
from megatron.core.transformer.module import Float16Module

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.job.failure import JobGuard
from megatron.zerobubble.mcore.compat import check_megatron_core, hybrid_model
from megatron.zerobubble.mcore.config_checks import turn_off
from megatron.zerobubble.mcore.model import named_weights
from megatron.zerobubble.mcore.model.float16 import StageFloat16Module
from megatron.zerobubble.mcore.model.stage_layout import embedding_ranks
from megatron.zerobubble.mcore.model.transformer_engine import defer_to_w
from megatron.zerobubble.mcore.run_options import RunOptions
from megatron.zerobubble.mcore.stock_loop.status import Status
from megatron.zerobubble.mcore.stock_loop.stock_loop import StockLoop

__all__ = [
    "ALL_SCHEDULES",
    "expect_install",
    "finish",
    "install_options",
    "settle",
    "status",
    "stop_expecting",
    "supervise_by",
    "uninstall",
]

_log = logging.getLogger(__name__)

_SCHEDULES = ("forward_backward_pipelining_without_interleaving", "forward_backward_pipelining_with_interleaving")
ALL_SCHEDULES = (*_SCHEDULES, "forward_backward_no_pipelining")
"""Functions of `schedules` from which `get_forward_backward_func` chooses."""


_ORDER = "convert_schedule_table_to_order"
_GRAPHED = "make_graphed_callables"


class _PatchedSchedule:
    """Replaces a pipeline schedule of megatron-core. A second `install` finds the installed `StockLoop` here."""

    def __init__(self, loop: StockLoop, original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original, assigned=("__doc__", "__annotations__"))
        self.__name__ = self.__qualname__ = f"zero_bubble_{loop.options.schedule.replace('-', '_')}"
        self.loop = loop
        self._original = original

    def __call__(self, **given: Any) -> list[Any]:
        with self.loop.supervision.during("is in a call of the schedule, around the passes"):
            return self.loop.run(self._original, **given)


class _AwaitingInstall:
    """Replaces a schedule of megatron-core from the parsing of flags until `install`: whoever runs it has not installed them."""

    def __init__(self, check: Callable[[], None], original: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self.original = original
        self._check = check

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return self.original(*args, **kwargs)


def expect_install(check: Callable[[], None]) -> None:
    """Call `check`, which raises an error, before each run of a schedule of megatron-core until `install` or `uninstall`."""
    if _installed() is None:
        stop_expecting()
        for name in ALL_SCHEDULES:
            setattr(schedules, name, _AwaitingInstall(check, getattr(schedules, name)))


def stop_expecting() -> None:
    """Undo `expect_install`."""
    for name in ALL_SCHEDULES:
        schedule = getattr(schedules, name)
        if isinstance(schedule, _AwaitingInstall):
            setattr(schedules, name, schedule.original)


def install_options(options: RunOptions) -> None:
    """Run every model that a stock loop builds from here on by a schedule of this package. Every rank must call it.

    Call it before the `TransformerConfig` is made, and for V schedules before `initialize_model_parallel`. A second call with the
    same options does nothing.

    Args:
        options: the schedule and how it runs.

    Raises:
        CompatibilityError: the installed megatron-core is not supported.
        ConfigError: other options are installed already, or the call is too late.
    """
    stop_expecting()
    installed = _installed()
    if installed is not None:
        if installed.options == options:
            return
        raise ConfigError(
            f"schedule {installed.options.schedule} is already installed, with other options than those now given for "
            f"{options.schedule}: call megatron.zerobubble.uninstall first"
        )
    check_megatron_core()
    if options.is_v and parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            f"schedule {options.schedule} has the embedding and the output layer on the first pipeline rank, but "
            "initialize_model_parallel has already made the groups for another placement: call install before it"
        )
    loop = StockLoop(options)
    for owner, name, replacement in _replacements(loop):
        loop.undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, replacement)
    if options.rank == 0:
        atexit.register(loop.warn_if_unused)
    _log.info("schedule %s is installed: get_forward_backward_func returns it from now on", options.schedule)


def uninstall() -> None:
    """Restore everything that `install` replaced; does nothing if nothing is installed. Every rank must call it.

    The B/W split of models that were built in between is removed: wrap their modules in a new DistributedDataParallel to train
    them further with megatron-core's schedules. Under V their stages stay on their ranks, and only a V schedule can run them.
    """
    stop_expecting()
    loop = _installed()
    if loop is None:
        return
    while loop.undo:
        owner, name, original = loop.undo.pop()
        setattr(owner, name, original)
    atexit.unregister(loop.warn_if_unused)
    loop.close()


def finish() -> None:
    """At the end of a script: write the last trace and plan file, if one was asked for. Every rank must call it."""
    loop = _installed()
    if loop is None or not loop.has_groups:
        return
    if loop.options.flags.zero_bubble_trace is not None or loop.options.flags.zero_bubble_save_plan is not None:
        uninstall()


def status() -> Status | None:
    """What the installed schedule runs and is predicted to gain; None before a model's first training iteration.

    The same on all ranks of a pipeline. It changes when a model starts and after re-planning.
    """
    loop = _installed()
    return None if loop is None else loop.status


def settle() -> None:
    """Validate the last optimizer step of every model: afterwards weights and state are those of the synchronous optimizer.

    With post-validation a step may still be rolled back and done again inside the next call of the schedule. Call this behind
    `optimizer.step()`, before the loop reads weights other than by a state dict (`named_parameters`, for an inference engine, a
    moving average, a norm), changes them, or moves weights or gradients away. As after any step, a distributed optimizer that
    overlaps the gathering of its weights has not gathered them yet.

    Every rank must call it: ranks wait here for those behind them in the pipeline, as the synchronous optimizer does in every
    step. Does nothing where no step is unvalidated, without post-validation, and where nothing is installed.

    Raises:
        ExecutionError: gradients or weights were moved or changed before.
    """
    loop = _installed()
    if loop is not None and loop.has_groups:
        with loop.supervision.during("validates its last optimizer step"):
            loop.settle()


def supervise_by(guard: JobGuard) -> None:
    """Let the installed schedule, if there is one, report to the guard around its script; the watchdog is then on by default."""
    loop = _installed()
    if loop is not None:
        loop.supervision.guard = guard


def _installed() -> StockLoop | None:
    schedule = getattr(schedules, _SCHEDULES[0])
    return schedule.loop if isinstance(schedule, _PatchedSchedule) else None


def _replacements(loop: StockLoop) -> list[tuple[Any, str, Any]]:
    """(owner, attribute, replacement), in the order of installation."""
    always: list[tuple[Any, str, Any]] = [
        *((schedules, name, _PatchedSchedule(loop, getattr(schedules, name))) for name in _SCHEDULES),
        (DistributedDataParallel, "__init__", _wrapping(loop, DistributedDataParallel.__init__)),
        (TransformerConfig, "__post_init__", _configuring(loop, TransformerConfig.__post_init__)),
        (cuda_graphs, _ORDER, _ordering(loop, getattr(cuda_graphs, _ORDER))),
    ]
    if cuda_graphs.HAVE_TE_GRAPHS:
        always.append((cuda_graphs, _GRAPHED, _capturing(loop, getattr(cuda_graphs, _GRAPHED))))
    flags = loop.options.flags
    if flags.enable_optimizer_post_validation or flags.zero_bubble_trace is not None:
        stepping = (FP32Optimizer, MixedPrecisionOptimizer, ChainedOptimizer)
        always += ((owner, "step", _stepping(loop, owner.step)) for owner in stepping)
    if flags.enable_optimizer_post_validation:
        always += _validating(loop)
    if loop.options.seeds.weights is not None:
        always += named_weights.replacements()
    if loop.options.flags.limits_bytes:
        always.append((MegatronOptimizer, "__init__", _counting(loop, MegatronOptimizer.__init__)))
    models = [each for each in (GPTModel, hybrid_model()) if each is not None]
    always += ((each, "__init__", _building(loop, each.__init__)) for each in models)
    if not loop.options.is_v:
        return always
    return [
        *always,
        (Float16Module, "forward", StageFloat16Module.forward),
        (parallel_state, "default_embedding_ranks", _embedding_ranks(loop)),
        (parallel_state, "initialize_model_parallel", _grouping(loop, parallel_state.initialize_model_parallel)),
        *loop.questions.replacements(),
    ]


def _validating(loop: StockLoop) -> list[tuple[Any, str, Any]]:
    """With post-validation: what zeroes gradients, and what advances the learning rate."""
    zeroing = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer, ChainedOptimizer)
    return [
        *((owner, "zero_grad", _zeroing(loop, owner.zero_grad)) for owner in zeroing),
        (DistributedDataParallel, "zero_grad_buffer", _zeroing(loop, DistributedDataParallel.zero_grad_buffer)),
        (OptimizerParamScheduler, "step", _advancing(loop, OptimizerParamScheduler.step)),
    ]


def _stepping(loop: StockLoop, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def step(self: Any) -> Any:
        with loop.supervision.during("steps its optimizer"):
            return loop.step(self, original)

    return step


def _zeroing(loop: StockLoop, original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def zero(self: Any, *args: Any, **kwargs: Any) -> None:
        loop.zero(self, functools.partial(original, self, *args, **kwargs))

    return zero


def _advancing(loop: StockLoop, original: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    @functools.wraps(original)
    def step(self: Any, increment: int) -> None:
        original(self, increment)
        loop.advanced(self, increment)

    return step


def _counting(loop: StockLoop, original: Callable[..., None]) -> Callable[..., None]:
    """The constructor of every optimizer that has parameters, whose state counts in a limit in bytes."""

    @functools.wraps(original)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        loop.optimizers.add(self)

    return construct


def _wrapping(loop: StockLoop, original: Callable[..., None]) -> Callable[..., None]:
    """DistributedDataParallel's constructor, which first splits B and W of its module."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def construct(self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        adopted = loop.adopted.adopt(config, ddp_config, module)
        if adopted is None:
            original(self, config, ddp_config, module, *args, **kwargs)
            return
        bound = signature.bind(self, config, ddp_config, module, *args, **kwargs)
        loop.adopted.wrap(adopted, self, original, bound.arguments)

    return construct


def _configuring(loop: StockLoop, original: Callable[[Any], None]) -> Callable[[Any], None]:
    """TransformerConfig's `__post_init__`, with our changes of the config before and after it."""

    @functools.wraps(original)
    def finish(self: Any) -> None:
        options = loop.configure(self)
        original(self)
        loop.configured(self, options)

    return finish


def _ordering(loop: StockLoop, original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """What gives the order of captures of CUDA graphs."""

    @functools.wraps(original)
    def order(num_warmup_microbatches: int, num_model_chunks: int, schedule_table: Any) -> list[int]:
        table = list(schedule_table)
        stock = functools.partial(original, num_warmup_microbatches, num_model_chunks, table)
        return loop.capture_order(stock, num_model_chunks, table)

    return order


def _capturing(loop: StockLoop, original: Callable[..., Any]) -> Callable[..., Any]:
    """Transformer Engine's function that captures CUDA graphs."""

    @functools.wraps(original)
    def captured(*args: Any, **kwargs: Any) -> Any:
        graphs = loop.graphs
        return original(*args, **kwargs) if graphs is None else graphs.capture(original, *args, **kwargs)

    return captured


def _building(loop: StockLoop, original: Callable[..., None]) -> Callable[..., None]:
    """A model's constructor, after the last changes that a loop made to the config.

    Under V with `pre_process` and `post_process` as the placement has them, and of a `HybridModel` also the layers, not with
    those that the loop passes.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def construct(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        config = bound.arguments["config"]
        if config.pipeline_model_parallel_size > 1:
            turn_off(config, loop.turned_off)
            defer_to_w(config)
        if config.pipeline_model_parallel_size > 1 and loop.options.is_v:
            first, last = loop.ends(bound.arguments.get("vp_stage"))
            bound.arguments.update(pre_process=first, post_process=last)
            if "hybrid_stack_spec" in signature.parameters:
                bound.arguments.update(loop.hybrid_layers(bound.arguments))
        original(*bound.args, **bound.kwargs)

    return construct


def _embedding_ranks(loop: StockLoop) -> Callable[..., list[int]]:
    """The ranks of a pipeline with V placement that have the embedding or the output layer."""

    def ranks_of(pp_ranks: list[int], split_rank: int | None = None) -> list[int]:
        return embedding_ranks(loop.options.placement(len(pp_ranks)), pp_ranks)

    return ranks_of


def _grouping(loop: StockLoop, original: Callable[..., None]) -> Callable[..., None]:
    """`initialize_model_parallel`, with the embedding groups of the V placement, in place of those that the loop passes."""
    signature, ranks_of = inspect.signature(original), _embedding_ranks(loop)

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(get_embedding_ranks=ranks_of, get_position_embedding_ranks=ranks_of)
        original(*bound.args, **bound.kwargs)

    return initialize
