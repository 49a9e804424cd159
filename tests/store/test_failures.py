"""Only wrong bytes and missing files are damage; a read that fails is not."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers import Failing, contents, make_leaves, run_on, sharing_states

from damage import files, flip
from perdure import CheckpointManager, load_checkpoint
from perdure.checkpoint.restorer import load_good
from perdure.cli import main
from perdure.errors import CorruptionError, PruneError, SaveError, StoreError, UnreachableError
from perdure.store import LocalStorage, PruneRequest, Run, repair, verify_run
from perdure.store.direct import read_at
from perdure.store.format import MAX_STEP, manifest_name
from perdure.store.run_log import LOG_FILE

CODES = [
    errno.EACCES,
    errno.EAGAIN,
    errno.EINTR,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EPERM,
    errno.ESTALE,
    errno.ETIMEDOUT,
]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Records the pauses between attempts without waiting."""
    taken: list[float] = []
    monkeypatch.setattr("perdure.store.failures._sleep", taken.append)
    return taken


def filled(path: Path) -> Path:
    with run_on(path) as run:
        for step, leaves in sharing_states().items():
            run.save(step, leaves)
    return path


def pack_of(path: Path, step: int) -> Path:
    return next((path / "packs").glob(f"{step:012d}-*"))


@pytest.mark.parametrize("part", [manifest_name(4), "packs/000000000004"])
@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_read_that_fails_moves_nothing_and_restores_nothing_older(
    tmp_path: Path, code: int, part: str, pauses: list[float]
) -> None:
    before = files(filled(tmp_path))
    newest = load_checkpoint(tmp_path, 4)
    storage = Failing(tmp_path, part, code)
    with CheckpointManager(storage) as manager:
        for attempt in (manager.restore, lambda: manager.restore_or_initialize({})):
            with pytest.raises(UnreachableError) as caught:
                attempt()
            assert "step 4" in str(caught.value)
            assert part in str(caught.value)
            assert "restore its step by number" in str(caught.value)
        assert manager.restore(3).step == 3, "what was asked for by number"
        assert storage.fired >= 2
        with pytest.raises(SaveError, match="step 4"):
            manager.save(4, newest)
        after = files(tmp_path)
        after[LOG_FILE] = after[LOG_FILE][: len(before[LOG_FILE])]  # it records what it keeps
        assert after == before
        storage.part = ""
        assert manager.restore().step == 4


@pytest.mark.parametrize("part", [manifest_name(4), "packs/000000000004"])
def test_control_a_flipped_bit_in_the_same_file_is_damage(tmp_path: Path, part: str) -> None:
    filled(tmp_path)
    flip(next(tmp_path.glob(f"{part}*")), 40)
    with CheckpointManager(tmp_path) as manager:
        with pytest.warns(UserWarning, match="step 4 is damaged and was skipped; step 3"):
            assert manager.restore().step == 3
        manager.claim()
        assert manager.all_steps() == [1, 2, 3]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    "code",
    [errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.ETIMEDOUT],
    ids=errno.errorcode.get,
)
def test_a_temporary_error_is_retried(
    tmp_path: Path,
    code: int,
    times: int,
    monkeypatch: pytest.MonkeyPatch,
    pauses: list[float],
) -> None:
    filled(tmp_path)
    run = Run(tmp_path)
    left = [times]
    real = read_at

    def failing(path: str, offset: int, target: memoryview) -> int:
        if left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code), path)
        return real(path, offset, target)

    monkeypatch.setattr("perdure.store.local.read_at", failing)
    loaded = load_good(run).loaded
    assert loaded is not None
    assert (loaded.manifest.step, loaded.skipped, left) == (4, (), [0])
    assert len(pauses) == times
    left[0] = 100
    with pytest.raises(UnreachableError, match=os.strerror(code)):
        load_good(run)
    assert left[0] == 100 - 4, "four attempts, and no more"


