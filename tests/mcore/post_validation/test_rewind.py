"""A forward that runs again reads its data as they were before it changed them, and draws the same random numbers."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron.zerobubble.errors import ExecutionError
from megatron.zerobubble.mcore.cpu.device import HostDevice, quiet_third_parties

with quiet_third_parties():
    from megatron.zerobubble.mcore.post_validation.rewind import Habits, Replayed, Rewind

Use = tuple[Callable[[], Any], Callable[[Any], Any]]
"""(what the loop's iterator returns, a forward step: changes that, and returns what it saw)."""
USES: dict[str, Use] = {}


def use(make: Callable[[], Any]) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def add(forward: Callable[[Any], Any]) -> Callable[[Any], Any]:
        USES[forward.__name__] = make, forward
        return forward

    return add


def _tokens() -> Tensor:
    return torch.arange(6).view(2, 3)


def _dict() -> dict[str, Any]:
    return {"tokens": _tokens(), "meta": {"names": ["a", "b"], "shape": (2, {"rows": 2})}}


@use(_dict)
def keys_are_popped(batch: Any) -> Any:
    return batch.pop("tokens").tolist(), list(batch)


@use(_dict)
def nested_containers_are_emptied(batch: Any) -> Any:
    seen = repr(batch)
    batch["meta"]["names"].clear()
    del batch["meta"]["shape"][1]["rows"]
    batch["meta"]["new"] = 1
    return seen


@use(lambda: OrderedDict(a=_tokens(), b=_tokens()))
def keys_are_added_and_moved(batch: Any) -> Any:
    seen = list(batch)
    batch.move_to_end("a")
    batch["a"] = batch["a"] + 1
    batch["c"] = None
    return seen, batch["a"].tolist()


@use(lambda: [_tokens(), [1, 2], {3}, deque([4, 5])])
def items_are_taken_out(batch: Any) -> Any:
    _, numbers, some, queue = batch
    batch.reverse()
    numbers.append(numbers.pop(0))
    queue.popleft()
    queue.append(6)
    return some.pop(), list(numbers), list(queue), [type(each).__name__ for each in batch]


@dataclass(frozen=True)
class _Packed:
    lengths: list[int] = field(default_factory=lambda: [1, 2])


@dataclass(slots=True)
class _Slots:
    tokens: Any


@use(lambda: SimpleNamespace(tokens=_tokens(), packed=_Packed(), row=_Slots([_tokens()])))
def attributes_are_set_and_deleted(batch: Any) -> Any:
    seen = repr(batch)
    del batch.tokens
    batch.packed.lengths.pop()
    object.__setattr__(batch.packed, "lengths", [])
    batch.row.tokens = batch.row.tokens.pop()
    batch.new = 1
    return seen


@use(lambda: UserDict(tokens=_tokens()))
def keys_of_a_mapping_are_popped(batch: Any) -> Any:
    return batch.pop("tokens").tolist(), len(batch)


@use(_tokens)
def tensors_are_changed_in_place(batch: Any) -> Any:
    return batch.add_(1).tolist()


@use(_dict)
def tensors_are_changed_unseen(batch: Any) -> Any:
    """Without a trace in the version of the tensor."""
    batch["tokens"].data.mul_(2)
    batch["tokens"].numpy()[0] += 1
    return batch["tokens"].tolist()


@use(lambda: {"tokens": _tokens(), "square": torch.arange(4).view(2, 2), "ragged": [_tokens()[0], _tokens()[1, :2]]})
def tensors_change_their_shape(batch: Any) -> Any:
    seen = repr(batch)
    batch["tokens"].unsqueeze_(0)
    batch["square"].t_()
    batch["ragged"][0].resize_(1)
    batch["ragged"][1].data = torch.zeros(5)
    return seen


@use(lambda: torch.nested.nested_tensor([_tokens()[0], _tokens()[1, :2]], layout=torch.jagged))
def nested_tensors_are_changed_in_place(batch: Any) -> Any:
    return [row.tolist() for row in batch.add_(1).unbind()]


def _views() -> Any:
    text = torch.arange(7)
    return text[:-1], text[1:]


@use(_views)
def views_share_what_is_changed(batch: Any) -> Any:
    tokens, labels = batch
    tokens += 1
    return tokens.tolist(), labels.tolist()


@use(lambda: {"numbers": np.arange(3), "rows": np.array([{"a": 1}, [2]], dtype=object)})
def arrays_are_changed_in_place(batch: Any) -> Any:
    batch["numbers"] += 1
    batch["rows"][0].pop("a")
    batch["rows"][1] = None
    return repr(batch)


@use(lambda: [["the same list"], nn.Linear(1, 1), repr, iter([1])])
def references_to_what_is_no_data(batch: Any) -> Any:
    batch.append(batch)
    return len(batch), batch[0]


@pytest.mark.parametrize("name", USES)
def test_a_forward_reads_the_same_twice(name: str) -> None:
    """Of two microbatches, and then of a third."""
    make, forward = USES[name]
    items = [make() for _ in range(3)]
    expected = [forward(make()) for _ in range(3)]
    with HostDevice():
        iterator = Replayed(iter(items), Habits())
        assert [forward(next(iterator)) for _ in range(2)] == expected[:2]
        iterator.rewind()
        assert [forward(next(iterator)) for _ in range(3)] == expected


def test_microbatches_that_share_a_tensor() -> None:
    """Each forward goes on from what the one before it made of it."""
    shared = torch.zeros(2)
    with HostDevice():
        iterator = Replayed(iter([{"shared": shared}] * 3), Habits())
        for _ in range(2):
            next(iterator)["shared"].add_(1)
        iterator.rewind()
        assert [next(iterator)["shared"].add_(1)[0].item() for _ in range(3)] == [1, 2, 3]


def test_inference_tensors_are_read() -> None:
    with torch.inference_mode():
        item = torch.ones(2)
    with HostDevice():
        iterator = Replayed(iter([item]), Habits())
        next(iterator)
        iterator.rewind()
        assert next(iterator) is item


def test_large_tensors_are_copied_where_the_forward_step_changes_some() -> None:
    def read(habits: Habits) -> tuple[Replayed, list[float]]:
        iterator = Replayed(iter({"image": torch.zeros(4)} for _ in range(3)), habits)
        return iterator, [next(iterator)["image"].add_(1).sum().item()]

    habits = Habits()
    with HostDevice(), mock.patch("megatron.zerobubble.mcore.post_validation.batch_contents._SMALL", 0):
        iterator, seen = read(habits)
        with pytest.raises(ExecutionError, match=r"forward_step changed batch\['image'\] of microbatch 0, .* in place"):
            iterator.rewind()
        iterator, seen = read(habits)
        assert not habits.changes_tensors
        iterator.release()  # as in the first iteration, which never runs again
        assert habits.changes_tensors
        iterator, seen = read(habits)
        iterator.rewind()
        assert [next(iterator)["image"].add_(1).sum().item()] == seen


class _Reader:
    """A data iterator of a loop that has more to it than `next`."""

    def __init__(self) -> None:
        self.offset = 0

    def get_next(self, keys: list[str]) -> dict[str, int]:
        self.offset += 1
        return dict.fromkeys(keys, self.offset)


def test_other_functions_of_an_iterator_are_replayed() -> None:
    reader: Any = _Reader()
    with HostDevice():
        iterator = Replayed(reader, Habits())
        assert [iterator.get_next(["a"]), iterator.get_next(keys=["b"]).pop("b")] == [{"a": 1}, 2]
        iterator.rewind()
        assert [iterator.get_next(["a"]), iterator.get_next(keys=["b"]).pop("b"), iterator.get_next(["c"])["c"]] == [
            {"a": 1},
            2,
            3,
        ]
        assert iterator.offset == 3
        with pytest.raises(AttributeError, match="no attribute 'reset'"):
            iterator.reset()


def _drawing() -> Iterator[float]:
    while True:
        yield float(torch.rand(1)) + random.random() + float(np.random.rand())


def test_random_numbers_go_on_behind_each_item() -> None:
    def forward(item: float) -> list[float]:
        return [item, float(torch.rand(1)), random.random(), float(np.random.rand())]

    with HostDevice():
        iterator = Replayed(_drawing(), Habits())
        rewind = Rewind([iterator], [])
        first = [[random.random()], *(forward(next(iterator)) for _ in range(2))]
        rewind.before_step()
        rewind.rewind()
        again = [[random.random()], *(forward(next(iterator)) for _ in range(3))]
        assert again[:3] == first
        assert len({number for row in again for number in row}) == 13


class _Averaging(nn.Module):
    """Writes its buffers in each way that a forward can."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("lazy", None)
        self.register_buffer("counted", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, given: Tensor) -> Tensor:
        self.average = 0.5 * self.average + 0.5 * given  # type: ignore[has-type]
        self.lazy = given.clone() if self.lazy is None else self.lazy + given  # type: ignore[has-type]
        self.counted += 1
        if not hasattr(self, "new"):
            self.register_buffer("new", torch.ones(1))
        else:
            self.new.resize_(self.new.numel() + 1).fill_(2.0)
        return torch.cat([self.average, self.lazy, self.counted.view(1).float(), self.new])


def test_buffers_are_restored_by_module_and_name() -> None:
    chunk = nn.Sequential(_Averaging())
    averaging: Any = chunk[0]
    own = averaging.average
    with HostDevice():
        rewind = Rewind([], [chunk])
        first = [averaging(torch.full((2,), float(value))).tolist() for value in (1, 2, 3)]
        rewind.before_step()
        rewind.rewind()
        assert averaging.average is own
        assert averaging.lazy is None
        assert not hasattr(averaging, "new")
        assert [averaging(torch.full((2,), float(value))).tolist() for value in (1, 2, 3)] == first
