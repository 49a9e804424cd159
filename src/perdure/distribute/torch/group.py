"""The group of PyTorch processes: joining it, leaving it, messages, and the exchange of tensors.

Invariant: tensors travel as raw bytes, through gloo. No collective adds numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import json
import os
import sys
from datetime import timedelta
from multiprocessing.util import Finalize
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from perdure.checkpoint.slice_exchange import own_host
from perdure.distribute import pytree
from perdure.distribute.cluster import Cluster, ClusterOptions, await_members, with_existing
from perdure.distribute.cluster.rendezvous import listen
from perdure.distribute.engine import Merge, sliced
from perdure.distribute.key_value_group import KeyValueProcesses, lost
from perdure.distribute.lifeline import GONE, Lifeline
from perdure.errors import ClusterError
from perdure.runtime.process_group import Processes, SingleProcess, innermost_store

_joined: dict[Cluster, Processes] = {}
_subgroups: dict[tuple[int, ...], Processes] = {}

# In every key: torchrun keeps one store for all attempts, with the values of the earlier ones.
_ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")

_FAILED_LEAVE_S = 5.0
"""How long process 0 waits for the others after an unhandled error, which they may raise too."""
# Between two looks whether another process has left.
_LOOK_S = 0.1


def initialize(cluster: Cluster, options: ClusterOptions | None = None) -> Processes:
    """`join`, for programs with `torch.distributed`: with NCCL, and a group of one, too."""
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
    """Become a member of the group; one that the program has initialized is used as it is."""
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


class _Store:
    """PyTorch's store in process 0, by a connection of its own, which is locked during a wait."""

    error: type[Exception] = RuntimeError
    timeout = "timeout"

    def __init__(self, host: str, port: int, seconds: float) -> None:
        wait = timedelta(seconds=seconds)
        self._store: Any = TCPStore(host, port, is_master=False, timeout=wait)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, seconds: float) -> bytes:
        self._store.set_timeout(timedelta(seconds=seconds))
        return self._store.get(key)

    def delete(self, key: str) -> None:
        self._store.delete_key(key)

    def answers(self, text: str) -> bool:
        return False

    def end_wait(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):  # if the store is gone too, every wait has ended
            self._store.compare_set(key, "", GONE.decode())


class _Membership:
    """This process in a group whose messages go through a store that process 0 serves."""

    def __init__(
        self,
        served: TCPStore,
        host: str,
        cluster: Cluster,
        options: ClusterOptions,
        lifeline: Lifeline | None,
    ) -> None:
        self._served = served
        self._address = host, served.port
        self._cluster = cluster
        self._options = options
        self._lifeline = lifeline
        if lifeline is not None:
            lifeline.end_wait = self.connect().end_wait

    def connect(self) -> _Store:
        return _Store(*self._address, self._options.operation_timeout)

    def processes(self, channel: str = "main") -> Processes:
        return KeyValueProcesses(
            self.connect,
            self._cluster.process_id,
            self._cluster.num_processes,
            self._options.operation_timeout,
            self._lifeline,
            channel,
        )

    def leave(self) -> None:
        """Announce that this process leaves; process 0 waits for the others, who may still read
        messages.

        No process may wait for this one in a collective any more; one may do so all the same after
        an error, because `DistributedDataParallel` keeps its connections.
        """
        lifeline, limit = self._lifeline, self._options.leave_timeout
        if lifeline is not None:
            lifeline.leaving()
        deadline = monotonic() + (min(limit, _FAILED_LEAVE_S) if _has_failed() else limit)
        with contextlib.suppress(RuntimeError):
            self._served.set(_left(self._cluster.process_id), "")
            waiting = set(range(1, self._cluster.num_processes))
            while self._cluster.is_chief and waiting and monotonic() < deadline:
                waiting -= set(lifeline.gone if lifeline is not None else ())
                waiting = {p for p in waiting if not self._served.check([_left(p)])}
                sleep(_LOOK_S if waiting else 0)
        if lifeline is not None:
            lifeline.stop()


