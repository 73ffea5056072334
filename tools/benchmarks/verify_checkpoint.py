"""Measure what verifying a checkpoint adds to the time of loading it.

Two pipeline ranks on gloo save a GPT with its Adam state once and load it again and again, in turns with and without
--no-verify-checkpoint, each round beginning with the other one. There are two cases: all files are in the page cache, where
reading costs least and the share of verifying is largest; or no load finds any of them there.

  load      time from a barrier before the load to a barrier after it, which is that of the slowest rank
  CPU time  of both ranks together, all threads; other processes on the machine do not count
  overhead  the median over the rounds of the ratio within a round, less 1, with a 95 % confidence interval
  alone     verifying alone, with all files in the page cache, over an unverified load, likewise: on a busy machine two loads
            differ by more than verifying takes

  python -m tools.benchmarks.verify_checkpoint --json docs/benchmarks/data/verify_checkpoint.json
  python -m tools.benchmarks.verify_checkpoint --from docs/benchmarks/data/verify_checkpoint.json
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from tools.benchmarks.emulation import run_on_ranks
from tools.benchmarks.schedules.report import Estimate

FORMAT = "zerobubble-verify-checkpoint-benchmark/1"
NUM_RANKS = 2
VOCABULARY = 16384
CASES = {"in the page cache": False, "on the disk": True}
"""Name of a case -> whether the files are removed from the page cache before each load."""

MEASURES = {"load": "time", "CPU time": "cpu"}
"""Title of a measure -> its suffix in a round."""

Round = dict[str, float]
"""Seconds of one load each, `verified` and `unverified`, and of verifying `alone`, followed by the measure."""


def serve(rank: int, flags: Sequence[str], num_rounds: int) -> dict[str, list[Round]]:
    """Run one rank of a job with `flags`, which name the directory to save to and load from."""
    from megatron.zerobubble.mcore.cpu.device import quiet_third_parties

    with quiet_third_parties():
        return measure(*_set_up(rank, flags), num_rounds)


def measure(training_state: Any, store: Any, num_rounds: int) -> dict[str, list[Round]]:
    """Save a checkpoint, then load it again and again. All ranks must call this.

    Args:
        training_state: its settings name the same directory for --save and --load.
        store: the job's store.
        num_rounds: rounds that count.

    Returns:
        The rounds of each case.
    """
    from megatron.zerobubble.training.checkpoint.save import CheckpointSaver

    with training_state.on_host():
        training_state.optimizer.step()  # allocates Adam's state; the gradients are zero
    CheckpointSaver(training_state, store).save(iteration=1, consumed_samples=1)
    rounds: dict[str, list[Round]] = {name: [] for name in CASES}
    numbers = range(num_rounds + 1)
    for number in track(numbers, "rounds") if torch.distributed.get_rank() == 0 else numbers:
        for name, is_cold in CASES.items():
            row: Round = {}
            for verifies in (True, False) if number % 2 else (False, True):
                row |= _load(training_state, verifies=verifies, is_cold=is_cold)
            rounds[name].append(row | _verify(training_state))
    return {name: each[1:] for name, each in rounds.items()}  # the first one does not count


def _set_up(rank: int, flags: Sequence[str]) -> tuple[Any, Any]:
    """The training state and the job's store of one rank."""
    import torch.distributed as dist
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    from megatron.zerobubble.job.launch import Launch
    from megatron.zerobubble.mcore.cpu.device import HostDevice
    from megatron.zerobubble.mcore.model.stage_layout import embedding_ranks
    from megatron.zerobubble.runtime.watch import Watch
    from megatron.zerobubble.training.arguments import settings_from_argv
    from megatron.zerobubble.training.initialize import Job, set_up_model_parallel
    from megatron.zerobubble.training.models.gpt import forward_step_provider, model_provider
    from megatron.zerobubble.training.setup import build_training_state

    logging.basicConfig(level=logging.WARNING)
    settings = settings_from_argv(flags, world_size=NUM_RANKS, rank=rank)
    store: Any = dist.PrefixStore("job", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]
    host = HostDevice()
    host.install()
    launch = Launch(rank=rank, local_rank=rank, ranks_on_host=NUM_RANKS, world_size=NUM_RANKS, has_threads_set=True)
    spec = settings.schedule_spec
    set_up_model_parallel(settings, **embedding_ranks(spec.placement))
    batch = settings.batch
    init_num_microbatches_calculator(rank, None, settings.global_batch_size, batch.micro_batch_size, settings.data_parallel_size)
    training_state = build_training_state(
        settings,
        Job(launch=launch, host=host, store=store, watch=Watch(host.device)),
        spec,
        vocab_size=VOCABULARY,
        model_provider=model_provider,
        forward_step_provider=forward_step_provider,
    )
    return training_state, store


def _verify(training_state: Any) -> Round:
    """Verify the checkpoint alone on all ranks; it was just read."""
    from megatron.zerobubble.training.checkpoint.directory import existing_directory
    from megatron.zerobubble.training.checkpoint.verification import verify_checkpoint

    directory = existing_directory(training_state.settings.checkpoint.load, 1)
    return _timed("alone", lambda: verify_checkpoint(directory))


