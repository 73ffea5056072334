"""The host-device layer: stock megatron-core on a machine without CUDA, with gloo.

megatron-core names `cuda` in about two hundred places. Six small, explicit measures make it run on the CPU and gloo:

1. **Replaced functions.** While installed, the few functions of `torch.cuda` that megatron-core calls (`current_device`,
   `synchronize`, `get_rng_state` ...) and the RNG accessors of `megatron.core.tensor_parallel.random` are replaced by CPU
   versions. `current_device()` is ``torch.device("cpu")``, which every ``device=torch.cuda.current_device()`` accepts.
2. **A mode for set-up and for the optimizer.** `HostDevice.on_host()` is a `TorchFunctionMode` that turns ``device="cuda"`` into
   the CPU, makes ``.cuda()`` the identity and ``Tensor.type()`` return ``torch.cuda.FloatTensor``. It is entered around building
   the model, stepping the optimizer and checkpoints, **never around a forward or backward pass**: it costs a Python call per
   torch op.
3. **A replacement of the name `torch`** in the two modules whose passes use ``device="cuda"``: the stock schedules (one
   ``torch.zeros([], device="cuda")`` per iteration) and the causal mask of local attention (``torch.ones(s, s, device="cuda")``).
   It forwards to the torch module by `__getattr__`, with `zeros` and `ones` redirected. So the stock schedules, our baseline, run
   at their own speed: the overhead is one attribute look-up, a fraction of a microsecond per microbatch. The modules of experts
   and DDP's buckets get one with inert streams, too (`cpu.streams`).
4. **Rotary positions of context-parallel ranks** without an index in pinned memory, which needs a driver.
5. **One all-gather of weights at a time** per process group, because gloo crashes with two (`cpu.gathers`).
6. **One gloo device**, a polling thread, for all process groups that are made meanwhile (`cpu.gloo_device`).

Invariants: importing this file changes nothing; `install` is idempotent and checks that every name it replaces exists;
`uninstall` restores exactly what was there; with ``enabled=False`` (on GPUs) every method does nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron.zerobubble.errors import CompatibilityError
from megatron.zerobubble.mcore.compat import SUPPORTED
from megatron.zerobubble.mcore.cpu.gathers import one_at_a_time
from megatron.zerobubble.mcore.cpu.gloo_device import shared_device
from megatron.zerobubble.mcore.cpu.rotary import own_positions
from megatron.zerobubble.mcore.cpu.streams import InertStream, cuda_without_streams, split_sizes_on_host

__all__ = ["HostDevice", "quiet_third_parties"]

_CPU = torch.device("cpu")

_NOT_FOR_THE_USER: tuple[tuple[str, type[Warning]], ...] = (
    (r"(Transformer Engine and )?Apex (is|are) not installed", UserWarning),
    (r"When using (async grad allreduce|sequence parallelism) it is recommended to set .* CUDA_DEVICE_MAX", UserWarning),
    (r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed", UserWarning),
    (r"If you are using transformer_engine as the transformer implementation, the core_attn is from", UserWarning),
    (r"`torch\.distributed\.\w+` is deprecated", FutureWarning),
    (r"`load_state_dict` is deprecated", FutureWarning),
    (r"Please use DTensor instead", FutureWarning),
    (r"\w+ is experimental and still under active development", UserWarning),
)
"""Warnings of megatron-core and torch on every rank that a user cannot act on: missing optional packages (torch's own are
used instead), an environment variable that only CUDA reads, and deprecated torch functions that megatron-core calls."""

_RNG_MESSAGE = "CPU RNG state changed within GPU RNG context"


@contextlib.contextmanager
def quiet_third_parties() -> Iterator[None]:
    """A context that suppresses warnings of megatron-core and torch that a user cannot act on."""
    with warnings.catch_warnings():
        for message, category in _NOT_FOR_THE_USER:
            warnings.filterwarnings("ignore", message=message, category=category)
        yield


class HostDevice:
    """Makes the CPU take the place of the CUDA device. One instance per process.

    Args:
        enabled: False (on GPUs) makes every method a no-op, so that callers need no `if`.

    Use it as a context manager or call `install` and `uninstall`.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._undo: list[tuple[Any, str, Any]] = []

    @property
    def device(self) -> torch.device:
        """The device of tensors: the CPU, or this process's current CUDA device if the layer is not enabled."""
        return _CPU if self.enabled else torch.device("cuda", torch.cuda.current_device())

    def install(self) -> None:
        """Replace CUDA functions by CPU versions.

        Raises:
            CompatibilityError: megatron-core or torch lacks a name that is to be replaced. Nothing has been changed then.
        """
        if not self.enabled or isinstance(torch.cuda.current_device, _Replacement):
            return
        replacements = _replacements()
        for owner, name, _ in replacements:
            if not hasattr(owner, name):
                raise CompatibilityError(
                    f"{owner.__name__}.{name} does not exist in the installed version, and the host-device layer replaces it. "
                    f"Install a supported release: pip install 'megatron-core{SUPPORTED}'"
                )
        for owner, name, replacement in replacements:
            self._undo.append((owner, name, inspect.getattr_static(owner, name)))
            setattr(owner, name, replacement)
        _rng_logger().addFilter(_drop_rng_message)

    def uninstall(self) -> None:
        """Restore what `install` of this instance replaced."""
        if self._undo:
            _rng_logger().removeFilter(_drop_rng_message)
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)

    def __enter__(self) -> HostDevice:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def on_host(self) -> AbstractContextManager[object]:
        """A context for set-up, optimizer steps and checkpoints. Never enter it around a forward or backward pass."""
        return _OnHost() if self.enabled else contextlib.nullcontext()