@contextmanager
def no_more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        while True:
            try:
                taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_out_of_file_descriptors_loses_no_checkpoint(
    tmp_path: Path, pauses: list[float]
) -> None:
    """No fault is injected; the kernel itself refuses."""
    before = files(filled(tmp_path))
    run = Run(tmp_path)
    steps = run.steps()
    with no_more_files():
        errors: list[BaseException] = []
        for attempt in (
            lambda: load_good(run),
            lambda: run.load(4),
            lambda: run.manifest(4),
            run.steps,
        ):
            try:
                attempt()
            except UnreachableError as error:
                errors.append(error)
    assert len(errors) == 4
    assert all("ulimit" in str(error) for error in errors)
    assert files(tmp_path) == before
    assert run.steps() == steps
    assert verify_run(run).ok


def test_a_check_distinguishes_unreadable_from_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)
    flip(pack_of(tmp_path, 2), 5)
    part = pack_of(tmp_path, 3).name
    storage = Failing(tmp_path, part, errno.EACCES)
    report = verify_run(Run(storage))
    assert (report.good, report.bad, report.unread) == ((1,), (2,), (3, 4))
    assert not report.ok
    assert {problem.name for problem in report.problems if problem.unread} == {
        f"packs/{part}",
        "step 3",
        "step 4",
    }
    monkeypatch.setattr("perdure.store.run.open_storage", lambda _: storage)
    result = CliRunner().invoke(main, ["verify", str(tmp_path)])
    assert result.exit_code == 1
    assert f"UNREAD  packs/{part}" in result.output
    assert "1 checkpoint good, 1 damaged, 2 could not be read" in result.output
    done = CliRunner().invoke(main, ["verify", str(tmp_path), "--repair", "--json"])
    assert done.exit_code == 1, "what could not be read is still a problem"
    assert json.loads(done.output)["unread"] == [3, 4]
    assert Run(tmp_path).steps() == [1, 3, 4]
    storage.part = ""
    assert verify_run(Run(tmp_path)).good == (1, 3, 4)
    storage.part = manifest_name(3)
    listed = CliRunner().invoke(main, ["ls", str(tmp_path), "--json"])
    assert listed.exit_code == 1
    assert [row["step"] for row in json.loads(listed.output)["unread"]] == [3]
    assert verify_run(Run(storage)).unread == (3,)


def test_a_repair_changes_nothing_that_it_cannot_read(tmp_path: Path) -> None:
    before = files(filled(tmp_path))
    storage = Failing(tmp_path, "packs/", errno.EIO)
    with Run(storage) as run:
        done = repair(run)
    assert (done.actions, done.report.unread) == ((), (1, 2, 3, 4))
    assert files(tmp_path) == before


@pytest.mark.parametrize("where", ["checkpoints", "quarantine"])
def test_no_pack_is_deleted_while_a_manifest_cannot_be_read(tmp_path: Path, where: str) -> None:
    filled(tmp_path)
    with run_on(tmp_path) as run:
        if where == "quarantine":
            run.quarantine(4, "a reason")
    before = {path.name for path in (tmp_path / "packs").iterdir()}
    storage = Failing(tmp_path, f"{where}/000000000004", errno.EACCES)
    everything = PruneRequest(frozenset({2, 3}), MAX_STEP, 0, everywhere=True)
    with Run(storage) as run:
        plan = run.plan(everything)
        assert plan.held_back is not None
        assert "cannot be read now" in plan.held_back
        run.execute(plan)
    assert storage.fired
    assert {path.name for path in (tmp_path / "packs").iterdir()} == before
    if where == "checkpoints":
        assert verify_run(Run(tmp_path)).good == (1, 4)


def test_a_compaction_leaves_a_pack_that_cannot_be_read(tmp_path: Path) -> None:
    filled(tmp_path)
    storage = Failing(tmp_path, pack_of(tmp_path, 1).name, errno.EIO)
    with Run(storage) as run:
        request = PruneRequest(frozenset({1}), MAX_STEP, 0, everywhere=True)
        done = run.execute(run.plan(request))
    assert storage.fired
    (reason,) = done.left.values()
    assert "cannot be read" in reason
    assert "--repair" not in reason
    assert verify_run(Run(tmp_path)).good == (2, 3, 4)


