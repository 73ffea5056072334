"""Checkpoints that were damaged after they were saved: no rank loads them, and every rank names the same file."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
import xxhash

from megatron.zerobubble.cli.main import main
from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint.directory import TRACKER
from megatron.zerobubble.training.checkpoint.load import load_checkpoint
from megatron.zerobubble.training.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    damaged_content,
    damaged_names,
    first_damage,
    record_of,
)
from megatron.zerobubble.training.checkpoint.save import save_checkpoint
from tests.support.ranks import RankPool
from tests.support.training_states import train, training_state_of

V4 = ["--pipeline-model-parallel-size", "4", "--zero-bubble-v-schedule"]
P2D2 = ["--pipeline-model-parallel-size", "2", "--use-distributed-optimizer"]
TENSOR = "decoder.layers.mlp.linear_fc1.weight"


def save(rank: int, folder: str) -> None:
    """Iterations 1 and 2, and iteration 1 of another job with other weights."""
    for job, iterations in (("a", (1, 2)), ("b", (1,))):
        for iteration in iterations:
            with training_state_of(rank, [*V4, "--save", f"{folder}/{job}"]) as training_state:
                train(training_state, first=5 if job == "b" else iteration, last=5 if job == "b" else iteration)
                save_checkpoint(training_state, run=f"{job}{iteration}", iteration=iteration, consumed_samples=8 * iteration)


@pytest.fixture(scope="module")
def saved(four_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the --save directories `a` and `b`."""
    folder = tmp_path_factory.mktemp("saved")
    four_ranks.run(save, str(folder))
    return folder


