"""The group of PyTorch processes: joining it, leaving it, messages, and the exchange of tensors.

Invariant: tensors travel between processes as raw bytes, through an all-gather or an all-to-all of
gloo. No collective adds numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import json
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from perdure.checkpoint.slice_exchange import own_host
from perdure.distribute import pytree
from perdure.distribute.cluster import Cluster, ClusterOptions, await_members, with_existing
from perdure.distribute.cluster.listener import listen
from perdure.distribute.engine import Merge, sliced
from perdure.distribute.key_value_group import KeyValueProcesses, late, lost, time_left, unreachable
from perdure.distribute.lifeline import Lifeline
from perdure.errors import ClusterError
from perdure.runtime.framework_group import innermost_store
from perdure.runtime.process_group import Processes, SingleProcess

_joined: dict[Cluster, Processes] = {}
_subgroups: dict[tuple[int, ...], Processes] = {}

# In every key: torchrun keeps one store for all attempts, with the values of the earlier ones.
_ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

_FAILED_LEAVE = timedelta(seconds=5)
"""How long process 0 waits for the others after an unhandled error, which they may raise too."""


def initialize(cluster: Cluster, options: ClusterOptions | None = None) -> Processes:
    """`join`, for programs that use `torch.distributed` themselves.

    The group then has NCCL for CUDA tensors, and a process that is alone gets a process group of one.
    """
    cluster = with_existing(cluster, "torch")
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if cluster.num_processes == 1 and not dist.is_initialized():
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        atexit.register(_end_collectives)
    return join(cluster, options, backend)


def join(
    cluster: Cluster, options: ClusterOptions | None = None, backend: str = "gloo"
) -> Processes:
    """Become a member of the group. May be called twice.

    A process group that the program has initialized is used as it is, whatever its backend. For a group
    of one this does nothing.

    Raises:
        ClusterError: A process is missing, or two have one number (see `await_members`).
    """
    cluster = with_existing(cluster, "torch")
    if cluster.num_processes == 1:
        return SingleProcess()
    if cluster not in _joined:
        options = options or ClusterOptions.from_environment()
        if dist.is_initialized():
            _joined[cluster] = _use_existing_group(cluster, options)
        else:
            _joined[cluster] = _make_group(cluster, options, backend)
    return _joined[cluster]


def subgroup(processes: Processes, group: Any) -> Processes:
    """The processes of a `torch.distributed` group, which are some of `processes`."""
    members = tuple(dist.get_process_group_ranks(group))
    if processes.index not in members:
        raise ClusterError(
            f"process_group: expected a group with this process, number {processes.index}, found one "
            f"of the processes {members}. Each process passes a group to which it belongs."
        )
    if len(members) == processes.count:
        return processes
    if members not in _subgroups:
        assert isinstance(processes, KeyValueProcesses)
        _subgroups[members] = processes.subgroup(members) if len(members) > 1 else SingleProcess()
    return _subgroups[members]


def _use_existing_group(cluster: Cluster, options: ClusterOptions) -> Processes:
    """Join the process group that the program has initialized.

    Messages go through a store that process 0 serves, and whose address the program's store tells. The
    program's own store may be in torchrun, which a further signal ends while its workers still save.
    Partial sums go through a new gloo group of the same processes.
    """
    address = f"perdure/attempt-{_ATTEMPT}/store"
    known = dist.distributed_c10d._get_default_store()
    wait = timedelta(seconds=options.operation_timeout)
    _exchange.timeout = wait
    watch = _LossWatch(wait, options.heartbeat)
    if cluster.is_chief:
        host = _address_of_this(known)
        served = _serve_store(host, 0, cluster, wait, wait_for_workers=False)
        port = served.port
        watch.start(_client(host, port, wait), 0, host)
        known.set(address, json.dumps([host, port]))
    else:
        host, port = json.loads(known.get(address))
        try:
            served = _client(host, port, wait)
            watch.start(_client(host, port, wait), cluster.process_id, host)
        except RuntimeError as error:
            raise ClusterError(
                f"process {cluster.process_id} cannot reach process 0 at {host}:{port} ({error}); call "
                f"perdure.initialize_distributed('torch') in place of init_process_group, which takes "
                f"the coordinator's address"
            ) from error

    def leave_group() -> None:
        # The group is the program's, which may still use it in exit handlers. After an unhandled error
        # it does not, and the others would wait for this process in a collective of that group.
        _end_collectives(everything=_has_failed())
        _leave(served, cluster, timedelta(seconds=options.leave_timeout), watch)

    # An exit handler that the children of multiprocessing run too, unlike those of atexit.
    Finalize(None, leave_group, exitpriority=0)
    return KeyValueProcesses(
        lambda: _Store(_client(host, port, wait), watch),
        cluster.process_id,
        cluster.num_processes,
        channel=f"attempt-{_ATTEMPT}",
    )


def _address_of_this(store: Any) -> str:
    """The address at which the other processes reach this one, which has reached `store`."""
    address = own_host()
    named = getattr(innermost_store(store), "host", None)
    # The store is on this machine, and its name means the loopback here and not on other machines.
    return named if named and ipaddress.ip_address(address).is_loopback else address


def _serve_store(
    host: str, port: int, cluster: Cluster, wait: timedelta, *, wait_for_workers: bool
) -> TCPStore:
    """The store of process 0. By itself it would listen at every address of this machine."""
    listener = listen(host, port)
    return TCPStore(
        host,
        listener.getsockname()[1],
        cluster.num_processes,
        is_master=True,
        timeout=wait,
        wait_for_workers=wait_for_workers,
        master_listen_fd=listener.detach(),
    )


def _client(host: str, port: int, wait: timedelta) -> TCPStore:
    """A new connection to the store of process 0."""
    return TCPStore(host, port, is_master=False, timeout=wait)


class _Exchange:
    """The process group for partial sums: None, the default one, unless the program made that."""

    timeout: timedelta | None = None
    _group: Any = None

    def group(self) -> Any:
        if self.timeout is not None and self._group is None:
            # The backend and the time limit of the program's group are unknown. `new_group` is a
            # collective: every process calls it in the first step.
            self._group = dist.new_group(backend="gloo", timeout=self.timeout)
        return self._group

    def close(self) -> None:
        """Close the connections of the group that was made here."""
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)


_exchange = _Exchange()


def _make_group(cluster: Cluster, options: ClusterOptions, backend: str) -> Processes:
    """Wait for all processes, and initialize the process group."""
    await_members(cluster, options.start_timeout)
    host, port = cluster.host_port
    start = timedelta(seconds=options.start_timeout)
    # The limit is for a process that hangs. A process that is gone closes its connections, which the
    # others notice at once.
    wait = timedelta(seconds=options.operation_timeout)
    try:
        if cluster.is_chief:
            store = _serve_store(host, port, cluster, start, wait_for_workers=True)
        else:
            store = TCPStore(host, port, cluster.num_processes, False, start, wait_for_workers=True)
        watch = _LossWatch(wait, options.heartbeat)
        if cluster.is_chief:  # before the others have finished the next call
            watch.start(_client(host, port, wait), 0, host)
        dist.init_process_group(
            backend,
            store=store,
            rank=cluster.process_id,
            world_size=cluster.num_processes,
            timeout=wait,
        )
    except (OSError, RuntimeError) as error:
        raise ClusterError(
            f"process {cluster.process_id} could not join the group of {cluster.num_processes} at "
            f"{cluster.coordinator} (from {cluster.source}): {error}"
        ) from error
    if not cluster.is_chief:
        watch.start(_client(host, port, wait), cluster.process_id, host)
    atexit.register(_leave, store, cluster, timedelta(seconds=options.leave_timeout), watch)
    atexit.register(_end_collectives)  # called before `_leave`
    return KeyValueProcesses(
        lambda: _Store(_client(host, port, wait), watch),
        cluster.process_id,
        cluster.num_processes,
    )


def _leave(store: TCPStore, cluster: Cluster, limit: timedelta, watch: _LossWatch) -> None:
    """Announce that this process leaves. Process 0, which serves `store`, waits for the others.

    They may still read messages from its store: the outcome of the last save, or the error that all
    processes raise. No process may wait for this one in a collective any more (`_end_collectives`); one
    may do so all the same after an error, because `DistributedDataParallel` keeps its connections.
    """
    watch.leaving()
    limit = min(limit, _FAILED_LEAVE) if _has_failed() else limit
    with contextlib.suppress(RuntimeError):
        store.set(_left(cluster.process_id), "")
        if cluster.is_chief:
            store.wait([_left(process) for process in range(cluster.num_processes)], limit)
    watch.stop()


def _has_failed() -> bool:
    """Whether this process ends by an unhandled error."""
    return getattr(sys, "last_value", None) is not None


def _left(process: int) -> str:
    """The key that a process sets when it leaves."""
    return f"perdure/attempt-{_ATTEMPT}/left/{process}"


def _end_collectives(*, everything: bool = True) -> None:
    """Close the connections of the collectives: a process that waits in one for this one gets an error.

    Args:
        everything: Those of the default group too, and not only those for partial sums.
    """
    with contextlib.suppress(RuntimeError, ValueError):
        _exchange.close()
        if everything and dist.is_initialized():
            dist.destroy_process_group()


class _LossWatch:
    """Ends the waits of this process for a process that is gone.

    The store ends a wait only when the key gets a value, or after the time limit. So this object sets a
    special value for the process that is gone, unless that process has set its own value before.
    """

    GONE = b"\2"

    def __init__(self, wait: timedelta, silence: float = ClusterOptions.heartbeat) -> None:
        self.seconds = wait.total_seconds()
        self._silence = silence
        self._guard = threading.Lock()
        self._awaited: dict[str, int] = {}
        self._gone: set[int] = set()
        self._store: Any = None
        self._lifeline: Lifeline | None = None

    def start(self, store: Any, index: int, host: str) -> None:
        """Begin to watch.

        Args:
            store: A connection to the store that nothing else uses.
            index: The number of this process.
            host: Where process 0 listens.
        """
        address = f"perdure/attempt-{_ATTEMPT}/lifeline"

        def look() -> bytes | None:
            try:
                return store.get(address) if store.check([address]) else None
            except RuntimeError:  # process 0 is gone, so every wait ends with an error anyway
                return None

        self._store = store
        with contextlib.suppress(OSError):  # without a connection, waits end after the time limit
            self._lifeline = Lifeline(
                index,
                host,
                lambda data: store.set(address, data),
                look,
                self._on_gone,
                self._silence,
            )

    def connect(self) -> None:
        """Connect to process 0, so that it notices the end of this process.

        Called after every message from another process: from the first one on, process 0 listens.
        """
        if self._lifeline is not None:
            with contextlib.suppress(OSError):
                self._lifeline.connect()

    def leaving(self) -> None:
        if self._lifeline is not None:
            self._lifeline.leaving()

    def stop(self) -> None:
        if self._lifeline is not None:
            self._lifeline.stop()

    @contextlib.contextmanager
    def awaiting(self, key: str, process: int) -> Iterator[bool]:
        """Note a wait for `key`, which `process` sets; yields whether it is known to be gone."""
        with self._guard:
            self._awaited[key] = process
            gone = process in self._gone
        try:
            yield gone
        finally:
            with self._guard:
                del self._awaited[key]

    def _on_gone(self, process: int) -> None:
        with self._guard:
            self._gone.add(process)
            keys = [key for key, setter in self._awaited.items() if setter == process]
        with contextlib.suppress(RuntimeError):  # if the store is gone too, every wait has ended
            for key in (*keys, _left(process)):
                self._store.compare_set(key, "", self.GONE.decode())


class _Store:
    """PyTorch's key-value store. Each channel needs its own: a connection is locked during a wait."""

    def __init__(self, store: Any, watch: _LossWatch) -> None:
        self._store = store
        self._watch = watch

    def set(self, key: str, value: bytes) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise unreachable("a message to the other processes", error) from error

    def get(self, key: str, process: int, waited: float = 0.0) -> bytes:
        try:
            self._store.set_timeout(timedelta(seconds=time_left(self._watch.seconds, waited)))
            with self._watch.awaiting(key, process) as gone:
                missing = gone and not self._store.check([key])
                value = _LossWatch.GONE if missing else self._store.get(key)
        except RuntimeError as error:
            if "timeout" in str(error):
                raise late(process, self._watch.seconds) from error
            raise unreachable("waiting for the other processes", error) from error
        if value == _LossWatch.GONE:
            raise lost(f"waiting for process {process}")
        self._watch.connect()
        return value

    def has(self, key: str) -> bool:
        try:
            return self._store.check([key])
        except RuntimeError as error:
            raise unreachable("waiting for the other processes", error) from error

    def delete(self, key: str) -> None:
        try:
            self._store.delete_key(key)
        except RuntimeError as error:
            raise unreachable("a message to the other processes", error) from error


