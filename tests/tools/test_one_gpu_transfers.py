"""Step B of the one-GPU benchmark: order of calls and ratios, the spinning kernel as a double. No times."""

from __future__ import annotations

import ctypes
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from megatron.zerobubble.errors import ConfigError
from tools.benchmarks.one_gpu import spinner, transfers
from tools.benchmarks.one_gpu.setting import Setting
from tools.benchmarks.reports import Row

TINY = Setting(device=torch.device("cpu"), scale=0.004)


class Double(spinner.Spinner):
    """Records calls. The SMs of 8 CTAs are never held to the end."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, ctas: int) -> None:
        self.calls.append(f"start {ctas}")

    def stop(self) -> bool:
        self.calls.append("stop")
        return self.calls[-2] != "start 8"

    def describe(self) -> Row:
        return {"spins": True, "threads": 544, "registers": 96, "shared_bytes": 81920}


def test_every_number_of_ctas_runs_in_every_round() -> None:
    double = Double()
    row = transfers.measure_beside(TINY, double, (0, 1, 8), seconds=0.0, least=2)
    ctas = [int(call.split()[1]) for call in double.calls[::2]]
    assert double.calls[1::2] == ["stop"] * 9
    assert [sorted(ctas[begin : begin + 3]) for begin in (0, 3, 6)] == [[0, 1, 8]] * 3
    assert len({tuple(ctas[begin : begin + 3]) for begin in (0, 3, 6)}) == 3
    one, eight = json.loads(json.dumps(row["counts"]))
    assert (one["rounds"], eight) == (2, {"ctas": 8, "rounds": 0})
    assert all(one[name]["min"] <= one[name]["median"] <= one[name]["max"] for name in transfers.NAMES)
    assert transfers.lines(row)[-1] == "| 8 | 0 | not held | not held | not held | not held | not held |"


def test_ratios_are_those_of_rounds_in_which_the_sms_were_held() -> None:
    times = {f"0 {name}": [1.0, 2.0, 4.0] for name in transfers.NAMES} | {
        f"4 {name}": [1.1, 2.4, 9.0] for name in transfers.NAMES
    }
    row = transfers._ratios(4, times, [True, True, False])
    assert row["rounds"] == 2
    assert row["forward"] == pytest.approx({"median": 1.15, "min": 1.1, "max": 1.2})


def test_a_rehearsal_spins_nothing() -> None:
    row = transfers.measure(TINY)
    assert (row["cta"], row["counts"], row["rounds"]) == ({"spins": False}, [], 1)
    assert "No CTA spins on the CPU: a rehearsal." in transfers.lines(row)


class Kernel:
    """The spinning kernel: its CTAs begin at once, each on an SM of its own, and end when the stream is waited for."""

    def __init__(self, runs: int) -> None:
        self.runs, self.ctas = runs, 0
        self.over, self.words = (ctypes.c_int * 1)(), (ctypes.c_int * 0)()

    def hold_sms(self, _stream: int, ctas: int, over: int, words: int, _shared: int, _limit: int) -> int:
        self.ctas, self.over = ctas, (ctypes.c_int * 1).from_address(over)
        self.words = (ctypes.c_int * 129).from_address(words)
        for cta in range(min(ctas, self.runs)):
            self.words[1 + 2 * cta] = cta + 1
        return 0

    def synchronize(self) -> None:
        for cta in range(self.ctas):
            self.words[2 + 2 * cta] = 1 if self.over[0] else 2


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernel], spinner.CudaSpinner]:
    """Makes a `CudaSpinner` of a kernel that is a double."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, **_: zeros(*size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    done = type("Event", (), {"record": lambda _: None, "synchronize": lambda _: None})
    monkeypatch.setattr(torch.cuda, "Event", done)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)

    def make(kernel: Kernel) -> spinner.CudaSpinner:
        stream = type("Stream", (), {"cuda_stream": 7, "synchronize": lambda _: kernel.synchronize()})
        monkeypatch.setattr(torch.cuda, "Stream", lambda _device, priority=0: stream())
        monkeypatch.setattr(spinner, "_load", lambda _: kernel)
        return spinner.CudaSpinner(torch.device("cuda", 0))

    return make


def test_the_sms_are_held_until_the_signal(cuda: Callable[[Kernel], spinner.CudaSpinner]) -> None:
    kernel = Kernel(runs=32)
    spins = cuda(kernel)
    for ctas in (32, 0, 1):
        spins.start(ctas)
        assert spins.stop()
    spins.start(4)
    kernel.synchronize()  # the limit
    kernel.synchronize = lambda: None  # type: ignore[method-assign]
    assert not spins.stop()


def test_ctas_that_do_not_run_are_an_error(
    cuda: Callable[[Kernel], spinner.CudaSpinner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spinner, "ARRIVAL_S", 0.01)
    spins = cuda(Kernel(runs=3))
    with pytest.raises(RuntimeError, match="3 of 4 spinning CTAs run, on 3 SMs"):
        spins.start(4)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_nvcc_builds_the_kernel() -> None:
    library = spinner._load((9, 0))
    assert library.text_of(0) == b"no error"
    assert library.hold_sms is not None


def test_without_nvcc_one_line_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no nvcc on PATH or in"):
        spinner._load((9, 0))
