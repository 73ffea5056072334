"""What the B/W split installs and rejects, that DDP's gradients stay exact, and that a recomputed forward runs in B only."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import nn

from megatron.zerobubble.errors import ConfigError, SplitError
from megatron.zerobubble.mcore import config_checks
from megatron.zerobubble.mcore.model.wgrad_split import remove_split, split_weight_gradients
from megatron.zerobubble.plan.registry import schedule_spec
from megatron.zerobubble.wgrad.gemm import KernelKind, WgradKernel, plain_accumulate
from megatron.zerobubble.wgrad.store import WeightGradStore
from tests.mcore.test_zb_schedules import _gemms_per_op
from tests.support.gpt import Case, Trainer
from tests.support.ranks import RankPool

pytestmark = pytest.mark.claims(
    "Layers",
    "recomputation, full (uniform, block) and selective (core_attn, mlp, moe, shared_experts): a layer runs again once, in B;"
    " W multiplies what B recomputed",
    "works, bit for bit",
    also=("mcore/test_equivalence.py", "mcore/model/test_layers.py"),
)


class _OwnGradient(torch.autograd.Function):
    """A linear that computes its own weight gradient, as many fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _FusedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _OwnGradient.apply(x, self.weight)


class _OwnForward(ColumnParallelLinear):
    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _OwnGradient.apply(input, weight)


class _WithoutHooks(nn.Linear):
    """Defers its weight gradient as Transformer Engine's modules did before 2.7: nobody can ask to be called after it."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)

    def backward_dw(self) -> None:
        """Compute the gradient of the oldest entry of its queue."""


def _store() -> WeightGradStore:
    return WeightGradStore(WgradKernel(KernelKind.PLAIN, plain_accumulate))


def _refusals(rank: int) -> dict[str, str]:
    """The message for each kind of chunk that cannot be split, from megatron-core's real modules."""
    trainer = Trainer(Case("stock", 4, 1, num_layers=8))
    model = trainer.chunks[0].module
    layers = model.decoder.layers
    messages = {}

    def refusal(name: str) -> None:
        before = {key: type(module) for key, module in model.named_modules()}
        with pytest.raises(SplitError) as caught:
            split_weight_gradients(model, _store())
        assert {key: type(module) for key, module in model.named_modules()} == before
        assert not any("_forward_impl" in module.__dict__ for module in model.modules()), "a refused chunk is left as it was"
        messages[name] = str(caught.value)

    own = layers[1].mlp.linear_fc1.weight
    layers[1].mlp.linear_fc1.weight = layers[0].mlp.linear_fc1.weight
    refusal("shared")
    layers[1].mlp.linear_fc1.weight = own

    layers[0].fused = _FusedLinear()
    refusal("fused")
    layers[0].fused.wgrad_in_backward = True
    assert split_weight_gradients(model, _store()), "declared to stay in B, so it is no obstacle"
    remove_split(model)
    del layers[0].fused

    layers[0].old = _WithoutHooks()
    refusal("without hooks")
    del layers[0].old

    layers[0].mlp.linear_fc1.__class__ = _OwnForward
    refusal("subclass")
    layers[0].mlp.linear_fc1.__class__ = ColumnParallelLinear
    trainer.close()

    single = Trainer(Case("stock", 1, 1, tied=True))
    model = single.chunks[0].module
    refusal("tied")
    single.close()
    return messages


@pytest.mark.claims(
    "Your own script", "a weight used by two modules of a chunk, a large module with a weight gradient of its own", "rejected"
)
def test_weights_that_cannot_be_split_are_named_in_the_error(four_ranks: RankPool) -> None:
    for messages in four_ranks.run(_refusals):
        assert (
            "decoder.layers.0.mlp.linear_fc1.weight and decoder.layers.1.mlp.linear_fc1.weight are one weight"
            in messages["shared"]
        )
        assert "decoder.layers.0.fused.weight" in messages["fused"]
        assert "_FusedLinear" in messages["fused"]
        assert "decoder.layers.0.old.weight" in messages["without hooks"]
        assert "has backward_dw, but not register_wgrad_accumulation_and_reduce_hooks" in messages["without hooks"]
        assert "'transformer-engine[pytorch]>=2.8.0'" in messages["without hooks"]
        assert "decoder.layers.0.mlp.linear_fc1.weight" in messages["subclass"]
        assert "_OwnForward" in messages["subclass"]
        assert "output_layer" in messages["tied"]


