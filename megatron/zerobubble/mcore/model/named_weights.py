"""First weights drawn by name: the same for every schedule, pipeline size, placement, tensor-parallel and expert-parallel size.

megatron-core draws weights from generators seeded by rank, in the order in which a rank builds its modules. Then another layout,
with the same seed, is another model, and two runs cannot be compared by their losses.

Here each weight is drawn from a generator seeded by the run's seed and the weight's name in a checkpoint: its key there, the
numbers of its layer and expert, and its place in the whole tensor. megatron-core's `sharded_state_dict` knows them, so two
layouts whose checkpoints are interchangeable begin with the same bits. Values come from the config's own init methods. They are
drawn on the CPU, for any device, in blocks of rows with a generator each: a rank draws only the blocks that it has rows of,
and rows added to pad the vocabulary change no others.

Parameters with constant first values need none of this. Those that a module draws itself, and not by an init method of the
config, keep megatron-core's way: Mamba's convolution, `dt_bias` and `A_log`. So do weights in FP8, which are cast before they
can be drawn; a line says so.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

__all__ = ["draw_by_name", "draw_when_wrapped", "remember_from", "replacements"]

_log = logging.getLogger(__name__)

InitMethod = Callable[[Tensor], Any]
"""Fills a tensor with its first values."""

_METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")
_INIT_METHOD = "_zero_bubble_init_method"
"""Attribute of a parameter: the init method that was called for it."""

_ELEMENTWISE = (nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_)
"""Functions whose values do not depend on the tensor's shape. What others fill is drawn as a whole."""

_BLOCK = 1 << 16
"""Elements of a block, about: whole rows."""


class _Remembering:
    """An init method of a config that also leaves itself on the parameter it is called for. It draws as before: modules that are
    built aside, and whose parameters are no part of a model, keep their values."""

    def __init__(self, method: InitMethod) -> None:
        self.method = method

    def __call__(self, tensor: Tensor) -> Any:
        if isinstance(tensor, nn.Parameter):
            setattr(tensor, _INIT_METHOD, self.method)
        return self.method(tensor)


def remember_from(config: Any) -> None:
    """Parameters of modules that are built with `config` remember which of its init methods was called for them.

    Args:
        config: TransformerConfig of the model. Changed for good; it draws as before.
    """
    for name in _METHODS:
        method = getattr(config, name, None)
        if method is not None and not isinstance(method, _Remembering):
            setattr(config, name, _Remembering(method))


def replacements() -> list[tuple[Any, str, Any]]:
    """(owner, name, replacement) of the function that draws with `use_cpu_initialization`.

    It calls the init method for a temporary tensor; the replacement lets the parameter remember it.
    """
    original = layers._initialize_affine_weight_cpu
    signature = inspect.signature(original)

    @functools.wraps(original)
    def remembering(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        method = given["init_method"]
        if isinstance(method, _Remembering):
            setattr(given["weight"], _INIT_METHOD, method.method)
        return original(*args, **kwargs)

    name = original.__name__
    extensions = sys.modules.get("megatron.core.extensions.transformer_engine")
    return [(owner, name, remembering) for owner in (layers, extensions) if getattr(owner, name, None) is original]


def draw_when_wrapped(seed: int) -> None:
    """Draw the weights of every module that DDP wraps by name, for the life of the process, where `install` replaces nothing.

    Args:
        seed: of the run, the same on all ranks; any int.
    """
    configured, wrap = TransformerConfig.__post_init__, DistributedDataParallel.__init__
    signature = inspect.signature(wrap)

    @functools.wraps(configured)
    def remembering(config: Any) -> None:
        configured(config)
        remember_from(config)

    @functools.wraps(wrap)
    def drawing(*args: Any, **kwargs: Any) -> None:
        module = signature.bind(*args, **kwargs).arguments["module"]
        if hasattr(module, "sharded_state_dict"):
            draw_by_name(module, seed=seed)
        wrap(*args, **kwargs)

    more = [(TransformerConfig, "__post_init__", remembering), (DistributedDataParallel, "__init__", drawing)]
    for owner, name, replacement in (*replacements(), *more):
        setattr(owner, name, replacement)


@torch.no_grad()
def draw_by_name(model: nn.Module, *, seed: int) -> None:
    """Draw the weights of a chunk anew. Nothing is communicated, and no generator's state changes.

    Args:
        model: a chunk whose parameters remember their init methods (`remember_from`), and have a storage of their own each.
        seed: of the run, the same on all ranks; any int.
    """
    methods = {
        parameter.untyped_storage().data_ptr(): (name, getattr(parameter, _INIT_METHOD))
        for name, parameter in model.named_parameters()
        if hasattr(parameter, _INIT_METHOD)
    }
    left = dict(methods)
    with torch.random.fork_rng(devices=[]):
        for weight in _sharded_tensors(model.sharded_state_dict(metadata={})):  # type: ignore[operator]
            address = weight.data.untyped_storage().data_ptr()
            if address in methods:
                left.pop(address, None)
                _draw(weight, methods[address][1], seed)
    if left:
        names = ", ".join(name for name, _ in left.values())
        _log.warning("%s: not in the model's checkpoints, and so not drawn by name: other layouts begin with others", names)
    quantized = sum(is_float8tensor(parameter) for parameter in model.parameters())
    if quantized:
        _log.warning("%d weights in FP8 (fp8_param) are not drawn by name: other layouts begin with others", quantized)


def _sharded_tensors(state: Any) -> Iterator[Any]:
    """Every tensor of a sharded state dict. A factory's are views of its parameter, such as the two halves of a SwiGLU."""
    if isinstance(state, ShardedTensorFactory):
        yield from _sharded_tensors(state.build())
    elif isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, dict | list):
        for each in state.values() if isinstance(state, dict) else state:
            yield from _sharded_tensors(each)


def _draw(weight: Any, method: InitMethod, seed: int) -> None:
    """Draw a `ShardedTensor`: a slice of the whole tensor of one layer and expert, in float32, rounded to the weight's dtype."""
    prepended = weight.prepend_axis_num
    name = f"{seed} {weight.key} {weight.global_offset[:prepended]}"
    whole, begins = weight.global_shape[prepended:], weight.global_offset[prepended:]
    columns = tuple(slice(begin, begin + size) for begin, size in zip(begins[1:], weight.local_shape[1:], strict=True))
    row_size = max(1, math.prod(whole[1:]))
    rows = max(1, _BLOCK // row_size) if _is_elementwise(method) else whole[0]
    begin, end = begins[0], begins[0] + weight.local_shape[0]
    for block in range(begin // rows, -(-end // rows)):
        drawn = torch.empty(rows, *whole[1:], device="cpu", dtype=torch.float32)
        digest = hashlib.blake2b(f"{name} {block}".encode(), digest_size=8).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest, "little") >> 1)
        method(drawn)
        low, high = max(begin, block * rows), min(end, (block + 1) * rows)
        weight.data[low - begin : high - begin].copy_(drawn[(slice(low - block * rows, high - block * rows), *columns)])


def _is_elementwise(method: InitMethod) -> bool:
    while isinstance(method, functools.partial):
        method = method.func
    return method in _ELEMENTWISE
