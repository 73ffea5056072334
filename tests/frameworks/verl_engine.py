"""verl's own Megatron engine, as its workers drive it, run by the ranks of a `RankPool`: a few updates and an inference.

Its batches are what its trainers give to it: sequences of unequal lengths as nested tensors, which the engine packs into rows.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import megatron.zerobubble
from megatron.zerobubble import MicrobatchLengths
from tests.frameworks.bridge import WITHOUT_CUDA
from tests.support.megatron_lm import loop_of_its_own

__all__ = ["Seen", "train", "write_model"]

VOCABULARY = 96
NUM_STEPS = 3
_OPTIONS = {name.removeprefix("model."): value for name, value in WITHOUT_CUDA.items() if name.startswith("model.")}
"""Of the model's configuration: what a CPU cannot serve."""


@dataclass(frozen=True)
class Seen:
    """What one rank had from the engine: results on the last pipeline rank only."""

    log_probs: list[list[float]]
    """Of each sequence, by `infer_batch`."""
    losses: list[list[float]]
    """Step -> of its microbatches."""
    entropies: list[list[list[float]]]
    """Step -> of each sequence."""
    norms: list[float]
    """Step -> of the gradients; where tensor-parallel ranks share a result, on the first."""
    weights: dict[str, torch.Tensor]
    """After the last step, by their names on the hub, as verl sends them to inference; on every rank."""
    schedule: str
    """The schedule that ran."""


def write_model(rank: int, folder: str) -> None:
    """Write a small Llama into a folder, as users download one from Hugging Face's hub."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if rank == 0:
        torch.manual_seed(0)
        sizes = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=64, **sizes)
        LlamaForCausalLM(config).save_pretrained(folder)


def train(rank: int, folder: str, engine: Mapping[str, Any], schedule: str | None = None, lengths: Any = "nested") -> Seen:
    """Infer once and train `NUM_STEPS` times on one rank.

    Args:
        rank: of the pool.
        folder: of the model.
        engine: fields of verl's configuration of the engine.
        schedule: what is installed; None leaves megatron-core's own.
        lengths: how `install` finds the lengths of microbatches.
    """
    with loop_of_its_own(LOCAL_RANK=str(rank), CUDA_DEVICE_MAX_CONNECTIONS="1"):
        warnings.simplefilter("ignore")
        if schedule is not None:
            megatron.zerobubble.install(schedule=schedule, lengths=MicrobatchLengths(lengths))
        made = _engine(folder, engine)
        seed = 100 * made.get_data_parallel_rank()
        with made.eval_mode():
            inferred = made.infer_batch(_batch(seed), None)
        with made.train_mode():
            results = [made.train_batch(_batch(seed + step), _loss) for step in range(1, 1 + NUM_STEPS)]
        exported, _ = made.get_per_tensor_param()
        weights = {name: weight.float() for name, weight in exported}
        status = megatron.zerobubble.status()
    return Seen(
        log_probs=_rows(inferred, "log_probs"),
        losses=[result["loss"] for result in results if result],
        entropies=[_rows(result, "entropy") for result in results],
        norms=[float(result["metrics"]["grad_norm"]) for result in results if "grad_norm" in result.get("metrics", ())],
        weights=weights,
        schedule="stock" if status is None else status.schedule,
    )


def _rows(result: Mapping[str, Any], name: str) -> list[list[float]]:
    return [row.tolist() for row in result["model_output"][name].unbind()] if "model_output" in result else []


def _engine(folder: str, fields: Mapping[str, Any]) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    model = HFModelConfig(path=folder, load_tokenizer=False)
    model.tokenizer = types.SimpleNamespace(pad_token_id=0)
    config = McoreEngineConfig(
        pipeline_model_parallel_size=2,
        dtype="bfloat16",
        override_transformer_config={"attention_backend": "unfused", **_OPTIONS},
        **fields,
    )
    optimizer = McoreOptimizerConfig(lr=1e-2, total_training_steps=10, lr_decay_steps=10)
    engine = MegatronEngineWithLMHead(model, config, optimizer, CheckpointConfig())
    engine.initialize()
    return engine


def _batch(seed: int, num_sequences: int = 8) -> Any:
    """Sequences of 5 to 14 tokens, in microbatches of two; the first two tokens of each are its prompt."""
    from verl.utils import tensordict_utils

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 15, (num_sequences,), generator=generator).tolist()
    tokens = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]
    masks = [torch.cat((torch.zeros(2), torch.ones(length - 2))) for length in lengths]
    nested = {
        name: torch.nested.nested_tensor(each, layout=torch.jagged)
        for name, each in (("input_ids", tokens), ("loss_mask", masks))
    }
    batch = tensordict_utils.get_tensordict(nested, {})
    tensordict_utils.assign_non_tensor(
        batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, temperature=1.0, calculate_entropy=True
    )
    batch["temperature"] = torch.ones(num_sequences)
    return batch


def _loss(model_output: Mapping[str, Any], data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, float]]:
    loss = -(model_output["log_probs"].values() * data["loss_mask"].values()).sum() / data["batch_num_tokens"]
    return loss, {"nll": loss.detach().item()}
