"""ms-swift's supervised fine-tuning on megatron-core (`megatron sft`), run by the ranks of a `RankPool`."""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import megatron.zerobubble
from megatron.zerobubble import MicrobatchLengths
from tests.frameworks.prepared import FOLDER
from tests.support.megatron_lm import loop_of_its_own

__all__ = ["NUM_STEPS", "train", "write_inputs"]

NUM_STEPS = 4
_FLAGS = (
    f"--model_type qwen2 --template qwen --split_dataset_ratio 0 --load_from_cache_file false --dataset_num_proc 1 "
    f"--dataloader_num_workers 0 --train_iters {NUM_STEPS} --global_batch_size 8 --micro_batch_size 2 --max_length 512 --lr 1e-3 "
    "--lr_warmup_fraction 0 --torch_dtype bfloat16 --pipeline_model_parallel_size 2 --finetune true --save_steps 100 "
    "--logging_steps 1 --attention_backend unfused --gradient_accumulation_fusion false --masked_softmax_fusion false "
    "--bias_dropout_fusion false --cross_entropy_loss_fusion false"
).split()
"""The last five: what a CPU cannot serve."""


def write_inputs(rank: int, folder: str) -> None:
    """Write a small Qwen2 with a tokenizer of letters, and 64 conversations of unequal lengths."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    if rank != 0:
        return
    words = ["<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", " ", "\n", *string.ascii_letters]
    letters = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=letters, **special).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=96, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    with (Path(folder) / "data.jsonl").open("w") as file:
        for number in range(64):
            said = [("user", "what then"[: 1 + number % 9]), ("assistant", "hello world"[: 3 + number % 8])]
            file.write(json.dumps({"messages": [{"role": role, "content": content} for role, content in said]}) + "\n")


def train(rank: int, folder: str, schedule: str | None = None, flags: str = "") -> tuple[str, list[Any], list[float]]:
    """Train on one of two ranks.

    Args:
        rank: of the pool.
        folder: of `write_inputs`.
        schedule: what is installed; None leaves megatron-core's own.
        flags: further ones of ms-swift.

    Returns:
        The schedule that ran; step -> sum of losses and number of tokens of each microbatch, on the last rank; step -> norm.
    """
    from swift.megatron.pipelines.train.sft import MegatronSft
    from swift.megatron.trainers import MegatronTrainer

    losses, norms = [], []
    train_step = MegatronTrainer.train_step

    def seen(trainer: Any, iterator: Any) -> Any:
        metrics, norm, is_successful = train_step(trainer, iterator)
        losses.append([{name: value.tolist() for name, value in each.items()} for each in metrics or ()])
        norms.append(float(norm))
        return metrics, norm, is_successful

    place = {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with (
        loop_of_its_own(**place, CUDA_DEVICE_MAX_CONNECTIONS="1"),
        mock.patch.object(MegatronTrainer, "train_step", seen),
        mock.patch.object(torch.distributed, "destroy_process_group"),  # at its end; the pool needs the group
        mock.patch.object(sys, "path", [*sys.path, str(FOLDER)]),  # a rank of a pool has the path of pytest; it asks for versions
    ):
        if schedule is not None:
            megatron.zerobubble.install(schedule=schedule, lengths=MicrobatchLengths("thd"))
        data = ["--model", folder, "--dataset", f"{folder}/data.jsonl", "--output_dir", f"{folder}/saved"]
        MegatronSft([*data, *_FLAGS, *flags.split()]).run()
        status = megatron.zerobubble.status()
    return "stock" if status is None else status.schedule, losses, norms
