"""Schedule name -> generator: builds and validates plans, and lists the known schedules."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.messages import closest, quoted
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.generators.interleaved_1f1b import interleaved_1f1b
from megatron.zerobubble.plan.generators.one_f_one_b import one_f_one_b
from megatron.zerobubble.plan.generators.one_f_one_b_v import one_f_one_b_v
from megatron.zerobubble.plan.generators.request import Request
from megatron.zerobubble.plan.generators.v_half import v_half
from megatron.zerobubble.plan.generators.v_min import v_min
from megatron.zerobubble.plan.generators.zb import zb
from megatron.zerobubble.plan.generators.zb_h1 import zb_h1
from megatron.zerobubble.plan.generators.zb_h2 import zb_h2
from megatron.zerobubble.plan.generators.zb_interleaved import zb_interleaved
from megatron.zerobubble.plan.generators.zb_w import zb_w
from megatron.zerobubble.plan.generators.zbv import zbv
from megatron.zerobubble.plan.ir import MOST_SLICES, Placement, Plan
from megatron.zerobubble.plan.schedule_spec import STOCK, ScheduleSpec
from megatron.zerobubble.plan.search.search_options import SearchOptions
from megatron.zerobubble.plan.validate import validate


@dataclass(frozen=True, kw_only=True)
class ScheduleInfo:
    """A known schedule: its name, placement, options and generator."""

    name: str
    """The value of the schedule flags."""
    title: str
    """The name in the paper that published it."""
    placement: str
    """`linear`, `loop`, `V` or `W`."""
    description: str
    """One line for help texts."""
    reference: str
    """The paper and section that published it."""
    generate: Callable[[Request], Plan]
    """Builds the plan, without validating it."""
    num_chunks: int | None = 1
    """Virtual stages (VPP) per rank; None: any number."""
    takes_slices: bool = False
    """Whether microbatches may be cut into slices along their sequences."""
    takes_max_pending_backward: bool = False
    """Whether the number of pending microbatches can be chosen."""
    is_searched: bool = False
    """Whether costs and search options change the order of ops; otherwise it is one hand-written pattern."""

    @property
    def default_num_chunks(self) -> int:
        """Virtual stages (VPP) per rank by default."""
        return 2 if self.num_chunks is None else self.num_chunks


_MOST = 10**6
"""Most ranks, chunks and microbatches."""
MAX_OPS = 4_000_000
"""Most ops of a plan. 786,432 of them, of 256 ranks with 1,024 microbatches, take 39 s and 0.4 GB with a hand-written pattern."""

_ALL = (
    ScheduleInfo(
        name="1f1b",
        takes_slices=True,
        title="1F1B",
        placement="linear",
        description="full backward (B+W), one stage per rank",
        reference="arXiv 2104.04473, section 2.2.1",
        generate=lambda request: one_f_one_b(request.num_ranks, request.num_microbatches, request.num_slices),
    ),
    ScheduleInfo(
        name="interleaved-1f1b",
        title="interleaved 1F1B",
        placement="loop",
        num_chunks=None,
        description="full backward (B+W), several stages per rank, interleaved (round-robin) placement",
        reference="arXiv 2104.04473, section 2.2.2",
        generate=lambda request: interleaved_1f1b(request.num_ranks, request.num_microbatches, request.num_chunks),
    ),
    ScheduleInfo(
        name="zb-h1",
        takes_slices=True,
        title="ZB-H1",
        placement="linear",
        description="ZB-1p: a third of 1F1B's bubble at its memory",
        reference="arXiv 2401.10241, section 2.1",
        generate=lambda request: zb_h1(request.num_ranks, request.num_microbatches, request.num_slices),
    ),
    ScheduleInfo(
        name="zb-h2",
        takes_slices=True,
        title="ZB-H2",
        placement="linear",
        description="ZB-2p: no bubble at twice 1F1B's memory",
        reference="arXiv 2401.10241, section 2.2",
        generate=lambda request: zb_h2(request.num_ranks, request.num_microbatches, request.num_slices),
    ),
    ScheduleInfo(
        name="zb",
        takes_slices=True,
        title="ZB",
        placement="linear",
        takes_max_pending_backward=True,
        is_searched=True,
        description="zero bubble for any number of pending microbatches per rank",
        reference="arXiv 2401.10241, section 3",
        generate=zb,
    ),
    ScheduleInfo(
        name="zbv",
        takes_slices=True,
        title="ZBV",
        placement="V",
        num_chunks=2,
        is_searched=True,
        description="no bubble at 1F1B's memory, two stages per rank in a V",
        reference="arXiv 2401.10241, section 6",
        generate=zbv,
    ),
    ScheduleInfo(
        name="v-half",
        takes_slices=True,
        title="V-Half",
        placement="V",
        num_chunks=2,
        is_searched=True,
        description="0.63 of 1F1B's memory with 8 ranks, half of it with many; two stages per rank in a V",
        reference="arXiv 2405.15362, section 3",
        generate=v_half,
    ),
    ScheduleInfo(
        name="v-min",
        takes_slices=True,
        title="V-Min",
        placement="V",
        num_chunks=2,
        is_searched=True,
        description="0.50 of 1F1B's memory with 8 ranks, 0.38 with 16, a third with many; two stages per rank in a V",
        reference="arXiv 2405.15362, section 3",
        generate=v_min,
    ),
    ScheduleInfo(
        name="1f1b-v",
        title="1F1B-V",
        placement="V",
        num_chunks=2,
        is_searched=True,
        description="full backward (B+W) at 0.81 of 1F1B's memory with 8 ranks, two thirds with many; two stages per rank in a V",
        reference="arXiv 2405.15362, section 3",
        generate=one_f_one_b_v,
    ),
    ScheduleInfo(
        name="zb-interleaved",
        title="zero-bubble interleaved",
        placement="loop",
        num_chunks=None,
        is_searched=True,
        description="B and W split, several stages per rank, interleaved (round-robin) placement",
        reference="arXiv 2104.04473 and 2401.10241",
        generate=zb_interleaved,
    ),
    ScheduleInfo(
        name="zb-w",
        title="ZB-W",
        placement="W",
        num_chunks=4,
        is_searched=True,
        description="B and W split, four stages per rank in two Vs",
        reference="arXiv 2401.10241, section 6, with two Vs",
        generate=zb_w,
    ),
)


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
"""What --zero-bubble-schedule takes: megatron-core's own, the best for measured times, and the names of `known_schedules`."""


