"""--dry-run: the report, and the memory that it predicts."""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.compat import destroy_model_parallel
from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties
from megatron.zerobubble.training.arguments import settings_from_argv
from megatron.zerobubble.training.config.settings import Settings
from megatron.zerobubble.training.estimate.memory_estimate import layer_activation_bytes, stage_weights, state_bytes_per_weight
from megatron.zerobubble.training.initialize import set_up_model_parallel
from tests.support.datasets import random_documents, write_documents

with quiet_third_parties():
    from megatron.zerobubble.training.entry import run
    from megatron.zerobubble.training.models.gpt import forward_step_provider, model_provider
    from megatron.zerobubble.training.models.mcore_config import transformer_config
    from megatron.zerobubble.training.step import ModelSetup

pytestmark = pytest.mark.claims(
    "Long runs",
    "predicted activations against what autograd keeps, local layers in fp32 on the CPU, and against the formulas of arXiv "
    "2205.05198",
    "within 40 % (the CPU's MLP keeps more), equal",
)

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --lr 1e-3 --mock-data "
    "--train-iters 10 "
)
P4 = "--pipeline-model-parallel-size 4 --global-batch-size 8 "


def settings(flags: str = "", *, world_size: int = 1) -> Settings:
    return settings_from_argv((MODEL + flags).split(), world_size=world_size)


