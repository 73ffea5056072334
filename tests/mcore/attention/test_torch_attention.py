"""torch's attention against megatron-core's own, forward and backward: shapes, masks, packed sequences, dropout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.attention import attention_kernels
from megatron.zerobubble.mcore.attention.torch_attention import TorchDotProductAttention, use_torch_attention
from megatron.zerobubble.profiling.activation_memory import MemoryMeter
from megatron.zerobubble.training.models.layer_specs import local_layer
from tests.support.alone import alone
from tests.support.tolerances import OTHER_ORDER

CAUSAL, ARBITRARY = AttnMaskType.causal, AttnMaskType.arbitrary
HEADS, HEAD_SIZE = 4, 8


@pytest.fixture(autouse=True, scope="module")
def _world() -> Iterator[None]:
    with alone():
        yield


def _config(**changes: Any) -> TransformerConfig:
    given: dict[str, Any] = {"num_layers": 2, "hidden_size": HEADS * HEAD_SIZE, "num_attention_heads": HEADS}
    return TransformerConfig(**given | {"attention_dropout": 0.0, "attention_softmax_in_fp32": True} | changes)


def _pair(mask_type: AttnMaskType = CAUSAL, layer_number: int = 1, **changes: Any) -> tuple[Any, Any]:
    """(torch's attention, megatron-core's own)"""
    config = _config(**changes)
    return tuple(kind(config, layer_number, mask_type, "self") for kind in (TorchDotProductAttention, DotProductAttention))


def _inputs(*, length: int = 12, batch: int = 2, groups: int = HEADS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries, keys and values, [s, b, heads, head size]."""
    generator = torch.Generator().manual_seed(length)
    shapes = ((length, batch, heads, HEAD_SIZE) for heads in (HEADS, groups, groups))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def _results(module: Any, inputs: list[Tensor], *args: Any, **kwargs: Any) -> list[Tensor]:
    """The output, and the gradients of the inputs for one gradient of the output."""
    output = module(*inputs, *args, **kwargs)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(7)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def _assert_equal(found: list[Tensor], expected: list[Tensor], tolerance: float = OTHER_ORDER) -> None:
    """The largest difference, relative to the largest value, of the output and of every gradient."""
    for name, each, other in zip(("output", "query", "key", "value"), found, expected, strict=True):
        assert each.shape == other.shape, name
        assert (each - other).abs().max() <= tolerance * max(1.0, float(other.abs().max())), name


# -- shapes and masks ---------------------------------------------------------------------------------------------------


CAUSAL_TYPES = (CAUSAL, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)


@pytest.mark.claims(
    "Layers",
    "torch's attention in place of megatron-core's own: causal, GQA, any boolean mask, padding, packed sequences "
    "(`cu_seqlens`), dropout, scales, bf16; output and gradients",
    "works, 4e-6 (fp32) of megatron-core's own; dropout draws the same mask",
)
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("mask_type", AttnMaskType, ids=lambda each: each.name)
@settings(deadline=None, derandomize=True, database=None, max_examples=15)
@given(data=st.data())
def test_keys_are_seen_as_by_megatron_cores_own_under_one_mask_of_all_that_hides_them(
    mask_type: AttnMaskType, has_mask: bool, data: st.DataObject
) -> None:
    batch, groups, keys = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([4, 2, 1])), data.draw(st.integers(1, 14))
    layer_number, scale = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(["by size", "by layer", "given"]))
    queries = data.draw(st.sampled_from([1, keys]) if mask_type in CAUSAL_TYPES[:2] else st.integers(1, keys))
    changes = {"num_query_groups": groups, "apply_query_key_layer_scaling": scale == "by layer"}
    at_call = {"attn_mask_type": mask_type} if data.draw(st.booleans()) else {}
    made_for = AttnMaskType.no_mask if at_call else mask_type
    ours, _ = _pair(made_for, layer_number, **changes)
    _, own = _pair(ARBITRARY, layer_number, **changes)
    if scale == "given":  # attention layers pass it on
        ours.softmax_scale = own.softmax_scale = 0.3
    ones = torch.ones(queries, keys, dtype=torch.bool)
    own_key = ones.triu(keys - queries) & ones.tril(keys - queries)
    mask = (torch.rand(batch, 1, queries, keys, generator=torch.Generator().manual_seed(3)) < 0.4) & ~own_key
    hidden = mask if has_mask else torch.zeros_like(mask)
    is_causal = mask_type in CAUSAL_TYPES and not (mask_type is CAUSAL and has_mask)
    if is_causal and queries > 1:  # a single one sees all keys
        hidden = hidden | ones.triu(keys - queries + 1)
    inputs = _inputs(length=keys, batch=batch, groups=groups)
    inputs[0] = inputs[0][keys - queries :].detach().requires_grad_()
    _assert_equal(_results(ours, inputs, mask if has_mask else None, **at_call), _results(own, inputs, hidden))


