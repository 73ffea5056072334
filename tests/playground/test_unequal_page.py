"""Lengths of microbatches, links of ranks and all-to-alls of experts on the page, in a real browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.lengths_and_links import LengthsAndLinks
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.playground.length_fields import log_normal_lengths
from tests.playground.pages import SMALL, Open, cells, drop

TOKENS = [512, 4096, 700, 1800, 1024, 96]
LIST = f"p=2&effort=drawn&s=zbv&lengths=list&tokens={'_'.join(map(str, TOKENS))}&share=0.1"
IDLE = "idle share of the makespan"
CAME = "idle share in its own order with the data as it came"

pytestmark = pytest.mark.sampled(0.3, group="pages in a browser")


def test_lengths_are_planned_for_and_shown_and_the_link_restores_them(opened: Open, tmp_path: Path) -> None:
    with opened("p=2&effort=drawn&s=zbv") as page:
        assert page.locator("[name=tokens]").is_hidden()
        assert page.locator("#metrics tr", has_text=IDLE).count() == 0
        page.select_option("[name=lengths]", "list")
        page.fill("[name=tokens]", ", ".join(map(str, TOKENS)))
        page.fill("[name=share]", "0.1")
        page.wait_for_selector(".panel .lengths:has-text('microbatches of 96 to 4096 tokens (mean 1371)')")
        page.wait_for_function("() => document.querySelector('.panel h3').textContent.includes(' 6 microbatches')")
        assert page.input_value("[name=m]") == "6"
        assert page.locator("[name=m]").get_attribute("readonly") is not None
        page.wait_for_selector("main[aria-busy=false]")
        assert page.locator("[name=effort] option").first.inner_text() == "hand-written, microbatches assigned"
        page.locator(".take-along summary").click()
        with page.expect_download() as waiting:
            page.get_by_role("button", name="Plan", exact=True).click()
        waiting.value.save_as(tmp_path / "plan.json")
        body = json.loads((tmp_path / "plan.json").read_text())
        plan = Plan.from_json(json.dumps(body))
        assert body["format"] == "zerobubble-plan/2"
        assert body["costs"]["microbatches"]["tokens"] == TOKENS
        assert sorted(plan.assignment) == list(range(6))
        idle, came = (float(cells(page, row)[0].split()[0]) for row in (IDLE, CAME))
        assert idle < came
        page.locator(".panel .slots summary").click()
        page.wait_for_selector(".panel .slots tbody tr")  # built when the browser says that it is open
        rows = page.locator(".panel .slots tbody tr").all_inner_texts()
        assert [row.split() for row in rows] == [[str(i), str(j), str(TOKENS[j])] for i, j in enumerate(plan.assignment)]
        page.locator(".chart").focus()
        page.keyboard.press("ArrowRight")
        first = plan.assignment[0]
        assert (
            page.locator("#announcer")
            .inner_text()
            .startswith(f"F of slot 0: microbatch {first} of the data, {TOKENS[first]} tokens, rank 0")
        )
        assert "is not loaded" in page.locator(".take-along .popover").inner_text()
        reached = page.locator("#metrics").inner_text()
        with opened(page.url.partition("#")[2]) as other:
            other.wait_for_selector("main[aria-busy=false]")
            assert other.locator("#metrics").inner_text() == reached
            assert other.input_value("[name=tokens]").split() == [str(count) for count in TOKENS]
            assert other.input_value("[name=m]") == "6"


def test_log_normal_lengths_follow_the_form_and_become_a_list(opened: Open) -> None:
    with opened("p=2&m=6&effort=drawn&s=auto&lengths=log-normal&mean=1000&seed=3") as page:
        drawn = log_normal_lengths(6, mean=1000, variation=0.6, seed=3)
        page.wait_for_selector(f".lengths:has-text('microbatches of {min(drawn)} to {max(drawn)} tokens')")
        limit = LengthsAndLinks(drawn).auto_memory_limit(2)
        assert page.locator(".slot output").inner_text() == f"{limit:.2f}", "1F1B's memory for the longest ones"
        page.fill("[name=m]", "7")
        more = log_normal_lengths(7, mean=1000, variation=0.6, seed=3)
        page.wait_for_selector(".panel h3:has-text('7 microbatches')")
        page.wait_for_selector("main[aria-busy=false]")
        page.select_option("[name=lengths]", "list")
        assert page.input_value("[name=tokens]").split() == [str(count) for count in more]


def test_links_are_planned_for_and_shown_and_the_link_restores_them(opened: Open) -> None:
    with opened("p=4&m=6&effort=drawn&s=zbv&c=0.1&links=nodes&node=2&between=1") as page:
        page.wait_for_selector(".lengths:has-text('links of 0.100 to 1.000 ms')")
        page.select_option("[name=links]", "matrix")
        assert page.input_value("[name=latency]") == "0 0.1 1 1\n0.1 0 1 1\n1 1 0 0.1\n1 1 0.1 0"
        assert page.locator("[name=c]").is_disabled()
        page.fill("[name=latency]", "0 0.1 1 1\n0.1 0 2 1\n1 2 0 0.1\n1 1 0.1 0")
        page.wait_for_selector(".lengths:has-text('links of 0.100 to 2.000 ms')")
        page.wait_for_selector("main[aria-busy=false]")
        reached = page.locator("#metrics").inner_text()
        with opened(page.url.partition("#")[2]) as other:
            other.wait_for_selector("main[aria-busy=false]")
            assert other.locator("#metrics").inner_text() == reached
            assert other.input_value("[name=latency]").splitlines()[1] == "0.1 0 2 1"
        page.fill("[name=bandwidth]", "1 1 1 1\n1 1 1 1\n1 1 1 1\n1 1 1 1")
        page.wait_for_selector(".slot.wrong:has-text('give bytes_per_token with microbatch_tokens')")
        page.select_option("[name=lengths]", "list")
        page.fill("[name=bytes]", "1000")
        page.wait_for_selector(".panel .lengths:has-text('links of ')")
        drop(page, "links.json", json.dumps({"latency_ms": [[0, 3], [4, 0]], "gigabytes_per_s": [[0, 5], [6, 0]]}))
        page.wait_for_selector(".panel h3:has-text('2 pipeline ranks')")
        fields = [page.input_value(f"[name={name}]") for name in ("latency", "bandwidth", "bytes")]
        assert fields == ["0 3\n4 0", "0 5\n6 0", "1000"]
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_all_to_alls_are_hidden_where_there_are_some_and_the_link_restores_them(opened: Open) -> None:
    makespan = "iteration time with the synchronous optimizer"
    with opened("p=4&m=8&effort=drawn&s=zbv") as page:
        page.wait_for_selector("main[aria-busy=false]")
        exposed = cells(page, makespan)[0]
        page.fill("[name=ep]", "0.4")
        page.wait_for_selector(".panel .lengths:has-text('all-to-alls of a rank: ')")
        page.wait_for_selector("main[aria-busy=false]")
        hidden = cells(page, makespan)[0]
        assert float(hidden.split()[0]) < float(exposed.split()[0])
        page.locator(".take-along summary").click()
        assert "--zero-bubble-overlap-moe" in page.locator(".take-along").inner_text()
        reached = page.locator("#metrics").inner_text()
        with opened(page.url.partition("#")[2]) as other:
            other.wait_for_selector("main[aria-busy=false]")
            assert other.locator("#metrics").inner_text() == reached
            assert other.input_value("[name=ep]") == "0.4"
        costs = CostModel.uniform(Placement.v(4)).to_json()
        drop(page, "costs.json", json.dumps(costs | {"all_to_all": [0.3, 0.5], "wgrad_beside": 1.0}))
        page.wait_for_selector("#notes:has-text('all-to-alls take different shares of F and of B, so their mean counts')")
        page.wait_for_selector("main[aria-busy=false]")
        assert page.input_value("[name=ep]") == "0.4"
        assert cells(page, makespan)[0] == hidden
        page.select_option("#model > select", "Llama-3-8B")
        page.wait_for_selector("[name=ep]:disabled")  # a dense model
        page.wait_for_selector("main[aria-busy=false]")
        page.wait_for_function("() => !document.querySelector('.panel .lengths')")
        page.select_option("#model > select", "DeepSeek-V3")
        page.wait_for_selector("[name=ep]:enabled")


def test_mistakes_in_lengths_and_links_are_reported_in_one_line(opened: Open) -> None:
    with opened(LIST) as page:
        for name, text, message in (
            ("tokens", "512, 0, 3", "microbatch 1 has 0 tokens; give a whole number, 1 or more"),
            ("tokens", "512 many", "microbatch 1 has 'many' tokens"),
        ):
            page.fill(f"[name={name}]", text)
            page.wait_for_function(
                "text => document.querySelector('.slot.wrong .status')?.textContent.includes(text)", arg=message
            )
        page.fill("[name=tokens]", "512 700")
        page.wait_for_selector(".panel h3:has-text('2 microbatches')")
        page.select_option("[name=links]", "matrix")
        page.fill("[name=latency]", "0 1 1\n1 0 1\n1 1 0")
        page.wait_for_selector(".slot.wrong:has-text('latency_ms of 3 ranks and num_ranks is 2')")
        page.goto(f"{page.url.partition('#')[0]}?p=1e9&m=1e9&links=nodes&lengths=list&s=zbv")
        page.wait_for_selector(".slot.wrong .status:has-text('num_ranks is 1000000000; the playground takes')")


def test_a_plan_for_unequal_microbatches_is_opened_and_planned_for_again(opened: Open, tmp_path: Path) -> None:
    with opened(LIST) as page:
        page.wait_for_selector("main[aria-busy=false]")
        shown = cells(page, IDLE)[0]
        page.locator(".take-along summary").click()
        with page.expect_download() as waiting:
            page.get_by_role("button", name="Plan", exact=True).click()
        waiting.value.save_as(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    with opened(f"{SMALL}&s=zbv") as page:
        drop(page, "plan.json", text)
        page.wait_for_selector("#metrics th:has-text('plan.json')")
        assert page.locator("#metrics .apart").count() == 1
        assert cells(page, IDLE) == ["\u2013", shown]
        page.locator("#notes button").click()
        page.wait_for_selector(".panel:first-child .lengths")
        page.wait_for_selector("main[aria-busy=false]")
        assert page.input_value("[name=tokens]").split() == [str(count) for count in TOKENS]
        assert page.input_value("[name=share]") == "0.1"
        assert cells(page, IDLE) == [shown, shown]
        assert page.locator("#metrics .apart").count() == 0, "the same problem again, from the means and the lengths"
        page.fill("[name=tokens]", " ".join(map(str, TOKENS[::-1])))
        page.wait_for_selector("#metrics .apart:has-text('other lengths of microbatches')")
        body = json.loads(text)
        assert CostModel.from_json(body["costs"]).tokens
        del body["costs"]["microbatches"]["tokens"]
        drop(page, "costs.json", json.dumps(body["costs"]))
        page.wait_for_selector("#notes:has-text('it has no lengths of its microbatches, so their means count')")
        assert page.input_value("[name=lengths]") == "equal"


def test_a_mistake_is_reported_where_the_results_were_and_not_only_below_the_form(opened: Open) -> None:
    with opened(f"{LIST}&s=1f1b&links=matrix&latency=0_1~1_0") as page:
        page.wait_for_selector("#metrics table")
        page.fill("[name=latency]", "0 1\n1")
        page.wait_for_selector("#metrics .bad")
        wrong = "links: latency_ms has 2 rows of 1, 2 numbers; it must have one row and one column for each of 2 ranks"
        page.wait_for_function("() => document.querySelectorAll('.slot.wrong').length === 2")
        assert page.locator("#metrics .bad").all_inner_texts() == [f"A, B: {wrong}"]
        box = page.locator("#metrics .bad").bounding_box()
        assert box is not None
        assert box["y"] < 900, "in sight without scrolling"
        page.fill("[name=latency]", "0 1\n1 0")
        page.wait_for_function("() => document.querySelector('#metrics table') && !document.querySelector('#metrics .bad')")


def test_lengths_and_links_can_be_cleared_and_typed_anew(opened: Open) -> None:
    with opened(f"{LIST}&links=matrix&latency=0_1~1_0") as page:
        for name, message in (("tokens", "no microbatch has tokens"), ("latency", "latency_ms of 0 ranks and num_ranks is 2")):
            before = page.input_value(f"[name={name}]")
            page.focus(f"[name={name}]")
            page.keyboard.press("Control+a")
            page.keyboard.press("Delete")
            page.wait_for_selector(f".slot.wrong .status:has-text('{message}')")
            page.keyboard.insert_text(before)
            assert page.input_value(f"[name={name}]") == before
            page.wait_for_selector(".panel .lengths")


def test_a_memory_limit_above_the_usual_ones_can_be_chosen_where_lengths_need_it(opened: Open) -> None:
    with opened("p=4&effort=drawn&s=zbv~3.9&lengths=list&tokens=100_100_100_9000_100_100_9000_100") as page:
        page.wait_for_selector(".panel .lengths")
        page.wait_for_selector("main[aria-busy=false]")
        assert page.locator(".slot output").inner_text() == "3.90"
        limits = page.locator(".slot input[type=range]")
        assert float(limits.input_value()) == 3.9
        assert float(limits.get_attribute("max") or 0) >= 3.9
        page.fill("[name=share]", "0.1")
        page.wait_for_selector("main[aria-busy=false]")
        limits.focus()
        page.keyboard.press("ArrowLeft")
        assert page.locator(".slot output").inner_text() == "3.89"


def test_both_schedules_results_are_in_sight_on_a_phone(opened: Open) -> None:
    query = f"{LIST}&s=interleaved-1f1b&base=1&links=matrix&latency=0_1~1_0"
    with opened(query, viewport={"width": 390, "height": 844}) as page:
        page.wait_for_selector("#metrics th:has-text('interleaved 1F1B, v = 2 (baseline)')")
        page.wait_for_function("() => document.querySelectorAll('#metrics thead th').length === 3")
        table = page.locator("#metrics .scroll")
        assert table.evaluate("e => e.scrollWidth <= e.clientWidth"), "no column is behind the edge"
