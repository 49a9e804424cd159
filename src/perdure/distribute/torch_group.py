"""The group of torch processes: joining it, talking in it, moving bytes in it.

Owns `torch.distributed`. Invariant: values travel as raw bytes through an all-gather of gloo; no
collective ever computes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from perdure.checkpoint.processes import Processes, SingleProcess
from perdure.distribute import nest
from perdure.distribute.cluster import Cluster
from perdure.distribute.processes import KeyValueProcesses, lost
from perdure.errors import ClusterError

JOIN = timedelta(seconds=120)
# A process that is gone closes its connections, which is noticed at once. This is for one that hangs.
WAIT = timedelta(seconds=600)
# How long process 0 keeps the store open for the others' last reads.
LEAVE = timedelta(seconds=10)


def join(cluster: Cluster) -> Processes:
    """Become a member of the group; nothing to do for a group of one. May be called twice."""
    if cluster.num_processes == 1:
        return SingleProcess()
    return _members(cluster)


@functools.lru_cache(maxsize=1)
def _members(cluster: Cluster) -> Processes:
    if dist.is_initialized():
        raise ClusterError(
            "torch.distributed is initialised already; let the strategy do it, which needs a group "
            "whose collectives and timeouts it knows"
        )
    host, port = cluster.host_port
    try:
        store = TCPStore(
            host, port, cluster.num_processes, cluster.is_chief, JOIN, wait_for_workers=True
        )
        dist.init_process_group(
            "gloo",
            store=store,
            rank=cluster.process_id,
            world_size=cluster.num_processes,
            timeout=WAIT,
        )
    except RuntimeError as error:
        raise ClusterError(
            f"process {cluster.process_id} could not join the group of {cluster.num_processes} at "
            f"{cluster.coordinator} (from {cluster.source}): {error}"
        ) from error
    atexit.register(_leave, store, cluster)
    return KeyValueProcesses(
        lambda: _Store(TCPStore(host, port, is_master=False, timeout=WAIT)),
        cluster.process_id,
        cluster.num_processes,
    )


def _leave(store: Any, cluster: Cluster) -> None:
    """The store lives in process 0, which must not go before the others have read all they need."""
    with contextlib.suppress(RuntimeError):
        store.set(f"perdure/left/{cluster.process_id}", b"")
        if cluster.is_chief:
            store.wait([f"perdure/left/{p}" for p in range(cluster.num_processes)], LEAVE)
        dist.destroy_process_group()


class _Store:
    """torch's key-value store, through a connection of its own: a client locks while it waits."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise lost("a message to the other processes", error) from error

    def get(self, key: str) -> bytes:
        try:
            return self._store.get(key)
        except RuntimeError as error:
            raise lost("waiting for the other processes", error) from error

    def delete(self, key: str) -> None:
        try:
            self._store.delete_key(key)
        except RuntimeError as error:
            raise lost("a message to the other processes", error) from error


def exchange(device: Any, roots: list[Any], counts: tuple[int, ...]) -> list[list[Any]]:
    """The values of every process, on `device`. Through the host's memory, whatever the device."""
    shapes = [(leaf.shape, leaf.dtype) for _, leaf in nest.flatten(roots[0])]
    lines = [_bytes(root) for root in roots]
    # The same size everywhere; what pads is never read.
    lines += [lines[-1]] * (max(counts) - len(lines))
    own = torch.stack(lines)
    every = [torch.empty_like(own) for _ in counts]
    try:
        dist.all_gather(every, own)
    except RuntimeError as error:
        raise lost("the exchange of partial sums", error) from error
    return [
        [_value(roots[0], line, shapes, device) for line in block[:count]]
        for block, count in zip(every, counts, strict=True)
    ]


def _bytes(value: Any) -> torch.Tensor:
    leaves = [leaf.detach().cpu().contiguous() for _, leaf in nest.flatten(value)]
    return torch.cat([leaf.reshape(-1).view(torch.uint8) for leaf in leaves])


def _value(like: Any, line: torch.Tensor, shapes: list[Any], device: Any) -> Any:
    leaves, start = [], 0
    for shape, dtype in shapes:
        size = shape.numel() * dtype.itemsize
        # Cloned, because a view under another dtype must start at a multiple of its size.
        leaf = line[start : start + size].clone().view(dtype).reshape(shape)
        leaves.append(leaf.to(device))
        start += size
    return nest.rebuild(like, iter(leaves))