def test_the_numbers_of_a_mask_follow_the_mask() -> None:
    ours, own = _pair(ARBITRARY)
    inputs, mask = _inputs(), torch.ones(1, 1, 12, 12).triu(1).bool()
    first = _results(ours, inputs, mask)
    _assert_equal(first, _results(own, inputs, mask))
    mask[..., 3:] = True
    second = _results(ours, inputs, mask)
    _assert_equal(second, _results(own, inputs, mask))
    assert not torch.equal(first[0], second[0])
    halves = [each.detach().bfloat16().requires_grad_() for each in inputs]
    assert _results(ours, halves, mask)[0].dtype is torch.bfloat16


def test_a_query_that_sees_no_key_gets_zeros() -> None:
    ours, _ = _pair(AttnMaskType.padding)
    mask = torch.zeros(2, 1, 12, 12, dtype=torch.bool)
    mask[1, :, 5:] = True
    output, *gradients = _results(ours, _inputs(), mask)
    assert not output[5:, 1].any()
    assert output[5:, 0].all()
    assert all(each.isfinite().all() for each in gradients)


def test_a_causal_mask_of_more_keys_than_queries_is_refused() -> None:
    query, *others = _inputs()
    with pytest.raises(ConfigError, match="as many keys as queries, not 12 and 5"):
        _pair()[0](query[-5:], *others, None)


@pytest.mark.parametrize("groups", [4, 2])
def test_bf16_within_its_rounding(groups: int) -> None:
    ours, own = _pair(bf16=True, params_dtype=torch.bfloat16, num_query_groups=groups)
    inputs = _inputs(length=64, groups=groups, dtype=torch.bfloat16)
    exact = _results(_pair(num_query_groups=groups)[1], [each.detach().float().requires_grad_() for each in inputs], None)
    found, stock = (_results(each, inputs, None) for each in (ours, own))
    for mine, theirs, true in zip(found, stock, exact, strict=True):
        error, allowed = ((each.float() - true).abs().max() for each in (mine, theirs))
        assert error <= 2 * allowed, "no further from fp32 than megatron-core's own, but for chance"


# -- packed sequences ---------------------------------------------------------------------------------------------------


def _packed(lengths: list[int], **others: Any) -> PackedSeqParams:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(qkv_format="thd", **{"cu_seqlens_q": ends, "cu_seqlens_kv": ends} | others)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("lengths", [[12], [5, 1, 6], [0, 4, 8]], ids=str)
def test_packed_sequences_attend_to_themselves(lengths: list[int], groups: int) -> None:
    ours, own = _pair(AttnMaskType.padding_causal, num_query_groups=groups)
    inputs = [each.detach().squeeze(1).requires_grad_() for each in _inputs(batch=1, groups=groups)]
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (numbers[:, None] != numbers[None]) | torch.ones(12, 12).triu(1).bool()
    found = _results(ours, inputs, None, packed_seq_params=_packed(lengths))
    expected = _results(lambda *each: own(*(part.unsqueeze(1) for part in each), mask[None, None]).squeeze(1), inputs)
    _assert_equal(found, expected)


def test_packed_sequences_without_gaps_are_described() -> None:
    ours, _ = _pair()
    packed = [each.detach().squeeze(1) for each in _inputs(batch=1)]
    with pytest.raises(ConfigError, match="need cu_seqlens_q"):
        ours(*packed, None, packed_seq_params=PackedSeqParams(qkv_format="thd"))
    with pytest.raises(ConfigError, match="with padding in between, or with other keys than queries"):
        ours(*packed, None, packed_seq_params=_packed([3, 4], cu_seqlens_q_padded=torch.tensor([0, 5, 11])))


# -- dropout ------------------------------------------------------------------------------------------------------------


def test_dropout_draws_what_megatron_core_draws() -> None:
    """On the CPU both draw the mask of [b, n, s, s] by torch's dropout: the same state gives the same weights."""
    ours, own = _pair(attention_dropout=0.4)
    tracker, inputs = get_cuda_rng_tracker(), _inputs()
    state = tracker.get_states()
    found = _results(ours, inputs, None)
    after = {name: each.clone() for name, each in tracker.get_states().items()}
    tracker.set_states(dict(state))
    _assert_equal(found, _results(own, inputs, None))
    assert all(torch.equal(each, after[name]) for name, each in tracker.get_states().items())
    again = _results(ours, inputs, None)
    assert not torch.equal(found[0], again[0]), "the state moves on"
    ours.eval()
    _assert_equal(_results(ours, inputs, None), _results(_pair()[1], inputs, None))


