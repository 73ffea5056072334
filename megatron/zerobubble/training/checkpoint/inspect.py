"""Inspects a checkpoint before it is loaded: whether it is complete, and contains nothing but data.

torch's distributed checkpoint format stores its metadata, and every object that is not a tensor, as a pickle, and unpickles them
without restrictions: a checkpoint from an untrusted source could run code. So the metadata is first read with an unpickler that
allows only the classes of such metadata, and every stored object with torch's `weights_only` loader. Errors name the offending
class or file. Files that are missing or too short are found on the way.
"""

from __future__ import annotations

import enum
import io
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from megatron.zerobubble.errors import CheckpointError

__all__ = ["COMMON_FILE", "inspect_checkpoint"]

COMMON_FILE = "common.pt"
"""Where megatron-core before 0.19 saves the common state, what is not a sharded tensor. Later ones read it, too."""
_COMMON_OBJECT = "common_state/shard_0_1"
"""Name of the object in which megatron-core saves the common state from 0.19 on."""
_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_METADATA_NAMES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch.distributed.checkpoint.planner", "WriteItem"),
    ("torch.distributed.checkpoint.planner", "WriteItemType"),
    ("torch.distributed.checkpoint.planner", "TensorWriteData"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
}


def inspect_checkpoint(directory: Path) -> None:
    """Raise CheckpointError unless `directory` is a complete checkpoint that contains only data."""
    for name in ("metadata.json", ".metadata"):
        if not (directory / name).is_file():
            raise CheckpointError(f"{directory} is not a complete checkpoint: {name} is missing")
    _check_backend(directory / "metadata.json")
    metadata = _read_metadata(directory / ".metadata")
    common = directory / COMMON_FILE
    if not common.is_file() and _COMMON_OBJECT not in metadata.state_dict_metadata:
        raise CheckpointError(f"{directory} is not a complete checkpoint: {COMMON_FILE} is missing, and {_COMMON_OBJECT} too")
    for index, place in metadata.storage_data.items():
        file = directory / place.relative_path
        if not file.resolve().is_relative_to(directory.resolve()):
            raise CheckpointError(f"{directory}: {place.relative_path} lies outside the checkpoint")
        if not file.is_file() or file.stat().st_size < place.offset + place.length:
            raise CheckpointError(f"{directory} is damaged: {place.relative_path} is missing or too short")
        if isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            _check_object(file, place.offset, place.length, index.fqn)
    if common.is_file():
        _check_loads(common, common.read_bytes())


def _check_backend(path: Path) -> None:
    """Check the format by which megatron-core chooses its reader. Other readers would unpickle files that are not inspected."""
    try:
        named = json.loads(path.read_bytes())
        found = {key: named[key] for key in _BACKEND}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__} {error}") from error
    if found != _BACKEND:
        raise CheckpointError(f"{path} names a foreign format, {found}; only {_BACKEND} is read")


def _read_metadata(path: Path) -> Any:
    try:
        metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        metadata.storage_data.items()
        metadata.state_dict_metadata.items()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except (pickle.UnpicklingError, AttributeError, EOFError, ValueError, TypeError, IndexError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return metadata


def _check_object(file: Path, offset: int, length: int, name: str) -> None:
    with file.open("rb") as stream:
        stream.seek(offset)
        _check_loads(Path(f"{file} ({name})"), stream.read(length))


def _check_loads(what: Path, data: bytes) -> None:
    """Raise CheckpointError unless `data` loads without running code from it."""
    try:
        with warnings.catch_warnings():  # about content that it then rejects
            warnings.simplefilter("ignore")
            torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{what} is damaged or holds more than data: {reason}") from error


def _enum_member(kind: Any, name: Any) -> Any:
    """Replaces `getattr` in pickles: returns members of an enum, and raises CheckpointError for anything else."""
    if isinstance(kind, enum.EnumMeta) and isinstance(name, str) and name in kind.__members__:
        return kind[name]
    raise CheckpointError(f"it contains {name!r} of {kind!r}, which is not allowed in checkpoint metadata; it is not loaded")


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles checkpoint metadata and rejects every other class."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member  # some Python versions, such as 3.11.2, pickle enum members this way
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype) or (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        raise CheckpointError(f"it contains {module}.{name}, which is not allowed in checkpoint metadata; it is not loaded")
