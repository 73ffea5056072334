"""Run what needs GPUs, in the order of what it would tell, and end in one report.

Without a GPU it ends with an error, or rehearses on the CPU. On one GPU four ranks share it, and what is measured against time is
left out. Steps that need more GPUs than there are, or a program that is not here, are left out and named. `steps` prints the
table of steps for docs/benchmarks/gpu.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import torch

from megatron.zerobubble.cli.parser import Parser
from tools.gpu import machine
from tools.gpu.report import line, measured, text
from tools.gpu.runner import Outcome, Status, run
from tools.gpu.steps import Machine, Step, hour, markdown

ROOT = Path(__file__).resolve().parents[2]
_REHEARSED_RANKS, _MOST_REHEARSED = 2, 4
"""Ranks of most steps of a rehearsal, and of a step that needs more."""
_SHARING = 4
"""Ranks that share a GPU which is the only one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if every step that ran passed, 1 if one failed, 2 without a GPU."""
    parser = Parser(prog="python -m tools.gpu", description=__doc__)
    parser.add_argument("what", choices=("hour", "steps"), help="run the steps, or print their table")
    parser.add_argument("--out", metavar="DIR", help="folder of the report (default: gpu-report/<time>)")
    parser.add_argument("--minutes", type=float, default=60.0, help="no step begins after these (default %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="run every step with tiny sizes on the CPU")
    args = parser.parse_args(argv)
    if args.what == "steps":
        print(markdown(hour(Machine(num_ranks=8, has_fp8=True))))
        return 0
    num_gpus = machine.num_gpus()
    if not num_gpus and not args.rehearse:
        built = f"torch {torch.__version__} of {sys.executable}, built for CUDA {torch.version.cuda}"
        print(f"make gpu-hour: {built}, sees no GPU here; make gpu-rehearsal tries the steps on the CPU", file=sys.stderr)
        return 2
    out = Path(args.out or ROOT / "gpu-report" / datetime.now().strftime("%Y%m%d-%H%M%S")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    what = _machine(args, num_gpus)
    return report_on(hour(what), out, num_gpus=what.num_ranks, minutes=args.minutes, rehearses=args.rehearse)


def _machine(args: argparse.Namespace, num_gpus: int) -> Machine:
    if args.rehearse:
        return Machine(num_ranks=_REHEARSED_RANKS, has_fp8=False, rehearses=True)
    return Machine(num_ranks=_SHARING if num_gpus == 1 else num_gpus, has_fp8=machine.has_fp8(), shares=num_gpus == 1)


def report_on(steps: Sequence[Step], out: Path, *, num_gpus: int, minutes: float = 60.0, rehearses: bool = False) -> int:
    """Run steps and write their report, which is printed before anything is archived; interrupted, it reports what it has."""
    print("\n".join([machine.describe(), "", *(f"missing: {each}" for each in machine.missing(ROOT)), ""]), flush=True)
    outcomes, is_interrupted = list[Outcome](), False
    try:
        for outcome in run(steps, out, num_gpus=_MOST_REHEARSED if rehearses else num_gpus, root=ROOT, minutes=minutes):
            outcomes.append(outcome)
            print("\n".join([f"== {line(outcome)}", *(f"==   {each}" for each in measured(outcome.step, out))]), flush=True)
    except KeyboardInterrupt:
        is_interrupted = True
    report = text(machine.describe(), outcomes, out, len(steps), rehearses=rehearses)
    (out / "report.txt").write_text(report, encoding="utf-8")
    print("\n" + report, end="", flush=True)
    shutil.make_archive(str(out), "zip", out)
    failed = any(outcome.status in (Status.FAILED, Status.LATE) for outcome in outcomes)
    return 130 if is_interrupted else int(failed)


if __name__ == "__main__":
    sys.exit(main())
