"""--dry-run: what the flags ask for, in full, without a process group, a GPU or a model.

The report has the settings, the plan with equal passes, and the stages. It ends where a run would begin: all checks of the flags
have passed then.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron.zerobubble.flags.dataclass_flags import flag_of
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.plan.registry import executed_plan, initial_plan, stock_plan
from megatron.zerobubble.plan.render.plan_summary import headline, measures
from megatron.zerobubble.plan.render.text import render_text
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.training.config.settings import Settings

__all__ = ["dry_run_report", "settings_lines"]

_WIDTH, _MOST_DRAWN = 160, 400
"""Columns of a timeline, and passes of a rank up to which it is drawn."""


def dry_run_report(settings: Settings) -> str:
    """The report on checked flags, in lines."""
    note = ""
    if settings.zero_bubble.schedule == AUTO:
        note = "schedule auto: the order that is profiled; the run then chooses for its own times\n"
    plan = _plan(settings)
    simulation = simulate(plan, CostModel.uniform(plan.placement))
    lines = ["settings", *settings_lines(settings), ""]
    lines += ["plan, if F, B and W take the same time", note + headline(plan)]
    if max(map(len, plan.ops)) <= _MOST_DRAWN:
        lines += [render_text(simulation.rows, max_width=_WIDTH)]
    lines += [measures(simulation), "", "stages", *_stages(settings, plan), "", _job(settings)]
    return "\n".join([*lines, "dry run: the flags are valid; nothing was started"])


def settings_lines(settings: Settings) -> list[str]:
    """All flags with their values, by group; an asterisk marks those that are not the default."""
    lines = []
    for group in dataclasses.fields(settings):
        config = getattr(settings, group.name)
        if not dataclasses.is_dataclass(config):
            continue
        lines.append(f"  {group.name}")
        for field in dataclasses.fields(config):
            if not field.init:
                continue
            value = getattr(config, field.name)
            is_default = field.default is not dataclasses.MISSING and value == field.default
            lines.append(f"  {' ' if is_default else '*'} {flag_of(field)} {_shown(value, field)}")
    return lines


def _shown(value: Any, field: dataclasses.Field[Any]) -> str:
    if isinstance(value, bool):  # the switch turns the default around
        return "given" if value != field.default else "not given"
    return " ".join(map(str, value)) or "-" if isinstance(value, tuple) else "-" if value is None else str(value)


def _plan(settings: Settings) -> Plan:
    if settings.zero_bubble.schedule == "stock":
        return stock_plan(settings.num_microbatches, num_ranks=settings.pipeline_size, num_chunks=settings.num_chunks)
    spec = settings.schedule_spec
    return executed_plan(spec, initial_plan(spec, settings.num_microbatches))


def _stages(settings: Settings, plan: Plan) -> list[str]:
    counts = settings.stage_layers(settings.placement).per_stage
    lines, first = [f"{'stage':>5} {'pipeline rank':>13} {'layers':>12}"], 0
    for stage, count in enumerate(counts):
        layers = f"{first + 1}-{first + count}" if count else "none"
        ends = " + embedding" * (stage == 0) + " + head" * (stage == len(counts) - 1)
        lines.append(f"{stage:>5} {plan.placement.stage_to_rank[stage]:>13} {layers:>12}{ends}")
        first += count
    return lines


def _job(settings: Settings) -> str:
    parallel = settings.parallel
    sizes = f"{settings.pipeline_size} pipeline x {parallel.tensor_model_parallel_size} tensor x "
    sizes += f"{parallel.context_parallel_size} context x {settings.data_parallel_size} data"
    return (
        f"job: {settings.world_size} ranks = {sizes}; {settings.num_microbatches} microbatches of "
        f"{settings.batch.micro_batch_size} x {settings.model.seq_length} tokens, {settings.run.train_iters} iterations"
    )
