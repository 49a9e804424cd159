"""The group of PyTorch processes: joining it, messages, and the exchange of tensors.

Values travel as raw bytes through an all-gather or an all-to-all of gloo; no collective computes.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from perdure.distribute import pytree
from perdure.distribute.cluster import Cluster, ClusterOptions, await_members, with_existing
from perdure.distribute.engine import Merge, sliced
from perdure.distribute.key_value_group import KeyValueProcesses, late, lost
from perdure.distribute.lifeline import Lifeline
from perdure.errors import ClusterError
from perdure.framework_group import innermost_store
from perdure.process_group import Processes, SingleProcess

_joined: dict[Cluster, Processes] = {}


def initialize(cluster: Cluster, options: ClusterOptions | None = None) -> Processes:
    """`join`, for programs that use `torch.distributed` themselves: with NCCL for CUDA tensors, and a
    process group also for a process that is alone."""
    cluster = with_existing(cluster, "torch")
    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if cluster.num_processes == 1 and not dist.is_initialized():
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        atexit.register(_destroy)
    return join(cluster, options, backend)


def join(
    cluster: Cluster, options: ClusterOptions | None = None, backend: str = "gloo"
) -> Processes:
    """Become a member of the group; does nothing for a group of one. May be called twice.

    A process group that the program made is joined as it is, whatever its backend. Raises
    ClusterError if a process is missing or two claim one number (see `await_members`).
    """
    cluster = with_existing(cluster, "torch")
    if cluster.num_processes == 1:
        return SingleProcess()
    if cluster not in _joined:
        options = options or ClusterOptions.from_environment()
        if dist.is_initialized():
            _joined[cluster] = _adopt(cluster, options)
        else:
            _joined[cluster] = _enter(cluster, options, backend)
    return _joined[cluster]


def _adopt(cluster: Cluster, options: ClusterOptions) -> Processes:
    """Join the process group that the program made: send messages through its store, on separate
    connections, and exchange partial sums in a gloo group of the same processes."""
    store = dist.distributed_c10d._get_default_store()
    wait = timedelta(seconds=options.operation_timeout)
    _exchange.timeout = wait
    watch = _LossWatch(wait)
    if (host := getattr(innermost_store(store), "host", None)) is not None:
        watch.start(_connected(store, wait), cluster.process_id, host)
    # The reference keeps the store alive if the program destroys its group before the end.
    leave = timedelta(seconds=options.leave_timeout)
    at_end = (_connected(store, leave), cluster, leave, watch, store)
    # Also in the children of multiprocessing, which run no functions of atexit.
    Finalize(None, _leave, at_end, exitpriority=0)
    return KeyValueProcesses(
        lambda: _Store(_connected(store, wait), watch), cluster.process_id, cluster.num_processes
    )


def _connected(store: Any, wait: timedelta) -> Any:
    """Another connection to the store of a process group."""
    try:
        if hasattr(store, "clone"):
            connection = store.clone()
        else:  # PyTorch before 2.8
            store = innermost_store(store)
            connection = TCPStore(store.host, store.port, is_master=False)
    except (AttributeError, RuntimeError) as error:
        raise ClusterError(
            f"torch.distributed is initialized with a {type(store).__name__} that takes no further "
            f"connection ({error}); call perdure.initialize_distributed('torch') in place of "
            f"init_process_group"
        ) from error
    connection.set_timeout(wait)
    return connection


class _Exchange:
    """The group for partial sums: the default one, unless the program made that."""

    timeout: timedelta | None = None
    _group: Any = None

    def group(self) -> Any:
        if self.timeout is not None and self._group is None:
            # Backend and time limit of the program's group are unknown. A collective: every process
            # comes here for the first time in the same step.
            self._group = dist.new_group(backend="gloo", timeout=self.timeout)
        return self._group


_exchange = _Exchange()


def _enter(cluster: Cluster, options: ClusterOptions, backend: str) -> Processes:
    await_members(cluster, options.start_timeout)
    host, port = cluster.host_port
    start = timedelta(seconds=options.start_timeout)
    # The limit is for a process that hangs. One that is gone closes its connections, which is noticed
    # at once.
    wait = timedelta(seconds=options.operation_timeout)
    try:
        store = TCPStore(
            host, port, cluster.num_processes, cluster.is_chief, start, wait_for_workers=True
        )
        watch = _LossWatch(wait)
        if cluster.is_chief:  # before the others have finished the next call
            watch.start(TCPStore(host, port, is_master=False, timeout=wait), 0, host)
        dist.init_process_group(
            backend,
            store=store,
            rank=cluster.process_id,
            world_size=cluster.num_processes,
            timeout=wait,
        )
    except RuntimeError as error:
        raise ClusterError(
            f"process {cluster.process_id} could not join the group of {cluster.num_processes} at "
            f"{cluster.coordinator} (from {cluster.source}): {error}"
        ) from error
    if not cluster.is_chief:
        watch.start(TCPStore(host, port, is_master=False, timeout=wait), cluster.process_id, host)
    atexit.register(_destroy)
    atexit.register(_leave, store, cluster, timedelta(seconds=options.leave_timeout), watch)
    return KeyValueProcesses(
        lambda: _Store(TCPStore(host, port, is_master=False, timeout=wait), watch),
        cluster.process_id,
        cluster.num_processes,
    )


def _leave(
    store: Any, cluster: Cluster, limit: timedelta, watch: _LossWatch, _kept: Any = None
) -> None:
    """Wait in process 0, which holds the store, until the others have read all that they need."""
    watch.leaving()
    with contextlib.suppress(RuntimeError):
        store.set(_left(cluster.process_id), b"")
        if cluster.is_chief:
            store.wait([_left(process) for process in range(cluster.num_processes)], limit)
    watch.stop()


def _left(process: int) -> str:
    return f"perdure/left/{process}"


def _destroy() -> None:
    with contextlib.suppress(RuntimeError):
        if dist.is_initialized():
            dist.destroy_process_group()


class _LossWatch:
    """Ends the waits of this process for a process that is gone.

    A wait in the store ends only with a value or the time limit. So a special value is set in place of
    the process, unless the process set its own value before its end.
    """

    GONE = b"\2"

    def __init__(self, wait: timedelta) -> None:
        self.seconds = wait.total_seconds()
        self._guard = threading.Lock()
        self._awaited: dict[str, int] = {}
        self._gone: set[int] = set()
        self._store: Any = None
        self._lifeline: Lifeline | None = None

    def start(self, store: Any, index: int, host: str) -> None:
        """Watch, through a separate connection to the store."""
        address = "perdure/lifeline"

        def look() -> bytes | None:
            try:
                return store.get(address) if store.check([address]) else None
            except RuntimeError:  # process 0 is gone; every wait ends with an error of its own
                return None

        self._store = store
        with contextlib.suppress(OSError):  # without it a wait ends with its time limit
            self._lifeline = Lifeline(
                index, host, lambda data: store.set(address, data), look, self._on_gone
            )

    def connect(self) -> None:
        """Called after a message from another process, which may have been the last one to start: from
        now on process 0 has to notice the end of this process."""
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
        """Surrounds a wait for `key`; yields whether the process that sets it is known to be gone."""
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
        with contextlib.suppress(RuntimeError):  # the store is gone too: every wait has ended
            for key in (*keys, _left(process)):
                self._store.compare_set(key, "", self.GONE.decode())


class _Store:
    """PyTorch's key-value store, on a separate connection: a client holds a lock while it waits."""

    def __init__(self, store: Any, watch: _LossWatch) -> None:
        self._store = store
        self._watch = watch

    def set(self, key: str, value: bytes) -> None:
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise lost("a message to the other processes", error) from error

    def get(self, key: str, process: int) -> bytes:
        try:
            with self._watch.awaiting(key, process) as gone:
                missing = gone and not self._store.check([key])
                value = _LossWatch.GONE if missing else self._store.get(key)
        except RuntimeError as error:
            if "timeout" in str(error):
                raise late(process, self._watch.seconds) from error
            raise lost("waiting for the other processes", error) from error
        if value == _LossWatch.GONE:
            raise lost(f"waiting for process {process}")
        self._watch.connect()
        return value

    def delete(self, key: str) -> None:
        try:
            self._store.delete_key(key)
        except RuntimeError as error:
            raise lost("a message to the other processes", error) from error


