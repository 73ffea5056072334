"""The GPT that the reference trainer trains: model provider, forward step, loss function.

Heavy imports are inside the functions, so that flags are checked before torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from megatron.zerobubble.training.step import ForwardStep, ModelSetup

__all__ = ["forward_step_provider", "loss_function", "model_provider"]


def model_provider(setup: ModelSetup, pre_process: bool, post_process: bool, vp_stage: int | None) -> Any:
    """Build one stage of the model: a megatron-core `GPTModel`.

    Args:
        setup: the settings and megatron-core's configuration.
        pre_process: whether the stage embeds tokens.
        post_process: whether the stage computes the loss.
        vp_stage: index of the stage among the rank's model chunks; None if the rank has one.
    """
    from megatron.core.models.gpt import GPTModel

    from megatron.zerobubble.training.models.layer_specs import mtp_layers, stage_layers

    model = setup.settings.model
    return GPTModel(
        config=setup.config,
        transformer_layer_spec=stage_layers(setup.config, vp_stage=vp_stage),
        vocab_size=setup.padded_vocab_size,
        max_sequence_length=model.num_positions,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_base=model.rotary_base,
        mtp_block_spec=mtp_layers(setup.config, vp_stage=vp_stage),
        vp_stage=vp_stage,
    )


def forward_step_provider(setup: ModelSetup) -> ForwardStep:
    """Make the function that runs one microbatch through one model chunk, as megatron-core's schedules call it.

    Args:
        setup: the settings and the device of this rank.

    Returns:
        (data iterator, model chunk) -> (output, loss function).
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model

    from megatron.zerobubble.mcore.attention.sequence_parts import SequenceParts
    from megatron.zerobubble.training.data.samples import next_batch

    context = parallel_state.get_context_parallel_group()
    parts = SequenceParts(rank=context.rank(), size=context.size())
    # With the mean over a microbatch ranks share its loss by their numbers of tokens, of which loss masks can leave any.
    shared = context if context.size() > 1 and not setup.settings.optim.calculate_per_token_loss else None

    def forward_step(data_iterator: Any, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        stage = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
        batch = next_batch(
            data_iterator,
            device=setup.device,
            embeds=stage.pre_process or stage.mtp_process,
            is_last_stage=stage.post_process,
            parts=parts,
        )
        output = chunk(batch.tokens, batch.position_ids, None, labels=batch.labels, loss_mask=batch.loss_mask)
        return output, partial(loss_function, batch.loss_mask, shared_over=shared)

    return forward_step


def loss_function(
    loss_mask: torch.Tensor | None, losses: torch.Tensor, *, shared_over: torch.distributed.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one microbatch of b samples of s tokens.

    Args:
        loss_mask: [b, s], float32, 1 for tokens whose loss counts, else 0.
        losses: [b, s], cross entropy per token in nats.
        shared_over: the context-parallel group, all ranks of which must call this: s is then this rank's share of the sequence.
            None with --calculate-per-token-loss, which adds up losses and tokens of all ranks.

    Returns:
        The sum of losses, the number of tokens, and both stacked under `step.LOSS` for the log. The schedule averages the first
        two over the microbatch, or with --calculate-per-token-loss over the global batch. With `shared_over` the first is times
        the number of its ranks and the second the sum over them: the quotients of the ranks, averaged as DDP averages gradients,
        are the mean over all tokens.
    """
    import torch

    from megatron.zerobubble.training.step import LOSS

    assert loss_mask is not None, "only the last stage computes the loss, and it reads samples"
    total = (losses.float() * loss_mask).sum()
    num_tokens = loss_mask.sum().to(torch.int)
    report = {LOSS: torch.stack([total.detach(), num_tokens.to(total.dtype)])}
    if shared_over is not None:
        torch.distributed.all_reduce(num_tokens, group=shared_over)
        total = total * shared_over.size()
    return total, num_tokens, report
