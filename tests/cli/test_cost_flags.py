"""A run's `report.json` as the file of --costs: its last iteration's costs, or for a list of lengths its costs by length."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.cli.main import main
from megatron.zerobubble.plan.costs.length_model import LengthModel, Work
from megatron.zerobubble.plan.costs.lengths_and_links import LengthsAndLinks
from megatron.zerobubble.profiling.report import report, reports_to_json
from tests.profiling.support import as_recorded

TOKENS = (512, 4096, 700, 1800, 1024, 96)
PLAN = ["plan", "--schedule", "zbv", "--num-ranks", "2"]
LENGTHS = [*PLAN, "--microbatch-tokens", ",".join(map(str, TOKENS))]
SEEN = report(as_recorded("zbv", 2, 6))
MODEL = LengthModel(
    forward_ms=(Work(0.1, 0.01, 1e-6),) * 4,
    backward_ms=(Work(0.2, 0.01, 2e-6),) * 3 + (Work(0.2, 0.02, 2e-6),),
    wgrad_ms=(Work(0.0, 0.01, 0.0),) * 4,
    activation=(Work(0.125, 0.375 / 1024, 0.0),) * 4,
    activation_after_backward=(Work(0.0, 0.25 / 1024, 0.0),) * 4,
)
"""Of stages of which two are a rank of which a microbatch of 1,024 tokens holds 1."""


@pytest.fixture
def file(tmp_path: Path) -> str:
    """The report of a run with costs by length."""
    return written(tmp_path, json.loads(reports_to_json([SEEN], None, MODEL)))


def written(folder: Path, body: dict[str, Any]) -> str:
    (folder / "report.json").write_text(json.dumps(body))
    return str(folder / "report.json")


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The plan file that a command prints."""
    capsys.readouterr()
    assert main([*words, "--json", "-"]) == 0
    body: dict[str, Any] = json.loads(capsys.readouterr().out)
    return body


def test_lengths_are_planned_with_the_measured_costs(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    costs = planned(capsys, *LENGTHS, "--costs", file)["costs"]
    assert costs["microbatches"] == MODEL.costs(TOKENS).to_json()["microbatches"]
    assert costs["comm_ms"] == SEEN.simulation.costs.comm_ms == pytest.approx(0.25)


def test_the_links_of_the_flags_count(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links = tmp_path / "links.json"
    links.write_text(json.dumps({"latency_ms": [[0, 0.5], [1.0, 0]]}))
    costs = planned(capsys, *LENGTHS, "--costs", file, "--links", str(links))["costs"]
    assert costs["links"]["latency_ms"] == [[0, 0.5], [1.0, 0]]
    assert costs["microbatches"] == MODEL.costs(TOKENS).to_json()["microbatches"]


def test_equal_lengths_have_the_costs_of_that_length(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    body = planned(capsys, *PLAN, "--microbatch-tokens", "512,512,512,512", "--costs", file)
    assert body["format"] == "zerobubble-plan/1"
    assert body["costs"]["forward_ms"] == [MODEL.forward_ms[0].at(512, 512.0**2)] * 4
    assert planned(capsys, *PLAN, "--num-microbatches", "4", "--costs", file)["ops"] == body["ops"]


def test_without_lengths_the_last_iteration_counts(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    equal = [*PLAN, "--num-microbatches", "6", "--costs"]
    assert planned(capsys, *equal, file)["costs"] == SEEN.simulation.costs.to_json()
    assert main([*equal, file]) == 0
    assert "costs by length" not in capsys.readouterr().out
    without = written(tmp_path, json.loads(reports_to_json([report(as_recorded("zb-h1", 4, 6)), SEEN])))
    assert planned(capsys, *equal, without)["costs"] == SEEN.simulation.costs.to_json()
    scaled = LengthsAndLinks(TOKENS, 0.1).applied(SEEN.simulation.costs).to_json()
    assert planned(capsys, *LENGTHS, "--attention-share", "0.1", "--costs", without)["costs"] == scaled


def test_a_run_of_unequal_microbatches_has_costs_of_its_own_that_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unequal = LengthsAndLinks((96, 1024, 512, 640)).applied(SEEN.simulation.costs)
    seen = replace(SEEN, simulation=replace(SEEN.simulation, costs=unequal))
    file = written(tmp_path, json.loads(reports_to_json([seen], None, MODEL)))
    assert planned(capsys, *LENGTHS, "--costs", file)["costs"]["microbatches"] == MODEL.costs(TOKENS).to_json()["microbatches"]


CHANGES: dict[str, dict[str, Any]] = {
    "no iterations": {"iterations": []},
    "no costs": {"iterations": [{}]},
    "null": {"costs_by_length": None},
    "nothing": {"costs_by_length": {}},
    "two stages": {"costs_by_length": LengthModel(**{name: terms[:2] for name, terms in vars(MODEL).items()}).to_json()},
    "slow": {"costs_by_length": replace(MODEL, forward_ms=(Work(0.0, 0.0, 1e12),) * 4).to_json()},
}
"""Of the report."""


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ("", ["--attention-share", "0.1"], "--attention-share is 0.1 and FILE has measured costs by length; drop the share"),
        ("", ["--attention-share", "nan"], "--attention-share is nan and FILE has measured costs by length; drop the share"),
        ("", ["--schedule", "zb-h1"], "the costs are for 4 stages and the plan has 2 (2 ranks, linear placement)"),
        ("", ["--num-ranks", "3"], "the costs are for 4 stages and the plan has 6 (3 ranks, V placement)"),
        ("no iterations", [], "has no iterations: 'iterations' must be a list of objects, got []"),
        ("no costs", [], "costs must be an object with forward_ms"),
        ("null", [], "costs by length must be an object with forward_ms"),
        ("nothing", [], "costs by length: 'forward_ms' must be a list with one object per stage, got None"),
        ("two stages", [], "has costs by length of 2 stages and costs of 4; give those of one run"),
        ("slow", [], "costs: forward_ms of stage"),
    ],
)
def test_flags_that_exclude_costs_and_malformed_reports_are_refused_in_one_line(
    change: str, words: list[str], message: str, file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(file).parent)
    written(Path(), json.loads(Path(file).read_text()) | CHANGES.get(change, {}))
    assert main([*LENGTHS, "--costs", "report.json", *words]) == 2
    err = capsys.readouterr().err
    assert message.replace("FILE", "report.json") in err
    assert err.count("\n") == 1


def test_lengths_from_standard_input_are_read_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("512,4096,700"))
    body = planned(capsys, *PLAN, "--microbatch-tokens", "-")
    assert body["costs"]["microbatches"]["tokens"] == [512, 4096, 700]
