"""Full, read-only, slow and lying disks, and readers during a prune: no checkpoint is lost."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crash_cases import CASES, assert_whole, prepared
from disks import NoMount, fill, mounted, small_disk
from helpers import Operations, contents, make_leaves, run_on, sharing_states

from perdure.checkpoint.restorer import load_good, quarantine_skipped
from perdure.errors import PruneError, SaveError, UnreachableError
from perdure.store import LocalStorage, MemoryStorage, PruneRequest, Run, repair, verify_run
from perdure.store.format import MAX_STEP

MIB = 1024 * 1024
SIZES = (3 * MIB, 5000)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    try:
        with small_disk(tmp_path / "disk", 12 * MIB) as path:
            yield path
    except NoMount as reason:
        pytest.skip(str(reason))


def saved(run: Run, *steps: int) -> None:
    for step in steps:
        run.save(step, make_leaves(step, SIZES))


def assert_newest(path: Path, step: int) -> None:
    loaded = load_good(Run(path)).loaded
    assert loaded is not None
    assert loaded.manifest.step == step
    assert contents(loaded.leaves) == contents(make_leaves(step, SIZES))
    assert verify_run(Run(path)).ok


def test_a_disk_that_is_too_full_raises_before_anything_is_written(disk: Path) -> None:
    run = run_on(disk / "run", operations := Operations())
    saved(run, 1)
    ballast = fill(disk, leave=2 * MIB)
    before = len(operations.done)
    with pytest.raises(SaveError, match=r"no room for it: \d+ bytes are needed, \d+ are free") as e:
        saved(run, 2)
    assert "last good checkpoint is step 1" in str(e.value)
    assert len(operations.done) == before, "nothing was even opened"
    assert_newest(disk / "run", 1)
    ballast.unlink()
    saved(run, 2)
    assert_newest(disk / "run", 2)
    run.close()


class Limited(MemoryStorage):
    """A storage with `free` bytes."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.free = free

    def free_bytes(self) -> int | None:
        return self.free


def test_the_leaves_of_one_process_count_towards_the_space_of_a_save() -> None:
    storage = Limited(MIB)
    local = {"process/0/random": make_leaves(7, (MIB,))["model/layer0"]}
    with Run(storage, create=True) as run:
        run.save(1, make_leaves(1))  # the control: without them it fits
        before = storage.objects.keys() - {"lock"}
        with pytest.raises(SaveError, match="no room for it"):
            run.save(2, make_leaves(2), process_leaves=local)
        assert storage.objects.keys() - {"lock"} == before, "nothing was written"
        storage.free = MIB + MIB // 4
        run.save(2, make_leaves(2), process_leaves=local)
        assert verify_run(run).good == (1, 2)


def test_an_unchanged_state_fits_on_a_full_disk(disk: Path) -> None:
    with run_on(disk / "run") as run:
        saved(run, 1)
        fill(disk, leave=256 * 1024)
        run.save(2, make_leaves(1, SIZES))
        assert verify_run(run).good == (1, 2)


@pytest.mark.parametrize(
    ("operation", "part"),
    [("open", ".pack"), ("write", ".pack"), ("write", ".json"), ("open", ".json")],
)
def test_a_disk_that_fills_up_during_a_save_loses_only_that_save(
    disk: Path, operation: str, part: str
) -> None:
    fired = []

    def before(happens: str, path: str) -> None:
        if happens == operation and part in path and "000000000002" in path and not fired:
            fired.append(fill(disk))

    with Run(LocalStorage(disk / "run", before), create=True) as run:
        saved(run, 1)
        with pytest.raises(SaveError, match=r"saving step 2 failed.*No space left on device"):
            saved(run, 2)
        assert fired
        assert_newest(disk / "run", 1)
        fired[0].unlink()
        saved(run, 2)
        assert_newest(disk / "run", 2)
        assert repair(run).report.problems == ()


def test_a_disk_without_any_space_raises_at_the_first_save(disk: Path) -> None:
    fill(disk)
    with run_on(disk / "run") as run, pytest.raises(SaveError, match="cannot be written to"):
        saved(run, 1)


def test_a_run_on_a_disk_that_became_read_only_is_still_read(tmp_path: Path) -> None:
    with run_on(tmp_path / "run") as run:
        saved(run, 1)
    place = tmp_path / "readonly"
    try:
        with mounted(place, "--bind", str(tmp_path / "run")):
            os.system(f"mount -o remount,bind,ro {place}")
            if os.statvfs(place).f_flag & os.ST_RDONLY == 0:
                pytest.skip("this machine does not make a bind mount read-only")
            run = Run(place)
            assert_newest(place, 1)
            with pytest.raises(SaveError, match=r"cannot be written to: .*Read-only file system"):
                saved(run, 2)
    except NoMount as reason:
        pytest.skip(str(reason))
    assert_newest(tmp_path / "run", 1)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("operation", ["unlink", "fsync_dir", "rename", "link", "write"])
