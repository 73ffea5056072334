"""A model in a request: the costs of its stages for any placement, and its memory in bytes.

``model`` is an object with one of ``preset`` (a name of `presets.LAYERED`), ``layers`` (a layer file) and the sizes of `FIELDS`;
besides ``device_gib`` and ``is_balanced``. Its activation memory has the planner's units: 1.0 is the mean of all ranks per
microbatch, so that the memory limits of schedules keep their meaning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.messages import quoted
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.cost_table import COST_LISTS
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.plan.partition.layer_costs import Model
from megatron.zerobubble.plan.partition.layout import Layout
from megatron.zerobubble.plan.partition.partitions import partitions
from megatron.zerobubble.playground.limits import number, whole
from megatron.zerobubble.playground.models.estimate import estimate
from megatron.zerobubble.playground.models.presets import GPUS, LAYERED, PUBLISHED, SHAPES, layered

ERROR = 0.15
"""How far times that were not profiled may be off."""
_GIB = 2**30
_MOST_GIB = 4096.0


class Field(NamedTuple):
    """A size that the page asks for."""

    label: str
    usual: float
    least: float
    most: float
    is_whole: bool = True


FIELDS: dict[str, Field] = {
    "num_layers": Field("layers", 32, 1, 1000),
    "hidden_size": Field("hidden size", 4096, 1, 10**6),
    "num_attention_heads": Field("attention heads", 32, 1, 10**4),
    "num_query_groups": Field("KV heads (0: as many)", 0, 0, 10**4),
    "kv_channels": Field("head size (0: hidden / heads)", 0, 0, 10**5),
    "ffn_hidden_size": Field("MLP size", 14336, 1, 10**7),
    "swiglu": Field("gated MLP", 1, 0, 1),
    "vocab_size": Field("vocabulary", 128256, 1, 10**7),
    "seq_length": Field("sequence length", 8192, 1, 10**8),
    "micro_batch_size": Field("samples per microbatch", 1, 1, 10**4),
    "recompute": Field("full recomputation", 0, 0, 1),
    "num_experts": Field("experts (0: dense)", 0, 0, 10**5),
    "moe_router_topk": Field("experts per token", 8, 1, 10**3),
    "moe_ffn_hidden_size": Field("size of an expert", 2048, 1, 10**7),
    "expert_model_parallel_size": Field("expert parallel (EP)", 1, 1, 10**5),
    "tensor_model_parallel_size": Field("tensor parallel (TP)", 1, 1, 1024),
    "data_parallel_size": Field("data-parallel replicas", 8, 1, 10**6),
    "peak_tflops": Field("GPU peak, TFLOP/s in bf16", GPUS["H100"][0], 1, 10**5, False),
    "memory_tb_per_s": Field("GPU memory, TB/s", GPUS["H100"][1], 0.01, 1000, False),
    "link_gb_per_s": Field("link between ranks, GB/s", 50, 0.01, 10**5, False),
    "efficiency": Field("share of the peak reached", 0.5, 0.01, 1, False),
}
"""Sizes of a model, by Megatron-LM's names, and of the device that it runs on."""
_TIMES = {"forward_ms": COST_LISTS[0], "backward_ms": COST_LISTS[1], "wgrad_ms": COST_LISTS[2]}


@dataclass(frozen=True, kw_only=True)
class ModelProblem:
    """A model to plan for."""

    model: Model
    device_bytes: float
    is_balanced: bool
    """Whether the layers are divided by their work; else every stage has as many layers, or one more in the first ones."""
    own: Mapping[str, float]
    """Figures that replace the estimated ones: times and M_W / M_B per rank, `comm_ms`."""
    shares: Mapping[str, Any]
    """How its costs divide among slices of a sequence, by the fields of `LengthsAndLinks`; empty: its sizes are not known."""

    def layout(self, placement: Placement) -> Layout:
        """The layers of every stage."""
        each, over = divmod(self.model.num_layers, placement.num_stages)
        counts = tuple(each + (stage < over) for stage in range(placement.num_stages))
        if self.is_balanced:
            counts = next(iter(partitions(self.model, placement)), counts)
        return Layout(model=self.model, placement=placement, per_stage=counts)

    def costs_of(self, placement: Placement) -> CostModel:
        """The costs of the stages."""
        unit = self._unit_bytes(placement.num_ranks)
        costs = self.layout(placement).costs([1 / unit] * placement.num_stages)
        lists = {name: list(values) for name, values in costs.lists.items()}
        for name, key in _TIMES.items():
            if name in self.own:
                lists[key] = _scaled(lists[key], self.own[name] * placement.num_ranks)
        if "activation_after_backward" in self.own:
            kept = self.own["activation_after_backward"] * math.fsum(lists[COST_LISTS[3]])
            lists[COST_LISTS[4]] = _scaled(lists[COST_LISTS[4]], kept)
        return CostModel.of_lists(lists, comm_ms=self.own.get("comm_ms", costs.comm_ms))

    def memory(self, placement: Placement, num_microbatches: int) -> dict[str, Any]:
        """What turns a plan's memory into bytes: a rank has its `static_bytes` and its peak memory times `unit_bytes`."""
        p = placement.num_ranks
        return {
            "static_bytes": self.layout(placement).ranks("static_bytes"),
            "unit_bytes": self._unit_bytes(p) * min(p, num_microbatches),
            "device_bytes": self.device_bytes,
        }

    def figures(self, num_ranks: int) -> dict[str, Any]:
        """The mean per rank of every figure in the form, and how sure it is."""
        costs = self.costs_of(Placement.linear(num_ranks))
        sums = {name: math.fsum(values) for name, values in costs.lists.items()}
        kept = sums[COST_LISTS[4]] / sums[COST_LISTS[3]] if sums[COST_LISTS[3]] else 1.0
        means = {name: sums[key] / num_ranks for name, key in _TIMES.items()}
        return means | {"comm_ms": costs.comm_ms, "activation_after_backward": kept}

    def _unit_bytes(self, num_ranks: int) -> float:
        return self.model.total.activation_bytes / num_ranks or 1.0


