"""An error in one process of a group is raised in all of them, at once and as the same class."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure import (
    Checkpoint,
    CheckpointManager,
    LocalStorage,
    ManagerOptions,
    load_checkpoint,
    verify_run,
)
from perdure.checkpoint import group_save
from perdure.checkpoint import saver as saver_module
from perdure.errors import (
    ArgumentError,
    CorruptionError,
    LockedError,
    MismatchError,
    NoGoodCheckpointError,
    PruneError,
    RecipeMismatchError,
    SaveError,
    StateError,
    StepNotFoundError,
    StoreError,
    UnsupportedLeafError,
)
from perdure.store import Run
from pretend import Pretend, play

CHUNK = 4 * 1024 * 1024


def state(k: int) -> dict[str, Any]:
    return {"large": np.full(CHUNK, k, np.uint8), "small": np.full(10, k, np.float32), "step": k}


def train(directory: Path, *steps: int, count: int = 2) -> None:
    def program(processes: Pretend) -> None:
        with CheckpointManager(directory, processes=processes) as manager:
            for step in steps:
                manager.save(step, state(step))

    assert play(count, program) == [None] * count


def raised(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 (the test looks at it)
        return error
    return None


class Failing(LocalStorage):
    """A directory whose `unlink` fails while `broken` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, self.hook)
        self.broken = False
        self.fired = 0

    def hook(self, operation: str, path: str) -> None:
        if self.broken and operation == "unlink" and not path.endswith(".tmp"):
            self.fired += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)


@pytest.mark.parametrize("count", [2, 3])
def test_a_pin_unpin_or_delete_that_fails_in_one_process_fails_in_all(
    tmp_path: Path, count: int
) -> None:
    train(tmp_path, 1, 2, count=count)
    storages: list[Failing] = []

    def program(processes: Pretend) -> list[Any]:
        storage = Failing(tmp_path)
        storages.append(storage)
        with CheckpointManager(storage, processes=processes) as manager:
            manager.pin(1)
            errors = [
                raised(lambda: manager.pin(9)),
                raised(lambda: manager.delete(9)),
                raised(lambda: manager.delete(1)),
            ]
            storage.broken = processes.is_chief
            errors += [raised(lambda: manager.delete(2)), raised(lambda: manager.unpin(1))]
            storage.broken = False
            manager.unpin(1)
            manager.delete(1)
            manager.save(3, state(3))
            manager.wait_until_finished()
            processes.barrier()
            return [*map(type, errors), manager.all_steps()]

    outcomes = play(count, program)
    kinds = [StepNotFoundError, StepNotFoundError, StoreError, PruneError, StoreError]
    assert outcomes[0][:5] == kinds
    assert outcomes == [outcomes[0]] * count
    assert sum(storage.fired for storage in storages) == 2
    assert 3 in outcomes[0][-1]
    assert 1 not in outcomes[0][-1]


def test_calls_that_differ_are_an_error(tmp_path: Path) -> None:
    train(tmp_path, 1, 2)

    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            manager.pin(1 + processes.index)

    for error in play(2, program):
        assert type(error) is StoreError
        assert "process 0 pin(1), process 1 pin(2)" in str(error)
    assert Run(tmp_path).pinned() == set(), "nothing was done"
    # The processes still agree afterwards.
    train(tmp_path, 3)


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ({"step": 1}, {"step": 2}, "process 0 restore(1), process 2 restore(2)"),
        ({}, {"step": 2}, "process 0 restore, process 2 restore(2)"),
        ({"leaves": {"small", "step"}}, {"leaves": "small"}, "restore(leaves=['small', 'step'])"),
        ({}, {"rename": {"small": "b"}}, "process 2 restore(rename={'small': 'b'})"),
        ({"strict": False}, {"cast": True}, "restore(strict=False), process 2 restore(cast=True)"),
        (
            {"leaves": [f"small{n}" for n in range(100)]},
            {"leaves": [f"small{n}" for n in range(99)] + ["step"]},
            "'sm",
        ),
    ],
)
def test_processes_that_restore_different_things_raise(
    tmp_path: Path, first: Any, second: Any, text: str
) -> None:
    train(tmp_path, 1, 2)
    states = [state(0) for _ in range(3)]

    def program(processes: Pretend) -> Any:
        asked = second if processes.index == 2 else first
        with CheckpointManager(tmp_path, processes=processes) as manager:
            return raised(lambda: manager.restore(like=states[processes.index], **asked))

    errors = play(3, program)
    assert len({str(error) for error in errors}) == 1
    assert type(errors[0]) is StoreError
    assert text in str(errors[0])
    assert "process 1" not in str(errors[0]), "it asks for what process 0 does"


