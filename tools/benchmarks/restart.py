"""What a killed rank costs: seconds and iterations lost per kill, with copies in host memory and with checkpoints on disk.

A job on the CPU is started as a user does, by ``torchrun --max-restarts``; random ranks of it are killed with SIGKILL at random
moments. Its losses must be those of a run that nobody disturbs, bit for bit. Run it with::

    python -m tools.benchmarks.restart --kills 10 --ranks 4 --seed 1 --out restart.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Disturbed", "disturb", "main"]

_ROOT = Path(__file__).parents[2]
_MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data --lr 1e-2 --lr-decay-iters 100"
_RUN = "--micro-batch-size 2 --global-batch-size 16 --log-interval 1 --eval-iters 0 --enable-zero-bubble"
_MODES = {"memory": ["--in-memory-checkpoint-interval"], "disk": ["--save", "{folder}/checkpoints", "--save-interval"]}
_COMPARED = ("loss", "grad_norm", "lr", "skipped")
_POLL_S = 0.02
_MOST_NEW = 6
"""Most iterations between the end of one recovery and the next kill."""


@dataclass
class Disturbed:
    """A job whose ranks were killed."""

    metrics: dict[int, dict[str, Any]]
    """What the job logged, by iteration."""
    output: str
    """Standard output and error."""
    exit_code: int
    """torchrun's."""
    seconds: float
    """From the start of torchrun to its end."""
    kills: list[dict[str, Any]] = field(default_factory=list)
    """Per kill: the rank, the last iteration before it, and the seconds until the next one after it was done."""

    @property
    def resumed_after(self) -> list[int]:
        """The iteration that each restart resumed after; 0 from the start."""
        lines = re.findall(
            r"^restart \d+ of \d+: (?:resuming after iteration (\d+)|nothing that this job)", self.output, re.MULTILINE
        )
        return [int(each or 0) for each in lines]


def disturb(
    arguments: Sequence[object], *, num_ranks: int, folder: Path, num_kills: int, seed: int, timeout_s: float = 600.0
) -> Disturbed:
    """Run a job and kill random ranks of it at random moments, each after it has recovered from the kill before.

    Args:
        arguments: of pretrain_gpt.py.
        num_ranks: of the job, on this machine.
        folder: for metrics and output.
        num_kills: how often a rank is killed; torchrun may restart as often, and once more.
        seed: of the moments and ranks.
        timeout_s: the job is ended after as many seconds.
    """
    chance, log, output = random.Random(seed), folder / "metrics.jsonl", folder / "output.txt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += [
        f"--max-restarts={num_kills + 1}",
        str(_ROOT / "pretrain_gpt.py"),
        *map(str, arguments),
        "--metrics-jsonl",
        str(log),
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    begin, kills = time.monotonic(), []
    with output.open("wb") as to, subprocess.Popen(command, stdout=to, stderr=to, env=environment, cwd=_ROOT) as job:
        try:
            for _ in range(num_kills):
                _wait(log, job, done=_last(log) + chance.randint(1, _MOST_NEW), until=begin + timeout_s)
                time.sleep(chance.uniform(0.0, 0.2))
                rank, before, now = chance.randrange(num_ranks), _last(log), time.monotonic()
                if not _kill(job.pid, rank):
                    break
                _wait(log, job, done=before + 1, until=begin + timeout_s)
                kills.append({"rank": rank, "iteration": before, "seconds_lost": round(time.monotonic() - now, 2)})
            job.wait(max(1.0, begin + timeout_s - time.monotonic()))
        finally:
            if job.poll() is None:
                job.terminate()
    seconds = time.monotonic() - begin
    return Disturbed(_metrics(log), output.read_text(errors="replace"), job.returncode, round(seconds, 1), kills)


def _wait(log: Path, job: subprocess.Popen[bytes], *, done: int, until: float) -> None:
    """Wait until iteration `done` is logged, or the job has ended."""
    while _last(log) < done and job.poll() is None:
        if time.monotonic() > until:
            raise TimeoutError(f"iteration {done} was not done in time")
        time.sleep(_POLL_S)