def test_documents_have_at_most_the_flops_of_whole_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = write_documents(tmp_path / "some", random_documents([5, 9, 70]))
    for data, text in (("--mock-data", r": \d"), (f"--data-path {documents} --split 1,1,0 --variable-seq-lengths", ": at most ")):
        argv = f"{MODEL.replace('--mock-data', data)} {P4} --calculate-per-token-loss --dry-run".split()
        run(model_provider, forward_step_provider, argv=argv)
        assert re.search(f"^FLOPs per iteration{text}", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "plan"),
    [
        ("", "1f1b: 4 pipeline ranks (PP), 8 microbatches per iteration, 1 stage(s) per rank (linear)"),
        ("--num-virtual-stages-per-pipeline-rank 2 ", "interleaved-1f1b: 4 pipeline ranks (PP), 8 microbatches"),
        ("--zero-bubble-v-schedule ", "zbv: 4 pipeline ranks (PP), 8 microbatches per iteration, 2 stage(s) per rank (V)"),
        ("--zero-bubble-schedule auto ", "schedule auto: the order that is profiled; the run then chooses for its own times"),
    ],
)
def test_a_process_of_its_own_prints_the_report(flags: str, plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a process group; the ranks are those of one data-parallel replica."""
    argv = (MODEL + P4 + flags + "--dry-run --swiglu").split()
    run(model_provider, forward_step_provider, argv=argv)
    report = capsys.readouterr().out
    for part in (
        plan,
        "* --swiglu given\n",
        "  --bf16 not given\n",
        "* --pipeline-model-parallel-size 4\n",
        "rank 3  ",
        "bubble ",
        "stage pipeline rank",
        "job: 4 ranks = 4 pipeline x 1 tensor x 1 context x 1 data; 8 microbatches of 1 x 64 tokens, 10 iterations\n",
        "dry run: the flags are valid; nothing was started\n",
    ):
        assert part in report, report
    assert not torch.distributed.is_initialized()


def test_the_number_of_ranks_of_a_dry_run() -> None:
    assert settings(P4 + "--dry-run").world_size == 4
    assert settings(P4 + "--dry-run --dry-run-world-size 8").data_parallel_size == 2
    assert settings(P4 + "--dry-run", world_size=8).world_size == 8, "WORLD_SIZE"
    with pytest.raises(ConfigError, match=r"the job has 6 rank\(s\), which is not divisible by"):
        settings(P4 + "--dry-run --dry-run-world-size 6")


def test_the_weights_of_the_stages_are_those_of_the_model() -> None:
    """Normalization layers are left out."""
    flags = "--num-layers 3 --num-experts 4 --moe-layer-freq [0,1,1] --position-embedding-type rope --disable-bias-linear"
    model, _ = _built(flags)
    (counted,) = stage_weights(settings(flags), vocab_size=256)
    norms = sum(parameter.numel() for name, parameter in model.named_parameters() if "norm" in name)
    assert counted == sum(parameter.numel() for parameter in model.parameters()) - norms


@pytest.mark.parametrize(
    ("flags", "bytes_per_weight"),
    [
        ("", 4 + 4 + 8),
        ("--bf16", 2 + 4 + 4 + 8),
        ("--bf16 --grad-reduce-in-bf16 --optimizer sgd", 2 + 2 + 4 + 4),
        ("--bf16 --use-distributed-optimizer", 2 + 4 + 12 / 4),
    ],
)
def test_bytes_of_a_weight_with_its_optimizer_state(flags: str, bytes_per_weight: float) -> None:
    assert state_bytes_per_weight(settings(flags, world_size=4)) == bytes_per_weight


@pytest.mark.parametrize(
    ("flags", "per_token"),
    [
        ("--attention-backend local", 34 * 64 + 5 * 4 * 64),  # arXiv 2205.05198, formula 1 over s * b
        ("--attention-backend flash", 34 * 64),
        ("--attention-backend local --recompute-granularity selective", 34 * 64),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 2 * 64),
    ],
)
def test_activations_of_a_layer_are_those_of_the_published_formula(flags: str, per_token: float) -> None:
    wanted = settings(f"--bf16 {flags}")
    assert sum(layer_activation_bytes(wanted, kind) for kind in "*-") == 64 * per_token


def test_activations_with_tensor_and_sequence_parallelism() -> None:
    """Formulas 2 and 4 of the same paper: 10 + 24/t without, and 34/t with sequence parallelism, times s b h."""
    base = "--bf16 --attention-backend flash --tensor-model-parallel-size 2 "
    for flags, per_token in ((base, (10 + 24 / 2) * 64), (base + "--sequence-parallel", 34 / 2 * 64)):
        wanted = settings(flags, world_size=2)
        assert sum(layer_activation_bytes(wanted, kind) for kind in "*-") == 64 * per_token


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("flags", ["", "--swiglu --disable-bias-linear --group-query-attention --num-query-groups 2"])
def test_predicted_activations_are_near_what_a_layer_keeps(flags: str) -> None:
    """What autograd saves in fp32 on the CPU, without weights, of 6 layers less that of 2. The CPU's attention keeps more than a
    fused kernel does, and the unfused activations of an MLP keep their intermediate results."""
    sizes = []
    for layers in (6, 2):
        _, saved = _built(f"--num-layers {layers} --hidden-dropout 0 --attention-dropout 0 {flags}", runs=True)
        sizes.append(saved)
    wanted = settings(f"--hidden-dropout 0 --attention-dropout 0 {flags}")
    predicted = sum(layer_activation_bytes(wanted, kind) for kind in "*-")
    assert 0.6 < predicted / ((sizes[0] - sizes[1]) / 4) < 1.1


def _built(flags: str, *, runs: bool = False) -> tuple[torch.nn.Module, int]:
    """The whole model on this rank, and the bytes that its forward pass saves besides parameters."""
    wanted = settings(flags)
    parameters: set[int] = set()
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    is_alone = not torch.distributed.is_initialized()
    if is_alone:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with (
        mock.patch.dict(os.environ),
        HostDevice() as host,
        host.on_host(),
    ):
        set_up_model_parallel(wanted)
        try:
            config = transformer_config(wanted, on_gpu=False, layout=None)
            setup = ModelSetup(settings=wanted, config=config, padded_vocab_size=256, device=torch.device("cpu"))
            model = model_provider(setup, True, True, None)
            parameters.update(parameter.untyped_storage().data_ptr() for parameter in model.parameters())
            if runs:
                tokens = torch.zeros(1, wanted.model.seq_length, dtype=torch.int64)
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                    loss = model(tokens, tokens, None, labels=tokens)
                assert loss.requires_grad
        finally:
            destroy_model_parallel()
            if is_alone:
                torch.distributed.destroy_process_group()
    return model, sum(saved.values())
