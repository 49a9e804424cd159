"""The actions of a writer that tests crash, kill and cut off from power, and what must survive each.

Shared by the tests and by `make proof-store`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers import (
    Crash,
    Operations,
    contents,
    local_leaves,
    make_leaves,
    repeated,
    run_on,
    sharing_states,
)

from perdure import Retention
from perdure.checkpoint.mirror import Mirror
from perdure.checkpoint.retention import (
    RecordedRetention,
    plan_prune,
    record_retention,
    recorded_retention,
)
from perdure.errors import NotARunError
from perdure.store import (
    Leaf,
    LocalStorage,
    MemoryStorage,
    PruneRequest,
    Run,
    VerifyReport,
    fork_run,
    repair,
    verify_run,
)
from perdure.store.copy import copy_checkpoint
from perdure.store.format import MAX_STEP, pack_step
from perdure.store.run_events import JournalEntry
from perdure.store.run_log import LOG_FILE, read_journal

SIZES = (3000, 40, 0)
RULES = RecordedRetention(2, Retention(keep_period=3))
LARGE = (9 * 1024 * 1024, 40)

States = dict[int, dict[str, Leaf]]


def plain() -> States:
    return {1: make_leaves(1, SIZES), 2: make_leaves(2, SIZES)}


@dataclass(frozen=True)
class Case:
    """An action on a run directory that holds `before`. The `kept` steps must survive a crash in it;
    those of `added` may exist afterwards."""

    act: Callable[[Run], object]
    kept: frozenset[int]
    before: Callable[[], States] = plain
    added: Callable[[], States] = dict
    damage: Callable[[Path], object] = Path.exists
    follow: Callable[[Run], object] = Run.steps
    """Called after the crash; must succeed."""
    codec: str | None = None
    local: bool = False
    elsewhere: Callable[[Path, Case], None] = lambda *_: None
    """Checks another directory that the case writes, beside the run directory."""
    was_damaged: bool = False


def collect(run: Run, steps: set[int]) -> None:
    run.execute(run.plan(PruneRequest(frozenset(steps), MAX_STEP, 0, everywhere=True)))


def damage(path: Path) -> None:
    """Flip a bit that only step 1 needs, in a pack that other steps need, and add an orphan pack."""
    pack = sorted((path / "packs").iterdir())[0]
    data = bytearray(pack.read_bytes())
    data[40_000] ^= 1
    pack.write_bytes(data)
    pack.with_name("000000000009-00000-00000000.pack").write_bytes(pack.read_bytes())


def beside(run: Run, name: str) -> LocalStorage:
    """Another directory, whose operations are recorded and crashed together with the run's."""
    storage = run.storage
    assert isinstance(storage, LocalStorage)
    return LocalStorage(f"{storage.where}-{name}", storage.step)


def copied(run: Run) -> None:
    source = run_on(MemoryStorage())
    source.save(3, sharing_states()[3])
    copy_checkpoint(source, 3, run)


def forked(run: Run) -> None:
    fork_run(run.storage, 4, beside(run, "fork"))


def assert_forked(path: Path, case: Case) -> None:
    """The fork is no run, empty or whole. It can be repeated, and its origin is unchanged."""
    fork = path.with_name(f"{path.name}-fork")
    try:
        steps = Run(fork).steps()
    except NotARunError:
        steps = []
    assert steps in ([], [4])
    for _ in range(2):
        assert fork_run(path, 4, fork).step == 4
        assert contents(Run(fork).load(4).leaves) == contents(case.before()[4])
        assert verify_run(Run(fork)).problems == ()
    with run_on(fork) as run:
        run.save(9, make_leaves(9))
        collect(run, {4})
        assert verify_run(run).good == (9,)
    assert verify_run(Run(path)).good == (1, 2, 3, 4)


def mirrored(run: Run) -> None:
    mirror = Mirror(run, beside(run, "mirror"), 1, Retention(), lambda: 0.0)
    try:
        mirror.catch_up()
    finally:
        mirror.close(0.0)


def assert_mirrored(path: Path, case: Case) -> None:
    """The mirror has no unreadable checkpoint, and the next run completes it."""
    place = path.with_name(f"{path.name}-mirror")
    try:
        for step in verify_run(Run(place)).good:
            assert contents(Run(place).load(step).leaves) == contents(case.before()[step])
        assert verify_run(Run(place)).ok
    except NotARunError:
        pass
    mirror = Mirror(Run(path), place, 1, Retention(), lambda: 0.0)
    mirror.catch_up()
    mirror.close(0.0)
    report = verify_run(Run(place))
    assert report.ok
    assert 2 in report.good
    assert Run(place).manifest(2).fingerprint == Run(path).manifest(2).fingerprint


