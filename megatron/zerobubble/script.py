"""Runs a training script as `python SCRIPT` would, with a schedule installed. For `zerobubble run` and `zerobubble bench`."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.zerobubble.flags.loop_options import MicrobatchLengths, Seeds
from megatron.zerobubble.flags.targets import check_targets
from megatron.zerobubble.job.launch import Launch, is_turned_off
from megatron.zerobubble.job.rendezvous import connect
from megatron.zerobubble.overlay import flags_of, install, schedule_of
from megatron.zerobubble.plan.schedule_spec import STOCK

__all__ = ["add_seeds", "put_folder_first", "run_script"]


def put_folder_first(script: str) -> None:
    """Put the script's folder first on the path, as `python SCRIPT` does. Call it before anything imports megatron.core.

    It replaces the entry that Python made for this process' own program: what a wrapper or PYTHONPATH put first stays.
    """
    program = sys.modules["__main__"]
    if sys.flags.safe_path:
        own = None
    elif program.__spec__ is not None:  # python -m
        own = str(Path.cwd())
    else:
        file = getattr(program, "__file__", None)
        own = "" if file is None else str(Path(file).resolve().parent)
    if sys.path[0] == own:
        del sys.path[0]
    sys.path.insert(0, str(Path(script).resolve().parent))


def add_seeds(parser: argparse._ActionsContainer) -> None:
    """Add the flags of `run_script` for weights and dropout masks that do not depend on the schedule."""
    parser.add_argument(
        "--zero-bubble-weights-seed",
        type=int,
        metavar="SEED",
        help="draw each first weight by this seed and its name, so that every schedule begins with the same weights; a "
        "loaded checkpoint replaces them",
    )
    parser.add_argument(
        "--zero-bubble-dropout-seed",
        type=int,
        metavar="SEED",
        help="draw dropout masks by this seed, the layer and the sample, so that all zero-bubble schedules have the same ones",
    )


def run_script(
    script: str,
    arguments: Sequence[str],
    launch: Launch,
    *,
    zero_bubble: argparse.Namespace,
    on_cpu: bool,
    seeds: Seeds,
    lengths: MicrobatchLengths | None = None,
) -> None:
    """Run it as `__main__`. All ranks must call this, with the script's folder first on the path; a failure ends the process.

    The script finds the flags in its global `__zero_bubble__`, with `cpu`: whether it runs on the CPU, and `attempt`: which
    attempt of the job this is.

    Args:
        script: its file.
        arguments: its own flags.
        launch: which rank this process is.
        zero_bubble: the zero-bubble flags; with schedule `stock` nothing is installed.
        on_cpu: whether it runs on the CPU instead of GPUs, with gloo.
        seeds: see `install`; first weights also with schedule `stock`.
        lengths: see `install`.
    """
    from megatron.zerobubble.mcore.cpu import scripts

    sys.argv = [script, *arguments]
    with scripts.script_device(launch, on_cpu=on_cpu):
        if not is_turned_off():  # one line ends the other ranks here at once
            check_targets(flags_of(zero_bubble).written, tries=launch.rank == 0)
        install(zero_bubble, lengths=lengths, seeds=seeds)
        if seeds.weights is not None and schedule_of(zero_bubble) == STOCK and not is_turned_off():
            from megatron.zerobubble.mcore.model.named_weights import draw_when_wrapped

            draw_when_wrapped(seeds.weights)
        from megatron.zerobubble.job.failure import JobGuard
        from megatron.zerobubble.mcore.stock_faults import warned_of_wrong_gradients
        from megatron.zerobubble.mcore.stock_loop.patches import finish, supervise_by

        connection = connect(launch, hosts_store=False)
        connection.use_for_process_group(launch)
        guard = JobGuard(connection.of(), launch.rank, error_file=launch.error_file)
        supervise_by(guard)
        is_stock = is_turned_off() or flags_of(zero_bubble).schedule == "stock"
        with guard, warned_of_wrong_gradients(is_writing=is_stock and launch.rank == 0):
            given = argparse.Namespace(**vars(zero_bubble) | {"cpu": on_cpu, "attempt": connection.attempt})
            runpy.run_path(script, init_globals={"__zero_bubble__": given}, run_name="__main__")
            finish()
