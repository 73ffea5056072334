"""Run every test or benchmark that needs GPUs, in the order of what it would tell, and end in one report.

Without a GPU it ends with an error. Steps that need more GPUs than there are, are left out and named. `steps` prints the table of
steps for docs/benchmarks/gpu.md.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import torch

from megatron.zerobubble.cli.parser import Parser
from tools.gpu import machine
from tools.gpu.report import text
from tools.gpu.runner import Outcome, Status, run
from tools.gpu.steps import SUITES, markdown

ROOT = Path(__file__).resolve().parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if every step that ran passed, 1 if one failed, 2 without a GPU."""
    parser = Parser(prog="python -m tools.gpu", description=__doc__)
    parser.add_argument("suite", choices=(*SUITES, "steps"), help="what to run")
    parser.add_argument("--out", metavar="DIR", help="folder of the report (default: gpu-report/<suite>-<time>)")
    args = parser.parse_args(argv)
    if args.suite == "steps":
        print("\n\n".join(markdown(steps) for steps in SUITES.values()))
        return 0
    num_gpus = machine.num_gpus()
    if not num_gpus:
        built = f"torch {torch.__version__}, built for CUDA {torch.version.cuda}"
        print(f"make {args.suite}-gpu: {built}, sees no GPU here; make test needs none", file=sys.stderr)
        return 2
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    out = Path(args.out or ROOT / "gpu-report" / f"{args.suite}-{stamp}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    return report_on(args.suite, out, num_gpus=num_gpus)


def report_on(suite: str, out: Path, *, num_gpus: int) -> int:
    """Run a suite and write its report; interrupted, it reports what it has."""
    steps, outcomes, is_interrupted = SUITES[suite], list[Outcome](), False
    try:
        for outcome in run(steps, out, num_gpus=num_gpus, root=ROOT):
            outcomes.append(outcome)
    except KeyboardInterrupt:
        is_interrupted = True
    report = text(suite, machine.describe(), outcomes, out, len(steps))
    (out / "report.txt").write_text(report, encoding="utf-8")
    shutil.make_archive(str(out), "zip", out)
    print("\n" + report, end="")
    failed = any(outcome.status in (Status.FAILED, Status.LATE) for outcome in outcomes)
    return 130 if is_interrupted else int(failed)


if __name__ == "__main__":
    sys.exit(main())
