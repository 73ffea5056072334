"""The command line of tools.benchmarks.wgrad: every variant computes the same W and is measured; speed is not tested."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.zerobubble.wgrad.gemm import WgradKernel, choose_kernel
from tools.benchmarks.wgrad import __main__ as benchmark_wgrad
from tools.benchmarks.wgrad.beside import (
    COPIED_IN,
    GRAPH,
    GRAPH_ON_SIDE,
    PLAIN,
    SIDE,
    BesideTimes,
    Call,
    CaptureError,
    Card,
    CudaCard,
    LayerGemms,
    summary,
    ways_to_run,
)
from tools.benchmarks.wgrad.beside import measure_ways as measure_ways_beside
from tools.benchmarks.wgrad.shapes import LayerShape, Linear, shape_named
from tools.benchmarks.wgrad.stack import Stack, world_of_one
from tools.benchmarks.wgrad.together import Group

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--dtype", "fp32", "--scale", "0.02", "--repeats", "2", "--warmup", "0"]
WAYS = [PLAIN, GRAPH, COPIED_IN, SIDE, GRAPH_ON_SIDE]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
THREADS = ["--threads", str(torch.get_num_threads())]


def kernel_of(device: torch.device, dtype: torch.dtype = torch.float32) -> WgradKernel:
    return choose_kernel(device, input_dtype=dtype, accumulator_dtype=torch.float32)


class ListedCard:
    """A card whose graph is the function itself, and whose two streams run in turn; it records what ran on which."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def captured(self, call: Call) -> Call:
        def replay() -> None:
            self.log.append("replay")
            call()

        return replay

    def beside(self, side: Call, main: Call) -> None:
        for name, call in (("side", side), ("main", main)):
            self.log.append(name)
            call()


def card_of(device: torch.device) -> Card:
    return ListedCard() if device.type == "cpu" else CudaCard(device)


# -- the ways -----------------------------------------------------------------------------------------------------------


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_product_of_several_microbatches_is_the_sum_of_theirs(device: str, dtype: torch.dtype) -> None:
    """Compared with float64, in which the products of the operands are exact and only the order of the sum differs."""
    on = torch.device(device)
    torch.manual_seed(0)
    group = Group(Linear(name="fc1", out=48, in_=32), 24, 5, on, dtype)
    exact = sum(dy.double().t() @ x.double() for dy, x in group.pairs)
    workspace = torch.empty_like(group.grad_outputs), torch.empty_like(group.inputs)
    runs: list[Callable[[torch.Tensor], None]] = [
        lambda accumulator: group.apart(kernel_of(on, dtype), accumulator),
        lambda accumulator: group.copied(kernel_of(on, dtype), accumulator, workspace),
        lambda accumulator: group.adjacent(kernel_of(on, dtype), accumulator),
    ]
    for run in runs:
        accumulator = torch.ones(48, 32, device=on)
        run(accumulator)
        tolerance = 1e-6 if dtype is torch.float32 else 1e-2
        assert float((accumulator.double() - 1.0 - exact).abs().max()) <= tolerance * float(exact.abs().max())


@DEVICES
def test_every_way_adds_the_same_w(device: str) -> None:
    """Once a call, to the bit, with B before it or beside it; operands that were copied in give what they give elsewhere."""
    on = torch.device(device)
    torch.manual_seed(0)
    products = LayerGemms(shape_named("6.2B").scaled(0.03), 1, kernel_of(on), on, torch.float32)
    found_ways = ways_to_run(products, card_of(on))
    ways = found_ways.calls
    assert (list(ways), found_ways.not_measured) == (WAYS, "")
    sums: dict[str, list[torch.Tensor]] = {}
    backward_ran: list[str] = []
    for name, way in ways.items():
        for accumulator in products.accumulators:
            accumulator.zero_()
        way(lambda: backward_ran.append("B"))
        sums[name] = [accumulator.clone() for accumulator in products.accumulators]
    assert backward_ran == ["B"] * len(ways)
    expected = [dy.double().t() @ x.double() for dy, x in products.operands]
    for name, found in sums.items():
        for index, (each, plain, exact) in enumerate(zip(found, sums[PLAIN], expected, strict=True)):
            assert torch.equal(each, plain), (name, index)
            assert float((each.double() - exact).abs().max()) <= 1e-5 * float(exact.abs().max())


def test_what_runs_beside_b_is_given_to_the_other_stream() -> None:
    card = ListedCard()
    ways = ways_to_run(LayerGemms(shape_named("1.5B").scaled(0.02), 1, kernel_of(CPU), CPU, torch.float32), card)
    seen = {}
    for name, way in ways.calls.items():
        card.log.clear()
        way(lambda: card.log.append("B"))
        seen[name] = " ".join(card.log)
    assert seen == {
        PLAIN: "B",
        GRAPH: "B replay",
        COPIED_IN: "B replay",
        SIDE: "side main B",
        GRAPH_ON_SIDE: "side replay main B",
    }


