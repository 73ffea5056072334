"""The contenders of `zerobubble bench`: their names, and the zero-bubble flags of each. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.registry import ScheduleName, known_schedules, schedule_info
from megatron.zerobubble.plan.schedule_spec import STOCK

__all__ = ["DEFAULT", "PROFILED", "WARM_UP", "Contender", "parse_contenders"]

DEFAULT = "stock-1f1b,interleaved-1f1b:2,zb-h1,zb-h2,zbv,v-half,auto"
"""--contenders, if it is not given."""

PROFILED = (2, 4)
"""First and last iteration of a contender's first block whose passes are profiled. A searched order runs from the next one on."""
WARM_UP = PROFILED[1] + 2
"""Untimed iterations of a contender's first block: the profiled ones, one whose memory is measured, one that is recorded."""

_STOCK_1F1B, _STOCK_INTERLEAVED = "stock-1f1b", "interleaved-1f1b"
_FORM = re.compile(
    r"(?P<name>[a-z0-9-]+)(:(?P<chunks>\d{1,8}))?(:slices=(?P<slices>\d{1,8}))?(?P<no_sync>:no-sync)?(@(?P<limit>[\w.]+))?"
    r"(?P<steps>\+pv)?"
)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One schedule in the comparison."""

    text: str
    """As it was given, such as `zbv@1.25+pv`: the name in the table."""
    schedule: str
    """A name in the plan registry, `auto`, or `stock`: megatron-core's own."""
    num_chunks: int | None = None
    """Model chunks per rank, for interleaved schedules."""
    num_slices: int | None = None
    """Slices per microbatch; None: microbatches are whole."""
    memory_limit: str | None = None
    """Replaces --zero-bubble-memory-limit."""
    no_sync: bool = False
    """Of megatron-core's 1F1B: whether it does without its device-wide wait behind each exchange (`batch_p2p_sync`)."""
    post_validation: bool = False
    """Whether the optimizer steps before the global gradient norm is known, even if the job's flags do not ask for it."""

    @property
    def is_stock(self) -> bool:
        """Whether megatron-core's own schedule runs."""
        return self.schedule == STOCK

    @property
    def num_chunks_per_rank(self) -> int:
        """Model chunks per rank; of `auto` 1, which runs with those that the job has."""
        has_own = self.schedule in (STOCK, AUTO)
        return self.num_chunks or (1 if has_own else schedule_info(self.schedule).num_chunks or 1)

    @property
    def plan_name(self) -> str:
        """The name of its order of passes in the plan registry. Not defined for `auto`."""
        if not self.is_stock:
            return self.schedule
        return "1f1b" if self.num_chunks is None else "interleaved-1f1b"

    def zero_bubble(self, given: ZeroBubbleConfig) -> ZeroBubbleConfig:
        """The zero-bubble flags under this contender; `given` are the job's."""
        is_searched = self.schedule == AUTO or (not self.is_stock and schedule_info(self.schedule).is_searched)
        limit = self.memory_limit or (given.zero_bubble_memory_limit if is_searched else None)
        start, end = PROFILED if is_searched and given.zero_bubble_planning_seconds > 0 else (None, None)
        return replace(
            given,
            enable_zero_bubble=False,
            zero_bubble_max_pending_backward=None,
            zero_bubble_v_schedule=self.schedule == AUTO and given.zero_bubble_v_schedule,
            zero_bubble_v_schedule_mem_setup="zb",
            zero_bubble_schedule=cast("ScheduleName", self.schedule),
            zero_bubble_slices=None if self.num_slices is None else str(self.num_slices),
            zero_bubble_memory_limit=limit,
            zero_bubble_pipeline_timers_start_iter=start,
            zero_bubble_pipeline_timers_end_iter=end,
            zero_bubble_replan_interval=None,
            zero_bubble_save_plan=None,
            zero_bubble_load_plan=None,
            zero_bubble_balance_stages=False,
            zero_bubble_trace=None,
            zero_bubble_trace_iterations=None,
            zero_bubble_overlap_moe=given.zero_bubble_overlap_moe and not self.is_stock,
            enable_optimizer_post_validation=not self.is_stock
            and (self.post_validation or given.enable_optimizer_post_validation),
        )


