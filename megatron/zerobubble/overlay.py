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
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.dataclass_flags import add_group, flag_of
from megatron.zerobubble.flags.require import installed
from megatron.zerobubble.flags.targets import check_targets
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.job.launch import Launch, is_turned_off, read_launch
from megatron.zerobubble.messages import closest, quoted
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.registry import schedule_info

if TYPE_CHECKING:
    from megatron.zerobubble.mcore.stock_loop.status import Status

__all__ = ["Installed", "ScheduleName", "add_zero_bubble_args", "install"]

ScheduleName = Literal[
    "stock",
    "auto",
    "1f1b",
    "interleaved-1f1b",
    "zb-h1",
    "zb-h2",
    "zb",
    "zbv",
    "v-half",
    "v-min",
    "1f1b-v",
    "zb-interleaved",
    "zb-w",
]
"""A schedule's name, as --zero-bubble-schedule takes it."""

_log = logging.getLogger(__name__)

_SUPPORTED = tuple(each.name for each in dataclasses.fields(ZeroBubbleConfig) if each.name != "zero_bubble_shard_gradients")
"""Fields of `ZeroBubbleConfig` that a stock training loop supports."""

_NEEDS_SCHEDULE = {
    "enable_optimizer_post_validation": None,
    "zero_bubble_trace": None,
    "zero_bubble_balance_stages": None,
    "zero_bubble_watchdog_seconds": None,
    "zero_bubble_slices": None,
    "zero_bubble_slice_positions": None,
    "zero_bubble_torch_attention": "call megatron.zerobubble.use_torch_attention with the model",
}
"""Fields that mean nothing without one, and what to do instead."""

READY_LENGTHS = ("thd", "nested")
"""Names of ready functions for `microbatch_tokens` (`mcore.microbatches.ready`)."""


