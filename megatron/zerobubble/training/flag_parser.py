"""An argument parser that reports everything that is wrong with a command line at once, where argparse stops at the first."""

from __future__ import annotations

import argparse
import re
from collections import deque
from collections.abc import Sequence
from typing import NoReturn

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.messages import MOST_SHOWN, closest, shown

__all__ = ["TrainingParser"]

_NEEDS = "need{} megatron-core 0.17 (Python 3.12), where pretrain_gpt.py is Megatron-LM's own loop"
"""Where the flags of Megatron-LM run that this trainer does not have."""


class TrainingParser(argparse.ArgumentParser):
    """An ArgumentParser whose `parse` raises one ConfigError with all objections."""

    def __init__(self, *, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False, exit_on_error=False)
        self._alternatives: list[tuple[str, ...]] = []

    def require_one_of(self, *flags: str) -> None:
        """Report `flags`, each optional, among the missing ones if none of them is given."""
        self._alternatives.append(flags)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing the usage and exiting."""
        raise ConfigError(f"{message} (--help lists all flags)")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The values of all flags.

        Raises:
            ConfigError: one line with all unknown flags and all values that a flag does not take; or, if there are none, with
                all required flags that are missing.
            SystemExit: --help was given.
        """
        rest, objections = list(words), []
        while True:
            try:
                namespace, unknown = self.parse_known_args([*self._placeholders(rest), *rest])
                break
            except argparse.ArgumentError as error:
                objections.append(str(error))
                shorter = self._without((error.argument_name or "").split("/"), rest)
                if len(shorter) == len(rest):
                    self.error("; ".join(objections))
                rest = shorter
        if unknown:
            objections.insert(0, f"unrecognized arguments: {self._describe(rest, unknown)}")
        if objections:
            self.error("; ".join(objections))
        if missing := self._missing(words):
            self.error(f"the following arguments are required: {', '.join(missing)}")
        return namespace

    def _missing(self, words: Sequence[str]) -> list[str]:
        """The required flags that are not among `words`."""
        given = _flags_of(words)
        either = [" or ".join(flags) for flags in self._alternatives if not given.intersection(flags)]
        return [action.option_strings[0] for action in self._required_beside(given)] + either

    def _placeholders(self, words: Sequence[str]) -> list[str]:
        """Values of the required flags that are not among `words`: without one argparse would stop before unknown flags."""
        missing = self._required_beside(_flags_of(words))
        return [f"{action.option_strings[0]}={next(iter(action.choices or ('1',)))}" for action in missing]

    def _required_beside(self, given: set[str]) -> list[argparse.Action]:
        return [action for action in self._actions if action.required and not given.intersection(action.option_strings)]

    def _without(self, flags: Sequence[str], words: Sequence[str]) -> list[str]:
        """`words` without an option, which has one or several names, and its values."""
        action = self._option_string_actions.get(flags[0])
        count = len(words) if action is None else 1 if action.nargs is None else action.nargs
        most = count if isinstance(count, int) else len(words)
        kept: list[str] = []
        num_values = 0  # that may follow
        for word in words:
            name, equals, _ = word.partition("=")
            if name in flags or (word[:1] == "-" and word[:2] in flags):
                num_values = 0 if equals else most
            elif num_values and not word.startswith("--"):
                num_values -= 1
            else:
                num_values = 0
                kept.append(word)
        return kept

    def _describe(self, words: Sequence[str], unknown: Sequence[str]) -> str:
        """The unknown flags of `words`, likely typos first, and words that belong to no flag. `unknown`: what argparse left."""
        flags, strays = _unknown_words(words, unknown)
        meant = {flag: self._closest(flag) for flag in flags}
        typos = [f"{shown(flag)} (did you mean {likely}?)" for flag, likely in meant.items() if likely]
        others = [shown(flag) for flag, likely in meant.items() if not likely]
        listed = ", ".join([*typos, *map(shown, strays), *others])
        return f"{listed}, which {_NEEDS.format('s' if len(others) == 1 else '')}" if others else listed

    def _closest(self, flag: str) -> str | None:
        if len(flag) > MOST_SHOWN:  # no flag is that long, and the comparison would take long
            return None
        return closest(flag, list(self._option_string_actions), cutoff=0.85)


def _flags_of(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0] for word in words}


def _unknown_words(words: Sequence[str], unknown: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags in `unknown`, which are some of `words` in their order, each once; and its other words, without their values."""
    flags: dict[str, None] = {}
    strays = []
    left = deque(unknown)
    is_behind_unknown = False
    for word in words:
        is_unknown = bool(left) and word == left[0]
        if is_unknown:
            left.popleft()
        if re.match(r"-[^\d.]", word):
            is_behind_unknown = is_unknown
            flags |= {word.partition("=")[0]: None} if is_unknown else {}
        elif is_unknown and not is_behind_unknown:
            strays.append(word)
    return list(flags), strays
