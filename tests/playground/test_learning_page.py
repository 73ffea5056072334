"""Stories, words, the chain of a pass, the critical path, ranges, playing and sliders, in a real browser."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import pytest

from megatron.zerobubble.plan.registry import build_plan
from tests.playground.pages import SMALL, Open, cells

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.claims(
        "Planning and measuring",
        "the playground for learners: stories, explained words, the chain of a pass, the critical path, sums of a range, "
        "playing, sliders, the curve over m; first picture of p = 64, m = 512 within 3 s, frames at p = 32, m = 128 within 17 ms",
        "works, Chromium",
        also=("playground/test_speed.py",),
    ),
    pytest.mark.sampled(0.3, group="pages in a browser"),
]

PICTURE = "document.querySelector('.chart canvas.passes').toDataURL()"


def ready(page: Page) -> None:
    page.wait_for_timeout(300)
    page.wait_for_selector("main[aria-busy=false]")


def test_the_stories_lead_to_each_other_and_say_what_the_page_shows(opened: Open) -> None:
    with opened(SMALL) as page:
        page.click("#learn")
        seen = []
        for number in range(1, 7):
            page.wait_for_selector(f"#story strong:has-text('{number} of 6')")
            ready(page)
            text = page.locator("#story p").inner_text()
            seen.append(text)
            shown = [float(value.split(" ")[0]) for value in cells(page, "bubble")]
            for claimed in re.findall(r"([\d.]+) % of the time", text):
                assert shown == [float(claimed)]
            for one, other in re.findall(r"from ([\d.]+) % to ([\d.]+) %", text):
                assert shown == [float(one), float(other)]
            if "no bubble left" in text.replace("\n", " "):
                assert shown[1] == 0
            if number == 4:
                memory = [float(value) for value in cells(page, "peak activation memory")]
                assert f"{memory[2]:g} of 1F1B's activation memory" in text
                assert shown[1] < shown[2] < shown[0]
            if number == 5:
                page.wait_for_selector('#metrics .hint:has-text("rank 7 has")')
            if number == 6:
                assert shown[1] < 0.4 * shown[0]
                assert "times as fast as 1F1B" in page.locator("#verdict").inner_text()
                memory = [float(value) for value in cells(page, "peak activation memory")]
                assert max(memory[1:]) < 0.5 * memory[0]
            else:
                page.locator("#story a:has-text('Next')").click()
        assert len(set(seen)) == 6
        page.go_back()
        page.wait_for_selector("#story strong:has-text('5 of 6')")
        page.locator("#story button").click()
        assert page.locator("#story").is_hidden()
        assert "story" not in page.url


def test_words_are_explained_on_hover_focus_and_touch(opened: Open) -> None:
    with opened(SMALL, has_touch=True) as page:
        page.locator("#legend .word").first.hover()
        assert page.locator("#word").inner_text().startswith("Forward: a stage computes")
        page.locator("#verdict").hover()
        assert page.locator("#word").is_hidden()
        page.locator("#metrics .word:has-text('bubble')").first.tap()
        assert "nothing to compute" in page.locator("#word").inner_text()
        assert page.locator(".word[aria-expanded=true]").get_attribute("aria-describedby") == "word"
        page.keyboard.press("Escape")
        assert page.locator("#word").is_hidden()


def test_a_pass_shows_its_chain_and_arrows_to_what_waits_for_it(opened: Open) -> None:
    with opened(f"{SMALL}&s=zbv") as page:
        page.locator(".chart").focus()
        for key in ("ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
        assert page.locator("#announcer").inner_text().startswith("F of microbatch 0, rank 1, stage 1")
        assert page.locator(".arrows .chain").count() == 1
        assert page.locator(".arrows .arrow").count() == 2, "from F of stage 0, to F of stage 2"
        chain = page.locator(".arrows .chain").get_attribute("d") or ""
        assert len(re.findall(r"[ML]", chain)) == 2 * 2 * 8, "F and B of eight stages, from their start to their end"
        page.locator("#verdict").click()
        assert page.locator(".arrows path").count() == 0


def test_a_timeline_that_arrives_leaves_the_selected_pass_of_another_as_it_is(opened: Open) -> None:
    with opened(f"{SMALL}&s=zbv") as page:
        ready(page)
        page.locator(".chart").focus()
        page.keyboard.press("ArrowRight")
        page.evaluate("document.getElementById('add').click()")
        page.locator(".chart").nth(1).wait_for()
        assert page.locator(".arrows .chain").count() == 1
        page.evaluate("document.querySelectorAll('.slot .remove')[1].click()")
        page.locator(".chart").nth(1).wait_for(state="detached")
        assert page.locator(".arrows .chain").count() == 1


def test_slices_are_passes_of_their_own(opened: Open) -> None:
    with opened("p=2&m=2&effort=drawn&s=1f1b~~~~2&s=auto~~~~2") as page:
        assert page.locator(".slot input[placeholder='1']").first.input_value() == "2"
        page.locator(".chart").first.focus()
        for key in ("ArrowRight", "ArrowRight"):
            page.keyboard.press(key)
        assert page.locator("#announcer").inner_text().startswith("F of microbatch 0, slice 1, rank 0, stage 0")
        chain = page.locator(".arrows .chain").get_attribute("d") or ""
        assert len(re.findall(r"[ML]", chain)) == 2 * 2 * 2, "F and B of one slice on two stages"


def test_the_critical_path_ends_last_and_has_no_gaps(opened: Open) -> None:
    with opened(f"{SMALL}&s=1f1b") as page:
        path = page.evaluate(
            "() => { const panel = document.querySelector('.chart').panel; "
            "return panel.passesBy.criticalPath().map(({rank, index}) => "
            "[panel.drawing.ranks[rank].starts[index], panel.drawing.ranks[rank].ends[index]]); }"
        )
        assert path[0][1] == 27.0
        assert path[-1][0] == 0.0
        assert all(later[0] == earlier[1] for later, earlier in itertools.pairwise(path))
        before = page.evaluate(PICTURE)
        page.click("#critical")
        page.wait_for_function(f"before => {PICTURE} !== before", arg=before)
        assert page.locator("#critical").get_attribute("aria-pressed") == "true"
        page.click("#critical")
        page.wait_for_function(f"before => {PICTURE} === before", arg=before)


def test_a_microbatch_is_found_and_visited_pass_by_pass(opened: Open) -> None:
    with opened(f"{SMALL}&s=1f1b") as page:
        before = page.evaluate(PICTURE)
        page.fill("#find", "3")
        page.wait_for_function(f"before => {PICTURE} !== before", arg=before)
        said = []
        for _ in range(8):
            page.keyboard.press("Enter")
            said.append(page.locator("#announcer").inner_text().split(",")[0:2])
        assert said == [["F of microbatch 3", f" rank {rank}"] for rank in range(4)] + [
            ["BW of microbatch 3", f" rank {rank}"] for rank in (3, 2, 1, 0)
        ]
        page.fill("#find", "")
        page.wait_for_function(f"before => {PICTURE} === before", arg=before)


def test_a_range_of_time_is_summed_up_by_mouse_and_keyboard(opened: Open) -> None:
    with opened(f"{SMALL}&s=1f1b") as page:
        page.locator(".chart").focus()
        page.keyboard.press("Home")
        page.keyboard.press("[")
        page.keyboard.press("End")
        page.keyboard.press("]")
        assert page.locator("#sums").inner_text() == (
            "A, 0 ms to 27.00 ms, all ranks: F 24.00 ms (22.2 %), BW 48.00 ms (44.4 %), idle 36.00 ms (33.3 %)"
        )
        box = page.locator(".chart").bounding_box()
        assert box is not None
        page.keyboard.down("Shift")
        page.mouse.move(box["x"] + 100, box["y"] + 10)
        page.mouse.down()
        page.mouse.move(box["x"] + 300, box["y"] + 10, steps=3)
        page.mouse.up()
        page.keyboard.up("Shift")
        assert re.match(r"A, [\d.]+ ms to [\d.]+ ms, all ranks: F ", page.locator("#sums").inner_text())
        marked = page.locator(".range").bounding_box()
        assert marked is not None
        assert abs(marked["width"] - 200) < 3


def test_playing_covers_what_is_not_yet_and_the_letters_of_perfetto_move(opened: Open) -> None:
    with opened(f"{SMALL}&s=1f1b") as page:
        page.click("#play")
        page.wait_for_selector(".cover:not([hidden])")
        page.click("#play")
        assert page.locator("#play").inner_text() == "Play"
        assert 0 < float(page.input_value("#time")) < 1
        page.locator("#time").fill("1")
        assert page.locator(".cover").is_hidden()
        chart, before = page.locator(".chart"), page.evaluate(PICTURE)
        chart.focus()
        pictures = {before}
        for key in ("w", "d", "a", "s"):
            page.keyboard.press(key)
            page.wait_for_timeout(80)
            pictures.add(page.evaluate(PICTURE))
        assert len(pictures) >= 3
        page.keyboard.press("0")
        page.wait_for_function(f"before => {PICTURE} === before", arg=before)


def test_sliders_move_the_numbers_and_the_curve_is_that_of_the_planner(opened: Open) -> None:
    with opened(f"{SMALL}&s=1f1b&s=zbv") as page:
        page.wait_for_selector("#curve svg")
        rows = [row.split("\t") for row in page.locator("#curve tbody tr").all_text_contents()]
        assert len(rows) == 7
        ready(page)
        page.locator(".slider[aria-label='pipeline ranks']").fill("1000")
        assert page.input_value("[name=p]") == "64"
        page.locator(".slider[aria-label='pipeline ranks']").fill("167")
        assert page.input_value("[name=p]") == "2"
        page.locator(".slider[aria-label=W]").fill("0")
        assert page.input_value("[name=w]") == "0"
        page.wait_for_selector(".panel h3:has-text('2 pipeline ranks')")
        ready(page)
        page.wait_for_function("() => document.querySelector('#curve tbody th').textContent === '2'")
        plan = build_plan("1f1b", num_ranks=2, num_microbatches=6)
        assert len(plan.ops) == 2
