"""tools/benchmarks/schedules/__main__.py: what it computes from measurements, and that both modes measure. Not what."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron.zerobubble.mcore.cpu import malloc as host_heap
from megatron.zerobubble.plan.costs.all_to_alls import all_to_all_ms, wgrad_times_ms
from megatron.zerobubble.plan.ir import Op, OpKind, Placement
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import TimedOp
from tests.support.ranks import RankPool
from tools.benchmarks import ep_overlap
from tools.benchmarks.emulation import SleepingWork
from tools.benchmarks.schedules import __main__ as benchmark_schedules
from tools.benchmarks.schedules import emulated, real
from tools.benchmarks.schedules.real import serve
from tools.benchmarks.schedules.report import Iteration, Line, Sample, measured_passes, rows_of

TINY = ("--num-layers", "8", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8", "--micro-batch-size", "1")
SPREAD = {"median", "least", "most"}


def sample(start_ms: float, end_ms: float, **ops: tuple[float, float]) -> Sample:
    """A rank's iteration; ops by their text with a leading underscore."""
    timed = tuple(TimedOp(Op.parse(text[1:]), *bounds) for text, bounds in ops.items())
    return Sample(start_ms=start_ms, end_ms=end_ms, ops=timed)


def iteration(forward_ms: float = 3) -> Iteration:
    """One microbatch through two ranks; on rank 0, F takes `forward_ms`, B takes 4 and W takes 2."""
    first = sample(10, 29, _0F0=(15 - forward_ms, 15), _0B0=(20, 24), _0W0=(24, 26))
    return Iteration(samples=(first, sample(11, 30, _1F0=(15, 16), _1B0=(16, 20), _1W0=(20, 22))))


def test_an_iteration_is_as_long_as_its_slowest_rank() -> None:
    assert iteration().wall_ms == 30 - 10
    assert iteration().span_ms == 26 - 12, "of rank 0; rank 1's is 7"
    assert iteration().outside_ms == 20 - (26 - 12), "before the first op and after the last"


def test_what_is_beyond_the_passes_does_not_depend_on_what_they_took() -> None:
    plan = build_plan("zb-h1", num_ranks=2, num_microbatches=1)
    assert iteration(3).beyond_passes(plan) == 0.0
    assert iteration(8).beyond_passes(plan) == 0.0, "a pass that takes long is no fault of who runs it"
    late = sample(10, 31, _0F0=(12, 15), _0B0=(21, 25), _0W0=(26, 28))
    assert Iteration(samples=(late, iteration().samples[1])).beyond_passes(plan) == pytest.approx(16 / 14 - 1)


def test_a_pair_counts_once_beside_its_passes() -> None:
    plan = replace(build_plan("1f1b", num_ranks=1, num_microbatches=2), pairs=frozenset())
    pair = replace(plan, ops=((Op(0, OpKind.F, 0), Op(0, OpKind.F, 1), Op(0, OpKind.BW, 0), Op(0, OpKind.BW, 1)),))
    pair = replace(pair, pairs=frozenset({Op(0, OpKind.F, 1)}))
    ran = sample(0, 20, _0F0=(0, 3), _0F1=(3, 8), _0BW0=(3, 8), _0BW1=(8, 12))
    assert Iteration(samples=(ran,)).beyond_passes(pair) == 0.0


@pytest.mark.parametrize("name", ["ZB-H1, limit 1, W", "ZB-H1, W", "ZBV, limit 1, pairs and W"])
def test_passes_that_sleep_compute_as_much_of_each_w_ahead_as_simulated(name: str) -> None:
    """Where a W comes right after its B all but one of eight all-to-alls, which comes before its layers."""
    contender = dict(ep_overlap.contenders(2, 0.4))[name]
    plan = contender.plan_of(5)
    costs = contender.costs(plan, 0.4, pass_ms=0.008)
    times = wgrad_times_ms(costs, plan.launches)
    assert any(time < costs.duration_ms(*op) for op, time in times.items())
    for launches, row in zip(plan.launches, plan.ops, strict=True):
        work = SleepingWork(costs, row)
        for op, *others in launches:
            if others:
                work.pair((op, None, False), (others[0], None, False))
            elif op.kind is OpKind.F:
                work.forward(op, None, False)
            elif op.kind is OpKind.W:
                expected = (costs.duration_ms(*op) - times[op]) / 1000
                one = all_to_all_ms(costs, op._replace(kind=OpKind.B)) / 8000
                assert expected - one - 1e-9 <= work.ahead.get(op, 0.0) <= expected + 1e-9
                work.weight_gradient(op, False)
            else:
                work.backward(op, None, False)
        assert not work.ahead


def test_pass_times_are_means_and_fused_ones_only_a_last_resort() -> None:
    fused = Iteration(samples=(sample(0, 9, _0F0=(0, 1), _0BW0=(2, 9)), sample(0, 9, _1F0=(1, 2), _1BW0=(2, 3))))
    passes = measured_passes(Placement.linear(2), [iteration(3), iteration(8), fused, iteration(1)])
    assert (passes.costs.forward_ms, passes.costs.backward_ms, passes.costs.wgrad_ms) == ((4, 1), (4, 4), (2, 2))
    assert passes.outside_ms == (6 + 1 + 8) / 3
    alone = measured_passes(Placement.linear(2), [fused]).costs
    assert (alone.backward_ms, alone.wgrad_ms) == ((7, 1), (0, 0))