def test_dropout_does_not_move_the_default_state() -> None:
    ours, _ = _pair(attention_dropout=0.4)
    before = torch.get_rng_state()
    ours(*_inputs(), None)
    assert torch.equal(before, torch.get_rng_state())
    ours.config.sequence_parallel = True  # the caller has entered the tracker's state
    ours(*_inputs(), None)
    assert not torch.equal(before, torch.get_rng_state())


# -- memory -------------------------------------------------------------------------------------------------------------


def test_values_that_are_part_of_a_projection_do_not_keep_it() -> None:
    module = TorchDotProductAttention(_config(), 1, CAUSAL, "self")
    with MemoryMeter(torch.device("cpu")) as meter:
        query, key, projected = (torch.randn(32, 2, 4, size, requires_grad=True) for size in (8, 8, 24))
        before = meter.held_bytes
        whole = projected * 1.0
        output = module(query, key, whole[..., 16:], None)
        del whole
        held = meter.held_bytes - before - output.nbytes
    assert query.nbytes <= held < 2 * query.nbytes, "the values, and a number per query"


def _kept_bytes(module: Any, inputs: list[Tensor], mask: Tensor | None) -> int:
    """Bytes of the storages that the backward pass keeps, without those of the inputs."""
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(*inputs, mask)
    return sum(size for place, size in storages.items() if place not in {each.data_ptr() for each in inputs})


def test_the_scores_are_not_kept() -> None:
    ours, own = _pair()
    length, batch = 256, 2
    inputs = _inputs(length=length, batch=batch)
    scores = 4 * batch * HEADS * length**2
    output = 4 * batch * length * HEADS * HEAD_SIZE
    assert _kept_bytes(own, inputs, None) >= scores
    assert _kept_bytes(ours, inputs, None) == output + 4 * batch * HEADS * length, "the output and one number per query"


def test_layers_share_the_numbers_of_a_mask() -> None:
    ours, _ = _pair()
    length = 64
    inputs, mask = _inputs(length=length, batch=1), torch.ones(1, 1, length, length).triu(1).bool()

    class Twice:
        def __call__(self, *given: Any) -> Tensor:
            first: Tensor = ours(*given)
            second: Tensor = ours(*given)
            return first + second

    once, twice = _kept_bytes(ours, inputs, mask), _kept_bytes(Twice(), inputs, mask)
    assert twice - once == once - 4 * length**2


# -- what torch's kernels can do, and what is refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "kernel"),
    [
        (AttnBackend.flash, "ScaledDotProductFlashAttentionForCpu"),
        (AttnBackend.unfused, "UnsafeView"),
        (AttnBackend.auto, "ScaledDotProductFlashAttentionForCpu"),
    ],
    ids=str,
)
def test_the_backend_chooses_the_kernel(backend: AttnBackend, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, own = _pair(attention_backend=backend)
    names = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = original(*args, **kwargs)
        names.append(type(result.grad_fn).__name__)
        return result

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    _assert_equal(_results(ours, _inputs(), None), _results(own, _inputs(), None))
    assert [name.startswith(kernel) for name in names] == [True]


@pytest.mark.filterwarnings("ignore")  # torch says why
def test_a_backend_that_has_no_kernel_here() -> None:
    fused, _ = _pair(attention_backend=AttnBackend.fused)
    with pytest.raises(ConfigError, match=r"--attention-backend fused has no kernel .* on cpu: torch.float32.*choose auto"):
        fused(*_inputs(), None)
    flash, _ = _pair(attention_backend=AttnBackend.flash, attention_dropout=0.1)
    with pytest.raises(ConfigError, match=r"flash has no kernel .* dropout 0.1"):
        flash(*_inputs(), None)
    ours, _ = _pair()
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match="Expected size"):
        ours(*(each[: 3 + place] for place, each in enumerate(_inputs())), None, AttnMaskType.no_mask)


@pytest.mark.parametrize(
    ("changes", "knows"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"head_size": 512}, False),
        ({"has_mask": True}, False),
        ({"backend": AttnBackend.fused}, False),
        ({"backend": AttnBackend.unfused, "has_mask": True}, True),
        ({"device_type": "cpu", "dtype": torch.float32, "has_mask": True}, True),
    ],
    ids=str,
)
def test_where_a_gpus_kernels_take_fewer_heads_of_keys(changes: dict[str, Any], knows: bool) -> None:
    """By torch's documentation: on CUDA flash attention and the plain operations. No GPU was asked."""
    usual = {"device_type": "cuda", "dtype": torch.bfloat16, "head_size": 128, "has_mask": False, "backend": AttnBackend.auto}
    given: dict[str, Any] = usual | changes
    assert attention_kernels._knows_groups(given.pop("device_type"), given.pop("dtype"), given.pop("head_size"), **given) is knows


