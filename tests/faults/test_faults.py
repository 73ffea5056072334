"""The fault laboratory: faults at random moments of real jobs, and what docs/reliability.md promises of them.

`make test` draws one by ZB_TEST_SEED; `make test-faults` runs all NUM of them and prints a table.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from megatron.zerobubble.plan.registry import build_plan
from tests.faults import lab

NUM = int(os.environ.get("ZB_TEST_FAULTS_NUM", "30"))

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="sends signals and reads /proc"),
    pytest.mark.claims(
        "Long runs",
        "a rank that raises or is killed anywhere in a loop, or hangs or is stopped in a pass: it is named, the others "
        "log their op or message, and the job ends (`make test-faults`: [the fault laboratory](reliability.md)); so on two "
        "hosts, which are two launchers on one machine",
        "works; **not run on a GPU, nor on several machines**",
        also=("job",),
    ),
]


@pytest.mark.parametrize("number", range(NUM))
@pytest.mark.sampled(1 / NUM)
def test_a_fault_at_a_random_moment(number: int, tmp_path: Path) -> None:
    """The culprit is named, first and last, and nothing of the job is left."""
    outcome = lab.run(lab.drawn(f"{os.environ['ZB_TEST_SEED']} {number}"), tmp_path)
    lab.record(outcome)
    assert outcome.is_as_promised, f"{outcome}\n{(tmp_path / 'screen').read_text()}"
    if "ZB_TEST_FAULTS" in os.environ:  # a time is not asserted where other tests run beside
        assert outcome.seconds <= lab.PROMISED_S, outcome


FLAGS = lab.flags("zb-h1-p2")
WAITING = {"kind": "hang", "place": "pass", "call": 9}


@pytest.mark.parametrize(
    ("lost", "line"),
    [
        (1, "rank 1 (process "),
        (0, "the job's store on 127.0.0.1, port "),
    ],
    ids=["other", "of the store"],
)
@pytest.mark.sampled(0.1, group="whole jobs")
def test_a_host_that_is_gone_is_named_on_the_other_one(lost: int, line: str, tmp_path: Path) -> None:
    note = tmp_path / "note"
    with lab.two_hosts(tmp_path, [FLAGS, FLAGS], fault=WAITING | {"rank": lost, "note": str(note)}) as hosts:
        until = time.monotonic() + lab.TIMEOUT_S
        while not note.exists():
            assert time.monotonic() < until, hosts[lost].screen
            time.sleep(0.05)
        hosts[lost].kill()
        assert hosts[1 - lost].wait() != 0
        screen = hosts[1 - lost].screen
    assert f"rank {1 - lost} stops while it waits" in screen, screen
    assert line in screen[screen.index("Root Cause") :], screen


@pytest.mark.sampled(0.1, group="whole jobs")
def test_what_one_host_refuses_ends_the_other_one_with_the_same_reason(tmp_path: Path) -> None:
    """A plan that only one of them has, as different plans do."""
    plan = tmp_path / "plan.json"
    plan.write_text(build_plan("zb-h1", num_ranks=2, num_microbatches=4).to_json())
    given = [[*lab.flags("zb-h1-p2"), "--zero-bubble-load-plan", str(each)] for each in (plan, tmp_path / "missing.json")]
    with lab.two_hosts(tmp_path, given) as hosts:
        for host in hosts:
            assert host.wait() != 0
            assert "missing.json" in host.screen[host.screen.index("Root Cause") :], host.screen
    given[1][-1] = str(plan)
    given[1] += ["--zero-bubble-max-pending-backward", "3"]
    with lab.two_hosts(tmp_path, given) as hosts:
        for host in hosts:
            assert host.wait() != 0
            line = "ranks were not given the same: schedule is zb-h1 on node0 (rank 0) and zb on node1 (rank 1); max_pending_"
            assert line in host.screen[host.screen.index("Root Cause") :], host.screen
