"""Name -> generator. The door to `generators/`: what it hands out has been validated."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.generators.interleaved_1f1b import interleaved_1f1b
from megatron.zerobubble.plan.generators.one_f_one_b import one_f_one_b
from megatron.zerobubble.plan.generators.zb import zb
from megatron.zerobubble.plan.generators.zb_h1 import zb_h1
from megatron.zerobubble.plan.generators.zb_h2 import zb_h2
from megatron.zerobubble.plan.generators.zbv import zbv
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.validate import validate


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a plan is wanted for, with every default filled in."""

    num_ranks: int
    num_microbatches: int
    num_chunks: int
    max_pending_backward: int


@dataclass(frozen=True, kw_only=True)
class ScheduleInfo:
    """One schedule the planner knows."""

    name: str
    """As on the command line."""
    placement: str
    """`linear`, `loop` or `V`."""
    num_chunks: int | None
    """Stages a rank; None where any number is taken."""
    default_num_chunks: int
    """Stages a rank where none is asked for."""
    takes_max_pending_backward: bool
    """Whether the number of pending microbatches is a choice."""
    description: str
    """One line."""
    reference: str
    """Where it was published."""
    generate: Callable[[Request], Plan]
    """Builds the plan."""


def _info(
    name: str,
    placement: str,
    description: str,
    reference: str,
    generate: Callable[[Request], Plan],
    *,
    num_chunks: int | None = 1,
    takes_max_pending_backward: bool = False,
) -> ScheduleInfo:
    return ScheduleInfo(
        name=name,
        placement=placement,
        num_chunks=num_chunks,
        default_num_chunks=2 if num_chunks is None else num_chunks,
        takes_max_pending_backward=takes_max_pending_backward,
        description=description,
        reference=reference,
        generate=generate,
    )


_ALL = (
    _info(
        "1f1b",
        "linear",
        "fused backward, one stage a rank",
        "arXiv 2104.04473, section 2.2.1",
        lambda request: one_f_one_b(request.num_ranks, request.num_microbatches),
    ),
    _info(
        "interleaved-1f1b",
        "loop",
        "fused backward, several stages a rank, going round",
        "arXiv 2104.04473, section 2.2.2",
        lambda request: interleaved_1f1b(request.num_ranks, request.num_microbatches, request.num_chunks),
        num_chunks=None,
    ),
    _info(
        "zb-h1",
        "linear",
        "a third of 1F1B's bubble at its memory",
        "arXiv 2401.10241, section 2.1",
        lambda request: zb_h1(request.num_ranks, request.num_microbatches),
    ),
    _info(
        "zb-h2",
        "linear",
        "no bubble at twice 1F1B's memory",
        "arXiv 2401.10241, section 2.2",
        lambda request: zb_h2(request.num_ranks, request.num_microbatches),
    ),
    _info(
        "zb",
        "linear",
        "zero bubble for any number of pending microbatches a rank",
        "arXiv 2401.10241, section 3",
        lambda request: zb(request.num_ranks, request.num_microbatches, request.max_pending_backward),
        takes_max_pending_backward=True,
    ),
    _info(
        "zbv",
        "V",
        "no bubble at 1F1B's memory, two stages a rank in a V",
        "arXiv 2401.10241, section 6",
        lambda request: zbv(request.num_ranks, request.num_microbatches),
        num_chunks=2,
    ),
)


def known_schedules() -> tuple[ScheduleInfo, ...]:
    """Every schedule, in the order a reader should meet them."""
    return _ALL


def schedule_info(name: str) -> ScheduleInfo:
    """Look a schedule up. Raises ConfigError listing the known names and the closest."""
    names = [info.name for info in _ALL]
    for info in _ALL:
        if info.name == name:
            return info
    closest = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.4)
    hint = f"; did you mean {closest[0]!r}?" if closest else ""
    raise ConfigError(f"unknown schedule {name!r}: choose one of {', '.join(names)}{hint}")


def build_plan(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    max_pending_backward: int | None = None,
) -> Plan:
    """Generate and validate a plan.

    Args:
        name: one of `known_schedules`.
        num_ranks: p, at least 1.
        num_microbatches: m, at least 1.
        num_chunks: v, stages a rank; only interleaved-1f1b leaves a choice (2 where not given).
        max_pending_backward: most microbatches between F and W on a rank; only `zb` takes it (p where not given).

    Raises:
        ConfigError: an unknown name, a number below 1, or an option that the schedule does not take.
    """
    info = schedule_info(name)
    _check_at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    if num_chunks is not None:
        _check_at_least_one(num_chunks=num_chunks)
        if info.num_chunks not in (None, num_chunks):
            raise ConfigError(f"schedule {name!r} has {info.num_chunks} stage(s) a rank, not {num_chunks}; drop num_chunks")
    if max_pending_backward is not None:
        _check_at_least_one(max_pending_backward=max_pending_backward)
        if not info.takes_max_pending_backward:
            raise ConfigError(
                f"schedule {name!r} has a fixed number of pending microbatches; drop max_pending_backward or choose 'zb'"
            )
    plan = info.generate(
        Request(
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            num_chunks=info.default_num_chunks if num_chunks is None else num_chunks,
            max_pending_backward=num_ranks if max_pending_backward is None else max_pending_backward,
        )
    )
    validate(plan)
    return plan


def parse_max_pending_backward(text: str, num_ranks: int) -> int:
    """Read `1p`, `2p` (any multiple of p) or a plain number of microbatches. Raises ConfigError on anything else."""
    stripped = text.strip().lower()
    digits = stripped.removesuffix("p")
    if not digits.isdecimal() or int(digits) < 1:
        raise ConfigError(
            f"max pending backward is {text!r}: give 1p or 2p (multiples of the number of ranks) or a number of microbatches"
        )
    return int(digits) * (num_ranks if stripped.endswith("p") else 1)


def _check_at_least_one(**values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {value!r}; it must be a whole number, 1 or more")