def test_a_speed_up_is_a_ratio_of_all_rounds_together() -> None:
    slow = Line(name="slow", runtime="a", baseline="slow", ms=(100, 120, 110), predicted_ms=90)
    fast = Line(name="fast", runtime="b", baseline="slow", ms=(80, 100, 84), predicted_ms=72, losses=(5.0, 4.0))
    unknown = Line(name="unknown", runtime="c", baseline="slow", ms=(200, 120, 220), peer="fast")
    first, second, third = rows_of([slow, fast, unknown])
    assert first["speed_up"] == {"value": 1, "low": 1, "high": 1}
    assert second["speed_up"] == pytest.approx({"value": 330 / 264, "low": 120 / 100, "high": 110 / 84}), "one round thrice"
    assert second["predicted_speed_up"] == 1.25
    assert second["reached"] == pytest.approx({"value": 1.0, "low": 0.96, "high": 110 / 84 / 1.25})
    assert second["over_prediction"] == pytest.approx({"median": 84 / 72 - 1, "least": 80 / 72 - 1, "most": 100 / 72 - 1})
    assert second["loss"] == {"first": 5.0, "last": 4.0}
    assert third["speed_up"]["value"] == 330 / 540
    assert (third["peer"], third["over_peer"]["value"]) == ("fast", pytest.approx((330 / 540) / (330 / 264)))
    assert "reached" not in third
    with pytest.raises(ValueError, match="shorter"):
        rows_of([slow, replace(fast, ms=(80, 100))])


@pytest.fixture
def in_pool(four_ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs the tool on ranks that are there already; its JSON."""

    def on_ranks(function: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
        assert num_ranks == four_ranks.size
        return four_ranks.run(function, *args)

    for mode in (real, emulated):
        monkeypatch.setattr(mode, "run_on_ranks", on_ranks)

    def run(path: Path, *arguments: str) -> dict[str, Any]:
        assert benchmark_schedules.main(["--num-ranks", "4", "--json", str(path), *arguments]) == 0
        body: dict[str, Any] = json.loads(path.read_text())
        assert body["format"] == "zerobubble-schedules-benchmark/2"
        return body

    return run


@pytest.mark.sampled(0.2, group="tools that measure")
def test_emulated(in_pool: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = ["--forward-ms", "2", "--backward-ms", "2", "--wgrad-ms", "2", "--last-stage", "2"]
    sizes = ["--num-microbatches", "4", "--rounds", "2", "--message-kib", "1"]
    schedules = ["--schedule", "1f1b", "--schedule", "zb@1", "--schedule", "zbv"]
    body = in_pool(tmp_path / "out.json", "--emulate", *times, *sizes, *schedules)
    (result,) = body["results"]
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == ["1f1b", "zb@1 for equal stages", "zb@1", "zbv"]
    assert rows["1f1b"]["predicted_ms"] == 3 * 2 + 4 * 12 + 3 * 4, "the way there, four microbatches on the last stage, and back"
    assert rows["zb@1"]["over"] == "zb@1 for equal stages"
    assert rows["zb@1"]["predicted_speed_up"] >= 1
    assert all(set(row["reached"]) == {"value", "low", "high"} and len(row["rounds_ms"]) == 2 for row in rows.values())
    assert all(set(row["beyond_passes"]) == SPREAD for row in rows.values())
    assert "| zb@1 for equal stages |" in capsys.readouterr().out


def serve_and_watch_the_heap(rank: int, *args: Any) -> Any:
    with mock.patch.object(host_heap, "keep_freed_memory") as keep:
        samples = serve(rank, *args)
    keep.assert_called_once_with()
    return samples


@pytest.mark.sampled(0.2, group="tools that measure")
def test_real(in_pool: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "serve", serve_and_watch_the_heap)
    body = in_pool(tmp_path / "out.json", *TINY, "--num-microbatches", "4", "8", "--rounds", "2")
    for result, count in zip(body["results"], (4, 8), strict=True):
        assert result["num_microbatches"] == count
        rows = {row["name"]: row for row in result["rows"]}
        assert list(rows) == list(benchmark_schedules.REAL)
        assert all(row["loss"]["last"] < row["loss"]["first"] for row in rows.values())
        linear = [rows[name]["loss"]["last"] for name in ("stock-1f1b", "1f1b", "zb-h1", "zb-h2")]
        assert linear == pytest.approx([linear[0]] * 4, rel=1e-5), "the same model under every schedule"
        assert {row["name"] for row in rows.values() if "reached" not in row} == {"torch-1f1b", "torch-zbv"}
        assert {row["name"] for row in rows.values() if "beyond_passes" in row} == {"1f1b", "zb-h1", "zb-h2", "zbv", "v-half"}
        assert {row["name"]: row["peer"] for row in rows.values() if "peer" in row} == dict.fromkeys(
            ("zbv", "v-half"), "torch-zbv"
        )
        stages = {placement: len(passes["stages"]) for placement, passes in result["passes"].items()}
        assert stages == {"linear": 4, "V": 8}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--emulate", "--hidden-size", "8"], "--hidden-size goes without --emulate only"),
        (["--last-stage", "1.4"], "--last-stage goes with --emulate only"),
        (["--schedule", "zb-v"], "did you mean 'zbv'"),
        (["--schedule", "stock-interleaved-1f1b", "--num-microbatches", "3"], "a multiple of 2 microbatches"),
        (["--schedule", "torch-zbv", "--num-microbatches", "1"], "at least 2 microbatches, the number of ranks"),
        (["--emulate", "--schedule", "zbv@much"], "what follows @ must be a memory limit"),
        (["--emulate", "--message-kib", "0"], "--message-kib is 0.0; it must be more than 0"),
        (["--json", "no/such/folder/out.json"], "cannot write no/such/folder/out.json: No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        benchmark_schedules.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
