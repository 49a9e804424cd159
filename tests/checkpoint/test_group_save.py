"""A group saves one checkpoint, whole or not at all, with the same outcome in every process."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest

from damage import FullDisk
from perdure import CheckpointManager, LocalStorage, ManagerOptions, load_checkpoint, verify_run
from perdure.checkpoint import PerRank
from perdure.errors import (
    LockedError,
    MismatchError,
    SaveError,
    StateError,
    StepExistsError,
    StoreError,
    WorkerLostError,
)
from perdure.state import PositionedIterator, bits
from perdure.store import Run, pack_part, pack_writer
from perdure.store.format import hash_bytes
from pretend import Pretend, World, play

CHUNK = 4 * 1024 * 1024


def state(k: int) -> dict[str, Any]:
    source = np.random.default_rng(k)
    return {
        "large": source.integers(0, 255, 3 * CHUNK + 5, dtype=np.uint8),
        "small": np.full(10, k, np.float32),
        "step": k,
    }


def same(restored: Any, k: int) -> bool:
    expected = state(k)
    return restored["step"] == k and all(
        np.array_equal(restored[name], expected[name]) for name in ("large", "small")
    )


def saver(directory: Path, *steps: int) -> Any:
    def program(processes: Pretend) -> list[int]:
        with CheckpointManager(directory, processes=processes) as manager:
            for step in steps:
                manager.save(step, state(step))
            manager.wait_until_finished()
            return manager.all_steps()

    return program


def writers(directory: Path, step: int) -> set[str]:
    """Numbers of the processes whose packs a checkpoint reads."""
    return {pack.name.split("-")[1] for pack in Run(directory).manifest(step).packs}


@pytest.mark.parametrize("count", [2, 3])
def test_every_process_writes_a_part_and_the_fingerprint_is_that_of_one_process(
    tmp_path: Path, count: int
) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"
    assert play(count, saver(together, 1, 2)) == [[1, 2]] * count
    with CheckpointManager(alone) as manager:
        manager.save(1, state(1))
        manager.save(2, state(2))
    for step in (1, 2):
        assert Run(together).manifest(step).fingerprint == Run(alone).manifest(step).fingerprint
        assert writers(together, step) == {f"{process:05d}" for process in range(count)}
        assert same(load_checkpoint(together, step), step)
    assert verify_run(Run(together)).problems == ()


def test_every_process_hashes_its_copy_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []

    def counted(data: Any) -> str:
        hashed.append(len(data))
        return hash_bytes(data)

    for module in (pack_part, pack_writer):
        monkeypatch.setattr(module, "hash_bytes", counted)
    play(2, saver(tmp_path, 1))
    assert hashed.count(CHUNK) == 2 * 3, "each of three large chunks, in each of two processes"


def test_a_group_encodes_its_parts(tmp_path: Path) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"
    words = {"words": np.arange(3 * CHUNK // 4, dtype=np.int32), "zeros": np.zeros(CHUNK)}
    options = ManagerOptions(codec="shuffle-zstd")

    def program(processes: Pretend) -> None:
        with CheckpointManager(together, processes=processes, options=options) as manager:
            manager.save(1, words)

    play(2, program)
    with CheckpointManager(alone) as manager:
        manager.save(1, words)
    (first, second) = (Run(place).manifest(1) for place in (together, alone))
    assert first.fingerprint == second.fingerprint
    assert first.stored_nbytes < second.stored_nbytes / 4
    assert writers(together, 1) == {"00000", "00001"}
    assert all(np.array_equal(load_checkpoint(together, 1)[name], words[name]) for name in words)
    assert verify_run(Run(together)).problems == ()


def test_a_checkpoint_of_one_topology_is_restored_and_continued_by_another(tmp_path: Path) -> None:
    play(3, saver(tmp_path, 1))

    def resume(processes: Pretend) -> int:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            restored, step = manager.restore_or_initialize(lambda: state(0))
            assert same(restored, 1)
            manager.save(2, state(2))
            return step

    assert play(2, resume) == [1, 1]
    assert play(1, resume) == [2] or same(load_checkpoint(tmp_path, 2), 2)


def test_chunks_that_a_checkpoint_holds_are_not_written_again(tmp_path: Path) -> None:
    play(2, saver(tmp_path, 1))
    before = sum(path.stat().st_size for path in (tmp_path / "packs").iterdir())

    def program(processes: Pretend) -> None:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            manager.save(2, {**state(1), "step": 2})

    play(2, program)
    after = sum(path.stat().st_size for path in (tmp_path / "packs").iterdir())
    assert after == before
    assert load_checkpoint(tmp_path, 2)["step"] == 2


def test_saving_a_committed_step_does_nothing_with_equal_bits_and_is_refused_with_others(
    tmp_path: Path,
) -> None:
    play(2, saver(tmp_path, 1))
    assert play(2, saver(tmp_path, 1)) == [[1], [1]]

    def program(processes: Pretend) -> None:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            manager.save(1, state(7))

    errors = play(2, program)
    assert [type(error) for error in errors] == [StepExistsError] * 2
    assert "the chief process:" in str(errors[1])
    assert same(load_checkpoint(tmp_path, 1), 1)


def test_processes_with_different_states_are_refused_by_leaf_path(tmp_path: Path) -> None:
    play(3, saver(tmp_path, 1))

    def program(processes: Pretend) -> None:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            diverged = state(2)
            if processes.index == 2:
                diverged["small"][3] = np.nextafter(np.float32(2), np.float32(3))
            manager.save(2, diverged)

    errors = play(3, program)
    assert [type(error) for error in errors] == [StateError] * 3
    for error in errors:
        assert "small: process 2 holds other bits than process 0" in str(error)
        assert "large" not in str(error)
    assert Run(tmp_path).steps() == [1]

    def lacking(processes: Pretend, index: int) -> None:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            manager.save(2, state(2) | ({"extra": 1} if processes.index == index else {}))

    for index, without, other in ((0, 1, 0), (1, 0, 1)):
        for error in play(2, lambda processes, index=index: lacking(processes, index)):
            text = f"extra: process {without} has no such leaf, and process {other} has one"
            assert text in str(error)
            assert "must save the same members" in str(error)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_write_that_fails_in_one_process_raises_in_all_and_commits_nothing(
    tmp_path: Path, victim: int
) -> None:
    play(2, saver(tmp_path, 1))
    disk = FullDisk("/packs/000000000002")

    def program(processes: Pretend) -> list[int]:
        is_full = processes.index == victim
        storage = LocalStorage(tmp_path, disk) if is_full else LocalStorage(tmp_path)
        with CheckpointManager(storage, processes=processes) as manager:
            manager.save(2, state(2))
            with pytest.raises(SaveError, match="No space left on device"):
                manager.wait_until_finished()
            assert manager.all_steps() == [1]
            manager.save(3, state(3))
            manager.wait_until_finished()
            return manager.all_steps()

    assert play(2, program) == [[1, 3], [1, 3]]
    assert len(disk.fired) == 1
    assert same(load_checkpoint(tmp_path, 3), 3)
    assert verify_run(Run(tmp_path)).ok


def test_a_group_that_finds_another_writer_raises_in_every_process(tmp_path: Path) -> None:
    with Run(tmp_path, create=True) as other:
        other.begin_writing()
        errors = play(2, saver(tmp_path, 1))
    assert [type(error) for error in errors] == [LockedError] * 2


class Alone(Pretend):
    """The chief of two processes; the other one dies while both save."""

    def __init__(self) -> None:
        super().__init__(0, World(2))
        self.saving, self.ended = threading.Event(), threading.Event()

    def gather(self, data: bytes) -> list[bytes]:
        return [data, data]

    def broadcast(self, data: bytes | None) -> bytes:
        self.saving.set()
        assert self.ended.wait(60)
        raise WorkerLostError("waited for it in vain")

    def channel(self, name: str) -> Alone:
        return self


def test_a_save_that_waits_for_a_lost_process_does_not_block_the_exit(tmp_path: Path) -> None:
    processes = Alone()
    manager = CheckpointManager(tmp_path, processes=processes)

    def train() -> None:
        with manager:
            manager.save(1, state(1))
            assert processes.saving.wait(60)
            raise WorkerLostError("in a step")

    with pytest.raises(WorkerLostError, match="in a step"):
        train()
    assert not processes.ended.is_set(), "the save is still under way"
    processes.ended.set()
    with pytest.raises(WorkerLostError, match="in vain"):
        manager.close()  # after a block without an error, close waits for the save and raises its error
    assert Run(tmp_path).steps() == []


def test_save_and_exit_ends_every_process_with_status_75(tmp_path: Path) -> None:
    left = []

    def program(processes: Pretend) -> None:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            try:
                manager.save_and_exit(4, state(4))
            except SystemExit as status:
                left.append(status.code)

    play(2, program)
    assert left == [75, 75]
    assert same(load_checkpoint(tmp_path), 4)


# --- members that differ between processes (PerRank) ---


def per_rank(k: int, index: int, on_change: Any = "error", size: int = 3) -> dict[str, Any]:
    mine = {"mean": np.full(size, 10 * k + index, np.float32), "seen": 100 * k + index}
    return {**state(k), "own": PerRank(mine, on_change)}


def rank_saver(directory: Path, *steps: int) -> Any:
    def program(processes: Pretend) -> list[int]:
        with CheckpointManager(directory, processes=processes) as manager:
            for step in steps:
                manager.save(step, per_rank(step, processes.index))
            manager.wait_until_finished()
            return manager.all_steps()

    return program


def rank_restorer(directory: Path, on_change: Any = "error", member: str = "own") -> Any:
    def program(processes: Pretend) -> Any:
        like = per_rank(0, 7, on_change)
        with CheckpointManager(directory, processes=processes) as manager:
            restored, step = manager.restore(like={member: like.pop("own"), **like})
        assert same(restored, step)
        value = restored[member].value
        return [*value["mean"].tolist(), value["seen"]]

    return program


def test_each_process_saves_and_gets_its_own_value(tmp_path: Path) -> None:
    assert play(3, rank_saver(tmp_path, 1, 2)) == [[1, 2]] * 3
    paths = [leaf.path for leaf in Run(tmp_path).manifest(2).leaves]
    assert [path for path in paths if path.startswith("own/")] == [
        f"own/rank{rank}/{name}" for rank in range(3) for name in ("mean", "seen")
    ]
    expected = [[20.0 + rank] * 3 + [200 + rank] for rank in range(3)]
    assert play(3, rank_restorer(tmp_path)) == expected
    assert load_checkpoint(tmp_path, 2)["own"]["rank1"]["seen"] == 201
    assert verify_run(Run(tmp_path)).problems == ()


def test_the_fingerprint_covers_the_values_of_all_processes(tmp_path: Path) -> None:
    assert play(2, rank_saver(tmp_path, 1)) == [[1]] * 2
    assert play(2, rank_saver(tmp_path, 1)) == [[1]] * 2, "equal bits are no work"
    manifest = Run(tmp_path).manifest(1)

    def program(processes: Pretend) -> None:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            value = per_rank(1, processes.index)
            if processes.index == 1:
                value["own"].value["seen"] = -1
            manager.save(1, value)

    assert [type(error) for error in play(2, program)] == [StepExistsError] * 2
    assert Run(tmp_path).manifest(1) == manifest


def test_large_values_are_written_by_the_process_that_has_them(tmp_path: Path) -> None:
    def program(processes: Pretend) -> None:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            manager.save(1, per_rank(1, processes.index, size=CHUNK // 2 + 1))

    assert play(3, program) == [None] * 3
    manifest = Run(tmp_path).manifest(1)
    for leaf in manifest.leaves:
        if leaf.path.startswith("own/") and leaf.chunks:
            assert len(leaf.chunks) == 1 + (CHUNK // 2 + 1) * 4 // CHUNK
            by = {manifest.packs[chunk.pack].name.split("-")[1] for chunk in leaf.chunks}
            assert by == {leaf.path[8].zfill(5)}
    assert verify_run(Run(tmp_path)).problems == ()


@pytest.mark.parametrize(("free", "fits"), [(4, False), (6, True)])
def test_the_values_of_all_processes_count_towards_the_free_space(
    tmp_path: Path, free: int, fits: bool
) -> None:
    """The shared state takes 3 chunks and a bit, the values of each process one that repeats."""

    class Limited(LocalStorage):
        def free_bytes(self) -> int:
            return free * CHUNK

    def program(processes: Pretend) -> list[int]:
        with CheckpointManager(Limited(tmp_path), processes=processes) as manager:
            manager.save(1, per_rank(1, processes.index, size=CHUNK // 2))
            manager.wait_until_finished()
            return manager.all_steps()

    outcomes = play(2, program)
    if fits:
        assert outcomes == [[1]] * 2
    else:
        assert [type(error) for error in outcomes] == [SaveError] * 2
        assert all("no room for it" in str(error) for error in outcomes)
        assert not any((tmp_path / "packs").glob("*")), "nothing was written"


def test_damage_in_the_value_of_another_process_is_a_warning_after_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chief finds it when it reads shared chunks again, and has not the bytes to repair it."""
    monkeypatch.setattr("perdure.store.damage.PASS_SAVES", 1)

    def program(processes: Pretend) -> list[int]:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            for step in (1, 2, 3):
                mine = per_rank(1, processes.index, size=1000)["own"]
                if step == 2 and processes.is_chief:
                    (pack,) = (tmp_path / "packs").glob("*-00001-*")
                    leaf = next(
                        leaf
                        for leaf in Run(tmp_path).manifest(1).leaves
                        if leaf.path == "own/rank1/mean"
                    )
                    data = bytearray(pack.read_bytes())
                    data[leaf.chunks[0].offset] ^= 1
                    pack.write_bytes(data)
                processes.barrier()
                manager.save(step, {**state(step), "own": mine})
                manager.wait_until_finished()
            return manager.all_steps()

    with pytest.warns(UserWarning, match="steps 1, 2 .*own/rank1/mean"):
        assert play(2, program) == [[1, 2, 3]] * 2
    assert verify_run(Run(tmp_path)).good == (1, 2, 3), "the next save wrote it again"


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_processes_is_refused_without_on_change(
    tmp_path: Path, count: int
) -> None:
    play(2, rank_saver(tmp_path, 1))
    for error in play(count, rank_restorer(tmp_path)):
        assert isinstance(error, MismatchError)
        assert "own: " in str(error)
        assert f"saved by 2 processes, and this run has {count}" in str(error)
    first = [10.0] * 3 + [100]
    assert play(count, rank_restorer(tmp_path, "rank0")) == [first] * count
    kept = [7.0] * 3 + [7]
    assert play(count, rank_restorer(tmp_path, "keep")) == [kept] * count
    assert play(2, rank_restorer(tmp_path, "keep"))[1] == [11.0] * 3 + [101]