def test_a_lack_of_memory_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path)

    def none(nbytes: int) -> Any:
        raise MemoryError

    monkeypatch.setattr("perdure.store.reader.leaf_memory", none)
    with pytest.raises(UnreachableError, match=r"step 4, leaf .*out of memory.*Free memory"):
        load_good(Run(tmp_path))


def test_a_missing_pack_is_damage(tmp_path: Path) -> None:
    filled(tmp_path)
    pack_of(tmp_path, 4).unlink()
    loaded = load_good(Run(tmp_path)).loaded
    assert loaded is not None
    assert [step for step, _ in loaded.skipped] == [4]
    with pytest.raises(CorruptionError, match="found no such file"):
        Run(tmp_path).load(4)


# ---------------------------------------------------------------- readers and the lock


def test_an_evaluator_that_meets_damage_lets_the_trainer_write(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as trainer:
        for step in (1, 2, 3):
            trainer.save(step, {"w": [float(step)]})
        trainer.wait_until_finished()
    for step in (2, 3):
        flip(tmp_path / manifest_name(step), 300)
    before = files(tmp_path)
    evaluator = CheckpointManager(tmp_path)
    with pytest.warns(UserWarning, match=r"skipped; .*the first save moves it to quarantine"):
        assert evaluator.restore().step == 1
    assert files(tmp_path) == before
    with CheckpointManager(tmp_path) as trainer:
        with pytest.warns(UserWarning, match="is damaged and was skipped"):
            restored = trainer.restore()
        trainer.save(2, {"w": [2.5]})
        trainer.wait_until_finished()
        assert restored.step == 1
        assert trainer.all_steps() == [1, 2], "both were set aside before the save"
        assert evaluator.restore().step == 2, "while the trainer holds the lock"
    evaluator.close()
    assert verify_run(Run(tmp_path)).good == (1, 2)


def test_a_step_that_another_process_repaired_is_not_set_aside(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as trainer:
        for step in (1, 2):
            trainer.save(step, {"w": [float(step)]})
    good = (tmp_path / manifest_name(2)).read_bytes()
    flip(tmp_path / manifest_name(2), 300)
    with CheckpointManager(tmp_path) as manager:
        with pytest.warns(UserWarning, match="step 2 is damaged"):
            manager.restore()
        (tmp_path / manifest_name(2)).write_bytes(good)
        manager.save(3, {"w": [3.0]})
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3]


# ---------------------------------------------------------------- the marker


@pytest.mark.parametrize("marker", [None, b"", b"\0" * 60, b'{"format":"', b"[" * 100_000])
def test_a_repair_writes_a_damaged_marker_again(tmp_path: Path, marker: bytes | None) -> None:
    filled(tmp_path)
    if marker is None:
        (tmp_path / "perdure.json").unlink()
    else:
        (tmp_path / "perdure.json").write_bytes(marker)
    before = files(tmp_path)
    for command in ("verify", "ls"):
        result = CliRunner().invoke(main, [command, str(tmp_path)])
        assert result.exit_code != 0
        assert "perdure.json" in str(result.output) + str(result.exception)
        assert f"`perdure verify {tmp_path} --repair`" in str(result.output) + str(result.exception)
    assert files(tmp_path) == before
    done = CliRunner().invoke(main, ["verify", str(tmp_path), "--repair"])
    assert done.exit_code == 0, done.output
    assert "repair  wrote perdure.json again" in done.output
    loaded = load_good(Run(tmp_path)).loaded
    assert loaded is not None
    assert contents(loaded.leaves) == contents(sharing_states()[4])


@pytest.mark.parametrize("damaged", [True, False])
def test_a_repair_turns_no_other_directory_into_a_run(tmp_path: Path, damaged: bool) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / manifest_name(1)).write_bytes(b"{}")
    if damaged:
        (tmp_path / "perdure.json").write_bytes(b"no marker")
    before = files(tmp_path)
    done = CliRunner().invoke(main, ["verify", str(tmp_path), "--repair"])
    assert done.exit_code != 0
    assert files(tmp_path) == before


