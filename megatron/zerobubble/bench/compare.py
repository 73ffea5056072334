"""`zerobubble bench` on one rank: contenders in alternating blocks, then the report.

Every round runs one block of each contender, and begins with another one than the round before. After each round rank 0 writes
the report, so that an interrupted comparison leaves what it has found.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from megatron.zerobubble.bench.bench_options import Options
from megatron.zerobubble.bench.bench_progress import BenchProgress
from megatron.zerobubble.bench.block import BlockRequest, BlockResult
from megatron.zerobubble.bench.comparison_report import JSON, summary, write
from megatron.zerobubble.bench.contenders import Contender
from megatron.zerobubble.bench.predictions import FirstBlock, measured_costs, predict
from megatron.zerobubble.bench.speed_ups import Table
from megatron.zerobubble.bench.workers import BlockFailure, Interrupted, Workers
from megatron.zerobubble.files import replace_text
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.mcore.compat import imported_version
from megatron.zerobubble.plan.planner import AUTO
from megatron.zerobubble.version import __version__

__all__ = ["compare"]

_INTERRUPTED = 130


def compare(options: Options, launch: Launch, workers: Workers, *, argv: Sequence[str], progress: BenchProgress) -> int:
    """Run all blocks and report. All ranks must call it.

    Args:
        options: what to compare.
        launch: which rank this is; rank 0 reports.
        workers: runs the blocks.
        argv: the command line, for the report.
        progress: of all blocks.

    Returns:
        The exit code: 0, 1 if no contender has ended a block, 130 after an interruption.
    """
    comparison = _Comparison(options, launch, workers, argv, progress)
    code = 0
    try:
        with workers.interruptible():
            comparison.run()
    except Interrupted:
        code = _INTERRUPTED
    return comparison.finish(code)


class _Comparison:
    """The state of one comparison on one rank."""

    def __init__(self, options: Options, launch: Launch, workers: Workers, argv: Sequence[str], progress: BenchProgress) -> None:
        self._options, self._launch, self._workers, self._argv, self._progress = options, launch, workers, argv, progress
        self._outcomes = options.outcomes
        for outcome in self._outcomes.values():
            if outcome.failure is not None:
                progress.say(f"{outcome.name} cannot run: {outcome.failure}")
        self._first: dict[str, FirstBlock] = {}
        self._num_blocks = 0

    def run(self) -> None:
        """All rounds."""
        contenders = [contender for contender in self._options.contenders if contender.text in self._options.programs]
        for number in range(self._options.rounds):
            shift = number % len(contenders)
            for contender in contenders[shift:] + contenders[:shift]:
                if self._outcomes[contender.text].failure is None:
                    self._block(contender, number)
            if self._first and number + 1 < self._options.rounds and self._launch.rank == 0:
                self._write()
                if number == 0:
                    self._progress.say("after one round:\n\n" + summary(self._table()))

    def _block(self, contender: Contender, number: int) -> None:
        options, name = self._options, contender.text
        first = self._first.get(name)
        self._progress.block(f"{name}, round {number + 1} of {options.rounds}")
        request = BlockRequest(
            number=self._num_blocks,
            program=options.programs[name] if first is None else options.programs[name].later(),
            is_first=first is None,
            num_warm_up=options.warm_up(number),
            num_timed=options.num_timed,
            plan=None if first is None else first.result.plan,
            no_sync=contender.no_sync,
        )
        self._num_blocks += 1
        result = self._workers.run(request, tick=self._progress.tick)
        if isinstance(result, BlockFailure):
            reason = result.reason
            culprit = re.match(r"rank (\d+)", reason)
            if contender.is_stock and first is None and culprit:
                log = options.directory / "logs" / f"block-{request.number}-rank-{culprit[1]}.log"
                reason += f"; {name} runs no schedule of this package, so look for the cause in the script: {log}"
            self._outcomes[name].failure = reason
            self._progress.skip(sum(options.block_length(each) for each in range(number, options.rounds)))
            self._progress.say(f"{name}, round {number + 1}: failed: {reason}")
        else:
            self._keep(contender, number, result)

    def _keep(self, contender: Contender, number: int, result: BlockResult) -> None:
        outcome, seconds = self._outcomes[contender.text], result.seconds / self._options.num_timed
        outcome.seconds[number] = seconds
        outcome.losses[number] = result.loss
        outcome.overhead[number] = result.overhead
        if result.measured is not None:
            program = self._options.programs[contender.text]
            self._first[contender.text] = FirstBlock(contender=contender, program=program, result=result)
            outcome.activation_bytes = result.measured.activation_bytes
            outcome.state_bytes = result.measured.state_bytes
            outcome.allocated_bytes = result.measured.allocated_bytes
            if contender.schedule == AUTO:
                outcome.ran = self._first[contender.text].plan().schedule
            if result.warning is not None:
                outcome.note = "; ".join(filter(None, (outcome.note, result.warning)))
                self._progress.say(f"{contender.text}: {result.warning}")
        if result.timeline is not None:
            self._first[contender.text].recorded.append(result.timeline)
        self._progress.say(f"{contender.text}, round {number + 1}: {1000.0 * seconds:.1f} ms per iteration")

    def _table(self) -> Table:
        firsts = list(self._first.values())
        predict(firsts, self._outcomes)
        sizes = next((block.result.sizes for block in firsts), None)
        costs = measured_costs(firsts)
        return Table(
            outcomes=list(self._outcomes.values()),
            baseline=self._options.baseline,
            tokens=sizes.tokens if sizes is not None else None,
            num_ranks=self._launch.world_size,
            num_cores=os.cpu_count() if self._device() == "CPU" else None,
            pipeline_size=1 if sizes is None else sizes.pipeline,
            num_microbatches=1 if sizes is None else sizes.num_microbatches,
            costs=None if costs is None else costs.to_json(),
            losses_compare=self._options.job.seeds.weights is not None and (sizes is None or not sizes.has_dropout),
            is_fp32=sizes is None or sizes.precision == "fp32",
        )

    def _device(self) -> str:
        return next((block.result.device for block in self._first.values()), "unknown")

    def _about(self) -> dict[str, Any]:
        options, found = self._options, next(block.result for block in self._first.values())
        sizes = found.sizes
        return {
            "command": shlex.join(["zerobubble", "bench", *self._argv]),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "versions": f"megatron-zerobubble {__version__}, megatron-core {imported_version()}, torch {torch.__version__}, "
            f"Python {platform.python_version()}",
            "device": self._device(),
            "ranks": f"{self._launch.world_size} = {sizes.pipeline} pipeline x {sizes.tensor} tensor x {sizes.context} context x "
            f"{sizes.data} data",
            "model": f"{found.num_parameters / 1e6:.2f} million parameters; {sizes.num_microbatches} microbatches of "
            f"{sizes.micro_batch_size} x {sizes.seq_length} tokens, {sizes.precision}",
            "measured": f"{options.rounds} rounds, {options.num_timed} timed iterations per block",
        }

    def _write(self) -> list[Path]:
        title = "Schedules compared on one training job"
        return write(self._options.directory, self._table(), self._about(), title=title)

    def finish(self, code: int) -> int:
        """Write and print the report on rank 0. Returns the exit code."""
        has_result = any(outcome.seconds for outcome in self._outcomes.values())
        if self._launch.rank == 0:
            if code == _INTERRUPTED:
                self._progress.say("interrupted: this is what was measured so far")
            target = self._options.json
            out = sys.stderr if target == "-" else sys.stdout
            if has_result:
                files = self._write()
                if target is not None:
                    document = (self._options.directory / JSON).read_text(encoding="utf-8")
                    if target == "-":
                        sys.stdout.write(document)
                    else:
                        replace_text(Path(target), document)
                        files.append(Path(target))
                out.write(summary(self._table()) + "\n")
                out.write("written: " + ", ".join(map(str, files)) + "\n")
            else:
                for outcome in self._outcomes.values():
                    out.write(f"{outcome.name}: {outcome.failure or 'did not run'}\n")
                out.write(f"no contender has ended a block; the ranks' output is in {self._options.directory / 'logs'}\n")
            sys.stdout.flush()
        return code or (0 if has_result else 1)
