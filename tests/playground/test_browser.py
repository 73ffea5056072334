"""The page in a real browser: every input, every way out, errors, keyboard, and small screens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from megatron.zerobubble.plan.costs import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.render.trace import render_trace
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.validate import validate
from megatron.zerobubble.playground.recorded import read_trace
from megatron.zerobubble.playground.words import milliseconds
from megatron.zerobubble.profiling.report import report, reports_to_json
from tests.playground.conftest import Server
from tests.profiling.support import as_recorded
from tests.training.test_arguments import settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WAIT_MS = 60_000
SMALL = "p=4&m=6&effort=drawn"
PICTURE = "document.querySelector('.chart canvas.passes').toDataURL()"

Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Browser, server: Server) -> Open:
    """A page in a context of its own, which fails the test if it logs anything to the console."""

    @contextmanager
    def open_page(query: str = SMALL, **options: Any) -> Iterator[Page]:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "accept_downloads": True} | options)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        logged: list[str] = []
        page.on("pageerror", lambda error: logged.append(str(error)))
        page.on("console", lambda message: logged.append(message.text) if "400 (Bad Request)" not in message.text else None)
        page.goto(f"{server.address}/?{query}")
        page.wait_for_selector(".panel .measures")
        yield page
        assert logged == []
        context.close()

    return open_page


def cells(page: Page, row: str) -> list[str]:
    """A row of the table of results."""
    return page.locator("#metrics tr").filter(has_text=re.compile(f"^{row}")).first.locator("td").all_inner_texts()


def picture(page: Page) -> str:
    """What is painted of the first timeline."""
    painted: str = page.evaluate(PICTURE)
    return painted


def drop(page: Page, name: str, text: str) -> None:
    """Drop a file onto the page, as a mouse would."""
    transfer = page.evaluate_handle(
        "([name, text]) => { const d = new DataTransfer(); d.items.add(new File([text], name)); return d; }", [name, text]
    )
    page.dispatch_event("main", "drop", {"dataTransfer": transfer})


def save(page: Page, button: str, to: Path) -> Path:
    with page.expect_download() as waiting:
        page.locator(".panel").last.get_by_role("button", name=button, exact=True).click()
    target = to / waiting.value.suggested_filename
    waiting.value.save_as(target)
    return target


def test_the_form_plans_and_the_link_restores_it_in_another_page(opened: Open) -> None:
    with opened("effort=drawn") as page:
        assert page.locator(".slot").count() == 2
        page.fill("[name=p]", "3")
        page.fill("[name=m]", "5")
        page.fill("[name=b]", "1.5")
        page.fill("[name=c]", "0.1")
        assert page.input_value("[name=objective]") == "makespan", "as in a run without post-validation"
        page.select_option("[name=objective]", "span")
        page.click("#add")
        page.locator(".slot select").nth(2).select_option("zb")
        page.locator(".slot").nth(2).get_by_placeholder("1p").fill("2p")
        page.locator(".slot").nth(2).get_by_placeholder("1p").blur()
        page.locator(".slot input[type=checkbox]").nth(1).check()
        page.locator(".slot input[type=range]").nth(1).fill("0.9")
        page.wait_for_function("() => document.querySelectorAll('.panel').length === 3")
        page.wait_for_selector("main[aria-busy=false]")
        page.select_option("#baseline", label="B: ZBV")
        peak = float(cells(page, "peak activation memory")[1])
        assert peak <= 0.9 + 1e-9
        plan = build_plan("1f1b", num_ranks=3, num_microbatches=5)
        times = CostModel.uniform(plan.placement, backward_ms=1.5, comm_ms=0.1)
        assert cells(page, "iteration time with the synchronous optimizer")[0] == milliseconds(simulate(plan, times).makespan_ms)
        reached = page.locator("#metrics").inner_text()
        with opened(page.url.partition("?")[2]) as other:
            other.wait_for_selector("main[aria-busy=false]")
            assert other.locator("#metrics").inner_text() == reached
            assert other.locator("#baseline option:checked").inner_text() == "B: ZBV"
            other.locator(".slot .remove").first.click()
            assert other.locator(".panel").count() == 2
        assert page.locator(".panel").count() == 3, "the other page is another page"


def test_every_download_can_be_read_again(opened: Open, tmp_path: Path) -> None:
    with opened(f"{SMALL}&s=zbv") as page:
        plan = Plan.from_json(save(page, "Plan", tmp_path).read_text())
        validate(plan)
        assert plan == build_plan("zbv", num_ranks=4, num_microbatches=6)
        picture = ElementTree.parse(save(page, "SVG", tmp_path))
        assert len(list(picture.iter("{http://www.w3.org/2000/svg}title"))) == 4 * 6 * 6
        with Image.open(save(page, "PNG", tmp_path)) as image:
            assert image.width > 1600
            assert len(image.convert("RGB").getcolors(1 << 24)) > 20
        (timeline,) = read_trace(json.loads(save(page, "Trace", tmp_path).read_text()))
        assert timeline.plan.ops == plan.ops
        page.locator(".panel summary.button").click()
        flags = page.locator(".flags").inner_text().replace("\\\n", " ").replace("zbv-p4", f"{tmp_path}/zbv-p4")
        model = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-3 --train-iters 2 --mock-data "
        assert settings(model + flags, base="").zero_bubble.plan == plan


def test_files_are_opened_and_a_trace_is_compared_with_its_plan(opened: Open) -> None:
    run = as_recorded("zbv", 4, 6, iteration=9)
    plan = report(run).simulation
    with opened(f"{SMALL}&s=1f1b") as page:
        drop(page, "trace.json", render_trace([replace(run, iteration=8), run]))
        page.wait_for_selector(".panel:has-text('iteration 9 as it ran')")
        page.select_option(".slot label:has-text('iteration') select", label="8")
        page.wait_for_selector(".panel:has-text('iteration 8 as it ran')")
        page.wait_for_selector("#deviations-result:has-text('the plan has 4 stages and the trace 8')")
        text = run.plan.to_json(costs=plan.costs.to_json())
        page.set_input_files("#files", {"name": "plan-9.json", "mimeType": "application/json", "buffer": text.encode()})
        page.wait_for_selector("#deviations-plan option:has-text('plan-9.json')", state="attached")
        page.select_option(".slot label:has-text('iteration') select", label="9")
        page.wait_for_selector("#deviations table")
        assert page.locator("#deviations-plan option:checked").inner_text() == "C: plan-9.json"
        assert "as planned" in page.locator("#deviations").inner_text()
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        drop(page, "report.json", reports_to_json([report(run)]))
        page.wait_for_selector("#stages-table tbody tr:nth-child(8)")
        assert page.locator("#stages-table input").nth(0).input_value() == "0.5"
        assert page.input_value("[name=m]") == "6"
        page.locator("#stages-table input").nth(0).fill("2")
        page.locator("#stages-table input").nth(0).blur()
        page.wait_for_function("() => location.search.includes('t=2_')")
        drop(page, "costs.json", json.dumps(CostModel.uniform(run.plan.placement, forward_ms=4).to_json()))
        page.wait_for_function("() => document.querySelector('#stages-table input').value === '2'")
        page.wait_for_selector("#notes:has-text('costs.json')")
        page.click("#stages-clear")
        for name, body, reason in (
            ("broken.json", "{", "damaged JSON"),
            ("timeline-9.svg", "<svg xmlns='http://www.w3.org/2000/svg'/>", "this is an SVG picture"),
            ("other.json", '{"a": 1}', "keys 'a'; give a plan"),
            ("plan.json", text.replace('"num_ranks": 4', '"num_ranks": 5'), "num_ranks 5"),
            ("<img src=x onerror=alert(1)>.json", '{"format": "<b>"}', "<b>"),
        ):
            drop(page, name, body)
            page.wait_for_function("text => document.querySelector('#notes').textContent.includes(text)", arg=reason)
            assert page.locator("#notes").inner_text().startswith(name)


def test_mistakes_are_reported_where_they_were_made(opened: Open) -> None:
    with opened(f"{SMALL}&s=zbv") as page:
        page.fill("[name=p]", "65")
        page.wait_for_selector("#notes:has-text('pipeline ranks (PP) p')")
        page.fill("[name=p]", "4")
        page.wait_for_function("() => !document.querySelector('#notes').textContent")
        page.locator(".slot input[type=checkbox]").check()
        page.locator(".slot input[type=range]").fill("0.1")
        page.wait_for_selector(".slot.wrong:has-text('the smallest that works is 0.25')")
        page.locator(".slot input[type=range]").fill("1")
        page.wait_for_selector(".panel")
        assert page.locator(".slot.wrong").count() == 0
    with opened() as page:
        page.goto(page.url.partition("?")[0] + "?p=900&m=4&s=zbv&effort=nonsense&b=x&t=1_2~3")
        page.wait_for_selector(".slot.wrong:has-text('num_ranks is 900')")


def test_a_long_search_is_stopped_and_keeps_the_best_so_far(opened: Open) -> None:
    with opened("p=8&m=24&f=18.5&b=18.1&w=9.3&c=0.6&a=0.37&effort=max&s=v-half") as page:
        page.wait_for_selector(".slot .stop:not([hidden])")
        page.click(".slot .stop")
        page.wait_for_selector(".slot .status:has-text('stopped; this is the best so far')")
        assert page.locator(".panel").count() == 1
        assert float(cells(page, "bubble")[0].split()[0]) < 30


def test_points_of_the_curve_can_be_chosen(opened: Open) -> None:
    with opened("p=2&m=3&effort=drawn&s=1f1b") as page:
        page.click("#pareto-run")
        page.wait_for_selector("#pareto .point")
        page.wait_for_selector("#pareto-run:has-text('Find the Pareto front')")
        point = page.locator("#pareto .point").nth(2)
        words = point.get_attribute("aria-label") or ""
        point.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector(".slot .status:has-text('plan of the Pareto front')")
        title = words.split(": ")[1].split(",")[0].split(" with ")[0]
        assert page.locator(".panel h3").first.inner_text().split(":")[0].endswith("1F1B"), "the baseline stays"
        assert page.locator(".panel h3").last.inner_text().split(":")[0].endswith(title)
        assert f"makespan {cells(page, 'iteration time with the synchronous optimizer')[1]}" in words
        (name,) = [info.name for info in known_schedules() if info.title == title]
        assert f"s=1f1b&s={name}" in page.url


def test_the_keyboard_and_a_screen_reader_see_what_the_mouse_sees(opened: Open) -> None:
    with opened(f"{SMALL}&s=zbv") as page:
        row = build_plan("zbv", num_ranks=4, num_microbatches=6).ops[1]
        chart = page.locator(".chart")
        chart.focus()
        for key in ("ArrowRight", "ArrowDown", "End"):
            page.keyboard.press(key)
        announced = page.locator("#announcer").inner_text()
        assert announced.startswith(f"{row[-1].kind.value} of microbatch {row[-1].microbatch}, rank 1, stage {row[-1].stage}")
        drawn = picture(page)
        page.keyboard.press("+")
        page.wait_for_function(f"before => {PICTURE} !== before", arg=drawn)
        for _ in range(7):
            page.keyboard.press("+")
        page.wait_for_timeout(100)
        chosen, shown = page.locator(".mark").bounding_box(), chart.bounding_box()
        assert chosen is not None, "the selected pass stays in sight"
        assert shown is not None
        assert chosen["x"] >= shown["x"]
        assert chosen["x"] + chosen["width"] <= shown["x"] + shown["width"] + 4
        zoomed = picture(page)
        page.keyboard.press("ArrowLeft")
        assert picture(page) not in (drawn, zoomed), "the pass before the last one is brought into sight"
        page.keyboard.press("0")
        page.wait_for_function(f"before => {PICTURE} === before", arg=drawn)
        page.mouse.move(0, 0)
        box = chart.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + 40, box["y"] + 8)
        page.wait_for_selector("#tip:has-text('F of microbatch 0')")
        page.locator(".alternative summary").click()
        page.wait_for_selector(".alternative pre")
        for width in (1280, 390):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator(".alternative pre").evaluate("e => e.scrollWidth > e.clientWidth"), "it has a scroll bar of its own"
        assert page.locator(".alternative tbody tr").count() == 4
        assert "rank 3" in page.locator(".alternative pre").inner_text()
        unnamed = page.evaluate(
            "[...document.querySelectorAll('button, input, select, [role=button]')]"
            ".filter(e => !(e.labels?.length || e.ariaLabel || e.getAttribute('aria-label') || e.textContent.trim()))"
            ".map(e => e.outerHTML)"
        )
        assert unnamed == []


def test_only_what_is_comparable_is_compared(opened: Open) -> None:
    with opened(f"{SMALL}&s=1f1b&s=zbv&base=0") as page:
        page.wait_for_selector("main[aria-busy=false]")
        assert page.locator("#metrics .speed").inner_text() == (
            "ZBV (B) is 1.35 times as fast as 1F1B (A), 1.35 with post-validation, at 1.00 times its memory."
        )
        assert cells(page, "speed-up, synchronous optimizer") == ["1.00\u00d7", "1.35\u00d7"]
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
        assert page.locator("#metrics .speed").count() == 2


def test_a_report_of_zbv_keeps_the_comparison_with_1f1b(opened: Open) -> None:
    with opened(f"{SMALL}&s=1f1b") as page:
        drop(page, "report.json", reports_to_json([report(as_recorded("zbv", 4, 6))]))
        page.wait_for_function("() => document.querySelectorAll('.panel').length === 2")
        page.wait_for_selector("main[aria-busy=false]")
        assert page.locator("#metrics .speed").inner_text().startswith("ZBV (B) is 1.")
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


def test_microbatch_numbers_are_all_there_or_none(opened: Open) -> None:
    """Twelve microbatches whose numbers of two digits need more space than the others."""
    with opened("p=4&m=12&effort=drawn&s=zb-h1") as page:
        page.evaluate(COUNT)
        found = set()
        for width in range(390, 1281, 89):
            page.evaluate("window.painted = 0")
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_timeout(100)
            painted = page.evaluate("window.painted")
            assert painted % (4 * 12 * 3) == 0, width
            found.add(painted > 0)
        assert found == {False, True}


def test_times_of_efforts_are_for_the_size_on_the_page(opened: Open) -> None:
    with opened(f"{SMALL}&s=1f1b&s=zbv") as page:
        page.wait_for_selector("main[aria-busy=false]")
        efforts = page.locator("[name=effort] option")
        before = efforts.all_inner_texts()
        assert before[0] == "hand-written schedule, no search"
        assert all(re.search(r", about \d+ (s|min)$", text) for text in before[1:])
        page.fill("[name=p]", "32")
        page.fill("[name=m]", "128")
        page.wait_for_function("text => document.querySelector('[name=effort]').options[1].textContent !== text", arg=before[1])
        page.locator(".slot .remove").last.click()
        assert efforts.nth(1).inner_text() == "fast, nothing to search"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_small_screen_shows_everything_without_scrolling_sideways(opened: Open, scheme: str, tmp_path: Path) -> None:
    with opened(f"{SMALL}&s=1f1b&s=zbv", viewport={"width": 390, "height": 844}, color_scheme=scheme, has_touch=True) as page:
        page.wait_for_function("() => document.querySelectorAll('.panel').length === 2")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.locator(".panel").last.scroll_into_view_if_needed()
        page.screenshot(path=tmp_path / "small.png", full_page=True)
        with Image.open(tmp_path / "small.png") as image:
            assert image.width == 390
            pixels = image.convert("RGB")
            assert (sum(pixels.getpixel((2, 500))) > 600) is (scheme == "light")
            colors = {color for _, color in pixels.getcolors(1 << 24)}
        assert {(0x7E, 0xA6, 0xE8), (0x97, 0xD0, 0x77), (0x1B, 0x8A, 0x91)} <= colors, "F, W, and a later chunk's B"