class FilmlessCard(ListedCard):
    """A card that captures nothing."""

    def captured(self, call: Call) -> Call:
        raise CaptureError("operation not permitted when stream is capturing")


def measure_beside_on(card: Card) -> BesideTimes:
    shape = shape_named("6.2B").scaled(0.02)
    with world_of_one(CPU) as host:
        stack = Stack(shape, 1, torch.float32, CPU, host, kernel_of(CPU))
        products = LayerGemms(shape, 1, kernel_of(CPU), CPU, torch.float32)
        rounds: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "repeats": 2, "warmup": 1}
        found = measure_ways_beside(shape, stack, products, card, count=1, **rounds)
        assert stack.store is not None
        stack.store.check_empty()
        stack.close()
    return found


def test_the_ways_are_measured_on_a_real_backward() -> None:
    found = measure_beside_on(ListedCard())
    assert found.not_measured == ""
    assert [each.way for each in found.ways] == WAYS
    assert all(each.device_ms > 0 and each.host_ms > 0 for each in found.ways)
    assert found.ways[0].ratio == 1.0


def test_where_nothing_can_be_captured_the_other_stream_is_measured_all_the_same() -> None:
    found = measure_beside_on(FilmlessCard())
    assert [each.way for each in found.ways] == [PLAIN, SIDE]
    assert "cannot be captured: operation not permitted when stream is capturing" in found.not_measured


def test_times_are_of_a_layer_and_ratios_of_a_round() -> None:
    plain, side = summary({PLAIN: [4.0, 8.0, 10.0], SIDE: [2.0, 8.0, 5.0]}, {PLAIN: [1.0, 3.0, 2.0], SIDE: [6.0, 6.0, 6.0]}, 2)
    assert (plain.device_ms, plain.host_ms, plain.ratio) == (4.0, 1.0, 1.0)
    assert (side.device_ms, side.host_ms, side.ratio) == (2.5, 3.0, 0.5)


# -- the tool -----------------------------------------------------------------------------------------------------------


def test_the_tool_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wgrad.json"
    options = ["--shape", "6.2b", "--tokens", "4", "--tokens", "16", "--together", "3", "--json", str(path)]
    assert benchmark_wgrad.main([*TINY, *THREADS, *options]) == 0
    body = json.loads(path.read_text())
    assert body["format"] == "zerobubble-wgrad-benchmark/1"
    assert not body["is_gpu"]
    assert [shape["shape"]["seq_length"] for shape in body["shapes"]] == [4, 16]
    for shape in body["shapes"]:
        together = shape["measured"]["together"]
        assert {each["linear"] for each in together} == {"qkv", "proj", "fc1", "fc2"}
        assert all(min(each[f"{way}_ms"] for way in ("apart", "copied", "adjacent")) > 0 for each in together)
        assert all(each["workspace_bytes"] == 4 * 3 * each["tokens"] * (each["out"] + each["in_"]) for each in together)
        assert all(each["difference"] < 1e-5 for each in together)
        assert shape["measured"]["beside"] == []
    assert body["verdicts"][-1] == "not measured: CUDA graph and side stream need a GPU, and this is a CPU"
    assert capsys.readouterr().out.count("not measured") == 1


def test_a_layer_is_its_linears_weighted_by_time() -> None:
    def times(linear: str, count: int, apart_ms: float, ratio: float) -> benchmark_wgrad.TogetherTimes:
        return benchmark_wgrad.TogetherTimes(
            linear=linear,
            out=4,
            in_=4,
            tokens=8,
            count=count,
            kernel="k",
            apart_ms=apart_ms,
            copied_ms=0.0,
            adjacent_ms=0.0,
            copied_ratio=ratio,
            adjacent_ratio=0.5,
            workspace_bytes=64,
            difference=0.0,
        )

    shape: LayerShape = shape_named("1.5B")
    slow, fast = times("qkv", 2, 3.0, 1.2), times("proj", 2, 1.0, 0.8)
    result = benchmark_wgrad.ShapeWays(
        shape=shape, kernel="k", together=(slow, fast, times("qkv", 4, 1.0, 0.9)), beside=(), not_measured=""
    )
    two, four = result.layers()
    assert (two.count, two.apart_ms, two.copied_ratio) == (2, 4.0, pytest.approx(1.1))
    assert four.copied_ratio == 0.9
    assert benchmark_wgrad.verdicts([result]) == ["1.5B, 6144 tokens: 2 together does not pay (1.100), 4 together pays (0.900)"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--together", "1"], "--together is 1; it must be 2 or more"),
        (["--tokens", "0"], "--tokens is 0"),
        (["--shape", "7B"], "the shapes are"),
    ],
)
def test_user_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        benchmark_wgrad.main(["--device", "cpu", *arguments])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
