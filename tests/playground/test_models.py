"""Presets and estimates: they are the published ones, and plans for a model have its bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.playground.models.estimate import estimate
from megatron.zerobubble.playground.models.model_problem import FIELDS, offers, read_model
from megatron.zerobubble.playground.models.presets import LAYERED, PUBLISHED, SHAPES, layered
from megatron.zerobubble.playground.tasks import run_task

DATA = Path(__file__).parents[2] / "docs" / "benchmarks" / "data"
KEYS = {"p": "num_ranks", "m": "num_microbatches", "f": "forward_ms", "b": "backward_ms", "w": "wgrad_ms", "c": "comm_ms"} | {
    "a": "activation_after_backward"
}


def sizes(**changed: Any) -> dict[str, Any]:
    return {name: field.usual for name, field in FIELDS.items()} | changed


def test_published_presets_are_rows_of_the_published_table() -> None:
    rows = json.loads((DATA / "published.json").read_text())["configs"]
    for name, preset in PUBLISHED.items():
        assert any(row["model"] == name and all(row[key] == preset[each] for each, key in KEYS.items()) for row in rows)


@pytest.mark.parametrize("name", LAYERED)
def test_layered_presets_are_the_layer_files(name: str) -> None:
    text = (DATA / "layers" / f"{name.lower()}.json").read_text()
    assert layered(name).to_json() == Model.from_json(text).to_json()
    assert LAYERED[name] == (json.loads(text)["num_ranks"], json.loads(text)["num_microbatches"])


@pytest.mark.parametrize("name", ["Llama-3-8B", "Gemma-2-9B"])
def test_estimates_from_sizes_are_those_of_the_layer_files(name: str) -> None:
    wanted = Model.from_json((DATA / "layers" / f"{name.lower()}.json").read_text())
    found = read_model(SHAPES[name]["model"], {}).model
    assert found.layers == wanted.layers
    assert found.comm_ms == pytest.approx(wanted.comm_ms, abs=1e-3)
    for kind, costs in wanted.kinds.items():
        assert vars(found.kinds[kind]) == pytest.approx(vars(costs), abs=1e-4), kind


def test_every_size_counts() -> None:
    base = estimate(sizes()).total
    halved = estimate(sizes(tensor_model_parallel_size=2)).total
    assert halved.forward_ms == pytest.approx(base.forward_ms / 2, rel=1e-2)
    assert halved.activation_bytes == pytest.approx(base.activation_bytes / 2)
    again = estimate(sizes(recompute=1)).total
    assert again.activation_bytes < base.activation_bytes / 2
    assert again.backward_ms > base.backward_ms
    for name, change in (
        ("peak_tflops", 500),
        ("efficiency", 0.3),
        ("seq_length", 16384),
        ("num_query_groups", 8),
        ("swiglu", 0),
    ):
        assert estimate(sizes(**{name: change})).total.work_ms != pytest.approx(base.work_ms), name
    assert estimate(sizes(link_gb_per_s=25)).comm_ms == pytest.approx(2 * estimate(sizes()).comm_ms)


def test_experts_cost_their_active_weights_and_hold_all_of_them() -> None:
    dense = estimate(sizes(ffn_hidden_size=8192)).kinds["layer"]
    experts = sizes(num_experts=64, moe_router_topk=4, moe_ffn_hidden_size=2048)
    one, shared = (estimate(experts | {"expert_model_parallel_size": each}).kinds["layer"] for each in (1, 16))
    assert one.work_ms > dense.work_ms
    assert one.work_ms == shared.work_ms
    assert shared.static_bytes == pytest.approx(dense.static_bytes), "64 experts over 16 ranks are as many as 4 of 1"
    mlp = 7.5 * 3 * 4096 * 8192
    assert one.static_bytes - dense.static_bytes == pytest.approx(15 * mlp)
    assert one.after_backward_bytes > dense.after_backward_bytes


def test_a_plan_for_a_model_has_its_bytes_on_every_placement() -> None:
    problem = {"num_ranks": 8, "num_microbatches": 16, "effort": "drawn", "model": {"preset": "Nemotron-H-8B"}}
    drawn = {}
    for schedule in ("1f1b", "zbv"):
        events = list(run_task("search", json.dumps(problem | {"schedule": schedule}).encode()))
        drawn[schedule] = next(event["drawing"] for event in events if "drawing" in event)
    model = layered("Nemotron-H-8B")
    for drawing in drawn.values():
        memory = drawing["memory"]
        assert sum(memory["static_bytes"]) == pytest.approx(model.total.static_bytes)
        assert memory["unit_bytes"] == pytest.approx(model.total.activation_bytes)  # p of the mean of p ranks
    one, other = ({name: value for name, value in each["problem"].items() if value != []} for each in drawn.values())
    assert one == pytest.approx(other)


def test_own_figures_replace_estimated_ones_and_the_proportions_stay() -> None:
    given = sizes(device_gib=80.0, is_balanced=1)
    plain = read_model(given, {})
    own = read_model(given, {"wgrad_ms": 7.0, "comm_ms": 0.5, "activation_after_backward": 0.25})
    figures = own.figures(8)
    assert figures == pytest.approx(plain.figures(8) | {"wgrad_ms": 7.0, "comm_ms": 0.5, "activation_after_backward": 0.25})
    before, after = (each.costs_of(Placement.v(8)).wgrad_ms for each in (plain, own))
    assert [one / after[0] for one in after] == pytest.approx([one / before[0] for one in before])


def test_balanced_layers_take_work_off_the_rank_of_the_head() -> None:
    model = SHAPES["Gemma-2-9B"]["model"]
    even, balanced = (read_model(sizes(**model, is_balanced=each), {}).layout(Placement.linear(8)) for each in (0, 1))
    assert even.per_stage == (6, 6, 5, 5, 5, 5, 5, 5)
    assert balanced.per_stage[-1] < 5
    assert balanced.bottleneck_ms < 0.8 * even.bottleneck_ms


def test_what_the_page_offers_is_taken_by_the_planner() -> None:
    offered = offers()
    json.dumps(offered)
    for name, preset in offered["shapes"].items():
        problem = {"num_ranks": preset["p"], "num_microbatches": preset["m"], "model": preset["model"]}
        (event,) = run_task("figures", json.dumps(problem | {"schedule": "1f1b"}).encode())
        assert event["event"] == "done", (name, event)
        assert event["figures"]["forward_ms"] > 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (3, "must be an object"),
        ({"preset": "GPT-5"}, "choose one of DeepSeek-V3"),
        ({"hidden_size": 1.5}, "hidden_size"),
        ({"num_layers": 10**9}, "num_layers"),
        ({"efficiency": 0}, "efficiency"),
        ({"device_gib": -1}, "device_gib"),
        ({"<b>": 1}, "known are"),
        ({"layers": {"format": "zerobubble-layers/1"}}, "kinds"),
        ({"layers": []}, "layer file"),
        ({"preset": ["x"]}, "choose one of"),
        (
            {"num_layers": 1000, "ffn_hidden_size": 10**7, "hidden_size": 10**6, "seq_length": 10**8, "micro_batch_size": 10**4},
            "ms",
        ),
    ],
)
def test_a_wrong_model_is_refused_with_its_name(model: Any, message: str) -> None:
    body = {"num_ranks": 2, "num_microbatches": 4, "schedule": "1f1b", "effort": "drawn", "model": model}
    *_, event = run_task("search", json.dumps(body).encode())
    assert event["event"] == "error"
    assert message in event["message"]