def test_a_per_rank_member_that_the_checkpoint_lacks_is_a_mismatch(tmp_path: Path) -> None:
    play(2, rank_saver(tmp_path, 1))
    for error in play(2, rank_restorer(tmp_path, "keep", member="other")):
        assert isinstance(error, MismatchError)
        assert "other/rank" in str(error)

    def program(processes: Pretend) -> Any:
        like = {**state(0), "own": PerRank({"mean": np.zeros(3, np.float32)})}
        with CheckpointManager(tmp_path, processes=processes) as manager:
            manager.restore(like=like)

    for error in play(2, program):  # the same in all: that of process 0
        assert isinstance(error, MismatchError)
        assert "own/rank0/seen: the checkpoint has" in str(error)


def test_a_per_rank_value_inside_another_is_refused(tmp_path: Path) -> None:
    def program(processes: Pretend) -> None:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            manager.save(1, {"own": PerRank({"inner": PerRank(1)})})

    for error in play(2, program):
        assert isinstance(error, StateError)
        assert "own/rank" in str(error)


def test_the_error_for_differing_copies_names_per_rank_for_ddp(tmp_path: Path) -> None:
    def program(processes: Pretend) -> None:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            manager.save(1, {"running_mean": np.full(3, processes.index)})

    for error in play(2, program):
        assert "running_mean: process 1 holds other bits" in str(error)
        assert "PerRank" in str(error)