# ---------------------------------------------------------------- where a run is


def moved(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def replaced(path: Path) -> None:
    moved(path)
    path.mkdir()


def replaced_by_a_run(path: Path) -> None:
    moved(path)
    with run_on(path) as run:
        run.save(1, make_leaves(9))


@pytest.mark.parametrize("happens", [moved, replaced, replaced_by_a_run])
def test_a_missing_run_directory_is_an_error_and_not_an_empty_run(
    tmp_path: Path, happens: Callable[[Path], None]
) -> None:
    path = tmp_path / "run"

    def save(step: int) -> None:
        manager.save(step, {"w": [float(step)]})
        manager.wait_until_finished()

    with CheckpointManager(path) as manager:
        save(1)
        happens(path)
        before = sorted(path.rglob("*")) if path.exists() else None
        with pytest.raises(SaveError, match=f"moved, deleted, unmounted or replaced.*{path}"):
            save(2)
        for attempt in (
            manager.restore,
            lambda: manager.restore_or_initialize({"w": [0.0]}),
            lambda: manager.restore(1),  # the other run at this path has a step 1 as well
            lambda: manager.fingerprint(1),
            lambda: manager.metrics(1),
            manager.all_steps,
            manager.pinned_steps,
        ):
            with pytest.raises(UnreachableError, match="moved, deleted, unmounted or replaced"):
                attempt()
        with pytest.raises(PruneError, match="moved, deleted, unmounted or replaced"):
            manager.delete(1)
        assert (sorted(path.rglob("*")) if path.exists() else None) == before
    assert verify_run(Run(tmp_path / "elsewhere")).good == (1,)


def test_a_relative_directory_survives_a_chdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    for where in ("runs/a", Path("runs/b"), LocalStorage("runs/c")):
        with CheckpointManager(where) as manager:
            manager.save(1, {"w": [1.0]})
            manager.wait_until_finished()
            monkeypatch.chdir(tmp_path / "other")
            manager.save(2, {"w": [2.0]})
            manager.wait_until_finished()
            assert manager.all_steps() == [1, 2]
            assert Path(manager.directory).parent == tmp_path / "runs"
            monkeypatch.chdir(tmp_path)
    assert list((tmp_path / "other").iterdir()) == []


def test_an_invalid_path_is_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreError, match="NUL"):
        CheckpointManager("a\0b")
    with pytest.raises(StoreError, match="cannot be read"):
        CheckpointManager(tmp_path / ("x" * 5000))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StoreError, match="working directory of this process was removed"):
        CheckpointManager("run")


def test_the_home_directory_may_be_written_as_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    for where in ("~/run", Path("~") / "run"):
        with CheckpointManager(where) as manager:
            assert manager.directory == str(tmp_path / "run")
    with pytest.raises(StoreError, match="there is no user 'nobody-of-that-name'"):
        CheckpointManager("~nobody-of-that-name/run")
    (tmp_path / "here" / "~").mkdir()
    with pytest.raises(StoreError, match="the path has two meanings"):
        CheckpointManager("~/run")


@pytest.mark.parametrize("where", ["", b"", None, 7, ["run"]])
def test_an_argument_that_names_no_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="expected the path or URL of a run directory"):
        CheckpointManager(where)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda data: data.replace(b"created", b"Created"),
            r"expected hash {0}, found \w{{16}}\.",
        ),
        (lambda data: data[:11] + b"0" * 16 + data[27:], r"expected hash 0{{16}}, found {0}\."),
        (lambda data: data[:70] + b"00" + data[72:], r"expected hash {0}\w*00\w*, found {0}\w+\."),
        (lambda data: data[: len(data) // 2], r"expected hash {0}, found \w{{16}}\."),
        (lambda _: b"\xff" * 80, "which begins with its hash, found 80 other bytes"),
        (lambda _: b"", "found an empty file"),
    ],
    ids=["body", "hash", "end of the hash", "torn", "other bytes", "empty"],
)
def test_the_damage_of_a_manifest_is_said_in_words(
    damage: Callable[[bytes], bytes], words: str, tmp_path: Path
) -> None:
    path = filled(tmp_path) / manifest_name(4)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    digest = json.loads(whole)["digest"][:16]
    with pytest.raises(CorruptionError, match=words.format(digest)) as caught:
        Run(tmp_path).manifest(4)
    assert str(path) in str(caught.value)
    assert "b'" not in str(caught.value)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{(folder := os.open(path.parent, os.O_RDONLY))}/{path.name}")
        os.close(folder)


