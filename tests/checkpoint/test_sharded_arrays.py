"""Arrays whose shards lie in several processes: each process writes the chunks of which it has most.

Two-dimensional arrays play them here; `distribute/test_sharded*.py` has those of the frameworks.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from damage import FullDisk
from perdure import CheckpointManager, LocalStorage, ManagerOptions, load_checkpoint, verify_run
from perdure.checkpoint import (
    chunk_sharing,
    connections,
    group_save,
    slice_exchange,
)
from perdure.checkpoint.slice_exchange import SliceExchange
from perdure.errors import (
    ArgumentError,
    CorruptionError,
    MismatchError,
    SaveError,
    StateError,
    StepExistsError,
)
from perdure.state import builtin, flatten
from perdure.state.leaf_values import array_bytes
from perdure.state.per_rank import current_rank_context
from perdure.store import Run, direct, pack_writer, reader, view
from perdure.store.format import CHUNK_BYTES, hash_bytes
from perdure.store.leaf import Leaf
from perdure.store.manifest_json import decode_manifest
from perdure.store.shard_plan import Shards
from pretend import Pretend, play

CUTS: dict[str, Any] = {"axis": 0, "copies": 1}


def region(shape: tuple[int, ...], index: int, count: int) -> Any:
    """What process `index` has: an even share of one axis, or with copies that of another process."""
    parts = count // CUTS["copies"]
    axis = CUTS["axis"]
    size = -(-shape[axis] // parts)
    start = min(index % parts * size, shape[axis])
    span = (start, min(start + size, shape[axis]))
    return tuple(span if number == axis else (0, n) for number, n in enumerate(shape))


@pytest.fixture(autouse=True)
def sharded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Arrays with two axes are sharded."""
    real = builtin.ADAPTER.leaf

    def leaf(value: Any) -> Any:
        context = current_rank_context()
        if getattr(value, "ndim", 0) != 2 or context.count == 1:
            return real(value)
        own = region(value.shape, context.index, context.count)
        part = array_bytes(value[tuple(slice(*span) for span in own)])[0]
        shards = Shards(value.shape, value.dtype.itemsize, (own,), (memoryview(bytes(part)),))
        return Leaf(value.dtype.name, value.shape, memoryview(b""), frozen=False, shards=shards)

    load = builtin.ADAPTER.load

    def regions(value: Any) -> Any:
        context = current_rank_context()
        if getattr(value, "ndim", 0) != 2 or context.count == 1:
            return None
        return (region(value.shape, context.index, context.count),)

    def load_part(like: Any, leaf: Leaf) -> Any:
        if leaf.shards is None:
            return load(like, leaf)
        (own,), (part,) = leaf.shards.regions, leaf.shards.parts
        restored = np.zeros_like(like)
        shape = [stop - start for start, stop in own]
        restored[tuple(slice(*span) for span in own)] = np.frombuffer(
            bytes(part), like.dtype
        ).reshape(shape)
        return restored

    monkeypatch.setattr(builtin.ADAPTER, "leaf", leaf)
    monkeypatch.setattr(builtin.ADAPTER, "load", load_part)
    monkeypatch.setattr(builtin.Builtin, "regions", lambda _, value: regions(value))
    yield
    CUTS.update(axis=0, copies=1)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that each save of each process gets from the others."""
    counts: list[int] = []
    real = slice_exchange.SliceExchange.close

    def close(exchange: Any) -> None:
        counts.append(exchange.received)
        real(exchange)

    monkeypatch.setattr(slice_exchange.SliceExchange, "close", close)
    return counts


def state(k: int) -> dict[str, Any]:
    words = CHUNK_BYTES // 4
    return {
        "large": np.arange(k, k + 5 * words + 6, dtype=np.int32).reshape(2, -1),
        "net": {"small%": np.full((3, 4), k, np.float32), "empty": np.zeros((0, 4))},
        "a shared one": np.full(3, k),
        "shared": np.full(3, k),
    }


def saver(directory: Path, value: Any, *steps: int, codec: Any = None) -> Any:
    def program(processes: Pretend) -> list[int]:
        options = ManagerOptions(codec=codec)
        with CheckpointManager(directory, processes=processes, options=options) as manager:
            for step in steps:
                manager.save(step, value)
            manager.wait_until_finished()
            return manager.all_steps()

    return program


@pytest.mark.parametrize(
    ("count", "axis", "copies"), [(2, 0, 1), (3, 1, 1), (3, 0, 1), (4, 1, 2), (2, 0, 2)]
)
@pytest.mark.parametrize(
    ("codec", "is_one_machine"), [(None, True), ("shuffle-zstd", False)], ids=["plain", "codec"]
)
def test_a_sharded_state_is_saved_as_a_whole_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: Any,
    is_one_machine: bool,
    count: int,
    axis: int,
    copies: int,
) -> None:
    CUTS.update(axis=axis, copies=copies)
    if not is_one_machine:
        monkeypatch.setattr(slice_exchange, "HAS_SHARED_MEMORY", False)
    shared, real_memory = [], connections.received_memory

    def received(connection: Any, size: int) -> memoryview:
        shared.append(connection)
        return real_memory(connection, size)

    monkeypatch.setattr(slice_exchange, "received_memory", received)
    together, alone = tmp_path / "together", tmp_path / "alone"

    def program(processes: Pretend) -> Any:
        options = ManagerOptions(codec=codec)
        with CheckpointManager(together, processes=processes, options=options) as manager:
            manager.save(1, state(1))
            manager.save(1, state(1), force=True)  # committed already
            manager.wait_until_finished()
            processes.barrier()
            with pytest.raises(StepExistsError):
                manager.save(1, state(2), force=True)
        return None

    assert play(count, program) == [None] * count
    with CheckpointManager(alone) as manager:
        manager.save(1, state(1))
    manifest, whole = (Run(directory).manifest(1) for directory in (together, alone))
    assert manifest.fingerprint == whole.fingerprint
    assert (manifest.stored_nbytes < whole.stored_nbytes) == (codec is not None)
    writers = {pack.name.split("-")[1] for pack in manifest.packs}
    assert len(writers) == count if count == 2 or axis == 1 else len(writers) > 1
    assert verify_run(Run(together)).problems == ()
    restored = load_checkpoint(together)
    assert np.array_equal(restored["large"], state(1)["large"])
    assert np.array_equal(restored["net"]["small%"], state(1)["net"]["small%"])
    assert bool(shared) == (is_one_machine and copies < count)


def test_no_byte_moves_if_each_chunk_lies_in_one_process(tmp_path: Path, moved: list[int]) -> None:
    words = CHUNK_BYTES // 4
    rows = {"w": np.arange(6 * words, dtype=np.int32).reshape(6, words)}
    assert play(3, saver(tmp_path / "rows", rows, 1, 2)) == [[1, 2]] * 3
    assert moved == [0] * 6
    uneven = {"w": np.arange(2 * words + 20, dtype=np.int32).reshape(2, -1)}
    assert play(2, saver(tmp_path / "uneven", uneven, 1)) == [[1]] * 2
    assert sorted(moved[6:]) == [0, 40], "the second row begins 40 bytes after the second chunk"


def test_a_chunk_is_hashed_once_by_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CUTS.update(axis=1)
    hashed: list[int] = []
    real = pack_writer.hash_bytes  # pyright: ignore[reportPrivateImportUsage]

    def counted(data: Any) -> str:
        hashed.append(len(data))
        return real(data)

    monkeypatch.setattr(pack_writer, "hash_bytes", counted)
    play(2, saver(tmp_path, state(1), 1))
    assert hashed.count(CHUNK_BYTES) == 5


def test_chunks_that_a_checkpoint_holds_are_not_written_again(tmp_path: Path) -> None:
    play(3, saver(tmp_path, state(1), 1))
    packs = {*(tmp_path / "packs").iterdir()}
    play(2, saver(tmp_path, state(1), 2))
    assert {*(tmp_path / "packs").iterdir()} == packs


def test_nothing_is_written_unless_all_save_the_same_step(tmp_path: Path) -> None:
    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            with pytest.raises(StateError, match="process 0: 1, process 1: 2"):
                _ = manager.save(1 + processes.index, state(1)), manager.wait_until_finished()
            packs = [*tmp_path.glob("packs/*")]
            processes.barrier()
            manager.save(3, state(3))
            manager.wait_until_finished()
            return packs, manager.all_steps()

    assert play(2, program) == [([], [3])] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_before_the_save_ends_it_in_all_at_once(tmp_path: Path, victim: int) -> None:
    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            loss: Any = "low" if processes.index == victim else 0.5
            with pytest.raises(ArgumentError) as caught:
                _ = manager.save(1, state(1), {"loss": loss}), manager.wait_until_finished()
            packs = [*tmp_path.glob("packs/*")]
            processes.barrier()
            manager.save(2, state(2))
            manager.wait_until_finished()
            return packs, str(caught.value), manager.all_steps()

    for process, (packs, error, steps) in enumerate(play(2, program)):
        assert packs == []
        assert "loss" in error
        assert f"process {victim}: " in error or process == victim
        assert steps == [2]


def test_a_process_without_the_sharded_array_is_an_error_in_all(tmp_path: Path) -> None:
    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            mine = state(1) if processes.index else {"shared": np.zeros(3)}
            # The structures are compared at the same time: either of the two may be first.
            found = r"large is no sharded array in process 0|has no such leaf, and process"
            with pytest.raises((SaveError, StateError), match=found):
                _ = manager.save(1, mine), manager.wait_until_finished()
            processes.barrier()
            manager.save(2, state(2))
            manager.wait_until_finished()
            return manager.all_steps()

    assert play(2, program) == [[2]] * 2


def test_copies_that_differ_are_named(tmp_path: Path) -> None:
    CUTS.update(copies=2)

    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            mine = state(1)
            mine["large"][1, 7] += processes.index == 3
            manager.save(1, mine)

    for error in play(4, program):
        assert isinstance(error, StateError)
        assert "large: process 3 holds other bits than process 1" in str(error)
        assert "small" not in str(error)
    assert Run(tmp_path).steps() == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_write_that_fails_in_one_process_fails_in_all(tmp_path: Path, victim: int) -> None:
    CUTS.update(axis=1)  # so that each process needs the shards of the other
    disk = FullDisk("/packs/000000000002")

    def program(processes: Pretend) -> list[int]:
        is_full = processes.index == victim
        storage = LocalStorage(tmp_path, disk) if is_full else LocalStorage(tmp_path)
        with CheckpointManager(storage, processes=processes) as manager:
            manager.save(1, state(1))
            manager.save(2, state(2))
            with pytest.raises(SaveError, match="No space left on device"):
                manager.wait_until_finished()
            manager.save(3, state(3))
            manager.wait_until_finished()
            return manager.all_steps()

    assert play(2, program) == [[1, 3], [1, 3]]
    assert len(disk.fired) == 1
    assert verify_run(Run(tmp_path)).ok


def test_a_write_that_fails_without_a_file_name_names_directory_and_size(tmp_path: Path) -> None:
    fired: list[str] = []

    def limited(operation: str, path: str) -> None:
        if operation == "fsync" and "/packs/" in path:
            fired.append(path)
            raise OSError(errno.EFBIG, "File too large")

    def program(processes: Pretend) -> str:
        is_limited = processes.index == 1
        storage = LocalStorage(tmp_path, limited) if is_limited else LocalStorage(tmp_path)
        with CheckpointManager(storage, processes=processes) as manager:
            manager.save(1, state(1))
            with pytest.raises(SaveError) as caught:
                manager.wait_until_finished()
        return str(caught.value)

    size = sum(leaf.nbytes for leaf in flatten(state(1)).values())
    for text in play(2, program):
        assert f"process 1: {tmp_path}: [Errno {errno.EFBIG}] File too large" in text
        assert f"(size of the state: {size} bytes)" in text
    assert len(fired) == 1


@pytest.mark.parametrize("stranger", ["nobody", "the sender", "the receiver"])
def test_memory_is_shared_with_processes_of_the_same_user_alone(
    monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    """The one that is no stranger refuses the other, and the slices go through the network."""
    user, receiver = os.geteuid(), threading.current_thread()

    def seen_by() -> int:
        is_receiver = threading.current_thread() is receiver
        return user + (stranger == ("the sender" if is_receiver else "the receiver"))

    monkeypatch.setattr("perdure.checkpoint.connections.os.geteuid", seen_by)

    def read(writer: int, leaf: int, chunk: int, memory: memoryview) -> int:
        memory[:3] = bytes((writer, leaf, chunk))
        return 3

    with closing(SliceExchange(0)) as sender, closing(SliceExchange(1)) as asking:
        for exchange in (sender, asking):
            exchange.begin([sender.address, asking.address], read)
        slices: list[bytes] = []
        asking.fetch(7)(0, 8, 3, lambda data: slices.append(bytes(data)))
        shared = [connection.memory is not None for connection in asking._idle[0]]
    assert slices == [bytes((1, 7, 8))]
    assert shared == [stranger == "nobody"]


def test_nobody_can_cut_shared_memory_while_it_is_read() -> None:
    with closing(SliceExchange(0)) as exchange:
        assert exchange._slots.file is not None
        with pytest.raises(PermissionError):
            os.ftruncate(exchange._slots.file, 1)
    here, there = socket.socketpair()
    file = os.memfd_create("not sealed", os.MFD_ALLOW_SEALING)
    with here, there, os.fdopen(file, "wb") as opened:
        opened.truncate(slice_exchange.SLOTS * CHUNK_BYTES)
        socket.send_fds(there, [b"\0"], [file])
        with pytest.raises(OSError, match="could be cut"):
            connections.received_memory(here, slice_exchange.SLOTS * CHUNK_BYTES)


def test_an_answer_with_other_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CUTS.update(axis=1)
    # The processes do not find each other on one machine.
    monkeypatch.setattr(connections.Connections, "listen_locally", lambda *_: None)
    real, fired = slice_exchange.blake3, []  # pyright: ignore[reportPrivateImportUsage]

    def changing(data: memoryview) -> Any:
        """Hashes bytes that change afterwards, the first time."""
        digest = real(data)
        if not fired:
            fired.append(len(data))
            data[0] ^= 1
        return digest

    monkeypatch.setattr(slice_exchange, "blake3", changing)
    errors = play(2, saver(tmp_path, state(1), 1))
    assert fired
    for error in errors:
        assert isinstance(error, SaveError)
        assert "do not have the hash that it states" in str(error)
    assert Run(tmp_path).steps() == []


def test_messages_of_a_save_do_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    class Counted(Pretend):
        def __init__(self, *given: Any, calls: list[str] | None = None) -> None:
            super().__init__(*given)
            self.calls = [] if calls is None else calls

        def channel(self, name: str) -> Counted:
            return Counted(self.index, self._world, f"{self._channel}/{name}", calls=self.calls)

        def gather(self, data: bytes) -> list[bytes]:
            self.calls.append("gather")
            return super().gather(data)

    def program(processes: Pretend) -> int:
        counted = Counted(processes.index, processes._world)
        with CheckpointManager(tmp_path / str(processes.count), processes=counted) as manager:
            for step in (1, 2, 3):
                before = len(counted.calls)
                manager.save(step, state(step))
                manager.wait_until_finished()
            return len(counted.calls) - before

    assert play(2, program) == [4] * 2, "begin, write and its answer, end"
    assert play(4, program) == [4] * 4


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_cannot_listen_ends_the_save_in_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    real, fired = group_save.SliceExchange, []  # pyright: ignore[reportPrivateImportUsage]

    def exchange(index: int) -> Any:
        if index == victim and not fired:
            fired.append(index)
            raise OSError(errno.EADDRNOTAVAIL, "no address")
        return real(index)

    monkeypatch.setattr(group_save, "SliceExchange", exchange)

    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            manager.save(1, state(1))
            with pytest.raises(SaveError, match="no address"):
                manager.wait_until_finished()
            manager.save(2, state(2))
            manager.wait_until_finished()
            return manager.all_steps()

    assert play(2, program) == [[2], [2]]
    assert fired == [victim]


def test_layouts_are_sent_once_and_again_when_a_sharding_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[bool] = []
    real = group_save.SaveOrder  # pyright: ignore[reportPrivateImportUsage]

    class Order(real):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "layouts":
                sent.append(True)
            super().__setattr__(name, value)

    monkeypatch.setattr(group_save, "SaveOrder", Order)

    def program(processes: Pretend) -> list[int]:
        found = []
        with CheckpointManager(tmp_path, processes=processes) as manager:
            for step in (1, 2, 3, 4):
                if step == 3:
                    CUTS.update(axis=1)
                processes.barrier()
                manager.save(step, state(step))
                manager.wait_until_finished()
                found.append(len(sent))
        return found

    assert play(2, program)[0] == [1, 1, 2, 2]
    fingerprint = Run(tmp_path).manifest(4).fingerprint
    play(1, saver(tmp_path / "alone", state(4), 4))
    assert fingerprint == Run(tmp_path / "alone").manifest(4).fingerprint


class Counting(LocalStorage):
    """Counts the bytes that are read from packs."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.bytes_read = 0

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        self.bytes_read += len(target)
        return super().read_into(name, offset, target)


