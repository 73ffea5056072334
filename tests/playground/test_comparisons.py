"""What the page compares, and how it is labeled, in a real browser."""

from __future__ import annotations

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.profiling.report import report, reports_to_json
from tests.playground.pages import SMALL, Open, cells, drop
from tests.profiling.support import as_recorded

pytestmark = pytest.mark.sampled(0.3, group="pages in a browser")


def test_only_plans_for_one_problem_are_compared(opened: Open) -> None:
    with opened(f"{SMALL}&s=1f1b&s=zbv&base=0") as page:
        page.wait_for_selector("main[aria-busy=false]")
        assert page.locator("#verdict").inner_text() == (
            "ZBV (B) is 1.38 times as fast as 1F1B (A), 1.46 with post-validation, at 1.00 times its activation memory."
        )
        assert cells(page, "speed-up, synchronous optimizer") == ["1.00\u00d7", "1.38\u00d7"]
        assert page.locator("#metrics strong").count() > 0
        for name, m, times, reason in (
            ("other-m.json", 8, {}, "m = 8 instead of 6"),
            ("other-costs.json", 6, {"forward_ms": 0.5}, "other costs"),
            ("same.json", 6, {}, ""),
        ):
            plan = build_plan("zb-h1", num_ranks=4, num_microbatches=m)
            drop(page, name, plan.to_json(costs=CostModel.uniform(plan.placement, **times).to_json()))
            page.wait_for_selector(f"#metrics th:has-text('{name}')")
            apart = page.locator("#metrics .apart").all_inner_texts()
            assert apart == ([f"{name} (C) is not compared with 1F1B (A): {reason}."] if reason else [])
            assert (cells(page, "speed-up, synchronous optimizer")[2] == "\u2013") is bool(reason)
            assert page.locator("#metrics td:nth-child(4) strong").count() == 0 or not reason
            page.locator(".slot .remove").last.click()
        drop(page, "same.json", plan.to_json())
        page.wait_for_selector("#metrics th:has-text('same.json')")
        page.select_option("#baseline", label="C: same.json")
        assert cells(page, "speed-up, synchronous optimizer")[2] == "1.00\u00d7"
        assert page.locator("#verdict").inner_text().startswith("ZBV (B) is 1.08 times as fast as same.json (C)")


def test_a_report_of_zbv_keeps_the_comparison_with_1f1b(opened: Open) -> None:
    with opened(f"{SMALL}&s=1f1b") as page:
        drop(page, "report.json", reports_to_json([report(as_recorded("zbv", 4, 6))]))
        page.wait_for_function("() => document.querySelectorAll('.panel').length === 2")
        page.wait_for_selector("main[aria-busy=false]")
        assert page.locator("#verdict").inner_text().startswith("ZBV (B) is 1.")
        derived = "A: costs of 4 stages, derived from those of 8: each is the sum of 2 consecutive ones."
        assert page.locator("#metrics .hint").all_inner_texts() == [derived]


COUNT = """() => {
window.painted = 0;
const paint = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  if (this.canvas.classList.contains("passes") && this.textAlign === "center" && this.textBaseline === "middle") window.painted++;
  return paint.call(this, text, x, y);
};
}"""


def test_microbatch_numbers_are_wherever_they_fit(opened: Open) -> None:
    """1F1B's BW are twice as wide as its F: there is a width at which only they have numbers."""
    with opened("p=4&m=12&effort=drawn&s=1f1b") as page:
        page.evaluate(COUNT)
        found = []
        for width in range(390, 1281, 89):
            page.evaluate("window.painted = 0")
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(100)
            found.append(page.evaluate("window.painted"))
        every = 4 * 12 * 2
        assert found[-1] % every == 0
        assert found[-1] >= every
        assert any(count % every for count in found)


def test_zbv_at_8_by_24_has_its_numbers(opened: Open) -> None:
    """Its boxes are narrower than two digits, which stand one below the other; beside 1F1B, too, on a screen of 1280 px."""
    with opened("p=8&m=24&effort=drawn&s=1f1b&s=zbv") as page:
        page.wait_for_selector("main[aria-busy=false]")
        page.evaluate(COUNT)
        page.set_viewport_size({"width": 1281, "height": 900})
        page.wait_for_function("() => window.painted > 0")
        digits = sum(len(str(microbatch)) for microbatch in range(24))
        assert page.evaluate("window.painted") == 8 * (24 + 7 * digits), (
            "1F1B's BW in one line; its F, and F, B and W of two chunks"
        )


@pytest.mark.parametrize("num_ranks", [8, 16, 32, 64])
@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
@pytest.mark.sampled(0.25)
def test_both_timelines_and_the_verdict_are_above_the_fold(opened: Open, width: int, height: int, num_ranks: int) -> None:
    with opened(f"p={num_ranks}&m=24&effort=drawn", viewport={"width": width, "height": height}) as page:
        page.wait_for_selector(".panel:nth-child(2) .chart")
        page.wait_for_selector("main[aria-busy=false]")  # until then a line about progress may be above
        for box in (page.locator(".chart").last.bounding_box(), page.locator("#verdict").bounding_box()):
            assert box is not None
            assert box["y"] + box["height"] <= height
        assert page.locator("#metrics tr:visible").count() == 1 + 4, "four rows until more are asked for"
        page.click("#more")
        assert page.locator("#metrics tr:visible").count() > 10


def test_rows_of_many_ranks_become_high_enough_for_numbers(opened: Open) -> None:
    with opened("p=32&m=24&effort=drawn&s=1f1b", viewport={"width": 1440, "height": 900}) as page:
        page.evaluate(f"({COUNT})()")
        page.locator(".chart").focus()
        for _ in range(8):
            page.keyboard.press("+")
        page.wait_for_timeout(100)
        assert page.evaluate("window.painted") == 0
        page.click("#tall")
        page.wait_for_function("() => window.painted > 0")
        assert page.locator("#tall").get_attribute("aria-pressed") == "true"
        page.fill("[name=p]", "4")
        page.wait_for_selector("#tall", state="hidden")


def test_of_schedules_that_are_as_fast_the_one_with_fewer_messages_is_the_verdict(opened: Open) -> None:
    with opened("p=4&m=12&effort=drawn&s=1f1b&s=zbv&s=zb-h2&objective=span") as page:
        page.wait_for_selector("main[aria-busy=false]")
        sentence = page.locator("#verdict").inner_text()
        assert sentence.startswith("ZB-H2 (C) is 1.25 times as fast as 1F1B (A) with post-validation, 1.15 without")
        assert sentence.endswith("ZBV (B) is as fast, with 2.00 times the messages and 0.57 times the activation memory.")