def test_a_grain_dataset_with_another_seed_or_source_is_refused(tmp_path: Path) -> None:
    def dataset(seed: int = 0, rows: int = 20, size: int = 3) -> Any:
        source = grain.MapDataset.source(range(rows)).seed(seed).shuffle()
        return source.repeat().batch(size).map(lambda batch: batch)

    def read(data: Any) -> list[list[int]]:
        return [next(data).tolist() for _ in range(4)]

    kinds = (
        lambda data: iter(data.to_iter_dataset()),
        lambda data: iter(data.to_iter_dataset().map(lambda batch: batch + 1)),
    )
    for number, made in enumerate(kinds):
        live = made(dataset())
        before = read(live)
        with CheckpointManager(tmp_path / str(number), recipe={}) as manager:
            manager.save(4, {"data": live})
            for other in ({"seed": 1}, {"rows": 10}, {"size": 4}):
                target = made(dataset(**other))
                with pytest.raises(StateError, match=r"data: the (seeds|lengths) of the Grain"):
                    manager.restore(like={"data": target})
            target = made(dataset())
            manager.restore(like={"data": target})
            after = read(target)
            assert after == read(live) != before
            # A position may have no seeds and lengths.
            target = made(dataset())
            PositionedIterator(target).load({"next_index": 4})
            assert read(target) == after


