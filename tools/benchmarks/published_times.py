"""Read `published.json`: profiled times of models, and the bubble rates that a reference scheduler reaches on them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron.zerobubble.errors import PlanError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.plan_request import CostsOf

_COSTS = ("forward_ms", "backward_ms", "wgrad_ms", "comm_ms", "activation_after_backward")
"""The costs of one config."""

_HALF_A_DIGIT = 0.5e-4 + 1e-9
"""Rounding error of a number published with four decimals."""


class Reference(NamedTuple):
    """The published bubble rate and peak memory (1.0 is 1F1B's rank 0) of a schedule on one config."""

    bubble_rate: float
    peak_memory: float


class Config(NamedTuple):
    """One model with its sizes, its times, and what was published about each schedule."""

    row: int
    model: str
    num_ranks: int
    num_microbatches: int
    costs_of: CostsOf
    reference: dict[str, Reference]


def read_configs(file: Path, rows: str | None = None) -> list[Config]:
    """Read the configs of a file.

    Args:
        file: the JSON file.
        rows: indices of configs, separated by commas; None: all.

    Raises:
        PlanError: the file or `rows` is malformed.
    """
    try:
        configs = [_config(row, body) for row, body in enumerate(json.loads(file.read_text(encoding="utf-8"))["configs"])]
    except (ValueError, LookupError, TypeError) as error:
        raise PlanError(f"{file} has no readable configs: {quoted(error)}") from None
    try:
        return configs if rows is None else [configs[int(word)] for word in rows.split(",")]
    except (ValueError, IndexError):
        raise PlanError(f"--rows is {quoted(rows)}; give rows of {file}, 0 to {len(configs) - 1}, separated by commas") from None


def _config(row: int, body: dict[str, Any]) -> Config:
    costs_of = partial(CostModel.uniform, **{name: body[name] for name in _COSTS})
    reached = {
        name: Reference(reference["bubble_rate"], _unrounded(reference["peak_memory"], body["num_ranks"]))
        for name, reference in body["reference"].items()
    }
    return Config(row, body["model"], body["num_ranks"], body["num_microbatches"], costs_of, reached)


def _unrounded(peak: float, num_ranks: int) -> float:
    """The exact peak behind one published with four decimals: a whole number of half-rank stages, if one rounds to it.

    17 of 32 microbatches (0.53125) are published as 0.5312, a limit that the measured schedule itself would exceed.
    """
    exact = round(peak * 2 * num_ranks) / (2 * num_ranks)
    return exact if abs(exact - peak) <= _HALF_A_DIGIT else peak
