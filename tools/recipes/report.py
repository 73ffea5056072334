"""Rows and tables of verdicts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.zerobubble.errors import ConfigError
from tools.recipes.bridge import bridge
from tools.recipes.checks import ACCEPTED, ADAPTED, REFUSED, SCHEDULES, Verdict, verdict
from tools.recipes.files import Recipe, megatron_lm, primus

__all__ = ["Source", "rows_text", "written"]

_READERS: dict[str, tuple[str, Callable[[Path], Iterator[Recipe]]]] = {
    "src/megatron/bridge/recipes": ("Megatron-Bridge", bridge),
    "tests/functional_tests/test_cases": ("Megatron-LM's test cases", megatron_lm),
    "primus/configs": ("Primus", primus),
}
"""A folder of a checkout -> whose it is, and what reads it."""
_BEGIN, _END = "<!-- recipes: begin -->", "<!-- recipes: end -->"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkout's recipes."""

    name: str
    commit: str
    date: str
    num_recipes: int
    """All that it has, with a pipeline or without."""
    unread: tuple[Recipe, ...]
    verdicts: tuple[tuple[Recipe, dict[str, Verdict]], ...]
    """Of those with a pipeline of several ranks, by schedule."""

    @staticmethod
    def read(checkout: Path, commit: str, date: str) -> Source:
        """Read and check a checkout's recipes. Raises ConfigError if it is none of the three."""
        known = next((whose for folder, whose in _READERS.items() if (checkout / folder).is_dir()), None)
        if known is None:
            raise ConfigError(
                f"{checkout} has none of {', '.join(_READERS)}: give checkouts of Megatron-Bridge, Megatron-LM or Primus"
            )
        name, reader = known
        recipes = list(reader(checkout))
        return Source(
            name=name,
            commit=commit,
            date=date,
            num_recipes=len(recipes),
            unread=tuple(each for each in recipes if each.unread is not None),
            verdicts=tuple(
                (each, {schedule: verdict(each, schedule) for schedule in SCHEDULES})
                for each in recipes
                if each.unread is None and each.num_ranks > 1
            ),
        )

    def counts(self, schedule: str, family: str | None = None) -> Counter[str]:
        """Recipes with a pipeline, by the kind of their verdict."""
        return Counter(found[schedule].kind for recipe, found in self.verdicts if family in (None, recipe.family))


def rows_text(source: Source) -> str:
    """One line for each recipe and schedule, and the counts."""
    lines = [f"{source.name} {source.commit} ({source.date})"]
    for recipe, found in source.verdicts:
        for schedule, each in found.items():
            text = "; ".join(each.options if each.kind == REFUSED else each.lines)
            lines.append(f"{recipe.family}/{recipe.name}  {schedule}  {each.kind}{': ' if text else ''}{text}")
    lines += [f"{each.family}/{each.name}  not read: {each.unread}" for each in source.unread]
    lines.append(
        f"{source.num_recipes} recipes, {len(source.verdicts)} with a pipeline, {len(source.unread)} not read; "
        + "; ".join(f"{schedule}: {_counted(source.counts(schedule))}" for schedule in SCHEDULES)
    )
    return "\n".join(lines)


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[kind]} {kind}" for kind in (ACCEPTED, ADAPTED, REFUSED))


def written(page: str, sources: Sequence[Source], release: str) -> str:
    """A page with the tables between its marks.

    Args:
        page: its text, with a mark where the tables begin and one where they end.
        sources: what was read.
        release: of megatron-core.

    Raises:
        ConfigError: the page lacks a mark.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, behind = rest.partition(_END)
    if not begin or not end:
        raise ConfigError(f"the page has no {_BEGIN} and {_END} around its tables")
    lines = [
        f"Recipes with a pipeline that are accepted or adapted, with megatron-core {release}:",
        "",
        f"| source | recipes | {' | '.join(SCHEDULES)} |",
        f"|---|---:|{'---:|' * len(SCHEDULES)}",
    ]
    for source in sources:
        cells = [str(source.counts(schedule)[ACCEPTED] + source.counts(schedule)[ADAPTED]) for schedule in SCHEDULES]
        lines.append(f"| {source.name} | {len(source.verdicts)} | {' | '.join(cells)} |")
    tables = "\n\n".join(["\n".join(lines), *map(_tables, sources)])
    return f"{before}{begin}\n\n{tables}\n\n{end}{behind}"


def _tables(source: Source) -> str:
    """Counts by family, and by refused option."""
    lines = [
        f"### {source.name}",
        "",
        f"Commit {source.commit} of {source.date}: {source.num_recipes} recipes, {len(source.verdicts)} with a pipeline, "
        f"{len(source.unread)} that could not be read.",
        "",
        f"| family | recipes | {' | '.join(SCHEDULES)} |",
        f"|---|---:|{'---|' * len(SCHEDULES)}",
    ]
    for family in [*sorted({recipe.family for recipe, _ in source.verdicts}), None]:
        counts = [source.counts(schedule, family) for schedule in SCHEDULES]
        cells = [" / ".join(str(each[kind]) for kind in (ACCEPTED, ADAPTED, REFUSED)) for each in counts]
        lines.append(f"| {family or '**all**'} | {counts[0].total()} | {' | '.join(cells)} |")
    refused: Counter[tuple[str, str]] = Counter()
    why: dict[str, str] = {}
    for _, found in source.verdicts:
        for schedule, each in found.items():
            for option, line in zip(each.options, each.lines, strict=False):
                refused[option, schedule] += 1
                why.setdefault(
                    option, re.sub(r"^\S+ does not go with schedule \S+ |\. Turn it off or use the stock schedule$", "", line)
                )
    options = sorted(why, key=lambda name: -refused[name, "auto"])
    if options:
        lines += ["", f"| refused | {' | '.join(SCHEDULES)} | why |", f"|---|{'---:|' * len(SCHEDULES)}---|"]
    for option in options:
        numbers = " | ".join(str(refused[option, schedule]) for schedule in SCHEDULES)
        lines.append(f"| `{option}` | {numbers} | {why[option]} |")
    return "\n".join(lines)
