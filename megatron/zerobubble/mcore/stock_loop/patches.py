"""One line in a stock loop: `install` puts a `StockLoop` where megatron-core's own code passes, `uninstall` takes it away.

Replaced by name, because a stock loop gives no extension point there, and undone in reverse order:

====================================================  =============================================================
`schedules.forward_backward_pipelining_*`              the two functions that `get_forward_backward_func` chooses from
`DistributedDataParallel.__init__`                     the B/W split before DDP looks at the parameters
`TransformerConfig.__post_init__`                      where V puts the layers; Transformer Engine defers
under V: `GPTModel.__init__`                           which chunk holds the embedding and which the head
under V: `Float16Module.forward`                       which chunk's output is in fp32
under V: `parallel_state.default_embedding_ranks`      both are on rank 0
under V: `parallel_state.is_pipeline_last_stage`,      the last stage is on rank 0, too
`get_pipeline_model_parallel_last_rank`
====================================================  =============================================================

Each is looked up by megatron-core at every call, through a module or a class. So a loop may have imported
`get_forward_backward_func`, `GPTModel` or `DistributedDataParallel` before; what is installed is kept in the replacements, and
nothing is kept in this module.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.compat import check_stock_loop
from megatron.zerobubble.mcore.model.float16 import StageFloat16Module
from megatron.zerobubble.mcore.model.layout import embedding_ranks
from megatron.zerobubble.mcore.stock_loop.stock_loop import StockLoop, StockLoopOptions
from megatron.zerobubble.plan.ir import Placement

__all__ = ["install_options", "uninstall"]

_log = logging.getLogger(__name__)

_SCHEDULES = ("forward_backward_pipelining_without_interleaving", "forward_backward_pipelining_with_interleaving")


class _Door:
    """Stands for megatron-core's pipeline schedules; and tells a second `install` what is installed."""

    def __init__(self, loop: StockLoop, stands_for: Callable[..., Any]) -> None:
        functools.update_wrapper(self, stands_for)
        self.loop = loop

    def __call__(self, **given: Any) -> list[Any]:
        return self.loop.run(**given)


def install_options(options: StockLoopOptions) -> None:
    """Let every model that a stock loop builds from here on be run by a schedule of ours. Every rank must call it.

    Call it before `TransformerConfig` is made, and for schedules in a V before `initialize_model_parallel`. Twice with the same
    options is once.

    Raises:
        CompatibilityError: the installed megatron-core lacks something; says what.
        ConfigError: other options are installed, or it is too late.
    """
    installed = _installed()
    if installed is not None:
        if installed.options == options:
            return
        raise ConfigError(
            f"schedule {installed.options.schedule} is installed already, with other options than these for {options.schedule}: "
            "call megatron.zerobubble.uninstall first"
        )
    check_stock_loop()
    if options.is_v and parallel_state.model_parallel_is_initialized():
        raise ConfigError(
            f"schedule {options.schedule} has the embedding and the head on the first pipeline rank, and "
            "initialize_model_parallel has already made the groups for another placement: call install before it"
        )
    loop = StockLoop(options)
    for owner, name, replacement in _replacements(loop):
        loop.undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, replacement)
    _log.info("schedule %s is installed: get_forward_backward_func gives it from now on", options.schedule)


def uninstall() -> None:
    """Put back everything that `install` replaced. Nothing if nothing is installed. Every rank must call it.

    Models that were built in between lose their split: wrap their modules in a new DistributedDataParallel to train them further
    with megatron-core's schedules. Under V their stages stay where they are, and only a schedule in a V can run them.
    """
    loop = _installed()
    if loop is None:
        return
    while loop.undo:
        owner, name, original = loop.undo.pop()
        setattr(owner, name, original)
    loop.close()


def _installed() -> StockLoop | None:
    door = getattr(schedules, _SCHEDULES[0])
    return door.loop if isinstance(door, _Door) else None


def _replacements(loop: StockLoop) -> list[tuple[Any, str, Any]]:
    """(owner, attribute, replacement), in the order in which they are put in place."""
    always = [
        *((schedules, name, _Door(loop, getattr(schedules, name))) for name in _SCHEDULES),
        (DistributedDataParallel, "__init__", _wrapping(loop, DistributedDataParallel.__init__)),
        (TransformerConfig, "__post_init__", _configuring(loop, TransformerConfig.__post_init__)),
    ]
    if not loop.options.is_v:
        return always
    return [
        *always,
        (GPTModel, "__init__", _building(loop, GPTModel.__init__)),
        (Float16Module, "forward", StageFloat16Module.forward),
        (parallel_state, "default_embedding_ranks", _embedding_ranks),
        (parallel_state, "is_pipeline_last_stage", _is_last_stage(loop, parallel_state.is_pipeline_last_stage)),
        (
            parallel_state,
            "get_pipeline_model_parallel_last_rank",
            _last_rank(parallel_state.get_pipeline_model_parallel_last_rank),
        ),
    ]


def _wrapping(loop: StockLoop, original: Callable[..., None]) -> Callable[..., None]:
    """DistributedDataParallel's constructor, with the split before it."""

    @functools.wraps(original)
    def construct(self: Any, config: Any, ddp_config: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, loop.adopt(config, ddp_config, module), module, *args, **kwargs)
        loop.wrapped(self)

    return construct


def _configuring(loop: StockLoop, original: Callable[[Any], None]) -> Callable[[Any], None]:
    """What a TransformerConfig does when it is made, with our parts before and after it."""

    @functools.wraps(original)
    def finish(self: Any) -> None:
        loop.configure(self)
        original(self)
        loop.configured(self)

    return finish


def _building(loop: StockLoop, original: Callable[..., None]) -> Callable[..., None]:
    """GPTModel's constructor, told which ends of the model its chunk holds under V, whatever the loop thinks."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def construct(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments["config"].pipeline_model_parallel_size > 1:
            first, last = loop.ends(bound.arguments.get("vp_stage"))
            bound.arguments.update(pre_process=first, post_process=last)
        original(*bound.args, **bound.kwargs)

    return construct


def _embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Of a pipeline in a V: the ranks that hold the embedding or the head."""
    ranks: list[int] = embedding_ranks(Placement.v(len(pp_ranks)))["get_embedding_ranks"](pp_ranks)
    return ranks


def _is_last_stage(loop: StockLoop, original: Callable[..., bool]) -> Callable[..., bool]:
    """Whether this rank, or its chunk `vp_stage`, holds the last stage of a V: where the loss is."""

    @functools.wraps(original)
    def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        placement = loop.placement
        if ignore_virtual or parallel_state.get_virtual_pipeline_model_parallel_world_size() is None:
            return bool(parallel_state.get_pipeline_model_parallel_rank() == placement.stage_to_rank[-1])
        return loop.ends(vp_stage)[1]

    return is_pipeline_last_stage


def _last_rank(original: Callable[[], int]) -> Callable[[], int]:
    """The global rank that holds the last stage of a V, which is the pipeline's first."""

    @functools.wraps(original)
    def get_pipeline_model_parallel_last_rank() -> int:
        return int(parallel_state.get_pipeline_model_parallel_first_rank())

    return get_pipeline_model_parallel_last_rank
