"""How hybrid layer patterns are read and divided over stages."""

from __future__ import annotations

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.hybrid_pattern import HybridPattern


@pytest.mark.parametrize(
    ("text", "segments", "layers"),
    [
        ("*-*-", ("*-*-",), "*-*-"),
        ("*-*|-", ("*-*", "-"), "*-*-"),
        ("|*-E|M|", ("", "*-E", "M", ""), "*-EM"),
        ("*-|ME/*-/*-", ("*-", "ME"), "*-ME"),
    ],
)
def test_round_trip(text: str, segments: tuple[str, ...], layers: str) -> None:
    pattern = HybridPattern.parse(text)
    assert (pattern.segments, pattern.layers, pattern.num_layers) == (segments, layers, len(layers))
    assert pattern.text == text
    assert pattern.names_stages == ("|" in text)


@pytest.mark.parametrize(
    ("text", "placement", "divided"),
    [
        ("*-*-*-*-", Placement.linear(2), "*-*-|*-*-"),
        ("*-*-*-*-", Placement.v(2), "*-|*-|*-|*-"),
        ("*-*-*E", Placement.v(2), "*-|*-|*|E"),
        ("*-*-", Placement.loop(2, 2), "*|-|*|-"),
        ("*-*E|-*", Placement.linear(2), "*-*E|-*"),
        ("|*-E|-|*", Placement.v(2), "|*-E|-|*"),
        ("*-*", Placement.linear(1), "*-*"),
        ("*-*-/*E/*E", Placement.linear(2), "*-|*-/*E/*E"),
    ],
)
def test_stages(text: str, placement: Placement, divided: str) -> None:
    """Without a bar as `StageLayers.spread` divides the layers; with bars as they say."""
    pattern = HybridPattern.parse(text).over(placement)
    assert pattern.text == divided
    assert pattern.stage_layers.per_stage == tuple(map(len, divided.partition("/")[0].split("|")))
    starts = [pattern.first_layer(stage) for stage in range(placement.num_stages)]
    assert [pattern.layers[start : start + len(own)] for start, own in zip(starts, pattern.segments, strict=True)] == [
        *pattern.segments
    ]


@pytest.mark.parametrize(
    ("text", "placement", "message"),
    [
        ("", Placement.linear(1), "has no layer"),
        ("|", Placement.linear(2), "has no layer"),
        ("*||-", Placement.linear(3), "stage 1 of 3 would hold 0 layers"),
        ("*-*-/*-/*-", Placement.loop(2, 2), "has MTP layers .* one model chunk per rank, such as zb-h1"),
        ("*-|*-", Placement.v(2), r"'\*-\|\*-' has 2 segments, and 2 pipeline ranks with 2 stage\(s\) each need 4"),
        ("*-*-*", Placement.linear(2), "5 layers do not divide over 2 stages .*; or write | between its stages"),
    ],
)
def test_bad_patterns_and_those_that_do_not_fit(text: str, placement: Placement, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HybridPattern.parse(text).over(placement)
