"""The state of one rank in a raw form, for a restart with the same layout: nothing is resharded, renamed or gathered.

Weights of the chunks, main weights and moments of the optimizer in the order of its parameters, its loss scale, the learning rate
schedule, and the random number generators. The files of --save are in a form that any layout loads, and cost a plan and a gather.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron.zerobubble.training.checkpoint.rng_states import rng_states, set_rng_states
from megatron.zerobubble.training.step import TrainingState, parameters_in_place

__all__ = ["fingerprint", "load_state", "save_state", "state_bytes"]

_IGNORED = ("run", "checkpoint", "logging", "tokenizer", "data")
"""Groups of flags that change nothing in the state of a rank, or only paths."""


def save_state(training_state: TrainingState, stream: IO[bytes]) -> None:
    """Write this rank's state. All ranks must call this; the optimizer step of the last iteration must be validated.

    Args:
        training_state: model chunks, optimizer and scheduler.
        stream: receives it.

    Raises:
        OSError: it cannot be written.
    """
    with training_state.on_host(), parameters_in_place(training_state):
        state = {
            "chunks": [_on_host(stage.state_dict()) for stage in _stages(training_state)],
            "optimizer": [_optimizer_state(part, inner, training_state) for part, inner in _optimizers(training_state)],
            "scheduler": training_state.scheduler.state_dict(),
            "rng": _on_host(rng_states()),
        }
        try:
            torch.save(state, stream)
        except RuntimeError as error:  # torch's, while it handles the OSError of a write
            raise OSError(" ".join(str(error.__context__ or error).split())) from error


def load_state(training_state: TrainingState, path: Path) -> None:
    """Load the state that `save_state` wrote on a rank with the same fingerprint.

    Args:
        training_state: changed in place.
        path: the file.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    with training_state.on_host(), torch.no_grad():
        for stage, held in zip(_stages(training_state), state["chunks"], strict=True):
            stage.load_state_dict(held)
        for (part, inner), held in zip(_optimizers(training_state), state["optimizer"], strict=True):
            _load_optimizer(part, inner, held)
        training_state.scheduler.num_steps = 0  # `load_state_dict` adds to it
        training_state.scheduler.load_state_dict(state["scheduler"])
    set_rng_states(state["rng"])


def state_bytes(training_state: TrainingState) -> int:
    """About how many bytes `save_state` writes, also before the first step allocates the optimizer's moments."""
    model = sum(_size(each) for stage in _stages(training_state) for each in stage.state_dict().values())
    shared = _storages(training_state)
    total = model
    for _, inner in _optimizers(training_state):
        num_moments = 1 if isinstance(inner, torch.optim.SGD) else 2
        for parameter in _parameters(inner):
            total += num_moments * 4 * parameter.numel() + (0 if _storage(parameter) in shared else _size(parameter))
    return total


def fingerprint(training_state: TrainingState) -> str:
    """Identifies what a rank's state fits: the flags, and names, shapes and dtypes of its part of the model and optimizer."""
    flags = {name: value for name, value in asdict(training_state.settings).items() if name not in _IGNORED}
    model = [[(name, *_kind(value)) for name, value in stage.state_dict().items()] for stage in _stages(training_state)]
    optimizer = [
        (type(part).__name__, type(inner).__name__, [_kind(each) for each in _parameters(inner)])
        for part, inner in _optimizers(training_state)
    ]
    text = json.dumps([flags, model, optimizer], sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _kind(value: Any) -> tuple[list[int], str]:
    return (list(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else ([], type(value).__name__)


def _size(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _stages(training_state: TrainingState) -> list[Any]:
    return [get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in training_state.chunks]


def _optimizers(training_state: TrainingState) -> Iterator[tuple[Any, Any]]:
    """(megatron-core's optimizer, the one in it that steps) for each part of the chain that has parameters on this rank."""
    optimizer = training_state.optimizer
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(part, "optimizer", None)
        if inner is not None:
            yield part, inner


def _parameters(inner: Any) -> list[torch.Tensor]:
    return [parameter for group in inner.param_groups for parameter in group["params"]]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages(training_state: TrainingState) -> set[int]:
    """The memory of the weights that `chunks` has: what the optimizer steps in place is not saved twice."""
    return {_storage(parameter) for stage in _stages(training_state) for parameter in stage.parameters()}


def _optimizer_state(part: Any, inner: Any, training_state: TrainingState) -> dict[str, Any]:
    shared = _storages(training_state)
    scaler = getattr(part, "grad_scaler", None)
    parameters = _parameters(inner)
    return {
        "main": [None if _storage(each) in shared else _host_copy(each) for each in parameters],
        "moments": [_on_host(inner.state.get(each, {})) for each in parameters],
        "on_host": [[key for key, value in inner.state.get(each, {}).items() if _is_on_host(value)] for each in parameters],
        "groups": [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups],
        "grad_scaler": None if scaler is None else scaler.state_dict(),
    }


def _load_optimizer(part: Any, inner: Any, held: dict[str, Any]) -> None:
    for parameter, main, moments, on_host in zip(_parameters(inner), held["main"], held["moments"], held["on_host"], strict=True):
        if main is not None:
            parameter.copy_(main)
        inner.state[parameter] = {
            key: value.to(parameter.device) if isinstance(value, torch.Tensor) and key not in on_host else value
            for key, value in moments.items()
        }
    for group, values in zip(inner.param_groups, held["groups"], strict=True):
        group.update(values)
    if held["grad_scaler"] is not None:
        part.grad_scaler.load_state_dict(held["grad_scaler"])


def _is_on_host(value: Any) -> bool:
    """Whether it stays in host memory, as the step counts of torch's Adam do."""
    return isinstance(value, torch.Tensor) and value.device.type == "cpu"


def _on_host(state: dict[str, Any]) -> dict[str, Any]:
    return {name: _host_copy(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory, with no more than its own elements: torch saves the whole storage of a view."""
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().size() != tensor.numel() * tensor.element_size() else tensor