@pytest.mark.parametrize("groups", [2, 1])
def test_where_no_kernel_takes_fewer_heads_of_keys_they_are_repeated(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, own = _pair(num_query_groups=groups)
    heads = []
    original = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        heads.append((key.size(1), value.size(1), "enable_gqa" in options))
        result: Tensor = original(query, key, value, **options)
        return result

    monkeypatch.setattr(attention_kernels, "_knows_groups", lambda *_, **__: False)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    inputs = _inputs(groups=groups)
    _assert_equal(_results(ours, inputs, None), _results(own, inputs, None))
    assert heads == [(HEADS, HEADS, False)]


@pytest.mark.claims(
    "Layers",
    "softmax offsets, `qk_clip`, an attention bias, windows, padding between packed sequences, context parallelism with torch's "
    "attention; multi-latent attention in local layers",
    "rejected",
)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softmax_type": "off-by-one"}, "softmax_type off-by-one is not supported"),
        ({"softmax_type": "learnable"}, "softmax_type learnable is not supported"),
        ({"attention_backend": AttnBackend.local}, "attention_backend local is megatron-core's own"),
        ({"qk_clip": True}, "the largest score"),
        ({"window_size": (7, 0)}, r"window_size \(7, 0\) is not supported by torch's attention: choose attention_backend local"),
        (
            {"context_parallel_size": 2},
            "needs whole sequences, and context_parallel_size is 2: choose Transformer Engine's layers",
        ),
    ],
    ids=str,
)
def test_an_option_without_a_kernel_of_torch_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchDotProductAttention(_config(**changes), 1, CAUSAL, "self")


def test_a_bias_or_a_float_mask_in_a_call_is_refused() -> None:
    ours, _ = _pair()
    with pytest.raises(ConfigError, match="bias is not supported"):
        ours(*_inputs(), None, attention_bias=torch.zeros(1, 1, 12, 12))
    with pytest.raises(ConfigError, match=r"an attention mask of torch.float32"):
        ours(*_inputs(), torch.zeros(1, 1, 12, 12))


# -- choosing it --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "expected"), [("auto", TorchDotProductAttention), ("local", DotProductAttention)])
def test_the_attention_backend_chooses_the_attention_of_a_local_layer(backend: str, expected: type) -> None:
    layer = local_layer(_config(attention_backend=AttnBackend[backend]), has_experts=False)
    assert layer.submodules.self_attention.submodules.core_attention is expected


def test_multi_latent_attention_of_local_layers_is_refused() -> None:
    """megatron-core's own spec ends in a TypeError of its attention."""
    config = MLATransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, transformer_impl="local")
    with pytest.raises(ConfigError, match="multi-latent attention needs Transformer Engine's layers"):
        local_layer(config, has_experts=False)


def test_the_modules_of_a_built_model_are_replaced() -> None:
    model = torch.nn.ModuleList()
    for number in (1, 2):
        layer = torch.nn.Module()
        config = _config(apply_query_key_layer_scaling=True, attention_dropout=0.3)
        layer.core_attention = DotProductAttention(config, number, CAUSAL, "self", softmax_scale=0.5)
        layer.other = torch.nn.Linear(2, 2)
        model.append(layer)
    model.eval()
    own = [_results(layer.core_attention, _inputs(), None) for layer in model]
    assert use_torch_attention(model) == 2
    for layer, expected in zip(model, own, strict=True):
        assert isinstance(layer.core_attention, TorchDotProductAttention)
        assert layer.core_attention.dropout_probability == 0.3
        _assert_equal(_results(layer.core_attention, _inputs(), None), expected)
    assert use_torch_attention(model) == 0


def test_a_model_that_cannot_have_it_stays_as_it_was() -> None:
    model = torch.nn.Module()
    model.first = DotProductAttention(_config(), 1, CAUSAL, "self")
    model.second = DotProductAttention(_config(softmax_type="off-by-one"), 2, CAUSAL, "self")
    before = dict(model.named_modules())
    with pytest.raises(ConfigError, match="off-by-one"):
        use_torch_attention(model)
    assert dict(model.named_modules()) == before


def test_a_subclass_keeps_its_own_attention() -> None:
    class Special(DotProductAttention):
        """A loop's own."""

    holder = torch.nn.Module()
    holder.core_attention = Special(_config(), 1, CAUSAL, "self")
    assert use_torch_attention(holder) == 0
    assert type(holder.core_attention) is Special
