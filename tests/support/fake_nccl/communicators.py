"""Communicators: an ordered channel between ranks, without any buffer.

On each of its ranks a communicator has a stream of its own. The operations issued there run one after the other, in the order of
issue, each after the point of the compute stream at which it was issued. A send and a receive run only together, when each is
the next one on its rank; a collective when it is the next one on every rank. Then the data moves, all at once, and the ranks are
done with it one by one, the sender of a message first.

What the ranks disagree on (collectives of different kinds, messages of different sizes) hangs or corrupts memory with NCCL; here
it is an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tests.support.fake_nccl.clocks import Timeline
from tests.support.fake_nccl.device import Device, Mark
from tests.support.fake_nccl.engine import Engine, FakeNcclError
from tests.support.fake_nccl.memory import Reference

Carry = Callable[[Sequence[Sequence[Tensor]], Sequence[Sequence[Tensor]]], None]
"""Moves the data of a collective: (inputs per rank, outputs per rank), each a list of tensors."""


_SMALL = 64
"""Bytes of a message above which another algorithm carries it."""


class MismatchError(FakeNcclError):
    """Ranks have issued operations on one communicator that do not fit together."""


@dataclass(eq=False)
class Kernel:
    """One rank's part of an operation."""

    kind: str
    text: str
    inputs: list[Reference]
    outputs: list[Reference]
    end: Mark
    peer: int | None = None
    """Of a send or a receive: the other rank's place in the communicator."""
    carry: Carry | None = None
    """Of a collective."""
    end_of_rank: End | None = None
    is_carried: bool = field(default=False, init=False)

    def try_to_start(self) -> bool:
        """Whether its stream has come to it."""
        assert self.end_of_rank is not None
        return self.end_of_rank.queue[0] is self

    @property
    def sizes(self) -> list[object]:
        """What all ranks must agree on."""
        return [reference.size for reference in self.inputs]


class End:
    """One rank's end."""

    def __init__(self, device: Device, timeline: Timeline) -> None:
        self.device, self.timeline = device, timeline
        self.queue: deque[Kernel] = deque()

    def head(self) -> Kernel | None:
        """The operation that may run, if it may."""
        if not self.queue or not self.device.may_start(self.queue[0]):
            return None
        return self.queue[0]


