"""What a `WeightGradStore` holds."""

from __future__ import annotations

from megatron.zerobubble.wgrad.store import WeightGradStore


def pending_bytes(store: WeightGradStore) -> int:
    """Bytes of the tensors held for W; a storage that several GEMMs share counts once. Without what deferring modules hold in
    queues of their own."""
    storages = {}
    for entries in (*store._entries.values(), *(group.left for group in store._groups.values())):
        for entry in entries:
            for tensor in (entry.grad_output, entry.input):
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