def known_schedules() -> tuple[ScheduleInfo, ...]:
    """Every schedule, in the order in which help texts list them."""
    return _ALL


def schedule_info(name: str) -> ScheduleInfo:
    """The schedule of that name. Raises ConfigError with the known names and the closest match."""
    names = [info.name for info in _ALL]
    for info in _ALL:
        if info.name == name:
            return info
    meant = meant_schedule(name)
    hint = f"; did you mean {meant!r}?" if meant else ""
    raise ConfigError(f"unknown schedule {quoted(name)}: choose one of {', '.join(names)}{hint}")


def meant_schedule(name: str) -> str | None:
    """The schedule that was probably meant by another name: that of another project, or the most similar one of ours."""
    plain = re.sub(r"[^a-z0-9]|^schedule", "", name.lower())
    return _ELSEWHERE.get(plain) or closest(name, [info.name for info in _ALL], cutoff=0.4)


_ELSEWHERE = {
    **dict.fromkeys(("zbpplight", "zb1p", "1p", "zbh1", "zerobubble"), "zb-h1"),
    **dict.fromkeys(("zb2p", "2p", "zbh2"), "zb-h2"),
    **dict.fromkeys(("zbvzerobubble", "zbvpp"), "zbv"),
    "interleavedzerobubble": "zb-interleaved",
    "interleaved1f1b": "interleaved-1f1b",
}
"""Names in papers, forks and torch.distributed.pipelining, in small letters and digits alone -> ours."""


def placement_of(name: str, *, num_ranks: int, num_chunks: int | None = None) -> Placement:
    """The placement of a schedule, or for `stock` of megatron-core's own.

    Args:
        name: `stock` or one of `known_schedules`.
        num_ranks: p.
        num_chunks: v, virtual stages (VPP) per rank, for interleaved schedules and `stock`; None: 1 for `stock`, else the
            schedule's default.
    """
    if name == STOCK:
        return Placement.loop(num_ranks, num_chunks or 1)
    info = schedule_info(name)
    if info.placement in ("V", "W"):
        return Placement.v(num_ranks) if info.placement == "V" else Placement.w(num_ranks)
    return Placement.loop(num_ranks, info.default_num_chunks if num_chunks is None else num_chunks)