class Communicator:
    """An ordered channel between the ranks that have joined.

    Args:
        engine: of the run.
        name: in messages.
        ranks: global ranks of its members.
        on_host: whether it is of gloo, which works on host memory and has no stream: an operation comes after what its thread has
            seen to be over, and devices neither wait for it nor does it for them.
    """

    def __init__(self, engine: Engine, name: str, ranks: Sequence[int], *, on_host: bool = False) -> None:
        self._engine, self.name, self.ranks, self.on_host = engine, name, tuple(ranks), on_host
        self.ends: dict[int, End] = {}
        """By place."""
        self._arrived: set[int] = set()
        self._connected: set[tuple[str, bool, int]] = set()
        """(collective, whether it is large, place): the ends of an algorithm's connections."""
        engine.add(self)

    def join(self, place: int, device: Device) -> None:
        """Make this rank's end: waits for the device, then for all other members. Blocks the host."""
        if not self.on_host:
            device.synchronize(f"its device, to make {self.name}")
        end = End(device, device.timeline(f"the stream of {self.name}"))
        self.ends[place] = end
        if not self.on_host:
            device.ends.append(lambda: not end.queue)
        self._arrived.add(place)
        missing = lambda: [rank for place, rank in enumerate(self.ranks) if place not in self._arrived]  # noqa: E731
        self._engine.block_until(lambda: not missing(), lambda: f"ranks {missing()}, to make {self.name}")

    def connect(self, place: int, kind: str, tensors: Sequence[Tensor]) -> None:
        """Open the connections of a collective's algorithm for this size, at its first use: as `join`, it waits and blocks."""
        is_large = max((tensor.nbytes for tensor in tensors), default=0) > _SMALL
        if self.on_host or (kind, is_large, place) in self._connected:
            return
        what = f"the connections of {'a large' if is_large else 'a small'} {kind} on {self.name}"
        self.ends[place].device.synchronize(f"its device, to make {what}")
        self._connected.add((kind, is_large, place))
        missing = lambda: [  # noqa: E731
            rank for each, rank in enumerate(self.ranks) if (kind, is_large, each) not in self._connected
        ]
        self._engine.block_until(lambda: not missing(), lambda: f"ranks {missing()}, to make {what}")

    def issue(
        self,
        place: int,
        kind: str,
        text: str,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        *,
        peer: int | None = None,
        carry: Carry | None = None,
    ) -> Kernel:
        """Issue an operation behind the compute stream, or of gloo behind the host. Returns at once."""
        end = self.ends[place]
        device = end.device
        caller = device.host()
        if not self.on_host:
            device.compute_stream.join(caller.clock)
            caller = device.compute_stream
        end.timeline.join(caller.clock)
        for tensor in inputs:
            device.memory.read(tensor, end.timeline, text)
        for tensor in outputs:
            device.memory.write(tensor, end.timeline, text)
        references = [[Reference(tensor, device.arena, text) for tensor in tensors] for tensors in (inputs, outputs)]
        kernel = Kernel(kind, text, *references, Mark(dict(end.timeline.clock), text), peer, carry, end)
        end.queue.append(kernel)
        if not self.on_host:
            device.issued(kernel)
        self._engine.pause()
        return kernel

    # -- as a mover -------------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        return bool(self._moves())

    def move(self) -> None:
        moves = self._moves()
        self._engine.random.choice(moves)()

    def _moves(self) -> list[Callable[[], None]]:
        heads = {place: head for place, end in self.ends.items() if (head := end.head()) is not None}
        moves: list[Callable[[], None]] = []
        for place, kernel in heads.items():
            if kernel.is_carried:
                peer = heads.get(kernel.peer) if kernel.kind == "receive" and kernel.peer is not None else None
                if peer is None or not peer.is_carried or peer.kind != "send" or peer.peer != place:
                    moves.append(lambda place=place: self._end(place))  # type: ignore[misc]
            elif kernel.kind == "send" and kernel.peer is not None:
                other = heads.get(kernel.peer)
                if other is not None and not other.is_carried and other.kind == "receive" and other.peer == place:
                    moves.append(lambda kernel=kernel, other=other: self._carry_message(kernel, other))  # type: ignore[misc]
        collectives = [kernel for kernel in heads.values() if kernel.carry is not None and not kernel.is_carried]
        if len(collectives) == len(self.ranks):
            moves.append(lambda: self._carry_collective([heads[place] for place in range(len(self.ranks))]))
        return moves

    def _carry_message(self, send: Kernel, receive: Kernel) -> None:
        (source,), (target,) = send.inputs, receive.outputs
        if source.size != target.size:
            raise MismatchError(f"{self.name}: {send.text} has {source.size}, {receive.text} {target.size}")
        target.tensor().view(-1).copy_(source.tensor().reshape(-1))
        send.is_carried = receive.is_carried = True

    def _carry_collective(self, kernels: Sequence[Kernel]) -> None:
        first = kernels[0]
        for other in kernels[1:]:
            if (other.kind, other.sizes) != (first.kind, first.sizes):
                raise MismatchError(f"{self.name}: {first.text} {first.sizes} meets {other.text} {other.sizes}")
        assert first.carry is not None
        inputs, outputs = (
            [[each.tensor() for each in getattr(kernel, name)] for kernel in kernels] for name in ("inputs", "outputs")
        )
        first.carry(inputs, outputs)
        for kernel in kernels:
            kernel.is_carried = True

    def _end(self, place: int) -> None:
        self.ends[place].queue.popleft().end.is_reached = True

    def waiting(self) -> Sequence[str]:
        return [
            f"rank {self.ranks[place]}, {self.name}: {end.queue[0].text} is next, {len(end.queue) - 1} behind it"
            for place, end in sorted(self.ends.items())
            if end.queue
        ]
