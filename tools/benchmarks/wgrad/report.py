"""Results of the split benchmark as JSON and as Markdown, with verdicts on the targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tools.benchmarks.wgrad.measure import GemmTimes, PassTimes
from tools.benchmarks.wgrad.shapes import LayerShape

SPLIT_LIMIT = 1.02
"""Target: time of B + W over that of the full backward, at most."""
RATE_LIMIT = 0.95
"""Target: rate of W over that of a plain matmul, at least."""


@dataclass(frozen=True, kw_only=True)
class ShapeResult:
    """Results of one kind of layer."""

    shape: LayerShape
    num_layers: int
    """Layers of the measured stack; times are per layer."""
    kernel: str
    """Kernel of W in the stack."""
    bytes_per_element: int
    passes: PassTimes
    gemms: tuple[GemmTimes, ...]

    @property
    def plain_matmul_ms(self) -> float:
        """Time of all weight gradients of a layer as plain matmuls, in milliseconds."""
        return sum(gemm.plain_matmul_ms for gemm in self.gemms)

    @property
    def wgrad_tflops(self) -> float:
        """Rate of W of a layer, in TFLOP/s."""
        return _tflops(self.shape.linear_flops, self.passes.wgrad_ms)

    @property
    def plain_tflops(self) -> float:
        """Rate of the plain matmuls, in TFLOP/s."""
        return _tflops(self.shape.linear_flops, self.plain_matmul_ms)

    @property
    def needed_bytes(self) -> int:
        """Bytes that W needs to hold, per layer."""
        return self.shape.held_bytes(self.bytes_per_element)

    def verdicts(self) -> list[Verdict]:
        """The targets, each with the measured value."""
        passes, rate = self.passes, self.wgrad_tflops / self.plain_tflops
        return [
            Verdict("(B + W) / full backward", passes.split_ratio, f"<= {SPLIT_LIMIT}", passes.split_ratio <= SPLIT_LIMIT),
            Verdict("rate of W / rate of a plain matmul", rate, f">= {RATE_LIMIT}", rate >= RATE_LIMIT),
            Verdict(
                "bytes held from B to W / bytes needed",
                passes.held_bytes / self.needed_bytes,
                "<= 1",
                passes.held_bytes <= self.needed_bytes,
            ),
        ]


@dataclass(frozen=True)
class Verdict:
    """One target and whether it is met."""

    what: str
    measured: float
    target: str
    is_met: bool

    @property
    def line(self) -> str:
        """The verdict in one line."""
        return f"{'met' if self.is_met else 'MISSED'}: {self.what} = {self.measured:.3f} (measured), target {self.target}"


def to_json(results: Sequence[ShapeResult], about: dict[str, Any], fmt: str) -> dict[str, Any]:
    """The JSON form, with all values under `measured` or `predicted`; `predicted` is computed from the shape."""
    return {"format": fmt, **about, "shapes": [_shape_json(result) for result in results]}


def _shape_json(result: ShapeResult) -> dict[str, Any]:
    shape = result.shape
    return {
        "shape": asdict(shape),
        "num_layers": result.num_layers,
        "kernel": result.kernel,
        "measured": {
            "per_layer": asdict(result.passes),
            "products": [asdict(gemm) for gemm in result.gemms],
            "plain_matmul_ms": result.plain_matmul_ms,
            "wgrad_tflops": result.wgrad_tflops,
            "plain_matmul_tflops": result.plain_tflops,
        },
        "predicted": {
            "linear_flops": shape.linear_flops,
            "model_flops": shape.model_flops,
            "needed_bytes": result.needed_bytes,
            "bytes_32sbh": shape.paper_held_bytes(),
        },
        "verdicts": [asdict(verdict) for verdict in result.verdicts()],
    }


def to_markdown(results: Sequence[ShapeResult], about: dict[str, Any]) -> str:
    """Tables of passes, W vs. plain matmuls, and bytes; then the verdicts."""
    lines = [
        f"Device: {about['device']}, torch {about['torch']}, {about['dtype']} with fp32 main gradients; medians of "
        f"{about['repeats']} rounds, per layer. *measured* unless marked *predicted*.",
        "",
        "| layer | F ms | B ms | W ms | B+W, ours ms | B+W, megatron-core ms | (B + W) / faster full backward |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        p = result.passes
        lines.append(
            f"| {result.shape.name} | {p.forward_ms:.3f} | {p.backward_ms:.3f} | {p.wgrad_ms:.3f} | {p.fused_ms:.3f} "
            f"| {p.stock_ms:.3f} | {p.split_ratio:.3f} |"
        )
    lines += [
        "",
        "| layer | linear | [tokens, out, in] | plain matmul TFLOP/s | kernel of W | TFLOP/s |",
        "|---|---|---|---|---|---|",
    ]
    for result in results:
        for gemm in result.gemms:
            plain = _tflops(gemm.flops, gemm.plain_matmul_ms)
            for name, elapsed in gemm.kernels_ms.items():
                lines.append(
                    f"| {result.shape.name} | {gemm.linear} | [{gemm.tokens}, {gemm.out}, {gemm.in_}] | {plain:.2f} "
                    f"| {name} | {_tflops(gemm.flops, elapsed):.2f} |"
                )
    lines += ["", "| layer | held B to W MiB | needed MiB, *predicted* | 32 sbh MiB, *predicted* |", "|---|---|---|---|"]
    for result in results:
        held, needed, paper = result.passes.held_bytes, result.needed_bytes, result.shape.paper_held_bytes()
        lines.append(f"| {result.shape.name} | {_mib(held)} | {_mib(needed)} | {_mib(paper)} |")
    lines.append("")
    lines += [f"- {result.shape.name}: {verdict.line}" for result in results for verdict in result.verdicts()]
    return "\n".join(lines)


def _tflops(flops: int, elapsed_ms: float) -> float:
    return flops / elapsed_ms / 1e9


def _mib(count: float) -> str:
    return f"{count / 2**20:.2f}"
