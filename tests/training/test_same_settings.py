"""Hosts that start the reference trainer with different flags, files or packages are told so before anything is computed."""

from __future__ import annotations

import dataclasses
import re
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from megatron.zerobubble.errors import DataError, UserError
from megatron.zerobubble.flags.dataclass_flags import flag_of
from megatron.zerobubble.job.launch import Launch
from megatron.zerobubble.job.meeting import Attempt
from megatron.zerobubble.job.rendezvous import Connection
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.training.arguments import settings_from_argv
from tests.support.plans import reordered
from tests.training.launch import PRETRAIN, ROOT, TIMEOUT_S, TINY_BATCH, TINY_MODEL, environment

with quiet_third_parties():
    from megatron.zerobubble.mcore import agreement
    from megatron.zerobubble.mcore.agreement import Given
    from megatron.zerobubble.training import same_settings
    from megatron.zerobubble.training.same_settings import BY_CONTENT, GIVEN_OR_NOT, PER_HOST, check_same_settings, values_of

BASE = [*TINY_MODEL, *TINY_BATCH, "--pipeline-model-parallel-size", "2", "--train-iters", "2", "--eval-iters", "0"]
MOCK = [*BASE, "--mock-data"]
LAUNCH = Launch(rank=0, local_rank=0, ranks_on_host=1, world_size=2, has_threads_set=True)


def compared(*flags: list[str], versions: list[dict[str, Given]] | None = None) -> list[str]:
    """What each of the ranks, with flags of its own, raises when they are compared; empty if nothing differs."""
    store, num_ranks = dist.HashStore(), len(flags)

    def compare(rank: int) -> str:
        launch = Launch(rank=rank, local_rank=0, ranks_on_host=1, world_size=num_ranks, has_threads_set=True)
        try:
            settings = settings_from_argv(flags[rank], world_size=num_ranks)
            check_same_settings(values_of(settings, launch), settings, launch, Connection(store, Attempt.alone()))
        except UserError as error:
            return str(error)
        return ""

    given = mock.Mock(return_value={}) if versions is None else mock.Mock(side_effect=versions)
    is_quick = mock.patch.object(agreement, "_LEAVE_S", 0.0)  # nobody's store is in a process that ends
    with is_quick, mock.patch.object(same_settings, "versions", given), ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(compare, range(num_ranks)))


def assert_named(found: list[str], name: str, first: str, second: str) -> None:
    host = re.escape(socket.gethostname())
    line = (
        rf"ranks were not given the same: {name} is {first} on {host} \(rank 0\) and {second} on {host} \(rank 1\); start every "
    )
    assert found[0] == found[1]
    assert re.match(line, found[0]), found[0]


@pytest.mark.parametrize(
    ("flag", "first", "second"),
    [
        ("--lr", "0.01", "0.02"),
        ("--seed", "1", "2"),
        ("--split", "90,10,0", "80,20,0"),
        ("--distributed-timeout-minutes", "5", "6"),
        ("--exit-interval", "1", "2"),
        ("--num-query-groups", "2", "4"),
    ],
)
def test_a_flag_that_differs_is_named_with_both_values(flag: str, first: str, second: str) -> None:
    more = ["--group-query-attention"] if flag == "--num-query-groups" else []
    found = compared(*([*MOCK, *more, flag, value] for value in (first, second)))
    assert_named(found, flag, re.escape(first), re.escape(second))


def test_a_flag_that_only_one_host_has_is_named() -> None:
    assert_named(compared(MOCK, [*MOCK, "--exit-signal-handler"]), "--exit-signal-handler", "False", "True")
    assert_named(compared([*MOCK, "--save", "/tmp/x"], MOCK), "--save", "given", "not given")


def test_every_difference_is_in_one_line() -> None:
    found, _ = compared([*MOCK, "--lr", "0.5", "--seed", "1"], [*MOCK, "--lr", "0.25", "--seed", "2"])
    assert "\n" not in found
    assert all(part in found for part in ("--lr is 0.5 on", " and 0.25 on", "--seed is 1 on", " and 2 on"))


def test_another_plan_of_one_name_is_refused_and_the_same_plan_of_another_name_is_not(tmp_path: Path) -> None:
    plan = build_plan("zbv", num_ranks=2, num_microbatches=4)
    flags = []
    for host, each in (("a", plan), ("b", reordered(plan)), ("c", plan)):
        (tmp_path / host).mkdir()
        (tmp_path / host / "plan.json").write_text(each.to_json())
        flags.append([*MOCK, "--zero-bubble-load-plan", str(tmp_path / host / "plan.json")])
    name = r"\S+json \(content [0-9a-f]{8}\)"
    assert_named(compared(flags[0], flags[1]), "--zero-bubble-load-plan", name, name)
    assert compared(flags[0], flags[2]) == ["", ""]


