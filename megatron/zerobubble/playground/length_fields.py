"""Lengths of microbatches and links of ranks: what a request has of them, and what a drawing shows of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Any

from megatron.zerobubble.errors import ConfigError, PlanError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import check_tokens
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.costs.lengths_and_links import LengthsAndLinks, with_sizes
from megatron.zerobubble.plan.costs.links import Links
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.registry import build_plan, schedule_info
from megatron.zerobubble.plan.render.plan_summary import slots
from megatron.zerobubble.plan.simulate import Simulation, simulate
from megatron.zerobubble.plan.transforms import recut
from megatron.zerobubble.playground.limits import MAX_TIME_MS, number, whole

KEYS = frozenset({"microbatch_tokens", "attention_share", "links", "bytes_per_token"})
"""Fields of a request."""
_MOST_BYTES = 1e9
"""Bytes of a message per token, at most."""
_DRAWN = ("mean", "variation", "seed")
_MOST_MEAN = 1e9
_MOST_VARIATION = 10.0
_MOST_SEED = 2**31
_DIGITS = 6


def read_lengths(given: Mapping[str, Any], num_ranks: int, num_microbatches: int) -> LengthsAndLinks:
    """Read the lengths and the links of a request.

    Raises:
        ConfigError: lengths that are not whole numbers of 1 or more, or not one per microbatch; a matrix of another size.
        PlanError: the links are not an object of matrices.
    """
    share = number("attention_share", given.get("attention_share", 0), 1.0)
    per_token = number("bytes_per_token", given.get("bytes_per_token", 0), _MOST_BYTES)
    tokens = _tokens(given.get("microbatch_tokens"), num_microbatches)
    links = given.get("links")
    return LengthsAndLinks(tokens, share, None if links is None else _links(links, num_ranks, tokens, per_token))


def _tokens(given: object, num_microbatches: int) -> tuple[int, ...]:
    if given is None:
        return ()
    if isinstance(given, dict):
        return _drawn(given, num_microbatches)
    if not isinstance(given, list):
        raise ConfigError(
            f"microbatch_tokens must be a list of one number per microbatch, or an object with {', '.join(_DRAWN)} of log-normal "
            f"lengths, got {quoted(given)}"
        )
    check_tokens(given)
    if len(given) != num_microbatches:
        raise ConfigError(
            f"microbatch_tokens has {len(given)} lengths and num_microbatches is {num_microbatches}; give one per microbatch"
        )
    return tuple(given)


def _drawn(given: Mapping[str, Any], num_microbatches: int) -> tuple[int, ...]:
    if set(given) != set(_DRAWN):
        raise ConfigError(f"log-normal lengths are an object with {', '.join(_DRAWN)}, got {quoted(given)}")
    seed = whole("the seed of the lengths", given["seed"], 0, _MOST_SEED)
    mean = number("the mean length", given["mean"], _MOST_MEAN)
    return log_normal_lengths(
        num_microbatches, mean=mean, variation=number("the lengths' variation", given["variation"], _MOST_VARIATION), seed=seed
    )


def log_normal_lengths(count: int, *, mean: float, variation: float, seed: int) -> tuple[int, ...]:
    """Lengths of a log-normal distribution in tokens, 1 or more; the same for the same seed.

    Args:
        count: how many.
        mean: mean of the distribution, in tokens.
        variation: its coefficient of variation, the standard deviation as a share of the mean.
        seed: of the random numbers.
    """
    random, sigma = Random(seed), math.sqrt(math.log(1 + variation * variation))
    return tuple(max(1, round(mean * random.lognormvariate(-sigma * sigma / 2, sigma))) for _ in range(count))


def _links(given: object, num_ranks: int, tokens: tuple[int, ...], per_token: float) -> Links:
    rows = given.get("latency_ms") if isinstance(given, Mapping) else None
    if isinstance(rows, list) and len(rows) != num_ranks:
        raise ConfigError(
            f"links has latency_ms of {len(rows)} ranks and num_ranks is {num_ranks}; give one row and one column per rank"
        )
    links = Links.from_json(given)
    for source, row in enumerate(links.latency_ms):
        for target, value in enumerate(row):
            if source != target:
                number(f"links: latency_ms from rank {source} to rank {target}", value, MAX_TIME_MS)
    remedy = "give bytes_per_token with microbatch_tokens, or message_bytes"
    return with_sizes(links, tokens, per_token, source="links", remedy=remedy)


def as_it_came(plan: Plan, costs: CostModel, max_pending_backward: int | None = None) -> Simulation | None:
    """The schedule's own order with the microbatches in the order of the data, to compare a plan with.

    Args:
        plan: a plan for these costs.
        costs: its costs, as the data came.
        max_pending_backward: of the schedule, if it was chosen.

    Returns:
        None if all microbatches and links are equal, or if the plan's schedule is not one of ours on this placement.
    """
    if costs.is_plain:
        return None
    try:
        own = build_plan(
            plan.schedule,
            num_ranks=plan.num_ranks,
            num_microbatches=plan.num_microbatches,
            num_chunks=plan.placement.num_chunks if schedule_info(plan.schedule).num_chunks is None else None,
            max_pending_backward=max_pending_backward,
            num_slices=plan.num_slices,
        )
        if costs.slice_counts:
            own = recut(own, costs.slice_counts)
    except (ConfigError, PlanError):  # a name out of a file
        return None
    return simulate(own, costs) if own.placement == plan.placement else None


def attention_share(costs: CostModel) -> float | None:
    """The share of F's time that grows with the squared lengths, at the mean length; None without lengths.

    With this share, the mean costs and the lengths are enough to plan for these microbatches again. A fit of measured times is
    as close to them as the model of a linear and a quadratic term is.
    """
    every = costs.whole.table
    if every.is_alike or not every.tokens:
        return None
    squares = math.fsum(float(count) * count for count in every.tokens) / len(every.tokens)
    quadratic = math.fsum(terms.per_square * squares for terms in LengthModel.fit(every).forward_ms)
    total = math.fsum(costs.forward_ms)
    return round(min(1.0, quadratic / total), _DIGITS) if total > 0 else 0.0


def drawn_slots(plan: Plan, costs: CostModel) -> dict[str, list[int]] | None:
    """Per slot of a plan the index of its microbatch in the data, and its tokens if they are known; None if all are equal."""
    found = slots(plan, costs)
    tokens = [slot["tokens"] for slot in found if "tokens" in slot]
    return {"indices": [slot["data_microbatch"] for slot in found], "tokens": tokens} if found else None
