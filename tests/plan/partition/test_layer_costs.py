"""Layer files: round trip, and one clear line for each thing that can be wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.plan.partition.layer_costs import FORMAT, LayerCosts, Model

COSTS = {
    "forward_ms": 1.0,
    "backward_ms": 2.0,
    "wgrad_ms": 0.5,
    "activation_bytes": 100,
    "after_backward_bytes": 50,
    "static_bytes": 1000,
}


def body(**changes: Any) -> str:
    whole = {"format": FORMAT, "kinds": {"dense": COSTS, "moe_layer": COSTS}, "layers": ["dense*3", "moe_layer*2", "dense"]}
    return json.dumps(whole | changes)


def test_round_trip() -> None:
    model = Model.from_json(body(comm_ms=0.2, num_mtp_layers=1, kinds={"dense": COSTS, "moe_layer": COSTS, "mtp": COSTS}))
    assert model.layers == ("dense",) * 3 + ("moe_layer",) * 2 + ("dense",)
    assert model.comm_ms == 0.2
    assert Model.from_json(json.dumps(model.to_json())) == model


def test_sums() -> None:
    kinds = {"dense": LayerCosts(**COSTS), "embedding": LayerCosts(forward_ms=3), "head": LayerCosts(wgrad_ms=4)}
    mtp = {"mtp": LayerCosts(wgrad_ms=5)}
    model = Model(layers=("dense",) * 4, kinds=kinds | mtp, num_mtp_layers=2)
    assert model.first.work_ms == 3
    assert model.last.work_ms == 14
    assert model.total.work_ms == 31
    assert model.sums["forward_ms"] == (0, 1, 2, 3, 4)
    assert Model(layers=("dense",), kinds=kinds).last.work_ms == 4


def test_letters_of_a_hybrid_model() -> None:
    kinds = dict.fromkeys(("attention", "mlp", "mamba", "moe"), LayerCosts(**COSTS))
    model = Model(layers=("mamba", "mlp", "attention", "moe"), kinds=kinds)
    assert model.is_hybrid
    assert model.letters(0, 4) == "M-*E"
    assert not Model(layers=("dense",), kinds={"dense": LayerCosts()}).is_hybrid


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the layer file is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", f"has format 'list'; this version reads {FORMAT}"),
        (json.dumps({"format": "zerobubble-layers/9"}), f"has format 'zerobubble-layers/9'; this version reads {FORMAT}"),
        (body(kinds=[]), r"kinds is \[\]; give an object"),
        (body(layers="dense"), "layers is 'dense'; give a list such as"),
        (body(layers=[]), "the model has no layer"),
        (body(layers=["dense*0"]), r"layers has 'dense\*0'; write a kind"),
        (body(layers=[3]), "layers has 3; write a kind"),
        (body(layers=["sparse"]), "layers names 'sparse', and kinds has dense, moe_layer; add its costs"),
        (body(layers=["head"]), "layers names 'head', which is part of the first or the last stage"),
        (body(layers=["dense*2001"]), "has 2,001 layers; give at most 2,000"),
        (body(layers=["dense", "mamba"], kinds={"dense": COSTS, "mamba": COSTS}), "layers mixes dense, mamba"),
        (body(num_mtp_layers=1), "num_mtp_layers is 1, and kinds has no 'mtp'"),
        (body(num_mtp_layers=-1), "num_mtp_layers is -1; give a whole number, 0 or more"),
        (body(comm_ms=-1), "comm_ms is -1; it must be a finite number"),
        (body(kinds={"dense": 3}), "kind 'dense' is 3; give an object with forward_ms"),
        (body(kinds={"dense": {"forward_ms": 1}}), "kind 'dense' has no backward_ms, wgrad_ms"),
        (body(kinds={"dense": COSTS | {"wgrad_ms": "1"}}), "kind 'dense': costs: wgrad_ms is '1'; it must be a finite number"),
        (body(kinds={"dense": COSTS | {"static_bytes": -5}}), "kind 'dense': costs: static_bytes is -5"),
    ],
)
def test_a_wrong_file_of_layers_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        Model.from_json(text)
    assert "\n" not in str(raised.value)
