"""The process groups and the communicator that a training loop passes to the schedule, checked against `parallel_state`.

megatron-core's schedules take their groups from these arguments, or from `parallel_state` where a loop passes none. Schedules of
this package always take them from `parallel_state`, whose embedding ranks know the placement, and have links of their own. So a
loop may pass what means the same, as Megatron-Bridge does in every call, and gets an error that names what differs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.zerobubble.errors import ConfigError

__all__ = ["check_given_groups"]


def check_given_groups(schedule: str, *, pg_collection: Any, p2p_communicator: Any) -> None:
    """Check the arguments of one call of the schedule; None is fine for each of them.

    Args:
        schedule: its name, for messages.
        pg_collection: a `ProcessGroupCollection`; every group that it has must have the ranks of the one in `parallel_state`.
        p2p_communicator: megatron-core's `P2PCommunicator` on the pipeline's ranks. It is not used.

    Raises:
        ConfigError: the argument is of another kind, or a group has other ranks.
    """
    if pg_collection is None and p2p_communicator is None:
        return
    known = ProcessGroupCollection.use_mpu_process_groups()
    if pg_collection is not None:
        if not isinstance(pg_collection, ProcessGroupCollection):
            raise ConfigError(
                f"pg_collection is a {type(pg_collection).__name__}: schedule {schedule!r} runs one model on the groups of "
                "parallel_state; give a ProcessGroupCollection with those groups, or none"
            )
        for field in dataclasses.fields(pg_collection):
            given, expected = (getattr(groups, field.name, None) for groups in (pg_collection, known))
            _check_equal(schedule, f"pg_collection.{field.name}", given, expected)
    if p2p_communicator is not None:
        if type(p2p_communicator) is not P2PCommunicator:
            raise ConfigError(
                f"p2p_communicator is a {type(p2p_communicator).__module__}.{type(p2p_communicator).__name__}: schedule "
                f"{schedule!r} has links of its own and can replace megatron-core's P2PCommunicator only; give that, or none"
            )
        _check_equal(schedule, "p2p_communicator.pp_group", p2p_communicator.pp_group, known.pp)


def _check_equal(schedule: str, name: str, given: Any, expected: Any) -> None:
    if given is None or given is expected:
        return
    if _ranks(given) != _ranks(expected):
        raise ConfigError(
            f"{name} has the ranks {_ranks(given)}, in parallel_state they are {_ranks(expected)}: schedule {schedule!r} takes "
            "its groups from parallel_state; make them with initialize_model_parallel, and pass those or none"
        )


def _ranks(group: Any) -> Any:
    """The global ranks of a group, or of each in a list of groups; None without one, and on ranks outside it."""
    if isinstance(group, list | tuple):
        return [_ranks(each) for each in group]
    if group is None or not isinstance(group, dist.ProcessGroup):
        return None
    return dist.get_process_group_ranks(group)
