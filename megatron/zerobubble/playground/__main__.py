"""Start the scheduler playground: a page in the browser to plan, compare and export pipeline schedules."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import signal
import socket
import sys
import webbrowser
from typing import NoReturn

from megatron.zerobubble.messages import one_line, shown
from megatron.zerobubble.playground.server import Server

DEFAULT_PORT = 8321


class _PlaygroundParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {one_line(message)} (see --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = _PlaygroundParser(prog="zerobubble playground", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s: this machine only)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port, 0 for a free one (default %(default)s)")
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="host name that browsers may use; repeatable",
    )
    parser.add_argument(
        "--search-seconds",
        type=float,
        default=600.0,
        help="time limit of a task; a search keeps its best plan (default %(default)s)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Listen until interrupted. A user error is one line on stderr and exit code 2."""
    args = build_parser().parse_args(argv)
    if not args.search_seconds > 0:
        print(f"zerobubble playground: error: --search-seconds is {args.search_seconds}; give a number above 0", file=sys.stderr)
        return 2
    try:
        # It listens before the address is printed: an early request waits a moment instead of being refused.
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family)
    except (OSError, OverflowError, UnicodeError) as error:  # UnicodeError: not a host name
        where = f"{shown(args.host)} port {args.port}"
        print(f"zerobubble playground: error: cannot listen on {where}: {one_line(str(error))}; try --port 0", file=sys.stderr)
        return 2
    name = f"[{args.host}]" if ":" in args.host else args.host
    address = f"http://{name}:{listener.getsockname()[1]}/"
    print(f"playground: {address} (Ctrl-C ends it)", flush=True)
    if not _is_loopback(args.host):
        print("playground: everyone who can reach this address can run searches on this machine; there is no login", flush=True)
    if args.open:
        webbrowser.open(address)
    server = Server(listener, search_seconds=args.search_seconds, allowed_hosts=[*args.allow_host, args.host])
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), server:  # the normal way to end the server
        server.serve_forever()
    return 0


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    sys.exit(main())
