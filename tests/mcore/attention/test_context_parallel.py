"""Context parallelism: two ranks that share every sequence train as one rank with whole sequences does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.mcore.attention.context_parallel import ContextParallelAttention
from megatron.zerobubble.mcore.attention.sequence_parts import SequenceParts, by_rank, in_order, slices
from megatron.zerobubble.mcore.attention.torch_attention import TorchDotProductAttention
from megatron.zerobubble.profiling.profiler import Profiler
from tests.optimizer.support import Scenario
from tests.optimizer.support import compare as compare_with_synchronous_steps
from tests.support.comparisons import Difference, compare
from tests.support.gpt import Case, Trainer
from tests.support.mla import MlaCase
from tests.support.moe import MoeCase
from tests.support.mtp import MtpCase
from tests.support.ranks import RankPool
from tests.support.tolerances import OTHER_ORDER

ZB_H1 = Case("zb-h1", 2, 4, context_parallel=2, num_layers=4, num_steps=2, adam_eps=1.0)
ZBV = replace(ZB_H1, schedule="zbv", num_chunks=2)
V_HALF = replace(ZBV, schedule="v-half")
TENSOR = replace(ZB_H1, schedule="stock", num_ranks=1, tensor_parallel=2)
MOE = MoeCase("zb-h1", 2, 4, context_parallel=2, num_layers=4, num_steps=2, adam_eps=1.0, layer_freq=(1, 1, 1, 1))
MLA = MlaCase("zbv", 2, 4, num_chunks=2, context_parallel=2, num_layers=4, num_steps=2, adam_eps=1.0)
MTP = MtpCase("zb-h2", 2, 4, context_parallel=2, num_layers=4, num_steps=2, adam_eps=1.0, num_mtp_layers=1)

CASES = [
    pytest.param(replace(ZBV, llama=True, tied=True), marks=pytest.mark.smoke),
    ZB_H1,
    replace(V_HALF, distributed_optimizer=True, overlap_grad_reduce=True, clip_grad=0.1),
    replace(TENSOR, llama=True),
    replace(TENSOR, llama=True, sequence_parallel=True),
    replace(ZBV, per_token_loss=True, recompute="full"),
    replace(ZB_H1, llama=True, recompute="selective"),
    MOE,
    replace(MOE, expert_parallel=2, schedule="zbv", num_chunks=2, z_loss_coeff=0.1, shared=True),
    MLA,
    replace(MLA, schedule="zb-h1", num_chunks=1, rope_type="rope", qk_layernorm=True),
]


def _assert_close(differences: list[Difference], bound: float, case: Case) -> None:
    for rank, difference in enumerate(differences):
        assert difference.losses < bound, rank
        if not case.distributed_optimizer:  # otherwise a rank has only its share of the sums
            assert difference.gradients < bound, (rank, difference.gradient_name)
        assert difference.weights < bound, (rank, difference.weight_name)
        assert difference.grad_norms < bound, rank


@pytest.mark.claims(
    "Parallelism",
    "context parallelism 2 with local layers (keys and values all-gathered): ZB-H1, ZBV, V-Half; with tensor and sequence "
    "parallelism 2; experts; multi-latent attention; distributed optimizer, overlapped reduction, recomputation; "
    "a microbatch holds 0.53 of its activation memory",
    "works, 4e-6 of whole sequences (sums over a sequence in two parts); ZB-H1 and ZB-H2 bit for bit as stock 1F1B with it, "
    "with multi-token prediction 4e-6",
)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(0.16)
def test_shared_sequences_train_as_whole_ones(four_ranks: RankPool, case: Case) -> None:
    """4e-6, not the same bits: what is summed over a sequence (gradients of weights, of keys and values) is summed in parts."""
    differences = four_ranks.run(compare, case, replace(case.unpipelined, context_parallel=1))
    _assert_close(differences, OTHER_ORDER, case)


@pytest.mark.parametrize("features", [{}, {"llama": True, "dtype": torch.bfloat16, "different_data": True}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
@pytest.mark.sampled(0.25)
def test_the_same_bits_as_stock_1f1b(four_ranks: RankPool, schedule: str, features: dict[str, Any]) -> None:
    """On the same ranks with the same slices."""
    case = replace(ZB_H1, schedule=schedule, **features)
    for difference in four_ranks.run(compare, case, replace(case, schedule="stock")):
        assert (difference.losses, difference.gradients, difference.weights) == (0.0, 0.0, 0.0), difference


def test_mtp_layers_look_over_the_ends_of_slices_as_in_stock_1f1b(four_ranks: RankPool) -> None:
    """4e-6: the gradients of embedding and output layer are summed in another order. Not against whole sequences: megatron-core
    divides the loss of an MTP layer by a rank's own number of tokens, of which the last one has none to predict."""
    _assert_close(four_ranks.run(compare, MTP, replace(MTP, schedule="stock")), OTHER_ORDER, MTP)