def exchange(device: Any, roots: list[Any], counts: tuple[int, ...], merge: Merge | None) -> Any:
    """The total, on `device`; see Engine.exchange. Bytes go through the host's memory."""
    bulk = [_Bulk(root) for root in roots]
    like = bulk[0]
    try:
        if merge is None or not sliced(like.nbytes, counts):
            lines = _all_gather(torch.stack(_padded([b.line for b in bulk], max(counts))), counts)
            values = [[like.value(line, device) for line in block] for block in lines]
            return values if merge is None else merge(values)
        # A slice of every partial sum to each process, which adds the slices in the tree. Addition
        # is by element, so that it does not matter how the elements are cut.
        size = like.slice_size(len(counts))
        sent = torch.cat([b.slices(len(counts), size) for b in bulk], 1)
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
    """The lines of every process. All processes send the same number; padding is never read."""
    blocks = [torch.empty_like(lines) for _ in counts]
    dist.all_gather(blocks, lines, _exchange.group())
    return [list(block[:count]) for block, count in zip(blocks, counts, strict=True)]


def _padded(lines: list[torch.Tensor], rows: int) -> list[torch.Tensor]:
    return lines + [lines[-1]] * (rows - len(lines))


class _Bulk:
    """The bytes of a value: its tensors in the order of their types, so that slices have one each."""

    def __init__(self, value: Any) -> None:
        self._like = value
        leaves = [leaf.detach() for _, leaf in pytree.flatten(value)]
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
        """Bytes of each type in a slice: whole elements, the last slice padded."""
        return [
            -(-span // (processes * dtype.itemsize)) * dtype.itemsize
            for span, dtype in zip(self._spans, self._types, strict=True)
        ]

    def slice_size(self, processes: int) -> int:
        return sum(self._parts(processes))

    def slices(self, processes: int, size: int) -> torch.Tensor:
        """[processes, size]: the bytes for each process."""
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
        """A slice as one tensor of each type."""
        # Cloned, because a view under another dtype must start at a multiple of its size.
        return [
            part.clone().view(dtype)
            for part, dtype in zip(line.split(self._parts(processes)), self._types, strict=True)
        ]

    def joined(self, lines: list[torch.Tensor]) -> torch.Tensor:
        """The inverse of `slices`, from the slice of every process."""
        blocks = torch.stack(lines).split(self._parts(len(lines)), 1)
        return torch.cat(
            [block.reshape(-1)[:span] for block, span in zip(blocks, self._spans, strict=True)]
        )

    def value(self, line: torch.Tensor, device: Any) -> Any:
        """The value that these bytes are."""
        leaves: list[Any] = [None] * len(self._shapes)
        start = 0
        for number in self._order:
            shape, dtype = self._shapes[number]
            size = shape.numel() * dtype.itemsize
            leaf = line[start : start + size].clone().view(dtype).reshape(shape)
            leaves[number] = leaf.to(device)
            start += size
        return pytree.rebuild(self._like, iter(leaves))