def test_sets_of_leaves_in_any_order_are_the_same_restore(tmp_path: Path) -> None:
    train(tmp_path, 1)

    def program(processes: Pretend) -> Any:
        names = ["small", "step"][:: 1 - 2 * processes.index]
        rename = {name: name for name in names}
        with CheckpointManager(tmp_path, processes=processes) as manager:
            restored = manager.restore(like=state(0), leaves=names, rename=rename)
            return restored.state["step"]

    assert play(2, program) == [1, 1]


def test_different_calls_raise_in_all_processes_and_change_nothing(tmp_path: Path) -> None:
    train(tmp_path, 1, 2)
    kinds: dict[str, Callable[[CheckpointManager], object]] = {
        "delete(1)": lambda manager: manager.delete(1),
        "pin(1)": lambda manager: manager.pin(1),
        "rollback(1)": lambda manager: manager.rollback(1),
        "claim()": lambda manager: manager.claim(),
        "restore(1)": lambda manager: manager.restore(1, state(0)),
        # The first save of a manager is a collective.
        f"save into {tmp_path.name}": lambda manager: manager.save(3, state(3)),
        "reached_preemption": lambda manager: manager.reached_preemption(2),
        "restore_or_initialize": lambda manager: manager.restore_or_initialize(lambda: state(0)),
    }
    names = list(kinds)

    def program(processes: Pretend) -> Any:
        errors = []
        for number, name in enumerate(names):
            other = names[(number + 1) % len(names)]
            with CheckpointManager(tmp_path, processes=processes) as manager:
                call = kinds[other if processes.index else name]
                errors.append(
                    (f"process 0 {name}, process 1 {other}", raised(partial(call, manager)))
                )
        with CheckpointManager(tmp_path, processes=processes) as manager:
            return errors, manager.all_steps(), manager.pinned_steps()

    for errors, steps, pinned in play(2, program):
        for expected, error in errors:
            assert type(error) is StoreError, expected
            assert expected in str(error)
        assert (steps, pinned) == ([1, 2], [])


def test_a_barrier_of_the_program_is_not_mistaken_for_a_call(tmp_path: Path) -> None:
    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            if processes.is_chief:
                return manager.save(1, state(1))
            return processes.gather(b"")  # as the barrier of a real group does

    error, other = play(2, program)
    assert type(error) is StoreError
    assert "process 0 save into" in str(error)
    assert other[1] == b""


def test_a_rollback_that_fails_does_not_change_when_saves_are_due(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_interval_steps=10) as manager:
        manager.save(20, state(20))
        with pytest.raises(StepNotFoundError):
            manager.rollback(5)
        assert not manager.should_save(25)