# -- collectives --------------------------------------------------------------------------------------------------------------


class _Collectives(TorchDispatchMode):
    """Kind and size of every collective of one group, in the order in which this rank issues them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._name = group.group_name
        self.issued: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            groups = [each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type())]  # type: ignore[attr-defined]
            if any(dist.ProcessGroup.unbox(each).group_name == self._name for each in groups):
                tensor = next(each for each in torch.utils._pytree.tree_leaves(args) if isinstance(each, torch.Tensor))
                self.issued.append((func.__name__, tuple(tensor.shape)))
        return func(*args, **(kwargs or {}))


def _issued(rank: int, case: Case) -> tuple[list[int], list[tuple[str, tuple[int, ...]]]]:
    """The ranks that share sequences with this one, and the collectives of their group in one iteration."""
    trainer = case.trainer()
    group = parallel_state.get_context_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    with _Collectives(group) as collectives:
        trainer.forward_backward(0)
    trainer.close()
    return ranks, collectives.issued


@pytest.mark.claims(
    "Parallelism",
    "ranks that share sequences issue the same collectives in the same order, with optimistic steps that are redone, too; "
    "their groups are used before the first transfer",
    "works",
    also=("mcore/test_waits.py",),
)
@pytest.mark.parametrize("case", [replace(ZBV, llama=True), replace(ZB_H1, recompute="full")], ids=str)
def test_ranks_issue_the_same_collectives_in_the_same_order(four_ranks: RankPool, case: Case) -> None:
    """By the plan, whatever slices they have. F of a layer has one all-gather; B one more and a reduce-scatter, and before them
    with recomputation those of F. W has none."""
    issued = dict(enumerate(four_ranks.run(_issued, case)))
    for ranks, own in issued.values():
        assert own == issued[ranks[0]][1]
        names = [name for name, _ in own if "allreduce" not in name]  # of the losses that are compared
        each = case.num_layers // case.num_ranks * case.num_microbatches
        gathers = 3 if case.recompute else 2
        assert sum("allgather" in name for name in names) == gathers * each
        assert sum("reduce_scatter" in name for name in names) == each
        assert len(names) == (gathers + 1) * each


SCENARIOS = [
    Scenario("clipped", replace(ZBV, num_steps=3, clip_grad=1e3, dropout=0.1), spikes={(3, 1): 1e4, (5, 0): 1e4}, redone=(3, 5)),
    Scenario(
        "overflow",
        replace(ZB_H1, dtype=torch.float16, clip_grad=1e3, distributed_optimizer=True),
        spikes={(2, 1): 1e9},
        redone=(2,),
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
@pytest.mark.sampled(0.5)
def test_optimistic_steps_of_ranks_that_share_sequences(four_ranks: RankPool, scenario: Scenario) -> None:
    """A forward that runs again has collectives: it runs again on all ranks that share sequences, or on none."""
    results = four_ranks.run(compare_with_synchronous_steps, scenario)
    for rank, (differences, redone, *_) in enumerate(results):
        assert differences == [], rank
        assert tuple(redone) == scenario.redone, rank
    assert all(steps == results[0][2] for *_, steps in results), "the outcomes differ between ranks"


# -- memory -------------------------------------------------------------------------------------------------------------------


def _held(rank: int, case: Case) -> int:
    """Bytes that a microbatch of this rank's stages holds from F to B."""
    trainer = Trainer(case)
    profiler = trainer.schedule.hooks.profiler = Profiler(trainer.schedule.device)
    trainer.forward_backward(0)
    held = sum(memory.activation for memory in profiler.profile().memory.values())
    trainer.close()
    return int(held)


def test_activation_memory_is_divided_by_the_ranks(four_ranks: RankPool) -> None:
    """Keys and values of other ranks are not held from F to B."""
    case = replace(ZB_H1, layout="E|ttttL", llama=True)
    whole, shared = (four_ranks.run(_held, each) for each in (replace(case, context_parallel=1), case))
    for each, half in zip(whole[2:], shared[2:], strict=True):
        assert 0.45 * each < half <= 0.54 * each, "the outputs of attention are there twice: for each slice, and together"


# -- the module ---------------------------------------------------------------------------------------------------------------

HEADS, GROUPS, KEY_SIZE, LENGTH, SAMPLES = 4, 2, 8, 24, 2

KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "values of another size": {"value_size": 6},
    "window": {"window": (7, 0)},
    "mask": {"has_mask": True},
    "no mask": {"mask_type": "no_mask"},
    "bf16": {"dtype": torch.bfloat16},
}


