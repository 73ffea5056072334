"""This process' place in its job, from the environment variables of torchrun, and whether ZERO_BUBBLE=0 turns `install` off.

The only module that reads `os.environ` for a job; in `cli`, `output_files` reads what a terminal shows and `env` lists variables.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.zerobubble.errors import ConfigError

__all__ = [
    "Launch",
    "enter_block",
    "has_agent_store",
    "is_turned_off",
    "launcher_environment",
    "master",
    "read_launch",
    "store_name",
    "use_agent_store",
]

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_RUN_ID = "TORCHELASTIC_RUN_ID"
_SWITCH = "ZERO_BUBBLE"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process' place in the job, from torchrun's environment variables."""

    rank: int
    """Global rank, 0 .. world_size-1."""
    local_rank: int
    """Rank among the processes of this machine; the index of its GPU."""
    ranks_on_host: int
    """Number of ranks on this machine."""
    world_size: int
    """Number of ranks of the job."""
    error_file: str | None = None
    """Where torchrun expects the reason of this rank's failure; None without torchrun."""
    run_id: str = ""
    """The id of torchrun's rendezvous (--rdzv-id), the same in all attempts of a job."""


def read_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read torchrun's environment variables; a process started without torchrun is a job of one rank.

    Args:
        environment: the variables; None takes those of the process.

    Raises:
        ConfigError: a variable is not a number.
    """
    environment = os.environ if environment is None else environment

    def number(name: str, default: int) -> int:
        text = environment.get(name, str(default))
        if not text.isdecimal():
            raise ConfigError(f"the environment variable {name} is {text!r}, not a number; start the job with torchrun")
        return int(text)

    rank = number("RANK", 0)
    return Launch(
        rank=rank,
        local_rank=number("LOCAL_RANK", rank),
        ranks_on_host=max(1, number("LOCAL_WORLD_SIZE", number("WORLD_SIZE", 1))),
        world_size=number("WORLD_SIZE", 1),
        error_file=environment.get(_ERROR_FILE),
        run_id=environment.get(_RUN_ID, ""),
    )


def enter_block(launch: Launch, number: int, error_file: Path) -> Launch:
    """Make this process a rank of another job with the same ranks and launcher, which starts several one after the other.

    Args:
        launch: which rank it is.
        number: tells the jobs apart: each meets in a part of torchrun's store of its own.
        error_file: where it leaves the reason of its failure.
    """
    run_id = f"{launch.run_id}/{number}"
    os.environ.update({_RUN_ID: run_id, _ERROR_FILE: str(error_file)})
    return replace(launch, run_id=run_id, error_file=str(error_file))


def is_turned_off() -> bool:
    """Whether ZERO_BUBBLE=0 is in the environment, which turns `install` off for a queued job. Raises ConfigError."""
    value = os.environ.get(_SWITCH) or "1"
    if value not in ("0", "1"):
        raise ConfigError(f"the environment variable {_SWITCH} is {value!r}; 0 turns zero bubble off, 1 leaves it on")
    return value == "0"


def launcher_environment(error_file: Path) -> dict[str, str]:
    """The environment of a torchrun that leaves the reason of a failed job in `error_file`."""
    return {**os.environ, _ERROR_FILE: str(error_file)}


def has_agent_store() -> bool:
    """Whether torchrun hosts the job's store."""
    return os.environ.get(_AGENT_STORE) == "True"


def use_agent_store() -> None:
    """Let the ranks that this process starts connect to its store as to torchrun's."""
    os.environ[_AGENT_STORE] = "True"


def master() -> tuple[str, int] | None:
    """Host and port of the rendezvous; None where the environment names none. Raises ConfigError."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if host is None:
        return None
    if not port.isdecimal():
        raise ConfigError(f"the environment variable MASTER_PORT is {port!r}, not a number; start the job with torchrun")
    return host, int(port)


def store_name() -> str:
    """The store at which the ranks meet, in messages."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return "the job's store" if host is None else f"the job's store on {host}, port {port} (MASTER_ADDR, MASTER_PORT),"
