"""megatron-core's schedule plan leaves out the final norm behind a dense last layer. Needs torch and megatron-core 0.19 only.

    python upstream_schedule_plan.py

One process. Without a GPU, streams, events and the random state of CUDA are stand-ins that do nothing. Ends with 1 if the loss of
`GPTModel.build_schedule_plan` differs from the loss of `GPTModel.forward`, for one of the two models.
"""

import contextlib
import importlib.util
import sys
from unittest import mock

import torch
import torch.distributed as dist


class Inert:
    """Stands in for a CUDA stream, an event or a module: every call and every attribute does nothing."""

    def __init__(self, *_, **__):
        pass

    def __call__(self, *_, **__):
        return self

    def __getattr__(self, name):
        return Inert()


def without_cuda():
    """What megatron-core asks CUDA for while it builds and runs these models; its kernels in triton, which they do not use."""
    if importlib.util.find_spec("triton") is None:
        name = "megatron.core.transformer.moe.ops.paged_stash"
        sys.modules[name] = mock.MagicMock(__file__=name)
    for name in ("Event", "Stream", "current_stream", "manual_seed", "synchronize"):
        setattr(torch.cuda, name, Inert())
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.cuda.current_device = lambda: "cpu"
    torch.Tensor.record_stream = lambda *_: None


def losses(dense_layers):
    """For two layers (1: dense, 0: experts) the losses of `forward` and of the plan, and how often that ran the final norm."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_moe_experts=4,
        moe_layer_freq=[1 - each for each in dense_layers],
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    torch.manual_seed(0)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(config, spec, vocab_size=64, max_sequence_length=8).to(DEVICE)
    tokens = torch.randint(0, 64, (2, 8), device=DEVICE)
    positions = torch.arange(8, device=DEVICE).expand(2, 8)
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool, device=DEVICE).triu(1)
    plain = model(tokens, positions, mask, labels=tokens)
    plan = model.build_schedule_plan(tokens, positions, mask, labels=tokens)
    for layer in plan._transformer_layers:  # with one rank of experts dispatch returns the memory of its input
        for name in ("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine"):
            getattr(layer, name).free_input = False
    norms = []
    model.decoder.final_layernorm.register_forward_hook(lambda *_: norms.append(1))
    planned = type(plan).run(plan, None)
    return plain.sum().item(), planned.sum().item(), len(norms)


if __name__ == "__main__":
    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
    if DEVICE == "cpu":
        without_cuda()
    from megatron.core import __version__, parallel_state
    from megatron.core.pipeline_parallel.utils import set_streams
    from megatron.core.tensor_parallel import random

    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    if DEVICE == "cuda":
        random.model_parallel_cuda_manual_seed(1)
        fork = contextlib.nullcontext()
    else:
        fork = mock.patch.object(random.CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext())
    set_streams()
    wrong = 0
    print(f"megatron-core {__version__}, torch {torch.__version__}, {DEVICE}")
    with fork:
        for last, layers in (("experts", (1, 0)), ("dense", (0, 1))):
            plain, planned, norms = losses(layers)
            print(f"last layer {last}: loss {plain:.6f}, by the plan {planned:.6f}, which ran the final norm {norms} times")
            wrong += plain != planned
    sys.exit(wrong > 0)
