"""Costs, ops and files that nobody means: each is planned, or refused in one line."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.zerobubble import files
from megatron.zerobubble.cli.main import main
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.registry import MAX_OPS, build_plan
from megatron.zerobubble.profiling.report import report, reports_to_json
from tests.profiling.support import as_recorded
from tests.support.odd_values import DEEP, HUGE, NESTED, as_json, changed

pytestmark = pytest.mark.claims(
    "Long runs", "plans of more than 4,000,000 ops, such as 1,000,000 ranks", "rejected in one line before anything is planned"
)


PLAN = ["plan", "--schedule", "zbv", "--num-ranks", "2", "--num-microbatches", "4"]
COSTS = ("--forward-ms", "--backward-ms", "--wgrad-ms", "--comm-ms", "--activation-after-backward")
ODD = ("5e-324", "1e308", "9" * 400, "9" * 5000, "inf", "nan", "-1", "x" * 5000, "a\nb", "\udcff" * 90)
BODY = json.loads(build_plan("zb", num_ranks=2, num_microbatches=2).to_json())


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and error lines of a command."""
    try:
        code = main(words)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    return code, capsys.readouterr().err


def check_refused(words: list[str], capsys: pytest.CaptureFixture[str], *, lines: int = 1) -> str:
    code, text = run(words, capsys)
    assert code == 2
    assert text.count("\n") == lines, text[:500]
    assert text.rstrip("\n").isprintable()
    assert len(text) < 700, text[:900]
    return text


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("flag", [*COSTS, "--memory-limit", "--num-ranks", "--num-microbatches", "--max-pending-backward"])
def test_an_odd_number_is_planned_or_refused_in_one_line(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run([*PLAN, f"{flag}={value}"], capsys)
    if code == 0:
        assert text == ""
        return
    assert text.count("\n") == 1
    assert text.rstrip("\n").isprintable()
    assert len(text) < 500


@pytest.mark.parametrize("value", ["5e-324", "1e308"])
def test_times_that_are_all_odd(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = check_refused([*PLAN, *(f"{flag}={value}" for flag in COSTS[:3])], capsys)
    assert "costs: " in text


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-interleaved", "auto"])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(100_000, 100), (4, 1_000_000), (3000, 3000)])
def test_a_plan_of_too_many_ops_is_refused_before_it_is_made(
    num_ranks: int, num_microbatches: int, schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--num-ranks", str(num_ranks), "--num-microbatches", str(num_microbatches)]
    text = check_refused(["plan", "--schedule", schedule, *sizes], capsys)
    assert f"{num_ranks:,} ranks" in text
    assert f"{num_microbatches:,} microbatches" in text
    assert f"at most {MAX_OPS:,}" in text


FILES = {
    "number of 5,000 digits": '{"format": "zerobubble-plan/1", "num_ranks": ' + HUGE + "}",
    "number of 400 digits": '{"format": "zerobubble-plan/1", "schedule": "x", "num_ranks": ' + "9" * 400 + "}",
    "depth": DEEP,
    "depth in a field": as_json(BODY | {"schedule": NESTED}),
    "format": json.dumps(BODY | {"format": "x\n" * 5000}),
    "schedule with a line break": json.dumps(BODY | {"schedule": "a\nb"}),
}


@pytest.mark.parametrize("command", [["show"], ["export", "--torch-csv", "-"]], ids=lambda words: words[0])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_plan_is_refused_in_one_line(
    name: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(FILES[name])
    check_refused([command[0], str(file), *command[1:]], capsys)


def test_the_numbers_of_a_plan_are_checked_before_lists_are_made_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(BODY | {"format": "zerobubble-plan/2", "num_microbatches": 4 * 10**6, "assignment": [1, 0]}))
    tracemalloc.start()
    try:
        assert "4000000 microbatches; at most 1,000,000" in check_refused(["show", str(file)], capsys)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.claims("Long runs", "a file for a command that has no end, such as `/dev/zero`", "rejected after 256 MiB")
@pytest.mark.parametrize(
    "words",
    [
        ["show", "/dev/zero"],
        ["export", "/dev/zero", "--torch-csv", "-"],
        ["import", "/dev/zero"],
        [*PLAN, "--costs", "/dev/zero"],
        ["layout", "--schedule", "zbv", "--num-ranks", "2", "--num-microbatches", "4", "--layers", "/dev/zero"],
        ["show", "-"],
    ],
    ids=lambda words: f"{words[0]} {words[-2] if words[-2].startswith('--') else words[-1]}",
)
def test_a_file_without_an_end_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(files, "MOST_GIVEN", 2**20)
    with open("/dev/zero", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert "it has more than 1,048,576 bytes" in check_refused(words, capsys)


@pytest.mark.parametrize("text", [HUGE + "F0", "0F" + HUGE, "0F999999999", "x" * 5000, "\ud800", DEEP])
def test_a_damaged_action_table_is_refused_in_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.csv"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    check_refused(["import", str(file)], capsys)


@pytest.mark.parametrize("name", ["a\nb", "x" * 300, "\udcff"])
def test_a_plan_cannot_be_imported_under_an_odd_name(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.csv"
    file.write_text("0F0,0I0,0W0")
    check_refused(["import", str(file), f"--schedule={name}"], capsys)


LINKS: dict[str, Any] = {
    "latency_ms": [[0, 0.5], [1, 0]],
    "gigabytes_per_s": [[0, 1], [2, 0]],
    "message_bytes": [1e6, 2e6, 3e6],
}
LENGTHS = ["--num-ranks", "2", "--microbatch-tokens", "512,4096,96"]


def code_and_errors(*words: str) -> tuple[int, str]:
    """Exit code and error lines of a command; an exception that leaves `main` fails the test."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        return main(words), err.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a plan for lengths and links, and a report with costs by length."""
    folder = tmp_path_factory.mktemp("files")
    seen = report(as_recorded("zbv", 2, 3))
    model = LengthModel.of(seen.simulation.costs, tokens=1000, squares=1e6, attention_share=0.1)
    (folder / "report.json").write_text(reports_to_json([seen], None, model))
    (folder / "links.json").write_text(json.dumps(LINKS))
    files = ["--links", "links.json", "--json", "plan.json"]
    with contextlib.chdir(folder):
        assert code_and_errors("plan", "--schedule", "zbv", *LENGTHS, *files) == (0, "written: plan.json\n")
    return folder


@settings(deadline=None, derandomize=True, database=None, max_examples=150)
@given(seed=st.integers(0, 10**9))
def test_any_file_is_taken_or_refused_in_one_line(folder: Path, seed: int) -> None:
    random = Random(seed)
    plan, seen = (json.loads((folder / name).read_text()) for name in ("plan.json", "report.json"))
    with contextlib.chdir(folder):
        Path("links.json").write_text(as_json(changed(LINKS, random)))
        Path("changed.json").write_text(as_json(changed(plan, random)))
        by_length = changed({"costs_by_length": seen["costs_by_length"]}, random)
        Path("seen.json").write_text(as_json(by_length if random.random() < 0.1 else seen | by_length))
        name, sizes = random.choice(["zbv", "zb-h1", "1f1b"]), random.choice([[], ["--bytes-per-token", "1000"]])
        planned = code_and_errors("plan", "--schedule", name, *LENGTHS, "--links", "links.json", *sizes, "--json", "again.json")
        measured = code_and_errors("plan", "--schedule", "zbv", *LENGTHS, "--costs", "seen.json")
        shown = code_and_errors("show", "changed.json", "--svg", "plan.svg")
        exported = code_and_errors("export", "changed.json", "--torch-csv", "table.csv")
        if planned[0] == 0:
            assert code_and_errors("show", "again.json") == (0, ""), "what is planned can be shown"
    for code, printed in (planned, measured, shown, exported):
        text = re.sub(r"^written: .*\n", "", printed, flags=re.MULTILINE)
        assert code in (0, 2)
        assert len(text) < 2_000
        is_grid = code == 2 and text.startswith("zerobubble: error: plan ")
        assert text.count("\n") <= 1 or is_grid, text
