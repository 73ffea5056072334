"""Compare schedules over a slow link between two hosts: the plan that knows the times of the links, and those that do not.

The hosts are two network namespaces of this machine, joined by a link that `tc tbf` holds to a rate in both directions. Each has
a torchrun with two ranks (p = 4); the link between ranks 1 and 2 is the slow one. Passes sleep for given times, so that four
ranks fit on two cores; plan, executor, buffers and waits are real, and so are the messages on gloo over TCP. The ranks measure
their links as a run does before it re-plans (`ProcessGroupLinks.times`), rank 0 plans with that, and all contenders take turns.

Times are makespans: from the first pass of any rank to the end of the last one of any. It needs root, `ip netns` and `tc`, and
removes everything at its end, also after Ctrl-C.

  python -m tools.benchmarks.slow_link --json docs/benchmarks/data/slow_link.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.zerobubble.cli.parser import Parser
from megatron.zerobubble.cli.progress_bar import track
from megatron.zerobubble.errors import ConfigError, ExecutionError, UserError
from megatron.zerobubble.mcore.cpu.gloo_device import one_device_per_process
from megatron.zerobubble.plan.communication import links_of
from megatron.zerobubble.plan.costs.cost_model import CostModel
from megatron.zerobubble.plan.costs.links import LinkTime, links_text
from megatron.zerobubble.plan.ir import Placement, Plan
from megatron.zerobubble.plan.objective import Objective
from megatron.zerobubble.plan.planner import AUTO, make_plan
from megatron.zerobubble.plan.registry import build_plan
from megatron.zerobubble.plan.search.search_options import Effort, SearchOptions
from megatron.zerobubble.plan.simulate import simulate
from megatron.zerobubble.runtime.p2p import ProcessGroupLinks
from tools.benchmarks.reports import Row, markdown_table, origin, write_json
from tools.benchmarks.schedules.emulated import CPU, EmulatedContender, Emulation, Times
from tools.benchmarks.schedules.report import Line, rows_of
from tools.benchmarks.schedules.rounds import run_rounds

FORMAT = "zerobubble-slow-link-benchmark/1"
NUM_RANKS = 4
HOSTS = ("zbl0", "zbl1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
HAND_WRITTEN = ("1f1b", "zb-h1", "zbv")
SEARCHED = ("zb", AUTO)
EARLY = 8
"""Ops before its use at which the last contender posts a receive; the others post it where the plan has the send."""
LIMIT = timedelta(minutes=2)
"""How long a message may take before the ranks give up."""


# -- two hosts ------------------------------------------------------------------------------------------------------------


def _ip(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def check_machine() -> None:
    """Raise ConfigError where this machine cannot have network namespaces, or has those of another run."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        raise ConfigError(f"two network namespaces need root, ip, tc and unshare; missing: {', '.join(missing) or 'root'}")
    taken = sorted(set(HOSTS) & {line.split()[0] for line in _ip("ip", "netns", "list").splitlines()})
    if taken:
        raise ConfigError(
            f"network namespaces {', '.join(taken)} exist: wait for the other run, or remove them with ip netns del"
        )


