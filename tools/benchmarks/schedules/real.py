"""The real mode: one GPT under every schedule, trained on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import simulate
from tools.benchmarks.emulation import run_on_ranks
from tools.benchmarks.schedules.contenders import Entrant, Runtime, Sizes
from tools.benchmarks.schedules.report import Iteration, Line, Passes, Row, Sample, by_iteration, measured_passes, rows_of
from tools.benchmarks.schedules.rounds import take_turns


def serve(
    rank: int, entrants: Sequence[Entrant], sizes: Sizes, num_ranks: int, numbers_of_microbatches: Sequence[int], rounds: int
) -> list[list[list[Sample]]]:
    """One rank: for each number of microbatches, per entrant its samples."""
    # Here, because the process that starts the ranks has no use for megatron-core.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's, on import and on every config
        from megatron.zerobubble.mcore.cpu.device import HostDevice
        from megatron.zerobubble.mcore.cpu.malloc import keep_freed_memory
        from tools.benchmarks.schedules.gpt import GPTContender, set_up, tear_down
        from tools.benchmarks.schedules.torch_pipelining import TorchContender

        keep_freed_memory()  # for everyone: no pass of anyone pays for fresh pages
        host = HostDevice()
        set_up(host, num_ranks)
        contenders: list[TorchContender | GPTContender] = [
            TorchContender(entrant, sizes, num_ranks)
            if entrant.runtime is Runtime.TORCH
            else GPTContender(entrant, sizes, num_ranks, host)
            for entrant in entrants
        ]
        samples = [take_turns(contenders, count, rounds) for count in numbers_of_microbatches]
        for contender in contenders:
            contender.close()
        tear_down(host)
    return samples


def measure(
    entrants: Sequence[Entrant], sizes: Sizes, *, num_ranks: int, numbers_of_microbatches: Sequence[int], rounds: int
) -> list[Row]:
    """Train them side by side; measured is the whole iteration."""
    ranks = run_on_ranks(serve, num_ranks, entrants, sizes, num_ranks, numbers_of_microbatches, rounds)
    results = []
    for place, count in enumerate(numbers_of_microbatches):
        iterations = [by_iteration([rank[place][number] for rank in ranks]) for number in range(len(entrants))]
        results.append(result(entrants, iterations, num_ranks=num_ranks, num_microbatches=count))
    return results


def result(
    entrants: Sequence[Entrant], iterations: Sequence[Sequence[Iteration]], *, num_ranks: int, num_microbatches: int
) -> Row:
    """What was measured with one number of microbatches."""
    passes = _passes(entrants, iterations, num_ranks)
    lines = []
    for entrant, its in zip(entrants, iterations, strict=True):
        plan = build_plan(entrant.schedule, num_ranks=num_ranks, num_microbatches=num_microbatches)
        is_recorded = entrant.runtime is Runtime.OURS
        lines.append(
            Line(
                name=entrant.name,
                runtime=entrant.runtime.value,
                baseline=entrant.baseline,
                peer=entrant.peer,
                ms=tuple(iteration.wall_ms for iteration in its),
                predicted_ms=_predicted_ms(entrant, plan, passes),
                beyond_passes=tuple(iteration.beyond_passes(plan) for iteration in its) if is_recorded else (),
                losses=tuple(iteration.loss for iteration in its if iteration.loss is not None),
            )
        )
    tables = {each.placement.name: {"outside_ms": round(each.outside_ms, 3), "stages": each.table()} for each in passes}
    return {"num_microbatches": num_microbatches, "passes": tables, "rows": rows_of(lines)}


def _passes(entrants: Sequence[Entrant], iterations: Sequence[Sequence[Iteration]], num_ranks: int) -> list[Passes]:
    """Of every placement that something was recorded on."""
    recorded: dict[Placement, list[Iteration]] = {}
    for entrant, its in zip(entrants, iterations, strict=True):
        if entrant.runtime is Runtime.OURS:
            recorded.setdefault(entrant.placement(num_ranks), []).extend(its)
    return [measured_passes(placement, its) for placement, its in recorded.items()]


def _predicted_ms(entrant: Entrant, plan: Plan, passes: Sequence[Passes]) -> float | None:
    """The simulator's makespan on the times of the same stages, and what is outside. torch's layers are others.

    Stages are the same wherever they sit, so that times recorded on a V also serve a loop.
    """
    placement = plan.placement
    fitting = [each for each in passes if each.placement.num_stages == placement.num_stages]
    if entrant.runtime is Runtime.TORCH or not fitting:
        return None
    best = next((each for each in fitting if each.placement == placement), fitting[0])
    return simulate(plan, best.costs).makespan_ms + best.outside_ms
