"""The report of the first hour on GPUs. Steps here are small commands that stand for the real ones, which need GPUs."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest

from tools.gpu import __main__ as tool
from tools.gpu import machine
from tools.gpu.report import text
from tools.gpu.runner import Status, run
from tools.gpu.steps import BENCHES, SUITES, TESTS, Step, markdown

ROOT = Path(__file__).parents[2]


def step(name: str, code: str, *, num_gpus: int = 1, minutes: int = 1) -> Step:
    command = (sys.executable, "-c", code)
    return Step(
        name=name,
        files=name.replace(" ", "-"),
        command=command,
        num_gpus=num_gpus,
        minutes=minutes,
        expected=f"{name} is right",
        deviation=f"{name} is wrong",
    )


STEPS = (
    step("good", "print('\\x1b[32m===== 3 passed, 1 skipped in 0.10s =====\\x1b[0m')"),
    step("bad", "print('a reason'); raise SystemExit(3)"),
    step("many", "print('never')", num_gpus=2),
    step("last", "import os; print(os.environ['PATH'].split(os.pathsep)[0])"),
)


def test_a_report_of_what_passed_failed_and_did_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SUITES, "test", STEPS)
    out = tmp_path / "report"
    out.mkdir()
    assert tool.report_on("test", out, num_gpus=1) == 1
    report = (out / "report.txt").read_text()
    for line in (
        "make test-gpu",
        "torch ",
        "not installed",
        "good: passed, ",
        "3 passed, 1 skipped",
        "bad: FAILED, ",
        "  expected: bad is right",
        "  it means: bad is wrong",
        "  | a reason",
        "many: not run, needs 2 GPUs, and there is 1",
        "1 of 3 steps failed. The first is 'bad': what comes after it may follow from it.",
        f"Send back: {out}.zip, which has this report, every log and every result.",
    ):
        assert line in report, line
    assert (out / "good.log").read_text() == "===== 3 passed, 1 skipped in 0.10s =====\n"
    assert (out / "last.log").read_text().strip() == str(Path(sys.executable).parent)
    assert set(zipfile.ZipFile(f"{out}.zip").namelist()) >= {"report.txt", "good.log", "bad.log"}
    shown = capsys.readouterr().out
    assert "[1/4] good (at most 1 min; good.log)" in shown
    assert shown.endswith(report)


def test_a_step_that_hangs_is_ended_with_its_processes(tmp_path: Path) -> None:
    code = "import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', 'input()'])"
    (outcome,) = run([step("hangs", code, minutes=0)], tmp_path, num_gpus=1, root=ROOT)
    assert outcome.status is Status.LATE


def test_measured_stands_against_predicted(tmp_path: Path) -> None:
    verdict = {"what": "(B + W) / full backward", "measured": 1.05, "target": "<= 1.02", "is_met": False}
    (tmp_path / "split.json").write_text(json.dumps({"shapes": [{"shape": {"name": "1.5B"}, "verdicts": [verdict]}]}))
    for name, apart in (("job-1f1b", 0.0), ("job-zb-h1", 0.5)):
        (tmp_path / name).mkdir()
        rows = [{"loss": 5.0 - n + apart, "iteration_ms": 110.0, "tokens_per_s": 1000.0} for n in range(4)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "job-zb-h1.log").write_text(
        "re-planned with profiled timings in 0.1 s: predicted 120.0 ms per iteration with the current order (bubble 3.0%), "
        "100.0 ms with the new one (bubble 1.0%)\n"
    )
    report = text("bench", "a machine", [], tmp_path, 0)
    for line in (
        "1.5B: (B + W) / full backward 1.050, target <= 1.02  MISSED",
        "job-1f1b: 110.0 ms per iteration; 1000 tokens/s; loss 5.0000 to 2.0000",
        "job-zb-h1: 110.0 ms per iteration, predicted 100.0 ms for the passes (+10.0 %); 1000 tokens/s; loss 5.5000 to 2.5000",
        "job-zb-h1: losses at most 0.5 from job-1f1b's, expected 0.01 or less  MISSED",
    ):
        assert f"  {line}\n" in report, line


def test_without_a_gpu_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    assert tool.main(["test"]) == 2
    assert capsys.readouterr().err.endswith("sees no GPU here; make test needs none\n")


def test_the_page_has_every_step() -> None:
    page = (ROOT / "docs/benchmarks/gpu.md").read_text()
    for steps in SUITES.values():
        assert markdown(steps) in page, "paste what `python -m tools.gpu steps` prints"


def test_every_file_with_a_gpu_test_is_in_a_step() -> None:
    commands = [word for each in TESTS for word in each.command]
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if re.search(r"pytest\.mark\.(multi_)?gpu\b", path.read_text()):
            assert str(path.relative_to(ROOT)) in commands, path


def test_what_steps_name_exists() -> None:
    files = [each.files for steps in SUITES.values() for each in steps]
    assert len(set(files)) == len(files)
    for word in (word for each in (*TESTS, *BENCHES) for word in each.command):
        if word.startswith(("tests/", "examples/")):
            assert (ROOT / word).is_file(), word
