"""One run directory: saving, loading, one writer, falling back to older checkpoints, deleting."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import Operations, contents, make_leaves, run_on
from lock_cases import writer_process

from perdure.checkpoint.restorer import load_good
from perdure.errors import (
    CorruptionError,
    HistoryError,
    LockedError,
    NoGoodCheckpointError,
    NotARunError,
    SaveError,
    StepExistsError,
    StepNotFoundError,
    StoreError,
    UnreachableError,
)
from perdure.store import (
    Leaf,
    MemoryStorage,
    Run,
    VerifyReport,
    aligned_buffers,
    repair,
    verify_run,
)
from perdure.store.aligned_buffers import SMALL_BYTES
from perdure.store.format import CHUNK_BYTES, manifest_name
from perdure.store.garbage_collection import PruneRequest
from perdure.store.run_log import LOG_FILE
from perdure.testing import check_run


def packs(path: Path) -> list[Path]:
    return sorted((path / "packs").iterdir())


def flip(path: Path, offset: int = 10) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def test_saved_leaves_are_loaded(place: Path | MemoryStorage) -> None:
    with run_on(place) as run:
        for step in (1, 2, 30):
            run.save(step, make_leaves(step))
        assert run.steps() == [1, 2, 30]
        for step in (1, 2, 30):
            assert contents(run.load(step).leaves) == contents(make_leaves(step))
        assert verify_run(run).problems == ()


@pytest.mark.parametrize("extra", [-1, 0, 1, CHUNK_BYTES // 2 + 5])
def test_leaves_around_the_size_of_a_chunk_are_loaded(tmp_path: Path, extra: int) -> None:
    leaves = make_leaves(5, (2 * CHUNK_BYTES + extra, 3, 4096))
    with run_on(tmp_path) as run:
        manifest = run.save(1, leaves)
        assert len(manifest.leaves[0].chunks) == 2 + (extra > 0)
        assert contents(run.load(1).leaves) == contents(leaves)
        assert verify_run(run).problems == ()


def test_a_partial_load_reads_only_its_leaves(tmp_path: Path) -> None:
    with run_on(tmp_path) as run:
        run.save(1, {"a": make_leaves(1)["model/layer0"]})
        run.save(2, {"a": make_leaves(1)["model/layer0"], "b": make_leaves(2)["model/layer0"]})
        flip(packs(tmp_path)[1])
        assert set(run.load(2, lambda path: path == "a").leaves) == {"a"}
        with pytest.raises(CorruptionError, match="leaf 'b'"):
            run.load(2)
        with pytest.raises(StepNotFoundError, match="no leaf that was asked for"):
            run.load(2, lambda path: path == "nothing")


def test_a_leaf_that_is_kept_keeps_the_memory_of_no_other(tmp_path: Path) -> None:
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(1, (SMALL_BYTES, SMALL_BYTES + 1, CHUNK_BYTES)))
        loaded = [leaf for leaf in run.load(1).leaves.values() if leaf.nbytes >= SMALL_BYTES]
    assert len(loaded) == 3
    for leaf in loaded:
        assert isinstance(leaf.data, memoryview)
        assert isinstance(leaf.data.obj, mmap.mmap)
        assert len(leaf.data.obj) == leaf.nbytes


def test_an_existing_chunk_is_not_written_again(tmp_path: Path) -> None:
    frozen = make_leaves(1, (100_000,))["model/layer0"]
    with run_on(tmp_path) as run:
        run.save(1, {"frozen": frozen, "copy": frozen})
        first = sum(path.stat().st_size for path in packs(tmp_path))
        run.save(2, {"frozen": frozen, "new": make_leaves(2, (50,))["model/layer0"]})
        second = sum(path.stat().st_size for path in packs(tmp_path)) - first
    assert 100_000 < first < 101_000
    assert 50 < second < 500


def test_a_chunk_that_was_found_damaged_is_written_again(tmp_path: Path) -> None:
    leaf = make_leaves(1)["model/layer0"]
    with run_on(tmp_path) as run:
        run.save(1, {"a": leaf})
        flip(packs(tmp_path)[0])
        with pytest.raises(CorruptionError) as caught:
            run.load(1)
        run.quarantine(1, str(caught.value))
        run.save(2, {"a": leaf})
        assert contents(run.load(2).leaves) == contents({"a": leaf})


def test_saving_a_step_again_with_equal_bits_changes_nothing(tmp_path: Path) -> None:
    with run_on(tmp_path) as run:
        first = run.save(1, make_leaves(1))
        held = sorted(tmp_path.rglob("*"))
        assert run.save(1, make_leaves(1)) == first
        assert sorted(tmp_path.rglob("*")) == held


def test_later_metrics_are_added_to_a_step(place: Path | MemoryStorage) -> None:
    with run_on(place) as run:
        first = run.save(1, make_leaves(1), metrics={"loss": 0.5})
        again = run.save(1, make_leaves(1), metrics={"loss": 7.0, "eval/error": 2.0})
    assert again.metrics == {"loss": 0.5, "eval/error": 2.0}, "what was there stays"
    loaded = Run(place).load(1)
    assert loaded.manifest == again
    assert loaded.manifest.fingerprint == first.fingerprint
    assert contents(loaded.leaves) == contents(make_leaves(1))


def test_saving_a_step_again_with_other_bits_is_refused(tmp_path: Path) -> None:
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(1))
        with pytest.raises(StepExistsError, match="step 1 is committed with fingerprint"):
            run.save(1, make_leaves(2))
        assert contents(run.load(1).leaves) == contents(make_leaves(1))


def test_a_missing_step_names_the_existing_ones(place: Path | MemoryStorage) -> None:
    with run_on(place) as run:
        run.save(4, make_leaves(4))
        with pytest.raises(
            StepNotFoundError, match="expected a checkpoint of step 5, found step 4"
        ):
            run.load(5)


@pytest.mark.parametrize("step", [-1, 10**12])
def test_a_step_out_of_range_is_refused(place: Path | MemoryStorage, step: int) -> None:
    with pytest.raises(StoreError, match="a step is an integer from 0"):
        run_on(place).save(step, make_leaves(1))


def test_a_directory_that_is_not_a_run_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for create in (False, True):
        with pytest.raises(NotARunError, match=r"expected a run directory .*found notes\.txt"):
            Run(tmp_path, create=create)
    with pytest.raises(NotARunError, match="found nothing there"):
        Run(tmp_path / "missing")
    with pytest.raises(NotARunError, match="expected a directory, found a file"):
        Run(tmp_path / "notes.txt", create=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_without_its_marker_is_not_mistaken_for_an_empty_one(tmp_path: Path) -> None:
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(1))
    (tmp_path / "perdure.json").unlink()
    with pytest.raises(CorruptionError, match=r"perdure\.json: missing beside 1 ch.*--repair"):
        Run(tmp_path, create=True)


def test_a_second_writer_in_this_process_raises_at_once(place: Path | MemoryStorage) -> None:
    with run_on(place) as first:
        first.save(1, make_leaves(1))
        with pytest.raises(
            LockedError, match=r"this process already has a manager .* opened at 19"
        ):
            run_on(place).begin_writing()
        first.save(2, make_leaves(2))
    with run_on(place) as second:
        second.save(3, make_leaves(3))
        assert verify_run(second).good == (1, 2, 3)


def test_a_second_process_gets_the_name_of_the_writer_and_takes_over_from_a_dead_one(
    tmp_path: Path,
) -> None:
    with (
        writer_process(tmp_path) as holder,
        pytest.raises(LockedError, match=f'"pid": {holder.pid}'),
    ):
        run_on(tmp_path).begin_writing()
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(1))
        assert verify_run(run).good == (1,)


def test_a_reader_takes_no_lock(tmp_path: Path) -> None:
    with run_on(tmp_path) as writer:
        writer.save(1, make_leaves(1))
        assert contents(Run(tmp_path).load(1).leaves) == contents(make_leaves(1))
        writer.save(2, make_leaves(2))


@pytest.mark.parametrize("what", ["pack", "manifest", "pack gone", "pack cut", "manifest empty"])
def test_the_newest_good_checkpoint_is_loaded_with_the_reason(tmp_path: Path, what: str) -> None:
    with run_on(tmp_path) as run:
        for step in (1, 2, 3):
            run.save(step, make_leaves(step))
    pack, manifest = packs(tmp_path)[-1], tmp_path / manifest_name(3)
    if what == "pack":
        flip(pack)
    elif what == "manifest":
        flip(manifest)
    elif what == "pack gone":
        pack.unlink()
    elif what == "pack cut":
        pack.write_bytes(pack.read_bytes()[:500])
    else:
        manifest.write_bytes(b"")
    with run_on(tmp_path) as run:
        loaded = load_good(run).loaded
        assert loaded is not None
        assert loaded.manifest.step == 2
        assert contents(loaded.leaves) == contents(make_leaves(2))
        ((step, reason),) = loaded.skipped
        assert step == 3
        assert str(tmp_path) in reason
        assert not verify_run(run).ok
        moved = run.quarantine(step, reason)
        assert run.steps() == [1, 2]
        assert run.log.view.aside[moved].reason == reason
        run.save(3, make_leaves(3))
        assert contents(run.load(3).leaves) == contents(make_leaves(3))


def test_a_run_without_any_good_checkpoint_raises(tmp_path: Path) -> None:
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(1))
        run.save(2, make_leaves(2))
        for pack in packs(tmp_path):
            flip(pack)
        with pytest.raises(NoGoodCheckpointError, match="found 2 damaged") as caught:
            load_good(run)
    assert "step 1:" in str(caught.value)
    assert "step 2:" in str(caught.value)


def test_deleting_keeps_what_other_checkpoints_need(tmp_path: Path) -> None:
    shared = make_leaves(9)["model/layer0"]
    with run_on(tmp_path) as run:
        run.save(1, {"shared": shared, "own": make_leaves(1)["model/layer0"]})
        run.save(2, {"shared": shared, "own": make_leaves(2)["model/layer0"]})
        run.save(3, {"own": make_leaves(3)["model/layer0"]})
        assert run.delete([1, 3, 99]) == [1, 3]
        assert len(packs(tmp_path)) == 2
        assert contents(run.load(2).leaves)["shared"] == contents({"a": shared})["a"]
        assert verify_run(run).problems == ()
        run.delete([2])
        assert packs(tmp_path) == []


def test_no_pack_is_deleted_while_a_manifest_is_unreadable(tmp_path: Path) -> None:
    shared = make_leaves(9)["model/layer0"]
    with run_on(tmp_path) as run:
        run.save(1, {"shared": shared})
        run.save(2, {"shared": shared})
    good = (tmp_path / manifest_name(2)).read_bytes()
    flip(tmp_path / manifest_name(2))
    with run_on(tmp_path) as run:
        run.delete([1])
        assert len(packs(tmp_path)) == 1
    (tmp_path / manifest_name(2)).write_bytes(good)
    assert contents(Run(tmp_path).load(2).leaves) == contents({"shared": shared})


def test_a_leftover_of_a_crash_is_reported_and_removed_by_the_next_writer(tmp_path: Path) -> None:
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(1))
    (tmp_path / "packs" / "000000000002-00000-00000000.pack.tmp").write_bytes(b"half")
    report = verify_run(Run(tmp_path))
    assert report.ok
    assert [problem.what for problem in report.problems] == ["left by a writer that did not finish"]
    with run_on(tmp_path) as run:
        run.save(2, make_leaves(2))
        assert verify_run(run).problems == ()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("operation", ["open", "write", "fsync", "link", "fsync_dir"])
def test_an_operation_that_fails_loses_only_that_save(
    tmp_path: Path, operation: str, code: int
) -> None:
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(1))
    broken = Operations(
        fail=lambda _, op, __: OSError(code, os.strerror(code)) if op == operation else None
    )
    with (
        run_on(tmp_path, broken) as run,
        pytest.raises(SaveError, match=r"saving step 2 failed.*last good checkpoint is step 1"),
    ):
        run.save(2, make_leaves(2))
    assert broken.fired
    with run_on(tmp_path) as run:
        loaded = load_good(run).loaded
        assert loaded is not None
        if operation != "fsync_dir" or loaded.manifest.step == 1:
            assert contents(loaded.leaves) == contents(make_leaves(1))
        run.save(2, make_leaves(2))
        assert contents(run.load(2).leaves) == contents(make_leaves(2))
        assert verify_run(run).ok


def test_a_large_save_on_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    large = make_leaves(2, (20 * 1024 * 1024,))
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(1))
    full = Operations(
        fail=lambda _, op, path: (
            OSError(errno.ENOSPC, "No space left on device")
            if op == "write" and ".pack" in path
            else None
        )
    )
    with run_on(tmp_path, full) as run, pytest.raises(SaveError, match="No space left on device"):
        run.save(2, large)
    assert full.fired
    assert not list((tmp_path / "packs").glob("*.tmp"))
    assert verify_run(Run(tmp_path)).problems == ()


def test_a_scalar_reads_back_as_text(tmp_path: Path) -> None:
    with run_on(tmp_path) as run:
        run.save(1, {"name": Leaf("py:str", (), memoryview("größe".encode()), True)})
        assert run.load(1).leaves["name"].text == "größe"
        assert verify_run(run).problems == ()


def test_a_step_with_damaged_bytes_is_saved_again(tmp_path: Path) -> None:
    leaves = make_leaves(2)
    with run_on(tmp_path) as run:
        run.save(1, leaves)
    flip(packs(tmp_path)[0])
    with run_on(tmp_path) as run:
        run.save(1, leaves)
        assert contents(run.load(1).leaves) == contents(leaves)
        assert len(run.quarantined()) == 1


def test_a_marker_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "perdure.json").symlink_to(tmp_path / "gone")
    with pytest.raises(UnreachableError, match=r"a link to .*gone, which is not there"):
        Run(tmp_path, create=True)


@pytest.mark.parametrize(
    "name", ["checkpoints/000000000002.json", "packs/000000000002", "checkpoints", "packs"]
)
def test_nothing_is_lost_while_a_link_leads_nowhere(name: str, tmp_path: Path) -> None:
    """Files that lie on another volume, which is away for a while."""
    root, away = tmp_path / "run", tmp_path / "away"
    states = {step: make_leaves(step) for step in (1, 2, 3)}
    with run_on(root) as run:
        for step, leaves in states.items():
            run.save(step, leaves)
    (path,) = root.glob(f"{name}*")
    path.rename(away)
    path.symlink_to(away)
    assert verify_run(Run(root)).good == (1, 2, 3), "the control: a link that leads somewhere"
    away.rename(tmp_path / "unmounted")
    report: VerifyReport | None = None
    with suppress(UnreachableError):
        report = verify_run(Run(root))
    assert report is None or (report.unread == (2,) and not report.bad and not report.ok)
    with run_on(root) as run:
        for change in (
            lambda: run.save(4, make_leaves(4)),
            lambda: run.delete([1]),
            lambda: repair(run),
            lambda: run.execute(run.plan(PruneRequest(orphans_to=9))),
        ):
            with suppress(StoreError):
                change()
    (tmp_path / "unmounted").rename(away)
    with run_on(root) as run:
        assert {2, 3} <= set(run.steps())
        for step in {*run.steps()} - {4}:
            assert contents(run.load(step).leaves) == contents(states[step])
        assert verify_run(run).ok


def test_packs_whose_manifests_were_taken_away_are_no_leftovers(tmp_path: Path) -> None:
    root, away = tmp_path / "run", tmp_path / "away"
    with run_on(root) as run:
        for step in (1, 2):
            run.save(step, make_leaves(step))
    (root / "checkpoints").rename(away)
    held = packs(root)
    found = verify_run(Run(root))
    assert not found.ok
    assert "moved or not mounted" in found.problems[0].what
    assert Run(root).plan(PruneRequest(orphans_to=9)).held_back is not None
    with run_on(root) as run, pytest.raises(HistoryError, match="step 1 was saved"):
        run.save(1, make_leaves(1))
    with run_on(root) as run, pytest.raises(HistoryError, match="Bring it back"):
        repair(run)
    assert packs(root) == held
    away.rename(root / "checkpoints")
    assert verify_run(Run(root)).ok


def test_a_pack_of_a_first_save_that_crashed_is_a_leftover(tmp_path: Path) -> None:
    """The control of the test above: there was no checkpoint yet."""
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(1))
    (tmp_path / manifest_name(1)).unlink()
    log = tmp_path / LOG_FILE
    log.write_bytes(log.read_bytes().splitlines(keepends=True)[0])  # no checkpoint was committed
    with run_on(tmp_path) as run:
        assert len(repair(run).actions) == 1
        run.save(1, make_leaves(1))
    assert len(packs(tmp_path)) == 1


def test_a_quarantine_on_a_full_disk_is_a_store_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(1))

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(run.storage, "move", full)
        with pytest.raises(SaveError, match=r"cannot be moved aside: .*No space left"):
            run.quarantine(1, "a test")
        assert contents(run.load(1).leaves) == contents(make_leaves(1))


@pytest.mark.parametrize("kept", [aligned_buffers.KEPT_BUFFERS, 5])
def test_a_second_save_takes_no_new_buffer(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even of many chunks, which need most. The control keeps fewer."""
    made: list[int] = []
    pages = aligned_buffers.pages
    monkeypatch.setattr(aligned_buffers, "pages", lambda size: (made.append(size), pages(size))[1])
    monkeypatch.setattr(aligned_buffers, "KEPT_BUFFERS", kept)
    monkeypatch.setattr(aligned_buffers, "_free", [])
    counts = []
    with Run(tmp_path, create=True) as run:
        for step in range(2):
            size = 800_000  # chunks of medium size, each copied before it is written
            leaves = {f"w{n}": bytes([step, n]) * (size // 2) for n in range(12)}
            run.save(step, {k: Leaf("uint8", (size,), memoryview(v)) for k, v in leaves.items()})
            counts.append(len(made))
    assert counts[0] == 7
    assert (counts[1] == counts[0]) == (kept > 5)
    assert check_run(tmp_path).good == (0, 1)
