"""What can be taken along is read again by what it is for."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import shlex
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zerobubble import install
from megatron.zerobubble.overlay import add_flags, flags_of
from megatron.zerobubble.plan.bounds.schedule_bound import lower_bound
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.partition.stage_layers import StageLayers
from megatron.zerobubble.plan.planner import Result
from megatron.zerobubble.plan.registry import build_plan, initial_plan, known_schedules
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.playground.drawing import draw_plan
from megatron.zerobubble.playground.exports import Export, commands, export, flags, stem_of
from megatron.zerobubble.playground.models.model_problem import read_model
from megatron.zerobubble.playground.models.presets import LAYERED, SHAPES
from megatron.zerobubble.playground.recorded import read_trace

NAMES = [info.name for info in known_schedules()]


def result(name: str, p: int = 4, m: int = 8) -> Result:
    plan = build_plan(name, num_ranks=p, num_microbatches=m)
    costs = CostModel.uniform(plan.placement, comm_ms=0.1)
    return Result(simulate(plan, costs), lower_bound(plan.placement, m, costs))


@pytest.mark.parametrize(
    ("name", "objective"), [*((name, Objective.SPAN) for name in NAMES), ("zb-interleaved", Objective.MAKESPAN)]
)
def test_pretrain_gpt_takes_the_flags_and_runs_the_plan(
    name: str, objective: Objective, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = draw_plan(result(name))
    plan = Plan.from_json(drawn["plan"])
    monkeypatch.chdir(tmp_path)
    Path(f"{stem_of(plan)}.json").write_text(drawn["plan"])
    parser = argparse.ArgumentParser()
    add_flags(parser)
    args, others = parser.parse_known_args(" ".join(flags(plan, objective)).split())
    chosen = flags_of(args)
    spec = chosen.schedule_spec(num_ranks=4, num_chunks=plan.placement.num_chunks, memory_limit=None)
    assert initial_plan(spec, 8) == plan
    assert chosen.enable_optimizer_post_validation is (objective is Objective.SPAN)
    assert others[others.index("--global-batch-size") + 1] == "8"


@pytest.mark.parametrize("name", ["1f1b", "zbv", "zb-interleaved"])
def test_pictures_and_traces_hold_every_pass(name: str) -> None:
    simulation = result(name).simulation
    num_ops = sum(map(len, simulation.rows))
    svg = export(simulation, Export.SVG)
    titles = ElementTree.fromstring(svg.text).iter("{http://www.w3.org/2000/svg}title")
    assert sum(1 for _ in titles) == num_ops
    trace = export(simulation, Export.TRACE)
    (timeline,) = read_trace(json.loads(trace.text))
    assert timeline.plan.ops == simulation.plan.ops
    assert (svg.name, trace.name) == (f"{name}-p4-m8.svg", f"{name}-p4-m8.trace.json")


def test_a_name_out_of_a_file_does_not_become_a_file_s_name() -> None:
    simulation = result("zbv").simulation
    plan = Plan("../../<script>", simulation.plan.placement, 8, simulation.plan.ops)
    picture = export(simulate(plan, simulation.costs), Export.SVG)
    assert picture.name == "plan-p4-m8.svg"
    assert "<script>" not in picture.text


def test_a_drawing_has_the_simulators_values() -> None:
    drawn = draw_plan(result("zbv"))
    simulation = result("zbv").simulation
    for row, rank in zip(simulation.rows, drawn["ranks"], strict=True):
        assert rank["starts"] == pytest.approx([timed.start_ms for timed in row])
        assert rank["stages"] == [timed.op.stage for timed in row]
    assert [max(rank["held"]) for rank in drawn["ranks"]] == list(simulation.peak_memory)
    assert drawn["metrics"]["num_messages"] == 2 * 6 * 8, "two chunks, three boundaries each, both directions, eight microbatches"
    assert drawn["metrics"]["relative_messages"] == 2.0


@pytest.mark.parametrize(
    ("name", "objective", "share"),
    [("1f1b", Objective.SPAN, 0.0), ("zbv", Objective.SPAN, 0.2), ("zb-interleaved", Objective.MAKESPAN, 0.0)],
)
def test_the_calls_and_commands_are_taken_by_what_they_are_for(name: str, objective: Objective, share: float) -> None:
    plan = result(name).simulation.plan
    ways = commands(plan, objective, replace(CostModel.uniform(plan.placement), all_to_all=(share, share)))
    (call,) = ast.parse(ways["a loop of your own"]).body
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    options = {each.arg: ast.literal_eval(each.value) for each in call.value.keywords}
    inspect.signature(install).bind(**options)
    assert options.pop("plan") == f"{stem_of(plan)}.json"
    overlap = {"overlap_moe": True} if share else {}
    assert options == overlap | ({"optimizer_post_validation": True} if objective is Objective.SPAN else {})
    before, after = ways["zerobubble run"].replace("\\\n", "").split("SCRIPT ITS FLAGS")
    parser = argparse.ArgumentParser()
    add_flags(parser)  # those of add_zero_bubble_args; here nothing is to be installed
    ours = before.split("megatron.zerobubble.run")[1].split()
    taken = parser.parse_args(ours)
    assert (taken.zero_bubble_load_plan, bool(taken.zero_bubble_overlap_moe)) == (f"{stem_of(plan)}.json", bool(share))
    assert "--pipeline-model-parallel-size 4" in after
    assert ("--num-virtual-stages-per-pipeline-rank 2" in after) is (plan.placement.num_chunks == 2)


@pytest.mark.parametrize(
    ("name", "schedule", "chunks"), [("Gemma-2-9B", "1f1b", 1), ("Gemma-2-9B", "zbv", 2), ("DeepSeek-V3", "zbv", 2)]
)
def test_a_layout_other_than_megatron_s_own_is_in_the_flags(name: str, schedule: str, chunks: int) -> None:
    plan = build_plan(schedule, num_ranks=8, num_microbatches=16)
    given = {"preset": name} if name in LAYERED else SHAPES[name]["model"]
    layout = read_model({**given, "is_balanced": 1}, {}).layout(plan.placement)
    ways = commands(plan, Objective.MAKESPAN, layout=layout)
    words = shlex.split(ways["pretrain_gpt.py"].replace("\\\n", ""))
    assert words.count("--pipeline-model-parallel-layout") == 1
    given_layers = words[words.index("--pipeline-model-parallel-layout") + 1]
    assert StageLayers.parse(given_layers.replace("m", "")).per_stage == layout.per_stage
    assert "--num-virtual-stages" not in "".join(ways.values())
    assert ("model chunks" in ways["a loop of your own"]) is (chunks == 2)
    even = replace(
        layout, model=replace(layout.model, layers=layout.model.layers[:16]), per_stage=(16 // (8 * chunks),) * 8 * chunks
    )
    assert "layout" not in "".join(commands(plan, Objective.MAKESPAN, layout=even).values())
