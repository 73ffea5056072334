"""Schedule name -> generator: builds and validates plans, and lists the known schedules."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.messages import quoted, shown
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.generators.building_blocks import v_seed_orders
from megatron.zerobubble.plan.generators.interleaved_1f1b import interleaved_1f1b
from megatron.zerobubble.plan.generators.one_f_one_b import one_f_one_b
from megatron.zerobubble.plan.generators.one_f_one_b_v import one_f_one_b_v, one_f_one_b_v_memory
from megatron.zerobubble.plan.generators.v_half import v_half, v_half_memory
from megatron.zerobubble.plan.generators.v_min import v_min, v_min_memory
from megatron.zerobubble.plan.generators.zb import timed_zb, zb
from megatron.zerobubble.plan.generators.zb_h1 import zb_h1
from megatron.zerobubble.plan.generators.zb_h2 import zb_h2
from megatron.zerobubble.plan.generators.zb_interleaved import zb_interleaved, zb_interleaved_memory
from megatron.zerobubble.plan.generators.zb_w import zb_w
from megatron.zerobubble.plan.generators.zbv import zbv
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.schedule_spec import STOCK, ScheduleSpec
from megatron.zerobubble.plan.search.orders import seed_order_of
from megatron.zerobubble.plan.search.search import search
from megatron.zerobubble.plan.search.search_options import SearchOptions, memory_of, smallest_memory
from megatron.zerobubble.plan.transforms import group_weight_gradients
from megatron.zerobubble.plan.validate import validate


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of a generator: schedule, number of microbatches, costs and search options."""

    spec: ScheduleSpec
    """The schedule with its placement and limits."""
    num_microbatches: int
    """m."""
    costs: CostModel | None = None
    """None: uniform stages, F=B=W and free links."""
    options: SearchOptions | None = None
    """None: the hand-written pattern, or for a schedule without one a search without a budget."""

    @property
    def num_ranks(self) -> int:
        """p."""
        return self.spec.num_ranks

    @property
    def num_chunks(self) -> int:
        """v."""
        return self.spec.num_chunks

    @property
    def pending(self) -> int:
        """Most microbatches between F and W per rank, p by default."""
        return self.num_ranks if self.spec.max_pending_backward is None else self.spec.max_pending_backward

    @property
    def stage_costs(self) -> CostModel:
        """The requested costs, or uniform ones with F=B=W and free links."""
        return CostModel.uniform(self.spec.placement) if self.costs is None else self.costs

    def options_within(self, memory_limit: float) -> SearchOptions:
        """The search options, with a memory limit.

        Args:
            memory_limit: the schedule's own limit, for requests without one; 1.0 is 1F1B's rank 0. With uneven stages it is
                scaled to the rank with the most activation memory per microbatch.
        """
        options = self.options or SearchOptions(budget=0.0)
        if options.memory_limit is not None:
            return options
        placement, costs = self.spec.placement, self.stage_costs.reserved
        costs.check_fits(placement)
        fullest = max(math.fsum(costs.activation[stage] for stage in stages) for stages in placement.rank_to_stages)
        least = smallest_memory(placement, self.num_microbatches, costs)
        return replace(options, memory_limit=max(memory_limit * fullest, least))


@dataclass(frozen=True, kw_only=True)
class ScheduleInfo:
    """A known schedule: its name, placement, options and generator."""

    name: str
    """The value of the schedule flags."""
    title: str
    """The name in the paper that published it."""
    placement: str
    """`linear`, `loop`, `V` or `W`."""
    num_chunks: int | None
    """Virtual stages (VPP) per rank; None: any number."""
    default_num_chunks: int
    """Virtual stages (VPP) per rank by default."""
    takes_max_pending_backward: bool
    """Whether the number of pending microbatches can be chosen."""
    is_searched: bool
    """Whether costs and search options change the order of ops; otherwise it is one hand-written pattern."""
    description: str
    """One line for help texts."""
    reference: str
    """The paper and section that published it."""
    generate: Callable[[Request], Plan]
    """Builds the plan, without validating it."""


def _info(
    name: str,
    title: str,
    placement: str,
    description: str,
    reference: str,
    generate: Callable[[Request], Plan],
    *,
    num_chunks: int | None = 1,
    takes_max_pending_backward: bool = False,
    is_searched: bool = False,
) -> ScheduleInfo:
    return ScheduleInfo(
        name=name,
        title=title,
        placement=placement,
        num_chunks=num_chunks,
        default_num_chunks=2 if num_chunks is None else num_chunks,
        takes_max_pending_backward=takes_max_pending_backward,
        is_searched=is_searched,
        description=description,
        reference=reference,
        generate=generate,
    )


