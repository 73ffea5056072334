"""Step R, on the CPU: whether a composed pipeline of two ranks is as fast as one that runs.

Each rank runs alone with one thread, and the iteration with its optimizer step is composed from that. Then `zerobubble bench`
runs the same model and schedules on two ranks. Both ways a schedule has an iteration time and a speed over megatron-core's 1F1B.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import torch

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.cpu.device import HostDevice
from megatron.zerobubble.plan.registry import build_plan
from tools.benchmarks.one_gpu.compose import Composition, Times
from tools.benchmarks.one_gpu.ranks import CONTENDERS, Contender, flags, run
from tools.benchmarks.one_gpu.setting import Setting
from tools.benchmarks.reports import ROOT, Row, markdown_table
from tools.benchmarks.wgrad.shapes import LayerShape

CONTENDER_OF = {"stock-1f1b": "1F1B, with its wait", "zb-h1": "ZB-H1", "zbv": "ZBV"}
"""Of `zerobubble bench` -> of step D."""
RANKS, MICROBATCHES = 2, 6
ROUNDS = 6


class _Narrow(Setting):
    """Layers with few weights for their tokens: ranks that read many weights at once wait for the host's memory."""

    def layer(self, tokens: int) -> LayerShape:
        """One of 256 channels, with an eighth of the tokens."""
        return LayerShape(
            name="narrow",
            hidden_size=256,
            num_attention_heads=4,
            num_query_groups=2,
            ffn_hidden_size=512,
            seq_length=tokens // 8,
            micro_batch_size=1,
            is_llama=True,
        )


def measure(rounds: int = ROUNDS) -> Row:
    """Compose, and run for real in some rounds."""
    setting = _Narrow(device=torch.device("cpu"))
    composed, measured = _composed(setting), _measured(setting, rounds)
    rows = [
        {
            "name": name,
            "composed_ms": composed[name],
            "ms": measured[bench]["ms"],
            "composed": composed[CONTENDER_OF["stock-1f1b"]] / composed[name],
            "speed_up": measured[bench]["speed_up"],
        }
        for bench, name in CONTENDER_OF.items()
    ]
    return {"num_ranks": RANKS, "num_microbatches": MICROBATCHES, "rounds": rounds, "rows": rows}


def _composed(setting: Setting) -> dict[str, float]:
    """Contender -> the mean of its composed iterations, with the optimizer step, in milliseconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with HostDevice(enabled=True) as host:
            return {name: _iteration(setting, host, _contender(name)) for name in CONTENDER_OF.values()}
    finally:
        torch.set_num_threads(threads)


def _iteration(setting: Setting, host: HostDevice, contender: Contender) -> float:
    runs = [run(contender, rank, setting, host, RANKS, MICROBATCHES) for rank in range(RANKS)]
    plan = build_plan(contender.plan_name, num_ranks=RANKS, num_microbatches=MICROBATCHES, num_chunks=contender.chunks)
    composition = Composition(0.0, {}, numpy.random.default_rng(1))
    passes = float(composition.makespan(contender, plan, Times(runs, RANKS, alike=False)).mean())
    steps: list[float] = [each["step_ms"] for one in runs for each in one["iterations"]]
    return passes + max(steps)


def _contender(name: str) -> Contender:
    return next(each for each in CONTENDERS if each.name == name)


def _measured(setting: Setting, rounds: int) -> dict[str, Row]:
    """Contender of `zerobubble bench` -> its milliseconds and its speed over megatron-core's 1F1B, each with an interval."""
    words = flags(_contender("ZBV"), setting, RANKS, MICROBATCHES)
    at = words.index("--zero-bubble-schedule")
    words[at : at + 2] = ["--distributed-backend", "gloo"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        command += ["-m", "megatron.zerobubble.cli.bench", "--bench-dir", folder, "--contenders", ",".join(CONTENDER_OF)]
        command += ["--rounds", str(rounds), *words]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ConfigError(f"zerobubble bench: {done.stderr.strip().rpartition(chr(10))[2]}")
        body = json.loads(Path(folder, "bench.json").read_text(encoding="utf-8"))
    return {each["name"]: each for each in body["contenders"]}


def lines(row: Row) -> list[str]:
    """The section of the page."""
    table = [
        [
            each["name"],
            f"{each['composed_ms']:.1f}",
            _text(each["ms"], ".1f"),
            f"{each['composed']:.3f}",
            _text(each["speed_up"], ".3f"),
        ]
        for each in row["rows"]
    ]
    heads = ("schedule", "composed, ms", "measured, ms", "speed over 1F1B, composed", "measured")
    return [
        "## Composed and real, on a CPU",
        "",
        f"The same composition against ranks that run: p = {row['num_ranks']}, m = {row['num_microbatches']}, a tiny model, one "
        "CPU thread per rank, gloo; iterations with their optimizer step. Measured is `zerobubble bench`, "
        f"{row['rounds']} rounds, with the interval of 95 %. Ranks that run at once share the host's memory, and take a little "
        "longer than alone.",
        "",
        *markdown_table(heads, table),
    ]


def _text(interval: Row, form: str) -> str:
    return f"{interval['value']:{form}} ({interval['low']:{form}} to {interval['high']:{form}})"
