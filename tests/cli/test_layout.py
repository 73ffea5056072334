"""`zerobubble layout`: the layout, its plan, and errors in one line."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.zerobubble.cli import layouts
from megatron.zerobubble.cli.layouts import parse_bytes
from megatron.zerobubble.cli.main import main
from megatron.zerobubble.plan.ir import Plan
from megatron.zerobubble.plan.partition.joint import plan_layout
from megatron.zerobubble.plan.partition.layer_costs import FORMAT
from megatron.zerobubble.plan.partition.stage_layers import StageLayers

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "`zerobubble layout`: the memory of every rank counted op by op; partitions of small models against all partitions",
    "works",
    also=("plan/partition",),
)

COSTS = {"forward_ms": 1.0, "backward_ms": 1.0, "wgrad_ms": 1.0, "activation_bytes": 2**29, "after_backward_bytes": 2**28}
KINDS = {
    "layer": COSTS | {"static_bytes": 2**30},
    "head": COSTS | {"forward_ms": 2.0, "static_bytes": 2**30},
    "mlp": COSTS | {"static_bytes": 2**30},
    "attention": COSTS | {"static_bytes": 2**30},
}
ARGUMENTS = ["--num-ranks", "2", "--num-microbatches", "4"]
ANY = [*ARGUMENTS, "--schedule", "auto", "--empty-stages"]


@pytest.fixture
def layers(tmp_path: Path) -> str:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"format": FORMAT, "kinds": KINDS, "layers": ["layer*6"]}))
    return str(path)


def test_the_layout_its_plan_and_its_gap(layers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "plan.json"
    words = ["layout", "--layers", layers, *ANY, "--memory", "6GiB", "--json", str(target)]
    assert main(words) == 0
    out = capsys.readouterr().out
    body = json.loads(target.read_text())
    layout = body["layout"]
    assert f'--pipeline-model-parallel-layout "{layout["text"]}"' in out
    assert list(StageLayers.parse(layout["text"]).per_stage) == layout["per_stage"]
    assert sum(layout["per_stage"]) == 6
    assert "lower bounds of this layout: makespan" in out
    assert "rank 1: " in out
    assert Plan.from_json(target.read_text()).placement.name == layout["placement"]
    assert max(body["metrics"]["peak_bytes"]) <= 6 * 2**30 * (1 + 1e-9)
    assert -1e-9 <= body["metrics"]["makespan_gap"] < 0.5
    assert main(["show", str(target)]) == 0


def test_a_hybrid_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps({"format": FORMAT, "kinds": KINDS, "layers": ["attention", "mlp"] * 4}))
    assert main(["layout", "--layers", str(path), *ARGUMENTS, "--schedule", "zbv", "--empty-stages", "--json", "-"]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert layout["flag"] == "--hybrid-layer-pattern"
    assert layout["text"].replace("|", "") == "*-" * 4
    assert layout["text"].count("|") == 3


def test_ctrl_c_takes_the_best_layout_so_far(
    layers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All searches after it end at once."""
    pressed: list[bool] = []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if not pressed:
            pressed.append(True)
            time.sleep(0.5)  # the main thread waits for the search by now
            os.kill(os.getpid(), signal.SIGINT)
        until = time.monotonic() + 20
        while not kwargs["options"].progress.is_stopped and time.monotonic() < until:
            time.sleep(0.01)
        return plan_layout(*args, **kwargs)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    monkeypatch.setattr(layouts, "plan_layout", interrupted)
    file = tmp_path / "layout.json"
    words = ["layout", "--layers", layers, *ANY, "--effort", "max", "--json", str(file)]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "stopped, with the best found so far" in err
    assert "--pipeline-model-parallel-layout" in out
    assert main(["show", str(file)]) == 0