def make_dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [Path.mkdir, make_pipe, make_dangling])
def test_a_repair_sets_aside_what_has_the_place_of_the_log(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    with run_on(tmp_path) as run:
        run.save(1, make_leaves(1))
    (tmp_path / LOG_FILE).unlink()
    make(tmp_path / LOG_FILE)
    assert not verify_run(Run(tmp_path)).ok
    with run_on(tmp_path) as run:
        repair(run)
        assert verify_run(run).ok
        run.save(2, make_leaves(2))
    assert os.path.lexists(tmp_path / "quarantine" / "log-0.jsonl")


def test_beside_a_directory_in_place_of_a_manifest_others_are_deleted(tmp_path: Path) -> None:
    with run_on(tmp_path) as run:
        for step in (1, 2, 3):
            run.save(step, make_leaves(step))
        (tmp_path / manifest_name(2)).unlink()
        (tmp_path / manifest_name(2)).mkdir()
        packs = sorted((tmp_path / "packs").iterdir())
        assert run.delete([1]) == [1]
        assert sorted((tmp_path / "packs").iterdir()) == packs


@pytest.mark.timeout(60)
@pytest.mark.parametrize("make", [make_pipe, make_socket])
@pytest.mark.parametrize("name", ["checkpoints/000000000002.json", "packs/000000000002-*", "lock"])
def test_a_pipe_in_place_of_a_file_hangs_nothing(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    with run_on(tmp_path) as run:
        for step in (1, 2):
            run.save(step, make_leaves(step))
    (path,) = tmp_path.glob(name)
    path.unlink()
    make(path)
    run = Run(tmp_path)
    if name == "lock":
        with pytest.raises(SaveError, match=r"found a (named pipe|socket)") as refused:
            run.save(3, make_leaves(3))
        assert str(path) in str(refused.value)
        path.unlink()
        run.save(3, make_leaves(3))
        run.close()
        return
    with pytest.raises(CorruptionError, match=r"expected a (file|pack)"):
        run.load(2)
    loaded = load_good(run).loaded
    assert loaded is not None
    assert loaded.manifest.step == 1
    assert verify_run(run).bad == (2,)


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_temporary_file_is_an_error(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    os.mkfifo(tmp_path / "name.tmp")
    with pytest.raises(OSError, match="pipe"):
        storage.replace("name", b"data")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EIO])
def test_a_file_system_that_cannot_sync_directories(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    """It is said once, and files are synced as ever; an error of the disk is none of it (EIO)."""
    real, synced = os.fsync, []

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        synced.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    run = run_on(tmp_path / "run")
    if code == errno.EIO:
        with pytest.raises(SaveError, match="fsync of the directory") as failed:
            run.save(1, make_leaves(1))
        assert str(tmp_path) in str(failed.value)
        return
    for step in (1, 2):
        run.save(step, make_leaves(step))
    run.close()
    assert len(synced) >= 4
    assert verify_run(Run(tmp_path / "run")).good == (1, 2)
    assert [record.message.count("cannot sync directories") for record in caplog.records] == [1]


@pytest.mark.parametrize("operation", ["fsync", "write", "pwrite", "ftruncate"])
def test_an_error_without_a_path_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    run = run_on(tmp_path / "run")
    run.begin_writing()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, operation, fail)
        with pytest.raises(SaveError, match=operation.lstrip("pf")) as failed:
            run.save(1, make_leaves(1, (3 * 1024 * 1024 + 5, 40)))
    assert f"'{tmp_path}/run" in str(failed.value)
    run.close()
