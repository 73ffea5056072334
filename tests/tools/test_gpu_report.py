"""The first hour on GPUs. Steps here are small commands that stand for the real ones, which need GPUs.

`make gpu-rehearsal` runs the real ones with tiny sizes on the CPU.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest

from tools.gpu import __main__ as tool
from tools.gpu import machine
from tools.gpu.report import measured
from tools.gpu.runner import Status, run
from tools.gpu.steps import Machine, Step, hour, markdown

ROOT = Path(__file__).parents[2]
EIGHT = Machine(num_ranks=8, has_fp8=True)


def step(name: str, code: str = "", *, num_gpus: int = 1, minutes: float = 1, program: str | None = None) -> Step:
    command = (sys.executable, "-c", code)
    return Step(
        name=name,
        files=name.replace(" ", "-"),
        command=command,
        num_gpus=num_gpus,
        program=program,
        minutes=minutes,
        expected=f"{name} is right",
        deviation=f"{name} is wrong",
    )


STEPS = (
    step("good", "print('\\x1b[32m===== 3 passed, 1 skipped in 0.10s =====\\x1b[0m')"),
    step("bad", "print('a reason'); raise SystemExit(3)"),
    step("many", "print('never')", num_gpus=2),
    step("profile", "print('never')", program="no-such-program"),
    step("last", "import os; print(os.environ['PATH'].split(os.pathsep)[0])"),
)


def test_a_report_of_what_passed_failed_and_did_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    out.mkdir()
    assert tool.report_on(STEPS, out, num_gpus=1) == 1
    report = (out / "report.txt").read_text()
    for line in (
        "make gpu-hour",
        "torch ",
        "not installed",
        "good: passed, ",
        "3 passed, 1 skipped",
        "bad: FAILED, ",
        "  expected: bad is right",
        "  it means: bad is wrong",
        "  | a reason",
        "many: not run, needs 2 GPUs, and there is 1",
        "profile: not run, needs no-such-program, which is not on the PATH",
        "1 of 3 steps failed. The first is 'bad': what comes after it may follow from it.",
        f"Send back: {out}.zip, which has this report, every log and every result.",
    ):
        assert line in report, line
    assert (out / "good.log").read_text() == "===== 3 passed, 1 skipped in 0.10s =====\n"
    assert (out / "last.log").read_text().strip() == str(Path(sys.executable).parent)
    assert set(zipfile.ZipFile(f"{out}.zip").namelist()) >= {"report.txt", "good.log", "bad.log"}
    shown = capsys.readouterr().out
    assert "missing: transformer_engine.pytorch: layers are megatron-core's own" in shown.partition("[1/5]")[0]
    assert "[1/5] good (at most 1 min; good.log)" in shown
    assert "== good: passed" in shown.partition("[2/5]")[0], "each result comes at once"
    assert shown.endswith(report)


def test_a_step_that_hangs_is_ended_with_its_processes(tmp_path: Path) -> None:
    code = "import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', 'input()'])"
    (outcome,) = run([step("hangs", code, minutes=0)], tmp_path, num_gpus=1, root=ROOT, minutes=60)
    assert outcome.status is Status.LATE


def test_when_the_hour_is_over_no_step_begins(tmp_path: Path) -> None:
    (outcome,) = run([step("late")], tmp_path, num_gpus=1, root=ROOT, minutes=-1)
    assert (outcome.status, outcome.tail) == (Status.SKIPPED, ("the time was over",))


def test_measured_stands_against_predicted(tmp_path: Path) -> None:
    (tmp_path / "one_gpu.md").write_text("## Passes\n\n| s |\n| --- |\n\n- s = 4,096: (B + W) / full backward 1.050: MISSED\n")
    (tmp_path / "links.log").write_text("NCCL INFO x\nlinks: 190.1 GB/s one way, 33.6 MB\n")
    gain = {"value": 1.25, "low": 1.2, "high": 1.3}
    ours = {"name": "zbv", "ms": {"value": 80.0}, "speed_up": gain, "predicted_speed_up": 1.27, "failure": None}
    refused = {"name": "auto", "ms": None, "speed_up": None, "predicted_speed_up": None, "failure": "too few layers"}
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench/bench.json").write_text(json.dumps({"contenders": [ours, refused]}))
    for name, apart, ms in (("job-x-1f1b", 0.0, 100), ("job-x-zbv", 0.5, 100), ("sweep-1f1b", 0.0, 100), ("sweep-zbv", 0.0, 80)):
        rows = [{"loss": 5.0 - n + apart, "iteration_ms": ms} for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for files, lines in {
        "one_gpu": ["s = 4,096: (B + W) / full backward 1.050: MISSED"],
        "links": ["links: 190.1 GB/s one way, 33.6 MB"],
        "bench": ["zbv: 80.0 ms, 1.250 (1.200 to 1.300) times as fast, predicted 1.270", "auto: too few layers"],
        "job-x-zbv": ["loss 5.5000 to 2.5000, at most 0.5 from 1F1B's"],
        "sweep-zbv": ["80.0 ms per iteration, 1F1B 100.0 ms: 1.250 times as fast"],
        "none": [],
    }.items():
        assert measured(step(files), tmp_path) == lines


def test_without_a_gpu_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "num_gpus", lambda: 0)
    assert tool.main(["hour"]) == 2
    assert capsys.readouterr().err.endswith("sees no GPU here; make gpu-rehearsal tries the steps on the CPU\n")


def test_the_page_has_every_step() -> None:
    assert markdown(hour(EIGHT)) in (ROOT / "docs/benchmarks/gpu.md").read_text(), "paste what `python -m tools.gpu steps` prints"


def test_every_file_with_a_gpu_test_is_in_a_step() -> None:
    commands = [word for each in hour(EIGHT) for word in each.command]
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if re.search(r"pytest\.mark\.gpu\b", path.read_text()):
            assert str(path.relative_to(ROOT)) in commands, path


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_steps_have_files_of_their_own_and_fewer_gpus_get_fewer_steps(num_gpus: int) -> None:
    num_ranks = 4 if num_gpus == 1 else num_gpus
    steps = hour(Machine(num_ranks=num_ranks, has_fp8=True, shares=num_gpus == 1))
    files = [each.files for each in steps]
    assert len(set(files)) == len(files)
    for word in (word for each in steps for word in each.command):
        assert not word.startswith("tests/") or (ROOT / word).is_file(), word
    possible = [each for each in steps if each.num_gpus <= num_ranks]
    assert len(possible) == {1: 11, 2: 17, 4: 19, 8: 19}[num_gpus], [each.name for each in possible]
    jobs = [each for each in steps if each.files.startswith("job-")]
    assert all(("tools.gpu.share" in each.command) == (num_gpus == 1) for each in jobs)
