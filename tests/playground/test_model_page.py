"""A model on the page, in a real browser: presets, assumptions, figures of one's own, memory in GiB; and files that mean harm."""

from __future__ import annotations

import json

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.render.chrome_trace import render_trace
from megatron.zerobubble.playground.models.presets import layered
from tests.playground.pages import SMALL, Open, cells, drop
from tests.profiling.support import as_recorded

pytestmark = [
    pytest.mark.claims(
        "Planning and measuring",
        "a model in the playground: published times, estimates from sizes and a GPU with their error, layers of a file, memory "
        "in GiB, hostile files as text",
        "works, Chromium",
        also=("playground/test_models.py",),
    ),
    pytest.mark.sampled(0.3, group="pages in a browser"),
]


def test_a_published_model_fills_the_form_and_says_so(opened: Open) -> None:
    with opened(SMALL) as page:
        page.select_option("#model > select", "6.2B")
        page.wait_for_function("() => document.querySelector('[name=p]').value === '8'")
        assert [page.input_value(f"[name={name}]") for name in "mfbwca"] == [
            "24",
            "29.718",
            "29.444",
            "19.927",
            "0.527",
            "0.4324",
        ]
        assert page.locator("[data-source=f]").inner_text() == "published"
        page.fill("[name=f]", "30")
        assert page.locator("[data-source=f]").inner_text() == ""
        assert page.input_value("#model > select") == "by hand"


def test_a_model_is_planned_in_gib_and_what_does_not_fit_is_said(opened: Open) -> None:
    with opened("effort=drawn&s=1f1b&s=zbv") as page:
        page.select_option("#model > select", "Llama-3-8B")
        page.wait_for_selector("#metrics tr:has-text('memory of the fullest rank')")
        page.wait_for_selector("main[aria-busy=false]")
        page.wait_for_function("() => document.querySelector('[name=f]').value !== '1'")
        assert page.locator("[data-source=f]").inner_text() == "assumed"
        assert cells(page, "iteration time with the synchronous optimizer")[0].endswith("± 15 %")
        assert page.locator("#metrics .bad").count() == 0
        page.locator("#model-sizes summary").click()
        page.fill("#model-sizes label:has-text('GPU memory, GiB') input", "30")
        page.locator("#model-sizes label:has-text('GPU memory, GiB') input").blur()
        page.wait_for_selector("#metrics .bad:has-text('does not fit 30.0 GiB')")
        page.wait_for_selector("#verdict:has-text('It does not fit: rank 0 needs')")
        before = page.input_value("[name=w]")
        page.fill("[name=w]", "20")
        assert page.locator("[data-source=w]").inner_text() == "entered"
        page.fill("[name=p]", "16")
        page.wait_for_selector(".panel h3:has-text('16 pipeline ranks')")
        page.wait_for_selector("main[aria-busy=false]")
        assert page.input_value("[name=w]") == "20"
        assert before != "20"
        page.select_option("#model-sizes select >> nth=0", label="by their work")
        page.wait_for_selector("main[aria-busy=false]")
        page.wait_for_timeout(400)
        page.wait_for_selector("main[aria-busy=false]")
        reached = page.locator("#metrics").inner_text()
        with opened(page.url.partition("#")[2]) as other:
            other.wait_for_selector("main[aria-busy=false]")
            other.wait_for_function("() => document.querySelector('[data-source=w]').textContent === 'entered'")
            assert other.locator("#metrics").inner_text() == reached
            assert other.input_value("[name=w]") == "20"
        page.locator("#stages summary").click()
        page.click("#stages-fill")
        page.wait_for_selector("#stages-table tbody tr:nth-child(32)")


SLOW = """const ask = window.fetch;
window.fetch = async (address, options) => {
  if (address.endsWith("figures")) await new Promise((done) => setTimeout(done, 600));
  return ask(address, options);
};"""


def test_what_is_being_typed_stays_when_estimates_arrive(opened: Open) -> None:
    with opened("effort=drawn&s=1f1b", script=SLOW) as page:
        page.select_option("#model > select", "Llama-3-8B")
        page.wait_for_function("() => document.querySelector('[name=f]').value !== '1'")
        page.locator("#model-sizes summary").click()
        sizes = {name: page.locator(f"[data-size={name}] input") for name in ("num_layers", "seq_length")}
        before = page.input_value("[name=f]")
        sizes["num_layers"].fill("64")
        sizes["seq_length"].fill("4096")
        page.wait_for_function("before => document.querySelector('[name=f]').value !== before", arg=before)
        assert [field.input_value() for field in sizes.values()] == ["64", "4096"]
        page.locator("[name=m]").fill("")
        before = page.input_value("[name=f]")
        page.wait_for_function("before => document.querySelector('[name=f]').value !== before", arg=before)
        assert page.input_value("[name=m]") == ""
        page.fill("[name=m]", "48")
        page.wait_for_selector(".panel h3:has-text('48 microbatches')")


def test_layers_of_a_file_are_a_model(opened: Open) -> None:
    with opened(SMALL) as page:
        drop(page, "layers.json", json.dumps(layered("Kimi-K2").to_json()))
        page.wait_for_selector("#notes:has-text('layers.json: 61 layers.')")
        page.wait_for_selector("#metrics tr:has-text('memory of the fullest rank')")
        page.wait_for_function("() => document.querySelector('[data-source=f]').textContent === 'measured'")
        assert page.input_value("#model > select") == "layers of a file"


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


EVIL = "<img src=x onerror=window.harmed=1>"


def test_nothing_out_of_a_file_becomes_markup(opened: Open) -> None:
    plan = build_plan("zbv", num_ranks=4, num_microbatches=6)
    text = plan.to_json(costs=CostModel.uniform(plan.placement).to_json())
    trace = json.loads(render_trace([as_recorded("zbv", 4, 6)]))
    for event in trace["traceEvents"]:
        if event.get("cat") == "iteration":
            event["args"]["schedule"] = EVIL
    bench = {"contenders": [{"name": EVIL, "ms": {"value": 3.0}}], "num_ranks": 4, "num_microbatches": 6}
    bench |= {"costs": CostModel.uniform(plan.placement).to_json(), "schedule": EVIL}
    layers = layered("Kimi-K2").to_json()
    files = {
        "plan": json.loads(text) | {"schedule": EVIL},
        "trace": trace,
        "bench": bench,
        "layers": layers | {"layers": [EVIL]},
        "kinds": layers | {"kinds": {EVIL: 3}},
        "unknown": {EVIL: EVIL, "format": EVIL},
        "costs": {"costs": {"forward_ms": EVIL}},
    }
    with opened(SMALL) as page:
        for name, body in files.items():
            drop(page, f"{EVIL}{name}.json", json.dumps(body))
            page.wait_for_function("name => document.querySelector('#notes').textContent.includes(name)", arg=f"{name}.json")
            assert EVIL in page.locator("#notes").inner_text()
        page.evaluate(
            "name => (location.hash = `p=4&m=6&effort=drawn&model=${encodeURIComponent(JSON.stringify({preset: name}))}`)", EVIL
        )
        page.reload()
        page.wait_for_selector(".slot.wrong:has-text('onerror')")
        assert page.locator("img").count() == 0
        assert page.evaluate("window.harmed") is None
