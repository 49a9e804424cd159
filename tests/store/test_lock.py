"""The writer's lock on a disk: what does not release it, and what happens after it is lost."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import Operations, contents, make_leaves, run_on, sharing_states
from lock_cases import CASES, holds

from perdure.errors import LockedError, PruneError, SaveError
from perdure.store import LocalStorage, Run, verify_run
from perdure.store.storage import LostLock


@pytest.mark.parametrize("name", CASES)
def test_a_writer_stays_the_only_one(tmp_path: Path, name: str) -> None:
    held, printed = holds(name, tmp_path / "run")
    assert held, printed


@pytest.mark.parametrize("name", CASES)
def test_control_the_cases_fail_with_a_lock_that_is_taken_wrongly(
    tmp_path: Path, name: str
) -> None:
    """A record lock, a forked child that keeps the descriptor, and an inherited descriptor."""
    held, _ = holds(name, tmp_path / "run", control=True)
    assert not held


def removed(path: Path) -> None:
    shutil.rmtree(path)


def moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def replaced(path: Path) -> None:
    """Replace a directory, as a file system mounted over it does."""
    moved(path)
    shutil.copytree(path.with_name("elsewhere"), path)


def lock_removed(path: Path) -> None:
    (path / "lock").unlink()


# Two checks find it: of the directory, and of the lock in it.
LOST = "moved, deleted, unmounted or replaced|removed, moved, replaced or mounted over"


@pytest.mark.parametrize("lose", [removed, moved, replaced, lock_removed])
def test_a_writer_that_lost_its_directory_changes_nothing(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    path = tmp_path / "run"
    with run_on(path) as run:
        for step, leaves in sharing_states().items():
            run.save(step, leaves)
        lose(path)
        before = sorted((file, file.stat().st_mtime_ns) for file in tmp_path.rglob("*"))
        with pytest.raises(SaveError, match=LOST):
            run.save(5, make_leaves(5))
        if path.exists():
            with pytest.raises(PruneError, match=LOST):
                run.delete([1])
        with pytest.raises(SaveError, match=LOST):
            run.quarantine(4, "a reason")
        assert sorted((file, file.stat().st_mtime_ns) for file in tmp_path.rglob("*")) == before
    for kept in (path, tmp_path / "elsewhere"):
        if kept.exists():
            assert verify_run(Run(kept)).good == (1, 2, 3, 4)
            with run_on(kept) as run:
                run.save(5, make_leaves(5))


def test_a_directory_that_is_lost_in_the_middle_of_a_save_gets_no_manifest(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run_on(path).save(1, make_leaves(1))
    fired = []

    def replace_it(_: int, operation: str, name: str) -> None:
        if operation == "fsync_dir" and name.endswith("packs") and not fired:
            fired.append(name)
            replaced(path)

    with run_on(path, Operations(fail=replace_it)) as run, pytest.raises(SaveError):
        run.save(2, make_leaves(2))
    assert fired
    assert Run(path).steps() == [1]
    assert Run(tmp_path / "elsewhere").steps() == [1]


def test_a_second_writer_that_found_no_lock_file_stops_the_first(tmp_path: Path) -> None:
    first = run_on(tmp_path)
    first.save(1, make_leaves(1))
    lock_removed(tmp_path)
    with run_on(tmp_path) as second:
        second.save(2, make_leaves(2))
        with pytest.raises(SaveError, match="lock file that this process holds is not there"):
            first.save(3, make_leaves(3))
        with pytest.raises(PruneError):
            first.delete([1])
        second.save(3, make_leaves(3))
    first.close()
    assert verify_run(Run(tmp_path)).good == (1, 2, 3)


def test_a_lock_that_is_a_link_is_refused_and_its_target_untouched(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(target)
    with pytest.raises(SaveError, match="symbolic link"):
        run_on(tmp_path / "run").begin_writing()
    assert target.read_text() == "mine"


@pytest.mark.parametrize(("make", "what"), [(os.mkdir, "directory"), (os.mkfifo, "named pipe")])
def test_what_has_the_place_of_the_lock_is_named_with_what_to_do(
    tmp_path: Path, make: Callable[[Path], None], what: str
) -> None:
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(1))
    lock = tmp_path / "lock"
    lock.unlink()
    make(lock)
    with pytest.raises(SaveError, match=rf"found a {what}; remove it: .*lock"):
        run_on(tmp_path).begin_writing()
    assert verify_run(Run(tmp_path)).ok, "readers take no lock"


def test_a_temporary_file_that_is_a_link_is_refused_and_its_target_untouched(
    tmp_path: Path,
) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    storage = LocalStorage(tmp_path / "run")
    storage.replace("perdure.json", b"one")
    (tmp_path / "run" / "perdure.json.tmp").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links") as caught:
        storage.replace("perdure.json", b"two")
    assert caught.value.errno == errno.ELOOP
    assert target.read_text() == "mine"
    assert storage.read("perdure.json") == b"one"


def test_a_closed_run_takes_the_lock_again(tmp_path: Path) -> None:
    run = run_on(tmp_path)
    run.save(1, make_leaves(1))
    run.close()
    with run_on(tmp_path) as other:
        other.begin_writing()
        with pytest.raises(LockedError, match="this process already has a manager"):
            run.save(2, make_leaves(2))
        other.save(2, make_leaves(2))
    run.save(3, make_leaves(3))
    run.close()
    assert contents(Run(tmp_path).load(2).leaves) == contents(make_leaves(2))


def test_after_a_lost_lock_every_change_raises(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.replace("perdure.json", b"one")
    with storage.lock("lock", b"me"):
        sink = storage.create("packs/one", 3)
        sink.write(memoryview(b"abc"))
        os.unlink(tmp_path / "lock")
        changes: list[Callable[[], object]] = [
            sink.commit,
            lambda: storage.create("packs/two", 3),
            lambda: storage.replace("perdure.json", b"two"),
            lambda: storage.move("perdure.json", "perdure.txt"),
            lambda: storage.delete("perdure.json"),
        ]
        for change in changes:
            with pytest.raises(LostLock):
                change()
    assert storage.read("perdure.json") == b"one"
    assert list(storage.list("packs/")) == []