def exchange(device: Any, roots: list[Any], counts: tuple[int, ...], merge: Merge | None) -> Any:
    """The total, on `device`; see Engine.exchange. Bytes go through the host's memory."""
    packed = [_PackedTree(root) for root in roots]
    like = packed[0]
    try:
        if merge is None or not sliced(like.nbytes, counts):
            lines = _all_gather(
                torch.stack(_padded([tree.line for tree in packed], max(counts))), counts
            )
            values = [[like.value(line, device) for line in block] for block in lines]
            return values if merge is None else merge(values)
        # Each process gets one slice of every partial sum and adds those slices in the tree. The
        # elements are added one by one, so the cuts do not change the result.
        size = like.slice_size(len(counts))
        sent = torch.cat([tree.slices(len(counts), size) for tree in packed], 1)
        slices = torch.empty(sum(counts) * size, dtype=torch.uint8)
        dist.all_to_all_single(
            slices,
            sent.reshape(-1),
            [n * size for n in counts],
            [len(roots) * size] * len(counts),
            _exchange.group(),
        )
        parts = iter(slices.split(size))
        values = [[like.typed(next(parts), len(counts)) for _ in range(n)] for n in counts]
        total = merge(values)
        line = torch.cat([part.reshape(-1).view(torch.uint8) for part in total])
        whole = _all_gather(line[None], (1,) * len(counts))
        return like.value(like.joined([lines[0] for lines in whole]), device)
    except RuntimeError as error:
        raise lost("the exchange of partial sums", error) from error