def _attention_apart(
    rank: int,
    *,
    value_size: int = KEY_SIZE,
    window: tuple[int, int] | None = None,
    has_mask: bool = False,
    mask_type: str = "causal",
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Output and gradients of four ranks that share sequences, against those of whole ones: the largest difference of each."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * KEY_SIZE,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        context_parallel_size=4,
        window_size=window,
        attention_dropout=0.0,
    )
    parts = SequenceParts(rank=rank, size=4)
    groups = ProcessGroupCollection(cp=dist.group.WORLD, tp=dist.new_group(list(range(4))))
    options = {"layer_number": 1, "attn_mask_type": AttnMaskType[mask_type], "attention_type": "self", "pg_collection": groups}
    shared = ContextParallelAttention(config, **options)
    whole = TorchDotProductAttention(replace(config, context_parallel_size=1), **options)
    generator = torch.Generator().manual_seed(1)
    sizes = ((HEADS, KEY_SIZE), (GROUPS, KEY_SIZE), (GROUPS, value_size), (HEADS * value_size,))
    *inputs, gradient = (torch.randn(LENGTH, SAMPLES, *size, generator=generator).to(dtype) for size in sizes)
    mask = (
        (torch.rand(1, 1, LENGTH, LENGTH, generator=generator) < 0.3) & ~torch.eye(LENGTH, dtype=torch.bool) if has_mask else None
    )

    def run(module: torch.nn.Module, part: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        own = [part(each, dim=0).clone().requires_grad_() for each in inputs]
        output = module(*own, None if mask is None else part(mask, dim=2))
        output.backward(part(gradient, dim=0))
        return [output.detach(), *(each.grad for each in own if each.grad is not None)]

    expected = run(whole, lambda tensor, dim: tensor)
    actual = run(shared, lambda tensor, dim: slices(tensor, parts, dim=dim))
    dist.destroy_process_group(groups.tp)
    return [
        float((each - slices(other, parts, dim=0)).abs().max() / other.abs().max())
        for each, other in zip(actual, expected, strict=True)
    ]


@pytest.mark.claims(
    "Parallelism",
    "the attention of context parallelism alone on 4 ranks: causal, windows, masks, grouped queries, values of another size, "
    "bf16",
    "works, 4e-6 (bf16 2e-2)",
)
@pytest.mark.parametrize("kind", KINDS)
def test_attention_over_four_ranks(four_ranks: RankPool, kind: str) -> None:
    bound = OTHER_ORDER if KINDS[kind].get("dtype", torch.float32) is torch.float32 else 2e-2
    for apart in four_ranks.run(functools.partial(_attention_apart, **KINDS[kind])):
        assert len(apart) == 4
        assert max(apart) < bound


def _refusals(rank: int) -> list[str]:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, context_parallel_size=4, window_size=(3, 0))
    options = {"pg_collection": ProcessGroupCollection(cp=dist.group.WORLD)}
    attention = ContextParallelAttention(config, 1, AttnMaskType.causal, "self", **options)
    own, mask = torch.zeros(2, 1, 2, 4), torch.zeros(1, 1, 2, 8, dtype=torch.bool)
    calls: list[Callable[[], Any]] = [
        lambda: attention(own, own, own, None, packed_seq_params=PackedSeqParams(qkv_format="thd")),
        lambda: attention(own, own, own, mask),
        lambda: ContextParallelAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type="p2p", **options),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except ConfigError as error:
            messages.append(str(error))
    return messages


@pytest.mark.claims(
    "Parallelism",
    "context parallelism with packed sequences, a window beside a mask, megatron-core's own attention; "
    "lengths that 2n does not divide",
    "rejected",
    also=("training/test_arguments.py",),
)
def test_an_unsupported_option_is_refused_in_one_line(four_ranks: RankPool) -> None:
    for packed, window, ring in four_ranks.run(_refusals):
        assert packed.startswith("packed sequences cannot be combined with context parallelism")
        assert window.startswith("a window beside a mask is not supported with context parallelism")
        assert ring.startswith("cp_comm_type p2p is Transformer Engine's")


# -- what is held by whom -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_slices_of_all_ranks_are_the_sequence(size: int) -> None:
    sequence = torch.arange(12 * 2).reshape(12, 2)
    parts = [slices(sequence, SequenceParts(rank=rank, size=size), dim=0) for rank in range(size)]
    gathered = torch.cat(parts)
    assert torch.equal(in_order(gathered, size), sequence)
    assert torch.equal(by_rank(sequence, size), gathered)
    if size == 2:
        assert parts[0][:, 0].tolist() == [0, 2, 4, 18, 20, 22]


def test_whole_sequences_are_refused_in_one_line() -> None:
    """A layer spec that was made for whole sequences."""
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, context_parallel_size=2)
    with pytest.raises(ConfigError, match=r"TorchDotProductAttention needs whole sequences, .* choose ContextParallelAttention"):
        TorchDotProductAttention(config, 1, AttnMaskType.causal, "self")