def _load(training_state: Any, *, verifies: bool, is_cold: bool) -> Round:
    """Load the checkpoint on all ranks."""
    from megatron.zerobubble.training.checkpoint.load import load_checkpoint

    settings = training_state.settings
    checkpoint = replace(settings.checkpoint, verify_checkpoint=verifies)
    if is_cold and torch.distributed.get_rank() == 0:
        evict(Path(checkpoint.load))
    changed = replace(training_state, settings=replace(settings, checkpoint=checkpoint))
    return _timed("verified" if verifies else "unverified", lambda: load_checkpoint(changed))


def _timed(name: str, action: Callable[[], object]) -> Round:
    """Seconds until `action` is done on all ranks, and CPU seconds of this one."""
    torch.distributed.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    action()
    torch.distributed.barrier()
    return {f"{name} time": time.perf_counter() - begin, f"{name} cpu": time.process_time() - cpu}


def combined(ranks: Sequence[dict[str, list[Round]]]) -> dict[str, list[Round]]:
    """The rounds of each case: times of rank 0, which all ranks share, and CPU times of all ranks together."""
    return {
        case: [
            {each: sum(row[each] for row in rows) if each.endswith("cpu") else rows[0][each] for each in rows[0]}
            for rows in zip(*(rank[case] for rank in ranks), strict=True)
        ]
        for case in ranks[0]
    }


def evict(folder: Path) -> None:
    """Remove all files below `folder` from the page cache, where the system has a call for it (Linux)."""
    for path in (each for each in folder.rglob("*") if each.is_file()):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def overhead(rounds: Sequence[Round], measure: str) -> Estimate:
    """What verifying adds, as a share of an unverified load."""
    return _share(rounds, lambda row: row[f"verified {measure}"] - row[f"unverified {measure}"], measure)


def alone(rounds: Sequence[Round], measure: str) -> Estimate:
    """Verifying alone, as a share of an unverified load."""
    return _share(rounds, lambda row: row[f"alone {measure}"], measure)


def _share(rounds: Sequence[Round], part: Callable[[Round], float], measure: str) -> Estimate:
    return Estimate.of(rounds, lambda rows: statistics.median(part(row) / row[f"unverified {measure}"] for row in rows))


def to_markdown(body: dict[str, Any]) -> str:
    """The results as a table."""
    about = body["about"]
    lines = [
        f"{about['device']}, torch {about['torch']}, {NUM_RANKS} ranks, a checkpoint of {about['bytes'] / 1e9:.2f} GB, "
        f"{about['rounds']} rounds.",
        "",
        "| files | measure | unverified | verified | overhead | alone |",
        "|---|---|---|---|---|---|",
    ]
    for name, case in body["cases"].items():
        for title, measure in MEASURES.items():
            times = [statistics.median(row[f"{each} {measure}"] for row in case["rounds"]) for each in ("unverified", "verified")]
            shares = [
                f"{share['value']:.1%} ({share['low']:.1%} to {share['high']:.1%})"
                for share in (case["overhead"][measure], case["alone"][measure])
            ]
            lines.append(f"| {name} | {title} | {times[0]:.2f} s | {times[1]:.2f} s | {shares[0]} | {shares[1]} |")
    return "\n".join(lines)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.verify_checkpoint", description=__doc__, formatter_class=raw)
    parser.add_argument("--num-layers", type=int, default=4, help="of the model, an even number (default %(default)s)")
    parser.add_argument("--hidden-size", type=int, default=1024, help="of the model, a multiple of 64 (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds that count (default %(default)s)")
    parser.add_argument("--folder", help="where to write the checkpoint (default: a temporary directory)")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON")
    parser.add_argument("--from", dest="read", metavar="FILE", help="print the table of such a JSON, and measure nothing")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.read:
        print(to_markdown(json.loads(Path(args.read).read_text(encoding="utf-8"))))
        return 0
    for name, step in (("num_layers", NUM_RANKS), ("hidden_size", 64), ("rounds", 1)):
        if (given := getattr(args, name)) < 1 or given % step:
            parser.error(f"--{name.replace('_', '-')} is {given}; it must be 1 or more, and a multiple of {step}")
    flags = f"--num-layers {args.num_layers} --hidden-size {args.hidden_size} --num-attention-heads {args.hidden_size // 64}"
    flags += f" --seq-length 64 --pipeline-model-parallel-size {NUM_RANKS} --mock-data --micro-batch-size 1 --global-batch-size 2"
    flags += " --lr 1e-4 --train-iters 1 --no-bias-gelu-fusion --use-cpu-initialization"
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        cases = combined(run_on_ranks(serve, NUM_RANKS, [*flags.split(), "--save", folder, "--load", folder], args.rounds))
        num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    about = {
        "device": f"{platform.machine()} with {os.cpu_count()} CPUs",
        "rounds": args.rounds,
        "bytes": num_bytes,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    results = {
        name: {
            "rounds": rounds,
            "overhead": {each: asdict(overhead(rounds, each)) for each in MEASURES.values()},
            "alone": {each: asdict(alone(rounds, each)) for each in MEASURES.values()},
        }
        for name, rounds in cases.items()
    }
    body = {"format": FORMAT, "about": about, "cases": results}
    print(to_markdown(body))
    if args.json:
        Path(args.json).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
