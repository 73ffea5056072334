"""Measure every rank's real program alone on one GPU, and compose the pipeline from it.

The JSON file is written after every rank, so a run that is cut still says something. Without a GPU it is a rehearsal.

  python -m tools.benchmarks.one_gpu --json docs/benchmarks/data/one_gpu.json --markdown docs/benchmarks/one_gpu.md
  python -m tools.benchmarks.one_gpu --device cpu --scale 0.016 --json one_gpu.json --markdown one_gpu.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

import torch

from megatron.zerobubble.cli.parser import Parser
from tools.benchmarks.one_gpu import ranks
from tools.benchmarks.one_gpu.compose import compose
from tools.benchmarks.one_gpu.page import checks, page
from tools.benchmarks.one_gpu.setting import Setting, choose_device
from tools.benchmarks.reports import Row, origin, run_report, write_json

FORMAT = "zerobubble-one-gpu/2"


def measured(args: argparse.Namespace) -> Row:
    """The report, written to its file after every rank."""
    setting = Setting(device=choose_device(args.device), scale=args.scale)
    report = {"is_gpu": setting.on_gpu, "scale": args.scale, "command": args.command} | origin()
    report["device"] = torch.cuda.get_device_name(setting.device) if setting.on_gpu else "CPU"
    report |= {"torch": torch.__version__, "megatron_core": version("megatron-core")}

    def save(found: Row) -> None:
        if args.json:
            write_json({"format": FORMAT} | report | {"ranks": found}, args.json)

    found = ranks.measure(setting, save, args.budget)
    return report | {"ranks": found, "composed": compose(found)}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if a rank or a check of the page failed, 2 for wrong arguments."""
    raw, failed = argparse.RawDescriptionHelpFormatter, list[str]()
    parser = Parser(prog="python -m tools.benchmarks.one_gpu", description=__doc__, formatter_class=raw)
    parser.add_argument("--budget", type=float, default=260.0, help="seconds after which no rank begins (default %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor on the heads and tokens of a layer (default %(default)s)"
    )

    def checked(report: Row) -> str:
        failed.extend([*report["ranks"]["failed"], *(line for line in checks(report) if line.endswith("MISSED"))])
        return page(report)

    return run_report(parser, argv, FORMAT, measured, checked) or int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
