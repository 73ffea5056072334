"""The page from plain files: the planner runs in the browser, finds what the native one finds, and asks nobody."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.render.chrome_trace import render_trace
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.playground.exports import Export
from megatron.zerobubble.playground.models.presets import SHAPES, layered
from megatron.zerobubble.playground.tasks import TASKS, run_task
from megatron.zerobubble.profiling.report import report, reports_to_json
from tests.playground.conftest import ROOT, Server, end, start
from tests.playground.firefox import Firefox, firefox, path
from tests.playground.pages import Open, cells, drop
from tests.profiling.support import as_recorded
from tools.docs.playground_app import build

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MIB = 2**20
POLICY = "content-security-policy"
MEASURED = {"forward_ms": 18.5, "backward_ms": 18.1, "wgrad_ms": 9.3, "comm_ms": 0.6, "activation_after_backward": 0.37}
SMALL = {"num_ranks": 4, "num_microbatches": 8, "effort": "fast"}
# Random blocks that have been the same on one C library only.
MEASURED_COSTS = CostModel.uniform(Placement.v(4), **MEASURED)
PROBLEMS: list[dict[str, Any]] = [
    SMALL | {"schedule": "v-half", "times": MEASURED},
    SMALL | {"schedule": "zbv", "times": MEASURED, "num_microbatches": 24},
    SMALL | {"schedule": "zb", "num_microbatches": 13, "memory_limit": 1.2, "objective": "span", "seed": 7},
    SMALL | {"schedule": "zbv", "all_to_all": 0.4, "memory_limit": 1.0},
    SMALL | {"schedule": "auto", "num_ranks": 2, "num_microbatches": 5, "times": MEASURED},
    SMALL | {"schedule": "zbv", "num_slices": 4, "num_microbatches": 4, "memory_limit": 0.5, "model": {"seq_length": 32768}},
]
IN_PAGE = """async (requests) => {
  const { choices, listen } = await import("./js/api.js");
  await choices();
  const found = [];
  for (const [task, body] of requests) {
    const events = [];
    for await (const event of listen(task, body)) if (event.event !== "tick") events.push(event);
    found.push(events);
  }
  return found;
}"""
pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "the playground as plain files: the planner and its core as WebAssembly in a worker, the native core's plans bit for bit, "
    "stopped searches, offline after the first visit, no request to elsewhere",
    "works, Chromium and Firefox",
    also=("playground",),
)


_SOME = pytest.mark.sampled(0.2, group="pages in a browser")


@pytest.fixture(scope="module")
def app(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files; without a browser none are built."""
    folder = tmp_path_factory.mktemp("app")
    try:
        build(folder, ROOT / ".pyodide")
    except FileNotFoundError as error:  # without npm or node
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"the plain files cannot be built: {error}")
    return folder


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server(app: Path) -> Iterator[Server]:
    """A web server that knows nothing but files, in a folder, as the documentation site has it."""
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(app.parent)))
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield Server(address=f"http://127.0.0.1:{running.server_port}/{app.name}", port=running.server_port, pid=0)
    running.shutdown()
    thread.join()
    running.server_close()


def is_kept(page: Page) -> None:
    """Wait until the service worker answers for the page."""
    page.wait_for_function("() => navigator.serviceWorker.controller?.state === 'activated'")


@_SOME
def test_plans_are_those_of_the_native_core(opened: Open) -> None:
    with opened("p=2&m=2&effort=drawn") as page:
        found = page.evaluate(IN_PAGE, [["search", problem] for problem in PROBLEMS])
    for problem, events in zip(PROBLEMS, found, strict=True):
        native = [json.loads(json.dumps(event)) for event in run_task("search", json.dumps(problem))]
        assert events == native, problem
        assert events[-1]["spent"] == 1.0


def questions() -> list[tuple[str, str]]:
    """At least one for every other task, and a file of every kind."""
    size = {"num_ranks": 4, "num_microbatches": 8, "effort": "drawn"}
    gemma, drawn = {**SHAPES["Gemma-2-9B"]["model"], "is_balanced": 1}, [size | {"schedule": name} for name in ("1f1b", "zbv")]
    simulation, run = simulate(build_plan("zbv", num_ranks=4, num_microbatches=8), MEASURED_COSTS), as_recorded("zbv", 4, 8)
    plan, trace = simulation.plan.to_json(costs=MEASURED_COSTS.to_json()), render_trace([run])
    files = [
        plan,
        reports_to_json([report(run)]),
        trace,
        json.dumps(layered("Kimi-K2").to_json()),
        json.dumps({"contenders": [], "num_ranks": 4, "num_microbatches": 8, "costs": MEASURED_COSTS.to_json()}),
    ]
    asked = [
        ("figures", {**drawn[0], "model": gemma}),
        ("search", {**drawn[1], "model": {"preset": "DeepSeek-V3", "is_balanced": 1}}),
        ("pareto", {**size, "effort": "fast", "schedule": "auto", "memory_limits": [0.6, 1.0]}),
        ("show", {"plan": plan}),
        *(("export", {"plan": plan, "form": form.value}) for form in Export),
    ]
    return [*((task, json.dumps(body)) for task, body in asked), *(("open", file) for file in files)]


@_SOME
def test_every_task_answers_as_on_a_server(opened: Open) -> None:
    asked = questions()
    assert {task for task, _ in asked} == set(TASKS)
    with opened("p=2&m=2&effort=drawn") as page:
        found = page.evaluate(IN_PAGE, asked)
    for (task, body), events in zip(asked, found, strict=True):
        native = [json.loads(json.dumps(event)) for event in run_task(task, body)]
        assert events == native, (task, body[:80])


