"""How much of the time of experts' all-to-alls is hidden: two pipeline ranks, expert parallelism 2, on the CPU and gloo.

A small model is trained twice, without --zero-bubble-overlap-moe and with it. Every all-to-all sleeps before gloo runs it, as
if the network took that long; a pass that computes meanwhile does so on another thread. Each rank notes when it computes and
when it communicates, from the iteration on that runs in pairs. Times of iterations are those of a CPU that four ranks share,
and say nothing about GPUs.

  python -m tools.benchmarks.ep_overlap_gloo --sleep-ms 4
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.zerobubble.cli import train
from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.ranks import start_ranks
from megatron.zerobubble.cli.run import run_itself
from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.mcore.model.expert_exchanges import ExpertExchanges
from megatron.zerobubble.mcore.replanner import Replanner
from megatron.zerobubble.runtime.turns import Pair, Side
from tools.benchmarks.reports import Row, markdown_table, origin, run_report

FORMAT = "zerobubble-ep-overlap-gloo/1"
RANKS, ITERATIONS, WARM_UP = 4, 6, 2
PAIRED = ["--zero-bubble-overlap-moe", "--zero-bubble-pipeline-timers-start-iter", "1", "--zero-bubble-pipeline-timers-end-iter"]
PAIRED.append(str(WARM_UP))  # by what these measure passes are paired
SCHEDULES = {"ZB-H1": "--enable-zero-bubble", "ZBV": "--zero-bubble-v-schedule"}
JOB = (
    "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --num-layers 4 --hidden-size 256 --num-attention-heads 4 "
    "--seq-length 128 --micro-batch-size 2 --global-batch-size 32 --num-experts 4 --moe-router-topk 2 --disable-bias-linear "
    "--moe-token-dispatcher-type alltoall --hidden-dropout 0 --attention-dropout 0 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 128 --zero-bubble-planning-seconds 0 --distributed-backend gloo --eval-iters 0 "
    f"--log-interval 1 --train-iters {ITERATIONS}"
).split()
"""8 microbatches per pipeline."""
_FOLDER, _SLEEP = "EP_OVERLAP_FOLDER", "EP_OVERLAP_SLEEP_MS"

Interval = tuple[float, float]


class Clock:
    """Notes on one rank when its passes compute, and when they communicate. Times in seconds."""

    def __init__(self) -> None:
        self.computes: dict[Side, list[Interval]] = {side: [] for side in Side}
        self.fills: list[Interval] = []
        self.all_to_alls: list[tuple[Side, float, float]] = []
        self._since: dict[Side, float] = {}
        self._left: dict[Side, float] = {}

    def install(self) -> None:
        """Replace what begins and ends computation and communication by functions that note the time."""
        begin, end, wait, stop = ExpertExchanges.begin, ExpertExchanges.end, Pair.wait, Pair.end
        make, after = ExpertExchanges.__init__, Replanner.after

        def noted_make(exchanges: Any, dispatchers: Any, device: Any, fill: Callable[[], object]) -> None:
            make(exchanges, dispatchers, device, lambda: self._fill(fill))

        def noted_begin(exchanges: ExpertExchanges, side: Side) -> None:
            self._stop(side)
            begin(exchanges, side)
            self._left[side] = time.perf_counter()

        def noted_end(exchanges: ExpertExchanges, side: Side) -> None:
            self.all_to_alls.append((side, self._left.pop(side), time.perf_counter()))
            end(exchanges, side)

        def noted_wait(pair: Pair, side: Side) -> None:
            wait(pair, side)
            self._since[side] = time.perf_counter()

        def noted_stop(pair: Pair, side: Side, failure: BaseException | None) -> None:
            self._stop(side)
            stop(pair, side, failure)

        def noted_after(replanner: Replanner, *args: Any) -> None:
            after(replanner, *args)
            self.all_to_alls.clear()
            for noted in (self.fills, *self.computes.values()):
                noted.clear()

        replaced: list[tuple[Any, str, Any]] = [
            (ExpertExchanges, "__init__", noted_make),
            (ExpertExchanges, "begin", noted_begin),
            (ExpertExchanges, "end", noted_end),
            (Pair, "wait", noted_wait),
            (Pair, "end", noted_stop),
            (Replanner, "after", noted_after),
        ]
        for owner, name, function in replaced:
            setattr(owner, name, function)

    def _stop(self, side: Side) -> None:
        since = self._since.pop(side, None)
        if since is not None:
            self.computes[side].append((since, time.perf_counter()))

    def _fill(self, fill: Callable[[], object]) -> None:
        begun = time.perf_counter()
        if fill():
            self.fills.append((begun, time.perf_counter()))

    def shares(self) -> Row:
        """Seconds of all-to-alls, and those in which the other pass, or W, computed meanwhile."""
        found = {"all_to_all_s": 0.0, "beside_pass_s": 0.0, "beside_w_s": 0.0}
        for side, begun, ended in self.all_to_alls:
            found["all_to_all_s"] += ended - begun
            for name, intervals in (("beside_pass_s", self.computes[side.other]), ("beside_w_s", self.fills)):
                found[name] += sum(max(0.0, min(ended, last) - max(begun, first)) for first, last in intervals)
        return found


def _sleep_in_all_to_alls(seconds: float) -> None:
    whole = dist.all_to_all_single

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return whole(*args, **kwargs)

    dist.all_to_all_single = slow


def run_rank(flags: Sequence[str]) -> None:
    """Train on one rank, and write what its clock saw."""
    _sleep_in_all_to_alls(float(os.environ[_SLEEP]) / 1e3)
    clock = Clock()
    clock.install()
    run_itself(train.__file__, flags)
    Path(os.environ[_FOLDER], f"rank{os.environ['RANK']}.json").write_text(json.dumps(clock.shares()), encoding="utf-8")


def measure(args: argparse.Namespace) -> Row:
    """The report."""
    rows = []
    for name, flag in SCHEDULES.items():
        row: Row = {"schedule": name}
        for which, more in (("apart", []), ("beside", PAIRED)):
            with tempfile.TemporaryDirectory() as folder:
                os.environ |= {_FOLDER: folder, _SLEEP: str(args.sleep_ms)}
                metrics = Path(folder, "metrics.jsonl")
                words = [*JOB, flag, *more, "--metrics-jsonl", str(metrics)]
                if start_ranks(RANKS, "tools.benchmarks.ep_overlap_gloo", words):
                    raise ExecutionError(f"{name}, {which}: a rank failed")
                lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
                times = [line["iteration_ms"] for line in lines if "iteration_ms" in line]
                row[f"{which}_ms"] = statistics.median(times[WARM_UP:])
                row[f"{which}_loss"] = [line["loss"] for line in lines if "loss" in line]
                if more:
                    seen = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(RANKS)]
                    row |= {key: sum(each[key] for each in seen) for key in seen[0]}
        if row.pop("apart_loss") != row.pop("beside_loss"):
            raise ExecutionError(f"{name}: losses differ")
        rows.append(row)
    return {"command": args.command, "origin": origin(), "sleep_ms": args.sleep_ms, "rows": rows}


def markdown(report: Row) -> str:
    """The report as a page."""
    heads = ("schedule", "all-to-alls hidden", "beside the other pass", "beside W", "iteration, apart", "iteration, beside")
    lines = []
    for row in report["rows"]:
        whole = row["all_to_all_s"]
        shares = [100 * row[name] / whole for name in ("beside_pass_s", "beside_w_s")]
        times = [f"{row[name]:.0f} ms" for name in ("apart_ms", "beside_ms")]
        lines.append([row["schedule"], *(f"{share:.0f} %" for share in (sum(shares), *shares)), *times])
    title = (
        f"p = 2, EP 2, gloo, 8 microbatches; each all-to-all takes {report['sleep_ms']:g} ms more. The same losses, to the bit."
    )
    return "\n".join([title, "", *markdown_table(heads, lines)])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or under torchrun train on one rank."""
    if _FOLDER in os.environ and "RANK" in os.environ:
        run_rank(sys.argv[1:] if argv is None else argv)
        return 0
    parser = Parser(prog="python -m tools.benchmarks.ep_overlap_gloo", description=__doc__)
    parser.add_argument("--sleep-ms", type=float, default=4.0, help="time of each all-to-all (default %(default)s)")
    return run_report(parser, argv, FORMAT, measure, markdown)


if __name__ == "__main__":
    sys.exit(main())
