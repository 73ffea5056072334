"""The model of SMs and of the host's clock: it is the simulator where transfers take nothing, and small cases by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron.zerobubble.errors import DeadlockError
from megatron.zerobubble.plan.communication import place_communication
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.ir import OpKind
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.simulate import simulate
from tools.benchmarks import gpu_model
from tools.benchmarks.gpu_model import CONTENDERS, Gpu, Kernel, Model, pass_ms, programs
from tools.benchmarks.reports import ROOT
from tools.benchmarks.wgrad.shapes import shape_named

pytestmark = pytest.mark.claims(
    "Planning and measuring",
    "a model of SMs and of the host's clock, behind the defaults of CTAs and margins",
    "equals the simulator where transfers hold no SM; a model, which [one GPU](benchmarks/one_gpu.md) has corrected; "
    "[numbers](benchmarks/gpu_model.md)",
)

SHAPE = shape_named("Llama-3-8B")
FREE = Gpu(ctas=0)
REPORT = json.loads((ROOT / "docs" / "benchmarks" / "data" / "gpu_model.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "chunks"), CONTENDERS)
def test_without_sms_for_transfers_it_is_the_simulator(name: str, chunks: int | None) -> None:
    plan = build_plan(name, num_ranks=4, num_microbatches=8, num_chunks=chunks)
    kinds = {"forward_ms": OpKind.F, "backward_ms": OpKind.B, "wgrad_ms": OpKind.W}
    times = {key: 4 * pass_ms(FREE, SHAPE, kind) for key, kind in kinds.items()}
    comm = FREE.transfer_us(2 * SHAPE.tokens * SHAPE.hidden_size) / 1e3
    costs = CostModel.uniform(plan.placement, **times, comm_ms=comm)
    layers = 4 // plan.placement.num_chunks
    found = Model(place_communication(plan, costs=costs), FREE, SHAPE, layers).run()
    assert found == pytest.approx(simulate(plan, costs).makespan_ms, rel=2e-3)


def test_waves_and_margins_by_hand() -> None:
    """4096 x 4096 outputs are 512 tiles: four waves on 128 SMs, five on 116."""
    tiles = Gpu().gemm(4096, 4096, 4096)
    assert tiles.blocks == 512
    assert Gpu(gemm_margin=4).gemm(4096, 4096, 4096) == Kernel(128, 4 * tiles.us)
    assert Gpu(gemm_margin=16).gemm(4096, 4096, 4096) == Kernel(116, 5 * tiles.us)
    assert Gpu(norm_margin=16).norm(SHAPE, 2).us * 116 == pytest.approx(Gpu().norm(SHAPE, 2).us * 132)


def test_a_slow_host_and_a_short_queue_delay_the_passes() -> None:
    """One layer on one rank, a microbatch: F and BW have 78 launches, and each kernel waits for those before it."""
    program = place_communication(build_plan("1f1b", num_ranks=1, num_microbatches=1))

    def ms(**given: float) -> float:
        return Model(program, replace(FREE, **given), SHAPE, 1).run()  # type: ignore[arg-type]

    passes = pass_ms(FREE, SHAPE, OpKind.F) + pass_ms(FREE, SHAPE, OpKind.BW)
    assert ms() == pytest.approx(passes)
    last = gpu_model.LAUNCHES[OpKind.F] + gpu_model.LAUNCHES[OpKind.BW]
    assert last == 78
    assert ms(launch_us=1e5) == pytest.approx(1e2 * last + Gpu().layer(SHAPE, OpKind.BW)[-1].us * 4 / 1e3, rel=1e-3)
    assert ms(launch_us=20.0, queue=1) > ms(launch_us=20.0)


def test_the_launches_are_those_that_were_counted() -> None:
    """Per layer, of the stage of four layers on the first row of the page of fake tensors."""
    (counted,) = json.loads((ROOT / "docs/benchmarks/data/fake_tensors.json").read_text())["cases"][0]["stages"].values()
    assert {kind: 4 * launches for kind, launches in gpu_model.LAUNCHES.items()} == {
        kind: counted[kind.name]["kernels"] for kind in OpKind
    }


def test_a_norm_that_needs_all_sms_waits_for_every_transfer_and_hangs_where_receives_are_early() -> None:
    gpu = Gpu(ctas=4, is_norm_cooperative=True)
    for lookahead in (None, 8):
        program, layers = programs(4, lookahead, SHAPE)["zbv"]
        model = Model(program, gpu, SHAPE, layers)
        if lookahead is None:
            assert model.run() > 0
        else:
            with pytest.raises(DeadlockError):
                model.run()


def test_the_page_has_the_table_and_the_chosen_default_is_the_best() -> None:
    page = (ROOT / "docs" / "benchmarks" / "gpu_model.md").read_text(encoding="utf-8")
    assert gpu_model.markdown(REPORT) == page
    for sweep in ("CTAs of a transfer", "CTAs, 10 GB/s each"):
        rows = [row for row in REPORT["rows"] if row["sweep"] == sweep]
        for name, _ in CONTENDERS:
            assert min(rows, key=lambda row: row["ms"][name])["label"] == "4"
    (chosen,) = [row for row in REPORT["rows"] if row["label"] == "on the timeline"]
    program, layers = programs(4, None, SHAPE)["zbv"]
    assert Model(program, gpu_model.CHOSEN, SHAPE, layers).run() == pytest.approx(chosen["ms"]["zbv"], abs=1e-3)
