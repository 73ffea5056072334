"""`zerobubble published`: our schedules against published ones. The planner's benchmark reads the same file."""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from typing import Any, NamedTuple

from megatron.zerobubble.cli.output_files import write_text
from megatron.zerobubble.cli.parser import workers_of
from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.files import read_given
from megatron.zerobubble.messages import quoted, shown
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.planner import CostsOf, make_plan
from megatron.zerobubble.plan.registry import check_at_least_one
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions

COMPARED = ("forward_ms", "backward_ms", "wgrad_ms", "comm_ms", "activation_after_backward")
"""The costs of one config in a file for `zerobubble published`."""

REFERENCES = {"ZB-1p": "zb", "ZB-2p": "zb", "ZBV": "zbv", "V-half": "v-half", "V-min": "v-min"}
"""Schedule name in a file for `zerobubble published` -> our schedule name."""

HALF_A_DIGIT = 0.5e-4 + 1e-9
"""Rounding error of a number published with four decimals."""


class Reference(NamedTuple):
    """The published bubble rate and peak memory (1.0 is 1F1B's rank 0) of a schedule on one config."""

    bubble_rate: float
    peak_memory: float


class Config(NamedTuple):
    """One config of a file for `zerobubble published`."""

    row: int
    model: str
    num_ranks: int
    num_microbatches: int
    costs_of: CostsOf
    reference: dict[str, Reference]


def read_configs(file: str, rows: str | None) -> list[Config]:
    """Read the configs of a file for `zerobubble published`.

    Args:
        file: path of the JSON file, or `-`.
        rows: indices of configs, separated by commas; None: all.

    Raises:
        PlanError: the file or `rows` is malformed.
    """
    try:
        configs = [_config(row, body) for row, body in enumerate(json.loads(read_given(file))["configs"])]
    except RecursionError:
        raise PlanError(f"{file} has no readable configs: it is nested too deeply") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise PlanError(f"{file} has no readable configs: {quoted(error)}") from None
    try:
        return configs if rows is None else [configs[int(word)] for word in rows.split(",")]
    except (ValueError, IndexError):
        raise PlanError(f"--rows is {quoted(rows)}; give rows of {file}, 0 to {len(configs) - 1}, separated by commas") from None


def _config(row: int, body: dict[str, Any]) -> Config:
    check_at_least_one(num_ranks=body["num_ranks"], num_microbatches=body["num_microbatches"])
    costs_of = partial(CostModel.uniform, **{name: body[name] for name in COMPARED})
    reached = {
        name: Reference(float(reference["bubble_rate"]), _unrounded(float(reference["peak_memory"]), body["num_ranks"]))
        for name, reference in body["reference"].items()
    }
    return Config(row, shown(body["model"]), body["num_ranks"], body["num_microbatches"], costs_of, reached)


def _unrounded(peak: float, num_ranks: int) -> float:
    """The exact peak behind one published with four decimals: a whole number of half-rank stages, if one rounds to it.

    17 of 32 microbatches (0.53125) are published as 0.5312, a limit that the measured schedule itself would exceed.
    """
    exact = round(peak * 2 * num_ranks) / (2 * num_ranks)
    return exact if abs(exact - peak) <= HALF_A_DIGIT else peak


def run_published(args: argparse.Namespace) -> None:
    """`published`: our schedules against the published ones, each at the published peak memory."""
    configs, rows = read_configs(args.file, args.rows), list[dict[str, Any]]()
    out = sys.stderr if args.json == "-" else sys.stdout
    print("model    p    m  schedule memory  reference     ours    bound  seconds", file=out)
    for config in configs:
        for name, reference in config.reference.items():
            if name not in REFERENCES:
                continue
            begin = time.perf_counter()
            result = make_plan(
                REFERENCES[name],
                num_ranks=config.num_ranks,
                num_microbatches=config.num_microbatches,
                costs_of=config.costs_of,
                options=SearchOptions(
                    memory_limit=reference.peak_memory,
                    objective=Objective.SPAN,  # of which the bubble rate is a share
                    seed=args.seed,
                    workers=workers_of(args),
                    budget=Effort(args.effort).budget,
                ),
            )
            seconds = time.perf_counter() - begin
            sizes = {"model": config.model, "num_ranks": config.num_ranks, "num_microbatches": config.num_microbatches}
            bubbles = {"bubble_rate": result.simulation.bubble_rate, "bound_bubble_rate": result.bound.bubble_rate}
            rows.append(sizes | {"schedule": name, "published": reference._asdict()} | bubbles | {"seconds": seconds})
            print(
                f"{config.model:6} {config.num_ranks:3} {config.num_microbatches:4}  {name:8} "
                f"{reference.peak_memory:6.4f}  {reference.bubble_rate:9.4f} {result.simulation.bubble_rate:8.4f} "
                f"{result.bound.bubble_rate:8.4f} {seconds:8.1f}",
                file=out,
                flush=True,
            )
    if args.json is not None:
        write_text(args.json, json.dumps(rows))
