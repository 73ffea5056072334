"""Costs as the flags of `zerobubble plan` and `zerobubble pareto` give them: scalars, or the file of --costs, which is read once.

The file is a plan, its costs alone, or a run's `report.json`, of which the last iteration counts. Where it has costs by length, a
list of lengths is planned with those.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.zerobubble.cli.length_flags import read_unequal
from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.messages import parse_json, shown
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.costs.lengths_and_links import Unequal
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.profiling.report import COSTS_BY_LENGTH, FORMAT, last_iteration


@dataclass(frozen=True, kw_only=True)
class GivenCosts:
    """What to plan for, on any placement."""

    unequal: Unequal
    """Lengths and their costs if they were measured, and links of ranks."""
    num_microbatches: int
    """Microbatches per iteration, m."""
    of_file: CostModel | None
    """Per stage; None: the scalars."""
    scalars: Mapping[str, float]
    """Per rank and microbatch, by the names of the arguments of `CostModel.uniform`."""
    file: str | None
    """The file of --costs, if it was given."""

    @property
    def source(self) -> list[str]:
        """A line about measured costs by length, if they count."""
        model, tokens = self.unequal.model, self.unequal.tokens
        return [] if model is None else [f"costs by length as measured in {shown(self.file)}: {model.text(max(tokens))}"]

    def of(self, placement: Placement) -> CostModel:
        """The costs on a placement. Raises PlanError if those of the file are for other stages or microbatches."""
        costs = CostModel.uniform(placement, **self.scalars) if self.of_file is None else self.of_file
        costs = self.unequal.applied(costs)
        costs.check_fits(placement, self.num_microbatches)
        return costs


def read_costs(args: argparse.Namespace) -> GivenCosts:
    """Read the flags for costs, lengths and links, and take the number of microbatches from the lengths if it is not given.

    Raises:
        ConfigError: as `read_unequal`; costs that are out of range; or an attention share beside measured costs by length.
        PlanError: a file that is not JSON or has no costs.
    """
    unequal, of_file = read_unequal(args), None
    if args.costs is not None:
        of_file, model = _read_file(args.costs)
        if unequal.tokens and model is not None:
            if args.attention_share != 0:
                raise ConfigError(
                    f"--attention-share is {args.attention_share:g} and {shown(args.costs)} has measured costs by length; "
                    "drop the share"
                )
            unequal = replace(unequal, model=model)
    names = ("forward_ms", "backward_ms", "wgrad_ms", "comm_ms", "activation_after_backward")
    return GivenCosts(
        unequal=unequal,
        num_microbatches=args.num_microbatches,
        of_file=of_file,
        scalars={name: getattr(args, name) for name in names},
        file=args.costs,
    )


def _read_file(name: str) -> tuple[CostModel, LengthModel | None]:
    body = parse_json(Path(name).read_text(encoding="utf-8"), name, PlanError)
    if not isinstance(body, dict):
        return CostModel.from_json(body), None
    given = last_iteration(body, shown(name)).get("costs") if body.get("format") == FORMAT else body.get("costs", body)
    costs = CostModel.from_json(given)  # type: ignore[arg-type]
    if COSTS_BY_LENGTH not in body:
        return costs, None
    model = LengthModel.from_json(body[COSTS_BY_LENGTH])
    if model.num_stages != costs.num_stages:
        raise ConfigError(
            f"{shown(name)} has costs by length of {model.num_stages} stages and costs of {costs.num_stages}; "
            "give those of one run"
        )
    return costs, model
