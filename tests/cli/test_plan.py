"""The commands of `zerobubble` that plan."""

import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron.zerobubble.cli.main import main
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS
from megatron.zerobubble.plan.ir import Placement, Plan

ROOT = Path(__file__).parents[2]
SMALL = ["--num-ranks", "2", "--num-microbatches", "4", "--effort", "fast"]
ZBV = ["plan", "--schedule", "zbv", "--num-ranks", "4", "--num-microbatches", "8"]


def test_plan_shows_the_timeline_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("json", "svg")}
    written = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert main([*ZBV, *written]) == 0
    out = capsys.readouterr().out
    assert "zbv: 4 pipeline ranks (PP), 8 microbatches per iteration, 2 stage(s) per rank (V)" in out
    assert (
        "with the synchronous optimizer (makespan), bubble 5.88 %; 24.000 ms with post-validation (span), bubble 0.00 %; " in out
    )
    assert "\nrank 3 " in out
    assert Plan.from_json(files["json"].read_text()).num_ranks == 4
    ElementTree.parse(files["svg"])

    assert main(["show", str(files["json"])]) == 0
    assert capsys.readouterr().out == out


def test_json_dash_prints_the_plan_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ZBV, "--forward-ms", "18.5", "--comm-ms", "0.6", "--json", "-"]) == 0
    captured = capsys.readouterr()
    body = json.loads(captured.out)
    assert body["costs"]["forward_ms"] == [9.25] * 8
    assert body["metrics"]["peak_memory"] == [1.0] * 4
    assert captured.err == ""