def test_other_data_of_one_name_is_refused_and_the_same_data_of_another_name_is_not(corpus: str, tmp_path: Path) -> None:
    for host in "abc":
        (tmp_path / host).mkdir()
        for end in (".idx", ".bin"):
            shutil.copy(f"{corpus}{end}", tmp_path / host / f"text{end}")
    index = bytearray((tmp_path / "b" / "text.idx").read_bytes())
    index[-8 - 1] ^= 1  # of the document boundaries
    (tmp_path / "b" / "text.idx").write_bytes(index)
    with (tmp_path / "c" / "text.bin").open("ab") as tokens:
        tokens.write(b"\0")
    own, other_index, other_tokens = ([*BASE, "--data-path", str(tmp_path / host / "text")] for host in "abc")
    with mock.patch("megatron.zerobubble.training.check._check_splits"):  # which may see that these two are damaged
        name = r"\S+xt \([0-9a-f]{8}, \d+ B\)"
        assert_named(compared(own, other_index), "--data-path", name, name)
        assert_named(compared(own, other_tokens), "--data-path", name, name)
    assert compared(own, [*BASE, "--data-path", corpus]) == ["", ""]


def test_what_may_differ_between_hosts(tmp_path: Path) -> None:
    first, second = (
        ["--num-workers", workers, "--save", str(tmp_path / workers), "--zero-bubble-trace", str(tmp_path / workers)]
        for workers in ("1", "2")
    )
    assert compared([*MOCK, *first], [*MOCK, *second]) == ["", ""]


def test_a_file_that_cannot_be_read_is_named(corpus: str) -> None:
    settings = settings_from_argv([*BASE, "--data-path", corpus], world_size=2)
    denied = PermissionError(13, "Permission denied", f"{corpus}.idx")
    with (
        mock.patch.object(same_settings, "content_digest", side_effect=denied),
        pytest.raises(DataError, match=r"idx cannot be read: Permission denied"),
    ):
        values_of(settings, LAUNCH)


def test_every_flag_is_compared_or_has_a_reason() -> None:
    settings = settings_from_argv(MOCK, world_size=2)
    names = set(values_of(settings, LAUNCH))
    fields = [
        field
        for group in (getattr(settings, each.name) for each in dataclasses.fields(settings))
        if dataclasses.is_dataclass(group)
        for field in dataclasses.fields(group)
        if field.init
    ]
    assert {flag_of(field) for field in fields if field.name not in PER_HOST | BY_CONTENT} <= names
    assert {field.name for field in fields} >= PER_HOST | BY_CONTENT | GIVEN_OR_NOT, "a name that is no flag"


# -- whole jobs ---------------------------------------------------------------------------------------------------------------


def _wait_for(port: int) -> None:
    """Until the first host listens: the others fail if it does not within seconds."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens on port {port}")


def two_hosts(flags: tuple[list[str], list[str]], folder: Path) -> list[tuple[int, str]]:
    """Run a torchrun for each of two hosts, of one rank each; exit code and standard error of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs: list[subprocess.Popen[bytes]] = []
    try:
        for number, own in enumerate(flags):
            rendezvous = f"--rdzv-conf=is_host={int(number == 0)},read_timeout={TIMEOUT_S},join_timeout={TIMEOUT_S}"
            torchrun = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=0", "--rdzv-backend=c10d", f"--rdzv-id={port}"]
            command = [*torchrun, f"--rdzv-endpoint=127.0.0.1:{port}", rendezvous, str(PRETRAIN), *own]
            with (folder / f"{number}").open("w") as stream:
                output = {"stdout": subprocess.DEVNULL, "stderr": stream}
                start = [sys.executable, "-m", "torch.distributed.run", *command]
                jobs.append(subprocess.Popen(start, env=environment(), cwd=ROOT, **output))  # type: ignore[call-overload]
            _wait_for(port)
        codes = [job.wait(TIMEOUT_S) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [(code, (folder / f"{number}").read_text()) for number, code in enumerate(codes)]


@pytest.mark.sampled(0.25, group="two hosts")
def test_each_of_two_hosts_ends_with_the_line(tmp_path: Path) -> None:
    ended = two_hosts(([*MOCK, "--lr", "0.5"], [*MOCK, "--lr", "0.25"]), tmp_path)
    texts = []
    for code, said in ended:
        assert code != 0
        texts.append(re.findall(r"error: (ranks were not given the same: --lr is 0.5 on .* and 0.25 on .*)", said))
        assert len(texts[-1]) == 2, said
    assert texts[0] == texts[1]


@pytest.mark.parametrize("wrong", [0, 1], ids=["the host of the rendezvous", "the other host"])
@pytest.mark.sampled(0.25, group="two hosts")
def test_a_host_with_a_wrong_flag_ends_the_other_one(tmp_path: Path, wrong: int) -> None:
    """With its reason on both; the timeout of the job is far longer than this test's."""
    own = [*MOCK, "--distributed-timeout-minutes", "30"]
    flags = ([*own, "--lr", "-1"], own) if wrong == 0 else (own, [*own, "--lr", "-1"])
    ended = two_hosts(flags, tmp_path)
    assert 0 not in [code for code, _ in ended]
    reason = r"--lr[^\n]*-1"
    assert re.search(rf"^pretrain_gpt.py: error: {reason}", ended[wrong][1], re.MULTILINE), ended[wrong][1]
    line = rf"^pretrain_gpt.py: error: rank \d on \S+ has ended before it joined the job: {reason}"
    assert re.search(line, ended[1 - wrong][1], re.MULTILINE), ended[1 - wrong][1]
