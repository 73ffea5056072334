"""Timelines as text, as SVG and as a Chrome trace, of simulations and of recorded runs."""

import xml.etree.ElementTree as ElementTree

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Op
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.render.svg import Panel, render_svg
from megatron.zerobubble.plan.render.text import render_text
from megatron.zerobubble.plan.simulate import TimedOp, simulate

SVG = "{http://www.w3.org/2000/svg}"
NAMES = [info.name for info in known_schedules()]


def simulated(name: str, p: int = 3, m: int = 5) -> list[list[TimedOp]]:
    plan = build_plan(name, num_ranks=p, num_microbatches=m)
    return [list(row) for row in simulate(plan, CostModel.uniform(plan.placement, comm_ms=0.1)).rows]


def test_text_of_a_small_plan() -> None:
    plan = build_plan("zb-h1", num_ranks=2, num_microbatches=3)
    assert render_text(simulate(plan, CostModel.uniform(plan.placement)).rows).splitlines() == [
        "ms      0  1  2  3  4  5  6  7  8  9  10",
        "rank 0  F0 F1 .. B0 W0 F2 B1 W1 B2 W2",
        "rank 1     F0 B0 F1 B1 W0 F2 B2 W1 W2",
    ]


def test_text_writes_the_second_chunk_small_and_a_third_in_full() -> None:
    assert "f0" in render_text(simulated("zbv"))
    plan = build_plan("interleaved-1f1b", num_ranks=2, num_microbatches=2, num_chunks=3)
    assert "4BW1" in render_text(simulate(plan, CostModel.uniform(plan.placement)).rows)


@pytest.mark.parametrize("width", [40, 80, 160])
@pytest.mark.parametrize("name", NAMES)
def test_text_fits(name: str, width: int) -> None:
    lines = render_text(simulated(name, 4, 20), max_width=width).splitlines()
    assert len(lines) == 5
    assert max(map(len, lines[1:])) <= width + 1


@pytest.mark.parametrize("name", NAMES)
def test_svg_is_a_document_with_every_op_in_it(name: str) -> None:
    rows = simulated(name)
    root = ElementTree.fromstring(render_svg([Panel.of_ops(rows)], title="<title> & more", subtitle="'quoted'"))
    assert root.tag == f"{SVG}svg"
    titles = [element.text or "" for element in root.iter(f"{SVG}title")]
    assert [text.split()[0] for text in titles] == [str(timed.op) for row in rows for timed in row]
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "<title> & more" in texts
    assert "rank 2" in texts
    width = float(root.get("width") or 0)
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.get("width", 0)) <= width + 1e-6


def test_svg_leaves_out_numbers_that_do_not_fit() -> None:
    def numbers(width_px: int) -> int:
        root = ElementTree.fromstring(render_svg([Panel.of_ops(simulated("zbv", 4, 24))], width_px=width_px))
        return sum((element.text or "").isdigit() and element.get("fill") != "#555" for element in root.iter(f"{SVG}text"))

    assert numbers(4000) == 4 * 24 * 6
    assert numbers(400) == 0


def test_a_recorded_run_is_rendered_by_the_same_code() -> None:
    """Its clock has any origin, its passes any duration, and a rank may have recorded nothing."""
    origin = 1.7e6
    rows = [
        [TimedOp(Op.parse("0F0"), origin, origin + 2.0), TimedOp(Op.parse("0BW0"), origin + 6.5, origin + 11.0)],
        [TimedOp(Op.parse("1F0"), origin + 2.0, origin + 4.0), TimedOp(Op.parse("1BW0"), origin + 4.0, origin + 4.0)],
        [],
    ]
    text = render_text(rows)
    assert text.splitlines()[0].split()[:2] == ["ms", "0"]
    assert "BW0" in text
    ElementTree.fromstring(render_svg([Panel.of_ops(rows)]))


@pytest.mark.parametrize("rows", [[], [[]], [[], []]])
def test_an_empty_timeline_renders(rows: list[list[TimedOp]]) -> None:
    assert render_text(rows).startswith("ms")
    ElementTree.fromstring(render_svg([Panel.of_ops(rows)]))