def restored_parts(directory: Path, count: int, step: int | None = None) -> list[Any]:
    """(step, whether the part of the process is right and the rest was not read, bytes read)."""

    def program(processes: Pretend) -> Any:
        storage = Counting(directory)
        like = {
            **state(9),
            "net": {"small%": np.zeros((3, 4), np.float32), "empty": np.ones((0, 4))},
        }
        with CheckpointManager(storage, processes=processes) as manager:
            restored, found = manager.restore(step, like)
        expected = state(found)
        right = np.array_equal(restored["shared"], expected["shared"])
        for value, whole in (
            (restored["large"], expected["large"]),
            (restored["net"]["small%"], expected["net"]["small%"]),
        ):
            own = tuple(slice(*span) for span in region(whole.shape, processes.index, count))
            part = np.zeros_like(whole)
            part[own] = whole[own]
            right = right and np.array_equal(value, part)
        return found, right, storage.bytes_read

    return play(count, program)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("codec", [None, "shuffle-zstd"])
@pytest.mark.parametrize(("saved", "restored"), [(1, 3), (2, 4), (3, 2)])
def test_other_processes_restore_their_own_shards(
    tmp_path: Path, saved: int, restored: int, axis: int, codec: Any
) -> None:
    CUTS.update(axis=1 - axis)
    play(saved, saver(tmp_path, state(1), 1, codec=codec))
    CUTS.update(axis=axis)
    outcomes = restored_parts(tmp_path, restored)
    assert [outcome[:2] for outcome in outcomes] == [(1, True)] * restored
    if axis == 0 and codec is None:
        assert max(read for *_, read in outcomes) < 4 * CHUNK_BYTES, (
            "one row of two takes 2.5 chunks"
        )


