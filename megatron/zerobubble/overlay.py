"""Zero bubble in an existing training loop for megatron-core: its flags, and the one call that installs a schedule.

::

    import megatron.zerobubble

    megatron.zerobubble.add_zero_bubble_args(parser)            # a loop with a Megatron-LM-like parser, or
    megatron.zerobubble.install(parser.parse_args())            # megatron.zerobubble.install(schedule="zb-h1")
    ...                                                         # the loop, unchanged

Flags that such a loop cannot support raise a ConfigError.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Never

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.dataclass_flags import add_group
from megatron.zerobubble.flags.loop_options import MicrobatchLengths, Seeds, Slices
from megatron.zerobubble.flags.require import installed
from megatron.zerobubble.flags.targets import check_targets
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.job.launch import Launch, is_turned_off, read_launch
from megatron.zerobubble.messages import closest, quoted
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.registry import ScheduleName, schedule_info

if TYPE_CHECKING:
    from megatron.zerobubble.mcore.stock_loop.status import Status

__all__ = ["Installed", "add_zero_bubble_args", "install"]

_log = logging.getLogger(__name__)

_FLAGS = tuple(each.name for each in dataclasses.fields(ZeroBubbleConfig))

_NEEDS_SCHEDULE = {
    "enable_optimizer_post_validation": None,
    "zero_bubble_trace": None,
    "zero_bubble_balance_stages": None,
    "zero_bubble_watchdog_seconds": None,
    "zero_bubble_slices": None,
    "zero_bubble_slice_positions": None,
    "zero_bubble_overlap_moe": None,
    "zero_bubble_torch_attention": "call megatron.zerobubble.use_torch_attention with the model",
}
"""Fields that mean nothing without one, and what to do instead."""

_MOVED = {
    "microbatch_tokens": "lengths=MicrobatchLengths(...)",
    "reorder_microbatches": "lengths=MicrobatchLengths(..., reorder=...)",
    "cut": "slices=Slices(cut=...)",
    "weights_seed": "seeds=Seeds(weights=...)",
    "dropout_seed": "seeds=Seeds(dropout=...)",
}
"""Words that people try as arguments of `install` -> where they are."""


def add_zero_bubble_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that `install` supports to `parser`, as an argument group.

    If flags that choose a schedule are parsed but not installed, the first run of a schedule of megatron-core raises ConfigError.

    Returns:
        `parser`, as Megatron-LM wants it from an `extra_args_provider`.
    """
    add_flags(parser)
    parse = parser.parse_known_args

    @functools.wraps(parse)
    def parse_known_args(*args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
        parsed, rest = parse(*args, **kwargs)
        _expect_install(parsed)
        return parsed, rest

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    return parser


def install(
    args: argparse.Namespace | ZeroBubbleConfig | None = None,
    *,
    schedule: ScheduleName | None = None,
    memory_limit: float | str | None = None,
    plan: str | os.PathLike[str] | None = None,
    optimizer_post_validation: bool = False,
    overlap_moe: bool = False,
    slices: Slices | None = None,
    lengths: MicrobatchLengths | None = None,
    seeds: Seeds | None = None,
    checkpoints_by_parameter: bool | None = None,
    **unknown: Never,
) -> Installed:
    """Make a training loop that is written for megatron-core run a zero-bubble schedule.

    Every rank must call it with the same options, which are compared before a model's first pass. Call it before the loop makes
    its TransformerConfig, and for schedules with V placement before `initialize_model_parallel`. The loop must build the
    schedule's number of model chunks per rank (two with V placement, four for zb-w), as for megatron-core's interleaved one.
    Models that DistributedDataParallel wraps after this call are trained by the schedule; others run forward-only. Where the
    pipeline has one rank, megatron-core's own schedule runs, after one warning. With ZERO_BUBBLE=0 in the environment of every
    rank nothing is installed, after one log line. At a model's first training iteration, and after re-planning, rank 0 writes one
    line to stderr; `status` has it as data.

    Args:
        args: the flags: as a parser with `add_zero_bubble_args` has read them, or written as `ZeroBubbleConfig(...)`, where every
            flag is a field (docs/flags.md), in place of those below that are short for one. Without a schedule none is installed.
        schedule: zb-h1, zb-h2, zb, zbv, v-half, v-min, zb-interleaved, ..., or auto; see --zero-bubble-schedule.
        memory_limit: per rank: 1.0 is 1F1B's activation memory on its first; "60GiB", "auto"; see --zero-bubble-memory-limit.
        plan: path of a plan file to run.
        optimizer_post_validation: step before the global gradient norm is known, and redo a wrong step; see `settle`.
        overlap_moe: hide the all-to-alls of experts; see --zero-bubble-overlap-moe.
        slices: of microbatches along their sequence, and how batches are cut.
        lengths: of microbatches; None: all have the sequence length that the loop gives to the schedule.
        seeds: of first weights and of dropout masks.
        checkpoints_by_parameter: whether checkpoints store a distributed optimizer's state by parameter and none by bucket: then
            overlap_grad_reduce reduces every chunk in buckets. None: as Megatron-LM's flags say, False in another loop.

    Returns:
        A handle with `status`, `settle` and `uninstall`, for `with megatron.zerobubble.install(...) as zb:`; need not be kept.

    Raises:
        CompatibilityError: the installed megatron-core is not supported; the message lists the differences.
        ConfigError: an option is not supported in a stock loop, a file cannot be written, or other options are installed already.
        PlanError: the file is not a plan.
    """
    launch = read_launch()
    if is_turned_off():
        return _turned_off(launch)
    slices = _checked(unknown, slices, lengths, seeds)
    config = _config(
        args,
        zero_bubble_schedule=schedule,
        zero_bubble_memory_limit=None if memory_limit is None else str(memory_limit),
        zero_bubble_load_plan=None if plan is None else os.fspath(plan),
        enable_optimizer_post_validation=optimizer_post_validation or None,
        zero_bubble_overlap_moe=overlap_moe or None,
        zero_bubble_slices=None if slices.number is None else str(slices.number),
    )
    check_supported(config)
    refusal = _refused_target(config, launch)
    if config.schedule == "stock":
        return Installed()
    _check_slices(config, slices, knows_lengths=lengths is not None)
    from megatron.zerobubble.mcore.run_options import RunOptions
    from megatron.zerobubble.mcore.stock_loop.patches import install_options

    install_options(
        RunOptions(
            flags=config,
            lengths=lengths,
            cut=slices.cut,
            seeds=seeds or Seeds(),
            checkpoints_by_parameter=checkpoints_by_parameter,
            ranks_on_host=launch.ranks_on_host,
            rank=launch.rank,
            refusal=refusal,
        )
    )
    return Installed()


def _turned_off(launch: Launch) -> Installed:
    if launch.rank == 0:
        _log.warning("ZERO_BUBBLE=0 in the environment: no schedule is installed, megatron-core's own runs")
    return Installed()


def _config(args: argparse.Namespace | ZeroBubbleConfig | None, **words: Any) -> ZeroBubbleConfig:
    """The flags of a call of `install`: those it got together, or some by its own words (None: not given). Raises ConfigError."""
    short = {name: value for name, value in words.items() if value is not None}
    if args is not None and short:
        raise ConfigError(
            f"install got flags, and {', '.join(short)} beside them: give one of them (schedule, memory_limit, plan, "
            "optimizer_post_validation, overlap_moe and the number of slices are short for flags)"
        )
    config = ZeroBubbleConfig(**short) if args is None else flags_of(args)
    if args is None and config.schedule == "stock" and "zero_bubble_schedule" not in short:
        raise ConfigError("install has no schedule to install: give schedule, plan, a ZeroBubbleConfig, or parsed flags")
    installed("megatron.zerobubble.install", "torch", "megatron.core")
    return config


def _checked(unknown: Mapping[str, Any], slices: Slices | None, lengths: object, seeds: object) -> Slices:
    """The slices. Raises ConfigError for the first argument of `install` that it does not have, or that is no record."""
    own = list(inspect.signature(install).parameters)[1:-1]
    for name in unknown:
        field = name if name in _FLAGS else f"zero_bubble_{name}"
        if field in _FLAGS:
            where = f"install(ZeroBubbleConfig({field}=...)), with the schedule in it, too"
        elif name in _MOVED:
            where = f"install({_MOVED[name]})"
        else:
            fields = [*_FLAGS, *(each.removeprefix("zero_bubble_") for each in _FLAGS), *_MOVED]
            meant = closest(name, own, cutoff=0.7) or closest(name, fields, cutoff=0.7)
            hint = f"; did you mean {meant}?" if meant else f"; it takes {', '.join(own)}, and flags in a ZeroBubbleConfig"
            raise ConfigError(f"install has no argument {quoted(name)}{hint}")
        raise ConfigError(f"install has no argument {quoted(name)}: write {where}")
    for name, value, record in (("slices", slices, Slices), ("lengths", lengths, MicrobatchLengths), ("seeds", seeds, Seeds)):
        if not (value is None or isinstance(value, record)):
            example = f"{record.__name__}(weights={quoted(value)})" if record is Seeds else f"{record.__name__}({quoted(value)})"
            raise ConfigError(f"{name} is {quoted(value)}; write install({name}={example})")
    return slices or Slices()


def _check_slices(config: ZeroBubbleConfig, slices: Slices, *, knows_lengths: bool) -> None:
    """Raise ConfigError for flags and arguments of `install` about slices that do not go together."""
    if config.chooses_slices and knows_lengths:
        raise ConfigError(
            "slices 'auto' measures slices of sequences of one length, and lengths gives each its own: give a number"
        )
    if config.num_slices == 1 and slices.cut is not None:
        raise ConfigError("cut cuts batches into slices, and there are none: give Slices a number, or leave cut out")


class Installed:
    """What `install` returns. As a context manager it undoes the installation at the end. Every rank must do the same with it."""

    def status(self) -> Status | None:
        """See `megatron.zerobubble.status`; None before a model's first training iteration, and where nothing is installed."""
        from megatron.zerobubble.mcore.stock_loop.patches import status

        return status()

    def settle(self) -> None:
        """See `megatron.zerobubble.settle`."""
        from megatron.zerobubble.mcore.stock_loop.patches import settle

        settle()

    def uninstall(self) -> None:
        """See `megatron.zerobubble.uninstall`."""
        from megatron.zerobubble.mcore.stock_loop.patches import uninstall

        uninstall()

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()


def _refused_target(config: ZeroBubbleConfig, launch: Launch) -> ConfigError | None:
    """Why rank 0, which alone writes files, cannot write one that flags name. Raises it where this is the only rank."""
    try:
        check_targets(config.written, tries=launch.rank == 0)
    except ConfigError as error:
        if launch.world_size == 1 or launch.rank != 0:  # an empty name, on every rank
            raise
        _log.warning("the first iteration will be refused on all ranks: %s", error)
        return ConfigError(str(error))
    return None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """`add_zero_bubble_args` for a caller that installs what is parsed: nothing is imported, and nothing waits for `install`."""
    add_group(parser, ZeroBubbleConfig)


def schedule_of(args: argparse.Namespace) -> str:
    """The name of the schedule that parsed flags choose, such as `zbv`; `stock` if none. Raises ConfigError."""
    return flags_of(args).schedule


def chunks_of(args: argparse.Namespace) -> int | None:
    """The model chunks per rank that the schedule of parsed flags takes; None: any number, or stock. Raises ConfigError."""
    flags = flags_of(args)
    if flags.schedule == AUTO:
        return 2 if flags.zero_bubble_v_schedule else None
    return None if flags.schedule == "stock" else schedule_info(flags.schedule).num_chunks


def _expect_install(args: argparse.Namespace) -> None:
    """Make megatron-core's schedules raise an error until `install` is called, if flags were given and are not turned off."""
    if is_turned_off():
        return
    if all(getattr(args, field.name, field.default) == field.default for field in dataclasses.fields(ZeroBubbleConfig)):
        return
    from megatron.zerobubble.mcore.stock_loop.patches import expect_install

    def check() -> None:
        schedule = schedule_of(args)
        if schedule != "stock":
            raise ConfigError(
                f"the flags choose schedule {schedule}, but it was not installed: call megatron.zerobubble.install with the "
                "parsed flags before the model is built, or start the script with python -m megatron.zerobubble.run"
            )

    expect_install(check)


def flags_of(args: argparse.Namespace | ZeroBubbleConfig) -> ZeroBubbleConfig:
    """The zero-bubble flags that were parsed, or written in a program. Raises ConfigError."""
    if isinstance(args, ZeroBubbleConfig):
        return args
    if isinstance(args, str):
        raise ConfigError(f"install takes a schedule by keyword: install(schedule={quoted(args)})")
    fields = [field for field in dataclasses.fields(ZeroBubbleConfig) if hasattr(args, field.name)]
    if not fields:
        raise ConfigError("no zero-bubble flags were parsed: call megatron.zerobubble.add_zero_bubble_args(parser) first")
    return ZeroBubbleConfig(**{field.name: getattr(args, field.name) for field in fields})


def check_supported(config: ZeroBubbleConfig) -> None:
    """Raise ConfigError for flags that mean nothing with the stock schedule."""
    if config.schedule != "stock":
        return
    for name, other in _NEEDS_SCHEDULE.items():
        if getattr(config, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} needs a schedule of this package: choose one, or {other or 'leave it out'}")
