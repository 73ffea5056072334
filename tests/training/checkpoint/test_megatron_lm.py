"""Checkpoints of Megatron-LM's loop, on one rank: what ours have for it, and how its are read.

`as_megatron_lm` writes what its loop writes, from our own state without what only ours has. Its real loop, both ways:
`tests/upstream`.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from megatron.core import dist_checkpointing

from megatron.zerobubble.errors import CheckpointError
from megatron.zerobubble.training.checkpoint import contents, load
from megatron.zerobubble.training.checkpoint.directory import TRACKER, iteration_directory
from megatron.zerobubble.training.checkpoint.load import RestoredProgress, load_checkpoint
from megatron.zerobubble.training.checkpoint.save import SaveStrategy, save_checkpoint
from megatron.zerobubble.training.step import TrainingState
from tests.support.hybrid import HAS_HYBRID_MODEL, WHY_NOT
from tests.support.training_states import train, training_state_of

pytestmark = [
    pytest.mark.usefixtures("world_of_one"),
    pytest.mark.claims(
        "Your own script",
        "a checkpoint as Megatron-LM's loop writes it, with dropout: continues; an optimizer state in buckets, another "
        "model: rejected",
        "works, bit for bit",
    ),
]

DROPOUT = ["--hidden-dropout", "0.1"]


def as_megatron_lm(training_state: TrainingState, folder: Path, **changes: Any) -> None:
    """Save iteration 2 as Megatron-LM's loop does; `changes` replace entries of the common state."""
    with training_state.on_host():
        state = contents.state_to_save(training_state, iteration=2, consumed_samples=16, run="a")
        del state["header"], state["rng"]
        directory = iteration_directory(folder, 2)
        directory.mkdir(parents=True)
        dist_checkpointing.save(state | changes, str(directory), SaveStrategy())
    (folder / TRACKER).write_text("2")


@pytest.mark.parametrize("flags", [[], ["--bf16", "--use-distributed-optimizer"]], ids=["plain", "distributed-bf16"])
@pytest.mark.sampled(0.4, group="whole jobs")
def test_its_checkpoint_continues_bit_for_bit(flags: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With dropout: the states of the generators are read, too. It has no manifest, which is logged."""
    with training_state_of(0, [*DROPOUT, *flags]) as training_state:
        train(training_state, first=1, last=2)
        as_megatron_lm(training_state, tmp_path)
        expected = train(training_state, first=3, last=4)
    with training_state_of(0, [*DROPOUT, *flags, "--load", str(tmp_path)]) as training_state:
        with caplog.at_level(logging.INFO, "megatron.zerobubble.training.checkpoint.verification"):
            assert load_checkpoint(training_state) == RestoredProgress(2, 16)
        assert train(training_state, first=3, last=4) == expected
    (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("checkpoint.verification")]
    assert line.endswith("has no manifest.json (saved by Megatron-LM or an older version): its files are not verified")


@pytest.mark.sampled(0.4, group="whole jobs")
def test_ours_has_what_its_loop_reads(tmp_path: Path) -> None:
    """Names and meaning are those that Megatron-LM's `load_checkpoint` looks up."""
    with training_state_of(0, ["--save", str(tmp_path), "--use-distributed-optimizer"]) as training_state:
        train(training_state, first=1, last=2)
        save_checkpoint(training_state, run="a", iteration=2, consumed_samples=16)
        expected = training_state.scheduler.state_dict()
    common = load._load_common(iteration_directory(tmp_path, 2))
    assert common["iteration"] == 2
    assert common["checkpoint_version"] == 3.0
    assert common["opt_param_scheduler"] == expected
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    flags = common["args"]
    assert isinstance(flags, Namespace)
    assert (flags.num_layers, flags.hidden_size, flags.num_attention_heads) == (8, 32, 4)
    assert (flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size, flags.world_size) == (1, 1, 1)
    assert (flags.consumed_train_samples, flags.skipped_train_samples, flags.no_save_rng) == (16, 0, False)


def load_changed(folder: Path, flags: list[str], **changes: Any) -> str:
    """The reason why a checkpoint with these changes is rejected."""
    with training_state_of(0, ["--use-distributed-optimizer"]) as training_state:
        train(training_state, first=1, last=1)
        as_megatron_lm(training_state, folder, **changes)
    with training_state_of(0, [*flags, "--load", str(folder)]) as training_state, pytest.raises(CheckpointError) as caught:
        load_checkpoint(training_state)
    return str(caught.value)


def test_an_optimizer_state_in_buckets_is_rejected(tmp_path: Path) -> None:
    in_buckets = {"distrib_optim_sharding_type": "dp_reshardable"}
    reason = load_changed(tmp_path, ["--use-distributed-optimizer"], content_metadata=in_buckets)
    assert "in buckets of another loop (dp_reshardable)" in reason
    assert "--dist-ckpt-optim-fully-reshardable" in reason
    assert "--no-load-optim" in reason
    with training_state_of(0, ["--load", str(tmp_path), "--no-load-optim"]) as training_state:
        assert load_checkpoint(training_state) == RestoredProgress(2, 16)


def test_another_model_is_rejected_by_its_flag(tmp_path: Path) -> None:
    flags = Namespace(num_layers=8, hidden_size=64)
    assert "was saved with --hidden-size 64, this run has 32" in load_changed(tmp_path, [], args=flags)


def test_a_checkpoint_without_flags_is_rejected(tmp_path: Path) -> None:
    assert "has format None" in load_changed(tmp_path, [], args=None)


@pytest.mark.skipif(not HAS_HYBRID_MODEL, reason=WHY_NOT)
def test_a_checkpoint_of_a_gpt_is_not_loaded_into_a_hybrid_model(tmp_path: Path) -> None:
    with training_state_of(0, ["--save", str(tmp_path), "--num-layers", "4"]) as training_state:
        train(training_state, first=1, last=2)
        save_checkpoint(training_state, run="a", iteration=2, consumed_samples=16)
    flags = ["--hybrid-layer-pattern", "*-*-", "--num-layers", "4", "--load", str(tmp_path)]
    refused = pytest.raises(CheckpointError, match=r"was saved with --hybrid-layer-pattern None, this run has \*-\*-")
    with training_state_of(0, flags) as training_state, refused:
        load_checkpoint(training_state)
