"""Shared chunks are read again at a known pace, and written again if they are damaged."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest
from helpers import Crash, Operations, contents, make_leaves, repeated, run_on

from damage import flip
from perdure import CheckpointManager
from perdure.checkpoint.restorer import load_good
from perdure.errors import CorruptionError, NoGoodCheckpointError
from perdure.store import Leaf, LocalStorage, Run, verify_run
from perdure.store.damage import PASS_SAVES
from perdure.store.format import PACKS, hash_each, manifest_name

MIB = 1024 * 1024


class Reads(LocalStorage):
    """Records the reads of packs, and fails them on request."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[str, int, int]] = []
        self.code = 0

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        if name.startswith(PACKS):
            self.reads.append((name, offset, len(target)))
            if self.code:
                raise OSError(self.code, "injected", name)
        return super().read_into(name, offset, target)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> int:
    """Read all shared chunks in each save."""
    monkeypatch.setattr("perdure.store.damage.PASS_SAVES", 1)
    return 1


def state(step: int, shared: int = 3) -> dict[str, Leaf]:
    """A frozen base, one part that changes every other step, and one that always does."""
    base = make_leaves(1, (3000,) * shared)
    return {
        **{f"base/{path}": leaf for path, leaf in base.items() if not leaf.is_scalar},
        "often": make_leaves(100 + step // 2, (500,))["model/layer0"],
        "own": make_leaves(1000 + step, (400,))["model/layer0"],
    }


def filled(path: Path, steps: int = 3) -> Path:
    with run_on(path) as run:
        for step in range(1, steps + 1):
            run.save(step, state(step))
    return path


def pack_of(path: Path, step: int) -> Path:
    return next((path / "packs").glob(f"{step:012d}-*"))


def assert_all_good(path: Path, steps: int) -> None:
    """Every step exists and restores with its own bits."""
    report = verify_run(Run(path))
    assert report.good == tuple(range(1, steps + 1)), report.problems
    for step in report.good:
        assert contents(Run(path).load(step).leaves) == contents(state(step))


# ---------------------------------------------------------------- the pace


def test_every_shared_chunk_is_read_again_once_in_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large leaves and small ones, in passes of 16 saves."""
    pace = 16
    monkeypatch.setattr("perdure.store.damage.PASS_SAVES", pace)
    storage = Reads(tmp_path)
    leaves = {
        **make_leaves(1, (2000,) * 300),
        "large": make_leaves(2, (9 * MIB,))["model/layer0"],
        "zero": Leaf("float32", (0, 5), memoryview(b""), True),
    }
    with run_on(tmp_path) as run:
        first = run.save(0, leaves)
    places = {(chunk.offset, chunk.length) for leaf in first.leaves for chunk in leaf.chunks}
    total = sum(length for _, length in places)
    passes = 3
    per_save = []
    with Run(storage, clock=lambda: 0.0) as run:
        for step in range(1, passes * pace + 1):
            storage.reads.clear()
            changing = make_leaves(10_000 + step, (64,))["model/layer0"]
            run.save(step, {**leaves, "own": changing})
            per_save.append([(offset, length) for _, offset, length in storage.reads])
            if step > 1:
                run.delete([step - 1])
    sizes = [sum(length for _, length in reads) for reads in per_save]
    assert sum(sizes) <= passes * (total + 4 * MIB)
    share = (total + 64) / pace
    for n in range(1, len(sizes) + 1):  # at most one chunk ahead of the pace
        assert sum(sizes[:n]) <= n * (share + 1) + 4 * MIB
    for turn in range(passes):
        turn_reads = per_save[turn * pace : (turn + 1) * pace]
        covered = {
            place
            for reads in turn_reads
            for offset, length in reads
            for place in places
            if offset <= place[0] and place[0] + place[1] <= offset + length
        }
        assert covered == places, f"pass {turn}"


@pytest.mark.parametrize(("spread", "all_read"), [(None, True), (0.0, False)])
def test_runs_that_are_restarted_at_each_save_leave_no_part_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spread: float | None, all_read: bool
) -> None:
    """The control begins with the first leaf after each restart."""
    monkeypatch.setattr("perdure.store.damage.PASS_SAVES", 8)
    if spread is not None:
        monkeypatch.setattr("perdure.store.damage._SPREAD", spread)
    storage, leaves = Reads(tmp_path), make_leaves(1, (2000,) * 40)
    with run_on(tmp_path) as run:
        first = run.save(0, leaves)
    unread = {chunk.offset for leaf in first.leaves for chunk in leaf.chunks}
    for step in range(100, 100 * 25, 100):
        storage.reads.clear()
        with Run(storage, clock=lambda: 0.0) as run:
            run.save(step, {**leaves, "own": make_leaves(step, (64,))["model/layer0"]})
        for _, offset, length in storage.reads:
            unread -= set(range(offset, offset + length))
    assert (not unread) == all_read


def test_the_pace_is_the_documented_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "STORE.md").read_text()
    assert f"within {PASS_SAVES} saves" in text


def test_chunks_that_this_save_wrote_are_not_read_again(tmp_path: Path, often: int) -> None:
    storage = Reads(tmp_path)
    with Run(storage, create=True, clock=lambda: 0.0) as run:
        for step in range(1, 5):
            run.save(step, make_leaves(step))
        assert storage.reads == []
        run.save(5, make_leaves(4))
        assert storage.reads != []


# ---------------------------------------------------------------- damage that a save finds


@pytest.mark.parametrize("codec", [None, "shuffle-zstd"])
def test_a_flipped_bit_in_a_shared_chunk_is_repaired_by_the_save_that_finds_it(
    tmp_path: Path, often: int, codec: str | None
) -> None:
    filled(tmp_path)
    flip(pack_of(tmp_path, 1), 10)
    assert verify_run(Run(tmp_path)).good == (), "the control: all of them need it"
    with run_on(tmp_path, codec=codec) as run:
        run.save(4, state(4))
        (note,) = run.notes
        assert "steps 1, 2, 3, 4" in note
        assert "written again" in note
        assert "expected hash" in note
    report = verify_run(Run(tmp_path))
    assert report.good == (1, 2, 3, 4)
    for step in report.good:
        assert contents(Run(tmp_path).load(step).leaves) == contents(state(step))


def test_a_manager_warns_of_what_was_repaired(tmp_path: Path, often: int) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, {"base": "x" * 10, "w": make(7), "z": make(step)})
        manager.wait_until_finished()
        flip(pack_of(tmp_path, 1), 10)
        manager.save(3, {"base": "x" * 10, "w": make(7), "z": make(3)})
        with pytest.warns(UserWarning, match=r"steps 1, 2, 3 need: .*written again"):
            manager.wait_until_finished()
    assert verify_run(Run(tmp_path)).good == (1, 2, 3)


def make(seed: int):
    import numpy as np

    return np.frombuffer(make_leaves(seed, (800,))["model/layer0"].data, np.uint8)


def test_chunks_of_a_missing_pack_are_written_again_if_the_state_has_them(
    tmp_path: Path, often: int
) -> None:
    filled(tmp_path, 2)
    with run_on(tmp_path) as run:
        run.save(3, state(3))
        pack_of(tmp_path, 1).unlink()
        run.save(4, state(4))
    report = verify_run(Run(tmp_path))
    assert report.good == (2, 3, 4)
    assert report.bad == (1,), "its own part is in no state that is at hand"


def test_a_read_that_fails_is_neither_damage_nor_a_failed_save(tmp_path: Path, often: int) -> None:
    filled(tmp_path)
    storage = Reads(tmp_path)
    storage.code = errno.EIO
    with Run(storage, clock=lambda: 0.0) as run:
        run.save(4, state(4))
        assert storage.reads
        (note,) = run.notes
        assert "step 4 is committed" in note
        assert "could not be checked" in note
    assert not (tmp_path / "quarantine").exists()
    assert len(list((tmp_path / "packs").iterdir())) == 4
    assert_all_good(tmp_path, 4)


def test_a_crash_before_any_operation_of_such_a_repair_harms_nothing(
    tmp_path: Path, often: int
) -> None:
    def damaged(path: Path) -> Path:
        filled(path)
        flip(pack_of(path, 1), 10)
        return path

    recorder = Operations()
    with run_on(damaged(tmp_path / "counted"), recorder) as run:
        run.save(4, state(4))
    assert len(recorder.done) > 20
    for number in range(len(recorder.done)):
        path = damaged(tmp_path / f"crash{number}")
        crash = Operations(crash_at=number)
        run = run_on(path, crash)
        with contextlib.suppress(Crash):
            run.save(4, state(4))
        run.close()
        assert crash.fired
        with run_on(path) as run:
            run.save(4, state(4)) if 4 not in run.steps() else run.save(5, state(5))
        assert verify_run(Run(path)).good == tuple(Run(path).steps())


# ---------------------------------------------------------------- damage that others found


def test_chunks_that_a_restore_finds_damaged_are_written_again(tmp_path: Path) -> None:
    filled(tmp_path)
    flip(pack_of(tmp_path, 1), 10)
    with run_on(tmp_path) as run:
        with pytest.raises(NoGoodCheckpointError):
            load_good(run)
        run.save(4, state(4))
        assert "steps 1, 2, 3 need" in run.notes[0]
    assert_all_good(tmp_path, 4)


def test_chunks_that_a_check_finds_damaged_are_written_again(tmp_path: Path) -> None:
    filled(tmp_path)
    flip(pack_of(tmp_path, 1), 10)
    with run_on(tmp_path) as run:
        assert verify_run(run).good == ()
        run.save(4, state(4))
    assert 4 in verify_run(Run(tmp_path)).good


def test_no_later_process_depends_on_a_pack_that_was_found_damaged(tmp_path: Path) -> None:
    """One process quarantines. Another one, which never saw the damage, reads the note and saves."""
    filled(tmp_path)
    flip(pack_of(tmp_path, 1), 10)
    with run_on(tmp_path) as run:
        with pytest.raises(CorruptionError, match="expected hash") as caught:
            run.load(3)
        run.quarantine(3, str(caught.value))
    damaged = pack_of(tmp_path, 1).name
    with run_on(tmp_path) as run:
        assert damaged not in [pack.name for pack in run.save(3, state(3)).packs]
    assert 3 in verify_run(Run(tmp_path)).good
    assert (tmp_path / manifest_name(2)).exists()


def test_a_save_depends_on_no_pack_that_a_compaction_found_damaged(tmp_path: Path) -> None:
    from helpers import sharing_states

    from perdure.store import PruneRequest
    from perdure.store.format import MAX_STEP

    states = sharing_states()
    with run_on(tmp_path) as run:
        for step, leaves in states.items():
            run.save(step, leaves)
        flip(pack_of(tmp_path, 1), 5)
        done = run.execute(run.plan(PruneRequest(frozenset({1}), MAX_STEP, 0, everywhere=True)))
        assert done.left
        run.save(5, states[2])
    assert verify_run(Run(tmp_path)).good == (2, 3, 4, 5), (
        "and all that shared it are readable again"
    )


def test_a_repeated_save_of_a_step_writes_its_damaged_chunks_again(
    tmp_path: Path,
) -> None:
    filled(tmp_path)
    flip(pack_of(tmp_path, 1), 10)
    with run_on(tmp_path) as run:
        run.save(3, state(3))
    assert 3 in verify_run(Run(tmp_path)).good


# ---------------------------------------------------------------- the bytes that are written


class Changing(LocalStorage):
    """Changes the memory that is being saved whenever a pack gets its first bytes."""

    def __init__(self, root: Path, memory: bytearray) -> None:
        super().__init__(root)
        self.memory = memory
        self.fired = 0

    def create(self, name: str, size: int):
        sink = super().create(name, size)
        if name.startswith(PACKS):
            write, write_from = sink.write, sink.write_from
            sink.write = lambda data: (self._change(), write(data))[1]
            sink.write_from = lambda data, release: (self._change(), write_from(data, release))[1]
        return sink

    def _change(self) -> None:
        if not self.fired:
            self.memory[:] = bytes(255 - byte for byte in self.memory)
        self.fired += 1


@pytest.mark.parametrize("codec", [None, "shuffle-zstd"])
@pytest.mark.parametrize("size", [900_000, 6 * MIB, 21 * MIB + 5])
def test_an_array_that_changes_between_hash_and_write_leaves_a_readable_checkpoint(
    tmp_path: Path, size: int, codec: str | None
) -> None:
    memory = bytearray(make_leaves(5, (4096,))["model/layer0"].data) * (size // 4096 + 1)
    for offset in range(0, len(memory), 4096):  # no two chunks alike
        memory[offset : offset + 8] = offset.to_bytes(8, "little")
    storage = Changing(tmp_path, memory)
    leaf = Leaf("uint8", (len(memory),), memoryview(memory), frozen=True)
    with Run(storage, create=True, codec=codec) as run:
        run.save(1, {"aliased": leaf})
    assert storage.fired
    assert verify_run(Run(tmp_path)).ok
    assert Run(tmp_path).load(1).leaves["aliased"].shape == leaf.shape


def test_an_array_that_changes_between_hash_and_encoding_leaves_a_readable_checkpoint(
    tmp_path: Path,
) -> None:
    memory = bytearray(repeated(make_leaves(5, (4096,)), 3000)["model/layer0"].data)
    fired = []
    with run_on(tmp_path, codec="shuffle-zstd") as run:
        encode = run.encode
        assert encode is not None

        def late(data: memoryview, dtype: str, digest: str) -> memoryview:
            memory[:] = bytes(len(memory))
            fired.append(len(data))
            return encode(data, dtype, digest)

        run.committer._encode = late
        run.save(1, {"aliased": Leaf("uint8", (len(memory),), memoryview(memory), frozen=True)})
    assert fired
    assert verify_run(Run(tmp_path)).ok


def test_small_arrays_that_change_after_they_were_hashed_leave_a_readable_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = bytearray(make_leaves(5, (4096,))["model/layer0"].data)
    fired = []

    def late(parts: list[memoryview]) -> list[str]:
        digests = hash_each(parts)
        memory[:] = bytes(len(memory))
        fired.append(len(digests))
        return digests

    monkeypatch.setattr("perdure.store.pack_writer.hash_each", late)
    view = memoryview(memory)
    leaves = {
        f"part{offset}": Leaf("uint8", (64,), view[offset : offset + 64])
        for offset in range(0, 4096, 64)
    }
    with run_on(tmp_path) as run:
        run.save(1, leaves)
    assert fired == [64]
    assert verify_run(Run(tmp_path)).ok


def test_a_state_without_leaves_is_saved_again_and_again(tmp_path: Path) -> None:
    """Nothing is shared, although the random generators have chunks in older packs."""
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, {})
            manager.wait_until_finished()
    assert verify_run(Run(tmp_path)).good == (1, 2, 3)