def add_zero_bubble_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that `install` supports to `parser`, as an argument group. In `zerobubble train` they mean the same.

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
    args: argparse.Namespace | None = None,
    *,
    schedule: ScheduleName | None = None,
    max_pending_backward: str | int | None = None,
    memory_limit: float | str | None = None,
    v_schedule: bool = False,
    plan: str | None = None,
    save_plan: str | os.PathLike[str] | None = None,
    balance_stages: bool = False,
    optimizer_post_validation: bool = False,
    weights_seed: int | None = None,
    dropout_seed: int | None = None,
    checkpoints_by_parameter: bool | None = None,
    torch_attention: bool = False,
    trace: str | os.PathLike[str] | None = None,
    trace_iterations: Iterable[int] = (),
    watchdog_seconds: float | None = None,
    microbatch_tokens: Callable[[Any], int | tuple[int, float]] | str | None = None,
    reorder_microbatches: bool = True,
    slices: int | Literal["auto"] | None = None,
    cut: Callable[[Any, int, int], Any] | Mapping[str | int, int | None] | None = None,
    **flags: Any,
) -> Installed:
    """Make a training loop that is written for megatron-core run a zero-bubble schedule. Every rank must call it.

    Every rank must give the same options, which are compared before a model's first pass.

    Call it before the loop makes its TransformerConfig, and for schedules with V placement before `initialize_model_parallel`.
    The loop must build the schedule's number of model chunks per rank (two with V placement, four for zb-w), as for
    megatron-core's interleaved schedule. Models that DistributedDataParallel wraps after this call are trained by the schedule;
    others run forward-only.
    Where the pipeline has one rank, megatron-core's own schedule runs, after one warning. With ZERO_BUBBLE=0 in the environment
    of every rank nothing is installed, after one log line.

    At a model's first training iteration, and after re-planning, rank 0 writes one line to stderr; `status` has it as data.

    Args:
        args: flags from a parser with `add_zero_bubble_args`; excludes the other arguments. If they choose no schedule, nothing
            is installed.
        schedule: zb-h1, zb-h2, zb, zbv, v-half, v-min, zb-interleaved, ..., or auto; see --zero-bubble-schedule.
        max_pending_backward: instead of `schedule`: maximum number of microbatches per rank between F and W; "1p" and "2p" are
            multiples of the pipeline size.
        memory_limit: per rank; a number is activation memory, in units of 1F1B's on the first rank; bytes, such as "60GiB", are
            the total with weights, gradients and optimizer state, and "auto" is the device's memory. Bytes take effect after the
            first iterations, in which memory is measured; until then the order of least memory runs.
        v_schedule: two chunks per rank in a V: with `schedule="auto"` the orders of those, and without a schedule ZBV.
        plan: path of a plan file to run.
        save_plan: file to write the last plan to, see --zero-bubble-save-plan.
        balance_stages: show which layers per stage would be faster, see --zero-bubble-balance-stages.
        optimizer_post_validation: step before the global gradient norm is known, and redo a wrong step. `step()` returns the norm
            on the last pipeline rank, and None on others. A loop that reduces it over the pipeline in every iteration gains
            nothing. After the last iteration call `uninstall`, evaluate or save, which validate the last step; call `settle`
            behind a step whose weights are read by name, changed or moved away, or whose gradients are. Behind a step that is
            redone, the first forwards of the next iteration run again, from the same microbatches, random numbers and
            registered buffers. Anything else that a forward changes is changed twice: plain attributes, counters of the loop,
            frozen weights, modules outside of the model, random generators of its own.
        weights_seed: draw each first weight by this seed and its name, so that every schedule and parallel layout begins with the
            same weights; None: as megatron-core does, where they depend on the rank. Goes with `args`, too.
        dropout_seed: draw dropout masks by this seed, the layer, and the number of the microbatch's first sample, counted from
            the first iteration after this call, so that every schedule has the same ones; None: as megatron-core does, in the
            order of each rank's passes. Goes with `args`, too.
        checkpoints_by_parameter: whether no checkpoint stores a distributed optimizer's state by bucket (`dp_reshardable`,
            `dp_zero_gather_scatter`, or megatron-core's `save_parameter_state`), but by parameter (`fully_reshardable`,
            `fully_sharded_model_space`). Only then, or with another optimizer, overlap_grad_reduce reduces the gradients of every
            chunk in buckets. None: as Megatron-LM's flags say, False in another loop. Goes with `args`, too.
        torch_attention: replace megatron-core's own attention in the models that DistributedDataParallel wraps by torch's fused
            attention, which keeps no scores (`use_torch_attention`).
        trace: directory to write a trace to, see --zero-bubble-trace.
        trace_iterations: with `trace`, iterations to record, from 1; by default the last recorded one.
        watchdog_seconds: turns on the watchdog, see --zero-bubble-watchdog-seconds, and a report of exceptions that nothing
            catches, which says the op, stage and microbatch and ends the process without exit handlers. Calls of the schedule are
            watched; what the loop does between them may take as long as it takes. None: only `zerobubble run` has both on.
        microbatch_tokens: takes what `next` of the data iterator returns and returns the length of its rows, padding included, or
            that and the sum of the squared lengths of the sequences in a row, where several are packed. Microbatches may then
            have different lengths: each iteration is planned for its own, which all ranks exchange before it begins, and config's
            variable_seq_lengths may be on. It must not read the values of tensors on a GPU, which would wait for the GPU. Two are
            ready, by name: "thd" for packed sequences (the last dimension of `tokens`, `input_ids` or `packed_input_ids`, and
            `cu_seqlens` if it is in host memory), "nested" for nested tensors, whose sequences the loop packs into one row, each
            padded to a multiple of the tensor-parallel size, with context parallelism of twice both sizes. None: all
            microbatches have the sequence length that the loop gives to the schedule. Goes with `args`, too.
        reorder_microbatches: with `microbatch_tokens`, run the microbatches of a global batch in the order that suits their
            lengths. Results come back in the order of the data. Gradients are a sum in another order. Goes with `args`, too.
        slices: cut every microbatch into this many slices along its sequence, or with "auto" into as many as are fastest by what
            is measured in the first iterations, see --zero-bubble-slices. With `microbatch_tokens` it is a number, that of the
            longest microbatch, and shorter ones have as many as make about the same work. The function that the
            loop gives to the schedule runs once per slice, with the part of the batch that its iterator returns, and its loss
            function must return the sum of the losses, the number of tokens and a report. The reports of a microbatch's slices
            become one: tensors [b, tokens, ...] are put together along the tokens; pairs (sum, number) are added; any other
            single number must be a float, and is taken for a mean over the slice's tokens, or for a sum where it is the sum of
            the losses or the number of tokens itself; anything else is refused.
        cut: with slices: names of a batch's tensors, or their numbers in a tuple, each with the dimension that is the sequence,
            or None where a tensor goes to every slice as it is; or a function that takes what `next` of the data iterator
            returns, the first token of a slice, and its number of tokens, and returns the slice's part. A batch is a tensor, or a
            dictionary, tuple or list of them. What else is not certain to have something per token is refused: cut are integers
            and booleans [b, sequence], or [b, sequence + 1] where each token is followed by the next one, masks [b or 1, 1,
            sequence, sequence], and by their names attention_mask, position_ids or positions [..., sequence], and tokens, labels,
            loss_mask, advantages, log_probs and such [b, sequence, ...]. Goes with `args`, too.
        **flags: other flags of `add_zero_bubble_args`, by their names in parsed flags: `zero_bubble_replan_interval=5000`.

    Returns:
        A handle with `status`, `settle` and `uninstall`, for `with megatron.zerobubble.install(...) as zb:`; need not be kept.

    Raises:
        CompatibilityError: the installed megatron-core is not supported; the message lists the differences.
        ConfigError: an option is not supported in a stock loop, `trace` or `save_plan` cannot be written, or other options
            are already installed.
        PlanError: the file is not a plan.
    """
    launch = read_launch()
    if is_turned_off():
        if launch.rank == 0:
            _log.warning("ZERO_BUBBLE=0 in the environment: no schedule is installed, megatron-core's own runs")
        return Installed()
    if not (microbatch_tokens is None or callable(microbatch_tokens) or microbatch_tokens in READY_LENGTHS):
        raise ConfigError(
            f"microbatch_tokens is {quoted(microbatch_tokens)}; give {' or '.join(map(repr, READY_LENGTHS))}, or a function that "
            "takes what the data iterator returns and returns the length of its rows"
        )
    given: dict[str, Any] = {
        "zero_bubble_schedule": schedule,
        "zero_bubble_max_pending_backward": None if max_pending_backward is None else str(max_pending_backward),
        "zero_bubble_memory_limit": None if memory_limit is None else str(memory_limit),
        "zero_bubble_v_schedule": v_schedule,
        "zero_bubble_load_plan": plan,
        "zero_bubble_save_plan": None if save_plan is None else os.fspath(save_plan),
        "zero_bubble_balance_stages": balance_stages,
        "enable_optimizer_post_validation": optimizer_post_validation,
        "zero_bubble_torch_attention": torch_attention,
        "zero_bubble_trace": None if trace is None else os.fspath(trace),
        "zero_bubble_trace_iterations": ",".join(map(str, trace_iterations)) or None,
        "zero_bubble_watchdog_seconds": watchdog_seconds,
        "zero_bubble_slices": None if slices is None else str(slices),
    }
    _check_names(flags, given)
    given |= flags
    if args is None:
        config = ZeroBubbleConfig(**given)
        if config.schedule == "stock" and schedule is None and not any(getattr(config, name) for name in _NEEDS_SCHEDULE):
            raise ConfigError("install has no schedule to install: give schedule, max_pending_backward, plan, or parsed flags")
    else:
        if any(value is not None and value is not False for value in given.values()):
            raise ConfigError("install got parsed flags and other arguments; give one of them")
        config = flags_of(args)
    installed("megatron.zerobubble.install", "torch", "megatron.core", extra="train")
    check_supported(config)
    refusal = _refused_target(config, launch)
    if config.schedule == "stock":
        return Installed()
    _check_slices(config, cut, knows_lengths=microbatch_tokens is not None)
    from megatron.zerobubble.mcore.microbatches.ready import READY
    from megatron.zerobubble.mcore.run_options import RunOptions
    from megatron.zerobubble.mcore.stock_loop.patches import install_options

    install_options(
        RunOptions(
            flags=config,
            microbatch_tokens=READY[microbatch_tokens] if isinstance(microbatch_tokens, str) else microbatch_tokens,
            reorder_microbatches=reorder_microbatches,
            cut=cut,
            weights_seed=weights_seed,
            dropout_seed=dropout_seed,
            checkpoints_by_parameter=checkpoints_by_parameter,
            ranks_on_host=launch.ranks_on_host,
            rank=launch.rank,
            refusal=refusal,
        )
    )
    return Installed()