@pytest.mark.parametrize("on_error", ["raise", "continue"])
def test_a_prune_that_fails_raises_in_all_processes(tmp_path: Path, on_error: Any) -> None:
    train(tmp_path, 1, 2)
    fired = []

    def program(processes: Pretend) -> Any:
        storage = Failing(tmp_path)
        options = ManagerOptions(on_error=on_error)
        with CheckpointManager(
            storage, processes=processes, max_to_keep=1, options=options
        ) as manager:
            storage.broken = processes.is_chief
            manager.save(3, state(3))
            error = raised(manager.wait_until_finished)
            storage.broken = False
            fired.append(storage.fired)
            manager.save(4, state(4))
            manager.wait_until_finished()
            processes.barrier()
            return type(error), manager.all_steps()

    if on_error == "raise":
        assert play(2, program) == [(PruneError, [4])] * 2
    else:
        with pytest.warns(UserWarning, match="deleting stopped") as caught:
            assert play(2, program) == [(type(None), [4])] * 2
        assert sum("deleting stopped" in str(warning.message) for warning in caught) == 2
    assert sum(fired) == 1


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", [MemoryError, ZeroDivisionError, OSError])
def test_any_error_in_one_process_ends_the_save_in_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, kind: type[Exception]
) -> None:
    train(tmp_path, 1)
    real, fired = group_save.write_pack_part, []  # pyright: ignore[reportPrivateImportUsage]

    def write_share(storage: Any, state: Any, known: Any, share: Any, *rest: Any) -> Any:
        if share.process == victim and state.step == 2:
            fired.append(share.process)
            raise kind("no room for a part")
        return real(storage, state, known, share, *rest)

    monkeypatch.setattr(group_save, "write_pack_part", write_share)

    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            manager.save(2, state(2))
            error = raised(manager.wait_until_finished)
            manager.save(3, state(3))
            manager.wait_until_finished()
            processes.barrier()
            return type(error), f"process {victim}" in str(error), manager.all_steps()

    assert play(2, program) == [(SaveError, True, [1, 3])] * 2
    assert fired == [victim]
    assert verify_run(Run(tmp_path)).ok


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("kind", [MemoryError, KeyboardInterrupt, UnsupportedLeafError])
def test_a_snapshot_that_fails_in_one_process_ends_the_save_in_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, kind: type[BaseException]
) -> None:
    train(tmp_path, 1, count=3)
    real, fired = saver_module.snapshot, []  # pyright: ignore[reportPrivateImportUsage]

    def snapshot(value: Any, arena: Any, *rest: Any) -> Any:
        if value.state.get("victim") == victim:
            fired.append(victim)
            raise kind("no room for a snapshot")
        return real(value, arena, *rest)

    monkeypatch.setattr(saver_module, "snapshot", snapshot)

    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            mine = {**state(2), "victim": processes.index}
            error = raised(lambda: (manager.save(2, mine), manager.wait_until_finished()))
            manager.save(3, state(3))
            manager.wait_until_finished()
            processes.barrier()
            return type(error), manager.all_steps()

    others_error = kind if kind is UnsupportedLeafError else SaveError
    outcomes = play(3, program)
    victim_error = KeyboardInterrupt if kind is KeyboardInterrupt else others_error
    assert outcomes == [(victim_error if n == victim else others_error, [1, 3]) for n in range(3)]
    assert fired == [victim]


def test_a_snapshot_that_fails_costs_no_later_save_of_a_program_that_does_not_wait(
    tmp_path: Path,
) -> None:
    class Member:
        def __init__(self) -> None:
            self.fails = False

        def state_dict(self) -> dict[str, int]:
            if self.fails:
                raise OSError("not now")
            return {"x": 1}

        def load_state_dict(self, state: Any) -> None: ...

    def program(processes: Pretend) -> Any:
        errors, member = [], Member()
        with CheckpointManager(tmp_path, processes=processes) as manager:
            for step in range(1, 6):
                member.fails = step == 2 and not processes.is_chief
                errors.append(raised(partial(manager.save, step, {"member": member})))
            manager.wait_until_finished()
            processes.barrier()
            return manager.all_steps(), [type(error) for error in errors].count(StateError)

    assert play(2, program) == [([1, 3, 4, 5], 1)] * 2


def test_an_invalid_metric_in_one_process_raises_in_all(tmp_path: Path) -> None:
    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            loss: Any = "low" if processes.index else 0.5
            error = raised(
                lambda: (manager.save(1, state(1), {"loss": loss}), manager.wait_until_finished())
            )
            manager.save(2, state(2))
            manager.wait_until_finished()
            processes.barrier()
            return type(error), manager.all_steps()

    assert play(2, program) == [(ArgumentError, [2])] * 2


def test_on_error_continue_means_the_same_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, fired = saver_module.snapshot, []  # pyright: ignore[reportPrivateImportUsage]

    def snapshot(value: Any, arena: Any, *rest: Any) -> Any:
        if value.state.get("victim") == 1:
            fired.append(1)
            raise MemoryError
        return real(value, arena, *rest)

    monkeypatch.setattr(saver_module, "snapshot", snapshot)

    def program(processes: Pretend) -> list[int]:
        options = ManagerOptions(on_error="continue")
        with CheckpointManager(tmp_path, processes=processes, options=options) as manager:
            manager.save(1, {**state(1), "victim": processes.index})
            manager.save(2, state(2))
            manager.wait_until_finished()
            processes.barrier()
            return manager.all_steps()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert play(2, program) == [[2], [2]]
    assert fired == [1]
    assert sum("MemoryError" in str(warning.message) for warning in caught) == 2


