"""How layouts are written and read, and the two layouts that need no text."""

from __future__ import annotations

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

READ = [
    ("EtttL", (3,), "EtttL"),
    ("Et|tL", (1, 1), "Et|tL"),
    ("E|t|L", (0, 1, 0), "E|t|L"),
    ("Et||tL", (1, 0, 1), "Et||tL"),
    ("Ett||||t|L", (2, 0, 0, 0, 1, 0), "Ett|(|)*3t|L"),
    ("Et|(ttt|)*2ttL", (1, 3, 3, 2), "Et|(ttt|)*2ttL"),
    ("Ettt,(|tt)*3,|t*5L", (3, 2, 2, 2, 5), "Ettt|(tt|)*3t*5L"),
    ("E(t*6|)*2t|*1ttL", (6, 6, 1, 2), "Et*6|t*6|t|ttL"),
    ("Et*12|(t*13|)*14t*12L", (12, *[13] * 14, 12), "Et*12|(t*13|)*14t*12L"),
]


@pytest.mark.parametrize(("text", "per_stage", "written"), READ)
def test_round_trip(text: str, per_stage: tuple[int, ...], written: str) -> None:
    layers = StageLayers.parse(text)
    assert layers == StageLayers(per_stage=per_stage)
    assert layers.text == written
    assert StageLayers.parse(written) == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have one E"),
        ("ttL", "must have one E"),
        ("tE|tL", "must have one E .embedding., at the very beginning"),
        ("|E|tL", "must have one E"),
        ("(Et|)*2tL", "must have one E"),
        ("Ett", "must have one L .loss., at the very end"),
        ("EtL|t", "must have one L"),
        ("Et|mtL", r"has an m \(multi-token prediction\) in stage 1: put all of them in one stage, behind the last t"),
        ("Et|m|mL", r"has an m .* in stage 1: put all"),
        ("Etm|mL", r"has an m .* in stage 0: put all"),
        ("Et x|tL", "cannot be read from ' x.tL' on; write E"),
        ("Et*0|tL", r"cannot be read from '\*0.tL' on"),
        ("Et*2*3|tL", r"cannot be read from '\*3.tL' on"),
        ("Et*10000|tL", r"cannot be read from '\*10000.tL' on"),
        ("E(t|)tL", r"cannot be read from '\(t.\)tL' on"),
        ("E(t(t|)*2)*2L", r"cannot be read from '\(t\(t.\)\*2\)\*2L' on"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        StageLayers.parse(text)
    assert repr(text) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("num_layers", "placement", "expected"),
    [
        (8, Placement.linear(4), (2, 2, 2, 2)),
        (8, Placement.v(2), (2, 2, 2, 2)),
        (6, Placement.v(2), (2, 2, 1, 1)),
        (12, Placement.v(4), (2, 2, 2, 2, 1, 1, 1, 1)),
        (12, Placement.loop(2, 3), (2,) * 6),
        (8, Placement.linear(3), r"8 layers do not divide over 3 stages \(linear placement\); 6 or 9 would"),
        (10, Placement.v(4), r"10 layers do not divide over 8 stages \(V placement\); 8 or 12 would"),
        (4, Placement.v(4), "; 8 would"),
        (6, Placement.loop(2, 2), r"\(loop placement\); 4 or 8 would"),
        (1, Placement.linear(2), "; 2 would"),
    ],
)
def test_division(num_layers: int, placement: Placement, expected: tuple[int, ...] | str) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            StageLayers.spread(num_layers, placement)
    else:
        assert StageLayers.spread(num_layers, placement).per_stage == expected


@pytest.mark.parametrize(
    ("text", "per_stage", "mtp"),
    [
        ("Et|tt|ttmL", (1, 2, 2), (2, 1)),
        ("Et|ttm*2L", (1, 2), (1, 2)),
        ("Et|mL", (1, 0), (1, 1)),
        ("Et|tL", (1, 1), None),
        ("Et|tm|L", (1, 1, 0), (1, 1)),
        ("Et|t|mm||L", (1, 1, 0, 0, 0), (2, 2)),
    ],
)
def test_mtp_layers_are_in_one_stage(text: str, per_stage: tuple[int, ...], mtp: tuple[int, int] | None) -> None:
    assert StageLayers.parse(text).per_stage == per_stage
    assert StageLayers.mtp_layers(text) == mtp


@pytest.mark.parametrize(
    ("num_layers", "num_ranks", "ends", "text"),
    [
        (61, 8, {}, "Ettt|(tttt|)*13ttt|tttL"),
        (61, 8, {"last": 1}, "Ettt|(tttt|)*14ttL"),
        (126, 8, {}, "Et*7|(t*8|)*14t*7L"),
        (62, 16, {"first": 1, "last": 1}, "Et|(tt|)*30tL"),
        (9, 2, {"last": 4}, "Ettt|(ttt|)*2L"),
        (6, 4, {}, "E|(t|)*6L"),
    ],
)
def test_balanced_stages_differ_by_one_layer(num_layers: int, num_ranks: int, ends: dict[str, int], text: str) -> None:
    layers = StageLayers.balanced(num_layers, Placement.v(num_ranks), **ends)
    assert layers.num_layers == num_layers
    assert layers.text == text
    loads = [layers.per_stage[0] + ends.get("first", 0), *layers.per_stage[1:-1]]
    assert max(loads) - min(loads) <= 1