def parse_contenders(text: str) -> list[Contender]:
    """Parse --contenders.

    Args:
        text: comma-separated `NAME[:CHUNKS][:slices=N][:no-sync][@LIMIT][+pv]`.

    Raises:
        ConfigError: a name is unknown or given twice, or an option does not go with a schedule.
    """
    contenders = [_parse(word.strip()) for word in text.split(",") if word.strip()]
    names = [contender.text for contender in contenders]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--contenders: {name} is given {names.count(name)} times; each contender runs once per round")
    if not contenders:
        raise ConfigError(f"--contenders is {text!r}; give names such as {DEFAULT}")
    return contenders


def _parse(word: str) -> Contender:
    found = _FORM.fullmatch(word)
    if found is None:
        raise ConfigError(
            f"--contenders: {word!r} has the wrong form; give NAME, with :CHUNKS for interleaved schedules, :slices=N for slices "
            "of microbatches, @LIMIT for a memory limit and +pv for post-validation, such as zbv:slices=4@0.5+pv"
        )
    if found["no_sync"] and found["name"] != _STOCK_1F1B:
        raise ConfigError(
            f"--contenders: {word}: only {_STOCK_1F1B} waits for the device behind each exchange; leave out :no-sync"
        )
    name, limit, optimistic = found["name"], found["limit"], found["steps"] is not None
    chunks = None if found["chunks"] is None else int(found["chunks"])
    slices = None if found["slices"] is None else int(found["slices"])
    if name in (_STOCK_1F1B, _STOCK_INTERLEAVED):
        contender = _stock(word, name, chunks, takes_more=limit is None and slices is None and not optimistic)
        return replace(contender, no_sync=found["no_sync"] is not None)
    _check_name(name)
    info = None if name == AUTO else schedule_info(name)
    if chunks is not None and (info is None or info.num_chunks is not None):
        raise ConfigError(f"--contenders: {word}: {name} has a fixed number of chunks per rank; leave out :{chunks}")
    if info is not None and info.num_chunks is None:
        chunks = chunks or info.default_num_chunks
    if slices is not None and (info is None or not info.takes_slices or slices < 2):
        sliced = ", ".join(each.name for each in known_schedules() if each.takes_slices)
        raise ConfigError(f"--contenders: {word}: give 2 or more slices, and one of {sliced}; whole microbatches are {name}")
    if limit is not None and info is not None and not info.is_searched:
        raise ConfigError(f"--contenders: {word}: {name} has a fixed order and takes no memory limit; zb@{limit} does")
    return Contender(
        text=word, schedule=name, num_chunks=chunks, num_slices=slices, memory_limit=limit, post_validation=optimistic
    )


def _stock(word: str, name: str, chunks: int | None, *, takes_more: bool) -> Contender:
    if not takes_more:
        raise ConfigError(f"--contenders: {word}: megatron-core's own schedules take no slices, memory limit or post-validation")
    if name == _STOCK_1F1B and chunks is not None:
        raise ConfigError(f"--contenders: {word}: 1F1B has one chunk per rank; {_STOCK_INTERLEAVED}:{chunks} has {chunks}")
    if name == _STOCK_INTERLEAVED:
        chunks = 2 if chunks is None else chunks
        if chunks < 2:
            raise ConfigError(f"--contenders: {word}: interleaved 1F1B has 2 or more chunks per rank; 1F1B is {_STOCK_1F1B}")
    return Contender(text=word, schedule=STOCK, num_chunks=chunks)


def _check_name(name: str) -> None:
    ours: Sequence[str] = [info.name for info in known_schedules() if info.name != _STOCK_INTERLEAVED]
    if name not in (*ours, AUTO):
        raise ConfigError(
            f"--contenders: {name!r} is unknown; megatron-core's own are {_STOCK_1F1B} and {_STOCK_INTERLEAVED}:CHUNKS, ours are "
            f"{', '.join(ours)} and {AUTO}"
        )
