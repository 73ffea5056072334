"""Words, the chain of a pass, the critical path and the passes of a microbatch, in a real browser."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

import pytest

from tests.playground.pages import SMALL, Open

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [
    pytest.mark.claims(
        "Planning and measuring",
        "the playground for learners: explained words, the chain of a pass, the critical path; first picture of p = 64, m = 512 "
        "within 3 s, frames at p = 32, m = 128 within 17 ms",
        "works, Chromium",
        also=("playground/test_speed.py",),
    ),
    pytest.mark.sampled(0.3, group="pages in a browser"),
]

PICTURE = "document.querySelector('.chart canvas.passes').toDataURL()"


def ready(page: Page) -> None:
    page.wait_for_timeout(300)
    page.wait_for_selector("main[aria-busy=false]")


def test_words_are_explained_on_hover_focus_and_touch(opened: Open) -> None:
    with opened(SMALL, has_touch=True) as page:
        ready(page)
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
