"""Calls on a thread of their own: in order, without blocking the caller; an error is raised by `wait`."""

from __future__ import annotations

import gc
import threading
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.zerobubble.errors import TransferError
from megatron.zerobubble.runtime.issuer import Issuer

CPU = torch.device("cpu")


def test_calls_are_made_in_order_and_not_waited_for() -> None:
    issuer, gate, made = Issuer(CPU), threading.Event(), list[int]()

    def call(number: int) -> mock.Mock:
        gate.wait(10)
        made.append(number)
        assert threading.current_thread() is not threading.main_thread()
        return work[number]

    work = [mock.Mock() for _ in range(5)]
    issued = [issuer(lambda number=number: call(number)) for number in range(5)]
    assert not made, "all were given while the first was under way"
    gate.set()
    issued[3].wait()
    assert made[:4] == [0, 1, 2, 3]
    work[3].wait.assert_called_once_with()
    issuer.close()
    assert made == [0, 1, 2, 3, 4], "closing leaves nothing uncalled"
    work[4].wait.assert_not_called()


def test_an_error_comes_out_where_it_is_waited_for_and_the_next_call_is_made() -> None:
    issuer = Issuer(CPU)

    def fail() -> mock.Mock:
        raise TransferError("no such peer")

    failed, fine = issuer(fail), issuer(mock.Mock)
    fine.wait()
    with pytest.raises(TransferError, match="no such peer"):
        failed.wait()
    issuer.close()


def test_a_call_that_was_made_keeps_nothing_alive() -> None:
    issuer, tensor = Issuer(CPU), torch.zeros(3)
    storage = StorageWeakRef(tensor.untyped_storage())
    issued = issuer(lambda kept=tensor: mock.Mock(spec=["wait"]))  # type: ignore[misc]
    del tensor
    issued.wait()
    assert storage.expired()
    issuer.close()


def test_its_thread_ends_with_it() -> None:
    issuer, made = Issuer(CPU), list[int]()
    thread = issuer._thread
    issued = issuer(lambda: mock.Mock(side_effect=made.append(1)))
    del issuer
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    issued.wait()
    assert made == [1], "what was given before is called"
