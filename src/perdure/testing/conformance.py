"""Tests of the contract of `perdure.store.Storage`, method by method, for any storage.

Subclass `StorageConformance`, and give it a `storage` fixture and raw access that bypasses the storage,
so that the storage does not confirm its own writes:

    class TestMine(StorageConformance):
        @pytest.fixture
        def storage(self): ...
        def raw_read(self, storage, name): ...
        def raw_write(self, storage, name, data): ...
        def raw_names(self, storage): ...
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from perdure.store import Leaf, Run, Sink, Storage, verify_run
from perdure.store.storage import create_whole

NAME = "packs/000000000001-00000-00000000.pack"
OTHER = "packs/000000000002-00000-00000000.pack"
LARGE_BYTES = 9 * 1024 * 1024 + 7
RACERS = 8

SIZES = pytest.mark.parametrize("size", [0, 1, 5000, LARGE_BYTES])


def expect(actual: bytes | bytearray | None, wanted: bytes | bytearray) -> None:
    """Assert equal bytes, without letting pytest compare megabytes line by line."""
    is_equal = actual == wanted
    assert is_equal, f"expected {len(wanted)} bytes, found {len(actual or b'')}, or others"


class StorageConformance:
    """A pytest class with the tests that every storage must pass; each test gets an empty storage."""

    @pytest.fixture
    def storage(self) -> Storage:
        """An empty storage."""
        raise NotImplementedError("a subclass gives the storage to test")

    def raw_read(self, storage: Storage, name: str) -> bytes | None:
        """Read an object without the storage; None if there is none."""
        raise NotImplementedError

    def raw_write(self, storage: Storage, name: str, data: bytes) -> None:
        """Write an object without the storage."""
        raise NotImplementedError

    def raw_names(self, storage: Storage) -> set[str]:
        """The names of all objects, listed without the storage."""
        raise NotImplementedError

    def another(self, storage: Storage) -> Storage:
        """A second view of the same objects, as another process would have."""
        return storage

    # ------------------------------------------------------------ create

    @SIZES
    def test_a_created_object_holds_what_was_written(self, storage: Storage, size: int) -> None:
        data = payload(size)
        write(storage, NAME, data)
        expect(self.raw_read(storage, NAME), data)
        assert storage.size(NAME) == size

    def test_the_size_given_to_create_may_be_wrong(self, storage: Storage) -> None:
        for number, (declared, size) in enumerate([(0, LARGE_BYTES), (LARGE_BYTES, 10), (10, 0)]):
            name = f"packs/{number}"
            sink = storage.create(name, declared)
            feed(sink, payload(size))
            sink.commit()
            expect(self.raw_read(storage, name), payload(size))

    @SIZES
    def test_an_object_is_invisible_until_its_commit(self, storage: Storage, size: int) -> None:
        sink = storage.create(NAME, size)
        feed(sink, payload(size))
        assert self.raw_read(storage, NAME) is None
        assert NAME not in set(storage.list("packs/"))
        with pytest.raises(FileNotFoundError):
            storage.read(NAME)
        sink.commit()
        assert set(storage.list("packs/")) == {NAME}

    @SIZES
    def test_an_abort_leaves_nothing(self, storage: Storage, size: int) -> None:
        sink = storage.create(NAME, size)
        feed(sink, payload(size))
        sink.abort()
        sink.abort()
        assert self.raw_names(storage) == set()
        write(storage, NAME, b"free again")
        assert self.raw_read(storage, NAME) == b"free again"

    @SIZES
    def test_a_name_that_is_taken_is_refused_and_kept(self, storage: Storage, size: int) -> None:
        self.raw_write(storage, NAME, b"first")
        sink = storage.create(NAME, size)
        feed(sink, payload(size))
        with pytest.raises(FileExistsError):
            sink.commit()
        sink.abort()
        assert self.raw_read(storage, NAME) == b"first"
        assert self.raw_names(storage) == {NAME}

    def test_equal_bytes_do_not_make_a_taken_name_free(self, storage: Storage) -> None:
        write(storage, NAME, b"same")
        with pytest.raises(FileExistsError):
            write(storage, NAME, b"same")

    def test_the_memory_of_a_write_may_be_reused(self, storage: Storage) -> None:
        block = bytearray(1024 * 1024)
        sink = storage.create(NAME, 10 * len(block))
        for number in range(10):
            block[:] = bytes([number]) * len(block)
            sink.write(memoryview(block))
        block[:] = b"\xff" * len(block)
        sink.commit()
        expected = b"".join(bytes([number]) * len(block) for number in range(10))
        expect(self.raw_read(storage, NAME), expected)

    def test_of_concurrent_creations_exactly_one_wins(self, storage: Storage) -> None:
        views = [self.another(storage) for _ in range(RACERS)]
        for step in range(5):
            name = f"checkpoints/{step:012d}.json"
            attempts = [partial(write, v, name, bytes([n]) * 100) for n, v in enumerate(views)]
            won = race(attempts)
            assert len(won) == 1, f"{len(won)} of {RACERS} writers won {name}"
            assert self.raw_read(storage, name) == bytes(won) * 100

    # ------------------------------------------------------------ replace

    def test_a_replacement_is_there_whole(self, storage: Storage) -> None:
        for data in (b"one", b"", payload(3000)):
            storage.replace("perdure.json", data)
            assert self.raw_read(storage, "perdure.json") == data
        assert self.raw_names(storage) == {"perdure.json"}

    def test_a_reader_never_sees_half_of_a_replacement(self, storage: Storage) -> None:
        versions = [bytes([number]) * 50_000 for number in range(12)]
        storage.replace("perdure.json", versions[0])
        seen: set[bytes] = set()

        def read() -> None:
            while versions[-1] not in seen:
                seen.add(storage.read("perdure.json"))

        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(read)
            for data in versions:
                storage.replace("perdure.json", data)
            reader.result(timeout=60)
        assert seen <= set(versions)

    # ------------------------------------------------------------ read

    @SIZES
    def test_reading_gives_the_whole_object(self, storage: Storage, size: int) -> None:
        self.raw_write(storage, NAME, payload(size))
        expect(storage.read(NAME), payload(size))
        assert storage.size(NAME) == size

    @pytest.mark.parametrize(
        ("offset", "length", "got"),
        [(0, 10, 10), (3, 4, 4), (0, 11, 10), (9, 5, 1), (10, 5, 0), (99, 5, 0), (4, 0, 0)],
    )
    def test_a_range_is_short_only_at_the_end(
        self, storage: Storage, offset: int, length: int, got: int
    ) -> None:
        data = payload(10)
        self.raw_write(storage, NAME, data)
        target = bytearray(b"\xee" * length)
        assert storage.read_into(NAME, offset, memoryview(target)) == got
        expect(target, data[offset : offset + length] + b"\xee" * (length - got))

    def test_ranges_of_a_large_object_at_once(self, storage: Storage) -> None:
        data = payload(LARGE_BYTES)
        self.raw_write(storage, NAME, data)
        target = bytearray(LARGE_BYTES)
        spans = _parts(memoryview(target), 1_000_003)
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda span: storage.read_into(NAME, *span), spans))
        assert sum(got) == LARGE_BYTES
        expect(target, data)

    def test_what_is_missing_is_not_found(self, storage: Storage) -> None:
        verbs: list[Callable[[], object]] = [
            lambda: storage.read(NAME),
            lambda: storage.size(NAME),
            lambda: storage.read_into(NAME, 0, memoryview(bytearray(4))),
            lambda: storage.move(NAME, OTHER),
        ]
        for verb in verbs:
            with pytest.raises(FileNotFoundError):
                verb()
        assert self.raw_names(storage) == set()

    # ------------------------------------------------------------ list

    def test_a_list_has_each_name_once_and_only_those_of_its_prefix(self, storage: Storage) -> None:
        assert list(storage.list("packs/")) == []
        names = {f"packs/{number:04d}" for number in range(150)}
        for name in names | {"checkpoints/1.json", "packs.json", "perdure.json"}:
            self.raw_write(storage, name, b"x")
        listed = list(storage.list("packs/"))
        assert sorted(listed) == sorted(names)
        assert list(storage.list("checkpoints/")) == ["checkpoints/1.json"]
        later = storage.entries("packs/", "packs/0146")
        assert sorted(later) == ["packs/0147", "packs/0148", "packs/0149"]

    # ------------------------------------------------------------ move, delete

    @SIZES
    def test_a_move_changes_the_name_alone(self, storage: Storage, size: int) -> None:
        self.raw_write(storage, NAME, payload(size))
        storage.move(NAME, "quarantine/1.json")
        assert self.raw_names(storage) == {"quarantine/1.json"}
        expect(self.raw_read(storage, "quarantine/1.json"), payload(size))

    def test_a_move_never_overwrites(self, storage: Storage) -> None:
        self.raw_write(storage, NAME, b"mine")
        self.raw_write(storage, OTHER, b"yours")
        with pytest.raises(FileExistsError):
            storage.move(NAME, OTHER)
        assert self.raw_read(storage, NAME) == b"mine"
        assert self.raw_read(storage, OTHER) == b"yours"

    def test_deleting_twice_is_deleting_once(self, storage: Storage) -> None:
        self.raw_write(storage, NAME, b"mine")
        self.raw_write(storage, OTHER, b"yours")
        storage.delete(NAME)
        storage.delete(NAME)
        assert self.raw_names(storage) == {OTHER}
        assert list(storage.list("packs/")) == [OTHER]

    # ------------------------------------------------------------ lock

    def test_a_lock_excludes_and_names_its_holder(self, storage: Storage) -> None:
        second = self.another(storage)
        with storage.lock("lock", b"host one, process 12"):
            with pytest.raises(BlockingIOError) as caught, second.lock("lock", b"me"):
                pass
            assert caught.value.strerror == "host one, process 12"
            write(storage, NAME, b"by the holder")
        with second.lock("lock", b"me"):
            pass
        with storage.lock("lock", b"again"):
            pass

    def test_of_concurrent_lockers_exactly_one_holds(self, storage: Storage) -> None:
        views = [self.another(storage) for _ in range(RACERS)]
        held = [view.lock("lock", bytes([65 + n])) for n, view in enumerate(views)]
        won = race([lock.__enter__ for lock in held])
        assert len(won) == 1
        held[won[0]].__exit__(None, None, None)

    # ------------------------------------------------------------ a run on it

    def test_a_run_is_saved_restored_and_pruned(self, storage: Storage) -> None:
        leaves = {
            "large": Leaf("uint8", (LARGE_BYTES,), memoryview(payload(LARGE_BYTES)), True),
            "small": Leaf("uint8", (3,), memoryview(b"abc"), True),
        }
        with Run(storage, create=True) as run:
            run.save(1, leaves)
            run.save(2, {**leaves, "small": Leaf("uint8", (3,), memoryview(b"xyz"), True)})
            run.save(3, leaves)
            run.delete([1])
        reader = Run(self.another(storage))
        assert reader.steps() == [2, 3]
        assert bytes(reader.load(2).leaves["small"].data) == b"xyz"
        expect(bytes(reader.load(3).leaves["large"].data), payload(LARGE_BYTES))
        report = verify_run(Run(storage))
        assert report.ok, report.problems
        assert report.good == (2, 3)


def payload(size: int) -> bytes:
    """The same bytes for the same size."""
    return random.Random(size).randbytes(size)


def feed(sink: Sink, data: bytes) -> None:
    """Write `data` in parts of uneven size."""
    for _, part in _parts(memoryview(data), 3_333_333):
        sink.write(part)


def write(storage: Storage, name: str, data: bytes) -> None:
    """Create an object, written in such parts; abort it on an error."""
    create_whole(storage, name, *(part for _, part in _parts(memoryview(data), 3_333_333)))


def race(attempts: Sequence[Callable[[], object]]) -> list[int]:
    """Run all at once; returns the numbers of those that were neither refused nor blocked."""

    def attempt(number: int) -> int | None:
        try:
            attempts[number]()
        except (FileExistsError, BlockingIOError):
            return None
        return number

    with ThreadPoolExecutor(len(attempts)) as pool:
        done = list(pool.map(attempt, range(len(attempts))))
    return [number for number in done if number is not None]


def _parts(view: memoryview, size: int) -> list[tuple[int, memoryview]]:
    return [(offset, view[offset : offset + size]) for offset in range(0, len(view), size)]