def schedule_spec(
    name: str,
    *,
    num_ranks: int,
    num_chunks: int | None = None,
    max_pending_backward: int | None = None,
    memory_limit: float | None = None,
    num_slices: int = 1,
    loaded_plan: Plan | None = None,
) -> ScheduleSpec:
    """Make a `ScheduleSpec` from a schedule's name and the size of the pipeline. The arguments are its fields.

    Args:
        name: `stock` or one of `known_schedules`.
        num_ranks: p, at least 1.
        num_chunks: v, virtual stages (VPP) per rank; only the interleaved schedules and `stock` take it (defaults 2 and 1).
        max_pending_backward: most microbatches between F and W per rank; only `zb` takes it (default p).
        memory_limit: most activation memory per rank; 1.0 is 1F1B's rank 0.
        num_slices: slices of each microbatch, n; only schedules that `takes_slices` take more than one.
        loaded_plan: a plan to run instead of a generated one.

    Raises:
        ConfigError: an unknown name, a number below 1, or an option that the schedule does not take.
    """
    check_at_least_one(num_ranks=num_ranks, num_slices=num_slices)
    if num_slices > 1:
        _check_slices(name, num_slices)
    if name != STOCK:
        _check_options(schedule_info(name), num_chunks, max_pending_backward)
    return ScheduleSpec(
        name=name,
        placement=placement_of(name, num_ranks=num_ranks, num_chunks=num_chunks),
        max_pending_backward=max_pending_backward,
        memory_limit=memory_limit,
        num_slices=num_slices,
        loaded_plan=loaded_plan,
    )


def build_plan(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    max_pending_backward: int | None = None,
    num_slices: int = 1,
    costs: CostModel | None = None,
    options: SearchOptions | None = None,
) -> Plan:
    """`plan_of` for a schedule by name; the arguments are those of `schedule_spec` and `plan_of`."""
    check_at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    check_size(num_ranks=num_ranks, num_microbatches=num_microbatches)
    spec = schedule_spec(
        name, num_ranks=num_ranks, num_chunks=num_chunks, max_pending_backward=max_pending_backward, num_slices=num_slices
    )
    return plan_of(spec, num_microbatches, costs=costs, options=options)


def plan_of(
    spec: ScheduleSpec, num_microbatches: int, *, costs: CostModel | None = None, options: SearchOptions | None = None
) -> Plan:
    """Generate and validate a plan.

    Args:
        spec: the schedule. Its memory limit is not used here, only that of `options`: see `initial_plan`.
        num_microbatches: m, at least 1.
        costs: times and activation memory per stage; None: F=B=W, free links, and activations kept in full until W. Of unequal
            microbatches and links the means count: `microbatches.MicrobatchPlanner` plans for each.
        options: search for the schedule's best order, under their memory limit or, without one, the schedule's own. A schedule
            that is a single hand-written pattern is only checked against the limit. None: the hand-written pattern, or for a
            schedule without one the best of a few list schedules.

    Raises:
        ConfigError: an unknown name, a number below 1, or a memory limit under which no plan of the placement exists.
        PlanError: costs for another number of stages, or a hand-written pattern that exceeds the memory limit.
    """
    info = schedule_info(spec.name)
    check_at_least_one(num_microbatches=num_microbatches)
    check_size(num_ranks=spec.num_ranks, num_microbatches=num_microbatches * spec.num_slices, num_chunks=spec.num_chunks)
    costs = None if costs is None else costs.plain
    plan = info.generate(Request(spec=spec, num_microbatches=num_microbatches, costs=costs, options=options))
    if costs is not None:
        costs.check_fits(plan.placement)
    validate(plan, memory_limit=None if options is None else options.memory_limit, costs=costs)
    return plan


def plans_of(spec: ScheduleSpec, num_microbatches: int, *, costs: CostModel, options: SearchOptions) -> list[Plan]:
    """The plan of a search, and the hand-written one too where costs have what surrounds the passes: no search knows that.

    The arguments are those of `plan_of`.
    """
    plans = [plan_of(spec, num_microbatches, costs=costs, options=options)]
    if costs.step is not None and options.budget > 0:
        plans.append(plan_of(spec, num_microbatches, costs=costs, options=replace(options, budget=0.0)))
    return plans


