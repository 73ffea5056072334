"""The benchmark of sharded gradients: its table, bad input, and that its page is made from the recorded result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.benchmarks.shard_gradients import FORMAT, Balance, main

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"


@pytest.mark.parametrize("flags", [["--num-ranks", "1"], ["--data-parallel", "1"], ["--group-size", "0"], ["--schedule", "zbx"]])
def test_bad_input_is_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2


def test_the_page_is_made_from_the_recorded_result(capsys: pytest.CaptureFixture[str]) -> None:
    result = DOCS / "data" / "shard_gradients.json"
    assert json.loads(result.read_text())["format"] == FORMAT
    assert main(["--from", str(result)]) == 0
    assert capsys.readouterr().out == (DOCS / "shard_gradients.md").read_text()


def test_the_computed_balance() -> None:
    """A layer of GPT-3's width: 6.75 GiB of gradients, 7/8 of them saved; 96 bytes per token and unit of width for four Ws."""
    each = Balance(hidden_size=12288, tokens=2048, data_parallel=8, group_size=4)
    assert each.saved_mib == pytest.approx(6.75 * 1024 * 7 / 8)
    assert each.held_mib == 96 * 12288 * 2048 / 2**20
    assert each.link_gb_s == pytest.approx(2 / (2048 * 4) * 400e12 * 7 / 8 / 1e9)


def test_measured_memory_and_volume_match_the_prediction() -> None:
    """Each of two replicas keeps about half of the gradients; volume and error fall with K, to those of ZeRO-1."""
    for rows in json.loads((DOCS / "data" / "shard_gradients.json").read_text())["schedules"].values():
        zero1, *sharded = rows
        assert zero1["group_size"] is None
        for row in sharded:
            assert row["gradients_kept"] < 0.6 * zero1["gradients_kept"]
            assert row["apart"] < 1e-6
        assert [row["waiting_peak"] for row in sharded] == sorted(row["waiting_peak"] for row in sharded)
        assert [row["reduced"] for row in sharded] == sorted((row["reduced"] for row in sharded), reverse=True)
        assert sharded[-1]["apart"] == 0.0
        assert sharded[-1]["reduced"] == zero1["reduced"]


@pytest.mark.slow
def test_measures(capsys: pytest.CaptureFixture[str]) -> None:
    """With enough layers that more is saved than the three buckets that are full at a time."""
    flags = "--schedule zb-h1 --num-microbatches 2 --group-size 2 --num-layers 12 --hidden-size 32 --bucket-size 2000 --json -"
    assert main(flags.split()) == 0
    zero1, sharded = json.loads(capsys.readouterr().out)["schedules"]["zb-h1"]
    assert 0 < sharded["gradients_kept"] < sharded["gradients_peak"] < zero1["gradients_kept"]
    assert sharded["apart"] == 0.0
