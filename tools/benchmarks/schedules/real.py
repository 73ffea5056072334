"""The real mode: one GPT under every schedule, trained on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import simulate
from tools.benchmarks.emulation import run_on_ranks
from tools.benchmarks.reports import Row
from tools.benchmarks.schedules.contenders import ContenderSpec, Runtime, Sizes
from tools.benchmarks.schedules.report import Iteration, Line, Passes, Sample, by_iteration, measured_passes, rows_of
from tools.benchmarks.schedules.rounds import run_rounds


def serve(
    rank: int, specs: Sequence[ContenderSpec], sizes: Sizes, num_ranks: int, numbers_of_microbatches: Sequence[int], rounds: int
) -> list[list[list[Sample]]]:
    """Run one rank; returns, for each number of microbatches and each contender, its samples."""
    # Here, because the process that starts the ranks does not need megatron-core.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's, on import and on every config
        from megatron.zerobubble.mcore.cpu.device import HostDevice
        from megatron.zerobubble.mcore.cpu.malloc import keep_freed_memory
        from tools.benchmarks.schedules.gpt import GPTContender, build, set_up, tear_down
        from tools.benchmarks.schedules.torch_pipelining import TorchContender

        keep_freed_memory()  # for all contenders alike: no pass pays for fresh pages
        host = HostDevice()
        set_up(host, num_ranks)
        contenders: list[TorchContender | GPTContender] = [
            TorchContender(spec, sizes, num_ranks) if spec.runtime is Runtime.TORCH else build(spec, sizes, num_ranks, host)
            for spec in specs
        ]
        samples = [run_rounds(contenders, count, rounds) for count in numbers_of_microbatches]
        for contender in contenders:
            contender.close()
        tear_down(host)
    return samples


def measure(
    specs: Sequence[ContenderSpec], sizes: Sizes, *, num_ranks: int, numbers_of_microbatches: Sequence[int], rounds: int
) -> list[Row]:
    """Train the contenders side by side, and measure whole iterations."""
    ranks = run_on_ranks(serve, num_ranks, specs, sizes, num_ranks, numbers_of_microbatches, rounds)
    results = []
    for place, count in enumerate(numbers_of_microbatches):
        iterations = [by_iteration([rank[place][number] for rank in ranks]) for number in range(len(specs))]
        results.append(result(specs, iterations, num_ranks=num_ranks, num_microbatches=count))
    return results


def result(
    specs: Sequence[ContenderSpec], iterations: Sequence[Sequence[Iteration]], *, num_ranks: int, num_microbatches: int
) -> Row:
    """The results for one number of microbatches, as in the JSON."""
    passes = _passes(specs, iterations, num_ranks)
    lines = []
    for spec, its in zip(specs, iterations, strict=True):
        plan = build_plan(spec.schedule, num_ranks=num_ranks, num_microbatches=num_microbatches)
        is_recorded = spec.runtime is Runtime.OURS
        lines.append(
            Line(
                name=spec.name,
                runtime=spec.runtime.value,
                baseline=spec.baseline,
                peer=spec.peer,
                ms=tuple(iteration.wall_ms for iteration in its),
                predicted_ms=_predicted_ms(spec, plan, passes),
                beyond_passes=tuple(iteration.beyond_passes(plan) for iteration in its) if is_recorded else (),
                losses=tuple(iteration.loss for iteration in its if iteration.loss is not None),
            )
        )
    tables = {each.placement.name: {"outside_ms": round(each.outside_ms, 3), "stages": each.table()} for each in passes}
    return {"num_microbatches": num_microbatches, "passes": tables, "rows": rows_of(lines)}


def _passes(specs: Sequence[ContenderSpec], iterations: Sequence[Sequence[Iteration]], num_ranks: int) -> list[Passes]:
    """The measured passes of every placement with a recorded contender."""
    recorded: dict[Placement, list[Iteration]] = {}
    for spec, its in zip(specs, iterations, strict=True):
        if spec.runtime is Runtime.OURS:
            recorded.setdefault(spec.placement(num_ranks), []).extend(its)
    return [measured_passes(placement, its) for placement, its in recorded.items()]


def _predicted_ms(spec: ContenderSpec, plan: Plan, passes: Sequence[Passes]) -> float | None:
    """The simulator's makespan with the measured times of the same stages, plus the time outside of the passes.

    None for torch, whose layers differ. Stages do not depend on their rank, so that times recorded with V placement also serve
    the interleaved (round-robin) placement.
    """
    placement = plan.placement
    fitting = [each for each in passes if each.placement.num_stages == placement.num_stages]
    if spec.runtime is Runtime.TORCH or not fitting:
        return None
    best = next((each for each in fitting if each.placement == placement), fitting[0])
    return simulate(plan, best.costs).makespan_ms + best.outside_ms