def test_an_operation_that_fails_in_a_prune_or_a_repair_harms_no_checkpoint(
    tmp_path: Path, operation: str, code: int
) -> None:
    for name in ("compaction", "repair"):
        case = CASES[name]
        path = prepared(tmp_path / name, case)
        broken = Operations(
            fail=lambda _, op, __: OSError(code, os.strerror(code)) if op == operation else None
        )
        with run_on(path, broken) as run, pytest.raises(PruneError, match="in the middle"):
            case.act(run)
        assert broken.fired
        assert_whole(path, case)


def test_a_file_whose_sync_failed_is_never_named(tmp_path: Path) -> None:
    """After a failed fsync the kernel may drop the data, so a second fsync proves nothing."""
    failed = Operations(
        fail=lambda _, op, path: (
            OSError(errno.EIO, "Input/output error") if op == "fsync" and ".pack" in path else None
        )
    )
    with run_on(tmp_path) as run:
        saved(run, 1)
    with run_on(tmp_path, failed) as run, pytest.raises(SaveError, match="Input/output error"):
        saved(run, 2)
    assert failed.fired == 1
    assert ("link", ".pack") not in [(op, Path(name).suffix) for op, name in failed.done]
    assert_newest(tmp_path, 1)


def test_a_step_whose_last_sync_failed_is_synced_before_it_counts_as_saved(tmp_path: Path) -> None:
    broken = Operations(
        fail=lambda _, op, path: (
            OSError(errno.EIO, "Input/output error")
            if op == "fsync_dir" and path.endswith("checkpoints") and not broken.fired
            else None
        )
    )
    with run_on(tmp_path) as run:
        saved(run, 1)
    with run_on(tmp_path, broken) as run:
        with pytest.raises(SaveError, match="Input/output error"):
            saved(run, 2)
        before = len(broken.done)
        saved(run, 2)
        assert ("fsync_dir", "checkpoints") in broken.done[before:]
        before = len(broken.done)
        saved(run, 2)
        assert broken.done[before:] == [], "from then on it counts"
    assert_newest(tmp_path, 2)


def test_a_clock_that_jumps_back_changes_nothing_but_the_dates(tmp_path: Path) -> None:
    now = iter([10**9, 10**9, 10**9, 5, 5, 5, 5])
    with Run(tmp_path, create=True, clock=lambda: next(now)) as run:
        saved(run, 1, 2)
        assert run.manifest(1).created > run.manifest(2).created
        assert_newest(tmp_path, 2)


@pytest.mark.parametrize("what", ["compact", "delete all but one"])
def test_readers_during_prunes_read_only_right_bits(tmp_path: Path, what: str) -> None:
    """One thread restores as fast as it can while another saves, prunes and compacts."""
    states = sharing_states()
    done = threading.Event()
    reads: list[int] = []
    wrong: list[BaseException] = []

    def read() -> None:
        try:
            while not done.is_set() or not reads:
                loaded = load_good(Run(tmp_path)).loaded
                assert loaded is not None
                assert loaded.skipped == ()
                expected = states[(loaded.manifest.step - 1) % 4 + 1]
                assert contents(loaded.leaves) == contents(expected)
                reads.append(loaded.manifest.step)
        except BaseException as error:  # noqa: BLE001 (told to the main thread)
            wrong.append(error)

    with run_on(tmp_path) as run:
        run.save(1, states[1])
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        for step in range(2, 121):
            run.save(step, states[(step - 1) % 4 + 1])
            gone = set(run.steps()[: -1 if what == "delete all but one" else -3])
            run.execute(run.plan(PruneRequest(frozenset(gone), MAX_STEP, 0, everywhere=True)))
        done.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert reads
        assert verify_run(run).problems == ()


def slow(release: threading.Event, reached: threading.Event) -> Callable[[str, str], None]:
    def before(operation: str, path: str) -> None:
        if operation == "unlink" and path.endswith("000000000001.json"):
            reached.set()
            assert release.wait(60)

    return before


