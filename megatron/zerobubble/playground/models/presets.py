"""What the page offers besides its own fields: published times, models by their sizes, models by their layers, and GPUs.

Data only; a test holds it to `docs/benchmarks/data`. Sizes are those of the models' published `config.json`.
"""

from __future__ import annotations

from typing import Any

from megatron.zerobubble.plan.partition.layer_costs import LETTERS, LayerCosts, Model

PUBLISHED: dict[str, dict[str, float]] = {
    name: dict(zip(("p", "m", "f", "b", "w", "c", "a"), values, strict=True))
    for name, values in {
        "1.5B": (8, 24, 18.522, 18.086, 9.337, 0.601, 0.3664),
        "6.2B": (8, 24, 29.718, 29.444, 19.927, 0.527, 0.4324),
        "14.6B": (16, 48, 11.347, 11.248, 8.132, 0.377, 0.4324),
        "28.3B": (32, 96, 10.419, 10.207, 7.715, 0.408, 0.4324),
    }.items()
}
"""Model -> ranks, microbatches, profiled times per rank, P2P latency and M_W / M_B of arXiv 2401.10241, Table 9."""

GPUS: dict[str, tuple[float, float, float]] = {
    "A100 80GB": (312, 2.04, 79),
    "H100": (989, 3.35, 79),
    "H200": (989, 4.8, 140),
    "B200": (2250, 8.0, 179),
}
"""GPU (SXM) -> peak in TFLOP/s of dense bf16, memory bandwidth in TB/s, memory in GiB."""

_LLAMA = {"swiglu": 1, "num_query_groups": 8, "vocab_size": 128256, "seq_length": 8192, "data_parallel_size": 8}
_8B = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336}
_70B = {
    "num_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "ffn_hidden_size": 28672,
    "tensor_model_parallel_size": 8,
}
_GEMMA = {"num_layers": 42, "hidden_size": 3584, "num_attention_heads": 16, "kv_channels": 256, "ffn_hidden_size": 14336}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {"p": 8, "m": 32, "model": _LLAMA | _8B},
    "Llama-3-70B": {"p": 8, "m": 32, "model": _LLAMA | _70B},
    "Gemma-2-9B": {"p": 8, "m": 32, "model": _LLAMA | _GEMMA | {"vocab_size": 256000}},
}
"""Model -> ranks, microbatches, and the sizes that differ from the defaults of `model_problem.FIELDS`."""

_HYBRID = {letter: kind for kind, letter in LETTERS.items()}
_LAYERS: dict[str, tuple[int, int, float, int, tuple[str, ...], dict[str, tuple[float, ...]]]] = {
    "DeepSeek-V3": (
        8,
        32,
        0.147,
        1,
        ("dense",) * 3 + ("moe_layer",) * 58,
        {
            "dense": (1.4254, 1.7511, 1.2082, 171966464, 165740544, 3610202112),
            "moe_layer": (1.7418, 2.0676, 1.5247, 238026752, 290783232, 4612460544),
            "embedding": (0.0066, 0, 0.0044, 0, 0, 5733826560),
            "head": (1.9189, 1.9189, 1.9189, 411828224, 139722752, 5733826560),
            "mtp": (3.8735, 4.1992, 3.6564, 664535040, 452526080, 5248290816),
        },
    ),
    "Kimi-K2": (
        16,
        64,
        0.294,
        0,
        ("dense",) + ("moe_layer",) * 60,
        {
            "dense": (2.2775, 2.6032, 2.0604, 260046848, 255983616, 3078180864),
            "moe_layer": (2.9142, 3.24, 2.6971, 392167424, 506331136, 5671563264),
            "embedding": (0.0131, 0, 0.0088, 0, 0, 7266631680),
            "head": (4.8639, 4.8639, 4.8639, 1035993088, 350224384, 7266631680),
        },
    ),
    "Nemotron-H-8B": (
        8,
        32,
        1.342,
        0,
        tuple(_HYBRID[letter] for letter in "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"),
        {
            "mamba": (3.9924, 4.3543, 3.6305, 570425344, 572522496, 821821440),
            "attention": (2.7794, 4.8639, 1.3897, 301989888, 301989888, 314572800),
            "mlp": (5.8366, 5.8366, 5.8366, 838860800, 838860800, 1321205760),
            "embedding": (0.0601, 0, 0.0401, 0, 0, 4026531840),
            "head": (17.7879, 17.7879, 17.7879, 6576668672, 2214592512, 4026531840),
        },
    ),
}
"""Models that the sizes of a GPT do not describe -> ranks, microbatches, P2P latency, MTP layers, layers, and their costs, which
are estimated for an H100 as `docs/benchmarks/layouts.md` says."""

LAYERED: dict[str, tuple[int, int]] = {name: (p, m) for name, (p, m, *_) in _LAYERS.items()}
"""Model -> ranks and microbatches."""


def layered(name: str) -> Model:
    """One of `LAYERED`."""
    _, _, comm_ms, num_mtp_layers, layers, kinds = _LAYERS[name]
    costs = {kind: LayerCosts.of(*values) for kind, values in kinds.items()}
    return Model(layers=layers, kinds=costs, num_mtp_layers=num_mtp_layers, comm_ms=comm_ms)