def _use_existing_group(cluster: Cluster, options: ClusterOptions) -> Processes:
    """Join the process group that the program has initialized.

    Messages go through a store of process 0, because the program's own may be in torchrun, which a
    further signal ends while its workers still save; partial sums through a new gloo group.
    """
    address = f"perdure/attempt-{_ATTEMPT}/store"
    known = dist.distributed_c10d._get_default_store()
    wait = timedelta(seconds=options.operation_timeout)
    _exchange.timeout = wait
    if cluster.is_chief:
        host = _address_of_this(known)
        served = _serve_store(host, 0, cluster, wait, wait_for_workers=False)
        lifeline = _lifeline(cluster, host, options)
        member = _Membership(served, host, cluster, options, lifeline)
        known.set(address, json.dumps([host, served.port, lifeline and lifeline.address]))
    else:
        host, port, of_chief = json.loads(known.get(address))
        try:
            served = TCPStore(host, port, is_master=False, timeout=wait)
            lifeline = _lifeline(cluster, host, options, of_chief)
            member = _Membership(served, host, cluster, options, lifeline)
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
        member.leave()

    # An exit handler that the children of multiprocessing run too, unlike those of atexit.
    Finalize(None, leave_group, exitpriority=0)
    return member.processes(f"attempt-{_ATTEMPT}")


def _make_group(cluster: Cluster, options: ClusterOptions, backend: str) -> Processes:
    """Wait for all processes, and initialize the process group."""
    host, port = cluster.host_port
    start = timedelta(seconds=options.start_timeout)
    lifeline = _lifeline(cluster, host, options) if cluster.is_chief else None
    try:
        members = await_members(cluster, options.start_timeout, lifeline and lifeline.address)
    except ClusterError:
        if lifeline is not None:
            lifeline.stop()
        raise
    try:
        if cluster.is_chief:
            store = _serve_store(host, port, cluster, start, wait_for_workers=True)
        else:
            lifeline = _lifeline(cluster, host, options, members[0].lifeline)
            store = TCPStore(host, port, cluster.num_processes, False, start, wait_for_workers=True)
        member = _Membership(store, host, cluster, options, lifeline)
        # The limit is for a process that hangs. A process that is gone closes its connections, which
        # the others notice at once.
        dist.init_process_group(
            backend,
            store=store,
            rank=cluster.process_id,
            world_size=cluster.num_processes,
            timeout=timedelta(seconds=options.operation_timeout),
        )
    except (OSError, RuntimeError) as error:
        raise ClusterError(
            f"process {cluster.process_id} could not join the group of {cluster.num_processes} at "
            f"{cluster.coordinator} (from {cluster.source}): {error}"
        ) from error
    atexit.register(member.leave)
    atexit.register(_end_collectives)  # called before `leave`
    return member.processes()


def _lifeline(
    cluster: Cluster,
    host: str,
    options: ClusterOptions,
    of_chief: dict[str, Any] | None = None,
) -> Lifeline | None:
    """That of process 0, or a connection to it; None without one."""
    with contextlib.suppress(OSError):
        if cluster.is_chief or of_chief is not None:
            return Lifeline(cluster.process_id, host, options.heartbeat, of_chief)
    return None


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


def _has_failed() -> bool:
    """Whether this process ends by an unhandled error."""
    return getattr(sys, "last_value", None) is not None


def _left(process: int) -> str:
    """The key that a process sets when it leaves."""
    return f"perdure/attempt-{_ATTEMPT}/left/{process}"


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


def _end_collectives(*, everything: bool = True) -> None:
    """Close connections (`everything`: of the default group, too), so that waits for them end."""
    with contextlib.suppress(RuntimeError, ValueError):
        _exchange.close()
        if everything and dist.is_initialized():
            dist.destroy_process_group()


def exchange(device: Any, roots: list[Any], counts: tuple[int, ...], merge: Merge | None) -> Any:
    """The total, on `device`; see Engine.exchange. Bytes go through the host's memory."""
    packed = [_PackedTree(root) for root in roots]
    like = packed[0]
    try:
        if merge is None or not sliced(like.nbytes, counts):
            sent = [tree.line for tree in packed]
            sent += sent[-1:] * (max(counts) - len(sent))
            lines = _all_gather(torch.stack(sent), counts)
            values = [[like.value(line, device) for line in block] for block in lines]
            return values if merge is None else merge(values)
        # Each process gets one slice of every partial sum and adds those slices in the tree. The
        # elements are added one by one, so the cuts do not change the result.
        cut = [tree.slices(len(counts)) for tree in packed]
        size, sent = cut[0].shape[1], torch.cat(cut, 1)
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

    def slices(self, processes: int) -> torch.Tensor:
        """The slice for each process, as a tensor of bytes [processes, size]."""
        parts, start = self._parts(processes), 0
        out = torch.zeros((processes, sum(parts)), dtype=torch.uint8)
        for span, part, line in zip(self._spans, parts, self.line.split(self._spans), strict=True):
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
