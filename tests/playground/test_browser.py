"""The page in a real browser: every input, every way out, errors, keyboard, and small screens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from PIL import Image

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.registry import build_plan, known_schedules
from megatron.zerobubble.plan.render.chrome_trace import render_trace
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.plan.validate import validate
from megatron.zerobubble.profiling.report import report, reports_to_json
from tests.playground.pages import SMALL, Open, cells, drop
from tests.profiling.support import as_recorded

pytestmark = [
    pytest.mark.claims(
        "Planning and measuring",
        "the playground in a browser: plans, comparisons with a baseline, exports that load again, traces of runs; "
        "keyboard, 1280 and 390 px, light and dark",
        "works, Chromium",
        also=("playground",),
    ),
    pytest.mark.sampled(0.3, group="pages in a browser"),
]

if TYPE_CHECKING:
    from playwright.sync_api import Page

PICTURE = "document.querySelector('.chart canvas.passes').toDataURL()"


def picture(page: Page) -> str:
    """What is painted of the first timeline."""
    painted: str = page.evaluate(PICTURE)
    return painted


def save(page: Page, button: str, to: Path) -> Path:
    page.locator(".panel details.take-along").last.evaluate("each => (each.open = true)")
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
        assert cells(page, "iteration time with the synchronous optimizer")[0] == f"{simulate(plan, times).makespan_ms:.2f} ms"
        reached = page.locator("#metrics").inner_text()
        with opened(page.url.partition("#")[2]) as other:
            other.wait_for_selector("main[aria-busy=false]")
            assert other.locator("#metrics").inner_text() == reached
            assert other.locator("#baseline option:checked").inner_text() == "B: ZBV"
            other.locator(".slot .remove").first.click()
            assert other.locator(".panel").count() == 2
        assert page.locator(".panel").count() == 3, "the other page is another page"


def test_a_copied_link_opens_where_it_says(opened: Open) -> None:
    with opened(f"{SMALL}&s=zbv", permissions=["clipboard-read", "clipboard-write"]) as page:
        page.wait_for_selector("main[aria-busy=false]")
        page.click("#link")
        assert "on this machine while this playground runs" in page.locator("#notes .good").inner_text()
        assert page.evaluate("navigator.clipboard.readText()") == page.url
        assert page.url.partition("#")[2]


def test_every_download_can_be_read_again(opened: Open, tmp_path: Path) -> None:
    with opened(f"{SMALL}&s=zbv") as page:
        plan = Plan.from_json(save(page, "Plan", tmp_path).read_text())
        validate(plan)
        assert plan == build_plan("zbv", num_ranks=4, num_microbatches=6)
        picture = ElementTree.parse(save(page, "SVG", tmp_path))
        assert len(list(picture.iter("{http://www.w3.org/2000/svg}title"))) == 4 * 6 * 6


def test_files_are_opened_and_the_schedules_are_planned_for_their_costs(opened: Open) -> None:
    run = as_recorded("zbv", 4, 6, iteration=9)
    plan = report(run).simulation
    with opened(f"{SMALL}&s=1f1b") as page:
        drop(page, "trace.json", render_trace([replace(run, iteration=8), run]))
        page.wait_for_selector(".panel:has-text('iteration 9 as it ran')")
        page.wait_for_selector("#notes:has-text('The schedules are planned for its costs.')")
        page.wait_for_selector("main[aria-busy=false]")
        assert cells(page, "speed-up, synchronous optimizer")[1] != "\u2013", "1F1B has the costs of the run"
        page.select_option(".slot label:has-text('iteration') select", label="8")
        page.wait_for_selector(".panel:has-text('iteration 8 as it ran')")
        text = run.plan.to_json(costs=plan.costs.to_json())
        page.set_input_files("#files", {"name": "plan-9.json", "mimeType": "application/json", "buffer": text.encode()})
        page.wait_for_selector("#metrics th:has-text('plan-9.json')")
        page.wait_for_selector("#notes:has-text('plan-9.json: opened.')")
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        drop(page, "report.json", reports_to_json([report(run)]))
        page.wait_for_selector("#stages-table tbody tr:nth-child(8)")
        assert page.locator("#stages-table input").nth(0).input_value() == "0.5"
        assert page.input_value("[name=m]") == "6"
        page.locator("#stages-table input").nth(0).fill("2")
        page.locator("#stages-table input").nth(0).blur()
        page.wait_for_function("() => location.hash.includes('t=2_')")
        drop(page, "costs.json", json.dumps(CostModel.uniform(run.plan.placement, forward_ms=4).to_json()))
        page.wait_for_function("() => document.querySelector('#stages-table input').value === '2'")
        page.wait_for_selector("#notes:has-text('costs.json')")
        page.click("#stages-clear")
        for name, body, reason in (
            ("broken.json", "{", "not JSON"),
            ("timeline-9.svg", "<svg xmlns='http://www.w3.org/2000/svg'/>", "not JSON"),
            ("other.json", '{"a": 1}', "keys 'a'; give a plan"),
            ("plan.json", text.replace('"num_ranks": 4', '"num_ranks": 5'), "num_ranks 5"),
            ("<img src=x onerror=alert(1)>.json", '{"format": "<b>"}', "<b>"),
        ):
            drop(page, name, body)
            page.wait_for_function("name => document.querySelector('#notes').textContent.startsWith(name)", arg=name)
            assert reason in page.locator("#notes").inner_text()


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
        page.goto(page.url.partition("#")[0] + "?p=900&m=4&s=zbv&effort=nonsense&b=x&t=1_2~3")
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
        commands = page.locator(".panel").last.locator("pre.flags").all_text_contents()
        assert len(commands) == 2
        assert f"--zero-bubble-load-plan {name}-p2-m3.json" in commands[0]


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
            "[...document.querySelectorAll('a, button, input, select, textarea, summary, [role=button], [role=application]')]"
            ".filter(e => !(e.labels?.length || e.ariaLabel || e.getAttribute('aria-label') || e.textContent.trim()))"
            ".map(e => e.outerHTML)"
        )
        assert unnamed == []
        live = "#announcer[aria-live=polite], #verdict[role=status], #notes[role=alert]"
        assert page.locator(live).count() == 3


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