def test_processes_that_save_different_steps_raise(tmp_path: Path) -> None:
    def program(processes: Pretend) -> None:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            manager.save(1 + processes.index, state(1))

    errors = play(2, program)
    assert [type(error) for error in errors] == [StateError] * 2
    assert all("process 0: 1, process 1: 2" in str(error) for error in errors)
    assert Run(tmp_path, create=True).steps() == []


def flip(data: memoryview) -> None:
    data[100] ^= 1


class Blind(LocalStorage):
    """A host whose cache holds damaged bytes of the packs that `packs` names."""

    def __init__(self, root: Path, *packs: str) -> None:
        super().__init__(root)
        self.packs = packs
        self.fired = 0

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        got = super().read_into(name, offset, target)
        if any(pack in name for pack in self.packs) and len(target) > 100:
            flip(target)
            self.fired += 1
        return got


@pytest.mark.parametrize("victim", [1, 2])
def test_damage_that_one_follower_reads_makes_all_restore_an_older_checkpoint(
    tmp_path: Path, victim: int
) -> None:
    train(tmp_path, 1, 2, 3, count=3)
    fired = []

    def program(processes: Pretend) -> Any:
        packs = ("000000000003-", "000000000002-") if processes.index == victim else ()
        storage = Blind(tmp_path, *packs)
        with CheckpointManager(storage, processes=processes) as manager:
            restored, step = manager.restore_or_initialize(state(0))
            fired.append(storage.fired)
            errors = [raised(lambda: manager.restore(3)), raised(lambda: manager.restore(2))]
            return step, restored["step"], [isinstance(error, CorruptionError) for error in errors]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcomes = play(3, program)
    texts = [str(warning.message) for warning in caught]
    assert [text.count("stays where it is") for text in texts] == [1, 1], (
        "steps 3 and 2, by the chief"
    )
    assert all(f"process {victim}" in text for text in texts)
    assert outcomes == [(1, 1, [True, True])] * 3
    assert sum(1 for count in fired if count) == 1
    assert Run(tmp_path).steps() == [1, 2, 3], "process 0 can read them"


def test_a_follower_that_can_read_nothing_raises_in_all(tmp_path: Path) -> None:
    train(tmp_path, 1, 2)

    def program(processes: Pretend) -> Any:
        storage = Blind(tmp_path, "0000") if processes.index else LocalStorage(tmp_path)
        with CheckpointManager(storage, processes=processes) as manager:
            manager.restore_or_initialize(state(0))

    errors = play(2, program)
    assert [type(error) for error in errors] == [NoGoodCheckpointError] * 2
    assert all("found 2 damaged" in str(error) for error in errors)


def test_damage_that_the_chief_reads_is_set_aside(tmp_path: Path) -> None:
    train(tmp_path, 1, 2)
    for pack in (tmp_path / "packs").glob("000000000002-*"):
        data = bytearray(pack.read_bytes())
        flip(memoryview(data))
        pack.write_bytes(data)

    def program(processes: Pretend) -> int:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            restored = manager.restore_or_initialize(state(0)).step
            manager.save(2, state(2))
            return restored

    with pytest.warns(UserWarning, match="step 2 is damaged and was skipped; step 1"):
        assert play(2, program) == [1, 1]
    assert Run(tmp_path).steps() == [1, 2]
    assert any(name.endswith(".json") for name in Run(tmp_path).quarantined())


@pytest.mark.parametrize("victim", [0, 1])
def test_a_restore_that_fails_in_one_process_fails_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    train(tmp_path, 1)
    real, fired = Run.load, []

    def program(kind: type[BaseException]) -> Callable[[Pretend], Any]:
        def member(processes: Pretend) -> Any:
            local = threading.current_thread()
            if processes.index == victim:
                broken[local] = kind
            with CheckpointManager(tmp_path, processes=processes) as manager:
                error = raised(lambda: manager.restore(1, state(0)))
                broken.pop(local, None)
                restored = manager.restore(1, state(0))
                return type(error), restored.state["step"]

        return member

    broken: dict[threading.Thread, type[BaseException]] = {}

    def load_checkpoint(self: Run, step: int, wanted: Any = None) -> Any:
        kind = broken.get(threading.current_thread())
        if kind is not None:
            fired.append(kind)
            raise kind("no luck")
        return real(self, step, wanted)

    monkeypatch.setattr(Run, "load", load_checkpoint)
    for kind in (MemoryError, OSError, StoreError, KeyboardInterrupt):
        outcomes = play(2, program(kind))
        expected = [kind, kind]
        if kind is KeyboardInterrupt:
            expected[1 - victim] = StoreError
        assert outcomes == [(error, 1) for error in expected]
    assert fired == [MemoryError, OSError, StoreError, KeyboardInterrupt]


