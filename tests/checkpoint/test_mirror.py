"""A mirror: what it receives, what a restore reads from it, and that it never harms the run."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mirror_cases import Story, manifest_first

from damage import flip
from http_proxy import Request, proxy_to
from object_stores import ObjectServer
from perdure import CheckpointManager, ManagerOptions, MemoryStorage, Retention, RunConfig, Trainer
from perdure.checkpoint.mirror import Mirror
from perdure.checkpoint.retention import plan_prune
from perdure.errors import (
    ArgumentError,
    CorruptionError,
    LockedError,
    NoGoodCheckpointError,
    NotARunError,
    StepNotFoundError,
    StoreError,
    UnreachableError,
)
from perdure.store import LocalStorage, Run
from perdure.store.copy import copy_run
from perdure.store.format import manifest_name
from perdure.testing import check_run
from perdure.train import CheckpointConfig
from pretend import Pretend, play

MIB = 1024 * 1024
WAIT_S = 60


def state(k: int, noise: int = 0) -> dict[str, Any]:
    return {"w": np.full(1000, 1000 * noise + k, np.float32), "step": k}


def same(restored: Any, k: int, noise: int = 0) -> bool:
    return restored["step"] == k and restored["w"].tobytes() == state(k, noise)["w"].tobytes()


def prints(place: Any) -> dict[int, str]:
    run = Run(place)
    return {step: run.manifest(step).fingerprint for step in run.steps()}


def packs(place: Any) -> set[str]:
    run = Run(place)
    return {pack.name for step in run.steps() for pack in run.manifest(step).packs}


def save(manager: CheckpointManager, *steps: int, noise: int = 0) -> None:
    for step in steps:
        manager.save(step, state(step, noise))
        manager.wait_until_finished(mirror=True)


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collects the texts of all warnings of the block."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught]


class Remote(MemoryStorage):
    """In memory; `error` fails every operation, and `gate` holds up the writing of packs."""

    def __init__(self) -> None:
        super().__init__()
        self.where = "memory:mirror"
        self.error: OSError | None = None
        self.failed = 0
        self.gate: threading.Event | None = None
        self.waiting = threading.Event()

    def _reach(self) -> None:
        if self.error is not None:
            self.failed += 1
            raise self.error

    def create(self, name: str, size: int) -> Any:
        self._reach()
        sink: Any = super().create(name, size)
        write = sink.write

        def held_up(data: memoryview) -> None:
            if self.gate is not None and name.startswith("packs/"):
                self.waiting.set()
                assert self.gate.wait(WAIT_S)
            self._reach()
            write(data)

        sink.write = held_up
        return sink

    def read(self, name: str) -> bytes:
        self._reach()
        return super().read(name)

    def list(self, prefix: str) -> Iterator[str]:
        self._reach()
        return super().list(prefix)

    def down(self) -> None:
        self.error = ConnectionError(errno.EHOSTUNREACH, "nobody answers")


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def remote() -> Remote:
    return Remote()


# ---------------------------------------------------------------- what reaches the mirror


def test_every_checkpoint_is_in_the_mirror_with_packs_of_its_own(
    run_path: Path, remote: Remote
) -> None:
    recipe = {"seed": 7}
    with CheckpointManager(run_path, mirror=remote, recipe=recipe) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step), {"loss": 1 / step})
    assert prints(remote) == prints(run_path)
    assert not packs(remote) & packs(run_path)
    for step in (1, 2, 3):
        one, other = Run(run_path).manifest(step), Run(remote).manifest(step)
        assert (one.recipe, one.metrics, one.created) == (
            other.recipe,
            other.metrics,
            other.created,
        )
    assert check_run(run_path).good == check_run(remote).good == (1, 2, 3)


def test_the_mirror_has_the_same_retention_and_the_same_pins(
    run_path: Path, remote: Remote
) -> None:
    options = ManagerOptions(retention=Retention(keep_period=4))
    with CheckpointManager(run_path, mirror=remote, max_to_keep=2, options=options) as manager:
        save(manager, 1, 2)
        manager.pin(1)
        save(manager, *range(3, 9))
        assert manager.all_steps() == Run(remote).steps() == [1, 4, 7, 8]
        assert manager.pinned_steps() == sorted(Run(remote).pinned()) == [1]
        manager.unpin(1)
        save(manager, 9)
        assert manager.all_steps() == Run(remote).steps() == [4, 8, 9]
    assert check_run(remote).good == check_run(run_path).good


def test_a_pin_that_is_removed_while_the_mirror_is_busy_is_removed_there(
    run_path: Path, remote: Remote
) -> None:
    with CheckpointManager(run_path, mirror=remote, max_to_keep=1) as manager:
        save(manager, 1)
        manager.pin(1)
        save(manager, 2)
        assert Run(remote).pinned() == {1}
        remote.gate = threading.Event()
        remote.waiting.clear()
        manager.save(3, state(3))
        assert remote.waiting.wait(WAIT_S)
        manager.unpin(1)
        manager.save(4, state(4))
        manager.wait_until_finished()
        assert 1 not in manager.all_steps(), "its retention deletes it before the mirror looks"
        remote.gate.set()
        manager.wait_until_finished(mirror=True)
        assert Run(remote).pinned() == frozenset()
        assert 1 not in Run(remote).steps()


def test_saves_do_not_wait_for_the_mirror_and_it_catches_up(run_path: Path, remote: Remote) -> None:
    remote.gate = threading.Event()
    with CheckpointManager(run_path, mirror=remote, max_to_keep=2) as manager:
        manager.save(1, state(1))
        assert remote.waiting.wait(WAIT_S)
        for step in range(2, 9):
            manager.save(step, state(step))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 7, 8], "what is being copied stays until that is done"
        assert Run(remote).steps() == []
        remote.gate.set()
    assert Run(remote).steps() == [7, 8], "what retention deleted meanwhile is skipped"
    assert check_run(remote).good == (7, 8)
    check_run(run_path)


def test_a_deleted_checkpoint_does_not_come_back_from_the_mirror(
    run_path: Path, remote: Remote
) -> None:
    with CheckpointManager(run_path, mirror=remote) as manager:
        save(manager, 1, 2, 3)
        manager.delete(3)
        assert Run(remote).steps() == [1, 2]
        assert manager.restore().step == 2
        manager.save(3, state(3, noise=1))
    assert prints(remote) == prints(run_path)


@pytest.mark.parametrize("is_damaged", [True, False])
def test_the_mirror_deletes_nothing_on_the_word_of_a_damaged_log(
    run_path: Path, remote: Remote, is_damaged: bool
) -> None:
    with CheckpointManager(run_path, mirror=remote) as manager:
        save(manager, 1, 2)
        manager.delete(2)
        save(manager, 2)  # with the bits that were deleted, as the last line of the log says
    log = run_path / "log.jsonl"
    lines = log.read_bytes()
    (run_path / manifest_name(2)).unlink()
    log.write_bytes(lines.replace(b'"again":true', b'"again":1'))
    if not is_damaged:  # the control: it was deleted on purpose
        *kept, last = lines.splitlines(keepends=True)
        assert b'"again":true' in last
        log.write_bytes(b"".join(kept))
    with CheckpointManager(run_path, mirror=remote) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.pin(1)
        manager.wait_until_finished(mirror=True)
    assert Run(remote).steps() == ([1, 2] if is_damaged else [1])


def test_a_rolled_back_checkpoint_does_not_come_back_from_the_mirror(
    run_path: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(run_path, mirror=remote) as manager:
        save(manager, 1, 2, 3)
    aside = [SimpleNamespace(manifest=Run(run_path).manifest(step)) for step in (2, 3)]
    with Run(run_path) as run:
        run.delete([2, 3])
    monkeypatch.setattr(
        Run, "rolled_back", lambda run: aside if run.where == str(run_path) else [], raising=False
    )
    with CheckpointManager(run_path, mirror=remote) as manager:
        with pytest.warns(UserWarning, match="still holds steps 2, 3, which a rollback set aside"):
            assert manager.restore().step == 1
        save(manager, 2, noise=1)
    assert prints(remote) == prints(run_path)
    assert check_run(remote).good == (1, 2)


def removed_steps(run_path: Path) -> list[int]:
    return sorted(step for step, _ in Run(run_path).log.view.removed)


def test_a_rolled_back_and_pruned_checkpoint_does_not_come_back_from_the_mirror(
    run_path: Path, remote: Remote
) -> None:
    with CheckpointManager(run_path, mirror=remote) as manager:
        save(manager, 1, 2, 3)
    # As `perdure rollback` and `perdure prune --rolled-back` do, which know of no mirror.
    with Run(run_path) as run:
        run.rollback(1)
        run.execute(plan_prune(run, None, Retention(), rolled_back=True).store)
        assert run.quarantined() == []
    with CheckpointManager(run_path, mirror=remote) as manager:
        with pytest.warns(UserWarning, match=r"still holds steps 2, 3, which .* deleted here"):
            assert manager.restore().step == 1
        save(manager, 2, noise=1)
    assert prints(remote) == prints(run_path)
    assert check_run(remote).good == (1, 2)
    assert removed_steps(run_path) == [2, 3]


def test_a_checkpoint_deleted_during_an_outage_of_the_mirror_does_not_come_back(
    run_path: Path, remote: Remote
) -> None:
    with CheckpointManager(run_path, mirror=remote) as manager:
        save(manager, 1, 2)
        remote.down()
        with pytest.warns(UserWarning, match="could not be brought up to date"):
            manager.delete(2)
    remote.error = None
    with CheckpointManager(run_path, mirror=remote) as manager:
        with pytest.warns(UserWarning, match="still holds step 2, which"):
            assert manager.restore().step == 1
        save(manager, 3)
    assert check_run(remote).good == (1, 3)


def test_a_removed_checkpoint_that_is_saved_again_stays_in_the_mirror(
    run_path: Path, remote: Remote
) -> None:
    with CheckpointManager(run_path, mirror=remote) as manager:
        save(manager, 1, 2, 3)
    with Run(run_path) as run:
        run.rollback(1)
        run.execute(plan_prune(run, None, Retention(), rolled_back=True).store)
    with CheckpointManager(run_path) as manager:  # without the mirror, with the same bits
        manager.save(2, state(2))
    assert removed_steps(run_path) == [3]
    with Run(run_path) as run:
        run.delete([2])  # as retention does
    with CheckpointManager(run_path, mirror=remote) as manager:
        with pytest.warns(UserWarning, match=r"restored from|still holds step 3"):
            assert manager.restore().step == 2
        save(manager, 4)
    assert check_run(remote).good == (1, 2, 4)


# ---------------------------------------------------------------- the three scenarios


def test_a_machine_that_comes_back_restores_the_checkpoints_of_the_other(
    tmp_path: Path, remote: Remote
) -> None:
    """A commits step 2 and dies before its copy; B continues from 1 elsewhere; A comes back."""
    a, b = tmp_path / "a", tmp_path / "b"
    with CheckpointManager(a, mirror=remote) as manager:
        save(manager, 1)
    with CheckpointManager(a) as manager:  # A had done this when it died
        save(manager, 2)
    with CheckpointManager(b, mirror=remote) as manager:
        with pytest.warns(UserWarning, match="step 1 is restored from the mirror .* not hold it"):
            assert manager.restore().step == 1
        save(manager, 2, 3, noise=1)
    before = prints(remote)
    with CheckpointManager(a, mirror=remote) as manager:
        with warned() as texts:
            restored = manager.restore()
        assert restored.step == 3
        assert same(restored.state, 3, noise=1)
        assert sum("step 2 is not the same" in text for text in texts) == 1
        assert sum("step 3 is restored from the mirror" in text for text in texts) == 1
        (differ,) = [text for text in texts if "not the same" in text]
        assert all(print_[:16] in differ for print_ in (prints(a)[2], before[2]))
        save(manager, 4, noise=1)
        assert same(manager.restore(2).state, 2), "A's own step 2 stays as it is"
    after = prints(remote)
    assert {step: after[step] for step in before} == before, "nothing there was overwritten"
    assert check_run(remote).good == (1, 2, 3, 4)
    check_run(a)


def test_prune_and_compaction_of_the_mirror_do_not_affect_a_resume(
    run_path: Path, remote: Remote
) -> None:
    shared = {"frozen": np.arange(50_000, dtype=np.int64)}
    with CheckpointManager(run_path, mirror=remote) as manager:
        for step in (1, 2, 3):
            manager.save(step, {**shared, **state(step)})
    with Run(remote) as other:
        from perdure.store import PruneRequest
        from perdure.store.format import MAX_STEP

        plan = other.plan(PruneRequest(frozenset({1, 2}), MAX_STEP, 0, everywhere=True))
        assert plan.steps == (1, 2)
        other.execute(plan)
    with CheckpointManager(run_path, mirror=remote) as manager:
        assert manager.restore().step == 3
        for step in (4, 5):
            manager.save(step, {**shared, **state(step)})
    assert check_run(remote).good == (3, 4, 5)
    assert prints(remote) == {step: prints(run_path)[step] for step in (3, 4, 5)}


def test_a_step_that_was_committed_just_now_is_no_other_history(
    run_path: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(run_path, mirror=remote) as manager:
        save(manager, 1)
        mirror = manager._mirror
        assert mirror is not None
        target = Run(remote)
        for newest, notes in ((2, 0), (0, 1)):  # the control: a run that went back
            monkeypatch.setattr(mirror._source, "steps", lambda newest=newest: [newest])
            mirror._compare(target)
            assert len(mirror._notes) == notes
        mirror._notes.clear()
        monkeypatch.undo()


def test_compaction_does_not_race_the_copies(run_path: Path, remote: Remote) -> None:
    """4 MB frozen and 12 MB changing leaves, three kept, and a mirror much slower than the saves."""
    frozen = np.arange(MIB, dtype=np.int32)
    remote.gate = threading.Event()

    def big(step: int) -> dict[str, Any]:
        changing = np.random.default_rng(step).integers(0, 255, 12 * MIB, dtype=np.uint8)
        return {"frozen": frozen, "changing": changing, "step": step}

    compacted: set[str] = set()
    with CheckpointManager(run_path, mirror=remote, max_to_keep=3) as manager:
        for step in range(1, 4):
            manager.save(step, big(step))
        assert remote.waiting.wait(WAIT_S), "the copy of step 1 has begun"
        first = packs(run_path)
        for step in range(4, 10):
            manager.save(step, big(step))
            manager.wait_until_finished()
            compacted |= first - {path.name for path in (run_path / "packs").iterdir()}
        remote.gate.set()
        manager.wait_until_finished(mirror=True)
        assert Run(remote).steps()[-1] == 9
        manager.save(10, big(10))
    assert compacted, "packs were deleted or compacted while they were copied"
    assert check_run(remote).good == (8, 9, 10)
    assert check_run(run_path).good == (8, 9, 10)
    assert prints(remote) == prints(run_path)


# ---------------------------------------------------------------- a mirror that fails


FAILURES = {
    "outage": ConnectionError(errno.EHOSTUNREACH, "nobody answers"),
    "permission": PermissionError(errno.EACCES, "permission denied"),
    "disk full": OSError(errno.ENOSPC, "no space left"),
}


@pytest.mark.parametrize("cause", FAILURES)
def test_a_failing_mirror_warns_once_and_catches_up(
    run_path: Path, remote: Remote, cause: str
) -> None:
    with CheckpointManager(run_path, mirror=remote) as manager:
        save(manager, 1)
        remote.error = FAILURES[cause]
        manager.save(2, state(2))
        with pytest.warns(UserWarning, match="could not be brought up to date") as caught:
            manager.wait_until_finished(mirror=True)
        save(manager, 3, 4)  # a second warning would be an error
        assert len(caught) == 1
        assert str(FAILURES[cause].strerror) in str(caught[0].message)
        assert manager.all_steps() == [1, 2, 3, 4]
        remote.error = None
        save(manager, 5)
        assert prints(remote) == prints(run_path)
        remote.error = FAILURES[cause]
        with pytest.warns(UserWarning, match="could not be brought up to date"):
            save(manager, 6)
        remote.error = None
    assert remote.failed >= 4
    assert prints(remote) == prints(run_path)
    assert check_run(remote).good == (2, 3, 4, 5, 6)


def test_an_outage_at_the_end_names_the_missing_steps_and_the_next_run_copies_them(
    run_path: Path, remote: Remote
) -> None:
    manager = CheckpointManager(run_path, mirror=remote)
    save(manager, 1)
    remote.down()
    with warned() as texts:
        manager.save(2, state(2))
        manager.save(3, state(3))
        manager.close()
    assert sum("lacks steps 2, 3" in text for text in texts) == 1
    remote.error = None
    with CheckpointManager(run_path, mirror=remote) as manager:
        assert manager.restore().step == 3
        manager.save(4, state(4))
    assert check_run(remote).good == (1, 2, 3, 4)


def test_close_waits_for_the_mirror_for_a_bounded_time(run_path: Path, remote: Remote) -> None:
    remote.gate = threading.Event()
    manager = CheckpointManager(run_path, mirror=remote, options=ManagerOptions(mirror_wait=0.0))
    manager.save(1, state(1))
    manager.wait_until_finished()
    assert remote.waiting.wait(WAIT_S)
    assert manager._mirror is not None
    with pytest.warns(UserWarning, match=r"lacks step 1 of .*`perdure copy"):
        manager.close()
    remote.gate.set()
    manager._mirror.wait(WAIT_S)
    assert Run(remote).steps() in ([], [1])
    with CheckpointManager(run_path, mirror=remote) as again:  # neither lock is held any more
        save(again, 2)
    assert check_run(remote).good == (1, 2)


def test_another_writer_of_the_mirror_is_a_warning(run_path: Path, remote: Remote) -> None:
    with Run(remote, create=True) as other:
        other.begin_writing()
        with warned() as texts, CheckpointManager(run_path, mirror=remote) as manager:
            save(manager, 1)
        assert "could not be brought up to date" in texts[0]
        assert "Nothing was changed" in texts[0]
        assert "lacks step 1 of" in texts[1]
        assert len(texts) == 2
        with pytest.raises(LockedError):
            Run(remote).begin_writing()
    with CheckpointManager(run_path, mirror=remote) as manager:
        save(manager, 2)
    assert check_run(remote).good == (1, 2)


def test_no_error_of_the_mirror_affects_the_run(
    run_path: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> int:
        raise MemoryError("no memory")

    with CheckpointManager(run_path, mirror=remote) as manager:
        with monkeypatch.context() as patched:
            patched.setattr("perdure.checkpoint.mirror.copy_checkpoint", broken)
            with pytest.warns(UserWarning, match="no memory"):
                save(manager, 1)
        save(manager, 2)
    assert check_run(remote).good == (1, 2)


def test_a_damaged_checkpoint_is_not_copied(run_path: Path, remote: Remote) -> None:
    with CheckpointManager(run_path) as manager:
        save(manager, 1, 2)
    flip(sorted((run_path / "packs").iterdir())[0])
    with (
        CheckpointManager(run_path, mirror=remote) as manager,
        pytest.warns(UserWarning, match="step 1 is not copied to the mirror"),
    ):
        save(manager, 3)
    assert check_run(remote).good == (2, 3)


def test_save_and_exit_waits_for_the_mirror_and_logs_missing_steps(
    run_path: Path, remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(run_path, mirror=remote)
    with pytest.raises(SystemExit) as left:
        manager.save_and_exit(1, state(1))
    assert left.value.code == 75
    assert (Run(remote).steps(), caplog.text) == ([1], "")
    remote.down()
    manager = CheckpointManager(run_path, mirror=remote)
    with pytest.warns(UserWarning, match="does not answer"):
        manager.wait_until_finished()
    with pytest.raises(SystemExit) as left:
        manager.save_and_exit(2, state(2))
    assert left.value.code == 75
    assert "lacks steps 1, 2" in caplog.text


def test_a_directory_that_cannot_be_a_mirror_is_refused_at_once(tmp_path: Path) -> None:
    for place in (tmp_path / "run", tmp_path / "run" / "mirror", tmp_path):
        with pytest.raises(StoreError, match="expected a directory apart from"):
            CheckpointManager(tmp_path / "run", mirror=place)
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "thesis.tex").write_text("important")
    with pytest.raises(NotARunError, match=r"thesis\.tex"):
        CheckpointManager(tmp_path / "run", mirror=tmp_path / "junk")
    with pytest.raises(ArgumentError, match="mirror_wait"):
        ManagerOptions(mirror_wait=-1.0)


def test_a_manager_that_only_reads_never_writes_to_the_mirror(
    run_path: Path, remote: Remote
) -> None:
    with CheckpointManager(run_path, mirror=remote) as manager:
        save(manager, 1)
    with Run(remote) as other:
        other.begin_writing()
        with CheckpointManager(run_path, mirror=remote) as manager:
            assert manager.restore().step == 1


def test_a_manager_that_is_never_closed_releases_its_locks(run_path: Path, tmp_path: Path) -> None:
    manager = CheckpointManager(run_path, mirror=tmp_path / "mirror")
    save(manager, 1)
    copying = weakref.ref(manager._mirror)
    del manager
    while copying() is not None:  # its thread may have the last lines of its work left
        gc.collect()
    with CheckpointManager(run_path, mirror=tmp_path / "mirror") as manager:
        save(manager, 2)
    assert check_run(tmp_path / "mirror").good == (1, 2)


FORKS = """
import os, signal, sys, threading
from perdure import CheckpointManager
from perdure.store import LocalStorage

