"""`zerobubble bench` as a user starts it: a script's real training blocks on two ranks."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.bench.contenders import WARM_UP
from tests.support.megatron_lm import LR, MISSING, SMALL, WITHOUT_KERNELS, logged
from tests.support.tolerances import after_steps
from tests.training.launch import ROOT, environment, launch_warm

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "`zerobubble bench`: whole comparisons on two ranks (stock 1F1B, ZBV with post-validation, `auto`) with equal losses; a "
    "contender that cannot run, fails, is killed or hangs is a row; interruption; all ranks end with the cause",
    "works; **not run on a GPU**, not under Slurm",
)

_PRETRAIN = """
from unittest import mock

import tests.support.python_3_12.sitecustomize

mock.patch("megatron.core.datasets.utils.compile_helpers").start()  # wheels come without the sources; this data needs none
from tests.support import pretrain_script

pretrain_script.main()
"""
"""A script around Megatron-LM's own loop, with what its wheels need on Python 3.11."""

BENCH = Path(__file__).with_name("bench_rank.py")
_SCRIPT: list[Any] = [
    "--",
    ROOT / "examples" / "stock_megatron_core.py",
    "--pipeline-model-parallel-size",
    "2",
    "--train-iters",
    "100",
]
_CHUNKS = "--virtual-pipeline-model-parallel-size 2"