def _check_names(flags: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ConfigError for keywords of `install` that are neither its own nor flags."""
    own = list(inspect.signature(install).parameters)[:-1]
    for name in flags:
        if name not in _SUPPORTED or name in given:
            others = [each for each in _SUPPORTED if each not in given]
            longer = [each for each in [*own, *others] if name in each]
            meant = longer[0] if len(longer) == 1 else closest(name, [*own, *others], cutoff=0.7)
            hint = f"; did you mean {meant}?" if meant else f"; besides those of its own it takes {', '.join(others)}"
            raise ConfigError(f"install has no argument {quoted(name)}{hint}")


def _check_slices(config: ZeroBubbleConfig, cut: object, *, knows_lengths: bool) -> None:
    """Raise ConfigError for arguments of `install` about slices that do not go together."""
    if config.chooses_slices and knows_lengths:
        raise ConfigError(
            "slices 'auto' measures slices of sequences of one length, and microbatch_tokens gives each its own: give a number"
        )
    if config.num_slices == 1 and cut is not None:
        raise ConfigError("cut cuts batches into slices, and there are none: give slices, or leave it out")
    if not (cut is None or callable(cut) or isinstance(cut, Mapping)):
        raise ConfigError(
            f"cut is {quoted(cut)}; give a function that cuts batches, or a dictionary of names of tensors and the dimension of "
            "each that is the sequence, or None"
        )


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
    add_group(parser, ZeroBubbleConfig, only=_SUPPORTED)


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
    fields = [field for field in dataclasses.fields(ZeroBubbleConfig) if field.name in _SUPPORTED]
    if all(getattr(args, field.name, field.default) == field.default for field in fields):
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


def flags_of(args: argparse.Namespace) -> ZeroBubbleConfig:
    """The zero-bubble flags that were parsed. Raises ConfigError."""
    if isinstance(args, str):
        raise ConfigError(f"install takes a schedule by keyword: install(schedule={quoted(args)})")
    fields = [field for field in dataclasses.fields(ZeroBubbleConfig) if hasattr(args, field.name)]
    if not fields:
        raise ConfigError("no zero-bubble flags were parsed: call megatron.zerobubble.add_zero_bubble_args(parser) first")
    return ZeroBubbleConfig(**{field.name: getattr(args, field.name) for field in fields})


def check_supported(config: ZeroBubbleConfig) -> None:
    """Raise ConfigError for flags that a stock training loop does not support."""
    for field in dataclasses.fields(config):
        if field.name not in _SUPPORTED and getattr(config, field.name) != field.default:
            raise ConfigError(
                f"{flag_of(field)} is not supported in a stock training loop: it is part of this package's own loop. Use "
                "zerobubble train for it"
            )
    if config.schedule != "stock":
        return
    for name, other in _NEEDS_SCHEDULE.items():
        if getattr(config, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} needs a schedule of this package: choose one, or {other or 'leave it out'}")
