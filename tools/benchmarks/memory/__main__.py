"""Train for many iterations and report the memory of every rank: growth, fragmentation, and peak activation memory vs. the plan.

Trains a GPT of the given sizes in fp32 with one of our schedules on this machine: on its GPUs, which ranks share if there are
fewer GPUs than ranks, or without GPUs on the CPU, where only live tensors are counted and every torch op takes far longer than
usual. Messages always go over gloo, with GPUs through host memory (`runtime/staging.py`), so NCCL and its memory are not part of
this. It checks that nothing grows after the warm-up, and that the peak activation memory is within 5 % of the plan's, as
predicted from one measured iteration.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import working
from megatron.zerobubble.errors import ConfigError, UserError
from tools.benchmarks.emulation import run_on_ranks
from tools.benchmarks.memory.ledger import RankLedger, table
from tools.benchmarks.memory.rank import serve
from tools.benchmarks.schedules.contenders import ContenderSpec, Runtime, Sizes, contender_specs
from tools.benchmarks.split import choose_device

FORMAT = "zerobubble-memory-benchmark/1"
EXAMPLES = """examples:
  python -m tools.benchmarks.memory --schedule zbv --json memory.json
  python -m tools.benchmarks.memory --schedule zb-h2 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024
  python -m tools.benchmarks.memory --device cpu --num-iterations 12 --warmup 4 --hidden-size 64 --seq-length 32
"""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.memory", description=__doc__, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--schedule", default="zbv", metavar="NAME", help="one of ours (default %(default)s)")
    parser.add_argument("--num-ranks", type=int, default=4, help="p (default %(default)s)")
    parser.add_argument("--num-microbatches", type=int, default=8, help="m (default %(default)s)")
    parser.add_argument("--num-iterations", type=int, default=200, help="iterations to measure (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=20, help="iterations whose memory may still grow (default %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    for field in fields(Sizes):
        default = 8 if field.name == "num_layers" else field.default
        parser.add_argument("--" + field.name.replace("_", "-"), type=int, default=default, help="default %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON, iteration by iteration")
    parser.add_argument("--strict", action="store_true", help="exit 1 if something grows or the peak is off")
    return parser


def check(args: argparse.Namespace) -> tuple[ContenderSpec, Sizes]:
    """The contender and the sizes of the model. Raises ConfigError."""
    for name in ("num_ranks", "num_microbatches", "warmup"):
        least = 2 if name == "num_ranks" else 1
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be {least} or more")
    if args.num_iterations <= args.warmup:
        raise ConfigError(f"--num-iterations {args.num_iterations} leaves none after --warmup {args.warmup}; increase it")
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in fields(Sizes)})
    spec = contender_specs([args.schedule], args.num_ranks, [args.num_microbatches], sizes)[-1]
    if spec.runtime is not Runtime.OURS:
        raise ConfigError(
            f"--schedule {args.schedule} does not run on our executor, which this benchmark measures; give for example zbv"
        )
    return spec, sizes


def to_json(ranks: Sequence[RankLedger], about: dict[str, Any]) -> dict[str, Any]:
    """The JSON form, with all values under `measured` or `predicted`."""
    rows = [
        {
            "rank": rank,
            "predicted": {"activations_bytes": ledger.predicted},
            "measured": {
                "activations_bytes": ledger.measured,
                "fragmentation_bytes": ledger.fragmentation,
                "iterations": [asdict(each) for each in ledger.held],
            },
            "complaints": ledger.complaints(),
        }
        for rank, ledger in enumerate(ranks)
    ]
    return {"format": FORMAT, **about, "ranks": rows}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. A user error is one line on stderr and exit code 2."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    args = parser.parse_args(words)
    try:
        spec, sizes = check(args)
        device = choose_device(args.device, trial="--device cpu --num-iterations 12 --warmup 4 --hidden-size 64 --seq-length 32")
        on_gpu = device.type == "cuda"
        with working(f"{args.num_iterations} iterations of {spec.name}"):
            ranks = run_on_ranks(serve, args.num_ranks, spec, sizes, args, on_gpu)
    except UserError as error:
        parser.error(str(error))
    about = {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "is_gpu": on_gpu,
        "schedule": spec.schedule,
        "num_ranks": args.num_ranks,
        "num_microbatches": args.num_microbatches,
        "num_iterations": args.num_iterations,
        "warmup": args.warmup,
        "sizes": asdict(sizes),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": shlex.join(["python", "-m", "tools.benchmarks.memory", *words]),
    }
    print(f"{spec.name}, {args.num_ranks} ranks, {args.num_microbatches} microbatches, {args.num_iterations} iterations on")
    print(f"{about['device']}; MiB, *measured* unless marked *predicted*; growth is after iteration {args.warmup}.\n")
    print(table(ranks), end="\n\n")
    complaints = [f"rank {rank}: {each}" for rank, ledger in enumerate(ranks) for each in ledger.complaints()]
    print("\n".join(f"- {each}" for each in complaints) or "No memory grew, and every peak is within 5 % of the plan's.")
    if args.json:
        Path(args.json).write_text(json.dumps(to_json(ranks, about), indent=1) + "\n", encoding="utf-8")
    return 1 if args.strict and complaints else 0


if __name__ == "__main__":
    sys.exit(main())
