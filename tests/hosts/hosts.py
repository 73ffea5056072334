"""Several hosts on one machine, to break them: each has its own network address, name, processes, /dev/shm and files.

A host is a network namespace, a cable to a switch (a bridge in a namespace of its own; nothing is added to the machine's own
network), and namespaces of mounts, names and processes around a process that plays init. When that is killed, the kernel kills
all that runs there. A link is taken down at the switch's end, so nobody sees a closed connection.

It takes root, `ip` (iproute2) and util-linux. All ends with the process that made it, and names that a killed one has left are
removed by the next. What these hosts cannot show: their own clocks, disks, kernels and page caches.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tests.training.launch import ROOT, environment

__all__ = ["LOCAL", "Agent", "Hosts", "missing", "networks"]

LOCAL = Path("/mnt/local")
"""A folder that every host has, with files of its own."""
_TEMPORARY = Path("/mnt/tmp")
_PREFIX = "zbh"
_MOMENT_S = 5.0
"""Seconds that it may take until the end of an agent is written down."""
_INIT = """
set -e
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount -t tmpfs -o "size=$3" tmpfs /dev/shm
mount -t tmpfs tmpfs /mnt
mkdir /mnt/local /mnt/tmp
mount --bind "$2/$1" /mnt/local
mount -t tmpfs -o "size=$4" tmpfs /mnt/tmp
set +e
echo up
while :; do sleep 3600 & wait; done
"""
"""Plays init; bash also waits for processes that have lost their parent."""


@functools.cache
def missing() -> str | None:
    """What this machine lacks; None: nothing."""
    if os.geteuid() != 0:
        return "hosts take root"
    for name in ("ip", "unshare", "setpriv", "tc"):
        if shutil.which(name) is None:
            return f"hosts take the command {name} (iproute2, util-linux)"
    try:
        _ip(f"netns add {_network('try')}")
        _ip(f"netns delete {_network('try')}")
        subprocess.run(["unshare", "--mount", "--uts", "--pid", "--fork", "true"], check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        return f"hosts take namespaces, and this machine allows none: {error.stderr}"
    return None


class Agent(NamedTuple):
    """A torchrun on a host."""

    stdout: Path
    stderr: Path
    ended: Path
    """A file with the time and the exit code, once it has ended."""

    @property
    def outcome(self) -> tuple[float, int] | None:
        """When it ended and with which exit code; None: it runs."""
        if not self.ended.exists():
            return None
        when, code = self.ended.read_text().split()
        return float(when), int(code)

    @property
    def screen(self) -> str:
        """What it has printed."""
        return "".join(path.read_text() if path.exists() else "" for path in (self.stdout, self.stderr))


class Hosts:
    """Hosts node0, node1, ... with addresses 10.77.0.1, 10.77.0.2, ... A context manager: they are up inside.

    Args:
        num: how many.
        folder: an empty one, which all hosts see; each host's LOCAL is a folder of its own in it.
        memory: size of /dev/shm per host, as mount takes it, where it is not the usual one.
        temporary: the same of the folder for temporary files.
    """

    def __init__(
        self, num: int, folder: Path, *, memory: Mapping[int, str] | None = None, temporary: Mapping[int, str] | None = None
    ) -> None:
        self.num = num
        self.names = [f"node{host}" for host in range(num)]
        self._folder, self._memory, self._temporary = folder, memory or {}, temporary or {}
        self._inits: dict[int, subprocess.Popen[str]] = {}
        self._spaces: dict[int, str] = {}
        """The process namespace of each host."""
        self._agents: list[Agent] = []

    def __enter__(self) -> Hosts:
        _remove_stale()
        try:
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for host in list(self._inits):
            self.kill(host)
        until = time.monotonic() + _MOMENT_S
        while not all(agent.outcome for agent in self._agents) and time.monotonic() < until:
            time.sleep(0.01)
        for network in ("switch", *self.names):
            _ip(f"netns delete {_network(network)}", check=False)

    def _build(self) -> None:
        lines = [f"10.77.0.{host + 1} {name}" for host, name in enumerate(self.names)]
        (self._folder / "hosts").write_text("127.0.0.1 localhost\n" + "\n".join(lines) + "\n")
        switch = _network("switch")
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link add name bridge up type bridge")
        for host, name in enumerate(self.names):
            network = _network(name)
            _ip(f"netns add {network}")
            _ip(f"-n {switch} link add name {name} type veth peer name eth0 netns {network}")
            _ip(f"-n {switch} link set {name} master bridge up")
            _ip(f"-n {network} address add 10.77.0.{host + 1}/24 dev eth0")
            _ip(f"-n {network} link set eth0 up")
            _ip(f"-n {network} link set lo up")
            (self._folder / name).mkdir()
            self._boot(host)

    def _boot(self, host: int) -> None:
        name = self.names[host]
        spaces = "unshare --mount --uts --pid --fork --kill-child --mount-proc bash -c"
        start = f"setpriv --pdeathsig KILL ip netns exec {_network(name)} {spaces}".split()
        given = [name, str(self._folder), self._memory.get(host, "1g"), self._temporary.get(host, "1g")]
        init = subprocess.Popen([*start, _INIT, "init", *given], stdout=subprocess.PIPE, text=True, start_new_session=True)
        self._inits[host] = init
        assert init.stdout is not None
        assert init.stdout.readline() == "up\n", f"{name} does not start"
        self._spaces[host] = os.readlink(f"/proc/{_child(init.pid)}/ns/pid")

    def start(self, host: int, argv: Sequence[object], variables: Mapping[str, str], *, is_cold: bool = False) -> Agent:
        """Start torchrun on a host."""
        files = [self._folder / f"{self.names[host]}.{len(self._agents)}.{end}" for end in ("stdout", "stderr", "ended")]
        request = {
            "init": _child(self._inits[host].pid),
            "argv": list(map(str, argv)),
            "env": environment(**variables, TMPDIR=str(_TEMPORARY)),
            "is_cold": is_cold,
            **{path.suffix[1:]: str(path) for path in files},
        }
        server = _server()
        assert server.stdin is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        self._agents.append(Agent(*files))
        return self._agents[-1]

    def processes(self, host: int) -> list[int]:
        """Processes of a host, but for init's: the agent and its ranks."""
        found = []
        for path in Path("/proc").iterdir():
            with suppress(OSError):
                is_here = path.name.isdecimal() and os.readlink(path / "ns/pid") == self._spaces[host]
                if is_here and (path / "comm").read_text() not in ("sleep\n", "bash\n") and _parent(path) is not None:
                    found.append(int(path.name))
        return found

    def ranks(self, host: int) -> list[int]:
        """Processes of a host that the agent has started, or which were left by it. The agent's parent is outside."""
        if host not in self._inits:
            return []
        found = self.processes(host)
        started = [pid for pid in found if _parent(Path(f"/proc/{pid}")) in {*found, _child(self._inits[host].pid)}]
        return [pid for pid in started if not _is_helper(pid)]

    def find(self, host: int, number: int) -> int:
        """The process of a host that has this number there."""
        status = {pid: Path(f"/proc/{pid}/status").read_text() for pid in self.processes(host)}
        return next(pid for pid, text in status.items() if re.search(rf"^NSpid:.*\b{number}$", text, re.MULTILINE))

    def kill(self, host: int) -> None:
        """All processes of the host die at once. Their connections are closed, if the link is up."""
        init = self._inits.pop(host)
        init.kill()
        init.wait()
        assert init.stdout is not None
        init.stdout.close()

    def link(self, host: int, *, is_up: bool) -> None:
        """Unplug the host's cable, or plug it in."""
        _ip(f"-n {_network('switch')} link set {self.names[host]} {'up' if is_up else 'down'}")

    def split(self, hosts: Sequence[int]) -> None:
        """Cut these hosts off from the others, not from each other."""
        switch = _network("switch")
        _ip(f"-n {switch} link add name other up type bridge")
        for host in hosts:
            _ip(f"-n {switch} link set {self.names[host]} master other")

    def mute(self, host: int) -> None:
        """Lose all that the host sends from now on; it still receives. It is sent to an address that no host has."""
        for other in set(range(self.num)) - {host}:
            wrong = "lladdr 02:00:00:00:00:01 nud permanent dev eth0"
            _ip(f"-n {_network(self.names[host])} neighbor replace 10.77.0.{other + 1} {wrong}")

    def slow(self, host: int, megabits: float) -> None:
        """Limit what the host sends and receives per second."""
        for network, device in ((self.names[host], "eth0"), ("switch", self.names[host])):
            limit = f"tc -n {_network(network)} qdisc replace dev {device} root tbf rate {megabits}mbit burst 32k latency 400ms"
            subprocess.run(limit.split(), check=True)


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Started once."""
    start = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "tests.hosts.warm"]
    server = subprocess.Popen(start, stdin=subprocess.PIPE, text=True, env=environment(), cwd=ROOT, start_new_session=True)
    atexit.register(server.kill)
    return server


def _parent(process: Path) -> int | None:
    """The parent of a process; None: it has ended."""
    with suppress(OSError):
        state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
        return None if state == "Z" else int(parent)
    return None


def _is_helper(pid: int) -> bool:
    """Whether a rank of Megatron-LM's loop has spawned it to write checkpoints: torchrun's SIGTERM ends the rank alone."""
    with suppress(OSError):
        return b"from multiprocessing" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _network(name: str) -> str:
    return f"{_PREFIX}{os.getpid()}-{name}"


def _ip(words: str, *, check: bool = True) -> str:
    return subprocess.run(["ip", *words.split()], check=check, capture_output=True, text=True).stdout


def networks() -> set[str]:
    """The networks of this process."""
    return set(re.findall(rf"^{_PREFIX}{os.getpid()}-(\S+)", _ip("netns list"), re.MULTILINE))


def _remove_stale() -> None:
    """Remove networks of processes that are gone; their hosts ended with them."""
    for name in re.findall(rf"^{_PREFIX}\d+-\S+", _ip("netns list"), re.MULTILINE):
        if not Path(f"/proc/{re.findall(r'[0-9]+', name)[0]}").exists():
            _ip(f"netns delete {name}", check=False)