def test_as_a_command_with_a_pipe() -> None:
    command = [sys.executable, "-m", "megatron.zerobubble"]
    made = subprocess.run([*command, *ZBV, "--json", "-"], cwd=ROOT, capture_output=True, text=True, check=True)
    shown = subprocess.run([*command, "show", "-"], cwd=ROOT, input=made.stdout, capture_output=True, text=True, check=True)
    assert "bubble 0.00 %" in shown.stdout
    assert "examples:" in subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_a_searched_plan_has_bounds_and_keeps_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--schedule", "zbv", *SMALL, "--memory-limit", "0.75", "--comm-ms", "0.1"]
    assert main([*arguments, "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert max(body["metrics"]["peak_memory"]) <= 0.75 + 1e-9
    assert body["metrics"]["bound_makespan_ms"] <= body["metrics"]["makespan_ms"]
    assert body["metrics"]["span_gap"] >= 0
    assert main(["plan", "--schedule", "v-half", *SMALL, "--memory-limit", "0.1"]) == 2
    assert "the smallest that works is 0.5" in capsys.readouterr().err


def test_auto_chooses_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--schedule", "auto", *SMALL, "--memory-limit", "0.1"]) == 2
    assert "the smallest that works is 0.5" in capsys.readouterr().err
    assert main(["plan", "--schedule", "auto", *SMALL, "--num-chunks", "2"]) == 2
    assert "drop them" in capsys.readouterr().err
    assert main(["plan", "--schedule", "auto", *SMALL, "--memory-limit", "1"]) == 0
    expected = (
        r"^auto chose zbv with 2 virtual stages \(VPP\) per rank: 12.500 ms per iteration with the synchronous optimizer "
        r"\(makespan\); equal: zb-interleaved with 2 virtual stages \(VPP\) per rank \(24 messages, not 16\); runner-up zb: "
        r"13.000 ms \(4.0 % slower\)$"
    )
    shown = capsys.readouterr().out
    assert re.search(expected, shown, re.MULTILINE)
    assert main(["plan", "-p", "2", "-m", "4", "--effort", "fast"]) == 0
    assert capsys.readouterr().out == shown, "auto is the default, and without a limit it means 1F1B's memory"


def test_per_stage_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    costs = CostModel.uniform(Placement.v(2), wgrad_ms=0.5).to_json()
    path.write_text(json.dumps(costs))
    for schedule in ("zbv", "auto"):
        assert main(["plan", "--schedule", schedule, *SMALL, "--costs", str(path), "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["costs"]["wgrad_ms"] == [0.25] * 4
    assert main(["plan", "--schedule", "zb-h1", *SMALL, "--costs", str(path)]) == 2
    assert "one value per stage" in capsys.readouterr().err


def test_costs_are_no_standard_input_which_each_placement_of_auto_would_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(CostModel.uniform(Placement.linear(2)).to_json())))
    assert main(["plan", "--schedule", "auto", "--num-ranks", "2", "--num-microbatches", "3", "--costs", "-"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_the_verdict_of_auto_is_in_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "-p", "2", "-m", "4", "--effort", "fast"]
    assert main([*words, "--json", "-"]) == 0
    verdict = json.loads(capsys.readouterr().out)["metrics"]["verdict"]
    assert verdict.startswith("auto chose ")
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == verdict


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At F = B = W = 1, p = 4, m = 8 by hand: 1F1B takes 3 m + 3 (p - 1), interleaving divides its bubble by V."""
    file = tmp_path / "rows.json"
    assert main(["compare", "-p", "4", "-m", "8", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert [row["schedule"] for row in rows] == ["1f1b", "interleaved-1f1b:4", "zbv", "v-half"]
    assert [row["iteration_ms"] for row in rows[:2]] == [33.0, 24 + 9 / 4]
    assert [row["num_messages"] for row in rows] == [2 * 8 * 3, 2 * 8 * 15, 2 * 8 * 6, 2 * 8 * 6]
    assert rows[1]["speed_up"] == pytest.approx(33 / 26.25)
    assert rows[2]["peak_memory"] == 1.0
    assert rows[3]["peak_memory"] < 0.8
    assert "1f1b                           33.000     1.000   27.27 %   1.000        48\n" in capsys.readouterr().out
    limited = ["compare", "-p", "2", "-m", "4", "--effort", "fast", "--schedules", "zbv,1f1b,auto", "--memory-limit", "0.75"]
    assert main(limited) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "memory" in lines[3]
    assert lines[4].startswith("auto (")
    assert main([*limited, "--schedules", "1f1b,zbv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("1f1b (no limit) "), "the base, which exceeds it"
    assert float(lines[3].split()[5]) <= 0.75
    assert main(["compare", "-p", "2", "-m", "4", "--schedules", "1f1b,zvb"]) == 2
    assert "did you mean 'zbv'" in capsys.readouterr().err


def test_torch_tables_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, table = tmp_path / "plan.json", tmp_path / "table.csv"
    for schedule in ("zbv", "interleaved-1f1b"):
        assert main(["plan", "--schedule", schedule, "--num-ranks", "2", "--num-microbatches", "4", "--json", str(plan)]) == 0
        assert main(["export", str(plan), "--torch-csv", str(table)]) == 0
        capsys.readouterr()
        assert main(["import", str(table), "--schedule", schedule]) == 0
        assert Plan.from_json(capsys.readouterr().out) == Plan.from_json(plan.read_text())
    assert table.read_text().startswith("0F0,0F1,2F0")
    for text, message in (("0F0,0X0", "'0X0' is not"), ("", "no actions"), ("0F0\n0I0", "stage 0 on rank 0"), ("1F0", "stage 0")):
        table.write_text(text)
        assert main(["import", str(table)]) == 2
        assert message in capsys.readouterr().err


UNEQUAL = ["plan", "--schedule", "zbv", "--num-ranks", "2", "--effort", "fast", "--microbatch-tokens"]


def test_lengths_are_assigned_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, target = tmp_path / "lengths.txt", tmp_path / "plan.json"
    lengths.write_text("[512, 4096, 700,\n1800, 1024, 96]")
    assert main([*UNEQUAL, str(lengths), "--attention-share", "0.1", "--json", str(target)]) == 0
    out = capsys.readouterr().out
    body = json.loads(target.read_text())
    assert body["format"] == "zerobubble-plan/2"
    assert sorted(body["assignment"]) == list(range(6))
    assert body["costs"]["microbatches"]["tokens"] == [512, 4096, 700, 1800, 1024, 96]
    assert "microbatches of 96 to 4096 tokens (mean 1371), idle share " in out
    assert f"in the order of the data: {' '.join(map(str, body['assignment']))}\n" in out
    assert main([*UNEQUAL, "512,4096,700,1800,1024,96", "--attention-share", "0.1"]) == 0
    assert capsys.readouterr().out == out
    svg = tmp_path / "plan.svg"
    assert main(["show", str(target), "--svg", str(svg)]) == 0
    assert capsys.readouterr().out == out
    assert "microbatches of 96 to 4096 tokens (mean 1371), idle share " in svg.read_text()
    assert svg.read_text().count("(microbatch 1 of the data, 4096 tokens)") == 12


def test_a_torch_table_has_the_order_and_not_the_assignment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, table = tmp_path / "plan.json", tmp_path / "table.csv"
    assert main([*UNEQUAL, "512,4096,700,1800", "--json", str(plan)]) == 0
    capsys.readouterr()
    assert main(["export", str(plan), "--torch-csv", str(table)]) == 0
    err = capsys.readouterr().err
    assert err == f"written: {table}\nthe table has the order of ops, not the plan's assignment: its microbatches are slots\n"
    assert main(["import", str(table), "--schedule", "zbv"]) == 0
    again = Plan.from_json(capsys.readouterr().out)
    assert (again.ops, again.assignment) == (Plan.from_json(plan.read_text()).ops, ())


def test_links_are_read_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links = tmp_path / "links.json"
    links.write_text(json.dumps({"latency_ms": [[0, 0.5], [1.0, 0]], "gigabytes_per_s": [[0, 1], [2, 0]]}))
    sizes = ["--links", str(links), "--bytes-per-token", "1000"]
    assert main([*UNEQUAL, "1000,2000,3000", *sizes, "--memory-limit", "1.5", "--effort", "fast", "--json", "-"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["costs"]["links"]["message_bytes"] == [1e6, 2e6, 3e6]
    assert max(body["metrics"]["peak_memory"]) <= 1.5 + 1e-9
    assert main([*UNEQUAL, "1000,2000,3000", *sizes]) == 0
    assert "links of 2.000 to 2.500 ms per mean message between neighboring ranks" in capsys.readouterr().out
    auto = ["plan", "--schedule", "auto", "--num-ranks", "2", "--num-microbatches", "3", "--effort", "fast", "--links"]
    links.write_text(json.dumps({"latency_ms": [[0, 0.5], [1.0, 0]]}))
    assert main([*auto, str(links)]) == 0
    assert "links of 0.500 to 1.000 ms" in capsys.readouterr().out


NO_LENGTHS = [*UNEQUAL[:-1], "--num-microbatches", "4"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*ZBV, "--schedule", "zb-v"], "did you mean 'zbv'"),
        ([*ZBV, "--schedule", "zvb"], "did you mean 'zbv'"),
        ([*ZBV, "--num-ranks", "0"], "num_ranks is 0"),
        ([*ZBV, "--num-chunks", "3"], "drop num_chunks"),
        ([*ZBV, "--forward-ms", "-1"], "forward_ms is -1.0"),
        ([*ZBV, "--wgrad-ms", "nan"], "wgrad_ms is nan"),
        ([*ZBV, "--max-pending-backward", "2p"], "drop max_pending_backward"),
        ([*ZBV, "--max-pending-backward", "some"], "1p or 2p"),
        ([*ZBV, "--json", "/no/such/folder/plan.json"], "/no/such/folder is not a writable directory"),
        ([*UNEQUAL, "512,-7"], "--microbatch-tokens is '512,-7'"),
        ([*UNEQUAL, "512," + "9" * 400], "tokens; give a whole number, at most 1e+12"),
        ([*UNEQUAL, "512,x," * 2000], "give whole numbers separated by commas, or a file of them"),
        ([*UNEQUAL, "512,700", "--num-microbatches", "3"], "has 2 lengths and --num-microbatches is 3"),
        ([*UNEQUAL, "9,9,100000", "--memory-limit", "0.5"], "microbatch 2 has 100000 tokens and the limit holds at most "),
        ([*UNEQUAL, "512,700", "--links", "LINKS"], "has links of 3 ranks and --num-ranks is 2"),
        ([*UNEQUAL, "512,700", "--links", "LINKS", "--num-ranks", "3"], "give --bytes-per-token with --microbatch-tokens"),
        ([*UNEQUAL, "512,700", "--costs", "COSTS"], "drop the lengths (--microbatch-tokens)"),
        ([*UNEQUAL, "512,700", "--bytes-per-token", "1000"], "--bytes-per-token is 1000 and there are no tokens or no links"),
        (
            [*NO_LENGTHS, "--attention-share", "0.1"],
            "is 0.1 and all microbatches are equal and whole; give --microbatch-tokens or --slices",
        ),
        ([*NO_LENGTHS, "--attention-share", "nan"], "--attention-share is nan and all"),
        ([*NO_LENGTHS, "--bytes-per-token", "1000"], "no tokens or no links; give --microbatch-tokens and --links"),
        (UNEQUAL[:-1], "give --num-microbatches, or --microbatch-tokens"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    matrix = [[1.0] * 3] * 3
    files = {"LINKS": tmp_path / "links.json", "COSTS": tmp_path / "costs.json"}
    files["LINKS"].write_text(json.dumps({"latency_ms": matrix, "gigabytes_per_s": matrix}))
    lists = {name: [[1.0, 2.0]] * 4 for name in COST_LISTS}
    means = {name: [1.5] * 4 for name in COST_LISTS}
    files["COSTS"].write_text(json.dumps(means | {"microbatches": lists}))
    assert main([str(files.get(word, word)) for word in words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err