def test_what_each_process_has_for_itself_comes_back_as_what_it_was(tmp_path: Path) -> None:
    def own(index: int) -> Any:
        return {"z": [1] * (index + 1), "a": (float(index), {3: None}), "order": deque([index], 4)}

    def saving(processes: Pretend) -> Any:
        state = {"own": PerRank({"data": None}), "w": np.ones(2)}
        with CheckpointManager(tmp_path, processes=processes) as manager:
            manager.restore_or_initialize(state)
            state["own"].value["data"] = own(processes.index)
            manager.save(1, state)

    def resuming(processes: Pretend) -> Any:
        state = {"own": PerRank({"data": None}), "w": np.ones(2)}
        with CheckpointManager(tmp_path, processes=processes) as manager:
            return manager.restore_or_initialize(state).state["own"].value["data"]

    play(2, saving)
    for index, data in enumerate(play(2, resuming)):
        assert bits.same(data, own(index))
        assert list(data) == ["z", "a", "order"]


def test_a_sharded_grain_loader_resumes_in_every_process(tmp_path: Path) -> None:
    def iterator(index: int, seed: int = 1) -> Any:
        options = grain.sharding.ShardOptions(index, 2)
        sampler = grain.samplers.IndexSampler(40, options, shuffle=True, num_epochs=2, seed=seed)
        corpus: Any = [f"line {number} of a corpus" for number in range(40)]
        return iter(grain.DataLoader(data_source=corpus, sampler=sampler, worker_count=0))

    def saving(processes: Pretend) -> Any:
        data = iterator(processes.index)
        with CheckpointManager(tmp_path, processes=processes) as manager:
            for _ in range(5):
                next(data)
            manager.save(5, {"data": PerRank(data)})
            manager.wait_until_finished()
            return [next(data) for _ in range(4)]

    def resuming(processes: Pretend, seed: int = 1) -> Any:
        data = iterator(processes.index, seed)
        with CheckpointManager(tmp_path, processes=processes) as manager:
            manager.restore(like={"data": PerRank(data)})
            return [next(data) for _ in range(4)]

    expected = play(2, saving)
    assert expected[0] != expected[1]
    assert play(2, resuming) == expected
    assert "corpus" not in (tmp_path / "checkpoints/000000000005.json").read_text()
    for error in play(2, lambda processes: resuming(processes, 2)):
        assert isinstance(error, StateError)
        assert "sampler" in str(error)


