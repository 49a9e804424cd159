"""Copies and forks: the same bits in another run directory that does not depend on the first."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from helpers import Operations, contents, make_leaves, repeated, run_on, sharing_states

from damage import flip
from object_stores import ObjectServer
from perdure import load_checkpoint
from perdure.cli import main
from perdure.errors import (
    CorruptionError,
    LockedError,
    NotARunError,
    SaveError,
    StepExistsError,
    StepNotFoundError,
    StoreError,
    UnreachableError,
)
from perdure.store import (
    LocalStorage,
    MemoryStorage,
    PruneRequest,
    Run,
    copy_run,
    fork_run,
)
from perdure.store.copy import copy_checkpoint
from perdure.store.format import MAX_STEP
from perdure.testing import check_run

LARGE = 9 * 1024 * 1024


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    with run_on(tmp_path / "here") as run:
        for step, leaves in sharing_states().items():
            run.save(step, leaves, {"seed": 1}, {"loss": 1 / step})
    return tmp_path / "here"


def outcomes(copied: list[Any]) -> dict[int, str]:
    return {one.step: one.outcome for one in copied}


def packs(place: Any) -> set[str]:
    return set(LocalStorage(place).list("packs/"))


def squeeze(place: Any, *steps: int) -> None:
    """Delete steps and compact what can be compacted."""
    with Run(place) as run:
        run.execute(run.plan(PruneRequest(frozenset(steps), MAX_STEP, 0, everywhere=True)))


# ---------------------------------------------------------------- copies


def test_a_copy_has_the_same_checkpoints_in_its_own_packs(origin: Path, tmp_path: Path) -> None:
    copied = copy_run(origin, tmp_path / "there")
    assert outcomes(copied) == dict.fromkeys((1, 2, 3, 4), "copied")
    assert check_run(tmp_path / "there").problems == ()
    assert not packs(origin) & packs(tmp_path / "there")
    for step, leaves in sharing_states().items():
        one, other = Run(origin).manifest(step), Run(tmp_path / "there").manifest(step)
        assert contents(Run(tmp_path / "there").load(step).leaves) == contents(leaves)
        for name in ("fingerprint", "step", "created", "recipe", "metrics"):
            assert getattr(one, name) == getattr(other, name)
    stored = sum(one.nbytes for one in copied)
    assert (
        stored == sum(len(leaf.data) for leaf in sharing_states()[1].values()) + 3000 + 3000 + 100
    )


def test_a_copy_reads_past_compactions_and_writes_no_chunk_twice(origin: Path) -> None:
    squeeze(origin, 1, 2)
    target = MemoryStorage()
    copy_run(origin, target, [3])
    (four,) = copy_run(origin, target, [4])
    assert four.nbytes == 100
    assert check_run(target).good == (3, 4)


def test_large_chunks_begin_on_a_block_and_small_ones_are_read_together(tmp_path: Path) -> None:
    leaves = make_leaves(1, (LARGE, *range(1000, 1200)))
    with run_on(tmp_path / "here") as run:
        run.save(1, leaves)
        run.save(2, {**leaves, "more": make_leaves(2, (LARGE,))["model/layer0"]})

    class Counted(LocalStorage):
        reads = 0

        def read_into(self, name: str, offset: int, target: memoryview) -> int:
            self.reads += 1
            return super().read_into(name, offset, target)

    source = Counted(tmp_path / "here")
    copy_run(source, tmp_path / "there")
    assert source.reads < 12
    assert contents(Run(tmp_path / "there").load(1).leaves) == contents(leaves)
    manifest = Run(tmp_path / "there").manifest(1)
    large = [chunk for leaf in manifest.leaves for chunk in leaf.chunks if chunk.length >= 2**22]
    assert large
    assert not any(chunk.offset % 4096 for chunk in large)


def test_encoded_chunks_stay_encoded(tmp_path: Path) -> None:
    with run_on(tmp_path / "here", codec="shuffle-zstd") as run:
        run.save(1, repeated(make_leaves(1, (5000, 40))))
    copy_run(tmp_path / "here", tmp_path / "there")
    one, other = (Run(tmp_path / name).manifest(1) for name in ("here", "there"))
    assert (one.format, one.stored_nbytes) == (other.format, other.stored_nbytes)
    assert one.stored_nbytes < one.nbytes
    with run_on(tmp_path / "plain") as run:  # the target holds the same chunks in plain form
        run.adopt_run_id(Run(tmp_path / "here"))
        run.save(0, repeated(make_leaves(1, (5000, 40))))
    (copied,) = copy_run(tmp_path / "here", tmp_path / "plain")
    assert copied.nbytes == 0
    assert check_run(tmp_path / "plain").good == (0, 1)


def test_a_repeated_copy_changes_nothing_and_adds_later_metrics(origin: Path) -> None:
    target = MemoryStorage()
    copy_run(origin, target)
    before = dict(target.objects)
    assert set(outcomes(copy_run(origin, target)).values()) == {"present"}
    assert target.objects == before
    with Run(origin) as run:
        run.save(2, sharing_states()[2], metrics={"accuracy": 0.5})
    copy_run(origin, target)
    assert Run(target).manifest(2).metrics == {"loss": 0.5, "accuracy": 0.5}


def test_a_repeated_copy_writes_missing_chunks_again(origin: Path, tmp_path: Path) -> None:
    copy_run(origin, tmp_path / "there")
    newest = Run(tmp_path / "there").manifest(4).packs
    for pack in newest:
        (tmp_path / "there" / "packs" / pack.name).unlink()
    assert outcomes(copy_run(origin, tmp_path / "there", [4])) == {4: "copied"}
    assert contents(Run(tmp_path / "there").load(4).leaves) == contents(sharing_states()[4])


def test_a_dry_run_reports_the_same_and_changes_nothing(origin: Path, tmp_path: Path) -> None:
    planned = copy_run(origin, tmp_path / "there", dry_run=True)
    assert not (tmp_path / "there").exists()
    assert copy_run(origin, tmp_path / "there") == planned
    assert copy_run(origin, tmp_path / "there", dry_run=True) == copy_run(
        origin, tmp_path / "there"
    )


def test_steps_that_break_the_history_of_the_target_are_not_copied(
    origin: Path, tmp_path: Path
) -> None:
    with run_on(tmp_path / "there") as run:
        run.adopt_run_id(Run(origin))
        run.save(2, make_leaves(2))
    before = Run(tmp_path / "there").manifest(2)
    for dry_run in (True, False):
        copied = copy_run(origin, tmp_path / "there", [1, 2, 3], dry_run=dry_run)
        assert outcomes(copied) == {1: "refused", 2: "refused", 3: "refused"}
        assert "older than its newest step 2" in copied[0].reason
        assert before.fingerprint[:16] in copied[1].reason
        assert Run(origin).manifest(2).fingerprint[:16] in copied[1].reason
        only = copy_run(origin, tmp_path / "there", [4], dry_run=dry_run)
        assert outcomes(only) == {4: "refused"}
        assert "step 2" in only[0].reason, "the step that shows the other history"
    assert Run(tmp_path / "there").manifest(2) == before
    with run_on(tmp_path / "there") as run, pytest.raises(StepExistsError):
        copy_checkpoint(Run(origin), 1, run)
    assert check_run(tmp_path / "there").good == (2,)


def test_a_damaged_checkpoint_is_reported_and_the_others_are_copied(origin: Path) -> None:
    pack = Run(origin).manifest(2).packs[-1].name
    flip(origin / "packs" / pack)
    target = MemoryStorage()
    copied = copy_run(origin, target)
    assert outcomes(copied) == {1: "copied", 2: "damaged", 3: "copied", 4: "copied"}
    assert f"{pack} at offset 0: expected hash" in copied[1].reason
    assert check_run(target).good == (1, 3, 4)


class Moving(LocalStorage):
    """A run directory that another process prunes and compacts during a read of it."""

    def __init__(self, path: Path, *steps: int) -> None:
        super().__init__(path)
        self.steps = steps
        self.moved = 0

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if not self.moved and name.startswith("packs/"):
            self.moved += 1
            squeeze(Path(self.where), *self.steps)
        return super().read_into(name, offset, target)


def test_a_copy_follows_a_concurrent_compaction_and_skips_pruned_steps(origin: Path) -> None:
    target = MemoryStorage()
    moving = Moving(origin, 1)
    assert outcomes(copy_run(moving, target, [4])) == {4: "copied"}
    assert moving.moved
    assert contents(Run(target).load(4).leaves) == contents(sharing_states()[4])
    pruned = Moving(origin, 2)
    assert outcomes(copy_run(pruned, repaired := MemoryStorage(), [2, 3])) == {
        2: "gone",
        3: "copied",
    }
    assert pruned.moved
    assert check_run(target).good == (4,)
    assert check_run(repaired).good == (3,)


@pytest.mark.parametrize("named", [False, True])
def test_a_step_that_is_pruned_during_a_copy_of_the_run_is_skipped_and_named(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, named: bool
) -> None:
    read_into, reads = LocalStorage.read_into, list[str]()

    def prunes(self: LocalStorage, name: str, offset: int, target: memoryview) -> int:
        if name.startswith("packs/") and not reads:
            reads.append(name)
            squeeze(origin, 2)
        return read_into(self, name, offset, target)

    monkeypatch.setattr(LocalStorage, "read_into", prunes)
    source = f"{origin}@1,2,3" if named else str(origin)
    done = CliRunner().invoke(main, ["copy", source, str(tmp_path / "there")])
    assert reads
    if named:  # the control: the user asked for this one
        assert done.exit_code == 1
        assert "step 2  gone" in done.output
        assert "2 of 3 checkpoints" in done.output
        return
    assert done.exit_code == 0, done.output
    assert "step 2  skipped: " in done.output
    assert "3 of 3 checkpoints" in done.output
    assert check_run(tmp_path / "there").good == (1, 3, 4)


def test_a_step_that_is_pruned_before_its_copy_begins_is_skipped(origin: Path) -> None:
    class Pruned(LocalStorage):
        asked = 0

        def list(self, prefix: str) -> Iterator[str]:
            names = super().list(prefix)
            if prefix == "checkpoints/":
                self.asked += 1
                if self.asked == 2:  # after the list of what is copied
                    squeeze(origin, 1)
            return names

    assert outcomes(copy_run(source := Pruned(origin), MemoryStorage())) == {
        1: "gone",
        2: "copied",
        3: "copied",
        4: "copied",
    }
    assert source.asked


def test_read_errors_of_the_source_are_not_damage(origin: Path) -> None:
    class Failing(LocalStorage):
        error: OSError = OSError(errno.EMFILE, "too many open files")

        def read_into(self, name: str, offset: int, target: memoryview) -> int:
            raise self.error

    destination = MemoryStorage()
    source = Failing(origin)
    with pytest.raises(StoreError, match="too many open files") as caught:
        copy_run(source, destination)
    assert not isinstance(caught.value, CorruptionError)
    source.error = ConnectionError(errno.EHOSTUNREACH, "nobody answers")
    with pytest.raises(UnreachableError, match=r"step 1 .*nobody answers"):
        copy_run(source, destination)
    assert check_run(destination).good == ()


def test_a_copy_onto_a_full_disk_raises_before_the_first_byte(origin: Path, tmp_path: Path) -> None:
    class Full(LocalStorage):
        def free_bytes(self) -> int | None:
            return 100_000

    with pytest.raises(SaveError, match=r"no room for it: .*are free; nothing was written"):
        copy_run(origin, Full(tmp_path / "there"))
    assert packs(tmp_path / "there") == set()

    def full(number: int, operation: str, path: str) -> OSError | None:
        return OSError(errno.ENOSPC, "full") if operation == "write" and ".pack" in path else None

    failing = Operations(fail=full)
    with pytest.raises(SaveError, match=r"step 1 could not be copied from .*full"):
        copy_run(origin, LocalStorage(tmp_path / "there", failing))
    assert failing.fired
    (problem,) = check_run(tmp_path / "there").problems
    assert (problem.harmful, problem.what.endswith("did not end")) == (False, True)


def test_an_interrupted_copy_commits_nothing(origin: Path) -> None:
    target = MemoryStorage()

    def stop() -> None:
        raise InterruptedError

    with Run(target, create=True) as run, pytest.raises(SaveError):
        copy_checkpoint(Run(origin), 4, run, before=stop)
    assert check_run(target).good == ()


def test_a_copy_locks_only_the_target(origin: Path, tmp_path: Path) -> None:
    with Run(origin) as writer:
        writer.begin_writing()
        copy_run(origin, tmp_path / "there")
        with pytest.raises(LockedError):
            copy_run(tmp_path / "there", origin)
    with pytest.raises(StepNotFoundError, match="step 7"):
        copy_run(origin, tmp_path / "there", [1, 7])
    with pytest.raises(NotARunError):
        copy_run(tmp_path / "missing", tmp_path / "there")
    for place in (origin, origin / ".." / "here"):
        with pytest.raises(StoreError, match="expected a directory apart from"):
            copy_run(origin, place)


def test_a_copy_to_an_object_store_and_back_has_the_same_bits(
    s3: ObjectServer, origin: Path, tmp_path: Path
) -> None:
    url = s3.new_url()
    copy_run(origin, s3.storage(url))
    copy_run(s3.storage(url), tmp_path / "back")
    assert check_run(s3.storage(url)).good == check_run(tmp_path / "back").good == (1, 2, 3, 4)
    for step, leaves in sharing_states().items():
        assert contents(Run(tmp_path / "back").load(step).leaves) == contents(leaves)


# ---------------------------------------------------------------- forks


def test_a_fork_is_an_independent_run_that_takes_little_space(origin: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in origin.rglob("*.pack")}
    fork = tmp_path / "fork"
    assert fork_run(origin, 3, fork).step == 3
    assert check_run(fork).problems == ()
    assert contents(Run(fork).load(3).leaves) == contents(sharing_states()[3])
    assert not packs(origin) & packs(fork)
    links = sorted(path.stat().st_nlink for path in (fork / "packs").iterdir())
    assert links == [1, 2], "little of the pack of step 1 is needed: that was copied"
    assert fork_run(origin, 3, fork).step == 3, "repeated"
    with run_on(fork) as run:
        run.save(4, make_leaves(40))
        squeeze_steps = PruneRequest(frozenset({3}), MAX_STEP, 0, everywhere=True)
        run.execute(run.plan(squeeze_steps))
    assert check_run(fork).good == (4,)
    assert {path: path.read_bytes() for path in origin.rglob("*.pack")} == before
    assert check_run(origin).good == (1, 2, 3, 4)


def test_a_fork_outlives_its_origin(origin: Path, tmp_path: Path) -> None:
    fork_run(origin, 1, tmp_path / "fork")
    for path in sorted(origin.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert contents(Run(tmp_path / "fork").load(1).leaves) == contents(sharing_states()[1])


def test_a_fork_copies_if_it_cannot_link(
    origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.EXDEV, "other device")

    place = tmp_path / "fork"
    storage = LocalStorage(place)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "link_from", lambda *_: False)
        fork_run(origin, 2, storage)
    assert {path.stat().st_nlink for path in (place / "packs").iterdir()} == {1}
    monkeypatch.setattr(os, "link", refused)
    assert (
        LocalStorage(tmp_path / "x").link_from(LocalStorage(origin), "perdure.json", "y") is False
    )
    monkeypatch.undo()
    for target in (MemoryStorage(), MemoryStorage()):
        fork_run(origin, 2, target)
        assert check_run(target).good == (2,)
        assert fork_run(target, 2, MemoryStorage()).step == 2


def test_a_fork_verifies_what_it_links(origin: Path, tmp_path: Path) -> None:
    pack = Run(origin).manifest(1).packs[0].name
    flip(origin / "packs" / pack)
    with pytest.raises(CorruptionError, match=f"step 1 cannot be forked, packs/{pack} is damaged"):
        fork_run(origin, 1, tmp_path / "fork")
    assert Run(tmp_path / "fork").steps() == []
    flip(origin / "packs" / pack)
    fork_run(origin, 1, tmp_path / "fork")
    assert check_run(tmp_path / "fork").problems == (), "what the first attempt left is gone"


def test_a_fork_goes_into_an_empty_directory_only(origin: Path, tmp_path: Path) -> None:
    fork_run(origin, 2, tmp_path / "fork")
    with pytest.raises(StepExistsError, match="expected an empty or missing directory"):
        fork_run(origin, 3, tmp_path / "fork")
    with pytest.raises(StoreError, match="expected a directory apart from"):
        fork_run(origin, 3, origin / "fork")
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "thesis.tex").write_text("important")
    with pytest.raises(NotARunError):
        fork_run(origin, 3, tmp_path / "junk")
    with pytest.raises(StepNotFoundError, match="step 7"):
        fork_run(origin, 7, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert check_run(tmp_path / "fork").good == (2,)


# ---------------------------------------------------------------- the command line


def perdure(*arguments: object) -> Any:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_the_command_copies_and_reports(origin: Path, tmp_path: Path) -> None:
    target = tmp_path / "there"
    done = perdure("copy", f"{origin}@2,4", target, "--dry-run")
    assert done.exit_code == 0
    assert "nothing was changed" in done.output
    assert not target.exists()
    done = perdure("copy", f"{origin}@2,4", target)
    assert done.output.splitlines() == [
        "step 2  copied  4.9 KiB",
        "step 4  copied  3.0 KiB",
        f"2 of 2 checkpoints in {target}",
    ]
    done = perdure("copy", origin, target)
    assert done.exit_code == 1
    assert "step 3  refused: " in done.output
    document = json.loads(perdure("copy", origin, target, "--json").output)
    assert [row["outcome"] for row in document["checkpoints"]] == [
        "refused",
        "present",
        "refused",
        "present",
    ]
    assert perdure("copy", f"{origin}@9", target).exit_code == 2
    path = tmp_path / "run@2"
    assert perdure("copy", origin, path).exit_code == 2, "the name of a checkpoint"
    path.mkdir()
    assert perdure("copy", origin, path).exit_code == 0
    assert perdure("copy", path, tmp_path / "again").exit_code == 0, "a directory's own name"
    assert check_run(tmp_path / "again").good == (1, 2, 3, 4)


def test_the_command_forks_and_reports(origin: Path, tmp_path: Path) -> None:
    done = perdure("fork", f"{origin}@3", tmp_path / "fork")
    assert (done.exit_code, done.output) == (
        0,
        f"{tmp_path / 'fork'} starts at step 3 of {origin}\n",
    )
    document = json.loads(perdure("fork", f"{origin}@3", tmp_path / "fork", "--json").output)
    assert document["fingerprint"] == Run(origin).manifest(3).fingerprint
    assert load_checkpoint(tmp_path / "fork") is not None
    for text in (origin, f"{origin}@1,2", f"{origin}@x"):
        done = perdure("fork", text, tmp_path / "other")
        assert done.exit_code == 2
        assert "RUN@STEP" in done.output
    assert perdure("fork", f"{origin}@4", tmp_path / "fork").exit_code == 1
