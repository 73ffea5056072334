"""The commands of `zerobubble` that read a plan from a file: show it, export it to torch's action table, import one."""

from __future__ import annotations

import argparse
import sys

from megatron.zerobubble.cli.output_files import columns, has_colors, write_text, write_whole
from megatron.zerobubble.files import read_given
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.planner import Result
from megatron.zerobubble.plan.render.plan_summary import plan_svg, summary
from megatron.zerobubble.plan.simulate import Simulation, read_plan
from megatron.zerobubble.plan.torch_csv import from_torch_csv, to_torch_csv
from megatron.zerobubble.plan.validate import validate


def run_export(args: argparse.Namespace) -> None:
    """`export`: write a plan as torch's action table."""
    plan = Plan.from_json(read_given(args.file))
    validate(plan)
    write_text(args.torch_csv, to_torch_csv(plan).rstrip("\n"))
    if plan.assignment:
        print("the table has the order of ops, not the plan's assignment: its microbatches are slots", file=sys.stderr)


def run_import(args: argparse.Namespace) -> None:
    """`import`: read torch's action table as a plan."""
    plan = from_torch_csv(read_given(args.file), schedule=args.schedule)
    validate(plan)
    write_text(args.json, plan.to_json())


def run_show(args: argparse.Namespace) -> None:
    """`show`: read and validate a plan file, simulate it under its own costs, and show it."""
    plan, costs = read_plan(read_given(args.file))
    validate(plan)
    result = Result.of(plan, costs or CostModel.uniform(plan.placement))
    write_picture(args, result.simulation)
    print(summary(result, columns(args.width), is_colored=has_colors()))


def write_picture(args: argparse.Namespace, simulation: Simulation) -> None:
    """Write the timeline to the file of --svg."""
    if args.svg is not None:
        write_whole(args.svg, plan_svg(simulation))