WORDS = CHUNK_BYTES // 4
SHARED: dict[str, Any] = {
    "w": np.arange(6 * WORDS, dtype=np.int32).reshape(6, WORDS),
    "v": np.arange(WORDS, 3 * WORDS // 2, dtype=np.int32).reshape(2, -1),
}
"""Six chunks and one of which each process has a half if they are cut along axis 1."""


def load_shared(
    directory: Path, count: int, storage: Any = LocalStorage, *, is_whole: bool = False
) -> list[Any]:
    """Whether each process has its elements of SHARED, or all (`is_whole`); process 1 reads by
    `storage`."""

    def program(processes: Pretend) -> Any:
        source = storage(directory) if processes.index == 1 else directory
        like = None
        if not is_whole:
            like = {name: np.zeros_like(value) for name, value in SHARED.items()}
        with CheckpointManager(source, processes=processes) as manager:
            restored, _ = manager.restore(1, like)
        same = []
        for name, value in SHARED.items():
            own = tuple(slice(*axis) for axis in region(value.shape, processes.index, count))
            own = (slice(None),) if is_whole else own
            same.append(np.array_equal(restored[name][own], value[own]))
        return all(same)

    return play(count, program)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hashes of the large chunks that processes verify after a read."""
    hashes: list[str] = []
    real = reader.first_fault

    def first_fault(read: Any, *rest: Any) -> Any:
        hashes.extend(chunk.hash for chunk in read.chunks if chunk.size > 2**20)
        return real(read, *rest)

    monkeypatch.setattr(reader, "first_fault", first_fault)
    return hashes


@pytest.mark.parametrize(("count", "codec"), [(2, "shuffle-zstd"), (3, None)])
def test_of_the_processes_of_a_machine_one_reads_and_verifies_each_chunk(
    tmp_path: Path, reads: list[str], count: int, codec: Any
) -> None:
    play(1, saver(tmp_path, SHARED, 1, codec=codec))
    chunks = [chunk for leaf in Run(tmp_path).manifest(1).leaves for chunk in leaf.chunks]
    CUTS.update(axis=1)
    reads.clear()
    assert load_shared(tmp_path, count) == [True] * count
    assert sorted(reads) == sorted(chunk.hash for chunk in chunks)


@pytest.mark.parametrize("finds", [True, False], ids=["together", "control"])
@pytest.mark.parametrize("is_given", [True, False], ids=["target", "no target"])
@pytest.mark.parametrize("codec", [None, "shuffle-zstd"])
def test_of_arrays_that_each_process_has_whole_one_reads_each_chunk(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reads: list[str],
    finds: bool,
    is_given: bool,
    codec: Any,
) -> None:
    state = {
        "many": np.arange(3 * WORDS + 5, dtype=np.int32),
        "booleans": np.arange(2**21) % 3 == 0,
        "small": np.arange(7.0),
        "text": "x" * 2**19,
        "step": 3,
    }
    if not finds:
        monkeypatch.setattr(connections.Connections, "listen_locally", lambda *_: None)
    play(1, saver(tmp_path, state, 1, codec=codec))
    reads.clear()

    like = {"many": 0 * state["many"], "booleans": ~state["booleans"], "small": np.zeros(7)}

    def program(processes: Pretend) -> list[bool]:
        target = {**like, "text": "", "step": 0} if is_given else None
        with CheckpointManager(tmp_path, processes=processes) as manager:
            restored = manager.restore(1, target).state
        same = [bool(np.all(restored[key] == value)) for key, value in state.items()]
        restored["many"] += 1  # each process has memory of its own
        processes.barrier()
        return [*same, restored["many"][0] == 1]

    assert play(3, program) == [[True] * 6] * 3
    leaves = {leaf.path: leaf for leaf in Run(tmp_path).manifest(1).leaves}
    large = [chunk.hash for key in ("many", "booleans") for chunk in leaves[key].chunks]
    assert len(large) == 5
    expected = [hash for hash in large if hash != leaves["many"].chunks[-1].hash]  # of 20 bytes
    assert sorted(reads) == sorted(expected * (1 if finds else 3))


def test_processes_that_do_not_find_each_other_read_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    """The control of the test above; the disk then reads each chunk once."""
    monkeypatch.setattr(connections.Connections, "listen_locally", lambda *_: None)
    kept, direct_reads, real_keep = [], [], LocalStorage.keep_cached

    def keep(storage: LocalStorage, name: str, offset: int) -> None:
        kept.append(offset)
        real_keep(storage, name, offset)

    monkeypatch.setattr(LocalStorage, "keep_cached", keep)
    monkeypatch.setattr(direct, "_read_direct", lambda *read: direct_reads.append(read) or 0)
    play(1, saver(tmp_path, SHARED, 1))
    offsets = [chunk.offset for leaf in Run(tmp_path).manifest(1).leaves for chunk in leaf.chunks]
    reads.clear()
    CUTS.update(axis=1)
    assert load_shared(tmp_path, 2) == [True] * 2
    assert sorted(kept) == sorted(offsets * 2)
    assert len(reads) == 14
    assert direct_reads == []


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("verifies", [True, False])
def test_only_verified_bytes_are_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verifies: bool, is_whole: bool
) -> None:
    """One process reads a flipped bit. Without verification, the control, it would hand it out."""
    play(1, saver(tmp_path, SHARED, 1))
    leaves = Run(tmp_path).manifest(1).leaves
    hashes = [chunk.hash for leaf in leaves for chunk in leaf.chunks]
    flipped, right, real = [], [], chunk_sharing.ChunkSharing.give

    def give(sharing: Any, slot: int, chunks: Any) -> None:
        for number, start, nbytes in chunks:
            data = sharing._slots.memory(slot)[start : start + nbytes]
            right.append(hash_bytes(data) == hashes[number])
        real(sharing, slot, chunks)

    class Flipping(LocalStorage):
        def read_into(self, name: str, offset: int, target: memoryview) -> int:
            got = super().read_into(name, offset, target)
            if len(target) > 2**20 and not flipped:
                flipped.append(offset)
                target[7] ^= 1
            return got

    monkeypatch.setattr(chunk_sharing.ChunkSharing, "give", give)
    if not verifies:
        monkeypatch.setattr(reader, "first_fault", lambda *_: None)
    CUTS.update(axis=1)
    same = load_shared(tmp_path, 3, Flipping, is_whole=is_whole)
    assert len(flipped) == 1
    assert right
    assert all(right) == verifies
    assert (same == [True] * 3) == verifies  # by a second try, in which each reads by itself


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_gone_leaves_no_other_without_its_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, reads: list[str], is_whole: bool
) -> None:
    """Its connections are closed in the middle, as those of a killed process."""
    ends, real = [], chunk_sharing.ChunkSharing.give

    def give(sharing: Any, slot: int, chunks: Any) -> None:
        if sharing._index == victim and not ends:
            ends.append(chunks)
            for connection in [*sharing._peers._open]:
                with suppress(OSError):  # the listener
                    connection.shutdown(socket.SHUT_RDWR)
        real(sharing, slot, chunks)

    monkeypatch.setattr(chunk_sharing.ChunkSharing, "give", give)
    play(1, saver(tmp_path, SHARED, 1))
    CUTS.update(axis=1)
    reads.clear()
    assert load_shared(tmp_path, 3, is_whole=is_whole) == [True] * 3
    assert len(ends) == 1
    assert len(reads) > 7, "the others read what it did not hand out"


def test_who_wants_a_chunk_and_reads_least_reads_it() -> None:
    requests = {
        0: chunk_sharing._Request("", {1: 4, 2: 4, 3: 4, 9: 4}, 0),
        1: chunk_sharing._Request("", {1: 4, 2: 4, 3: 4}, 1),
        2: chunk_sharing._Request("", {2: 4, 3: 4}, 2),
    }
    # Process 0 reads chunk 9 alone, so that it begins with 4 bytes.
    assert list(chunk_sharing._readers(requests)) == [(1, [1, 0]), (2, [2, 0, 1]), (3, [0, 1, 2])]


def test_bytes_of_another_user_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[str]
) -> None:
    asked = []

    def refuse(connection: Any) -> None:
        asked.append(connection)
        raise ConnectionRefusedError

    monkeypatch.setattr(connections, "require_same_user", refuse)
    play(1, saver(tmp_path, SHARED, 1))
    CUTS.update(axis=1)
    reads.clear()
    assert load_shared(tmp_path, 2) == [True] * 2
    assert asked
    assert len(reads) == 14, "each process reads all"


@pytest.mark.parametrize(("dtype", "helps"), [(np.float16, True), (np.int32, False)])
def test_a_sharded_target_of_another_dtype_is_a_mismatch(
    tmp_path: Path, dtype: Any, helps: bool
) -> None:
    play(2, saver(tmp_path, {"w": np.full((4, 3), 1.5, np.float32)}, 1))

    def program(processes: Pretend) -> Any:
        like = {"w": np.zeros((4, 3), dtype)}
        with CheckpointManager(tmp_path, processes=processes) as manager:
            with pytest.raises(MismatchError) as error:
                manager.restore(like=like)
            state = manager.restore(like=like, cast=True).state if helps else like
            return str(error.value), state["w"]

    for text, values in play(2, program):
        assert f"w: expected {np.dtype(dtype).name}[4,3], found float32[4,3]" in text
        assert values.dtype == dtype
        assert (values == 1.5 * helps).all()


def test_damage_that_only_one_process_reads_makes_all_take_the_older_step(tmp_path: Path) -> None:
    play(2, saver(tmp_path, state(1), 1))
    play(2, saver(tmp_path, state(2), 2))
    manifest = Run(tmp_path).manifest(2)
    (entry,) = [leaf for leaf in manifest.leaves if leaf.path == "large"]
    chunk = entry.chunks[4]  # of the second row
    pack = tmp_path / "packs" / manifest.packs[chunk.pack].name
    data = bytearray(pack.read_bytes())
    data[chunk.offset + 5] ^= 1
    pack.write_bytes(data)
    with pytest.warns(UserWarning, match=r"step 2 is damaged and was skipped; step 1 .*'large'"):
        outcomes = restored_parts(tmp_path, 2)
    assert [outcome[:2] for outcome in outcomes] == [(1, True)] * 2
    for error in restored_parts(tmp_path, 2, step=2):
        assert isinstance(error, CorruptionError)
        assert "'large'" in str(error)


def test_undamaged_shards_are_read_once(tmp_path: Path) -> None:
    """The control of the test above: nothing else is read unless something is damaged."""
    play(2, saver(tmp_path, state(1), 1))
    outcomes = restored_parts(tmp_path, 2)
    whole = state(1)["large"].nbytes
    assert sum(read for *_, read in outcomes) < whole + 3 * CHUNK_BYTES


def test_no_process_reads_a_manifest_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def counted(data: bytes, where: str, *rest: Any) -> Any:
        read.append(where)
        return decode_manifest(data, where, *rest)

    monkeypatch.setattr(view, "decode_manifest", counted)

    def program(processes: Pretend) -> None:
        with CheckpointManager(tmp_path, max_to_keep=None, processes=processes) as manager:
            for step in range(1, 7):
                manager.save(step, {"same": np.arange(9), **state(step)})
            manager.wait_until_finished()

    play(2, program)
    assert len(read) == len(set(read)) == 5, "the second process reads what was saved before"
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [1, 2, 3, 4, 5, 6]
