"""The report of a recording that ran exactly as planned has no deviation, and its JSON form is stable."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron.zerobubble.plan.communication import links_of
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.length_model import LengthModel
from megatron.zerobubble.plan.costs.lengths_and_links import LengthsAndLinks
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.timeline import Activity, RankTimeline
from megatron.zerobubble.profiling.report import FORMAT, report, reports_to_json
from tests.profiling.support import as_recorded, run_as_simulated, span


@pytest.mark.parametrize("name", ["1f1b", "zb-h2", "zbv"])
def test_a_run_as_planned_is_reported_as_such(name: str) -> None:
    timeline = as_recorded(name, 4, 9)
    seen = report(timeline)
    assert seen.simulation.costs.comm_ms == pytest.approx(0.25)
    assert seen.span_ms == pytest.approx(seen.simulation.span_ms)
    assert seen.makespan_ms == pytest.approx(seen.simulation.makespan_ms)
    assert seen.bubble_rate == pytest.approx(seen.simulation.bubble_rate)
    assert seen.wgrad_share == pytest.approx(0.0 if name == "1f1b" else 1 / 3)
    for record, predicted in zip(seen.ranks, seen.predicted_ranks, strict=True):
        assert record.idle_ms == pytest.approx(predicted.idle_ms, abs=1e-9)
    assert [line.split()[0] for line in seen.lines()][:2] == ["bubble:", "span"]
    assert f"{seen.bubble_rate:.1%} of the span of iteration 7 (" in seen.lines()[0]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_unequal_microbatches_that_ran_as_planned_are_reported_so(name: str) -> None:
    """The prediction counts each at its own length, in the order of the data; medians would be off by a quarter."""
    plan = build_plan(name, num_ranks=3, num_microbatches=6)
    plan = replace(plan, assignment=(5, 0, 2, 3, 1, 4))
    costs = LengthsAndLinks((512, 4096, 700, 1800, 1024, 96), 0.1).applied(CostModel.uniform(plan.placement, comm_ms=0.25))
    seen = report(run_as_simulated(plan, costs))
    assert seen.simulation.span_ms == pytest.approx(seen.span_ms)
    assert seen.simulation.makespan_ms == pytest.approx(seen.makespan_ms)
    assert seen.simulation.bubble_rate == pytest.approx(seen.bubble_rate)
    measured = seen.simulation.costs.table
    assert measured is not None
    for rows, own in zip(measured.forward_ms, costs.table.forward_ms, strict=True):
        assert rows == pytest.approx(own)
    body = json.loads(reports_to_json([seen]))["iterations"][0]["costs"]
    assert CostModel.from_json(body) == seen.simulation.costs
    sizes = {"activation": (0.5,) * plan.num_stages, "activation_after_backward": (0.25,) * plan.num_stages}
    again = report(replace(run_as_simulated(plan, costs), activations=sizes)).simulation.costs
    assert again.activations == sizes


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_slow_link_is_named_with_its_hosts_and_predicted_as_it_is(name: str) -> None:
    plan = build_plan(name, num_ranks=4, num_microbatches=6)
    times = {pair: 14.0 if pair == (1, 2) else 0.9 for pair in links_of(plan.placement)}
    costs = CostModel.uniform(plan.placement).with_links({pair: LinkTime(elapsed) for pair, elapsed in times.items()}, 4)
    timeline = run_as_simulated(plan, costs)
    seen = report(timeline)
    assert seen.links == pytest.approx(times)
    assert seen.simulation.span_ms == pytest.approx(seen.span_ms), "their median would predict half of it"
    (line,) = (line.strip() for line in seen.lines() if "P2P" in line)
    assert line == "P2P 0.90 ms (median of 6 links); slowest rank 1 -> rank 2 14.00 ms"
    hosts = [replace(rank, host=f"node{number // 2}") for number, rank in enumerate(timeline.ranks)]
    named = report(replace(timeline, ranks=tuple(hosts)))
    assert any(line.endswith("slowest rank 1 (node0) -> rank 2 (node1) 14.00 ms") for line in named.lines())
    body = named.to_json()
    assert {"sender": 1, "receiver": 2, "ms": pytest.approx(14.0)} in body["links"]
    assert body["hosts"] == ["node0", "node0", "node1", "node1"]
    assert body["costs"]["links"]["latency_ms"][1][2] == pytest.approx(14.0)
    assert "0.90 to 14.00 ms, the slowest from rank 1 to rank 2" in named.simulation.costs.times_text


def test_measured_activations_are_in_the_costs_of_the_report() -> None:
    timeline = as_recorded("zb-h1", 4, 9)
    assumed = report(timeline)
    assert assumed.simulation.costs.activation_after_backward == assumed.simulation.costs.activation
    sizes = {"activation": (1.0,) * 4, "activation_after_backward": (0.25,) * 4}
    seen = report(replace(timeline, activations=sizes))
    assert seen.simulation.costs == assumed.simulation.costs.with_lists(**sizes)
    assert assumed.simulation.peak_memory == (1.0, 1.0, 1.0, 1.0), "a W that waits holds as much as a microbatch before its B"
    assert seen.simulation.peak_memory == pytest.approx((1.0, 0.8125, 0.625, 0.4375))


def test_exposed_all_to_alls_are_in_the_report_and_their_shares_in_its_costs() -> None:
    """Half a millisecond of every F and a quarter of every B, each of 1 ms, on two of four ranks."""
    timeline, parts = as_recorded("zb-h1", 4, 9), {OpKind.F: 0.5, OpKind.B: 0.25, OpKind.W: 0.0}

    def traveling(own: RankTimeline) -> RankTimeline:
        found = (span(Activity.ALL_TO_ALL, start, start + parts[op.kind]) for op, start, _ in own.ops if parts[op.kind])
        return replace(own, spans=(*own.spans, *found))

    seen = report(replace(timeline, ranks=(*map(traveling, timeline.ranks[:2]), *timeline.ranks[2:])))
    assert seen.exposed_all_to_all_ms == pytest.approx(9 * 0.75 / 2)
    assert f"all-to-alls of experts: {9 * 0.75 / 2:.1f} ms exposed on the mean rank" in "\n".join(seen.lines())
    body = json.loads(reports_to_json([seen]))["iterations"][0]
    assert body["costs"]["all_to_all"] == pytest.approx([0.25, 0.125])
    assert [fields["measured"]["exposed_all_to_all_ms"] for fields in body["ranks"]] == pytest.approx([6.75, 6.75, 0, 0])
    assert report(timeline).simulation.costs.all_to_all == (0.0, 0.0)
    assert not any("all-to-alls" in line for line in report(timeline).lines())


def test_costs_by_length_are_in_the_file_if_they_were_fitted() -> None:
    seen = report(as_recorded("zbv", 2, 4))
    model = LengthModel.of(seen.simulation.costs, tokens=128, squares=128.0**2, attention_share=0.1)
    without, body = (json.loads(reports_to_json([seen], None, given)) for given in (None, model))
    assert LengthModel.from_json(body.pop("costs_by_length")) == model
    assert body == without


def test_the_json_form() -> None:
    timeline = as_recorded("zbv", 2, 4)
    on_a_gpu = (replace(own, peak_bytes=10 * rank) for rank, own in enumerate(timeline.ranks, start=1))
    given = report(replace(timeline, ranks=tuple(on_a_gpu)))
    body = json.loads(reports_to_json([report(timeline), given]))
    assert body["format"] == FORMAT == "zerobubble-report/1"
    unknown, known = body["iterations"]
    assert unknown["memory"]["measured_bytes"] is None
    assert known["memory"] == {"predicted": list(given.simulation.peak_memory), "measured_bytes": [10, 20]}
    assert {key: known[key] for key in ("iteration", "schedule", "num_ranks", "num_microbatches")} == {
        "iteration": 7,
        "schedule": "zbv",
        "num_ranks": 2,
        "num_microbatches": 4,
    }
    assert set(known["measured"]) - set(known["predicted"]) == {"work_ms", "wgrad_share"}
    for rank, fields in enumerate(known["ranks"]):
        assert fields["rank"] == rank
        measured = fields["measured"]
        by_phase = sum(measured[f"idle_{phase}_ms"] for phase in ("warmup", "steady", "cooldown"))
        by_cause = sum(
            measured[key] for key in ("idle_for_peer_ms", "idle_for_link_ms", "idle_for_validation_ms", "idle_other_ms")
        )
        assert measured["idle_ms"] == pytest.approx(by_phase) == pytest.approx(by_cause)
        assert set(fields["predicted"]) < set(measured)
