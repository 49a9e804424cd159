"""A crash ahead of every operation: what was committed stays, the rest is whole or absent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import Crash, Operations, contents, make_leaves, run_on, sharing_states

from perdure.store import Leaf, Request, Run, check, repair
from perdure.store.format import MAX_STEP

SIZES = (3000, 40, 0)
LARGE = (9 * 1024 * 1024, 40)

States = dict[int, dict[str, Leaf]]


def plain() -> States:
    return {1: make_leaves(1, SIZES), 2: make_leaves(2, SIZES)}


@dataclass(frozen=True)
class Case:
    """Something done to a run directory that holds `before`; `kept` steps must survive it, and those
    of `added` may be there afterwards."""

    act: Callable[[Run], object]
    kept: frozenset[int]
    before: Callable[[], States] = plain
    added: Callable[[], States] = dict
    damage: Callable[[Path], object] = Path.exists


def collect(run: Run, steps: set[int]) -> None:
    run.execute(run.plan(Request(frozenset(steps), MAX_STEP, 0, everywhere=True)))


def damage(path: Path) -> None:
    """A bit of what only step 1 needs, in a pack that the others need too; and an orphan."""
    pack = sorted((path / "packs").iterdir())[0]
    data = bytearray(pack.read_bytes())
    data[40_000] ^= 1
    pack.write_bytes(data)
    pack.with_name("000000000009-00000-00000000.pack").write_bytes(pack.read_bytes())


def small(step: int) -> Callable[[], States]:
    return lambda: {step: make_leaves(step, SIZES)}


CASES = {
    "save": Case(lambda run: run.save(3, make_leaves(3, SIZES)), frozenset({1, 2}), added=small(3)),
    "save_large": Case(
        lambda run: run.save(3, make_leaves(3, LARGE)),
        frozenset({1, 2}),
        added=lambda: {3: make_leaves(3, LARGE)},
    ),
    "delete": Case(lambda run: run.delete([1]), frozenset({2})),
    "quarantine": Case(lambda run: run.quarantine(2, "a reason"), frozenset({1})),
    "pin": Case(lambda run: run.pin(2), frozenset({1, 2})),
    "prune": Case(lambda run: collect(run, {2, 3}), frozenset({1, 4}), before=sharing_states),
    "compaction": Case(lambda run: collect(run, {1}), frozenset({2, 3, 4}), before=sharing_states),
    "repair": Case(
        lambda run: repair(run), frozenset({2, 3, 4}), before=sharing_states, damage=damage
    ),
}


def prepared(path: Path, case: Case) -> Path:
    with run_on(path) as run:
        for step, leaves in case.before().items():
            run.save(step, leaves)
    case.damage(path)
    return path


def operations_of(path: Path, case: Case) -> Operations:
    recorder = Operations()
    with run_on(path, recorder) as run:
        case.act(run)
    return recorder


def assert_whole(path: Path, case: Case) -> None:
    """Every checkpoint that stays restores; a repair leaves nothing to report; saving goes on."""
    states = {**case.before(), **case.added()}
    report = check(Run(path))
    assert case.kept <= set(report.good)
    assert report.ok or case.act is CASES["repair"].act, report.problems
    for step in report.good:
        assert contents(Run(path).load(step).leaves) == contents(states[step])
    with run_on(path) as run:
        repaired = repair(run).report
        assert case.kept <= set(repaired.good)
        assert [p for p in repaired.problems if not p.name.startswith("quarantine/")] == []
        collect(run, set())
        run.save(9, make_leaves(9))
        assert case.kept <= set(check(run).good)
        assert check(run).ok


@pytest.mark.parametrize("name", CASES)
def test_a_crash_at_any_operation_loses_nothing_that_was_committed(
    tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    total = len(operations_of(prepared(tmp_path / "counted", case), case).done)
    assert total >= 2
    for number in range(total):
        path = prepared(tmp_path / f"crash{number}", case)
        crash = Operations(crash_at=number)
        run = run_on(path, crash)
        with pytest.raises(Crash):
            case.act(run)
        run.close()
        assert crash.fired
        assert_whole(path, case)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import test_crash
from helpers import run_on

left = int(sys.argv[3])

def before(operation, path):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1

run = run_on(test_crash.Path(sys.argv[2]), before)
test_crash.CASES[sys.argv[4]].act(run)
"""