def test_no_empty_stages(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layout", "--layers", layers, *ARGUMENTS, "--schedule", "zb-interleaved", "--num-chunks", "3"]
    assert main([*words, "--json", "-"]) == 0
    assert min(json.loads(capsys.readouterr().out)["layout"]["per_stage"][1:-1]) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "70 apples"], "--memory is '70 apples'; give a size above 0 such as 70GiB"),
        (["--memory", "1GiB"], "no layout that was tried fits devices of 1.00 GiB"),
        (["--schedule", "zbw"], "unknown schedule 'zbw'"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(
    words: list[str], message: str, layers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", "--layers", layers, *ANY, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("schedule", [["1f1b"], ["interleaved-1f1b", "--num-chunks", "2"]], ids=lambda words: words[0])
def test_a_layout_for_megatron_core_s_own_schedules(
    schedule: list[str], layers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "layout.json"
    words = ["--layers", layers, "-p", "2", "-m", "4", "--schedule", *schedule, "--memory", "9GiB"]
    assert main(["layout", *words, "--json", str(file)]) == 0
    out, body = capsys.readouterr().out, json.loads(file.read_text())
    layout = body["layout"]
    assert out.startswith(f'--pipeline-model-parallel-layout "{layout["text"]}"\n')
    read = PipelineParallelLayerLayout(layout["text"], 2)
    counts = [sum(part.name == "decoder" for part in stage) for chunks in zip(*read.layout, strict=True) for stage in chunks]
    assert counts == layout["per_stage"], "megatron-core reads the same stages"
    assert len(counts) == (4 if "--num-chunks" in schedule else 2)
    assert body["metrics"]["makespan_ms"] <= (body["even_makespan_ms"] or math.inf) * (1 + 1e-9)
    assert max(body["metrics"]["peak_bytes"]) <= 9 * 2**30
    assert body["with_zerobubble"]["metrics"]["makespan_ms"] <= body["metrics"]["makespan_ms"]
    assert (" spread evenly (" in out) == (body["even_makespan_ms"] is not None)
    assert main(["layout", *words[:-1], "1GiB"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


SCRIPT = [
    "torchrun",
    "pretrain_gpt.py",
    "--num-layers",
    "6",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "64",
    "--micro-batch-size=2",
    "--bf16",
    "--vocab-size",
    "500",
    "--pipeline-model-parallel-size",
    "2",
    "--global-batch-size",
    "16",
    "--lr",
    "1e-3",
    "--swiglu",
]


def test_a_layout_for_the_flags_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks and microbatches are those of the run, and the estimated layers find the same layout as a file."""
    file = tmp_path / "layers.json"
    words = ["--data-parallel-size", "2", "--save-layers", str(file)]
    assert main(["layout", *words, "--", *SCRIPT]) == 0
    text = capsys.readouterr().out
    assert "Times and bytes are estimated, for H100 (SXM)" in text
    assert main(["layout", *words, "--json", "-", "--", *SCRIPT]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["num_ranks"], body["num_microbatches"]) == (2, 4)
    assert body["assumed"].startswith("H100")
    assert main(["layout", "--layers", str(file), "-p", "2", "-m", "4"]) == 0
    assert capsys.readouterr().out == text[: text.index("Times and bytes")]


def test_a_layout_for_a_model_of_more_than_a_terabyte(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight layers of 13 billion parameters, without tensor parallelism: 1.7 TiB of weights, gradients and optimizer state."""
    sizes = ["--num-layers", "8", "--hidden-size", "32768", "--num-attention-heads", "256", "--vocab-size", "128000"]
    assert main(["layout", "--", *SCRIPT, *sizes]) == 0
    held = re.findall(r"^  rank \d: .* ([\d.]+) GiB at most$", capsys.readouterr().out, re.MULTILINE)
    assert len(held) == 2
    assert sum(map(float, held)) == pytest.approx(2.006e12 / 2**30, rel=0.01), "8 x 13e9 x 18 bytes, and activations"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-p", "2"], "give either --layers FILE, or -- and the command line of a run"),
        (["--layers", "x", "--", *SCRIPT], "give either --layers FILE, or -- and the command line of a run"),
        (["--", *SCRIPT, "--num-experts", "8"], "--num-experts: only dense transformer layers are estimated; give --layers"),
        (["--", *SCRIPT, "--pipeline-model-parallel-size=0"], "--pipeline-model-parallel-size is 0; give 1 or more"),
        (["--data-parallel-size", "3", "--", *SCRIPT], "--global-batch-size 16 does not divide over --micro-batch-size 2 x"),
        (["--data-parallel-size", "0", "--", *SCRIPT], "--data-parallel-size is 0; give 1 or more"),
        (["--", *[word for word in SCRIPT if "pipeline" not in word]], "the number of pipeline ranks is missing"),
    ],
)
def test_a_run_whose_layers_cannot_be_estimated(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_plan_has_no_limit_in_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--memory-limit", "60GiB", *ARGUMENTS])
    assert "a size in bytes needs the model's: zerobubble layout --layers FILE --memory 60GiB" in capsys.readouterr().err


def test_four_microbatches_per_rank_by_default(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for given in ([], ["--num-microbatches", "8"]):
        assert main(["layout", "--layers", layers, "--num-ranks", "2", "--memory", "70GiB", *given]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "2 pipeline ranks (PP), 8 microbatches per iteration" in printed[0]


@pytest.mark.parametrize(("text", "value"), [("70GiB", 70 * 2**30), ("1.5 GB", 1.5e9), ("123", 123), ("2MiB", 2**21)])
def test_sizes(text: str, value: float) -> None:
    assert parse_bytes(text) == value