def _all_gather(lines: torch.Tensor, counts: tuple[int, ...]) -> list[list[torch.Tensor]]:
    """The lines of every process. All processes send equally many lines; nothing reads the padding."""
    blocks = [torch.empty_like(lines) for _ in counts]
    dist.all_gather(blocks, lines, _exchange.group())
    return [list(block[:count]) for block, count in zip(blocks, counts, strict=True)]


def _padded(lines: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    return lines + [lines[-1]] * (rows - len(lines))


class _PackedTree:
    """The bytes of a tree of tensors in one line, sorted by dtype, which can be cut into slices."""

    def __init__(self, value: Any) -> None:
        self._like = value
        leaves = [torch.as_tensor(leaf).detach() for _, leaf in pytree.flatten(value)]
        self._shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        self._types = sorted({leaf.dtype for leaf in leaves}, key=str)
        self._order = sorted(range(len(leaves)), key=lambda n: self._types.index(leaves[n].dtype))
        flat = [leaves[n].cpu().contiguous().reshape(-1).view(torch.uint8) for n in self._order]
        self.line = torch.cat(flat)
        self.nbytes = self.line.numel()
        self._spans = [
            sum(leaf.nbytes for leaf in leaves if leaf.dtype == dtype) for dtype in self._types
        ]

    def _parts(self, processes: int) -> list[int]:
        """The bytes of each dtype in a slice. A slice has whole elements; the last one is padded."""
        return [
            -(-span // (processes * dtype.itemsize)) * dtype.itemsize
            for span, dtype in zip(self._spans, self._types, strict=True)
        ]

    def slice_size(self, processes: int) -> int:
        return sum(self._parts(processes))

    def slices(self, processes: int, size: int) -> torch.Tensor:
        """The slice for each process, as a tensor of bytes [processes, size]."""
        out, start = torch.zeros((processes, size), dtype=torch.uint8), 0
        for span, part, line in zip(
            self._spans, self._parts(processes), self.line.split(self._spans), strict=True
        ):
            padded = torch.zeros(processes * part, dtype=torch.uint8)
            padded[:span] = line
            out[:, start : start + part] = padded.view(processes, part)
            start += part
        return out

    def typed(self, line: torch.Tensor, processes: int) -> list[torch.Tensor]:
        """A slice, as one tensor for each dtype."""
        # Cloned, because a view under another dtype must start at a multiple of its size.
        return [
            part.clone().view(dtype)
            for part, dtype in zip(line.split(self._parts(processes)), self._types, strict=True)
        ]

    def joined(self, lines: list[torch.Tensor]) -> torch.Tensor:
        """The line, from the slice of every process: the inverse of `slices`."""
        blocks = torch.stack(lines).split(self._parts(len(lines)), 1)
        return torch.cat(
            [block.reshape(-1)[:span] for block, span in zip(blocks, self._spans, strict=True)]
        )

    def value(self, line: torch.Tensor, device: Any) -> Any:
        """The tree of tensors whose bytes are in `line`."""
        leaves: list[Any] = [None] * len(self._shapes)
        start = 0
        for number in self._order:
            shape, dtype = self._shapes[number]
            size = shape.numel() * dtype.itemsize
            leaf = line[start : start + size].clone().view(dtype).reshape(shape)
            leaves[number] = leaf.to(device)
            start += size
        return pytree.rebuild(self._like, iter(leaves))