def test_saves_of_several_managers_of_one_group_overlap(tmp_path: Path) -> None:
    held = threading.Event()

    class Slow(LocalStorage):
        """One whose first pack waits until another manager has saved."""

        def create(self, name: str, size: int) -> Any:
            assert not name.startswith("packs/") or held.wait(60)
            return super().create(name, size)

    def program(processes: Pretend) -> None:
        def manager(storage: Any) -> CheckpointManager:
            return CheckpointManager(storage, processes=processes)

        with manager(Slow(tmp_path / "model")) as model, manager(tmp_path / "ema") as average:
            model.save(1, state(1))
            average.save(1, state(11))
            average.wait_until_finished()
            held.set()
            model.save(2, state(2))
            average.save(2, state(12))
        with manager(tmp_path / "best") as best:
            best.save(1, state(3))

    assert play(2, program) == [None, None]
    for name, more in (("model", 0), ("ema", 10)):
        for step in (1, 2):
            assert same(load_checkpoint(tmp_path / name, step), more + step)
    assert same(load_checkpoint(tmp_path / "best", 1), 3)


def test_processes_that_save_by_different_managers_are_refused(tmp_path: Path) -> None:
    def program(processes: Pretend) -> None:
        with (
            CheckpointManager(tmp_path / "model", processes=processes) as model,
            CheckpointManager(tmp_path / "ema", processes=processes) as average,
        ):
            (model if processes.is_chief else average).save(1, state(1))

    for error in play(2, program):
        assert isinstance(error, StoreError)
        assert "process 0 save into model, process 1 save into ema" in str(error)