def _install_and_remove(rank: int) -> tuple[int, int]:
    trainer = Trainer(Case("stock", 4, 2))
    model = trainer.chunks[0].module
    names = split_weight_gradients(model, _store())
    split = sum("_forward_impl" in module.__dict__ for module in model.modules())
    assert split == len(names)
    remove_split(model)
    left = sum("_forward_impl" in module.__dict__ for module in model.modules())
    assert not any(hasattr(parameter, "skip_backward_post_hook") for parameter in model.parameters())
    trainer.forward_backward(0)
    trainer.close()
    return split, left


def test_the_split_can_be_removed(four_ranks: RankPool) -> None:
    for rank, (split, left) in enumerate(four_ranks.run(_install_and_remove)):
        assert split == 2 * 4 + (rank == 3)
        assert left == 0


def _unknown_arguments(rank: int) -> dict[str, str]:
    """The message for each argument of a linear's forward that the split does not know, by its name and value."""
    trainer = Trainer(Case("zb-h1", 4, 1))
    linear = trainer.chunks[0].module.decoder.layers[0].mlp.linear_fc1
    own, messages = linear._forward_impl, {}
    for name, value in (
        ("grad_output_buffer", [torch.zeros(1)]),
        ("gtp_remat_size", 2),
        ("of_a_later_release", torch.float8_e5m2),
        ("of_a_later_release", False),
        ("of_a_later_release", None),
        ("wgrad_deferral_limit", 0),
    ):
        linear._forward_impl = lambda name=name, value=value, **given: own(**(given | {name: value}))
        try:
            linear(torch.zeros(2, 1, 32))
        except SplitError as error:
            messages[f"{name}={value}"] = str(error)
    linear._forward_impl = own
    trainer.close()
    return messages


def test_an_argument_of_a_linear_that_would_be_ignored_is_named_in_the_error(four_ranks: RankPool) -> None:
    """None, False and the defaults of megatron-core's own function change nothing."""
    for messages in four_ranks.run(_unknown_arguments):
        assert list(messages) == ["grad_output_buffer=[tensor([0.])]", "gtp_remat_size=2", "of_a_later_release=torch.float8_e5m2"]
        for given, message in messages.items():
            name = given.partition("=")[0]
            assert re.match(
                rf"[\w.]*decoder\.layers\.0\.mlp\.linear_fc1\.weight was called with {name}=.*, which the split", message
            )


def _logits_in_fp32(rank: int) -> tuple[torch.dtype, torch.dtype] | None:
    """As Megatron-LM's --output-logit-dtype fp32 asks the output layer: dtypes of the logits and of the hidden states."""
    trainer = Trainer(Case("zb-h1", 4, 2, dtype=torch.bfloat16))
    head = getattr(trainer.chunks[0].module.module, "output_layer", None)
    if head is None:
        trainer.forward_backward(0)
        return trainer.close()
    seen = []
    head._forward_impl = functools.partial(head._forward_impl, output_dtype=torch.float32)
    head.register_forward_hook(lambda _, given, result: seen.append((result[0].dtype, given[0].dtype)))
    trainer.forward_backward(0)
    assert head.weight.main_grad.abs().sum() > 0
    trainer.close()
    return seen[0]


def test_logits_come_in_the_dtype_that_the_output_layer_is_asked_for(four_ranks: RankPool) -> None:
    assert four_ranks.run(_logits_in_fp32) == [None, None, None, (torch.float32, torch.bfloat16)]