def test_a_prune_on_a_slow_disk_stops_no_reader(tmp_path: Path) -> None:
    release, reached = threading.Event(), threading.Event()
    with run_on(tmp_path) as run:
        saved(run, 1, 2)
    run = Run(LocalStorage(tmp_path, slow(release, reached)))
    pruning = threading.Thread(target=run.delete, args=([1],))
    pruning.start()
    assert reached.wait(60)
    assert_newest(tmp_path, 2)
    release.set()
    pruning.join()
    run.close()
    assert Run(tmp_path).steps() == [2]


class Outage(MemoryStorage):
    """A storage that fails when packs are read."""

    silent = False
    asked = 0

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if self.silent and name.startswith("packs/"):
            self.asked += 1
            raise ConnectionResetError(errno.ECONNRESET, "no answer")
        return super().read_into(name, offset, target)


def test_an_outage_is_not_mistaken_for_damage() -> None:
    """A check and a repair stop; a prune deletes what it was asked to, and nothing else."""
    storage = Outage()
    with run_on(storage) as run:
        for step, leaves in sharing_states().items():
            run.save(step, leaves)
        held = dict(storage.objects)
        storage.silent = True
        with pytest.raises(UnreachableError, match="no answer"):
            verify_run(run)
        with pytest.raises(PruneError, match="no answer"):
            repair(run)
        assert storage.objects == held
        with pytest.raises(PruneError, match="no answer"):
            run.execute(run.plan(PruneRequest(frozenset({1}), MAX_STEP, 0, everywhere=True)))
        assert held.keys() - storage.objects.keys() == {"checkpoints/000000000001.json"}
        assert storage.asked == 3
        storage.silent = False
        assert verify_run(run).ok
        assert verify_run(run).good == (2, 3, 4)


class BadReads(LocalStorage):
    """The first reads of names that contain `part` flip a bit, or are cut short by a byte."""

    part, left, is_cut, cached = "", 0, False, False

    def _spoilt(self, name: str, data: memoryview, got: int) -> int:
        if not self.part or self.part not in name or not self.left:
            return got
        self.left -= 0 if self.cached else 1
        if self.is_cut:
            return got - 1
        data[got // 2] ^= 4
        return got

    def read(self, name: str) -> bytes:
        data = bytearray(super().read(name))
        return bytes(data[: self._spoilt(name, memoryview(data), len(data))])

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        return self._spoilt(name, target, super().read_into(name, offset, target))

    def drop_cached(self, name: str) -> None:
        super().drop_cached(name)
        self.left = 0 if self.cached else self.left


@pytest.mark.parametrize("is_cut", [False, True], ids=["flipped", "cut"])
@pytest.mark.parametrize("part", ["packs/", "checkpoints/000000000002"], ids=["pack", "manifest"])
@pytest.mark.parametrize("reads", [1, -1, 10**6], ids=["once", "until dropped", "always"])
def test_one_bad_read_costs_no_checkpoint(
    tmp_path: Path, part: str, reads: int, is_cut: bool
) -> None:
    """Only bytes that are wrong a second time, past the page cache, are damage (the last case)."""
    with run_on(tmp_path) as run:
        for step in (1, 2):
            run.save(step, make_leaves(step, (300_000, 40)))
    storage = BadReads(tmp_path)
    with run_on(storage) as run:
        run.begin_writing()
        newest = next(tmp_path.glob("packs/000000000002-*")).name
        storage.part = newest if part == "packs/" else part
        storage.left, storage.is_cut, storage.cached = abs(reads), is_cut, reads < 0
        loaded = load_good(run).loaded
        storage.part = ""
        assert loaded is not None
        quarantine_skipped(run, loaded, ())
        assert storage.left == (10**6 - 2 if reads == 10**6 else 0)
        assert loaded.manifest.step == (2 if reads < 10**6 else 1)
        assert len(run.quarantined()) == (reads == 10**6)


def test_one_bad_read_of_a_check_is_no_damage(tmp_path: Path) -> None:
    """Of each part of a pack: its chunks, its trailer and its index."""
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(1))
    number, storage = 1, Late(tmp_path, 1)
    while True:
        report = verify_run(Run(storage))
        assert report.ok, report.problems
        if storage.number > 0:
            break
        number, storage = number + 1, Late(tmp_path, number + 1)
    assert number > 4


class Late(BadReads):
    """One read is spoilt, by its number among all."""

    def __init__(self, root: Path, number: int) -> None:
        super().__init__(root)
        self.number, self.left, self.part = number, 1, "s/"

    def _spoilt(self, name: str, data: memoryview, got: int) -> int:
        self.number -= 1
        return got if self.number else super()._spoilt(name, data, got)