def _zb(request: Request) -> Plan:
    """The hand-written pattern; with search options, the best plan found from the patterns of several memory points."""
    p, m = request.num_ranks, request.num_microbatches
    if request.options is None:
        return zb(p, m, request.pending)
    limit = None if request.spec.max_pending_backward is None else request.pending / min(p, m)
    costs, options = request.stage_costs, request.options_within(limit or 1.0)
    costs.check_fits(request.spec.placement)
    memory = memory_of(options, request.spec.placement, m)
    pendings = [k for k in (1, -(-p // 2), p, -(-3 * p // 2), 2 * p) if k <= memory][-2:]
    seed_orders = [seed_order_of(partial(zb, p, max_pending_backward=k)) for k in {*pendings, request.pending}]
    seed_orders += map(seed_order_of, timed_zb(p, costs, memory))
    return search("zb", request.spec.placement, m, costs, options, seed_orders=seed_orders)


def _zbv(request: Request) -> Plan:
    p, m = request.num_ranks, request.num_microbatches
    if request.options is None:
        return zbv(p, m)
    options = request.options_within(1.0)
    seed_orders = v_seed_orders(p, memory_of(options, request.spec.placement, m))
    return search("zbv", request.spec.placement, m, request.stage_costs, options, seed_orders=seed_orders)


def _v_half(request: Request) -> Plan:
    p, m = request.num_ranks, request.num_microbatches
    return v_half(p, m, request.stage_costs, request.options_within(v_half_memory(p, m)))


def _v_min(request: Request) -> Plan:
    p, m = request.num_ranks, request.num_microbatches
    return v_min(p, m, request.stage_costs, request.options_within(v_min_memory(p, m)))


def _one_f_one_b_v(request: Request) -> Plan:
    p, m = request.num_ranks, request.num_microbatches
    return one_f_one_b_v(p, m, request.stage_costs, request.options_within(one_f_one_b_v_memory(p, m)))


def _zb_interleaved(request: Request) -> Plan:
    p, m, v = request.num_ranks, request.num_microbatches, request.num_chunks
    options = request.options_within(zb_interleaved_memory(p, m, v))
    return zb_interleaved(p, m, v, request.stage_costs, options)


def _zb_w(request: Request) -> Plan:
    return zb_w(request.num_ranks, request.num_microbatches, request.stage_costs, request.options_within(1.0))


_MOST = 10**6
"""Most ranks, chunks and microbatches."""
MAX_OPS = 4_000_000
"""Most ops of a plan. 786,432 of them, of 256 ranks with 1,024 microbatches, take 39 s and 0.4 GB with a hand-written pattern."""

_ALL = (
    _info(
        "1f1b",
        "1F1B",
        "linear",
        "full backward (B+W), one stage per rank",
        "arXiv 2104.04473, section 2.2.1",
        lambda request: one_f_one_b(request.num_ranks, request.num_microbatches),
    ),
    _info(
        "interleaved-1f1b",
        "interleaved 1F1B",
        "loop",
        "full backward (B+W), several stages per rank, interleaved (round-robin) placement",
        "arXiv 2104.04473, section 2.2.2",
        lambda request: interleaved_1f1b(request.num_ranks, request.num_microbatches, request.num_chunks),
        num_chunks=None,
    ),
    _info(
        "zb-h1",
        "ZB-H1",
        "linear",
        "ZB-1p: a third of 1F1B's bubble at its memory",
        "arXiv 2401.10241, section 2.1",
        lambda request: zb_h1(request.num_ranks, request.num_microbatches),
    ),
    _info(
        "zb-h2",
        "ZB-H2",
        "linear",
        "ZB-2p: no bubble at twice 1F1B's memory",
        "arXiv 2401.10241, section 2.2",
        lambda request: zb_h2(request.num_ranks, request.num_microbatches),
    ),
    _info(
        "zb",
        "ZB",
        "linear",
        "zero bubble for any number of pending microbatches per rank",
        "arXiv 2401.10241, section 3",
        _zb,
        takes_max_pending_backward=True,
        is_searched=True,
    ),
    _info(
        "zbv",
        "ZBV",
        "V",
        "no bubble at 1F1B's memory, two stages per rank in a V",
        "arXiv 2401.10241, section 6",
        _zbv,
        num_chunks=2,
        is_searched=True,
    ),
    _info(
        "v-half",
        "V-Half",
        "V",
        "about half of 1F1B's memory, two stages per rank in a V",
        "arXiv 2405.15362, section 3",
        _v_half,
        num_chunks=2,
        is_searched=True,
    ),
    _info(
        "v-min",
        "V-Min",
        "V",
        "about a third of 1F1B's memory, two stages per rank in a V",
        "arXiv 2405.15362, section 3",
        _v_min,
        num_chunks=2,
        is_searched=True,
    ),
    _info(
        "1f1b-v",
        "1F1B-V",
        "V",
        "full backward (B+W) at two thirds of 1F1B's memory, two stages per rank in a V",
        "arXiv 2405.15362, section 3",
        _one_f_one_b_v,
        num_chunks=2,
        is_searched=True,
    ),
    _info(
        "zb-interleaved",
        "zero-bubble interleaved",
        "loop",
        "B and W split, several stages per rank, interleaved (round-robin) placement",
        "arXiv 2104.04473 and 2401.10241",
        _zb_interleaved,
        num_chunks=None,
        is_searched=True,
    ),
    _info(
        "zb-w",
        "ZB-W",
        "W",
        "B and W split, four stages per rank in two Vs",
        "arXiv 2401.10241, section 6, with two Vs",
        _zb_w,
        num_chunks=4,
        is_searched=True,
    ),
)


def known_schedules() -> tuple[ScheduleInfo, ...]:
    """Every schedule, in the order in which help texts list them."""
    return _ALL


def schedule_info(name: str) -> ScheduleInfo:
    """The schedule of that name. Raises ConfigError with the known names and the closest match."""
    names = [info.name for info in _ALL]
    for info in _ALL:
        if info.name == name:
            return info
    closest = difflib.get_close_matches(shown(name).lower(), names, n=1, cutoff=0.4)
    hint = f"; did you mean {closest[0]!r}?" if closest else ""
    raise ConfigError(f"unknown schedule {quoted(name)}: choose one of {', '.join(names)}{hint}")


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
    shard_gradients: int | None = None,
    loaded_plan: Plan | None = None,
) -> ScheduleSpec:
    """Make a `ScheduleSpec` from a schedule's name and the size of the pipeline. The arguments are its fields.

    Args:
        name: `stock` or one of `known_schedules`.
        num_ranks: p, at least 1.
        num_chunks: v, virtual stages (VPP) per rank; only the interleaved schedules and `stock` take it (defaults 2 and 1).
        max_pending_backward: most microbatches between F and W per rank; only `zb` takes it (default p).
        memory_limit: most activation memory per rank; 1.0 is 1F1B's rank 0.
        shard_gradients: number of microbatches whose W run together, with sharded gradients.
        loaded_plan: a plan to run instead of a generated one.

    Raises:
        ConfigError: an unknown name, a number below 1, or an option that the schedule does not take.
    """
    check_at_least_one(num_ranks=num_ranks)
    if name != STOCK:
        _check_options(schedule_info(name), num_chunks, max_pending_backward)
    return ScheduleSpec(
        name=name,
        placement=placement_of(name, num_ranks=num_ranks, num_chunks=num_chunks),
        max_pending_backward=max_pending_backward,
        memory_limit=memory_limit,
        shard_gradients=shard_gradients,
        loaded_plan=loaded_plan,
    )


def build_plan(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    max_pending_backward: int | None = None,
    costs: CostModel | None = None,
    options: SearchOptions | None = None,
) -> Plan:
    """`plan_of` for a schedule by name; the arguments are those of `schedule_spec` and `plan_of`."""
    check_at_least_one(num_ranks=num_ranks, num_microbatches=num_microbatches)
    check_size(num_ranks=num_ranks, num_microbatches=num_microbatches)
    spec = schedule_spec(name, num_ranks=num_ranks, num_chunks=num_chunks, max_pending_backward=max_pending_backward)
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
    check_size(num_ranks=spec.num_ranks, num_microbatches=num_microbatches, num_chunks=spec.num_chunks)
    costs = None if costs is None else costs.plain
    plan = info.generate(Request(spec=spec, num_microbatches=num_microbatches, costs=costs, options=options))
    if costs is not None:
        costs.check_fits(plan.placement)
    validate(plan, memory_limit=None if options is None else options.memory_limit, costs=costs)
    return plan


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


def executed_plan(spec: ScheduleSpec, plan: Plan) -> Plan:
    """The plan that training executes: with sharded gradients, Ws run in groups of `spec.shard_gradients` microbatches."""
    if spec.shard_gradients is None:
        return plan
    grouped = group_weight_gradients(plan, spec.shard_gradients)
    validate(grouped)
    return grouped


def parse_max_pending_backward(text: str, num_ranks: int) -> int:
    """Read `1p`, `2p` (any multiple of p) or a plain number of microbatches. Raises ConfigError on anything else."""
    stripped = text.strip().lower()
    digits = stripped.removesuffix("p")
    if not digits.isdecimal() or len(digits) > 9 or int(digits) < 1:
        raise ConfigError(
            f"max pending backward is {quoted(text)}: give 1p or 2p (multiples of the number of ranks) or a number of "
            "microbatches"
        )
    return int(digits) * (num_ranks if stripped.endswith("p") else 1)


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