@_SOME
def test_the_page_works_without_a_network_after_the_first_visit(opened: Open, server: Server) -> None:
    with opened("p=4&m=6&s=zbv") as page:
        asked: list[str] = []
        policies: list[str | None] = []
        page.context.on("request", lambda request: asked.append(request.url))
        page.on("response", lambda each: policies.append(each.headers.get(POLICY)) if "/worker.js" in each.url else None)
        page.reload()
        is_kept(page)
        page.wait_for_selector("main[aria-busy=false]")
        reached = cells(page, "bubble")
        page.context.set_offline(True)
        page.reload()
        page.wait_for_selector("main[aria-busy=false]")
        assert cells(page, "bubble") == reached
        page.fill("[name=m]", "9")
        page.wait_for_function("before => !document.querySelector('#metrics').innerText.includes(before)", arg=reached[0])
        assert len(asked) > 40
        assert all(address.startswith(f"{server.address}/") for address in asked)
        assert (policies[-1] or "").startswith("default-src 'none'; script-src 'self'"), "a worker does not have its page's"


@_SOME
def test_a_stopped_search_keeps_the_best_so_far_and_the_next_one_begins(opened: Open) -> None:
    with opened("p=8&m=24&f=18.5&b=18.1&w=9.3&c=0.6&a=0.37&effort=max&s=v-half") as page:
        page.wait_for_selector(".slot .stop:not([hidden])")
        text = build_plan("zbv", num_ranks=2, num_microbatches=3).to_json()
        drop(page, "plan.json", text)
        page.wait_for_selector(".panel:has-text('plan.json'), .slot:has-text('plan.json')")
        page.locator(".slot .stop").first.click()
        page.wait_for_selector(".slot .status:has-text('stopped; this is the best so far')")
        page.select_option("[name=effort]", "drawn")
        page.wait_for_selector("main[aria-busy=false]")
        assert float(cells(page, "bubble")[0].split()[0]) < 30


@_SOME
def test_a_planner_that_cannot_be_loaded_is_reported_and_other_sites_are_out_of_reach(browser: Browser, server: Server) -> None:
    with browser.new_context(service_workers="block") as context:
        page = context.new_page()
        logged: list[str] = []
        page.on("console", lambda message: logged.append(message.text))
        page.route("**/snapshot.bin", lambda route: route.fulfill(status=404))
        page.goto(f"{server.address}/?p=2&m=2")
        page.wait_for_selector(".slot.wrong:has-text('the planner cannot be loaded: vendor/pyodide/snapshot.bin')")
        assert page.evaluate("() => fetch('http://127.0.0.1:9/').catch(({ message }) => message)") == "Failed to fetch"
        assert any("violates the following Content Security Policy" in message for message in logged)


@_SOME
def test_the_files_stay_small(app: Path) -> None:
    sizes = {path.relative_to(app).as_posix(): path.stat().st_size for path in app.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 24 * MIB
    assert sizes["core.wasm"] < 64 * 1024
    assert sizes["vendor/pyodide/snapshot.bin"] < 9 * MIB


DROP = """const [name, text] = arguments, data = new DataTransfer();
data.items.add(new File([text], name));
document.querySelector("main").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));"""
CHOOSE = """const each = document.querySelector("#model > select");
each.value = arguments[0];
each.dispatchEvent(new Event("change"));"""
PLANNED = "document.querySelector('main')?.getAttribute('aria-busy') === 'false'"
PICTURE = "return document.querySelector('.chart canvas.passes').toDataURL()"


def smoke(window: Firefox, address: str) -> list[str]:
    """Plan for a model, open a report, move in the picture; what the page says on the way."""
    window.open(f"{address}/#p=8&m=24&effort=fast&f=18.5&b=18.1&w=9.3&c=0.6&a=0.37&s=1f1b&s=v-half")
    window.until(PLANNED)
    said = [window.run("return document.querySelector('#verdict').textContent")]
    window.run(CHOOSE, "Gemma-2-9B")
    window.until("document.querySelector('#metrics .bad')?.textContent.includes('does not fit 79.0 GiB')")
    window.until(PLANNED)
    said.append(window.run("return document.querySelector('#metrics').innerText"))
    window.run(DROP, "plan.json", build_plan("zbv", num_ranks=2, num_microbatches=3).to_json())
    said.append(window.until("document.querySelector('#notes').textContent"))
    before = window.run(PICTURE)
    window.run("document.querySelector('.chart').dispatchEvent(new KeyboardEvent('keydown', { key: '+', bubbles: true }))")
    window.until(f"(() => {{ {PICTURE} }})() !== {json.dumps(before)}")
    assert window.run("return document.querySelectorAll('.slot.wrong').length") == 0
    return said


@_SOME
def test_firefox_shows_what_chromium_shows_with_a_server_and_without(
    opened: Open, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if path() is None:
        pytest.skip("no Firefox on this machine: apt-get install firefox-esr")
    process, native = start()
    with firefox(tmp_path_factory.mktemp("firefox") / "profile") as window:
        said = [smoke(window, each.address) for each in (server, native)]
    end(process)
    assert said[0] == said[1]
    with opened("p=8&m=24&effort=fast&f=18.5&b=18.1&w=9.3&c=0.6&a=0.37&s=1f1b&s=v-half") as page:
        page.wait_for_selector("main[aria-busy=false]")
        assert page.locator("#verdict").inner_text() == said[0][0]
    assert said[0][2].startswith("plan.json: opened.")
