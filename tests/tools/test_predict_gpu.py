"""The command line of tools.benchmarks.predict_gpu, on made-up measurements with known answers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools.benchmarks import predict_gpu

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return predict_gpu


@pytest.fixture
def measurement(tool: ModuleType, tmp_path: Path) -> Path:
    """F = B = W = 1 ms; megatron-core's own backward takes 1.8 ms, less than B + W; a layer holds 100 bytes and W needs 50."""
    from tools.benchmarks.wgrad.shapes import shape_named

    shape = shape_named("6.2B")
    layer = {"forward_ms": 1.0, "backward_ms": 1.0, "wgrad_ms": 1.0, "fused_ms": 2.0, "stock_ms": 1.8}
    entry = {
        "shape": asdict(shape),
        "measured": {
            "per_layer": {**layer, "held_bytes": 50.0, "activation_bytes": 100.0},
            "plain_matmul_tflops": 500.0,
        },
        "predicted": {"model_flops": shape.model_flops, "activation_bytes": 1.0},
    }
    body = {"format": tool.MEASURED, "device": "made up", "is_gpu": False, "dtype": "bf16", "shapes": [entry]}
    path = tmp_path / "split.json"
    path.write_text(json.dumps(body))
    return path


def predict(tool: ModuleType, measurement: Path, *options: str) -> dict[str, Any]:
    target = measurement.with_name("predicted.json")
    assert tool.main([str(measurement), "--json", str(target), *options]) == 0
    body: dict[str, Any] = json.loads(target.read_text())
    return body


def test_iteration_times_by_hand(tool: ModuleType, measurement: Path) -> None:
    """Free links, p = 4, m = 12, 2 layers per rank: 1F1B takes (m + p - 1)(F + the faster full backward), and ZB-H1 idles for
    (p - 1)(F + B - W), no less than any order that keeps 1F1B's memory in the drawn form."""
    body = predict(
        tool, measurement, "--num-ranks", "4", "--layers-per-rank", "2", "--link-gb-per-s", "1e12", "--peak-tflops", "1000"
    )
    rows = {row["schedule"]: row for row in body["predicted"]}
    assert rows["1f1b"]["span_ms"] == pytest.approx((12 + 3) * 2 * (1.0 + 1.8))
    assert rows["zb-h1"]["span_ms"] == pytest.approx(12 * 6 + 3 * 2)
    assert rows["zb-h2"]["span_ms"] == pytest.approx(12 * 6)
    assert rows["zb-h2"]["makespan_ms"] == pytest.approx(12 * 6 + 3 * 2)
    assert rows["zb-h2"]["speedup_span"] == pytest.approx(84 / 72)
    flops = json.loads(measurement.read_text())["shapes"][0]["predicted"]["model_flops"] * 2 * 12
    assert rows["zb-h2"]["mfu_span"] == pytest.approx(flops / 72e-3 / 1e15)


def test_every_figure_says_where_it_is_from(tool: ModuleType, measurement: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = predict(tool, measurement, "--num-ranks", "2")
    assert not body["is_gpu"]
    (inputs,) = body["inputs"]
    assert set(inputs) == {"layer", "measured", "predicted", "given"}
    assert inputs["measured"]["peak_tflops"] == 500.0, "no --peak-tflops: the plain matmul's rate"
    assert inputs["measured"]["activation_bytes"] == 100.0
    assert inputs["given"] == {"link_gb_per_s": 50.0}
    sent = 2 * 3 * 1024 * 4096
    assert inputs["predicted"]["comm_ms"] == pytest.approx(sent / 50e9 * 1e3)
    output = capsys.readouterr().out
    assert "All values are *predicted* from passes *measured* on made up." in output
    figures = {**inputs["measured"], **inputs["predicted"], **inputs["given"]}
    marked = [line for line in output.splitlines() if line.endswith(("| *measured* |", "| *predicted* |", "| *given* |"))]
    assert [line.split(" | ")[1] for line in marked] == list(figures), "each figure once, with its mark"
    assert "| 6.2B | link_gb_per_s | 50 | *given* |" in marked


@pytest.mark.parametrize(
    ("options", "message"), [(["--num-ranks", "0"], "--num-ranks is 0"), (["--link-gb-per-s", "-1"], "it must be more than 0")]
)
def test_user_errors(
    tool: ModuleType, measurement: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        tool.main([str(measurement), *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_another_file_is_refused(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(SystemExit):
        tool.main([str(path)])
    assert "write one with python -m tools.benchmarks.split" in capsys.readouterr().err
