"""The laboratory of hosts: faults of hosts in real jobs, and what docs/reliability.md promises of them.

`make test` runs very few, drawn by ZB_TEST_SEED; `make test-hosts` runs HOSTS_FAULTS of them and prints a table.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults.lab import record
from tests.hosts import hosts, lab

NUM = int(os.environ.get("ZB_TEST_HOSTS_NUM", "20"))

pytestmark = [
    pytest.mark.skipif(hosts.missing() is not None, reason=str(hosts.missing())),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("number", range(NUM))
@pytest.mark.sampled(1 / NUM)
def test_a_fault_of_a_host(number: int, tmp_path: Path) -> None:
    """The culprit is named on every host, no rank is left, and the job goes on as if nothing had happened."""
    kinds = list(lab.FAULTS)
    trial = lab.draw(kinds[number % len(kinds)], random.Random(f"{os.environ['ZB_TEST_SEED']} {number}"))
    outcome = lab.run(trial, tmp_path)
    if outcome is None:
        pytest.skip(f"the job was over before the moment of {trial}")
    record(outcome)
    assert outcome.is_as_promised, outcome
    if "ZB_TEST_FAULTS" in os.environ:  # a time is not asserted where other tests run beside
        assert outcome.seconds <= lab.FAULTS[trial.kind].promised_s, outcome


def test_hosts_leave_nothing_behind(tmp_path: Path) -> None:
    """Not a process and not a network, also when their user fails."""

    def fail() -> None:
        with hosts.Hosts(2, tmp_path) as some:
            assert hosts.networks() == {"switch", *some.names}
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert hosts.networks() == set()
