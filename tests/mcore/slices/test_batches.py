"""Which tensors of a batch are cut for slices, along which dimension, and which are refused."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.slices.batches import cut_batch
from megatron.zerobubble.mcore.slices.slice_options import SliceOptions

FIRST, LAST = SliceOptions(lengths=(3, 5)).parts(8, 2)
TOKENS = torch.arange(16).view(2, 8)
Pair = namedtuple("Pair", ["tokens", "text"])


def test_a_batch_is_cut_along_its_second_dimension() -> None:
    batch = {"tokens": TOKENS, "text": torch.arange(18).view(2, 9), "id": torch.tensor([5]), "none": None, "n": 3}
    part = cut_batch(batch, LAST)
    assert torch.equal(part["tokens"], TOKENS[:, 3:])
    assert torch.equal(part["text"], batch["text"][:, 3:9])  # type: ignore[index]
    assert (part["id"], part["none"], part["n"]) == (torch.tensor([5]), None, 3)
    assert part["tokens"].is_contiguous()
    assert cut_batch({"attention_mask": TOKENS > 3}, LAST)["attention_mask"].shape == (2, 5)
    pair = cut_batch(Pair(TOKENS, [TOKENS.unsqueeze(-1)]), FIRST)
    assert isinstance(pair, Pair)
    assert (pair.tokens.shape, pair.text[0].shape) == ((2, 3), (2, 3, 1))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"tokens": torch.zeros(2, 7)}, r"'tokens' of the batch has shape \(2, 7\) and type float32"),
        ((torch.zeros(8),), r"item 0 of the batch has shape \(8,\)"),
        ({"tokens": TOKENS, "cu_seqlens": TOKENS[0]}, "do not go with packed sequences"),
        (
            {"attention_mask": torch.zeros(2, 1, 1, 8)},
            r"an attention mask, and 'attention_mask' .* \(2, 1, 1, 8\), is one: give None",
        ),
        ((TOKENS, torch.ones(1, 1, 8, 8).bool()), "an attention mask, and item 1 of the batch"),
        ({"rows": {1, 2}}, "'rows' of the batch is a set: give install the argument cut"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cut_batch(batch, FIRST)


PER_TOKEN = torch.rand(2, 8)
IMAGE = torch.rand(2, 8, 3)
UNCERTAIN: dict[str, Any] = {
    "an image of as many rows as tokens": ("image", IMAGE),
    "integers of one": ("image", (IMAGE * 255).to(torch.uint8)),
    "an image of as many rows and columns": ("pixel_values", torch.rand(2, 3, 8, 8)),
    "features of an image": ("features", PER_TOKEN),
    "with one more": ("features", torch.rand(2, 9)),
    "an image in a tuple": (1, IMAGE),
    "ids of sequences of other lengths": ("ids", TOKENS[:, :6]),
    "numbers for as many sequences as tokens": ("ids", torch.arange(8)),
}


@pytest.mark.parametrize(("key", "tensor"), UNCERTAIN.values(), ids=UNCERTAIN)
def test_a_tensor_is_cut_only_where_that_is_certain(key: Any, tensor: Any) -> None:
    batch: Any = (TOKENS, tensor) if isinstance(key, int) else {"tokens": TOKENS, key: tensor}
    with pytest.raises(ConfigError) as caught:
        cut_batch(batch, FIRST)
    assert f"of the batch has shape {tuple(tensor.shape)} and type" in str(caught.value)
    assert "give Slices cut=a function that cuts the loop's batches" in str(caught.value)


def test_named_tensors_are_cut_for_any_type() -> None:
    batch = {"advantages": PER_TOKEN, "old_log_probs": PER_TOKEN, "inputs_embeds": IMAGE, "loss_mask": PER_TOKEN}
    assert all(torch.equal(each, batch[name][:, 3:]) for name, each in cut_batch(batch, LAST).items())


@pytest.mark.parametrize("shape", [(2, 8), (3, 2, 8), (1, 8), (8,)])
@pytest.mark.parametrize("name", ["positions", "position_ids"])
def test_positions_are_cut_along_their_last_dimension(name: str, shape: tuple[int, ...]) -> None:
    positions = torch.arange(8).expand(shape)
    assert torch.equal(cut_batch({name: positions}, LAST)[name], positions[..., 3:])
