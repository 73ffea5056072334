"""Layers estimated from flags are those of the layer files by formula, and divide over tensor-parallel ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.partition.layer_costs import LayerCosts, Model
from megatron.zerobubble.plan.partition.model_estimate import ModelFlags

FILES = Path(__file__).parents[3] / "docs" / "benchmarks" / "data" / "layers"
LLAMA = ModelFlags(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    group_query_attention=True,
    num_query_groups=8,
    swiglu=True,
    seq_length=8192,
    micro_batch_size=1,
    vocab_size=128256,
    bf16=True,
    use_distributed_optimizer=True,
)
GEMMA = replace(LLAMA, num_layers=42, hidden_size=3584, num_attention_heads=16, kv_channels=256, vocab_size=256000)


@pytest.mark.parametrize(("flags", "file"), [(LLAMA, "llama-3-8b"), (GEMMA, "gemma-2-9b")], ids=["llama", "gemma"])
def test_the_layers_of_published_models(flags: ModelFlags, file: str) -> None:
    estimated, expected = flags.model(data_parallel_size=8), Model.from_json((FILES / f"{file}.json").read_text())
    assert estimated.layers == expected.layers
    assert estimated.comm_ms == pytest.approx(expected.comm_ms, rel=2e-3)
    assert estimated.kinds.keys() == expected.kinds.keys()
    for kind, costs in expected.kinds.items():
        assert vars(estimated.kinds[kind]) == pytest.approx(vars(costs), rel=2e-3)


def _layer(**changes: object) -> LayerCosts:
    return replace(LLAMA, **changes).model(8).kinds["layer"]  # type: ignore[arg-type]


def test_what_ranks_share_and_what_is_recomputed() -> None:
    whole, sharded = _layer(), _layer(tensor_model_parallel_size=4, sequence_parallel=True)
    assert vars(sharded) == pytest.approx({name: value / 4 for name, value in vars(whole).items()})
    assert _layer(tensor_model_parallel_size=4).activation_bytes > sharded.activation_bytes
    half = _layer(context_parallel_size=2)
    assert (half.forward_ms, half.static_bytes) == pytest.approx((whole.forward_ms / 2, whole.static_bytes))
    again = _layer(recompute_granularity="full")
    assert again.backward_ms == pytest.approx(whole.backward_ms + whole.forward_ms)
    assert again.activation_bytes == 2 * 8192 * 4096
    assert _layer(use_distributed_optimizer=False).static_bytes == pytest.approx(whole.static_bytes * 18 / 7.5)
    assert _layer(bf16=False).activation_bytes == 2 * whole.activation_bytes


def test_microbatches_by_the_global_batch() -> None:
    assert LLAMA.num_microbatches(2) is None
    assert replace(LLAMA, global_batch_size=64, micro_batch_size=2).num_microbatches(4) == 8
    with pytest.raises(
        ConfigError, match="--global-batch-size 7 does not divide over --micro-batch-size 1 x --data-parallel-size 2"
    ):
        replace(LLAMA, global_batch_size=7).num_microbatches(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "--hidden-size is 0; give 1 or more"),
        ({"tensor_model_parallel_size": 3}, "--num-attention-heads 32 is not divisible by --tensor-model-parallel-size 3"),
    ],
)
def test_sizes_that_no_run_has_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(LLAMA, **changes)  # type: ignore[arg-type]
