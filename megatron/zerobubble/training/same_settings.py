"""What every rank of the reference trainer must have been given: flags, files by content, versions.

Compared in the job's store before the process group is initialized (`mcore.agreement`), because a backend or a timeout that
differs ends in an error that blames the network. A flag counts with its value unless it is in one of the tables
below.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.flags.dataclass_flags import flag_of
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.job.rendezvous import Connection
from megatron.zerobubble.mcore.agreement import Given, check_same, content_digest, versions
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.initialize import resolved_backend

__all__ = ["BY_CONTENT", "GIVEN_OR_NOT", "PER_HOST", "check_same_settings", "values_of"]

PER_HOST = frozenset({"num_workers", "distributed_backend"})
"""Fields that may differ between hosts: how a host reads the same samples; and of the backend the one that is chosen counts."""

GIVEN_OR_NOT = frozenset({"save", "load", "metrics_jsonl", "zero_bubble_save_plan", "zero_bubble_trace"})
"""Paths to write or load by, which may differ between hosts. All ranks have them, or none."""

BY_CONTENT = frozenset({"data_path", "zero_bubble_load_plan"})
"""Files that may have another path on each host: their content counts."""

_REMEDY = "start every host with the same flags, files and packages"


def check_same_settings(values: dict[str, Given], settings: Settings, launch: Launch, connection: Connection) -> None:
    """Compare the `values_of` all ranks. All ranks must call this, after `connect` and before `join_job`.

    Raises:
        ConfigError: they differ; the same line on every rank.
    """
    if launch.world_size == 1:
        return
    check_same(
        connection.of("agreement"),
        values,
        rank=launch.rank,
        ranks=range(launch.world_size),
        remedy=_REMEDY,
        timeout_s=60.0 * settings.parallel.distributed_timeout_minutes,
    )


def values_of(settings: Settings, launch: Launch) -> dict[str, Given]:
    """What this rank was given, by the flag or in words. Raises DataError for a file that cannot be read."""
    values: dict[str, Given] = {}
    for group in (getattr(settings, field.name) for field in dataclasses.fields(settings)):
        if not dataclasses.is_dataclass(group):
            continue  # the number of ranks is torchrun's
        for field in dataclasses.fields(group):
            if field.init and field.name not in PER_HOST | BY_CONTENT:
                value = getattr(group, field.name)
                values[flag_of(field)] = Given(_given_or_not(value) if field.name in GIVEN_OR_NOT else _text(value))
    try:
        plan = settings.zero_bubble.zero_bubble_load_plan
        if plan is not None:
            digest = content_digest(Path(plan))
            values["--zero-bubble-load-plan"] = Given(f"{plan} (content {digest[:8]})", digest)
        if settings.data.data_path is not None:
            values["--data-path"] = _indexed(settings.data.data_path)
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from None
    values["the communication backend"] = Given(resolved_backend(settings))
    values["torchrun's --max-restarts"] = Given(str(launch.max_restarts))
    return values | versions()


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value) if value is not None else "not given"


def _given_or_not(value: Any) -> str:
    return "not given" if value is None else "given"


def _indexed(prefix: str) -> Given:
    """An indexed dataset: the content of its index, which has the length of every document, and the size of its tokens."""
    digest, num_bytes = content_digest(Path(f"{prefix}.idx")), Path(f"{prefix}.bin").stat().st_size
    return Given(f"{prefix} ({digest[:8]}, {num_bytes} B)", f"{digest} {num_bytes}")
