"""The parts of slices by themselves: cut batches, losses put together, keys and values with their gradients, positions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn

from megatron.zerobubble.errors import ConfigError, ExecutionError
from megatron.zerobubble.mcore.attention.attention_masks import hidden_lower_right, mask_options
from megatron.zerobubble.mcore.attention.torch_attention import TorchDotProductAttention
from megatron.zerobubble.mcore.slices.batches import SlicedBatches
from megatron.zerobubble.mcore.slices.current_slice import CurrentSlice, SlicePart
from megatron.zerobubble.mcore.slices.prefix_attention import attend_to_prefix
from megatron.zerobubble.mcore.slices.refusals import check_sliced_config
from megatron.zerobubble.mcore.slices.slice_options import SliceOptions
from megatron.zerobubble.mcore.stock_loop.megatron_lm import cut_megatron_lm_batch, sliced_batches
from megatron.zerobubble.plan.costs.length_model import Work
from megatron.zerobubble.plan.costs.slicing import TILE, CutRule, check_slice_lengths

PARTS = SliceOptions(lengths=(3, 5)).parts(8, 2)
FIRST, LAST = PARTS
EVEN = CutRule(multiple=2, tile=TILE)
TOKENS = torch.arange(16).view(2, 8)


def test_lengths_of_slices() -> None:
    assert [(part.offset, part.length, part.end, part.is_last) for part in PARTS] == [(0, 3, 3, False), (3, 5, 8, True)]
    assert [part.length for part in SliceOptions(lengths=(3, 5), rule=EVEN).parts(12, 2)] == [6, 6], (
        "they are for other sequences"
    )
    assert [part.length for part in SliceOptions(rule=EVEN).parts(24, 4)] == [6, 6, 6, 6]
    half = SliceOptions(rule=CutRule(work=Work(per_token=4096.0, per_square=1.0), multiple=2, tile=TILE))
    assert [part.length for part in half.parts(4096, 4)] == [1536, 1024, 768, 768], "of equal work, in whole tiles"
    with pytest.raises(ConfigError, match="12 tokens has 6 parts of 2 tokens, which is too few for 8 slices"):
        SliceOptions(rule=EVEN).parts(12, 8)
    with pytest.raises(ConfigError, match="make 8, and a sequence has 9"):
        check_slice_lengths((3, 5), 9)
    with pytest.raises(ConfigError, match="5 is not a positive multiple of 2"):
        check_slice_lengths((4, 5), 9, multiple=2)


def test_a_microbatch_is_read_once() -> None:
    slices, read = CurrentSlice(), []

    def source() -> Iterator[Tensor]:
        for number in itertools.count():
            read.append(number)
            yield TOKENS + 100 * number

    batches = SlicedBatches(source(), slices)
    for microbatch in range(2):
        for part in PARTS:
            with slices.running(0, microbatch, part):
                first, second = next(batches), next(batches)
                assert torch.equal(first, TOKENS[:, part.offset : part.end] + 200 * microbatch)
                assert torch.equal(second, first + 100)
                assert slices.batch is second
    assert read == [0, 1, 2, 3]
    with pytest.raises(ExecutionError, match="outside of a forward pass"):
        next(batches)
    with slices.running(0, 2, LAST):
        next(batches), next(batches)
        with pytest.raises(ExecutionError, match="reads 3 batches in slice 1 and 2 in slice 0"):
            next(batches)


def test_keys_and_values_are_kept_once_and_their_gradients_added_backwards() -> None:
    slices, attention = CurrentSlice(), nn.Identity()
    keys = torch.randn(8, 1, 2, 4), torch.randn(8, 1, 2, 3)
    own = {part: tuple(each[part.offset : part.end] for each in keys) for part in PARTS}
    views = {}
    for part in PARTS:
        with slices.running(0, 7, part):
            views[part] = slices.keys(attention, *own[part]).append(part, *own[part])
    for part in PARTS:
        assert all(torch.equal(view, each[: part.end]) for view, each in zip(views[part], keys, strict=True))
    storages = {view.untyped_storage().data_ptr() for pair in views.values() for view in pair}
    assert len(storages) == 1
    gradients = {part: tuple(torch.randn_like(each[: part.end]) for each in keys) for part in PARTS}
    whole = [each.clone() for each in gradients[LAST]]
    for part in reversed(PARTS):
        with slices.running(0, 7, part):
            found = slices.keys(attention, *own[part]).add_gradients(part, *gradients[part])
            if part is FIRST:
                for total, gradient in zip(whole, gradients[FIRST], strict=True):
                    total[:3] += gradient
            assert all(torch.equal(each, total[part.offset : part.end]) for each, total in zip(found, whole, strict=True))
    slices.release(0, 7)
    assert slices.key_bytes == {0: 4 * 8 * 2 * (4 + 3)}
    with slices.running(0, 7, LAST), pytest.raises(ExecutionError, match="did not run the slices before"):
        slices.keys(attention, *own[LAST])


@pytest.mark.parametrize("groups", [4, 2])
def test_slices_keep_no_more_than_whole_sequences(groups: int) -> None:
    """But for one mask that all slices, layers and microbatches share, and which is made once."""
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, attention_dropout=0.0)
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(64, 2, heads, 16, generator=generator) for heads in (4, groups, groups)]
    kept, outputs, gradients = {}, {}, {}
    for num_slices in (1, 4):
        attention, slices = TorchDotProductAttention(config, 1, AttnMaskType.causal, "self"), CurrentSlice()
        attend_to_prefix(attention, slices)
        saved: dict[int, Tensor] = {}
        pairs = []
        parts = SliceOptions().parts(64, num_slices)
        with torch.autograd.graph.saved_tensors_hooks(lambda each, saved=saved: _note(saved, each), lambda each: each):
            for part in parts:
                own = [each[part.offset : part.end].clone().requires_grad_() for each in whole]
                with slices.running(0, 0, part) if num_slices > 1 else nullcontext():
                    pairs.append((own, attention(*own, None)))
        kept[num_slices] = sum(each.untyped_storage().nbytes() for each in saved.values() if each.dim() != 2)
        for _, output in reversed(pairs):
            output.square().sum().backward()
        outputs[num_slices] = torch.cat([output for _, output in pairs])
        gradients[num_slices] = [torch.cat([own[number].grad for own, _ in pairs]) for number in range(3)]
    assert kept[4] <= kept[1]
    torch.testing.assert_close(outputs[4], outputs[1])
    torch.testing.assert_close(gradients[4], gradients[1])


def _note(saved: dict[int, Tensor], tensor: Tensor) -> Tensor:
    saved[tensor.untyped_storage()._cdata] = tensor
    return tensor


@pytest.mark.parametrize(("queries", "keys"), [(3, 8), (5, 8), (1, 4), (4, 4), (4, 9)])
def test_the_mask_of_a_slice_ends_with_the_last_query_and_key(queries: int, keys: int) -> None:
    expected = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    assert torch.equal(hidden_lower_right(queries, keys, torch.device("cpu"))[0, 0], expected)
    options = mask_options(AttnMaskType.causal_bottom_right, torch.zeros(1, 1, queries, 2), torch.zeros(1, 1, keys, 2))
    if queries == keys:
        assert options == {"is_causal": True}
    elif queries > 1:
        assert torch.equal(options["attn_mask"] == float("-inf"), expected)


def _config(**options: Any) -> Any:
    given = {"context_parallel_size": 1, "num_moe_experts": None, "multi_latent_attention": False, "apply_rope_fusion": False}
    return SimpleNamespace(**(given | options))


MOE = {"num_moe_experts": 4, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_parallel_size": 2}, "context_parallel_size above 1 does not go with slices"),
        ({"mtp_num_layers": 1}, "they embed and predict tokens behind the end of a slice"),
        ({"window_size": (4, 0)}, "window_size does not go with slices"),
        ({"tp_comm_overlap": True}, "userbuffers have the length of whole sequences"),
        ({"fp8": "hybrid"}, "fp8 does not go with slices"),
        ({"is_hybrid_model": True}, "the state of Mamba layers is not handed from slice to slice"),
        ({**MOE, "moe_expert_capacity_factor": 1.0}, "an expert would drop tokens by the counts of a slice"),
        ({**MOE, "moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}, "0.1 with global_aux_loss"),
        ({**MOE, "moe_router_load_balancing_type": "sinkhorn"}, "it routes the tokens of a call together"),
        ({"multi_latent_attention": True, "apply_rope_fusion": True}, "apply_rope_fusion with multi-latent attention"),
    ],
)
def test_options_that_slices_do_not_go_with_are_refused(options: dict[str, Any], message: str) -> None:
    check_sliced_config(_config(), name="zb-h1")
    check_sliced_config(_config(**MOE), name="zb-h1")
    with pytest.raises(ConfigError, match=message):
        check_sliced_config(_config(**options), name="zb-h1")


def test_megatron_lms_arguments_are_those_of_the_slice_while_it_runs() -> None:
    args = SimpleNamespace(seq_length=8, create_attention_mask_in_dataloader=True)
    parts: Iterator[SlicePart | None] = iter([*PARTS, None])
    forward_step = sliced_batches(lambda: tuple(vars(args).values()), lambda: next(parts), args)
    assert [forward_step() for _ in range(3)] == [(3, False), (5, False), (8, True)]
    assert vars(args) == {"seq_length": 8, "create_attention_mask_in_dataloader": True}
    with pytest.raises(ConfigError, match="--reset-attention-mask"):
        sliced_batches(print, lambda: None, SimpleNamespace(reset_attention_mask=True))


def test_megatron_lms_batches_have_no_mask() -> None:
    part = cut_megatron_lm_batch({"tokens": TOKENS, "attention_mask": torch.zeros(2, 1, 8, 8)}, 3, 5)
    assert torch.equal(part["tokens"], TOKENS[:, 3:])
    assert "attention_mask" not in part
    assert part["attention_mask"] is None
    with pytest.raises(KeyError):
        part["labels"]
