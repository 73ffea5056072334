"""Five model shapes with times and bytes by formula, for the layout benchmark.

Sizes are those of the models' published `config.json`. Times are FLOPs over a share of the 989 TFLOP/s that NVIDIA gives for bf16
on an H100 (SXM): 50 % in linear layers, 40 % in the attention core, 35 % in experts' GEMMs, 15 % in Mamba's scan. Per token:

  linear layer      2 FLOPs per weight in each of F, B and W
  attention core    s * heads * (query size + value size) in F (causal, so half of all pairs); 2.5 times that in B; none in W
  Mamba-2's scan    Q*(G*N + d) + 4*N*d in F, with chunks of Q = 256, G groups, state N, inner size d; twice that in B
  embedding         F and W move 3 and 2 rows of the hidden size at 3.35 TB/s; B nothing

Activations in bf16: every linear layer keeps its input, the attention core its inputs and output, an activation function its
inputs, a norm its input; logits 2 + 4 bytes (fp32 for the loss). Between B and W a linear layer keeps its input and its output's
gradient. Weights take 2 bytes, gradients 4 (fp32), the optimizer state 12, divided over the data-parallel ranks. All-to-alls of
experts and the exchanges of context parallelism are not counted: they would have to be hidden behind GEMMs. A message is 2 bytes
per token and hidden value at 50 GB/s (a 400 Gb/s port).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.zerobubble.plan.partition.layer_costs import LayerCosts, Model

__all__ = ["SHAPES", "Shape"]

PEAK_FLOPS, LINK_BYTES_PER_S, MEMORY_BYTES_PER_S = 989e12, 50e9, 3.35e12
LINEAR, ATTENTION, EXPERTS, SCAN = 0.50, 0.40, 0.35, 0.15
CHUNK = 256


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model on a pipeline."""

    title: str
    source: str
    """Where its sizes are published."""
    num_ranks: int
    num_microbatches: int
    model: Model
    note: str
    """Parallel sizes behind the bytes."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One layer in numbers per token: weights of its linear layers, FLOPs of the rest, values that it keeps."""

    weights: float = 0.0
    """Weights that every token goes through, outside experts."""
    expert_weights: float = 0.0
    """Weights of the experts that a token goes through."""
    core_flops: float = 0.0
    """Attention core, F."""
    scan_flops: float = 0.0
    """Mamba's scan, F."""
    kept: float = 0.0
    """Values from F to B."""
    kept_after_backward: float = 0.0
    """Values from B to W."""
    local_expert_weights: float = 0.0
    """Expert weights on the rank."""

    def __add__(self, other: _Part) -> _Part:
        return _Part(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def costs(self, tokens: int, data_parallel: int, expert_data_parallel: int = 1) -> LayerCosts:
        """Milliseconds and bytes for one microbatch."""
        gemm = 2 * self.weights / LINEAR + 2 * self.expert_weights / EXPERTS
        rest = (
            self.core_flops / ATTENTION + self.scan_flops / SCAN,
            2.5 * self.core_flops / ATTENTION + 2 * self.scan_flops / SCAN,
        )
        ms = 1e3 * tokens / PEAK_FLOPS
        return LayerCosts(
            forward_ms=round(ms * (gemm + rest[0]), 4),
            backward_ms=round(ms * (gemm + rest[1]), 4),
            wgrad_ms=round(ms * gemm, 4),
            activation_bytes=round(2 * tokens * self.kept),
            after_backward_bytes=round(2 * tokens * self.kept_after_backward),
            static_bytes=round(
                self.weights * (6 + 12 / data_parallel) + self.local_expert_weights * (6 + 12 / expert_data_parallel)
            ),
        )


def _linear(inputs: float, outputs: float) -> _Part:
    return _Part(weights=inputs * outputs, kept=inputs, kept_after_backward=inputs + outputs)


def _attention(hidden: int, heads: int, groups: int, size: int, sequence: int) -> _Part:
    """Grouped-query attention."""
    query, key = heads * size, groups * size
    core = _Part(core_flops=2 * sequence * query, kept=query + 2 * key)
    return _linear(hidden, query + 2 * key) + core + _linear(query, hidden)


def _latent_attention(hidden: int, heads: int, sequence: int) -> _Part:
    """Multi-latent attention of DeepSeek-V3: ranks 1,536 and 512, sizes 128 + 64 of queries and keys, 128 of values."""
    query, value = heads * 192, heads * 128
    down = _linear(hidden, 1536 + 512 + 64)
    up = _linear(1536, query) + _linear(512, heads * (128 + 128))
    core = _Part(core_flops=sequence * heads * (192 + 128), kept=2 * query + value)
    return down + up + core + _linear(value, hidden)


def _mlp(hidden: int, inner: int, *, gated: bool = True) -> _Part:
    """Two or three linear layers, without a norm."""
    width = 2 * inner if gated else inner
    return _Part(kept=width) + _linear(hidden, width) + _linear(inner, hidden)


def _norm(hidden: int) -> _Part:
    return _Part(kept=hidden)


def _experts(hidden: int, inner: int, *, chosen: int, shared: int, number: int, expert_parallel: int) -> _Part:
    """Gated experts: `chosen` per token and `shared` ones."""
    one = _mlp(hidden, inner)
    common = _linear(hidden, number)
    for _ in range(shared):
        common += one
    return common + _Part(
        expert_weights=chosen * one.weights,
        kept=chosen * one.kept,
        kept_after_backward=chosen * one.kept_after_backward,
        local_expert_weights=number // expert_parallel * one.weights,
    )


def _mamba(hidden: int, heads: int, size: int, groups: int, state: int) -> _Part:
    """Mamba-2."""
    inner = heads * size
    widths = 2 * inner + 2 * groups * state + heads
    scan = _Part(scan_flops=CHUNK * (groups * state + inner) + 4 * state * inner, kept=2 * inner + 2 * groups * state)
    return _linear(hidden, widths) + scan + _linear(inner, hidden)


def _ends(hidden: int, vocabulary: int, tokens: int, data_parallel: int) -> dict[str, LayerCosts]:
    """Embedding and head (final norm, output layer, loss), each with a weight of its own."""
    row_ms = 1e3 * tokens * hidden * 2 / MEMORY_BYTES_PER_S
    static = round(hidden * vocabulary * (6 + 12 / data_parallel))
    head = _Part(weights=hidden * vocabulary, kept=2 * hidden + 3 * vocabulary, kept_after_backward=hidden + vocabulary)
    return {
        "embedding": LayerCosts(forward_ms=round(3 * row_ms, 4), wgrad_ms=round(2 * row_ms, 4), static_bytes=static),
        "head": head.costs(tokens, data_parallel),
    }


def _message_ms(hidden: int, tokens: int) -> float:
    return round(1e3 * 2 * hidden * tokens / LINK_BYTES_PER_S, 3)


def _dense(hidden: int, inner: int, heads: int, groups: int, size: int, layers: int, vocabulary: int) -> Model:
    """A dense GPT with 8,192 tokens per microbatch on 8 data-parallel replicas."""
    tokens, replicas = 8192, 8
    layer = _norm(2 * hidden) + _attention(hidden, heads, groups, size, tokens) + _mlp(hidden, inner)
    return Model(
        layers=("layer",) * layers,
        kinds={"layer": layer.costs(tokens, replicas), **_ends(hidden, vocabulary, tokens, replicas)},
        comm_ms=_message_ms(hidden, tokens),
    )


def _moe(*, heads: int, dense_layers: int, number: int, context_parallel: int, vocabulary: int, mtp: int) -> Model:
    """DeepSeek-V3's sizes: sequences of 4,096 tokens over context-parallel ranks, and experts over 64 ranks."""
    expert_parallel, sequence, hidden = 64, 4096, 7168
    tokens = sequence // context_parallel
    attention = _norm(2 * hidden) + _latent_attention(hidden, heads, sequence)
    dense = attention + _mlp(hidden, 18432)
    moe = attention + _experts(hidden, 2048, chosen=8, shared=1, number=number, expert_parallel=expert_parallel)
    ends = _ends(hidden, vocabulary, tokens, expert_parallel)
    kinds = {"dense": dense.costs(tokens, expert_parallel), "moe_layer": moe.costs(tokens, expert_parallel), **ends}
    if mtp:  # each a layer, a projection of 2h to h, and the output layer once more, whose weight is shared
        once = moe + _linear(2 * hidden, hidden)
        head = ends["head"]
        shared = LayerCosts(**{**vars(head), "static_bytes": 0.0})
        kinds["mtp"] = LayerCosts.total([once.costs(tokens, expert_parallel), shared])
    return Model(
        layers=("dense",) * dense_layers + ("moe_layer",) * (61 - dense_layers),
        kinds=kinds,
        num_mtp_layers=mtp,
        comm_ms=_message_ms(hidden, tokens),
    )


NEMOTRON_H = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def _hybrid() -> Model:
    """Nemotron-H-8B's sizes with 8,192 tokens per microbatch on 8 data-parallel replicas."""
    tokens, hidden, replicas = 8192, 4096, 8
    parts = {
        "mamba": _norm(hidden) + _mamba(hidden, 128, 64, 8, 128),
        "attention": _norm(hidden) + _attention(hidden, 32, 8, 128, tokens),
        "mlp": _norm(hidden) + _mlp(hidden, 21504, gated=False),
    }
    names = {"M": "mamba", "*": "attention", "-": "mlp"}
    return Model(
        layers=tuple(names[letter] for letter in NEMOTRON_H),
        kinds={name: part.costs(tokens, replicas) for name, part in parts.items()} | _ends(hidden, 131072, tokens, replicas),
        comm_ms=_message_ms(hidden, tokens),
    )


_CONFIG = "https://huggingface.co/{}/blob/main/config.json"
_REPLICAS = "8,192 tokens per microbatch, 8 data-parallel replicas with a distributed optimizer"
_EXPERTS = "4,096 tokens per microbatch over {} context-parallel ranks, experts over 64 ranks, optimizer state over the same 64"

SHAPES = {
    "llama-3-8b": Shape(
        title="Llama-3-8B",
        source=_CONFIG.format("meta-llama/Meta-Llama-3-8B"),
        num_ranks=8,
        num_microbatches=32,
        model=_dense(4096, 14336, 32, 8, 128, 32, 128256),
        note=_REPLICAS,
    ),
    "gemma-2-9b": Shape(
        title="Gemma-2-9B, a vocabulary of 256k",
        source=_CONFIG.format("google/gemma-2-9b"),
        num_ranks=8,
        num_microbatches=32,
        model=_dense(3584, 14336, 16, 8, 256, 42, 256000),
        note=f"{_REPLICAS}; full attention in every layer, embedding and head not tied",
    ),
    "deepseek-v3": Shape(
        title="DeepSeek-V3, 3 dense and 58 MoE layers, MTP",
        source=_CONFIG.format("deepseek-ai/DeepSeek-V3"),
        num_ranks=8,
        num_microbatches=32,
        model=_moe(heads=128, dense_layers=3, number=256, context_parallel=8, vocabulary=129280, mtp=1),
        note=_EXPERTS.format(8),
    ),
    "nemotron-h-8b": Shape(
        title="Nemotron-H-8B, 24 Mamba, 4 attention, 24 MLP",
        source=_CONFIG.format("nvidia/Nemotron-H-8B-Base-8K"),
        num_ranks=8,
        num_microbatches=32,
        model=_hybrid(),
        note=_REPLICAS,
    ),
    "kimi-k2": Shape(
        title="Kimi-K2, 61 layers, 60 of them MoE",
        source=_CONFIG.format("moonshotai/Kimi-K2-Base"),
        num_ranks=16,
        num_microbatches=64,
        model=_moe(heads=64, dense_layers=1, number=384, context_parallel=4, vocabulary=163840, mtp=0),
        note=_EXPERTS.format(4),
    ),
}
"""Name -> shape."""
