"""Slices of microbatches in the commands that plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.cli.main import main
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.length_model import slices_of_sequence
from megatron.zerobubble.plan.costs.lengths_and_links import LengthsAndLinks
from megatron.zerobubble.plan.costs.slicing import unlike_lengths
from megatron.zerobubble.plan.ir import Placement, Plan

LONG = ["--num-ranks", "4", "--num-microbatches", "4", "--effort", "fast", "--forward-ms", "8", "--backward-ms", "9"]
CUT = ["--slices", "4", "--sequence-length", "8192"]


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """The JSON that a plan command prints."""
    assert main(["plan", *LONG, *words, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_slices_need_less_time_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    whole = planned(capsys, "--schedule", "1f1b")
    cut = planned(capsys, "--schedule", "1f1b", *CUT, "--attention-share", "0.3", "--key-share", "0.1")
    assert (whole["format"], cut["format"]) == ("zerobubble-plan/1", "zerobubble-plan/3")
    lengths = cut["costs"]["slices"]["lengths"]
    assert sum(lengths) == 8192
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]
    for name in ("makespan_ms", "span_ms"):
        assert cut["metrics"][name] < 0.75 * whole["metrics"][name]
    assert max(cut["metrics"]["peak_memory"]) < 0.6 * max(whole["metrics"]["peak_memory"])


def test_auto_takes_no_more_slices_than_pay(capsys: pytest.CaptureFixture[str]) -> None:
    auto = ["--slices", "auto", "--sequence-length", "8192"]
    assert Plan.from_json(json.dumps(planned(capsys, "--schedule", "zb", *auto))).num_slices >= 4
    dear = planned(capsys, "--schedule", "zb", *auto, "--wgrad-ms", "8", "--pass-overhead-ms", "7")
    assert Plan.from_json(json.dumps(dear)).num_slices == 1


def test_slices_that_a_run_measured_say_what_others_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in the plan file of a run with --zero-bubble-slices auto."""
    costs = CostModel.uniform(Placement.linear(4), forward_ms=8.0, backward_ms=9.0, wgrad_ms=7.0)
    slicing = LengthsAndLinks(sequence_length=8192, attention_share=0.3, key_share=0.1, overhead_ms=0.2)
    pieces = slices_of_sequence(unlike_lengths(8192))
    measured = costs.with_table(slicing.by_length(costs, slicing.overhead_ms).table([pieces], key_share=slicing.key_share).of(0))
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"costs": measured.to_json()}))
    given = ["--schedule", "1f1b", "--costs", str(file)]
    whole, cut, own = (planned(capsys, *given, *more) for more in ([], ["--slices", "8"], ["--slices", "4"]))
    assert whole["costs"]["forward_ms"] == pytest.approx([8.0] * 4)
    assert "slices" not in whole["costs"]
    assert cut["costs"]["forward_ms"] == pytest.approx([8.0 + 7 * 0.2] * 4)
    assert len(cut["costs"]["slices"]["lengths"]) == 8
    assert own["costs"]["slices"]["lengths"] == [4096, 2048, 1024, 1024]
    assert main(["plan", *LONG, *given, "--slices", "8", "--key-share", "0.1"]) == 2
    assert "--key-share is 0.1 and " in capsys.readouterr().err


def test_schedules_are_compared_over_slices(capsys: pytest.CaptureFixture[str]) -> None:
    compare = [
        "compare",
        *LONG,
        "--schedules",
        "1f1b,zb-h1:slices=4,interleaved-1f1b:2,zbv:slices=4",
        "--sequence-length",
        "8192",
    ]
    assert main([*compare, "--json", "-"]) == 0
    whole, cut, _, last = json.loads(capsys.readouterr().out)
    assert [cut["schedule"], last["schedule"]] == ["zb-h1:slices=4", "zbv:slices=4"]
    assert min(cut["speed_up"], last["speed_up"]) > 1.3
    assert max(cut["peak_memory"], last["peak_memory"]) < 0.6 * whole["peak_memory"]
    assert main(compare[:-2]) == 2
    assert "slices need the tokens of a sequence" in capsys.readouterr().err
    assert main([*compare[:-3], "1f1b,zbv", *compare[-2:]]) == 2
    assert "microbatches are whole" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zbv"])
def test_long_microbatches_have_more_slices_than_short_ones(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ["--microbatch-tokens", "8192,1024,2048,4096", "--attention-share", "0.1"]
    whole = planned(capsys, "--schedule", name, *tokens)
    cut = planned(capsys, "--schedule", name, *tokens, "--slices", "4", "--key-share", "0.1")
    assert (whole["format"], cut["format"]) == ("zerobubble-plan/2", "zerobubble-plan/3")
    lengths = [each["lengths"] for each in cut["costs"]["slices"]]
    assert list(map(sum, lengths)) == [8192, 1024, 2048, 4096]
    assert list(map(len, lengths)) == [4, 1, 1, 2]
    plan = Plan.from_json(json.dumps(cut))
    data = plan.assignment or range(4)
    assert [len(lengths[i]) for i in data] == list(plan.slice_counts)
    assert cut["metrics"]["makespan_ms"] < 0.8 * whole["metrics"]["makespan_ms"]
    written = tmp_path / "plan.json"
    written.write_text(json.dumps(cut))
    assert main(["show", str(written)]) == 0
    assert "1 to 4 slices per microbatch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slices", "4"], "slices need the tokens of a sequence: give --sequence-length"),
        (["--slices", "0"], "--slices is '0'; give a number from 1 to 1,024, or auto"),
        (["--slices", "9" * 5000], "give a number from 1 to 1,024, or auto"),
        (["--slices", "x"], "--slices is 'x'; give a number from 1 to 1,024, or auto"),
        (["--slices", "8", "--sequence-length", "4"], "a sequence of 4 tokens has 4 tokens, which is too few for 8 slices"),
        (["--key-share", "0.1"], "--key-share is 0.1 and microbatches are whole; give --slices, or drop it"),
        ([*CUT, "--key-share", "1"], "key_share is 1.0; it must be 0 or more and below 1"),
        ([*CUT, "--pass-overhead-ms", "9"], "overhead_ms is 9 and a pass takes "),
        ([*CUT, "--schedule", "interleaved-1f1b"], "'interleaved-1f1b' has no order of slices; choose one of 1f1b, "),
        ([*CUT, "--memory-limit", "0.01"], "0.01"),
        ([*CUT, "--microbatch-tokens", "1,2,3,4"], "--sequence-length is for microbatches of one length"),
        (
            ["--slices", "4", "--microbatch-tokens", "1,2,3,2"],
            "a sequence of 3 tokens has 3 tokens, which is too few for 4 slices",
        ),
        (["--slices", "2", "--microbatch-tokens", "9,8", "-m", "4"], "--microbatch-tokens has 2 lengths"),
    ],
)
def test_what_cannot_be_cut_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = [] if "--schedule" in words else ["--schedule", "zb"]
    assert main(["plan", *LONG, *schedule, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
