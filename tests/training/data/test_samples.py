"""The order of samples, the tensors that a stage reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.data.corpus import CorpusInfo, corpus_info_path, read_corpus_info, split_documents

with quiet_third_parties():
    from megatron.core.datasets.blended_megatron_dataset_config import convert_split_vector_to_split_matrix

    from megatron.zerobubble.training.data.microbatch_lengths import ConsumedSamples
    from megatron.zerobubble.training.data.samples import Batch, next_batch


def microbatches(*, consumed: int, num_ranks: int, total: int = 48, micro: int = 2) -> list[list[list[int]]]:
    """The microbatches of each data-parallel rank."""
    return [
        list(ConsumedSamples(consumed=consumed, total=total, micro_batch_size=micro, rank=rank, num_ranks=num_ranks))
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_global_batch_is_the_same_set_of_samples_for_every_data_parallel_size(num_ranks: int) -> None:
    batch, per_rank = 16, 16 // 2 // num_ranks
    for step in range(3):
        samples = [
            sample
            for rank in microbatches(consumed=0, num_ranks=num_ranks)
            for microbatch in rank[step * per_rank : (step + 1) * per_rank]
            for sample in microbatch
        ]
        assert sorted(samples) == list(range(step * batch, (step + 1) * batch))


def test_a_run_continues_in_the_data_where_it_stopped() -> None:
    from_start = microbatches(consumed=0, num_ranks=2)
    resumed = microbatches(consumed=16, num_ranks=2)
    assert resumed == [rank[4:] for rank in from_start]


def test_the_data_parallel_size_may_change_in_between() -> None:
    """16 samples read by two ranks, then four continue: no sample is read twice or skipped."""
    first = [sample for rank in microbatches(consumed=0, num_ranks=2) for microbatch in rank[:4] for sample in microbatch]
    rest = [sample for rank in microbatches(consumed=16, num_ranks=4) for microbatch in rank for sample in microbatch]
    assert sorted(first + rest) == list(range(48))


def test_a_microbatch_is_never_short() -> None:
    sampler = ConsumedSamples(consumed=0, total=7, micro_batch_size=2, rank=0, num_ranks=1)
    assert list(sampler) == [[0, 1], [2, 3], [4, 5]]
    assert len(sampler) == 3


@pytest.mark.parametrize(
    ("first", "last", "mask", "names"),
    [
        (True, False, False, {"tokens", "position_ids"}),
        (False, True, False, {"labels", "loss_mask"}),
        (True, True, False, {"tokens", "position_ids", "labels", "loss_mask"}),
        (False, False, True, {"attention_mask"}),
    ],
)
def test_a_stage_gets_what_it_needs(first: bool, last: bool, mask: bool, names: set[str]) -> None:
    sample = {name: torch.zeros(1) for name in Batch.__dataclass_fields__}
    batch = next_batch(iter([sample]), device=torch.device("cpu"), embeds=first, is_last_stage=last, needs_mask=mask)
    assert {name for name in Batch.__dataclass_fields__ if getattr(batch, name) is not None} == names


def test_a_stage_in_the_middle_reads_nothing() -> None:
    batch = next_batch(None, device=torch.device("cpu"), embeds=False, is_last_stage=False, needs_mask=False)
    assert batch == Batch()


def test_corpus_info_is_read_back(tmp_path: Path) -> None:
    info = CorpusInfo(tokenizer_type="ByteLevelTokenizer", vocab_size=256, num_documents=2, num_tokens=10)
    prefix = str(tmp_path / "data")
    assert read_corpus_info(prefix) is None, "data of other tools has none"
    corpus_info_path(prefix).write_text(info.to_json())
    assert read_corpus_info(prefix) == info
    corpus_info_path(prefix).write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        read_corpus_info(prefix)


@pytest.mark.parametrize("num_documents", [1, 3, 50, 499, 500])
def test_splits_are_counted_as_megatron_core_cuts_them(num_documents: int) -> None:
    for weights in ((969.0, 30.0, 1.0), (90.0, 10.0, 0.0), (0.5, 0.25, 0.25), (0.0, 100.0, 0.0), (1.0, 1.0, 1.0)):
        matrix = convert_split_vector_to_split_matrix([weight / sum(weights) for weight in weights])
        cut = [0 if ends is None else round(ends[1] * num_documents) - round(ends[0] * num_documents) for ends in matrix]
        assert [len(documents) for documents in split_documents(num_documents, weights)] == cut