def initial_plan(spec: ScheduleSpec, num_microbatches: int) -> Plan:
    """The validated plan that a run starts with, before any profiling: loaded, or generated under the spec's memory limit."""
    if spec.loaded_plan is not None and spec.loaded_plan.num_microbatches == num_microbatches:
        return spec.loaded_plan
    options = None if spec.memory_limit is None else SearchOptions(memory_limit=spec.memory_limit, budget=0.0)
    return plan_of(spec, num_microbatches, options=options)


def stock_plan(num_microbatches: int, *, num_ranks: int, num_chunks: int) -> Plan:
    """The order of megatron-core's own schedule: 1F1B, or interleaved 1F1B with several stages per rank."""
    if num_chunks == 1:
        return plan_of(schedule_spec("1f1b", num_ranks=num_ranks), num_microbatches)
    return plan_of(schedule_spec("interleaved-1f1b", num_ranks=num_ranks, num_chunks=num_chunks), num_microbatches)


def parse_max_pending_backward(flag: str, text: str, num_ranks: int) -> int:
    """Read `1p`, `2p` (any multiple of p) or a number of microbatches. Raises ConfigError with the flag on anything else."""
    stripped = text.strip().lower()
    digits = stripped.removesuffix("p")
    if not digits.isdecimal() or len(digits) > 9 or int(digits) < 1:
        raise ConfigError(
            f"{flag} is {quoted(text)}: give 1p or 2p (multiples of the number of ranks) or a number of microbatches"
        )
    return int(digits) * (num_ranks if stripped.endswith("p") else 1)


def parse_num_slices(flag: str, text: str) -> int | None:
    """Read a number of slices per microbatch, or `auto`, which gives None. Raises ConfigError with the flag on anything else."""
    if text == "auto":
        return None
    if not (text.isdecimal() and len(text) <= 9 and 1 <= int(text) <= MOST_SLICES):
        raise ConfigError(f"{flag} is {quoted(text)}; give a number from 1 to {MOST_SLICES:,}, or auto")
    return int(text)


def _check_options(info: ScheduleInfo, num_chunks: int | None, max_pending_backward: int | None) -> None:
    """Raise ConfigError for a number of stages per rank, or of pending microbatches, that the schedule does not support."""
    if num_chunks is not None:
        check_at_least_one(num_chunks=num_chunks)
        if info.num_chunks not in (None, num_chunks):
            wanted = f"{info.num_chunks} stage(s) per rank"
            raise ConfigError(f"schedule {info.name!r} has {wanted}, not {num_chunks}; drop num_chunks")
    if max_pending_backward is not None:
        check_at_least_one(max_pending_backward=max_pending_backward)
        if not info.takes_max_pending_backward:
            raise ConfigError(
                f"schedule {info.name!r} has a fixed number of pending microbatches; drop max_pending_backward or choose 'zb'"
            )


def _check_slices(name: str, num_slices: int) -> None:
    """Raise ConfigError for a schedule that has no order of slices, or for more of them than a plan has."""
    sliced = [info.name for info in _ALL if info.takes_slices]
    if name not in sliced:
        raise ConfigError(f"schedule {quoted(name)} has no order of slices; choose one of {', '.join(sliced)}, or 1 slice")
    if num_slices > MOST_SLICES:
        raise ConfigError(f"num_slices is {num_slices:,}; a microbatch has at most {MOST_SLICES:,} slices")


def check_size(*, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Raise ConfigError if the plan would have more than `MAX_OPS` ops: F, B and W of each microbatch on each stage."""
    num_ops = 3 * num_ranks * num_microbatches * num_chunks
    if num_ops > MAX_OPS:
        raise ConfigError(
            f"{num_ranks:,} ranks with {num_chunks:,} stage(s) each and {num_microbatches:,} microbatches are {num_ops:,} ops, "
            f"F, B and W of each; a plan has at most {MAX_OPS:,}: give fewer"
        )


def check_at_least_one(**values: int) -> None:
    """Raise ConfigError naming the first value that is not a whole number, 1 or more."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} is {quoted(value)}; it must be a whole number, 1 or more")
        if value > _MOST:
            raise ConfigError(f"{name} is {quoted(value)}; it must be at most {_MOST:,}")