def on_script(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run on two ranks, as under torchrun."""
    return launch_warm(["--cpu", "--bench-dir", folder, *words], num_ranks=2, script=BENCH)


_NAMES = ("stock-1f1b", "zb-h1", "zbv+pv", "auto", "1f1b:slices=4")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """One comparison."""
    folder = tmp_path_factory.mktemp("bench")
    options = ["--contenders", ",".join(_NAMES), "--rounds", "2", "--timed-iters", "2", "--zero-bubble-planning-seconds", "0.1"]
    return on_script(folder, *options, "--json", "-", "--contender-flags", f"zbv+pv={_CHUNKS}", *_SCRIPT), folder


def rows(folder: Path) -> dict[str, Any]:
    """bench.json's contenders by name."""
    return {row["name"]: row for row in json.loads((folder / "bench.json").read_text())["contenders"]}


@pytest.mark.claims(
    "Your own script",
    "`zerobubble bench` on a script: stock 1F1B with nothing installed, ZB-H1, ZBV with post-validation, `auto`; times between "
    "the calls of the schedule, losses from its results, memory, bubbles measured and predicted",
    "works; **not run on a GPU**",
)
def test_it_ends_with_a_table_and_files(done: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    result, folder = done
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(result.stdout) == json.loads((folder / "bench.json").read_text()), "and nothing else on stdout"
    assert "speed-up [95 %]" in result.stderr
    assert "2 rounds, 2 timed iterations per block" in (folder / "bench.md").read_text()
    assert {each.name for each in folder.iterdir()} == {"bench.md", "bench.json", "logs"}
    assert "zbv+pv, round 1: " in result.stderr
    assert "left] stock-1f1b, round 2:" in result.stderr


def test_all_contenders_train_the_same_model(done: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """Drawn by name, on the same samples, without dropout: the first blocks end with the same loss, which is the script's own.
    Slices are sums in another order."""
    found = rows(done[1])
    log = (done[1] / "logs" / "block-0-rank-1.log").read_text()
    printed = [json.loads(line)["losses"] for line in log.splitlines() if line.startswith('{"iteration"')]
    assert len(printed) == WARM_UP + 2, "the block ends where the next iteration would begin"
    for name in _NAMES:
        row = found[name]
        assert row["losses"]["0"] == pytest.approx(statistics.fmean(printed[-1]), rel=after_steps(WARM_UP + 2 - 1, LR)), name
        assert set(row["seconds"]) == set(row["overhead"]) == {"0", "1"}
        assert all(0 < share < 1 for share in row["overhead"].values())


def test_what_is_measured_and_predicted(done: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    found = rows(done[1])
    for name in _NAMES:
        row = found[name]
        assert row["predicted_ms"] > 0
        assert 0 <= row["bubble"] < 1
        assert 0 <= row["predicted_bubble"] < 1
        idle = row["idle"]
        assert 0 <= idle["share"] < 1
        assert idle["imbalance"] + idle["schedule"] + idle["waiting"] == pytest.approx(idle["share"])
        assert row["state_bytes"] > row["activation_bytes"] > 0
        assert row["allocated_bytes"] is None, "the CPU has no allocator that counts"
        assert row["predicted_activation_bytes"] == pytest.approx(row["activation_bytes"], rel=0.5)
        assert row["tokens_per_s"] == pytest.approx(4 * 2 * 32 / row["ms"]["value"] * 1000)
    assert found["stock-1f1b"]["speed_up"]["value"] == 1.0
    assert found["auto"]["ran"] == "zb"
    cut, whole = (found[name]["predicted_activation_bytes"] for name in ("1f1b:slices=4", "stock-1f1b"))
    assert cut < 0.8 * whole


def test_the_command_to_use_has_the_flags_of_the_contender(done: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    found, words = rows(done[1]), " ".join(map(str, _SCRIPT[1:]))
    start = "zerobubble run --nproc-per-node 2 --cpu --zero-bubble-schedule"
    assert found["stock-1f1b"]["use"] == words
    assert found["1f1b:slices=4"]["use"] == f"{start} 1f1b --zero-bubble-slices 4 {words}"
    assert found["zbv+pv"]["use"] == f"{start} zbv --enable-optimizer-post-validation {words} {_CHUNKS}"
    assert found["zbv+pv"]["note"] == f"with {_CHUNKS}"


@pytest.mark.claims(
    "Your own script",
    "`zerobubble bench` on a script that draws its weights rank by rank: all contenders begin with the same, drawn by name",
    "works, 1e-6",
)
@pytest.mark.sampled(0.1, group="whole jobs")
def test_contenders_begin_with_the_same_weights_on_a_script_that_draws_them_by_rank(tmp_path: Path) -> None:
    text, drawing = (ROOT / "examples" / "stock_megatron_core.py").read_text(), "weight.copy_("
    assert drawing in text
    script = tmp_path / "by_rank.py"
    script.write_text(text.replace(drawing, "(lambda drawn: None)("))
    words = ["--contenders", "stock-1f1b,zbv", "--contender-flags", f"zbv={_CHUNKS}", "--rounds", "1", "--timed-iters", "1"]
    losses, done = {}, {}
    for name, more in {"ours": [], "own": ["--zero-bubble-own-weights"]}.items():
        done[name] = on_script(tmp_path / name, *words, *more, "--", script, *_SCRIPT[2:])
        assert done[name].returncode == 0, done[name].stdout + done[name].stderr
        losses[name] = [row["losses"]["0"] for row in rows(tmp_path / name).values()]
    assert losses["ours"][1] == pytest.approx(losses["ours"][0], rel=after_steps(WARM_UP, LR))
    assert abs(losses["own"][1] - losses["own"][0]) > 1e-3
    assert re.search(r"^zbv .* yes$", done["ours"].stdout, re.MULTILINE)
    assert re.search(r"^zbv .* -$", done["own"].stdout, re.MULTILINE), "the losses do not compare"
    assert "Not compared: the script has dropout (try its flags for 0), or draws its own weights." in done["own"].stdout


@pytest.mark.sampled(0.07, group="whole jobs")
def test_a_baseline_with_wrong_gradients_is_a_row_that_says_so(tmp_path: Path) -> None:
    """The script of the others, with transfers in one batch, which megatron-core mixes up between two ranks."""
    script = tmp_path / "batched.py"
    script.write_text(_SCRIPT[1].read_text().replace("p2p_comm=interleaves", "p2p_comm=False").replace("not interleaves", "True"))
    options = ["--contenders", "interleaved-1f1b:2,zbv", "--rounds", "1", "--timed-iters", "2"]
    words = ["--contender-flags", f"interleaved-1f1b:2,zbv={_CHUNKS}", "--", script, *_SCRIPT[2:]]
    done = on_script(tmp_path, *options, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    found, line = rows(tmp_path), "megatron-core's interleaved 1F1B trains on wrong gradients here: with 2 pipeline ranks"
    assert found["interleaved-1f1b:2"]["note"].startswith(f"with {_CHUNKS}; {line}")
    assert f"interleaved-1f1b:2: {line}" in done.stderr
    assert found["zbv"]["note"] == f"with {_CHUNKS}"


@pytest.mark.sampled(0.07, group="whole jobs")
def test_a_script_that_ends_early_or_fails_is_a_row_with_the_reason(tmp_path: Path) -> None:
    flags = {"stock-1f1b": "--train-iters 3", "zb-h1": "--no-such-flag", "zb": "--pipeline-model-parallel-size 1", "zbv": ""}
    flags["stock-1f1b:no-sync"] = "--no-such-flag"
    more = [word for name, each in flags.items() for word in ("--contender-flags", f"{name}={each}")]
    done = on_script(tmp_path, "--contenders", ",".join(flags), "--quick", *more, *_SCRIPT)
    assert done.returncode == 1, done.stdout + done.stderr
    reasons = {
        "stock-1f1b": f"stock_megatron_core.py ended after 3 training iterations, and a block runs {WARM_UP + 3}, and begins one",
        "zb-h1": "ended: stock_megatron_core.py: error: unrecognized arguments: --no-such-flag",
        "zb": "stock_megatron_core.py trains with megatron-core's own schedule, not with zb, on 1 pipeline rank(s)",
        "zbv": "schedule zbv has 2 model chunk(s) per rank, the loop was started with virtual_pipeline_model_parallel_size None",
    }
    for name, reason in reasons.items():
        known = r"rank [01] " if name == "zb-h1" else ""
        assert re.search(f"{name}, round 1: failed: {known}{re.escape(reason)}", done.stderr), done.stderr
        assert re.search(f"{name}: {known}{re.escape(reason)}", done.stdout)
    said = re.search(
        r"no-sync, round 1: failed: rank ([01]) ended: .*no-such-flag; stock-1f1b:no-sync runs no sch.*: (.*)", done.stderr
    )
    assert said is not None, done.stderr
    assert Path(said[2]).name.endswith(f"-rank-{said[1]}.log")


@pytest.mark.claims(
    "Your own script",
    "`zerobubble bench` on Megatron-LM's own `pretrain()`, with an evaluation between timed iterations: stock 1F1B, ZB-H1, "
    "V-Half with post-validation; the losses that the loop logs (`make test-slow`, megatron-core 0.19.2)",
    "works",
)
@pytest.mark.slow
def test_megatron_lms_own_loop_with_an_evaluation_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip(MISSING)
    script = tmp_path / "pretrain.py"
    script.write_text(_PRETRAIN)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    words = f"{SMALL} {WITHOUT_KERNELS} --pipeline-model-parallel-size 2 --train-iters 100 --eval-interval 7".split()
    names = ["stock-1f1b", "zb-h1", "v-half+pv"]
    options = ["--contenders", ",".join(names), "--rounds", "2", "--timed-iters", "3", "--", script]
    done = on_script(tmp_path, *options, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    log = logged((tmp_path / "logs" / "block-0-rank-1.log").read_text())
    assert log.keys() >= {"8", "iteration 7"}
    last = pytest.approx(float(log[str(WARM_UP + 3)][0]), rel=after_steps(WARM_UP + 2, LR))
    for name in names:
        assert rows(tmp_path)[name]["losses"]["0"] == last, name


@pytest.mark.slow
def test_an_interrupted_comparison_reports_what_it_has(tmp_path: Path) -> None:
    options = ["--cpu", "--contenders", "zb-h1,1f1b", "--rounds", "50", "--bench-dir", tmp_path]
    start = [sys.executable, "-u", "-m", "megatron.zerobubble.cli.bench", "--nproc-per-node", "2", *options, *_SCRIPT]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = subprocess.Popen(start, cwd=ROOT, env=environment(), **pipes)
    until, lines = time.monotonic() + 200, []
    assert job.stdout is not None
    for line in job.stdout:
        lines.append(line)
        if "round 2:" in line or time.monotonic() > until:
            break
    job.send_signal(signal.SIGINT)
    rest, _ = job.communicate(timeout=60)
    output = "".join(lines) + rest
    assert "interrupted: this is what was measured so far" in output
    assert "\nzb-h1 " in rest, output
    assert len(rows(tmp_path)["zb-h1"]["seconds"]) >= 1


@pytest.mark.slow
def test_ranks_that_srun_started_need_no_torchrun(tmp_path: Path) -> None:
    """Rank 0 hosts the store in which the ranks of every block meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = ["--cpu", "--contenders", "1f1b,zb-h1", "--rounds", "2", "--timed-iters", "1", "--bench-dir", tmp_path]
    jobs = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        start = [sys.executable, "-m", "megatron.zerobubble.cli.bench", *options, *_SCRIPT]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        jobs.append(subprocess.Popen(start, cwd=ROOT, env=environment(**place), **pipes))
    outputs = [job.communicate(timeout=240)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert outputs[1] == "", "only rank 0 reports"
    assert set(rows(tmp_path)["zb-h1"]["seconds"]) == {"0", "1"}


def test_wrong_flags_are_one_line_before_any_rank_starts() -> None:
    start = [sys.executable, "-m", "megatron.zerobubble.cli.main", "bench", "--nproc-per-node", "2", "--contenders", "zbx"]
    result = subprocess.run(
        [*start, *_SCRIPT], capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env=environment()
    )
    assert result.returncode == 2
    assert result.stderr.startswith("zerobubble bench: error: --contenders: 'zbx' is unknown; ")
    assert result.stderr.count("\n") == 1