def encoded() -> States:
    return {step: repeated(leaves) for step, leaves in sharing_states().items()}


def small(step: int) -> Callable[[], States]:
    return lambda: {step: make_leaves(step, SIZES)}


def rolled_back(path: Path) -> None:
    with run_on(path) as run:
        assert run.rollback(2) == [3, 4]


def all_back(run: Run) -> None:
    run.begin_writing()
    assert run.steps() in ([1, 2], [1, 2, 3, 4]), "an undo that a crash ended is finished"
    run.undo_rollback()
    assert run.steps() == [1, 2, 3, 4]


def gone_back(run: Run) -> None:
    """Repeat the rollback, undo it, and check the restored checkpoints."""
    assert run.steps() == [1, 2, 3, 4][: run.steps()[-1]], "no step in the middle is missing"
    run.begin_writing()
    assert run.steps() in ([1, 2], [1, 2, 3, 4]), "a rollback that a crash ended is finished"
    run.rollback(2)
    assert run.steps() == [1, 2]
    assert {checkpoint.manifest.step for checkpoint in run.rolled_back()} == {3, 4}
    run.save(2, sharing_states()[2])
    all_back(run)
    for step, leaves in sharing_states().items():
        assert contents(run.load(step).leaves) == contents(leaves)


def damaged_log(path: Path) -> None:
    """Rules, then a damaged line and good ones."""
    with run_on(path) as run:
        record_retention(run, RULES)
        with_lines(run)
    data = (path / LOG_FILE).read_bytes()
    (path / LOG_FILE).write_bytes(data.replace(b'5","attempt"', b'9","attempt"', 1))


def log_repaired(run: Run) -> None:
    """The rules were before the damage, and are never lost."""
    repair(run)
    assert recorded_retention(run) == RULES
    assert run.log.view.knows_rules


def with_lines(run: Run) -> None:
    for step in (5, 6, 7):
        run.log.append(JournalEntry(step=step, state=f"{step:032x}", attempt=1))


def lines_of(path: Path) -> None:
    with run_on(path) as run:
        run.begin_writing()
        with_lines(run)


def lines_back(run: Run) -> None:
    run.rollback(2)
    assert run.log.view.journal.steps_after(2) is None
    gone_back(run)
    assert [entry.step for entry in read_journal(run.storage)] == [5, 6, 7]


def rules_written(run: Run) -> None:
    run.begin_writing()
    assert recorded_retention(run) in (None, RULES)
    record_retention(run, RULES)
    assert recorded_retention(Run(run.storage)) == RULES


CASES = {
    "rules": Case(
        lambda run: record_retention(run, RULES), frozenset({1, 2}), follow=rules_written
    ),
    "rollback_lines": Case(
        lambda run: run.rollback(2),
        frozenset({1, 2}),
        before=sharing_states,
        damage=lines_of,
        follow=lines_back,
    ),
    "repair_log": Case(
        repair, frozenset({1, 2}), damage=damaged_log, follow=log_repaired, was_damaged=True
    ),
    "save": Case(lambda run: run.save(3, make_leaves(3, SIZES)), frozenset({1, 2}), added=small(3)),
    "save_large": Case(
        lambda run: run.save(3, make_leaves(3, LARGE)),
        frozenset({1, 2}),
        added=lambda: {3: make_leaves(3, LARGE)},
    ),
    "delete": Case(lambda run: run.delete([1]), frozenset({2})),
    "metrics": Case(
        lambda run: run.save(2, make_leaves(2, SIZES), metrics={"later": 1.0}), frozenset({1, 2})
    ),
    "quarantine": Case(lambda run: run.quarantine(2, "a reason"), frozenset({1})),
    "pin": Case(lambda run: run.pin(2), frozenset({1, 2})),
    "prune": Case(lambda run: collect(run, {2, 3}), frozenset({1, 4}), before=sharing_states),
    "compaction": Case(lambda run: collect(run, {1}), frozenset({2, 3, 4}), before=sharing_states),
    "save_encoded": Case(
        lambda run: run.save(3, repeated(make_leaves(3, SIZES))),
        frozenset({1, 2}),
        added=lambda: {3: repeated(make_leaves(3, SIZES))},
        codec="shuffle-zstd",
    ),
    "compaction_encoded": Case(
        lambda run: collect(run, {1}),
        frozenset({2, 3, 4}),
        before=encoded,
        codec="shuffle-zstd",
    ),
    "rollback": Case(
        lambda run: run.rollback(2), frozenset({1, 2}), before=sharing_states, follow=gone_back
    ),
    "undo": Case(
        all_back,
        frozenset({1, 2}),
        before=sharing_states,
        damage=rolled_back,
        follow=all_back,
    ),
    "prune_rolled_back": Case(
        lambda run: run.execute(plan_prune(run, None, Retention(), rolled_back=True).store),
        frozenset({1, 2}),
        before=sharing_states,
        damage=rolled_back,
    ),
    "save_local": Case(
        lambda run: run.save(3, make_leaves(3, SIZES), process_leaves=local_leaves(3)),
        frozenset({1, 2}),
        added=small(3),
        local=True,
    ),
    "local_again": Case(
        lambda run: run.save(2, make_leaves(2, SIZES), process_leaves=local_leaves(102)),
        frozenset({1, 2}),
        local=True,
    ),
    "compaction_local": Case(
        lambda run: collect(run, {1}), frozenset({2, 3, 4}), before=sharing_states, local=True
    ),
    "copy": Case(
        copied,
        frozenset({1, 2}),
        added=lambda: {3: sharing_states()[3]},
    ),
    "fork": Case(forked, frozenset({1, 2, 3, 4}), before=sharing_states, elsewhere=assert_forked),
    "mirror": Case(mirrored, frozenset({1, 2}), elsewhere=assert_mirrored),
    "repair": Case(
        repair, frozenset({2, 3, 4}), before=sharing_states, damage=damage, was_damaged=True
    ),
}


