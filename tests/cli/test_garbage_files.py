"""Files of links and costs, unequal plans and certificates with anything in them: shown, or refused in one line."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zerobubble.cli.main import main
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.profiling.report import report, reports_to_json
from tests.profiling.support import as_recorded

LINKS: dict[str, Any] = {
    "latency_ms": [[0, 0.5], [1, 0]],
    "gigabytes_per_s": [[0, 1], [2, 0]],
    "message_bytes": [1e6, 2e6, 3e6],
}
LENGTHS = ["--num-ranks", "2", "--microbatch-tokens", "512,4096,96"]
ANYTHING: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 1.5, 1e12, 1e308, 5e-324, 10**12, 10**400, float("nan"), float("inf")),
    *("", "x", "0", "0F0", "\ud800", [], {}, [[]], [1], [[0, 1], [1, 0]], [[0] * 3] * 3, {"a": 1}),
]


def run(*words: str) -> tuple[int, str]:
    """Exit code and error lines of a command; an exception that leaves `main` fails the test."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        return main(words), err.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a plan for lengths and links, its certificate, and a report with costs by length."""
    folder = tmp_path_factory.mktemp("files")
    seen = report(as_recorded("zbv", 2, 3))
    model = LengthModel.of(seen.simulation.costs, tokens=1000, squares=1e6, attention_share=0.1)
    (folder / "report.json").write_text(reports_to_json([seen], None, model))
    (folder / "links.json").write_text(json.dumps(LINKS))
    files = ["--links", "links.json", "--json", "plan.json", "--certificate", "certificate.json"]
    with contextlib.chdir(folder):
        assert run("plan", "--schedule", "zbv", *LENGTHS, *files) == (0, "")
        assert run("verify", "certificate.json") == (0, "")
    return folder


def places(body: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    for key in body if isinstance(body, dict) else range(len(body)) if isinstance(body, list) else ():
        yield body, key
        yield from places(body[key])


def changed(body: Any, random: Random) -> Any:
    """A JSON value with up to three of its values replaced, dropped or doubled."""
    body = copy.deepcopy(body)
    for _ in range(random.randint(1, 3)):
        all_places = list(places(body))
        if not all_places:
            return body
        # Half of the time one of the first keys, which the many ops would hide.
        container, key = random.choice(
            all_places
            if random.random() < 0.5
            else all_places[:1] + [place for place in all_places if isinstance(place[0], dict) or len(place[0]) < 5]
        )
        kind = random.random()
        if kind < 0.8:
            container[key] = copy.deepcopy(random.choice(ANYTHING))
        elif kind < 0.9 or isinstance(container, dict):
            del container[key]
        else:
            container.append(container[key])
    return body


@settings(deadline=None, derandomize=True, database=None, max_examples=150)
@given(seed=st.integers(0, 10**9))
def test_any_file_is_taken_or_refused_in_one_line(folder: Path, seed: int) -> None:
    random = Random(seed)
    names = ("plan.json", "certificate.json", "report.json")
    plan, certificate, seen = (json.loads((folder / name).read_text()) for name in names)
    with contextlib.chdir(folder):
        Path("links.json").write_text(json.dumps(changed(LINKS, random)))
        Path("changed.json").write_text(json.dumps(changed(plan, random)))
        Path("proof.json").write_text(json.dumps(changed(certificate, random)))
        by_length = changed({"costs_by_length": seen["costs_by_length"]}, random)
        Path("seen.json").write_text(json.dumps(by_length if random.random() < 0.1 else seen | by_length))
        name, sizes = random.choice(["zbv", "zb-h1", "1f1b"]), random.choice([[], ["--bytes-per-token", "1000"]])
        planned = run("plan", "--schedule", name, *LENGTHS, "--links", "links.json", *sizes, "--certificate", "again.json")
        measured = run("plan", "--schedule", "zbv", *LENGTHS, "--costs", "seen.json")
        shown = run("show", "changed.json", "--svg", "plan.svg", "--trace", "trace.json")
        exported = run("export", "changed.json", "--torch-csv", "table.csv")
        checked = run("verify", "proof.json")
        if planned[0] == 0:
            assert run("verify", "again.json") == (0, ""), "what is planned can be verified"
    for code, text in (planned, measured, shown, exported, checked):
        assert code in (0, 1, 2)
        assert len(text) < 2_000
        is_grid = code == 2 and text.startswith("zerobubble: error: plan ")
        assert text.count("\n") <= 1 or is_grid, text


@pytest.mark.parametrize("text", ["", "[" * 100_000, "9" * 5000, "null", "[[0, 1], [1, 0]]", '{"latency_ms": "\\ud800"}'])
def test_a_file_that_has_no_links_is_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text(text)
    code, err = run("plan", "--schedule", "zbv", *LENGTHS, "--links", str(file))
    assert (code, err.count("\n")) == (2, 1)
    assert len(err) < 500