reached, release = threading.Event(), threading.Event()

def before(operation, path):
    reached.set()
    assert release.wait(60)

run, mirror = sys.argv[1:]
with CheckpointManager(run, mirror=LocalStorage(mirror, before)) as manager:
    manager.save(1, {"w": 1.5})
    assert reached.wait(60)
    with manager._mirror._changed:  # as if its thread held that lock
        if (pid := os.fork()) == 0:
            signal.alarm(10)
            sys.exit(0)  # with all that Python does at its end
    status = os.waitpid(pid, 0)[1]
    release.set()
    assert os.waitstatus_to_exitcode(status) == 0
"""


def test_a_forked_child_does_not_wait_for_the_mirror(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKS, str(tmp_path / "run"), str(tmp_path / "mirror")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert check_run(tmp_path / "mirror").good == (1,)


# ---------------------------------------------------------------- restores


def mirrored(run_path: Path, remote: Any, *steps: int) -> None:
    with CheckpointManager(run_path, mirror=remote) as manager:
        save(manager, *steps)


@pytest.mark.parametrize("lost", ["disk", "chunk", "manifest", "pack"])
def test_lost_and_damaged_checkpoints_are_restored_from_the_mirror(
    run_path: Path, remote: Remote, lost: str
) -> None:
    mirrored(run_path, remote, 1, 2)
    newest = sorted((run_path / "packs").iterdir())[-1]
    if lost == "disk":
        for path in sorted(run_path.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    elif lost == "chunk":
        flip(newest)
    elif lost == "manifest":
        flip(run_path / "checkpoints" / "000000000002.json")
    else:
        newest.unlink()
    with CheckpointManager(run_path, mirror=remote, max_to_keep=None) as manager:
        with warned() as texts:
            restored, step = manager.restore_or_initialize(lambda: state(0))
        assert sum("step 2 is restored from the mirror memory:mirror: " in t for t in texts) == 1
        damaged = [text for text in texts if "was skipped; its copy in the mirror" in text]
        assert len(damaged) == (lost != "disk")
        assert step == 2
        assert same(restored, 2)
        save(manager, 3)
        assert same(manager.restore(3).state, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if lost == "disk" else "error")
            assert same(manager.restore(1).state, 1)
    assert check_run(remote).good == (1, 2, 3)
    assert Run(run_path).steps()[-1] == 3


def zero(remote: Remote, name: str) -> None:
    remote.objects[name] = bytes(len(remote.objects[name]))


def damage_the_newest_of_the_mirror(run_path: Path, remote: Remote) -> None:
    """Step 2 is in the mirror only, and its pack there holds zeros."""
    mirrored(run_path, remote, 1, 2)
    with CheckpointManager(run_path) as manager:
        manager.delete(2)
    zero(remote, max(name for name in remote.objects if name.startswith("packs/")))


def test_damage_in_the_mirror_is_set_aside_and_copied_again(run_path: Path, remote: Remote) -> None:
    damage_the_newest_of_the_mirror(run_path, remote)
    with CheckpointManager(run_path, mirror=remote) as manager:
        with pytest.warns(UserWarning, match="step 2 of the mirror memory:mirror is damaged"):
            assert manager.restore().step == 1
        save(manager, 2, 3)
    assert prints(remote) == prints(run_path)
    assert [Run(remote).load(step).manifest.step for step in (1, 2, 3)] == [1, 2, 3]
    assert len(Run(remote).quarantined()) == 1


def test_damage_in_both_is_an_older_step_or_an_error(run_path: Path, remote: Remote) -> None:
    mirrored(run_path, remote, 1, 2)

    def damage(step: int) -> None:
        (name,) = (name for name in remote.objects if name.startswith(f"packs/{step:012d}"))
        zero(remote, name)
        (pack,) = (run_path / "packs").glob(f"{step:012d}-*")
        flip(pack)

    damage(2)
    with CheckpointManager(run_path, mirror=remote) as manager, warned() as texts:
        assert manager.restore().step == 1
    assert len(texts) == 2
    assert "step 2 of the mirror memory:mirror is damaged" in texts[0]
    assert "step 2 is damaged and was skipped; step 1" in texts[1]
    damage(1)
    with (
        CheckpointManager(run_path, mirror=remote) as manager,
        pytest.raises(NoGoodCheckpointError, match="expected a readable checkpoint"),
    ):
        manager.restore_or_initialize(lambda: state(0))


def test_a_step_that_only_the_mirror_holds_damaged_is_an_error_of_its_own(
    run_path: Path, remote: Remote
) -> None:
    damage_the_newest_of_the_mirror(run_path, remote)
    with CheckpointManager(run_path, mirror=remote) as manager:
        with pytest.raises(CorruptionError, match="memory:mirror: step 2"):
            manager.restore(2)
        with pytest.raises(StepNotFoundError):
            manager.restore(3)


@pytest.mark.parametrize("mirror", ["damaged", "silent", "gone"])
def test_no_older_step_replaces_one_that_cannot_be_read_here_if_the_mirror_lacks_it(
    run_path: Path, remote: Remote, mirror: str
) -> None:
    class Unreadable(LocalStorage):
        fired = 0

        def read_into(self, name: str, offset: int, target: memoryview) -> int:
            if name.startswith(f"packs/{2:012d}"):
                self.fired += 1
                raise PermissionError(errno.EACCES, "not yours", name)
            return super().read_into(name, offset, target)

    mirrored(run_path, remote, 1, 2)
    storage = Unreadable(run_path)
    with CheckpointManager(storage, mirror=remote) as manager:
        with pytest.warns(UserWarning, match="step 2 is restored from the mirror"):
            assert manager.restore().step == 2, "the control: the mirror has it"
        (name,) = (name for name in remote.objects if name.startswith(f"packs/{2:012d}"))
        if mirror == "damaged":
            zero(remote, name)
        elif mirror == "gone":
            del remote.objects[name]
        else:
            remote.down()
        with pytest.raises(UnreachableError, match="not yours"):
            manager.restore()
        assert storage.fired == 2
        remote.error = None


def test_a_mirror_that_does_not_answer_is_an_error_only_if_the_run_is_empty(
    tmp_path: Path, remote: Remote
) -> None:
    mirrored(tmp_path / "run", remote, 1)
    remote.down()
    with warned() as texts, CheckpointManager(tmp_path / "run", mirror=remote) as manager:
        assert manager.restore().step == 1
    assert sum("does not answer, so only" in text for text in texts) == 1
    with warned(), CheckpointManager(tmp_path / "run", mirror=remote) as manager:
        with pytest.raises(UnreachableError, match="of step 2, found none, and the mirror"):
            manager.restore(2)
        assert manager.latest_step() == 1
    with pytest.raises(UnreachableError, match="found none, and the mirror"):
        CheckpointManager(tmp_path / "new", mirror=remote)
    assert not (tmp_path / "new").exists()
    remote.error = None
    with CheckpointManager(tmp_path / "new", mirror=MemoryStorage()) as manager:
        assert manager.restore_or_initialize(lambda: state(0)).step == 0, "both are empty"
        with pytest.raises(StepNotFoundError):
            manager.restore()


def test_a_mirror_with_a_newer_history_is_a_warning_if_nothing_was_restored(
    tmp_path: Path, remote: Remote
) -> None:
    mirrored(tmp_path / "a", remote, 1, 3)
    copy_run(tmp_path / "a", tmp_path / "b", [1])
    before = prints(remote)
    manager = CheckpointManager(tmp_path / "b", mirror=remote)
    with pytest.warns(UserWarning, match="holds step 3, .* is step 2.*different histories"):
        save(manager, 2, noise=1)
    assert prints(remote) == before
    with pytest.warns(UserWarning, match="step 3 is not the same"):
        save(manager, 3, noise=1)
    manager.save(4, state(4, noise=1))
    manager.close()
    assert prints(remote) == {**before, 4: prints(tmp_path / "b")[4]}
    assert check_run(remote).good == (1, 3, 4)


def test_in_a_group_the_chief_mirrors_and_all_restore_the_same(
    run_path: Path, tmp_path: Path
) -> None:
    mirror = tmp_path / "mirror"

    def train(processes: Pretend) -> Any:
        with CheckpointManager(run_path, mirror=mirror, processes=processes) as manager:
            for step in (1, 2):
                manager.save(step, state(step))
            manager.wait_until_finished(mirror=True)
            return manager._mirror is not None and manager._mirror._target is not None

    assert play(3, train) == [True, False, False]
    assert prints(mirror) == prints(run_path)
    flip(sorted((run_path / "packs").iterdir())[-1])
    flip(run_path / "checkpoints" / "000000000002.json")

    def resume(processes: Pretend) -> Any:
        with CheckpointManager(run_path, mirror=mirror, processes=processes) as manager:
            restored, step = manager.restore_or_initialize(lambda: state(0))
            return step, same(restored, 2)

    with warned() as texts:
        assert play(3, resume) == [(2, True)] * 3
    assert sum("step 2 is restored from the mirror" in text for text in texts) == 1


class Numbers:
    """The batch of a step is its number."""

    def batch(self, step: int) -> Any:
        return np.full(3, float(step))


def test_a_trainer_continues_from_the_mirror(tmp_path: Path, remote: Remote) -> None:
    def train(steps: int, directory: str) -> Trainer:
        def step(state: Any, batch: Any) -> Any:
            return {"w": state["w"] + batch}, {}

        config = RunConfig(
            tmp_path / directory,
            save_checkpoints_steps=2,
            checkpoint=CheckpointConfig(mirror=remote),
        )
        trainer = Trainer(step, {"w": np.zeros(3)}, Numbers(), config)
        trainer.train(steps)
        return trainer

    train(4, "a")
    assert Run(remote).steps()[-1] == 4
    with pytest.warns(UserWarning, match="step 4 is restored from the mirror"):
        trainer = train(6, "b")
    assert trainer.state["w"].tolist() == [15.0] * 3
    assert Run(tmp_path / "b").steps() == [6]
    assert check_run(remote).good == (0, 2, 4, 6)


# ---------------------------------------------------------------- kills


def test_kills_during_saves_and_copies_lose_nothing() -> None:
    stories = [Story(seed).play() for seed in range(15)]
    assert [lost for story in stories for lost in story.lost] == []
    assert sum(story.kills for story in stories) > 20
    assert sum(story.moved for story in stories) > 50


def test_control_kills_find_a_manifest_that_is_written_before_its_pack() -> None:
    """Negative control of the test above."""
    assert any(Story(seed, manifest_first).play().lost for seed in range(15))


UPLOADING = """
import sys
import numpy as np
from perdure import CheckpointManager
from perdure.store import CloudOptions, CloudStorage
here, url, endpoint, size = sys.argv[1:]
options = CloudOptions(
    config={"endpoint": endpoint, "region": "us-east-1",
            "access_key_id": "test", "secret_access_key": "test"},
    single_put_bytes=8 << 20, part_bytes=5 << 20,
)
manager = CheckpointManager(here, mirror=CloudStorage(url, options))
manager.save(1, {"w": np.zeros(10)})
manager.wait_until_finished(mirror=True)
manager.save(2, {"w": np.random.default_rng(2).integers(0, 255, int(size), dtype=np.uint8)})
manager.wait_until_finished()
print("committed", flush=True)
manager.close()
"""


@pytest.mark.parametrize(
    ("where", "size"), [("partNumber=2", 9 * MIB), ("/checkpoints/000000000002", 1000)]
)
def test_a_kill_during_an_upload_is_finished_by_the_next_run(
    s3: ObjectServer, run_path: Path, where: str, size: int
) -> None:
    url = s3.new_url()
    child: list[subprocess.Popen[str]] = []
    committed = threading.Event()

    def kill(request: Request) -> str | None:
        if where in request.path and request.method == "PUT":
            assert committed.wait(WAIT_S)
            child[0].kill()
            return "refuse"
        return None

    with proxy_to(s3.endpoint, kill) as proxy:
        command = [sys.executable, "-c", UPLOADING, str(run_path), url, proxy.endpoint, str(size)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            child.append(process)
            assert process.stdout is not None
            assert process.stdout.readline() == "committed\n"
            committed.set()
            process.communicate(timeout=WAIT_S)
        assert proxy.fired
        assert process.returncode == -9
    assert check_run(run_path).good == (1, 2)
    assert check_run(s3.storage(url)).good == (1,)
    mirror = Mirror(Run(LocalStorage(run_path)), s3.storage(url), None, Retention())
    mirror.catch_up()
    mirror.close(0.0)
    assert check_run(s3.storage(url)).good == (1, 2)
    assert prints(s3.storage(url)) == prints(run_path)