@pytest.mark.claims(
    "Layers",
    "the flex dispatcher with NCCL EP's zero copy; on a rank with all experts; without the package",
    "rejected",
)
@pytest.mark.claims("Layers", "CPU and activation offloading with our schedules", "rejected")
@pytest.mark.claims(
    "Long runs",
    "options of megatron-core that break a split backward pass: `local` and `full_iteration` CUDA graphs, autocast, paged "
    "stash, and the others of the table in `mcore/config_checks.py`",
    "rejected",
)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(({name: True}, name) for name in config_checks._REFUSED),
        ({"cuda_graph_impl": "local"}, "cuda_graph_impl='local'"),
        ({"cuda_graph_impl": "full_iteration"}, "cuda_graph_impl='full_iteration'"),
        ({"gtp_weight_remat_size": 2}, "gtp_weight_remat_size"),
        ({"expert_gtp_weight_remat_size": 2}, "expert_gtp_weight_remat_size"),
    ],
)
def test_each_refused_option_is_named_with_its_reason(options: dict[str, Any], named: str) -> None:
    config = SimpleNamespace(**options)
    with pytest.raises(ConfigError, match=re.escape(f"{named} does not go with schedule 'zb-h1': ")):
        config_checks.check_config(config, schedule_spec("zb-h1", num_ranks=2, num_chunks=1))


@pytest.mark.claims(
    "Layers",
    "megatron-core's own overlap of MoE communication, of the dispatch with experts' wgrad, and deferred wgrad of the head, with "
    "our schedules",
    "turned off, with one line that says what it costs",
)
def test_options_that_only_change_when_something_is_computed_are_turned_off(caplog: pytest.LogCaptureFixture) -> None:
    config = SimpleNamespace(**dict.fromkeys(config_checks._TURNED_OFF, True), moe_grouped_gemm=True)
    known: set[str] = set()
    for _ in range(2):  # a loop that makes another config for each microbatch
        config_checks.turn_off(config, known)
        config_checks.turn_off(SimpleNamespace(**dict.fromkeys(config_checks._TURNED_OFF, True)), known)
    assert vars(config) == dict.fromkeys(config_checks._TURNED_OFF, False) | {"moe_grouped_gemm": True}
    [line] = caplog.messages
    assert line.startswith(
        "turned off for the schedule: defer_embedding_wgrad_compute (W defers the head's weight gradient already); "
    )
    assert "overlap_moe_expert_parallel_comm (--zero-bubble-overlap-moe, which takes its place, pairs passes of" in line


def test_every_default_of_the_installed_megatron_core_is_allowed() -> None:
    """Of its names, the table spells at least half; the others are newer."""
    spec = schedule_spec("zb-h1", num_ranks=2, num_chunks=1)
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    config_checks.check_config(config, spec)
    assert sum(hasattr(config, name) for name in config_checks._REFUSED) > len(config_checks._REFUSED) / 2
    assert hasattr(config, "cuda_graph_impl")


ZBV = Case("zbv", 2, 3, num_chunks=2, num_layers=8)
ZB_H2 = Case("zb-h2", 2, 3, num_layers=8)


@pytest.mark.parametrize("case", [ZBV, ZB_H2], ids=str)
@pytest.mark.parametrize("recompute", ["full", "block", "selective"])
@pytest.mark.sampled(0.34)
def test_a_layer_runs_again_in_b_and_w_uses_its_activations(four_ranks: RankPool, case: Case, recompute: str) -> None:
    """GEMMs of linears: F and W as without recomputation, B those of layers' forward in addition: of all, of the first of the
    stage, or of none."""
    plain = four_ranks.run(_gemms_per_op, case)
    again = four_ranks.run(_gemms_per_op, replace(case, recompute=recompute))
    last = case.spec.placement.num_stages - 1
    for before, after in zip(plain, again, strict=True):
        assert before.keys() == after.keys()
        for text, count in before.items():
            head = text.startswith(str(last))  # the head is no layer, and is kept
            more = {"full": before[text.replace("B", "F")] - head, "block": 4, "selective": 0}[recompute] if "B" in text else 0
            assert after[text] == count + more, text