@contextlib.contextmanager
def two_hosts(mbit: float) -> Iterator[None]:
    """Two network namespaces and a link of this rate between them, as long as this is open."""
    try:
        for host in HOSTS:
            _ip("ip", "netns", "add", host)
        _ip("ip", "-n", HOSTS[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", HOSTS[1])
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            _ip("ip", "-n", host, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("ip", "-n", host, "link", "set", device, "up")
            rate = ("rate", f"{mbit:g}mbit", "burst", "4kb", "latency", "5s")
            _ip("tc", "-n", host, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate)
        yield
    finally:
        for host in HOSTS:
            with contextlib.suppress(ConfigError):  # it was not made
                for process in map(int, _ip("ip", "netns", "pids", host).split()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)
                _ip("ip", "netns", "delete", host)


def run_on_hosts(module: str, words: Sequence[str]) -> None:
    """Run a module under torchrun, two ranks on each host.

    Raises:
        ExecutionError: a host's torchrun failed; what it printed is in the message.
    """
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    agents = []
    with contextlib.ExitStack() as opened:
        for number, host in enumerate(HOSTS):
            launch = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={number}"]
            launch += [f"--master-addr={ADDRESSES[0]}", "--master-port=29500", "-m", module, *words]
            named = ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"]
            log = opened.enter_context(tempfile.TemporaryFile("w+"))
            command = [*named, sys.executable, "-m", *launch]
            agent = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            opened.callback(_end, agent)
            agents.append((host, agent, log))
        for host, agent, log in agents:
            if agent.wait():
                log.seek(0)
                raise ExecutionError(f"torchrun on {host} failed:\n{log.read()[-4000:]}")


def _end(agent: subprocess.Popen[bytes]) -> None:
    """End a torchrun that still runs; its ranks end with their namespace."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(agent.pid, signal.SIGKILL)
    agent.wait()


# -- a rank ---------------------------------------------------------------------------------------------------------------


def serve(args: argparse.Namespace) -> None:
    """One rank: measure the links, get the plans of rank 0, run the rounds. Rank 0 writes the result."""
    torch.set_num_threads(1)
    _take_turns(before_others=True)  # gloo's threads, too
    dist.init_process_group("gloo", timeout=LIMIT)
    rank, num_elements = dist.get_rank(), max(1, round(args.message_kib * 1024 / 4))
    placements = (Placement.linear(NUM_RANKS), Placement.v(NUM_RANKS), Placement.loop(NUM_RANKS, 2), Placement.loop(NUM_RANKS, 4))
    links = {
        placement: ProcessGroupLinks(placement, pipeline=range(NUM_RANKS), rank=rank, device=CPU, timeout=LIMIT)
        for placement in placements
    }
    widest = max(placements, key=lambda each: len(links_of(each)))
    own = links[widest].times(dict.fromkeys(links_of(widest), (num_elements,)), torch.float32)
    everybody: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(everybody, (own, os.uname().nodename))
    measured = {pair: message for times, _ in everybody for pair, message in times.items()}
    _take_turns(before_others=False)
    answer: list[Any] = [_plans(args, measured) if rank == 0 else None]
    _take_turns(before_others=True)
    dist.broadcast_object_list(answer)
    emulations: list[Emulation] = answer[0]
    contenders = [EmulatedContender(each, rank, links[each.plan.placement], num_elements) for each in emulations]
    samples = run_rounds(contenders, args.num_microbatches, args.rounds)
    ends = [[(sample.ops[0].start_ms, sample.ops[-1].end_ms) for sample in each] for each in samples]
    all_ends: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(all_ends, ends)
    if rank == 0:
        lines = []
        for place, each in enumerate(emulations):
            rounds = zip(*(ranks[place] for ranks in all_ends), strict=True)
            ms = tuple(max(end for _, end in ranks) - min(start for start, _ in ranks) for ranks in rounds)
            predicted = simulate(each.plan, each.costs).makespan_ms
            lines.append(Line(name=each.name, runtime="ours", baseline=each.baseline, ms=ms, predicted_ms=predicted))
        rows = rows_of(lines)
        for row, each in zip(rows, emulations, strict=True):
            row["schedule"] = each.plan.schedule
        found = [{"sender": a, "receiver": b} | each._asdict() for (a, b), each in sorted(measured.items())]
        in_line = {pair: measured[pair].message_ms for pair in links_of(placements[0])}
        text = links_text(in_line, [host for _, host in everybody])
        Path(args.serve).write_text(json.dumps({"links": found, "links_text": text, "rows": rows}), encoding="utf-8")
    for each_links in links.values():
        each_links.close()
    dist.destroy_process_group()


def _take_turns(*, before_others: bool) -> None:
    """Whether this thread gets a core before other processes: ranks that sleep need little, but at once."""
    with contextlib.suppress(PermissionError):  # where real-time scheduling is not allowed, the noise is larger
        os.sched_setscheduler(0, os.SCHED_FIFO if before_others else os.SCHED_OTHER, os.sched_param(int(before_others)))


def _plans(args: argparse.Namespace, measured: dict[tuple[int, int], LinkTime]) -> list[Emulation]:
    """The contenders. Their costs have the measured links, also where the plan was made without."""
    times = Times(forward_ms=args.pass_ms, backward_ms=args.pass_ms, wgrad_ms=args.pass_ms)
    typical = statistics.median(measured[pair].message_ms for pair in links_of(Placement.linear(NUM_RANKS)))

    def blind(placement: Placement) -> CostModel:
        return replace(times.equal(placement), comm_ms=typical)

    def true(placement: Placement) -> CostModel:
        return blind(placement).with_links(measured, NUM_RANKS)

    options = SearchOptions(memory_limit=args.memory_limit, objective=Objective.MAKESPAN, budget=Effort("fast").budget)
    plans: dict[str, Plan] = {
        name: build_plan(name, num_ranks=NUM_RANKS, num_microbatches=args.num_microbatches) for name in HAND_WRITTEN
    }
    for name in SEARCHED:
        for knows, costs_of in (("one latency", blind), ("all links", true)):
            made = make_plan(
                name, num_ranks=NUM_RANKS, num_microbatches=args.num_microbatches, costs_of=costs_of, options=options
            )
            plans[f"{name}, {knows}"] = made.simulation.plan
    found = [
        Emulation(name=name, baseline=HAND_WRITTEN[0], plan=plan, costs=true(plan.placement)) for name, plan in plans.items()
    ]
    return [*found, replace(found[-1], name=f"{found[-1].name}, receives {EARLY} ops early", lookahead=EARLY)]


# -- the command ----------------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m tools.benchmarks.slow_link", description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--mbit", type=float, nargs="+", default=[20.0, 50.0, 100.0], help="rates of the link (default 20 50 100)"
    )
    parser.add_argument("--num-microbatches", type=int, default=8, help="m (default %(default)s)")
    parser.add_argument("--pass-ms", type=float, default=40.0, help="F, B and W per rank and microbatch (default %(default)s)")
    parser.add_argument("--message-kib", type=float, default=256.0, help="size of a message (default %(default)s)")
    parser.add_argument("--memory-limit", type=float, default=1.0, help="of searched plans, 1F1B's is 1 (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each rate (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    parser.add_argument("--serve", metavar="FILE", help=argparse.SUPPRESS)
    return parser


def text(report: Row) -> str:
    """The report in Markdown."""
    parts = []
    for result in report["results"]:
        parts.append(f"{result['mbit']:g} Mbit/s: {result['links_text']}")
        lines = [
            [
                row["name"],
                row["schedule"],
                f"{row['ms']['median']:.0f}",
                f"{row['predicted_ms']:.0f}",
                f"{row['speed_up']['value']:.3f} ({row['speed_up']['low']:.3f} to {row['speed_up']['high']:.3f})",
            ]
            for row in result["rows"]
        ]
        heads = ("contender", "plan", "median, ms", "predicted, ms", f"speed-up over {HAND_WRITTEN[0]}")
        parts.append("\n".join(markdown_table(heads, lines)))
    return "\n\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. A user error is one line on stderr and exit code 2."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser()
    args = parser.parse_args(words)
    if args.serve is not None:
        with one_device_per_process():
            serve(args)
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results = []
    try:
        numbers = (*args.mbit, args.num_microbatches, args.pass_ms, args.message_kib, args.memory_limit, args.rounds)
        if min(numbers) <= 0:
            raise ConfigError("rates, times, sizes and counts must be more than 0")
        check_machine()
        with tempfile.TemporaryDirectory() as folder:
            for mbit in track(args.mbit, f"rates, each with {args.rounds} rounds of all contenders"):
                file = Path(folder) / "result.json"
                with two_hosts(mbit):
                    run_on_hosts("tools.benchmarks.slow_link", [*words, "--serve", str(file)])
                results.append({"mbit": mbit} | json.loads(file.read_text(encoding="utf-8")))
    except UserError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    options = {name: value for name, value in vars(args).items() if name not in ("mbit", "json", "serve")}
    report: Row = {"format": FORMAT, "torch": torch.__version__} | origin() | options | {"results": results}
    print(text(report))
    if args.json is not None:
        write_json(report, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
