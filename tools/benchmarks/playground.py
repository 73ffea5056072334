"""Measure the playground in headless Chromium, as plain files and with its server: first pictures, searches, frames.

Times begin with the navigation, from a cache that has all files: each row is the best and the median of several visits after the
first one. A frame is the time that the page's own code takes in an animation frame while a zoomed timeline is dragged.

  python -m tools.benchmarks.playground --json docs/benchmarks/data/playground.json
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.docs.playground_app import build

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_ROOT = Path(__file__).parents[2]
_WAIT_MS = 120_000
_SIZE = {"width": 1440, "height": 900}
_MEASURED = "f=18.522&b=18.086&w=9.337&c=0.601&a=0.3664"  # the 1.5B model of arXiv 2401.10241, Table 9
VISITS = {
    "8 x 24": "p=8&m=24&effort=drawn",
    "8 x 24, ZBV, fast": f"p=8&m=24&effort=fast&s=1f1b&s=zbv&{_MEASURED}",
    "8 x 24, auto, fast": f"p=8&m=24&effort=fast&s=auto&{_MEASURED}",
    "64 x 512": "p=64&m=512&effort=drawn&s=1f1b&s=zbv",
}
DRAGGED = "p=32&m=128&effort=drawn&s=zbv"
WATCH = """(() => {
const see = () => {
  if (document.querySelector(".panel .chart")) window.first_ms ??= performance.now();
  if (document.querySelector("main")?.getAttribute("aria-busy") === "false") window.done_ms ??= performance.now();
};
new MutationObserver(see).observe(document, { attributes: true, childList: true, subtree: true });
})()"""
"""Notes when the first picture is there, and when all searches are done."""
DRAG = """async () => {
const frames = [], ask = window.requestAnimationFrame;
window.requestAnimationFrame = (action) => ask((now) => {
  const begin = performance.now();
  action(now);
  frames.push(performance.now() - begin);
});
const chart = document.querySelector(".chart"), box = chart.getBoundingClientRect();
const at = (x) => ({ bubbles: true, clientX: x, clientY: box.top + 20, view: window });
const fire = (type, x) => chart.dispatchEvent(new MouseEvent(type, at(x)));
for (let i = 0; i < 3; i++) chart.dispatchEvent(new KeyboardEvent("keydown", { key: "+", bubbles: true }));
fire("mousedown", box.left + 600);
for (let i = 0; i < 80; i++) {
  await new Promise((done) => setTimeout(done, 20));
  fire("mousemove", box.left + 600 - 4 * i);
}
fire("mouseup", box.left + 280);
window.requestAnimationFrame = ask;
return frames;
}"""
"""Zooms in and drags the first timeline; milliseconds per frame."""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _files() -> Iterator[str]:
    """Serve the plain files."""
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder, "app"), _ROOT / ".pyodide")
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=f"{folder}/app"))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            server.server_close()


@contextmanager
def _server() -> Iterator[str]:
    """Start the playground's own server."""
    command = [sys.executable, "-m", "megatron.zerobubble.playground", "--port", "0"]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[1]
        process.terminate()


def _summed_up(values: list[float]) -> dict[str, float]:
    return {"best_ms": round(min(values), 1), "median_ms": round(statistics.median(values), 1)}


def _visit(browser: Browser, address: str, query: str, visits: int) -> dict[str, Any]:
    context = browser.new_context(viewport=_SIZE)  # type: ignore[arg-type]
    context.set_default_timeout(_WAIT_MS)
    times: list[tuple[float, float]] = []
    for _ in range(1 + visits):
        page = context.new_page()
        page.add_init_script(WATCH)
        page.goto(f"{address}?{query}")
        page.wait_for_selector("main[aria-busy=false]")
        times.append((page.evaluate("window.first_ms"), page.evaluate("window.done_ms")))
        page.wait_for_timeout(500)  # the service worker stores the files of a first visit
        page.close()
    context.close()
    (_, *first), (_, *done) = zip(*times, strict=True)
    return {"first_picture": _summed_up(first), "all_done": _summed_up(done), "first_visit_ms": round(times[0][0], 1)}


def drag(page: Page) -> list[float]:
    """Milliseconds per frame while the first timeline of a page is dragged."""
    times: list[float] = page.evaluate(DRAG)
    return times


def _frames(browser: Browser, address: str) -> dict[str, float]:
    with browser.new_context(viewport=_SIZE) as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(f"{address}?{DRAGGED}")
        page.wait_for_selector("main[aria-busy=false]", timeout=_WAIT_MS)
        times = sorted(drag(page))
        return {"median_ms": round(statistics.median(times), 2), "p95_ms": round(times[len(times) * 95 // 100], 2)}


def measure(visits: int) -> dict[str, Any]:
    """All numbers, by how the page is served."""
    from playwright.sync_api import sync_playwright

    found: dict[str, Any] = {"visits": visits, "cpus": os.cpu_count()}
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        for name, serving in (("files", _files()), ("server", _server())):
            with serving as address:
                rows = {size: _visit(browser, address, query, visits) for size, query in VISITS.items()}
                found[name] = {"visits": rows, "frames, 32 x 128": _frames(browser, address), "load": os.getloadavg()[0]}
        browser.close()
    return found


def main() -> None:
    """Measure, and print or write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visits", type=int, default=5, help="visits per row after the first one (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it to a file")
    args = parser.parse_args()
    text = json.dumps(measure(args.visits), indent=1) + "\n"
    if args.json is None:
        print(text, end="")
    else:
        args.json.write_text(text)


if __name__ == "__main__":
    main()