def test_a_template_or_an_init_function_that_fails_in_one_process_fails_in_all(
    tmp_path: Path,
) -> None:
    train(tmp_path, 1)

    def program(processes: Pretend) -> Any:
        def init() -> Any:
            if processes.index == 1:
                raise ZeroDivisionError("in the function of the user")
            return state(0)

        with CheckpointManager(tmp_path, processes=processes) as manager:
            like = {**state(0), "new": 1} if processes.index else state(0)
            errors = [
                raised(lambda: manager.restore(like=like)),
                raised(lambda: manager.restore_or_initialize(init)),
            ]
            return [*map(type, errors), manager.restore_or_initialize(state(0)).step]

    assert play(2, program) == [[MismatchError, ZeroDivisionError, 1]] * 2


def test_a_recipe_that_one_process_does_not_allow_is_refused_by_all(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, recipe={"lr": 1}) as manager:
        manager.save(1, state(1))

    def program(processes: Pretend) -> Any:
        allow = () if processes.index else ("lr",)
        manager = CheckpointManager(tmp_path, recipe={"lr": 2}, allow=allow, processes=processes)
        with manager:
            return type(raised(lambda: manager.restore(like=state(0))))

    with pytest.warns(UserWarning, match="lr"):
        assert play(2, program) == [RecipeMismatchError] * 2


def test_a_claim_that_fails_fails_in_all(tmp_path: Path) -> None:
    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            return type(raised(manager.claim))

    with CheckpointManager(tmp_path) as other:
        other.claim()
        assert play(2, program) == [LockedError] * 2


def test_a_partial_restore_works_in_all_processes(tmp_path: Path) -> None:
    train(tmp_path, 1)

    def program(processes: Pretend) -> Any:
        with CheckpointManager(tmp_path, processes=processes) as manager:
            like = Checkpoint(**state(9))
            restored, step = manager.restore(like=like, leaves="small")
            return restored.small.tolist(), restored.step, step

    assert play(2, program) == [([1.0] * 10, 9, 1)] * 2
    assert load_checkpoint(tmp_path, leaves="step") == {"step": 1}


def test_a_save_into_a_directory_that_is_not_shared_is_not_committed(
    tmp_path: Path,
) -> None:
    """Two hosts where one path leads to the local disk of each."""

    def program(processes: Pretend) -> tuple[BaseException | None, list[int]]:
        directory = tmp_path / str(processes.index) / "run"
        with CheckpointManager(directory, processes=processes) as manager:
            manager.save(1, state(1))
            error = raised(manager.wait_until_finished)
            return error, manager.all_steps()

    for error, steps in play(2, program):
        assert isinstance(error, SaveError)
        assert "one shared directory" in str(error)
        assert steps == []


def test_a_save_that_finds_its_chunks_in_an_unshared_directory_is_not_committed(
    tmp_path: Path,
) -> None:
    for name in ("0", "1"):
        with CheckpointManager(tmp_path / name / "run") as manager:
            manager.save(1, state(1))

    def program(processes: Pretend) -> tuple[BaseException | None, list[int]]:
        directory = tmp_path / str(processes.index) / "run"
        with CheckpointManager(directory, processes=processes) as manager:
            manager.save(2, {**state(1), "step": 2})
            error = raised(manager.wait_until_finished)
            return error, manager.all_steps()

    for error, steps in play(2, program):
        assert isinstance(error, SaveError)
        assert steps == [1]


def test_two_unshared_directories_with_different_bits_are_not_restored(tmp_path: Path) -> None:
    for name, value in (("0", 7), ("1", 8)):
        with CheckpointManager(tmp_path / name) as manager:
            manager.save(1, state(value))

    def program(processes: Pretend) -> Any:
        directory = tmp_path / str(processes.index)
        with CheckpointManager(directory, processes=processes) as manager:
            return manager.restore(like=state(0)).state["step"]

    for answer in play(2, program):
        assert isinstance(answer, StoreError)
        assert "one shared directory" in str(answer)
