"""Ranks alone on one device, and the pipeline composed from them: what is composed and reported, not times."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy
import pytest
import torch

from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import Op, OpKind
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import run_in_order
from tools.benchmarks.one_gpu import __main__ as one_gpu
from tools.benchmarks.one_gpu import compose, ranks
from tools.benchmarks.one_gpu.alone import alone
from tools.benchmarks.one_gpu.page import checks, page
from tools.benchmarks.one_gpu.ranks import CONTENDERS, lines, run
from tools.benchmarks.one_gpu.setting import Setting
from tools.benchmarks.reports import Row, read_json

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "every rank's real program alone on one device (ours, and megatron-core's own schedules), and the pipeline composed from "
    "their passes",
    "ran on an H200, rehearsed on the CPU; what is composed was within the interval of a run on two CPU ranks; "
    "[numbers](benchmarks/one_gpu.md)",
)

ROOT = Path(__file__).parents[2]
TINY = Setting(device=torch.device("cpu"), scale=0.016)
BY_NAME = {each.name: each for each in CONTENDERS}


@pytest.mark.parametrize("link_ms", [0.0, 0.7])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-h2", 1), ("zbv", 2), ("interleaved-1f1b", 2)])
def test_the_timeline_is_the_simulators(name: str, chunks: int, link_ms: float) -> None:
    plan = build_plan(name, num_ranks=4, num_microbatches=8, num_chunks=chunks)
    draw = random.Random(1)
    ms = {op: draw.uniform(1, 3) for row in plan.ops for op in row}
    spans = compose.timeline(plan, {op: numpy.array([each, 2 * each]) for op, each in ms.items()}, link_ms)
    rows = run_in_order(plan, ms.__getitem__, CostModel.uniform(plan.placement, comm_ms=link_ms))
    for op, _, end in (each for row in rows for each in row):
        assert spans[op][1][0] == pytest.approx(end)
        if link_ms == 0:
            assert spans[op][1][1] == pytest.approx(2 * end)


def test_1f1b_exchanges_messages_between_passes() -> None:
    """p = 2, m = 2, F = 1, B+W = 2, by hand. Rank 0: F0, sends until 1 + link, F1, exchange F1 for B0 when rank 1 has come."""
    plan = build_plan("1f1b", num_ranks=2, num_microbatches=2)
    ms = {op: numpy.array([1.0 if op.kind is OpKind.F else 2.0]) for row in plan.ops for op in row}
    assert compose.exchanging(plan, ms, 0.0)[0] == pytest.approx(1 + 3 + 3 + 2)
    # rank 1: F0 from 1.5, B0 to 4.5, the exchange to 5, F1, B1 to 8, the message to 8.5, and rank 0's last B+W
    assert compose.exchanging(plan, ms, 0.5)[0] == pytest.approx(10.5)
    alone_ = {op: numpy.array([each]) for op, each in ((op, 1.0) for op in plan.ops[0])}
    whole = build_plan("1f1b", num_ranks=1, num_microbatches=2)
    assert compose.exchanging(whole, {op: alone_[op] for op in whole.ops[0]}, 0.5)[0] == pytest.approx(4.0)


def _runs(name: str, num_ranks: int, m: int, ms: dict[str, float]) -> list[Row]:
    """What ranks would have taken."""
    contender = BY_NAME[name]
    plan = build_plan(contender.plan_name, num_ranks=num_ranks, num_microbatches=m, num_chunks=contender.chunks)
    runs = []
    for rank in (0, 1, num_ranks - 1):
        ops: dict[str, list[float]] = {}
        for op in plan.ops[rank]:
            ops.setdefault(f"{op.stage} {op.kind.name}", []).append(ms[op.kind.name])
        iteration = {"ops_ms": ops, "gaps_ms": {kind: [0.0] for kind in ms}, "whole_ms": 1.0, "step_ms": 0.0}
        runs.append({"contender": name, "rank": rank, "iterations": [iteration, iteration]})
    return runs


def test_equal_times_compose_to_the_bubbles_of_the_papers() -> None:
    """F = B = W: 1F1B idles (p - 1) / m of its work, ZB-H2 nothing but the way of the first and of the last microbatch."""
    times = {"F": 1.0, "B": 1.0, "W": 1.0}
    runs = _runs("1F1B", 4, 12, {"F": 1.0, "BW": 2.0}) + _runs("ZB-H2", 4, 12, times) + _runs("ZBV", 4, 12, times)
    report = compose.compose({"num_ranks": 4, "num_microbatches": 12, "runs": runs})
    [free] = [row for row in report["rows"] if row["num_ranks"] == 4 and not row["alike"] and row["link"] == "free"]
    found = {each["name"]: each for each in free["contenders"]}
    assert found["1F1B"]["ms"] == pytest.approx([3 * (12 + 3)] * 3)
    assert found["ZB-H2"]["ms"] == pytest.approx([3 * 12 + 3] * 3)
    assert found["ZB-H2"]["over_1f1b"] == pytest.approx([45 / 39] * 3, abs=1e-5)
    assert "over_interleaved" not in found["ZBV"]


def test_passes_beside_a_resident_transfer_are_slower() -> None:
    """ZB-H1, p = 2: rank 1's receives and rank 0's sends make the passes beside them slower, to the part that they overlap."""
    times = {"F": 2.0, "B": 2.0, "W": 2.0}
    runs = _runs("ZB-H1", 3, 6, times)
    plan = build_plan("zb-h1", num_ranks=3, num_microbatches=6)
    ratios = {kind: {1: 9.0, 4: 1.5, 8: 2.0} for kind in OpKind}
    composition = compose.Composition(0.5, ratios, numpy.random.default_rng(1))
    factors = composition._factors(BY_NAME["ZB-H1"], plan, compose.Times(runs, 3, alike=False))
    assert factors[Op(0, OpKind.F, 0)] == 1.0  # rank 0 begins: nothing has been sent
    assert factors[Op(0, OpKind.F, 1)] == pytest.approx(1.125)  # F0's message for a quarter of it
    assert 1.0 < max(factors.values()) <= 2.0
    exact = compose.Composition(0.0, {}, numpy.random.default_rng(1)).makespan(
        BY_NAME["ZB-H1"], plan, compose.Times(runs, 3, alike=False)
    )
    assert exact == pytest.approx(run_in_order(plan, lambda _: 2.0)[0][-1].end_ms)


def test_a_rank_receives_what_others_would_send() -> None:
    with HostDevice(enabled=True), alone(1, 4, torch.device("cpu")) as received:
        activation, gradient = torch.empty(64, 1, 64), torch.empty(64, 1, 64)
        received.into(activation, is_gradient=False).wait()
        received.into(gradient, is_gradient=True).wait()
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (1, 4)
    assert activation.std().item() == pytest.approx(1.0, rel=0.1)
    assert gradient.std().item() == pytest.approx(1e-3, rel=0.1)
    assert not torch.distributed.is_initialized()


@pytest.mark.sampled(0.2, group="tools that measure")
@pytest.mark.parametrize("name", ["1F1B, with its wait", "interleaved 1F1B, v = 2", "ZBV"])
def test_a_rank_runs_its_whole_program_alone(name: str) -> None:
    with HostDevice(enabled=True) as host:
        row = run(BY_NAME[name], 1, TINY, host, 4, 8)
    contender = BY_NAME[name]
    plan = build_plan(contender.plan_name, num_ranks=4, num_microbatches=8, num_chunks=contender.chunks)
    wanted: dict[str, int] = {}
    for op in plan.ops[1]:
        wanted[f"{op.stage} {op.kind.name}"] = wanted.get(f"{op.stage} {op.kind.name}", 0) + 1
    for iteration in row["iterations"]:
        assert {key: len(taken) for key, taken in iteration["ops_ms"].items()} == wanted
        assert sum(map(len, iteration["gaps_ms"].values())) == len(plan.ops[1]) - 1
        assert iteration["whole_ms"] >= sum(map(sum, iteration["ops_ms"].values()))
    assert ("planned_bytes" in row) == (name == "ZBV")
    if name == "ZBV":
        assert row["held_bytes"] == pytest.approx(row["planned_bytes"], rel=0.05)


@pytest.mark.sampled(0.2, group="tools that measure")
def test_a_contender_that_fails_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def times(contender: ranks.Contender, rank: int, *_: object) -> Row:
        if contender.name == "ZB-H2":
            raise RuntimeError("out of memory")
        ms = {"F": 1.0, "BW": 2.0} if contender.is_stock else {"F": 1.0, "B": 1.0, "W": 1.0}
        return next(each for each in _runs(contender.name, 4, 4, ms) if each["rank"] == rank)

    monkeypatch.setattr(ranks, "run", times)
    file, written = tmp_path / "one.json", tmp_path / "page.md"
    words = ["--device", "cpu", "--scale", "0.016", "--json", str(file), "--markdown", str(written)]
    assert one_gpu.main(words) == 1
    report = read_json(str(file), one_gpu.FORMAT)
    assert report["ranks"]["failed"] == {"ZB-H2": "RuntimeError: out of memory"}
    assert {run["contender"] for run in report["ranks"]["runs"]} == {each.name for each in CONTENDERS} - {"ZB-H2"}
    text = written.read_text()
    assert "not run on a GPU" in text
    assert "- ZB-H2 is missing: RuntimeError: out of memory" in text
    assert "| ZBV |" in text


def test_a_scale_beyond_the_whole_layer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert one_gpu.main(["--device", "cpu", "--scale", "2"]) == 2
    assert "error: --scale is 2.0; it must be more than 0 and at most 1" in capsys.readouterr().err


@pytest.fixture(scope="module")
def recorded() -> Row:
    return read_json(str(ROOT / "docs" / "benchmarks" / "data" / "one_gpu.json"), one_gpu.FORMAT)


def test_the_recorded_page_is_that_of_its_data(recorded: Row) -> None:
    assert page(recorded) == (ROOT / "docs" / "benchmarks" / "one_gpu.md").read_text(encoding="utf-8")


def test_a_run_that_was_cut_has_a_page(recorded: Row) -> None:
    report = json.loads(json.dumps(recorded))
    for row in report["composed"]["rows"]:
        for each in row["contenders"]:
            each.pop("over_interleaved")
    assert "over the faster" not in page(report).partition("## The pipeline")[0]


def test_the_recorded_run_passes_its_checks(recorded: Row) -> None:
    found = list(checks(recorded))
    assert len(found) == 3
    assert all(line.endswith(": met") for line in found)


def test_the_front_page_has_the_recorded_speed(recorded: Row) -> None:
    [row] = [
        each for each in recorded["composed"]["rows"] if (each["num_ranks"], each["alike"], each["link"]) == (8, False, "NVLink")
    ]
    mean, least, most = next(each for each in row["contenders"] if each["name"] == "ZBV")["over_1f1b"]
    assert f"| ZBV over 1F1B: {mean:.3f} ({least:.3f} to {most:.3f}) | passes of an H200, composed, p = 8 |" in (
        ROOT / "README.md"
    ).read_text(encoding="utf-8")


def test_checks_fail(recorded: Row) -> None:
    report = json.loads(json.dumps(recorded))
    first = next(run for run in report["ranks"]["runs"] if "planned_bytes" in run)
    first["held_bytes"] *= 1.06
    for iteration in first["iterations"]:
        iteration["whole_ms"] *= 1.05
    split = next(run for run in report["ranks"]["runs"] if (run["contender"], run["rank"]) == ("ZB-H1", 1))
    for iteration in split["iterations"]:
        iteration["ops_ms"]["1 W"] = [1.1 * each for each in iteration["ops_ms"]["1 W"]]
    assert [line.rpartition(" ")[2] for line in checks(report)] == ["MISSED", "MISSED", "MISSED"]


def test_the_page_has_every_rank(recorded: Row) -> None:
    text = lines(recorded["ranks"])
    assert sum(line.startswith(("| 0 |", "| 1 |", "| 4 |", "| 7 |")) for line in text) == 2 * 4 * len(CONTENDERS)
