"""What the page offers: schedules, objectives, efforts, models, colors and limits. The page reads it once, before it plans."""

from __future__ import annotations

from typing import Any

from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.planner import AUTO, AUTO_MEMORY_LIMIT
from megatron.zerobubble.plan.registry import known_schedules
from megatron.zerobubble.plan.render.svg import COLORS, SPAN_COLORS
from megatron.zerobubble.plan.search.search_options import Effort
from megatron.zerobubble.playground import limits
from megatron.zerobubble.playground.drawing import KINDS
from megatron.zerobubble.playground.models.model_problem import offers
from megatron.zerobubble.version import __version__


def choices(*, planner: str, num_searches: int | None) -> dict[str, Any]:
    """The choices of a page.

    Args:
        planner: "server" if the server that serves the page plans, "worker" if workers of the page do.
        num_searches: how many searches run at once; None: as many as the browser says it has cores.
    """
    names = (
        "name",
        "title",
        "placement",
        "num_chunks",
        "is_searched",
        "takes_max_pending_backward",
        "takes_slices",
        "description",
    )
    schedules = [{name: getattr(info, name) for name in names} for info in known_schedules()]
    words = "the best of all schedules within the memory limit, 1F1B's if none is given, as in a run"
    auto = dict(zip(names, (AUTO, AUTO, "", 0, True, False, True, words), strict=True))
    objectives = [
        {"name": objective.value, "label": objective.label.removeprefix("with ").removeprefix("the ")}
        for objective in reversed(Objective)
    ]
    return {
        "version": __version__,
        "planner": planner,
        "schedules": [*schedules, auto],
        "objectives": objectives,
        "auto_memory_limit": AUTO_MEMORY_LIMIT,
        "num_searches": num_searches,
        "efforts": ["drawn", *(effort.value for effort in Effort)],
        "kinds": [{"name": kind.value, "colors": COLORS[kind]} for kind in KINDS],
        "spans": {activity.value: color for activity, color in SPAN_COLORS.items()},
        "models": offers(),
        "limits": {
            "ranks": limits.MAX_RANKS,
            "microbatches": limits.MAX_MICROBATCHES,
            "chunks": limits.MAX_STAGES_PER_RANK,
            "slices": limits.MAX_SLICES,
            "body_bytes": limits.MAX_BODY_BYTES,
        },
    }
