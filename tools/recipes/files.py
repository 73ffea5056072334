"""Recipes that are files: Megatron-LM's test cases, which are command lines, and those of Primus, which are layered YAML."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["Recipe", "megatron_lm", "primus", "values_of"]

_RENAMED = {
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "num_experts": "num_moe_experts",
    "hybrid_override_pattern": "hybrid_layer_pattern",
}
"""Flag of Megatron-LM, as an attribute -> the field of megatron-core's configuration that it sets."""
_ENVIRONMENT = re.compile(r"\$\{[A-Za-z_0-9]+:([^${}]*)\}")
"""A variable with its default."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a recipe configures."""

    name: str
    family: str
    """Of its model, or the folder that it is in."""
    values: Mapping[str, Any]
    """Fields of megatron-core's configurations that it sets; others have their defaults."""
    words: tuple[str, ...] | None = None
    """Its command line, where that is what people start."""
    unread: str | None = None
    """Why it could not be read; None: it was."""

    @property
    def num_ranks(self) -> int:
        """Ranks of its pipeline."""
        return int(self.values.get("pipeline_model_parallel_size") or 1)


def megatron_lm(checkout: Path) -> Iterator[Recipe]:
    """The test cases of Megatron-LM that train."""
    for file in sorted(checkout.glob("tests/functional_tests/test_cases/*/*/model_config.yaml")):
        case = yaml.safe_load(file.read_text("utf-8"))
        given = case.get("MODEL_ARGS")
        if not isinstance(given, dict) or not {"--train-iters", "--train-samples"} & given.keys():
            continue  # inference, and configurations of other loops
        words = tuple(word for flag, value in given.items() for word in _words(flag, value))
        yield Recipe(name=file.parent.name, family=file.parts[-3], values=values_of(words), words=words)


def _words(flag: str, value: Any) -> list[str]:
    if value is True:
        return [flag]
    return [] if value is False or value is None else [flag, *shlex.split(str(value))]


def values_of(words: tuple[str, ...] | list[str]) -> dict[str, Any]:
    """The fields that a command line of Megatron-LM sets. A flag that begins with `--no-` turns its field off."""
    given: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            given[name] = _scalar(value) if equals else True
        elif name is not None:
            value = _scalar(word)
            given[name] = value if given[name] is True else f"{given[name]} {value}"
    return _fields(given)


def _scalar(word: str) -> Any:
    """A number or a truth value; anything else stays text."""
    try:
        value = yaml.safe_load(word)
    except yaml.YAMLError:
        return word
    return value if isinstance(value, bool | int | float) else word


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of Megatron-LM's arguments as fields of megatron-core, with the number of chunks per rank."""
    off = {name[3:]: False for name, value in given.items() if name.startswith("no_") and value is True}
    values = {_RENAMED.get(name, name): value for name, value in {**given, **off}.items()}
    ranks = int(values.get("pipeline_model_parallel_size") or 1)
    layout, pattern = values.get("pipeline_model_parallel_layout"), str(values.get("hybrid_layer_pattern") or "")
    by_layers, chunks = values.get("num_layers_per_virtual_pipeline_stage"), values.get("num_virtual_stages_per_pipeline_rank")
    if "|" in pattern:
        chunks = (pattern.partition("/")[0].count("|") + 1) // ranks
    elif layout is None and by_layers:
        ends = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
        chunks = (values["num_layers"] + sum(bool(values.get(end)) for end in ends)) // ranks // by_layers
    values.setdefault("virtual_pipeline_model_parallel_size", chunks if chunks and chunks > 1 else None)
    return values


def primus(checkout: Path) -> Iterator[Recipe]:
    """The recipes of AMD's Primus that pretrain with Megatron-LM, with the defaults of their variables."""
    for file in sorted(checkout.glob("examples/megatron/configs/*/*.yaml")):
        module = (_load(file).get("modules") or {}).get("pre_trainer") or {}
        if module.get("framework") != "megatron" or not isinstance(module.get("model"), str):
            continue
        name, family = f"{file.parent.name}/{file.stem}", re.split(r"[^a-z]", file.stem.lower())[0]
        folder = checkout / "primus" / "configs"
        try:
            given = _layered(folder / "modules" / "megatron" / module["config"])
            given = {**given, **_layered(folder / "models" / "megatron" / module["model"]), **(module.get("overrides") or {})}
        except OSError as error:
            yield Recipe(name=name, family=family, values={}, unread=str(error))
            continue
        yield Recipe(name=name, family=family, values=_fields(given))


def _load(file: Path) -> dict[str, Any]:
    """A file of YAML, in which variables have their defaults."""
    text = file.read_text("utf-8")
    while text != (text := _ENVIRONMENT.sub(r"\1", text)):
        pass
    return yaml.safe_load(text) or {}


def _layered(file: Path) -> dict[str, Any]:
    """A file's values over those of the files that it extends, of which later ones count more."""
    own = _load(file)
    values: dict[str, Any] = {}
    extended = own.pop("extends", [])
    for other in [extended] if isinstance(extended, str) else extended:
        values |= _layered(file.parent / other)
    return values | own
