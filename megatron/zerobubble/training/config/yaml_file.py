"""--yaml-cfg: flags from a YAML file, turned into words of the command line, so that they are parsed and checked as such."""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.messages import quoted, shown
from megatron.zerobubble.training.config.suggestions import did_you_mean

__all__ = ["FLAG", "with_yaml_flags"]

FLAG = "--yaml-cfg"


def with_yaml_flags(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """`argv` with the flags of its --yaml-cfg file in front, so that those of the command line override them.

    A key is a flag without its dashes or the name of its value, with dashes or underscores; a mapping is a section, whose name is
    ignored. A list has several values, null is left out.

    Raises:
        ConfigError: the file cannot be read, is not a mapping, or has a key that is no flag.
    """
    file = _file(argv)
    if file is None:
        return list(argv)
    words: list[str] = []
    for key, value in _entries(_read(file)):
        words += _words(key, value, parser, file)
    return [*words, *argv]


def _file(argv: Sequence[str]) -> str | None:
    for word, following in itertools.zip_longest(argv, argv[1:]):
        if word.startswith(f"{FLAG}="):
            return word.partition("=")[2]
        if word == FLAG:
            return following
    return None


def _read(file: str) -> Mapping[str, Any]:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise ConfigError(f"{FLAG} {file} needs the package pyyaml, which is not installed: pip install pyyaml") from None
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except RecursionError:
        raise ConfigError(
            f"{FLAG} {file} is nested too deeply; it needs lines such as num_layers: 24, alone or in sections"
        ) from None
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: not UTF-8, or a number of more than 4,300 digits
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ConfigError(f"{FLAG} {file}: {reason}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{FLAG} {file} must have lines such as num_layers: 24, alone or in sections")
    return content


def _entries(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _entries(value)
        elif value is not None:
            yield shown(key), value


def _words(key: str, value: Any, parser: argparse.ArgumentParser, file: str) -> list[str]:
    name = key.replace("-", "_")
    by_flag = {flag.lstrip("-").replace("-", "_"): action for action in parser._actions for flag in action.option_strings}
    by_value = {action.dest: action for action in parser._actions if action.option_strings}
    action = by_value.get(name) or by_flag.get(name)
    if action is None or name == "help":
        raise ConfigError(f"{FLAG} {file}: {key} is not a flag{did_you_mean(name, [*by_flag, *by_value])}")
    flag = action.option_strings[-1]
    if action.nargs == 0:  # a switch: true is its own value, or for the name of a value, the value
        if not isinstance(value, bool):
            raise ConfigError(f"{FLAG} {file}: {key} is {quoted(value)}; it is a switch, true or false")
        wanted = value if name in by_value else value == bool(action.const)
        return [flag] if wanted == bool(action.const) else []
    if isinstance(value, list):
        return [flag, *map(_word, value)]
    return [f"{flag}={_word(value)}"]


def _word(value: Any) -> str:
    try:
        return str(value)
    except (ValueError, RecursionError):  # a number of more than 4,300 digits, written in hexadecimal
        return shown(value)
