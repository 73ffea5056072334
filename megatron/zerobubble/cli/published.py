"""Timings and bubble rates that were published, as a file: what `zerobubble compare` and the planner's benchmark read."""

from __future__ import annotations

import json
from functools import partial
from typing import Any, NamedTuple

from megatron.zerobubble.cli.parser import read_text
from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.planner import CostsOf
from megatron.zerobubble.plan.registry import check_at_least_one

COMPARED = ("forward_ms", "backward_ms", "wgrad_ms", "comm_ms", "activation_after_backward")
"""The times of one config in a file for `compare`."""

REFERENCES = {"ZB-1p": "zb", "ZB-2p": "zb", "ZBV": "zbv", "V-half": "v-half", "V-min": "v-min"}
"""Names in a file for `zerobubble compare`, and ours."""

HALF_A_DIGIT = 0.5e-4 + 1e-9


class Reference(NamedTuple):
    """What a reference schedule reaches on a config."""

    bubble_rate: float
    peak_memory: float


class Config(NamedTuple):
    """One config of a file for `zerobubble compare`."""

    row: int
    model: str
    num_ranks: int
    num_microbatches: int
    costs_of: CostsOf
    reference: dict[str, Reference]


def read_configs(file: str, rows: str | None) -> list[Config]:
    """The configs of a file for `zerobubble compare`, or those of them that `rows` (as on the command line) names."""
    try:
        configs = [_config(row, body) for row, body in enumerate(json.loads(read_text(file))["configs"])]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise PlanError(f"{file} has no readable configs: {error!r}") from None
    try:
        return configs if rows is None else [configs[int(word)] for word in rows.split(",")]
    except (ValueError, IndexError):
        raise PlanError(f"--rows is {rows!r}; give rows of {file}, 0 to {len(configs) - 1}, separated by commas") from None


def _config(row: int, body: dict[str, Any]) -> Config:
    check_at_least_one(num_ranks=body["num_ranks"], num_microbatches=body["num_microbatches"])
    costs_of = partial(CostModel.uniform, **{name: body[name] for name in COMPARED})
    reached = {
        name: Reference(float(reference["bubble_rate"]), _unrounded(float(reference["peak_memory"]), body["num_ranks"]))
        for name, reference in body["reference"].items()
    }
    return Config(row, str(body["model"]), body["num_ranks"], body["num_microbatches"], costs_of, reached)


def _unrounded(peak: float, num_ranks: int) -> float:
    """A peak published with four decimals: the whole stages of two a rank that round to it, or the number itself.

    17 of 32 microbatches (0.53125) are published as 0.5312, under which the schedule that was measured would not fit.
    """
    exact = round(peak * 2 * num_ranks) / (2 * num_ranks)
    return exact if abs(exact - peak) <= HALF_A_DIGIT else peak