def prepared(path: Path, case: Case) -> Path:
    with run_on(path, codec=case.codec) as run:
        for step, leaves in case.before().items():
            run.save(step, leaves, process_leaves=local_leaves(step) if case.local else None)
    case.damage(path)
    return path


def operations_of(path: Path, case: Case) -> Operations:
    recorder = Operations()
    with run_on(path, recorder, case.codec) as run:
        case.act(run)
    return recorder


def left_over(report: VerifyReport) -> list[str]:
    """What a check names after a repair, but for packs later than the newest checkpoint: those of a
    save that was killed before its manifest stay until a later save."""
    newest = max(report.good, default=-1)
    names = (problem.name for problem in report.problems)
    return [name for name in names if pack_step(name.removeprefix("packs/")) <= newest]


def assert_whole(path: Path, case: Case) -> None:
    """Every kept checkpoint restores, a repair leaves no problem, and the run can save again."""
    case.elsewhere(path, case)
    states = {**case.before(), **case.added()}
    report = verify_run(Run(path))
    assert case.kept <= set(report.good)
    assert report.ok or case.was_damaged, report.problems
    for step in report.good:
        loaded = Run(path).load(step)
        assert contents(loaded.leaves) == contents(states[step])
        if case.local:
            known = [contents(local_leaves(seed)) for seed in (step, 100 + step)]
            assert contents(dict(loaded.process_leaves)) in known
    with run_on(path) as run:
        case.follow(run)
        repaired = repair(run).report
        assert case.kept <= set(repaired.good)
        assert [name for name in left_over(repaired) if not name.startswith("quarantine/")] == []
        collect(run, set())
        run.save(9, make_leaves(9))
        assert case.kept <= set(verify_run(run).good)
        assert verify_run(run).ok


def crashes(directory: Path, case: Case) -> Iterator[Path]:
    """For every operation of a case: the run directory after a crash before that operation."""
    total = len(operations_of(prepared(directory / "counted", case), case).done)
    for number in range(total):
        path = prepared(directory / f"crash{number}", case)
        crash = Operations(crash_at=number)
        run = run_on(path, crash, case.codec)
        with contextlib.suppress(Crash):
            case.act(run)
        run.close()
        assert crash.fired, "the crash never happened"
        yield path


def final(temporary: str) -> str:
    """The final name of a temporary file `NAME.tmp` or `NAME.<8 digits>.tmp`."""
    return re.sub(r"(\.[0-9a-f]{8})?\.tmp$", "", temporary)


def durable(operations: list[tuple[str, str]]) -> bool:
    """Whether only synced files get their names, and each directory whose names changed is synced
    before any other name changes."""
    synced: set[str] = set()
    unsynced: str | None = None
    line_waits = False  # for a sync of the log, before anything else changes
    for operation, path in operations:
        name = final(path)
        if path.endswith("/log.jsonl") and operation in ("write", "fsync"):
            line_waits = operation == "write"
        elif line_waits:
            return False
        elif operation == "fsync":
            synced.add(name)
        elif operation == "write":
            synced.discard(name)
        elif operation == "fsync_dir":
            unsynced = None if os.path.normpath(path) == unsynced else unsynced
        elif operation in ("link", "rename") or (operation == "unlink" and name == path):
            # A moved object was synced when it was written, before these operations.
            written = any(
                done == "open" and target != path and final(target) == path
                for done, target in operations
            )
            if unsynced is not None or (written and operation != "unlink" and name not in synced):
                return False
            unsynced = os.path.dirname(path)
    return unsynced is None and not line_waits
