"""`python -m tools.recipes CHECKOUT...`: what becomes of published recipes under ZB-H1, ZBV and `auto`.

::

    python -m tools.recipes ../Megatron-Bridge ../Megatron-LM ../Primus --markdown docs/recipes.md

Needs torch and megatron-core, whose installed release decides which options there are, and no GPU. Recipes are read from the
checkouts; nothing of them is kept but their names, the counts and the options that are refused.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.cpu.triton_import import allow_missing_triton


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each recipe with a pipeline, and how many there are of each kind; write the page if asked."""
    parser = argparse.ArgumentParser(prog="python -m tools.recipes", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT", help="Megatron-Bridge, Megatron-LM or Primus")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables of the page to FILE, between its marks")
    args = parser.parse_args(argv)
    allow_missing_triton()
    from tools.recipes.report import Source, rows_text, written

    try:
        sources = [Source.read(each, *_commit(each)) for each in args.checkouts]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for source in sources:
        print(rows_text(source))
    if args.markdown is not None:
        args.markdown.write_text(written(args.markdown.read_text("utf-8"), sources, version("megatron-core")), "utf-8")
    return 0


def _commit(checkout: Path) -> tuple[str, str]:
    """The commit of a checkout and its date, or "unknown" twice."""
    command = ["git", "-C", str(checkout), "log", "-1", "--format=%h %cs"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    words = done.stdout.split()
    return (words[0], words[1]) if done.returncode == 0 and len(words) == 2 else ("unknown", "unknown")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    sys.exit(main())