@pytest.mark.parametrize("name", ["prune", "compaction"])
def test_a_process_killed_at_any_operation_of_a_prune_loses_nothing(
    tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    total = len(operations_of(prepared(tmp_path / "counted", case), case).done)
    for number in range(total):
        path = prepared(tmp_path / f"kill{number}", case)
        arguments = [str(Path(__file__).parent), str(path), str(number), name]
        killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], env=os.environ)
        assert killed.returncode == -9
        assert_whole(path, case)


def durable(operations: list[tuple[str, str]]) -> bool:
    """Whether each name is given to a synced file, and a directory whose names changed is synced
    before any other name changes."""
    synced: set[str] = set()
    unsynced: str | None = None
    for operation, path in operations:
        name = path.removesuffix(".tmp")
        if operation == "fsync":
            synced.add(name)
        elif operation == "write":
            synced.discard(name)
        elif operation == "fsync_dir":
            unsynced = None if os.path.normpath(path) == unsynced else unsynced
        elif operation in ("link", "rename") or (operation == "unlink" and name == path):
            # A moved object was synced when it was written, before these operations.
            written = any(done == "open" and at == path + ".tmp" for done, at in operations)
            if unsynced is not None or (written and operation != "unlink" and name not in synced):
                return False
            unsynced = os.path.dirname(path)
    return unsynced is None


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("left_out", ["nothing", "fsync", "fsync_dir"])
def test_the_order_is_durable_and_the_check_sees_a_sync_left_out(
    tmp_path: Path, name: str, left_out: str
) -> None:
    case = CASES[name]
    done = operations_of(prepared(tmp_path, case), case).paths
    kept = [entry for entry in done if entry[0] != left_out]
    if name in ("delete", "prune") and left_out == "fsync":
        assert kept == done, "deleting writes no file"
        return
    assert durable(kept) == (left_out == "nothing")
    assert (len(kept) < len(done)) == (left_out != "nothing")


def position(done: list[tuple[str, str]], operation: str, part: str, last: bool = False) -> int:
    found = [at for at, (op, path) in enumerate(done) if op == operation and part in path]
    return found[-1 if last else 0]


def test_the_pack_is_durable_before_the_manifest_can_be_seen(tmp_path: Path) -> None:
    done = operations_of(prepared(tmp_path, CASES["save"]), CASES["save"]).paths
    pack, manifest = position(done, "link", ".pack"), position(done, "link", ".json")
    assert pack < position(done, "fsync_dir", "packs") < manifest


def test_compaction_moves_first_then_names_then_deletes(tmp_path: Path) -> None:
    case = CASES["compaction"]
    done = operations_of(prepared(tmp_path, case), case).paths
    order = [
        position(done, "unlink", "000000000001.json"),
        position(done, "link", "packs/000000000004-"),
        position(done, "rename", "000000000002.json"),
        position(done, "rename", "000000000004.json"),
        position(done, "unlink", "packs/000000000001-"),
    ]
    assert order == sorted(order)


def test_the_crash_test_sees_a_pack_that_goes_before_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with the order turned round, a crash in the middle harms a checkpoint."""
    case = CASES["compaction"]
    path = prepared(tmp_path, case)

    def packs_first(storage, held, plan):
        for name in plan.compact:
            storage.delete("packs/" + name)
        raise Crash

    monkeypatch.setattr("perdure.store.run.execute_collect", packs_first)
    run = run_on(path)
    with pytest.raises(Crash):
        case.act(run)
    run.close()
    with pytest.raises(AssertionError):
        assert_whole(path, case)