def _kill(torchrun: int, rank: int) -> bool:
    """Kill the process of a rank; return whether there was one."""
    for children in Path(f"/proc/{torchrun}/task").glob("*/children"):
        for child in children.read_text().split():
            with suppress(OSError):
                if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes() + b"\0":
                    os.kill(int(child), signal.SIGKILL)
                    return True
    return False


def _metrics(log: Path) -> dict[int, dict[str, Any]]:
    """Iteration -> what was logged; the last one wins, as an iteration may have been done again."""
    found = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        with suppress(ValueError):  # a line that is being written
            fields = json.loads(line)
            found[int(fields["iteration"])] = fields
    return found


def _last(log: Path) -> int:
    return max(_metrics(log), default=0)


def differences(actual: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]]) -> list[str]:
    """Iterations that are missing, and values that are not the same bit for bit."""
    missing = [f"iteration {each}" for each in sorted(set(actual) ^ set(expected))]
    both = sorted(set(actual) & set(expected))
    return missing + [
        f"{name} of iteration {each}: {actual[each].get(name)} for {expected[each].get(name)}"
        for each in both
        for name in _COMPARED
        if actual[each].get(name) != expected[each].get(name)
    ]


def _report(job: Disturbed, undisturbed: Disturbed) -> dict[str, Any]:
    lost = [each["seconds_lost"] for each in job.kills]
    redone = [kill["iteration"] - after for kill, after in zip(job.kills, job.resumed_after, strict=False)]
    return {
        "exit_code": job.exit_code,
        "kills": len(job.kills),
        "seconds": job.seconds,
        "seconds_lost_per_kill": {"median": statistics.median(lost), "min": min(lost), "max": max(lost)} if lost else None,
        "iterations_redone_per_kill": {"median": statistics.median(redone), "max": max(redone)} if redone else None,
        "differences": differences(job.metrics, undisturbed.metrics),
        "each": [kill | {"resumed_after": after} for kill, after in zip(job.kills, job.resumed_after, strict=False)],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Compare disturbed runs with one that is not; return 0 if all ended well with the same losses."""
    parser = argparse.ArgumentParser(prog="python -m tools.benchmarks.restart", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, help="kills per run (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="pipeline ranks x 2 data-parallel replicas if even (default: 4)")
    parser.add_argument("--interval", type=int, default=2, help="iterations between copies or checkpoints (default: 2)")
    parser.add_argument("--iterations", type=int, help="default: enough for all kills")
    parser.add_argument("--seed", type=int, default=1, help="of ranks and moments (default: %(default)s)")
    parser.add_argument("--modes", nargs="+", choices=sorted(_MODES), default=sorted(_MODES), help="default: all")
    parser.add_argument("--out", type=Path, help="JSON file for the report; default: standard output")
    options = parser.parse_args(argv)
    iterations = options.iterations or options.kills * (_MOST_NEW + 2) + 2
    pipeline = max(1, options.ranks // 2) if options.ranks > 2 else options.ranks
    flags = [*_MODEL.split(), *_RUN.split(), "--train-iters", iterations, "--pipeline-model-parallel-size", pipeline]
    report: dict[str, Any] = {"ranks": options.ranks, "pipeline_ranks": pipeline, "iterations": iterations}
    report |= {"interval": options.interval, "seed": options.seed, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as root:
        undisturbed = disturb(flags, num_ranks=options.ranks, folder=_made(root, "none"), num_kills=0, seed=0)
        report["undisturbed_seconds"] = undisturbed.seconds
        for mode in options.modes:
            folder = _made(root, mode)
            kept = [each.format(folder=folder) for each in _MODES[mode]]
            job = disturb(
                [*flags, *kept, options.interval],
                num_ranks=options.ranks,
                folder=folder,
                num_kills=options.kills,
                seed=options.seed,
            )
            report[mode] = _report(job, undisturbed)
            if job.exit_code:
                sys.stderr.write(job.output[-4000:])
    text = json.dumps(report, indent=1) + "\n"
    if options.out is None:
        sys.stdout.write(text)
    else:
        options.out.write_text(text)
    failed = [mode for mode in options.modes if report[mode]["exit_code"] or report[mode]["differences"]]
    return 1 if failed or undisturbed.exit_code else 0


def _made(root: str, name: str) -> Path:
    folder = Path(root, name)
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main())
