"""Which iteration all ranks resume from, given what each offers."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from megatron.zerobubble.training.restarts.agreement import Agreement, Offer, agree
from megatron.zerobubble.training.restarts.copies import CopyRecord

HOSTS = ["a", "a", "b", "b"]
PRINTS = ["0", "1", "2", "3"]


def offer(text: str, *, job: str = "job", fingerprint: str | None = None) -> Offer:
    """From "iteration:owner@rank"."""
    iteration, _, rest = text.partition(":")
    owner, _, rank = rest.partition("@")
    record = CopyRecord(
        job=job,
        iteration=int(iteration),
        consumed_samples=8 * int(iteration),
        owner=int(owner),
        fingerprint=owner if fingerprint is None else fingerprint,
    )
    return Offer(name=text, record=record, rank=int(rank), host=HOSTS[int(rank)])


def offers(iteration: int, *, but: Iterable[str] = ()) -> list[Offer]:
    """The state of every rank at itself and at rank + 2, which is on the other machine."""
    held = [f"{iteration}:{owner}@{rank}" for owner in range(4) for rank in (owner, (owner + 2) % 4)]
    return [offer(text) for text in held if text not in but]


def agreed(given: list[Offer], *, job: str = "job", hosts: list[str] = HOSTS) -> tuple[Agreement | None, str]:
    return agree(given, job=job, hosts=hosts, fingerprints=PRINTS[: len(hosts)])


def names(given: list[Offer]) -> list[str]:
    found, why = agreed(given)
    assert found is not None, why
    return [source.name + ("!" if source.is_sent else "") for source in found.sources]


def test_the_newest_complete_set_is_chosen() -> None:
    found, why = agreed([*offers(4), *offers(6)])
    assert found is not None
    assert (found.iteration, found.consumed_samples, why) == (6, 48, "")


def test_every_rank_reads_its_own_machine() -> None:
    assert names(offers(6)) == ["6:0@0", "6:1@1", "6:2@2", "6:3@3"]


def test_a_rank_whose_own_copy_is_damaged_gets_its_peers() -> None:
    assert names(offers(6, but=["6:1@1"])) == ["6:0@0", "6:1@3!", "6:2@2", "6:3@3"]


def test_a_machine_that_was_replaced_gets_everything_from_the_other() -> None:
    left = [each for each in offers(6) if each.host == "a"]
    assert names(left) == ["6:0@0", "6:1@1", "6:2@0!", "6:3@1!"]


def test_ranks_may_have_moved_to_the_other_machine() -> None:
    left = [offer(text) for text in ("6:0@2", "6:1@3", "6:2@0", "6:3@1")]
    assert names(left) == ["6:0@2!", "6:1@3!", "6:2@0!", "6:3@1!"]


def test_copies_on_the_same_machine_by_another_rank_are_read_there() -> None:
    assert names([offer(text) for text in ("6:0@1", "6:1@0", "6:2@3", "6:3@2")]) == ["6:0@1", "6:1@0", "6:2@3", "6:3@2"]


def test_a_set_that_was_being_written_is_passed_over() -> None:
    found, _ = agreed([*offers(4), *offers(6, but=["6:3@3", "6:3@1"])])
    assert found is not None
    assert found.iteration == 4


def test_without_a_complete_set_there_is_none_and_a_rank_is_named() -> None:
    assert agreed([*offers(4, but=["4:0@0", "4:0@2"]), *offers(6, but=["6:3@3", "6:3@1"])]) == (
        None,
        "the state of rank 3 after iteration 6 is in no memory, or damaged there",
    )


@pytest.mark.parametrize(
    ("given", "job", "why"),
    [
        ([], "job", "no copies of this job are in memory"),
        (offers(6), "another", "no copies of this job are in memory"),
        ([offer("6:0@0", fingerprint="?")], "job", "the copies in memory are of another layout or other flags"),
    ],
)
def test_what_does_not_fit_is_ignored(given: list[Offer], job: str, why: str) -> None:
    assert agreed(given, job=job) == (None, why)


def test_copies_of_more_ranks_are_of_another_layout() -> None:
    given = [offer("6:2@0"), offer("6:3@1")]
    assert agreed(given, hosts=["a", "a"]) == (None, "the copies in memory are of another layout or other flags")
