"""Write docs/flags.md: the zero-bubble flags and those of the reference trainer, with values, defaults and help texts.

The page is generated from the parser that reads the command line, so it has the groups and texts of --help. Flags that are fields
of megatron-core's dataclasses are left out: they depend on the installed release. A test and `make docs` compare the page with
the parser.

Run it after a change of a flag::

    python -m tools.docs.flags            # rewrites docs/flags.md
    python -m tools.docs.flags --check    # exit code 1 if the page is out of date
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence

from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from tools.docs.generated import DOCS, write_or_check
from tools.docs.wrap import wrapped

with quiet_third_parties():
    from megatron.zerobubble.training.arguments import build_parser

__all__ = ["COMMAND", "PAGE", "main", "page"]

COMMAND = "python -m tools.docs.flags"
PAGE = DOCS / "flags.md"

_INTRODUCTION = f"""\
<!-- Generated from the parser by `{COMMAND}`. Do not edit. -->

# All flags

The zero-bubble flags come first; [Flags by example](flags-examples.md) shows how they go together. They are those of
`zerobubble run`, `pretrain_gpt.py` and `zerobubble train`, and `megatron.zerobubble.add_zero_bubble_args(parser)` adds
them to the parser of a training loop of your own.

The groups behind them are the [reference trainer](reference-trainer.md)'s own, with Megatron-LM's names and meanings. Besides
these it has a flag for each field of plain values of megatron-core's `TransformerConfig` (with `--multi-latent-attention`:
`MLATransformerConfig`), `OptimizerConfig` and `DistributedDataParallelConfig`, spelled as Megatron-LM spells it: `num_layers`
is `--num-layers`, `add_bias_linear` is `--disable-bias-linear`, `num_moe_experts` is `--num-experts`, `fp8` is `--fp8-format`,
and a switch has a `--no-` form. `zerobubble train --help` lists those of the installed release.
"""

_FIRST = "Zero bubble"
_FIELDS = "megatron.core's "
"""How the titles of groups of fields of megatron-core begin."""
_FLAG = re.compile(r"(?<![\w`-])--?[a-z][a-z0-9]*(?:-[a-z0-9]+)*")


def page() -> str:
    """The whole page as Markdown."""
    groups = [group for group in build_parser()._action_groups if group.title and _flags(group._group_actions)]
    groups = [group for group in groups if not (group.title or "").startswith(_FIELDS)]
    groups.sort(key=lambda group: group.title != _FIRST)
    sections = [_section(group.title or "", group.description, _flags(group._group_actions)) for group in groups]
    return wrapped("\n".join([_INTRODUCTION, *sections]))


def _flags(actions: Iterable[argparse.Action]) -> list[argparse.Action]:
    """Those that set something: not --help."""
    return [action for action in actions if action.option_strings and action.dest != "help"]


def _section(title: str, description: str | None, actions: Sequence[argparse.Action]) -> str:
    lines = [f"## {title}", ""]
    if description:
        lines += [_prose(" ".join(description.split())), ""]
    lines += ["| flag and value | default | meaning |", "|---|---|---|", *map(_row, actions), ""]
    return "\n".join(lines)


def _row(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%").removesuffix(" Required.").removesuffix(f" Default: {action.default}.")
    values = _values(action)
    flag = f"`{action.option_strings[0]}`" + (f"<br>{values}" if values else "")
    return f"| {flag} | {_default(action)} | {_prose(text)} |"


def _values(action: argparse.Action) -> str:
    """What follows the flag; nothing after a switch."""
    if action.nargs == 0:
        return ""
    metavar = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    words = [str(choice) for choice in action.choices] if action.choices else _alternatives(metavar)
    *others, last = [f"`{word}`" for word in words]
    text = f"{', '.join(others)} or {last}" if others else last
    return f"{text} ..." if action.nargs == "*" else text


def _alternatives(metavar: str) -> list[str]:
    return metavar.split("|") if metavar.replace("|", "") else [metavar]


def _default(action: argparse.Action) -> str:
    if (action.help or "").endswith(" Required."):
        return "required"
    if action.nargs == 0 or action.default is None or action.default == ():
        return ""
    return f"`{action.default}`"


def _prose(text: str) -> str:
    """Help text as Markdown in a table: flags as code, and nothing that a table or HTML would take for its own."""
    escaped = text.replace("|", "&#124;").replace("<", "&lt;").replace("*", r"\*")
    return _FLAG.sub(lambda found: f"`{found[0]}`" if len(found[0]) > 2 else found[0], escaped)


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page. Returns the exit code."""
    return write_or_check(COMMAND, PAGE, page, argv)


if __name__ == "__main__":
    sys.exit(main())
