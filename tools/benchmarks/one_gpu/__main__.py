"""Measure every rank's real program alone on one GPU, and compose the pipeline from it.

Steps: A passes of a layer, D ranks alone, B passes beside transfers, E the pipeline composed. The JSON file is written after
every step, so a run that is cut still says something. Without a GPU it is a rehearsal. --from-json composes again.

  python -m tools.benchmarks.one_gpu --json docs/benchmarks/data/one_gpu.json --markdown docs/benchmarks/one_gpu.md
  python -m tools.benchmarks.one_gpu --device cpu --scale 0.016 --json one_gpu.json --markdown one_gpu.md
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.errors import UserError
from tools.benchmarks.one_gpu import compose, passes, ranks, transfers
from tools.benchmarks.one_gpu.page import checks, page
from tools.benchmarks.one_gpu.setting import Setting, choose_device
from tools.benchmarks.reports import Row, origin, read_json, write_json

FORMAT = "zerobubble-one-gpu/1"
STEPS = "ADBE"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a step or a check of the page failed, 2 for wrong arguments."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = Parser(
        prog="python -m tools.benchmarks.one_gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", required=True, help="where the report is written, after every step")
    parser.add_argument("--markdown", metavar="PAGE", help="where the page is written")
    parser.add_argument("--from-json", metavar="FILE", help="take the steps of this report, and run only E, or those of --steps")
    parser.add_argument("--budget", type=float, default=450.0, help="seconds after which no step begins (default %(default)s)")
    parser.add_argument("--steps", help=f"only these (default {STEPS})")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor on the heads and tokens of a layer (default %(default)s)"
    )
    args = parser.parse_args(words)
    steps = args.steps or ("E" if args.from_json else STEPS)
    if unknown := sorted(set(steps) - {*STEPS}):
        parser.error(f"--steps has {', '.join(unknown)}; the steps are {STEPS}")
    try:
        setting = Setting(device=choose_device(args.device), scale=args.scale, budget_s=args.budget)
        setting.layer(4096)
        report = (
            read_json(args.from_json, FORMAT) if args.from_json else {"format": FORMAT, "steps": {}, "failed": {}, "seconds": {}}
        )
    except (UserError, OSError) as error:
        parser.error(str(error))
    if not args.from_json:
        report |= {"is_gpu": setting.on_gpu, "scale": args.scale, "command": f"{parser.prog} {shlex.join(words)}"} | origin()
        device = torch.cuda.get_device_name(setting.device) if setting.on_gpu else "CPU"
        report |= {"device": device, "torch": torch.__version__, "megatron_core": version("megatron-core")}
    for step in steps:
        _run(step, report, setting, args.json)
    if args.markdown:
        Path(args.markdown).write_text(page(report), encoding="utf-8")
    missed = "D" in report["steps"] and any(line.endswith("MISSED") for line in checks(report))
    return int(bool(report["failed"]) or missed)


def _run(step: str, report: Row, setting: Setting, target: str) -> None:
    """Run a step, and write the report. A step that fails does not end the others."""
    done = report["steps"]

    def save(row: Row) -> None:
        done[step] = row
        write_json(report, target)

    calls: dict[str, tuple[str, Callable[[], Row]]] = {
        "A": ("passes of a layer", lambda: passes.measure(setting)),
        "D": ("ranks alone", lambda: ranks.measure(setting, save)),
        "B": ("passes beside transfers", lambda: transfers.measure(setting)),
        "E": ("the pipeline composed", lambda: compose.compose(done["D"], done.get("B"))),
    }
    name, call = calls[step]
    if setting.left_s < 0 and step != "E":
        report["failed"][step] = "the budget was over"
        write_json(report, target)
        return
    print(f"step {step}, {name}", flush=True)
    begin = time.monotonic()
    report["failed"].pop(step, None)
    try:
        save(call())
    except Exception as error:  # noqa: BLE001  # the other steps are independent of it
        traceback.print_exc()
        report["failed"][step] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    report["seconds"][step] = round(time.monotonic() - begin, 1)
    print(f"  {report['seconds'][step]} s {report['failed'].get(step, '')}", flush=True)
    write_json(report, target)
    gc.collect()
    torch._dynamo.reset()  # compiled for the shapes of this step
    if setting.on_gpu:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