def read_model(given: object, own: Mapping[str, float]) -> ModelProblem:
    """Read the model of a request.

    Raises:
        ConfigError: a size is missing, of the wrong type or out of bounds; the message names it and what is allowed.
    """
    if not isinstance(given, dict):
        raise ConfigError(f"model must be an object, got {quoted(given)}")
    rest = dict(given)
    device = number("device_gib", rest.pop("device_gib", GPUS["H100"][2]), _MOST_GIB, 0.1) * _GIB
    is_balanced = bool(whole("is_balanced", rest.pop("is_balanced", 0), 0, 1))
    shares: dict[str, Any] = {}
    if set(rest) == {"layers"}:
        model = Model.from_json(json.dumps(rest["layers"]))
    elif set(rest) == {"preset"}:
        name = rest["preset"]
        if not isinstance(name, str) or name not in LAYERED:
            raise ConfigError(f"preset is {quoted(name)}; choose one of {', '.join(LAYERED)}")
        model = layered(name)
    else:
        sizes = _sizes(rest)
        model = estimate(sizes)
        shares = _shares(sizes, model)
    if model.total.work_ms <= 0:
        raise ConfigError("no layer takes any time; give the times of at least one kind")
    return ModelProblem(model=model, device_bytes=device, is_balanced=is_balanced, own=own, shares=shares)


def _shares(sizes: Mapping[str, float], model: Model) -> dict[str, Any]:
    """Attention is what F of a layer has and W has not; its keys and values are kept for all slices."""
    layer, heads = model.kinds["layer"], sizes["num_query_groups"] or sizes["num_attention_heads"]
    channels = sizes["kv_channels"] or sizes["hidden_size"] // sizes["num_attention_heads"]
    keys = 2 * heads * channels / sizes["tensor_model_parallel_size"]
    key_bytes = 2 * sizes["num_layers"] * sizes["seq_length"] * sizes["micro_batch_size"] * keys
    return {
        "sequence_length": int(sizes["seq_length"]),
        "attention_share": max(0.0, 1 - layer.wgrad_ms / layer.forward_ms),
        "key_share": min(0.99, key_bytes / model.total.activation_bytes),
    }


def _sizes(given: Mapping[str, Any]) -> dict[str, float]:
    unknown = sorted(set(given) - set(FIELDS))
    if unknown:
        raise ConfigError(f"model has {', '.join(map(quoted, unknown[:3]))}; known are {', '.join(FIELDS)}")
    sizes: dict[str, float] = {}
    for name, field in FIELDS.items():
        value = given.get(name, field.usual)
        if field.is_whole:
            sizes[name] = whole(name, value, int(field.least), int(field.most))
        else:
            sizes[name] = number(name, value, field.most, field.least)
    return sizes


def _scaled(values: list[float], total: float) -> list[float]:
    """The same proportions with another sum; of nothing, equal parts."""
    given = math.fsum(values)
    return [total * value / given for value in values] if given else [total / len(values)] * len(values)


def offers() -> dict[str, Any]:
    """What the page offers."""
    usual = {name: field.usual for name, field in FIELDS.items()}
    return {
        "published": PUBLISHED,
        "shapes": {name: preset | {"model": usual | preset["model"]} for name, preset in SHAPES.items()},
        "layered": {name: {"p": p, "m": m} for name, (p, m) in LAYERED.items()},
        "gpus": {
            name: dict(zip(("peak_tflops", "memory_tb_per_s", "device_gib"), values, strict=True))
            for name, values in GPUS.items()
        },
        "fields": {name: field._asdict() for name, field in FIELDS.items()},
        "error": ERROR,
    }