def _rng_logger() -> logging.Logger:
    return logging.getLogger("megatron.core.tensor_parallel.random")


def _drop_rng_message(record: logging.LogRecord) -> bool:
    """A logging filter: here the GPU generator is the CPU generator, so megatron-core's check would warn at every dropout."""
    return record.getMessage() != _RNG_MESSAGE


# -- 1. replaced functions --------------------------------------------------------------------------------------------


def _replacements() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, replacement) of everything that is replaced."""
    with quiet_third_parties():
        mcore_random = importlib.import_module("megatron.core.tensor_parallel.random")
        schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
        transformer_utils = importlib.import_module("megatron.core.transformer.utils")
        dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
        shared_experts = importlib.import_module("megatron.core.transformer.moe.shared_experts")
        moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        buckets = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
        rotary = importlib.import_module("megatron.core.models.common.embeddings.rotary_pos_embedding")
        yarn = importlib.import_module("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding")
    functions: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "current_device", _current_device),
        (torch.cuda, "set_device", _nothing),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "empty_cache", _nothing),
        (torch.cuda, "manual_seed", _manual_seed),
        (torch.cuda, "get_rng_state", _get_rng_state),
        (torch.cuda, "set_rng_state", _set_rng_state),
        (torch.cuda.random, "get_rng_state", _get_rng_state),
        (torch.cuda.random, "set_rng_state", _set_rng_state),
        (mcore_random, "_get_cuda_rng_state", _get_rng_state),
        (mcore_random, "_set_cuda_rng_state", _set_rng_state),
    ]
    bucket_group = buckets._ParamAndGradBucketGroup
    stand_in, without_streams = _TorchOnHost(), _TorchOnHost(cuda_without_streams())
    return [
        *((owner, name, _Replacement(function)) for owner, name, function in functions),
        *((owner, "get_pos_emb_on_this_cp_rank", own_positions) for owner in (rotary, yarn)),
        (schedules, "torch", stand_in),
        (transformer_utils, "torch", stand_in),
        (moe_utils, "torch", stand_in),
        (dispatcher, "torch", without_streams),
        (buckets, "torch", without_streams),
        (shared_experts, "torch", without_streams),
        (dispatcher, "maybe_move_tensor_to_cpu", split_sizes_on_host),
        (dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", InertStream()),
        (bucket_group, "start_param_sync", one_at_a_time(bucket_group.start_param_sync)),
        *shared_device(),
    ]


class _Replacement:
    """A replaced function. One object per name: torch's compiler keeps rules by object and does not allow two names for one.

    A second `install` recognizes the first one by this type.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _current_device() -> torch.device:
    return _CPU


def _nothing(*_args: object, **_kwargs: object) -> None:
    """Do nothing: there is no device to synchronize, to select, or to free the cache of."""


def _manual_seed(seed: int) -> None:
    # Not torch.manual_seed: that one seeds CUDA through torch.cuda and would come back here.
    torch.default_generator.manual_seed(int(seed))


def _get_rng_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
    torch.default_generator.set_state(new_state)


# -- 2. the mode ------------------------------------------------------------------------------------------------------


class _OnHost(TorchFunctionMode):
    """A mode in which every torch call runs on the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs) if kwargs else {}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):  # a build of torch for CUDA looks for a driver
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(args[0]).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


# -- 3. the replacement of the name torch -----------------------------------------------------------------------------


class _TorchOnHost(types.ModuleType):
    """The torch module as megatron-core's schedules and causal mask see it: `zeros` and `ones` are on the CPU.

    Args:
        cuda: replaces `torch.cuda`, if given.
    """

    def __init__(self, cuda: types.ModuleType | None = None) -> None:
        super().__init__("torch", "The torch module with device='cuda' served by the CPU in zeros and ones.")
        if cuda is not None:
            self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*size, device=_CPU if _is_cuda(device) else device, **kwargs)

    @staticmethod
    def ones(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.ones(*size, device=_CPU if _is_cuda(device) else device, **kwargs)