def overwritten(directory: Path, _: Path) -> str:
    """Bytes in the middle of a tensor become others, in the way of a write that went astray."""
    metadata = dcp.FileSystemReader(directory).read_metadata()
    place = next(place for index, place in metadata.storage_data.items() if index.fqn == TENSOR)
    _change(directory / place.relative_path, place.offset + place.length // 2, bytes(range(1, 17)))
    return f"{place.relative_path} is damaged or of another run: its content is not what was saved"


def flipped(directory: Path, _: Path) -> str:
    (file, *_) = sorted(directory.glob("*.distcp"))
    at = file.stat().st_size // 2
    _change(file, at, bytes([file.read_bytes()[at] ^ 16]))
    return f"{file.name} is damaged or of another run: its content is not what was saved"


def of_another_run(directory: Path, other: Path) -> str:
    file = next(
        path
        for path in sorted(directory.glob("*.distcp"))
        if path.stat().st_size == (other / path.name).stat().st_size and path.read_bytes() != (other / path.name).read_bytes()
    )
    shutil.copy(other / file.name, file)
    return f"{file.name} is damaged or of another run: its content is not what was saved"


def missing(directory: Path, _: Path) -> str:
    (directory / "__3_0.distcp").unlink()
    return "__3_0.distcp is missing"


def additional(directory: Path, _: Path) -> str:
    shutil.copy(directory / "__3_0.distcp", directory / "__4_0.distcp")
    return "__4_0.distcp was not saved with this checkpoint"


def without_manifest(directory: Path, _: Path) -> str:
    (directory / MANIFEST).unlink()
    return f"{MANIFEST} is missing"


def with_manifest_of_another_run(directory: Path, _: Path) -> str:
    """Its checksums are right."""
    files = {path.name: record_of(path) for path in directory.iterdir() if path.name != MANIFEST}
    Manifest(run="another", iteration=1, files=files).write(directory)
    return f"{MANIFEST} is of run another, the checkpoint of run "


DAMAGE = [overwritten, flipped, of_another_run, missing, additional, without_manifest, with_manifest_of_another_run]


def _change(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


def load(rank: int, folders: list[str], flags: list[str]) -> list[str | None]:
    """Per folder the reason why it was rejected on this rank, or None."""
    reasons: list[str | None] = []
    with training_state_of(rank, [*flags, "--load", folders[0]]) as training_state:
        settings = training_state.settings
        for folder in folders:
            checkpoint = replace(settings.checkpoint, load=folder)
            try:
                load_checkpoint(replace(training_state, settings=replace(settings, checkpoint=checkpoint)))
                reasons.append(None)
            except CheckpointError as error:
                reasons.append(str(error))
    return reasons


@pytest.mark.claims(
    "Long runs",
    "checkpoints with overwritten tensor bytes, a flipped bit, a data file of another run, one missing or too many, without "
    "their manifest; saved by ZBV on 4 ranks, loaded by 2 x 2",
    "refused on every rank by the file's name, before anything is loaded",
)
def test_a_damaged_checkpoint_is_refused_by_file_on_every_rank(saved: Path, four_ranks: RankPool, tmp_path: Path) -> None:
    """Saved by ZBV on four ranks, in the background; loaded by two pipeline ranks of two replicas."""
    folders = [str(saved / "a")]
    expected = []
    for damage in DAMAGE:
        folder = tmp_path / damage.__name__
        shutil.copytree(saved / "a", folder)
        (folder / "latest_checkpointed_iteration.txt").write_text("1")
        folders.append(str(folder))
        expected.append(damage(folder / "iter_0000001", saved / "b" / "iter_0000001"))
    everywhere = four_ranks.run(load, folders, [*P2D2, "--no-load-optim"])
    assert everywhere[0][0] is None, "the one that was not damaged"
    for text, reason in zip(expected, everywhere[0][1:], strict=True):
        assert reason is not None, text
        assert text in reason
        assert "give --no-verify-checkpoint to load this one as it is" in reason
        assert "\n" not in reason
    assert all(each == everywhere[0] for each in everywhere)
    skipped = four_ranks.run(load, [folders[1 + DAMAGE.index(overwritten)]], [*P2D2, "--no-load-optim", "--no-verify-checkpoint"])
    assert skipped == [[None]] * 4, "it loads, as it did without a manifest"


@pytest.mark.claims(
    "Long runs",
    "`zerobubble checkpoint verify`: intact, damaged, without a manifest, damaged tracker and manifest",
    "works, one line and exit code 0, 1 or 2",
    also=("training/checkpoint/test_verification.py",),
)
@pytest.mark.parametrize("damage", [None, flipped, missing])
@pytest.mark.parametrize("names", ["folder", "checkpoint", "step"])
def test_the_command_says_in_one_line_what_it_found(
    damage: Callable[[Path, Path], str] | None, names: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "iter_0000002"
    shutil.copytree(saved / "a" / "iter_0000002", directory)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    expected = "files are as saved (0.00 GB, run " if damage is None else damage(directory, saved / "b" / "iter_0000001")
    asked = {"folder": [str(tmp_path)], "checkpoint": [str(directory)], "step": [str(tmp_path), "--ckpt-step", "2"]}
    assert main(["checkpoint", "verify", *asked[names]]) == (0 if damage is None else 1)
    out, err = capsys.readouterr()
    assert (out if damage is None else err).count("\n") == 1
    assert not (err if damage is None else out)
    assert expected in (out if damage is None else err)
    assert str(directory) in (out if damage is None else err)


@pytest.mark.parametrize(
    ("files", "flags", "code", "expected"),
    [
        ({}, [], 2, "latest_checkpointed_iteration.txt is missing"),
        ({}, ["--ckpt-step", "7"], 2, "iter_0000007 is missing"),
        ({"latest_checkpointed_iteration.txt": "1" * 5000}, [], 1, "latest_checkpointed_iteration.txt is damaged: it holds '111"),
        ({"metadata.json": "{}"}, [], 2, f"has no {MANIFEST} (saved by Megatron-LM or an older version): it cannot be verified"),
        ({MANIFEST: "{}"}, [], 1, f"{MANIFEST} is damaged: it is not a manifest"),
    ],
)
def test_what_the_command_cannot_verify_is_one_line(
    files: dict[str, str], flags: list[str], code: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert main(["checkpoint", "verify", str(tmp_path), *flags]) == code
    out, err = capsys.readouterr()
    assert not out
    assert expected in err
    assert err.count("\n") == 1
    assert len(err) < len(str(tmp_path)) + 300


SIZES = {"__0_0.distcp": 3500, "__1_0.distcp": 2000, "common.pt": 70, "empty": 0}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory of files of which one is empty."""
    for name, size in SIZES.items():
        (tmp_path / name).write_bytes(hashlib.shake_128(name.encode()).digest(size))
    Manifest(run="run1", iteration=3, files={name: record_of(tmp_path / name) for name in SIZES}).write(tmp_path)
    return tmp_path


def damage_of(directory: Path) -> dict[str, str]:
    manifest = Manifest.read(directory)
    assert manifest is not None
    return damaged_names(directory, manifest) or damaged_content(directory, manifest.files)


@pytest.mark.parametrize("name", [name for name, size in SIZES.items() if size])
def test_any_flipped_bit_is_found(name: str, checkpoint: Path) -> None:
    (checkpoint / "README").write_text("notes beside the data are no damage")
    assert damage_of(checkpoint) == {}
    intact = (checkpoint / name).read_bytes()
    for at in {0, len(intact) // 2, len(intact) - 1}:
        for bit in (0, 7):
            damaged = bytearray(intact)
            damaged[at] ^= 1 << bit
            (checkpoint / name).write_bytes(damaged)
            assert damage_of(checkpoint) == {name: "is damaged or of another run: its content is not what was saved"}


def longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"x")


def shorter(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def circle(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def link(file: Path) -> None:
    elsewhere = file.parents[1] / f"{file.parent.name} elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (longer, "__1_0.distcp has 2,001 bytes instead of 2,000"),
        (shorter, "__1_0.distcp has 1,999 bytes instead of 2,000"),
        (folder, "__1_0.distcp is not a regular file"),
        (fifo, "__1_0.distcp is not a regular file"),
        (circle, "__1_0.distcp is missing"),
        (link, "__1_0.distcp is a link out of the checkpoint"),
    ],
)
def test_files_that_do_not_belong_together_are_named(change: Callable[[Path], None], expected: str, checkpoint: Path) -> None:
    change(checkpoint / "__1_0.distcp")
    assert first_damage(damage_of(checkpoint)) == expected


def test_a_flipped_bit_in_the_manifest_is_found(checkpoint: Path) -> None:
    """Each byte matters, but for white space between values."""
    path = checkpoint / MANIFEST
    intact = path.read_bytes()
    for at in range(0, len(intact), 7):
        if intact[at : at + 1].isspace():
            continue
        damaged = bytearray(intact)
        damaged[at] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"{MANIFEST} is damaged"):
            Manifest.read(checkpoint)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"7", b"\xff", b"[" * 100_000, b'{"xxh3_128": "x"}', b"9" * 5000])
def test_other_content_of_the_manifest_is_one_line(content: bytes, checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{MANIFEST} is damaged") as caught:
        Manifest.read(checkpoint)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"format": "other/2"}, "has format 'other/2'; this version reads"),
        ({"files": {"a": {"bytes": "many", "xxh3_128": "x"}}}, "is damaged: it is not a manifest"),
        ({"files": {"a": {"bytes": 1}}}, "is damaged: it is not a manifest"),
        ({"files": {"../a": {"bytes": 1, "xxh3_128": "x"}}}, "is damaged: it is not a manifest"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_one_line(change: dict[str, object], expected: str, checkpoint: Path) -> None:
    """Its own checksum is right."""
    path = checkpoint / MANIFEST
    named = {name: value for name, value in json.loads(path.read_text()).items() if name != "xxh3_128"} | change
    own = xxhash.xxh3_128(json.dumps(named, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps(named | {"xxh3_128": own}))
    with pytest.raises(CheckpointError, match=expected):
        Manifest.read(checkpoint)


@pytest.mark.parametrize("name", [TRACKER, MANIFEST])
@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (None, "cannot be read: it is not a regular file"),
        ("/dev/zero", "cannot be read: it is not a regular file"),
        ("itself", f"cannot be read: {os.strerror(errno.ELOOP)}"),
        ("sparse", "cannot be read: it has more than "),
    ],
)
def test_fifos_and_links_are_one_line(
    target: str | None, expected: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the files that are read before anything is compared; none hangs, or fills the memory."""
    directory = tmp_path / "iter_0000002"
    directory.mkdir()
    (tmp_path / TRACKER).write_text("2")
    file = tmp_path / name if name == TRACKER else directory / name
    file.unlink(missing_ok=True)
    if target is None:
        os.mkfifo(file)
    else:
        file.symlink_to(name if target == "itself" else target if target.startswith("/") else tmp_path / target)
    with (tmp_path / "sparse").open("wb") as stream:
        stream.truncate(2**40)
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert f"{file} {expected}" in err
    assert err.count("\n") == 1
