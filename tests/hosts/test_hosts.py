"""The laboratory of hosts: faults of hosts in real jobs, and what docs/reliability.md promises of them.

`make test` runs very few, drawn by ZB_TEST_SEED; `make test-hosts` runs HOSTS_FAULTS of them and prints a table.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from tests.faults import lab as faults
from tests.faults import report
from tests.hosts import hosts, lab
from tests.hosts.faults import FAULTS, LAYOUTS, Trial, draw
from tests.training import kills

DOCS = Path(__file__).parents[2] / "docs"
NUM = int(os.environ.get("ZB_TEST_HOSTS_NUM", len(FAULTS)))

pytestmark = [
    pytest.mark.skipif(hosts.missing() is not None, reason=str(hosts.missing())),
    pytest.mark.timeout(900),
    pytest.mark.claims(
        "Long runs",
        "several hosts, as namespaces on one machine: 22 kinds of faults in random phases, with c10d and static rendezvous, "
        "among them links that are cut, restarts and `zerobubble run` (`make test-hosts`)",
        "works; **not run on a GPU, nor on several machines**; [numbers](reliability.md#the-laboratory-of-hosts)",
    ),
]


@pytest.mark.parametrize("number", range(NUM))
@pytest.mark.sampled(1 / NUM)
def test_a_fault_of_a_host(number: int, tmp_path: Path) -> None:
    """The culprit is named on every host, no rank is left, and the job goes on as if nothing had happened."""
    kinds = list(FAULTS)
    trial = draw(kinds[number % len(kinds)], random.Random(f"{os.environ['ZB_TEST_SEED']} {number}"))
    outcome = lab.run(trial, tmp_path)
    if outcome is None:
        pytest.skip(f"the job was over before the moment of {trial}")
    faults.record(outcome)
    assert outcome.is_as_promised, outcome
    if "ZB_TEST_FAULTS" in os.environ:  # a time is not asserted where other tests run beside
        assert outcome.seconds <= FAULTS[trial.kind].promised_s, outcome


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_ten_kills_on_two_hosts_are_ten_restarts(rendezvous: str, tmp_path: Path) -> None:
    """Random ranks at random moments; the losses are those of the undisturbed run, bit for bit."""
    num_kills, layout = 10, "2 hosts, p = 2, 2 replicas"
    trial = Trial("one rank killed, restarts", "", layout, rendezvous, 0, 0)
    long = ["--lr-decay-iters", "100", "--train-iters", str(num_kills * (kills.MOST_NEW + 2) + 2), "--eval-iters", "0"]
    found = []
    for number in (0, num_kills):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = [*lab.job_of(folder, LAYOUTS[layout]), *long]
        with hosts.Hosts(2, folder) as both:

            def kill(chance: random.Random, both: hosts.Hosts = both) -> bool:
                ranks = [pid for host in range(both.num) for pid in both.ranks(host)]
                if ranks:
                    os.kill(chance.choice(ranks), signal.SIGKILL)
                return bool(ranks)

            agents = [
                both.start(host, [*lab.torchrun(trial, host, tmp_path.name, max_restarts=number), *job], {})
                for host in range(both.num)
            ]
            log = folder / "metrics.jsonl"
            killed = kills.kill_at_random(
                log,
                num_kills=number,
                seed=2,
                is_over=lambda agents=agents: all(agent.outcome for agent in agents),  # type: ignore[misc]
                kill=kill,
            )
        assert [agent.outcome and agent.outcome[1] for agent in agents] == [0, 0], agents[0].screen[-4000:]
        found.append(kills.Killed(kills.metrics_of(log), agents[0].screen, 0, killed))
    assert kills.differences(found[1].metrics, found[0].metrics) == []
    assert max(found[1].redone) <= 3, "two between checkpoints, and the one that was under way"


def test_hosts_leave_nothing_behind(tmp_path: Path) -> None:
    """Not a process and not a network, also when their user fails."""

    def fail() -> None:
        with hosts.Hosts(2, tmp_path) as some:
            assert hosts.networks() == {"switch", *some.names}
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert hosts.networks() == set()


def test_the_page_has_what_was_measured() -> None:
    """As `python -m tests.faults.report docs/benchmarks/data/host_trials.jsonl` prints it."""
    assert report.table(DOCS / "benchmarks/data/host_trials.jsonl") in (DOCS / "reliability.md").read_text()
