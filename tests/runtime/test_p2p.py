"""Links over real process groups: values both ways, several pipelines, failures. The executor on them: `test_executor`."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.zerobubble.errors import ConfigError, TransferError
from megatron.zerobubble.plan.communication import Message, Payload, color_links, links_of
from megatron.zerobubble.plan.costs.links import LinkTime
from megatron.zerobubble.plan.ir import Placement
from megatron.zerobubble.runtime import link_groups
from megatron.zerobubble.runtime.link_groups import chosen_ctas, is_on_one_host, link_group
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from tests.runtime.delays import links_over_the_world
from tests.support.ranks import RankPool

CPU = torch.device("cpu")
NUM_MESSAGES = 5


def message(source: int, target: int, number: int) -> Message:
    """Stage and microbatch only name it."""
    return Message(Payload.ACTIVATION, target, number, source, target)


def value(source: int, target: int, number: int) -> float:
    return 100.0 * source + 10.0 * target + number


# -- transfers ----------------------------------------------------------------------------------------------------------


def exchange(rank: int, links: ProcessGroupLinks, mine: int, placement: Placement, base: float, receive_first: bool) -> list[str]:
    """Every link of `mine` carries several messages at once; what arrived wrong. Both ends post in the same order, whole."""
    wrong = []
    pairs = links_of(placement)
    transfers: list[Any] = []
    received = []

    def receive() -> None:
        for source, target in pairs:
            for number in range(NUM_MESSAGES if target == mine else 0):
                buffer = torch.full((2, 3), float("nan"))
                transfers.append(links.receive(message(source, target, number), buffer))
                received.append((base + value(source, target, number), buffer))

    def send() -> None:
        for source, target in reversed(pairs):
            for number in range(NUM_MESSAGES if source == mine else 0):
                tensor = torch.full((3, 2), base + value(source, target, number)).t()
                assert not tensor.is_contiguous()
                transfers.append(links.send(message(source, target, number), tensor))

    steps = (receive, send) if receive_first else (send, receive)
    for step in steps:
        step()
    for transfer in transfers:
        transfer.wait()
    for expected, buffer in received:
        if not torch.equal(buffer, torch.full((2, 3), expected)):
            wrong.append(f"expected {expected}, got {buffer.tolist()}")
    assert received
    return wrong


def exchange_on_every_placement(rank: int, batched: bool) -> list[str]:
    wrong = []
    for placement in (Placement.v(4), Placement.linear(4), Placement.loop(4, 2), Placement((0, 2, 1, 3, 0))):
        links = links_over_the_world(rank, placement, batched=batched)
        for receive_first in (True, False):
            wrong += exchange(rank, links, rank, placement, 0.0, receive_first)
        links.close()
    return wrong


@pytest.mark.parametrize("batched", [False, True])
def test_values_both_ways_on_every_link(four_ranks: RankPool, batched: bool) -> None:
    assert four_ranks.run(exchange_on_every_placement, batched) == [[]] * 4


def test_links_of_gloo_between_gpus_are_refused(world_of_one: None) -> None:
    with pytest.raises(ConfigError, match='cannot reduce gradients there: give init_process_group "nccl"'):
        ProcessGroupLinks(Placement.v(2), pipeline=range(2), rank=0, device=torch.device("cuda"))


def time_the_links(rank: int) -> tuple[dict[tuple[int, int], LinkTime], set[tuple[Any, ...]], list[str]]:
    """In a world with two pipelines: what took how long, the sizes on each link, and what arrives wrong afterwards."""
    pipeline, mine = ((0, 2), (1, 3))[rank % 2], rank // 2
    links = ProcessGroupLinks(Placement.linear(2), pipeline=pipeline, rank=mine, device=CPU)
    passed, sizes = links._pass, set()

    def counted(tensor: torch.Tensor, link: tuple[int, int]) -> None:
        sizes.add((link, tensor.numel()))
        passed(tensor, link)

    links._pass = counted  # type: ignore[method-assign]
    times = links.times({(0, 1): (64, 2, 32), (1, 0): (192, 2, 32)}, torch.bfloat16, repeats=2)
    wrong = exchange(rank, links, mine, Placement.linear(2), 1000.0 * (rank % 2), True)
    links.close()
    return times, sizes, wrong


def test_links_are_timed_by_where_they_start_and_two_pipelines_keep_apart(four_ranks: RankPool) -> None:
    for rank, (times, sizes, wrong) in enumerate(four_ranks.run(time_the_links)):
        assert sizes == {((0, 1), 64 * 64), ((1, 0), 192 * 64), ((0, 1), 1), ((1, 0), 1)}, (
            "each message of its length, and a reply"
        )
        assert list(times) == [(0, 1) if rank < 2 else (1, 0)]
        assert all(0 <= found.busy_ms <= found.message_ms < 60_000 for found in times.values())
        assert not wrong


def what_the_backend_is_given(rank: int) -> tuple[dict[tuple[int, int], int], bool, list[int]]:
    """The group of each link of this rank, numbered as torch made them; whether a send keeps its tensor alive until it is over;
    how many groups there are, and are left."""
    placement = Placement.v(4)
    links = links_over_the_world(rank, placement)
    groups: dict[tuple[int, int], int] = {}
    mine = [link for link in links_of(placement) if rank in link]
    called = iter(mine)

    def backend(tensor: torch.Tensor, peer: int, group: Any) -> mock.Mock:
        """Neither keeps the tensor nor sends it."""
        groups[next(called)] = id(group)
        return mock.Mock()

    with mock.patch.object(dist, "isend", backend), mock.patch.object(dist, "irecv", backend):
        tensor = torch.zeros(3)
        storage = StorageWeakRef(tensor.untyped_storage())
        for source, target in mine:
            if source == rank:
                transfer = links.send(message(source, target, 0), tensor)
            else:
                links.receive(message(source, target, 0), torch.zeros(3))
        del tensor
        kept = not storage.expired()
        transfer.wait()
        del transfer
        order = {id(group): index for index, group in enumerate(dict.fromkeys(links._groups.values()))}
        links.close()  # all calls have been made then
        links.close()
    return {link: order[group] for link, group in groups.items()}, kept and storage.expired(), [len(order), len(links._groups)]


def test_each_link_has_a_group_of_its_own_and_a_send_keeps_its_tensor(four_ranks: RankPool) -> None:
    """So that a communicator that serializes its transfers never makes one link wait for another. A chain has four groups."""
    expected = {link: index for index, links in enumerate(color_links(links_of(Placement.v(4)))) for link in links}
    for rank, (groups, is_kept, counts) in enumerate(four_ranks.run(what_the_backend_is_given)):
        assert groups == {link: index for link, index in expected.items() if rank in link}
        assert len(set(groups.values())) == len(groups)
        assert is_kept
        assert counts == [4, 0]


# -- failures -----------------------------------------------------------------------------------------------------------


def receive_what_nobody_sends(rank: int) -> str:
    links = links_over_the_world(rank, Placement.linear(4), timeout=timedelta(seconds=1))
    text = ""
    if rank == 1:
        transfer = links.receive(Message(Payload.GRADIENT, 1, 7, 2, 1), torch.empty(3))
        with pytest.raises(TransferError) as error:
            transfer.wait()
        assert isinstance(error.value.__cause__, RuntimeError)
        text = str(error.value)
    dist.barrier()
    links.close()
    return text


def test_a_transfer_that_times_out_is_named(four_ranks: RankPool) -> None:
    texts = four_ranks.run(receive_what_nobody_sends)
    assert texts[1].startswith("cannot receive the gradient for stage 1, microbatch 7 (rank 2 to rank 1): ")
    assert texts[1].count("\n") == 0
    assert [texts[0], *texts[2:]] == ["", "", ""]


def start_with_a_broken_backend(rank: int) -> list[str]:
    links = links_over_the_world(rank, Placement.linear(4))
    texts = []
    if rank == 0:
        for function, start, result in (
            ("isend", links.send, {"side_effect": RuntimeError("connection reset by peer\nC++ frames:\n#0 ...")}),
            ("irecv", links.receive, {"side_effect": RuntimeError()}),
            ("isend", links.send, {"return_value": None}),
        ):
            source, target = (0, 1) if function == "isend" else (1, 0)
            with mock.patch.object(dist, function, **result), pytest.raises(TransferError) as error:
                start(message(source, target, 3), torch.zeros(1)).wait()
            texts.append(str(error.value))
    links.close()
    return texts


def test_a_transfer_that_cannot_start_is_named(four_ranks: RankPool) -> None:
    texts, *others = four_ranks.run(start_with_a_broken_backend)
    assert texts == [
        "cannot send the activation for stage 1, microbatch 3 (rank 0 to rank 1): connection reset by peer",
        "cannot receive the activation for stage 0, microbatch 3 (rank 1 to rank 0): RuntimeError",
        "cannot send the activation for stage 1, microbatch 3 (rank 0 to rank 1): "
        "this process is not a member of the link's group",
    ]
    assert others == [[]] * 3


class _Options:
    """torch.distributed.ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(max_ctas="NCCL's choice")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each new group."""
    groups: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "new_group", lambda **given: groups.append(given))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=_Options), raising=False)
    return groups


@pytest.mark.parametrize(
    ("given", "is_one_host", "used", "warnings"),
    [(None, True, 4, []), (None, False, None, []), (16, True, 16, []), (1, False, 1, []), (6, True, 6, ["NCCL takes 8 CTAs"])],
)
def test_ctas_are_four_on_one_host_and_a_number_that_nccl_rounds_up_is_a_warning(
    caplog: pytest.LogCaptureFixture, given: int | None, is_one_host: bool, used: int | None, warnings: list[str]
) -> None:
    assert chosen_ctas(given, is_one_host=is_one_host) == used
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        f"{each} for a transfer" for each in warnings
    ]


def _hosts(rank: int, names: str, is_eager: bool) -> bool:
    """Pipelines of ranks 0 and 2, 1 and 3."""
    with mock.patch.object(link_groups, "_opens_eagerly", return_value=is_eager):
        return is_on_one_host([rank % 2, rank % 2 + 2], names[rank])


@pytest.mark.parametrize(
    ("names", "is_eager", "expected"),
    [
        ("aaaa", False, [True] * 4),
        ("abab", False, [True] * 4),
        ("aabb", False, [False] * 4),
        ("abac", False, [True, False, True, False]),
        ("abac", True, [False] * 4),
        ("abab", True, [True] * 4),
    ],
)
def test_ctas_follow_from_the_hosts_of_a_pipeline(four_ranks: RankPool, names: str, is_eager: bool, expected: list[bool]) -> None:
    """Eagerly one communicator serves all pipelines, and its ranks must have the same options."""
    assert four_ranks.run(_hosts, names, is_eager) == expected


@pytest.mark.parametrize("max_ctas", [None, 2])
def test_on_nccl_a_link_has_a_stream_of_high_priority(
    monkeypatch: pytest.MonkeyPatch, made: list[dict[str, Any]], max_ctas: int | None
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    link_group(max_ctas)
    (given,) = made
    options = given["pg_options"]
    assert options.is_high_priority_stream
    assert options.config.max_ctas == (max_ctas or "NCCL's choice")


def test_each_link_group_has_options_of_its_own(monkeypatch: pytest.MonkeyPatch, made: list[dict[str, Any]]) -> None:
    """torch writes the group's ranks and name into them."""
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    for _ in range(2):
        link_group(None)
    assert made[0]["pg_options"] is not made[1]["pg_options"]


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:nccl"])
def test_other_backends_get_no_options(monkeypatch: pytest.MonkeyPatch, made: list[dict[str, Any]], backend: str) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.delattr(dist, "ProcessGroupNCCL")
    link_group(8)
    assert made == [{"pg_options": None}]
