"""Inspection of a checkpoint before it is loaded: complete, undamaged, and nothing but data."""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint import load
from megatron.zerobubble.training.checkpoint.inspect import _MetadataUnpickler, inspect_checkpoint

pytestmark = [
    pytest.mark.usefixtures("world_of_one"),
    pytest.mark.claims(
        "Long runs",
        "checkpoints: missing, short, damaged or foreign files, pickles that run code",
        "rejected, not run",
        also=("training/checkpoint/test_save.py",),
    ),
]


class Attack:
    """An untrusted pickle: unpickling it runs code."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def write(directory: Path, state: dict[str, Any]) -> Path:
    """A checkpoint in the format that megatron-core's dist_checkpointing builds on."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(directory), planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    (directory / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"header": {"iteration": 3}}, directory / "common.pt")
    return directory


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path / "iter_0000003", {"weight": torch.ones(8, 4), "state": {"step": 3}, "nothing": None})


def test_a_checkpoint_passes(checkpoint: Path) -> None:
    inspect_checkpoint(checkpoint)


FOREIGN = b'{"sharded_backend": "zarr", "sharded_backend_version": 1}'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((name, None, f"not a complete checkpoint: {name} is missing") for name in ("metadata.json", "common.pt", ".metadata")),
        *((name, b"\x80\x04 no pickle", f"{name} is damaged") for name in (".metadata", "common.pt", "metadata.json")),
        ("metadata.json", FOREIGN, r"metadata\.json names a foreign format, .*'zarr'"),
        ("__0_0.distcp", b"short", r"__0_0\.distcp is missing or too short"),
    ],
)
def test_a_file_that_is_not_as_it_must_be_is_named(checkpoint: Path, name: str, content: bytes | None, message: str) -> None:
    assert (checkpoint / name).exists()
    (checkpoint / name).unlink() if content is None else (checkpoint / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(checkpoint)
    shutil.rmtree(checkpoint)
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        inspect_checkpoint(checkpoint)


def test_the_common_state_may_be_an_object_of_the_checkpoint(tmp_path: Path) -> None:
    """As megatron-core saves it from 0.19 on; then there is no common.pt."""
    state = {"weight": torch.ones(2), "common_state/shard_0_1": [{"header": {"iteration": 3}}]}
    directory = write(tmp_path / "iter_0000003", state)
    (directory / "common.pt").unlink()
    inspect_checkpoint(directory)


def test_a_megatron_core_that_cannot_read_the_newer_common_state_is_named(tmp_path: Path) -> None:
    common = {"header": {"iteration": 3}}
    directory = write(tmp_path / "iter_0000003", {"weight": torch.ones(2), "common_state/shard_0_1": [common]})
    (directory / "common.pt").unlink()
    if importlib.util.find_spec("megatron.core.dist_checkpointing.strategies.base") is None:  # went with 0.19
        assert load._load_common(directory) == common
        return
    with pytest.raises(CheckpointError, match=r"was saved by megatron-core 0\.19 or newer, .* load it with megatron-core 0\.19"):
        load._load_common(directory)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (".metadata", r"it contains posix\.mkdir"),
        ("common.pt", r"common\.pt is damaged or holds more than data"),
        ("object", r"\(object\) is damaged or holds more than data"),
        ("common_state/shard_0_1", r"\(common_state/shard_0_1\) is damaged or holds more than data"),
    ],
)
def test_code_is_refused_and_not_run(place: str, message: str, checkpoint: Path, tmp_path: Path) -> None:
    attack, directory = Attack(tmp_path / "ran"), checkpoint
    if place == ".metadata":
        (directory / place).write_bytes(pickle.dumps(attack))
    elif place == "common.pt":
        torch.save({"header": attack}, directory / place)
    else:
        directory = write(tmp_path / "iter_0000004", {"weight": torch.ones(2), place: [attack]})
    if place.startswith("common_state"):
        (directory / "common.pt").unlink()
    with pytest.raises(CheckpointError, match=message):
        inspect_checkpoint(directory)
    assert not attack.mark.exists()


def test_files_outside_of_the_checkpoint_are_not_read(checkpoint: Path, tmp_path: Path) -> None:
    (data,) = checkpoint.glob("*.distcp")
    shutil.copy(data, tmp_path / data.name)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = f"../{data.name}"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="lies outside the checkpoint"):
        inspect_checkpoint(checkpoint)


class ByGetattr:
    """Pickles as an attribute of something: how Python 3.11.2 pickles a member of an enum, on any Python."""

    def __init__(self, owner: Any, name: str) -> None:
        self.asked = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.asked


def test_an_enum_pickled_by_getattr_is_read_and_nothing_else_is() -> None:
    kind = type(torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT)

    def load(owner: Any, name: str) -> Any:
        return _MetadataUnpickler(io.BytesIO(pickle.dumps(ByGetattr(owner, name)))).load()

    assert load(kind, "TORCH_PRESERVE_FORMAT") is kind.TORCH_PRESERVE_FORMAT
    for owner, name in ((kind, "__class__"), (kind, "mro"), (torch.distributed.checkpoint.metadata.Metadata, "__init__")):
        with pytest.raises(CheckpointError, match=f"it contains '{name}'"):
            load(owner, name)
