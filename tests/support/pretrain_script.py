"""A training script around Megatron-LM's own `pretrain()`, as its users write them: not a line of it knows this package.

It asks by pipeline rank which stage it is on, names the embedding ranks itself, and makes a TransformerConfig per microbatch, as
Megatron-LM's pretrain_gpt.py does. Its weights depend on the layer's number alone, so that placements are comparable.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import arguments, get_args, training


class Sequences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Arithmetic sequences of tokens: something to learn."""

    def __init__(self, size: int, length: int, vocabulary: int) -> None:
        self.size, self.length, self.vocabulary = size, length, vocabulary

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = (7 * index + 3 * torch.arange(self.length + 1)).remainder(self.vocabulary)
        mask = torch.ones(self.length)
        mask[: index % 5] = 0
        return {"tokens": text[:-1].contiguous(), "labels": text[1:].contiguous(), "loss_mask": mask}


def datasets(sizes: list[int], vp_stage: int | None = None) -> tuple[Any, ...]:
    """The datasets of the ranks that read data."""
    by_chunk = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    is_end = parallel_state.is_pipeline_first_stage(**by_chunk) or parallel_state.is_pipeline_last_stage(**by_chunk)
    if not is_end or parallel_state.get_tensor_model_parallel_rank() != 0:
        return None, None, None
    args = get_args()
    return tuple(Sequences(size or 1, args.seq_length, args.vocab_size) for size in sizes)


datasets.is_distributed = True  # type: ignore[attr-defined]


def model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    args = get_args()
    config = config or arguments.core_transformer_config_from_args(args)
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
        position_embedding_type=args.position_embedding_type,
    )
    initialize_weights(chunk)
    return chunk


@torch.no_grad()
def initialize_weights(chunk: GPTModel) -> None:
    """Initialize each matrix by the number of its layer, and a tied output layer as the embedding."""
    for name, weight in chunk.named_parameters():
        words = name.split(".")
        if words[:2] == ["decoder", "layers"]:
            words[2] = str(chunk.decoder.layers[int(words[2])].layer_number)
        elif words[0] == "output_layer" and chunk.share_embeddings_and_output_weights:
            words = ["embedding", "word_embeddings", "weight"]
        if weight.dim() > 1:
            digest = hashlib.sha256(".".join(words).encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
            weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))


def batch(data: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None) -> dict[str, torch.Tensor | None]:
    """What this stage needs of the next microbatch. The first tensor-parallel rank reads it.

    With a layout the question is about a chunk, as in Megatron-LM's pretrain_gpt.py, otherwise about a rank, as in older scripts.
    """
    args = get_args()
    about: dict[str, Any] = (
        {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage} if args.pipeline_model_parallel_layout else {}
    )
    found: dict[str, torch.Tensor | None] = {"tokens": None, "labels": None, "loss_mask": None}
    names = []
    if parallel_state.is_pipeline_first_stage(**about):
        names = ["tokens"]
    elif parallel_state.is_pipeline_last_stage(**about):
        names = ["labels", "loss_mask"]
    if not names:
        return found
    is_reader = parallel_state.get_tensor_model_parallel_rank() == 0
    assert data is not None or not is_reader, "the datasets and the batches disagree about which stages read data"
    read = next(data) if data is not None and is_reader else {}
    shape = (args.micro_batch_size, args.seq_length)
    for name in names:
        kind = torch.float32 if name == "loss_mask" else torch.int64
        found[name] = read[name].cuda() if is_reader else torch.empty(shape, dtype=kind, device=torch.cuda.current_device())
        source = parallel_state.get_tensor_model_parallel_src_rank()
        dist.broadcast(found[name], source, group=parallel_state.get_tensor_model_parallel_group())
    return found


def loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The sum over tokens, their number, and both for the log."""
    total = torch.sum(output.view(-1).float() * mask.view(-1))
    count = mask.sum().detach().to(torch.int)
    get_rerun_state_machine().validate_result(result=total, rejection_func=torch.isnan, message="NaN", tolerance=0.0, fatal=True)
    return total, count, {"lm loss": torch.cat([total.detach().view(1), count.view(1)])}


def forward_step(data: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
    args = get_args()
    arguments.core_transformer_config_from_args(args)
    given = batch(data, get_attr_wrapped_model(chunk, "vp_stage"))
    positions = torch.arange(args.seq_length, device=torch.cuda.current_device()).expand(args.micro_batch_size, -1)
    return chunk(given["tokens"], positions, None, labels=given["labels"]), partial(loss, given["loss_mask"])


def embedding_ranks(pipeline: list[int]) -> list[int]:
    """The ends of the pipeline, if they share a weight."""
    return [pipeline[0]] if get_args().untie_embeddings_and_output_weights else sorted({pipeline[0], pipeline[-1]})


def main() -> None:
    if "cfg_container" in inspect.signature(training.pretrain).parameters:  # from 0.18 on
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        args = arguments.parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
        training.pretrain(
            pretrain_cfg_container_from_args(args),
            datasets,
            ModelType.encoder_or_decoder,
            forward_step,
            model_provider=model,
            get_embedding_ranks=embedding_ranks,
        )
    else:
        training.pretrain(
            datasets,
            model,
            ModelType.encoder_or_decoder,
            forward_step,
            args_defaults={"tokenizer_type": "NullTokenizer"},
            get_embedding_ranks=embedding_ranks,
        )


if __name__ == "__main__":
    main()
