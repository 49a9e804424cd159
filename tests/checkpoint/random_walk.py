"""Random sequences of what users and machines do to one run directory.

Every walk checks after every act: a checkpoint that was reported as committed and was
not deleted on request is restored bit for bit. Shared by a test and by `make proof-store`.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Protocol

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "store"))

from helpers import Crash, Operations

from object_stores import ObjectServer
from perdure import CheckpointManager, ManagerOptions, MemoryStorage, Retention
from perdure.checkpoint.retention import plan_prune
from perdure.errors import CorruptionError, HistoryError, LockedError, PerdureError
from perdure.state import unflatten
from perdure.store import LocalStorage, Run, Storage, fork_run, repair, verify_run

ACTS = 24
"""Acts of one walk."""

State = dict[str, bytes]


def make_state(step: int, seed: int) -> dict[str, Any]:
    """A leaf that never changes, one that changes at times, and one that every step changes."""
    return {
        "frozen": np.random.default_rng(1).integers(0, 256, 3000, np.uint8),
        "model": {"slow": np.random.default_rng(seed // 3).normal(size=200)},
        "own": np.random.default_rng(1000 + seed).normal(size=(20, 7)).astype(np.float32),
        "step": step,
        "name": f"state {seed}",
    }


def bits(state: Any, path: str = "") -> State:
    """Every leaf as bytes with its dtype and shape."""
    if isinstance(state, dict):
        return {
            name: data
            for key, value in state.items()
            for name, data in bits(value, f"{path}/{key}").items()
        }
    if isinstance(state, np.ndarray):
        return {path: f"{state.dtype}{state.shape}".encode() + state.tobytes()}
    return {path: f"{type(state).__name__} {state!r}".encode()}


class Place(Protocol):
    """The storage of a run directory, with access to its bytes that bypasses the store.

    A crash happens before one of the first `crash_within` operations of an act.
    """

    crash_within: int

    def storage(self, before: Operations | None = None) -> Storage: ...
    def another(self) -> Place: ...
    def packs(self) -> dict[str, bytes]: ...
    def manifest(self, step: int) -> bytes: ...
    def write_pack(self, name: str, data: bytes) -> None: ...
    def log(self) -> list[bytes]: ...
    def write_log(self, lines: list[bytes]) -> None: ...


class Disk:
    crash_within = 24

    def __init__(self, root: Path, number: int = 0) -> None:
        self.root, self.path = root, root / f"run-{number}"
        self._number = number

    def storage(self, before: Operations | None = None) -> Storage:
        return LocalStorage(self.path) if before is None else LocalStorage(self.path, before)

    def another(self) -> Disk:
        taken = sum(1 for _ in self.root.iterdir())
        return Disk(self.root, taken + 1)

    def packs(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.path / "packs").glob("*.pack")}

    def manifest(self, step: int) -> bytes:
        return (self.path / f"checkpoints/{step:012d}.json").read_bytes()

    def write_pack(self, name: str, data: bytes) -> None:
        # Not through a hard link that a fork may share.
        path = self.path / "packs" / name
        path.unlink()
        path.write_bytes(data)

    def log(self) -> list[bytes]:
        return (self.path / "log.jsonl").read_bytes().splitlines(keepends=True)

    def write_log(self, lines: list[bytes]) -> None:
        (self.path / "log.jsonl").write_bytes(b"".join(lines))


class CrashingStorage:
    """A new storage object on the same place that calls `before` before each change."""

    def __init__(self, storage: Any, before: Operations) -> None:
        self._storage, self._before = storage, before

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._storage, name)
        if name not in ("create", "replace", "move", "delete"):
            return value

        def act(*arguments: Any) -> Any:
            self._before(name, arguments[0])
            result = value(*arguments)
            return _CrashingSink(result, self._before, arguments[0]) if name == "create" else result

        return act


class _CrashingSink:
    def __init__(self, sink: Any, before: Operations, name: str) -> None:
        self._sink, self._before, self._name = sink, before, name
        self.write, self.write_from = sink.write, sink.write_from

    def commit(self) -> None:
        self._before("commit", self._name)
        self._sink.commit()
        self._before("committed", self._name)

    def abort(self) -> None:
        if not self._before.fired:  # a killed process cleans nothing up
            self._sink.abort()


class Memory:
    crash_within = 8

    def __init__(self) -> None:
        self._objects = MemoryStorage()

    def storage(self, before: Operations | None = None) -> Any:
        return self._objects if before is None else CrashingStorage(self._objects, before)

    def another(self) -> Memory:
        return Memory()

    def packs(self) -> dict[str, bytes]:
        prefix = "packs/"
        names = [name for name in self._objects.objects if name.startswith(prefix)]
        return {name[len(prefix) :]: bytes(self._objects.objects[name]) for name in names}

    def manifest(self, step: int) -> bytes:
        return self._objects.objects[f"checkpoints/{step:012d}.json"]

    def write_pack(self, name: str, data: bytes) -> None:
        self._objects.objects[f"packs/{name}"] = data

    def log(self) -> list[bytes]:
        return [self._objects.read(name) for name in sorted(self._objects.list("log/"))]

    def write_log(self, lines: list[bytes]) -> None:
        for name in [*self._objects.list("log/")]:
            self._objects.delete(name)
        for number, line in enumerate(lines, 1):
            self._objects.replace(f"log/{number:012d}.json", line)


class Bucket:
    crash_within = 8

    def __init__(self, server: ObjectServer) -> None:
        self._server, self._url = server, server.new_url()

    def storage(self, before: Operations | None = None) -> Any:
        storage = self._server.storage(self._url)
        return storage if before is None else CrashingStorage(storage, before)

    def another(self) -> Bucket:
        return Bucket(self._server)

    def packs(self) -> dict[str, bytes]:
        names = [name for name in self._server.names(self._url) if name.startswith("packs/")]
        return {name[6:]: self._server.read(self._url, name) or b"" for name in names}

    def manifest(self, step: int) -> bytes:
        return self._server.read(self._url, f"checkpoints/{step:012d}.json") or b""

    def write_pack(self, name: str, data: bytes) -> None:
        self._server.write(self._url, f"packs/{name}", data)

    def log(self) -> list[bytes]:
        storage = self.storage()
        return [storage.read(name) for name in sorted(storage.list("log/"))]

    def write_log(self, lines: list[bytes]) -> None:
        storage = self.storage()
        for name in sorted(storage.list("log/")):
            storage.delete(name)
        for number, line in enumerate(lines, 1):
            self._server.write(self._url, f"log/{number:012d}.json", line)


class Walk:
    """One run directory and what must be in it."""

    def __init__(self, place: Place, seed: int) -> None:
        self.random = Random(seed)
        self.place = place
        self.keep = self.random.choice([None, None, 3])
        self.expected: dict[int, State] = {}
        self.pinned: set[int] = set()
        self.aside: list[tuple[int, State]] = []  # by rollbacks, in any line
        self.undo_gives: dict[int, State] = {}  # what an undo must restore at this moment
        # Pack, its bytes before the flip, offset, and whether a flipped bit was there before.
        self.damage: tuple[str, bytes, int, bool] | None = None
        self.skipped: set[int] = set()  # damaged steps that a restore skipped
        self.scarred = False  # a flipped bit may stay in bytes that no checkpoint of this run needs
        self.seen: Counter[str] = Counter()
        self.manager = self.open()

    # ------------------------------------------------------------ acts

    def act(self) -> None:
        acts: list[tuple[int, Callable[[], None]]] = [
            (8, self.save),
            (2, self.save_again),
            (2, self.save_into_the_past),
            (2, self.restore),
            (2, self.rollback),
            (6 if self.undo_gives else 0, self.undo_rollback),
            (1, self.fork),
            (2, self.prune),
            (1, self.delete),
            (1, self.pin_or_unpin),
            (1, self.copy_directory),
            (8, self.crash),
            (1, self.second_manager),
            (2, self.flip_a_bit),
            (1, self.put_the_bit_back),
            (1, self.damage_the_log),
            (1, self.repair),
            (1, self.reopen),
        ]
        weights = [weight for weight, _ in acts]
        [(_, act)] = self.random.choices(acts, weights)
        act()
        self.check_invariant(act.__name__)

    def save(self) -> None:
        step, state = self.new_state()
        metrics = {"loss": self.random.random()}
        try:
            self.manager.save(step, state, metrics, force=True)
            self.manager.wait_until_finished()
        except HistoryError:
            assert not self.expected, "a save was refused although there are checkpoints"
            self.manager.restore_or_initialize(state, start_over=True)
            self.manager.save(step, state, metrics, force=True)
            self.manager.wait_until_finished()
            self.seen["started over"] += 1
        self.committed(step, bits(state))
        self.seen["save"] += 1

    def save_again(self) -> None:
        """The newest step with the same bits: a success that changes nothing."""
        if self.expected and self.damage is None:
            step = max(self.expected)
            state = self.manager.restore(step).state
            self.manager.save(step, state, force=True)
            self.manager.wait_until_finished()
            if self.keep is not None:  # a step that was unpinned meanwhile is deleted now
                self.retain(self.keep)
            self.seen["saved again"] += 1

    def save_into_the_past(self) -> None:
        if not self.expected or self.damaged():
            return
        step = self.random.randint(max(0, min(self.expected) - 2), max(self.expected))
        state = make_state(step, self.random.randrange(10**6))
        try:
            self.manager.save(step, state, force=True)
            self.manager.wait_until_finished()
        except HistoryError:
            self.seen["refused"] += 1
            return
        raise AssertionError(f"step {step} was saved although {max(self.expected)} is committed")

    def restore(self) -> None:
        """Restore the newest good checkpoint. Newer, damaged ones may be set aside."""
        damaged = self.damaged()
        if not set(self.expected) - damaged:
            return
        with quiet():
            state, step = self.manager.restore()
        assert step == max(set(self.expected) - damaged), (step, damaged)
        assert bits(state) == self.expected[step]
        self.seen["restore"] += 1
        # They move to quarantine now, or when the manager becomes the writer.
        self.skipped |= {damaged_step for damaged_step in damaged if damaged_step > step}

    def rollback(self) -> None:
        candidates = sorted(set(self.expected) - self.damaged())
        if not candidates:
            return
        step = self.random.choice(candidates)
        newer = {other: state for other, state in self.expected.items() if other > step}
        if self.pinned & newer.keys():
            try:
                self.manager.rollback(step)
            except HistoryError:
                return
            raise AssertionError("a pinned step was rolled back")
        self.manager.rollback(step)
        if newer:
            self.undo_gives = newer
            self.aside += newer.items()
            self.expected = {
                other: state for other, state in self.expected.items() if other <= step
            }
            self.seen["rollback"] += 1

    def undo_rollback(self) -> None:
        if not self.undo_gives or self.damage is not None:
            return
        before = dict(self.expected)
        self.manager.close()
        with Run(self.place.storage()) as run:
            run.undo_rollback()
        self.reopen()
        self.expected = self.present()
        assert self.expected.items() >= {**before, **self.undo_gives}.items()
        self.undo_gives = {}
        self.seen["undone"] += 1

    def fork(self) -> None:
        candidates = sorted(set(self.expected) - self.damaged())
        if not candidates:
            return
        step, other = self.random.choice(candidates), self.place.another()
        fork_run(self.place.storage(), step, other.storage())
        with Run(other.storage()) as forked:
            assert forked.steps() == [step]
            # A hard-linked pack may contain damage in chunks that only other steps need.
            assert verify_run(forked).good == (step,)
        self.seen["fork"] += 1
        if self.random.random() < 0.5:
            with Run(other.storage()) as forked:
                forked.delete([step])  # and the origin is whole, as the invariant checks
        else:
            self.manager.close()
            self.place = other
            self.expected = {step: self.expected[step]}
            self.pinned, self.aside, self.undo_gives, self.damage = set(), [], {}, None
            self.manager = self.open()

    def prune(self) -> None:
        if not self.expected:
            return
        keep = self.random.randint(1, 4)
        self.manager.close()
        with Run(self.place.storage()) as run:
            run.begin_writing()  # first, as `perdure prune` does: it finishes what a crash left
            try:
                run.execute(plan_prune(run, keep, Retention()).store)
                is_done = True
            except CorruptionError:
                assert max(self.expected) in self.damaged()
                is_done = False
        if is_done:
            self.retain(keep)
        self.manager = self.open()
        self.seen["prune" if is_done else "prune refused"] += 1

    def delete(self) -> None:
        candidates = sorted(set(self.expected) - self.pinned - self.skipped)
        if len(candidates) > 1:
            step = self.random.choice(candidates)
            self.manager.delete(step)
            self.forget(step)
            self.undo_gives = {}
            self.seen["delete"] += 1

    def pin_or_unpin(self) -> None:
        candidates = sorted(set(self.expected) - self.damaged())
        if not candidates:
            return
        step = self.random.choice(candidates)
        if step in self.pinned:
            self.manager.unpin(step)
            self.pinned.remove(step)
        else:
            self.manager.pin(step)
            self.pinned.add(step)
        self.seen["pin"] += 1

    def copy_directory(self) -> None:
        """A copy by plain file operations while the manager is open reads like the original."""
        if not isinstance(self.place, Disk) or not self.expected:
            return
        copy = self.place.another()
        shutil.copytree(self.place.path, copy.path)
        pinned = set(self.pinned)
        self.second_manager()
        assert loadable(copy, self.expected) == set(self.expected) - self.damaged()
        if self.random.random() < 0.3:  # the original is lost, and the copy takes its place
            self.manager.close()
            self.place, self.pinned = copy, pinned
            self.manager = self.open()
        self.seen["copy"] += 1

    def second_manager(self) -> None:
        """While the first one is the writer, nobody else may change anything."""
        if not self.expected:
            return
        with contextlib.suppress(PerdureError):
            self.manager.pin(min(self.expected))  # which makes it the writer
            self.manager.unpin(min(self.expected))
            self.pinned.discard(min(self.expected))
        second = self.open()
        for change in (
            lambda: second.save(max(self.expected) + 1, make_state(0, 0), force=True),
            lambda: Run(self.place.storage()).delete([min(self.expected)]),
        ):
            try:
                change()
                second.wait_until_finished()
            except LockedError:
                self.seen["locked"] += 1
                continue
            raise AssertionError("a second writer changed the run directory")
        second.close()

    def flip_a_bit(self) -> None:
        packs = self.place.packs()
        if self.damage is not None or not packs:
            return
        name = self.random.choice(sorted(packs))
        data = bytearray(packs[name])
        offset = self.random.randrange(len(data))
        data[offset] ^= 1 << self.random.randrange(8)
        self.damage = name, packs[name], offset, self.scarred
        self.place.write_pack(name, bytes(data))
        self.scarred = True
        self.seen["damage"] += bool(self.damaged())

    def put_the_bit_back(self) -> None:
        if self.damage is not None and self.damage[0] in self.place.packs():
            name, good, _, self.scarred = self.damage
            if len(self.place.packs()[name]) == len(good):
                self.place.write_pack(name, good)
            else:
                self.scarred = True
            self.damage = None

    def damage_the_log(self) -> None:
        """Nothing is deleted, set aside or brought back then, and saves continue."""
        if not self.expected or self.damage is not None:
            return
        self.manager.close()
        good = self.place.log()
        self.place.write_log(self.harmed(good))
        with Run(self.place.storage()) as run:
            run.begin_writing()
            run.execute(plan_prune(run, 1, Retention()).store)
            for change in (
                lambda: run.delete([min(self.expected)]),
                lambda: run.rollback(min(self.expected)),
                run.undo_rollback,
            ):
                with contextlib.suppress(PerdureError):
                    assert not change(), "something moved on the word of a damaged log"
        self.manager = self.open()
        step, state = self.new_state()
        self.manager.save(step, state, force=True)
        self.manager.close()
        self.expected[step] = bits(state)
        assert self.present().keys() == self.expected.keys(), "deleted on the word of a damaged log"
        self.place.write_log(good)
        self.manager = self.open()
        self.undo_gives = {}
        self.seen["log"] += 1

    def harmed(self, lines: list[bytes]) -> list[bytes]:
        """A flipped bit, or missing lines, up to the line to which the newest checkpoint refers."""
        newest = msgspec.json.decode(self.place.manifest(max(self.expected)))
        count = newest["log"][0] if newest.get("log") else 1
        if self.random.random() < 0.5:
            return lines[: self.random.randrange(count)]
        number = self.random.randrange(count)
        line = bytearray(lines[number])
        line[self.random.randrange(len(line))] ^= 1 << self.random.randrange(8)
        return [*lines[:number], bytes(line), *lines[number + 1 :]]

    def repair(self) -> None:
        if not self.expected:
            return
        damaged = self.damaged()
        self.manager.close()
        with Run(self.place.storage()) as run:
            repair(run)
        for step in damaged - set(self.present()):
            self.forget(step)
        self.damage = None
        self.undo_gives = {}
        self.manager = self.open()
        self.seen["repair"] += bool(damaged)

    def reopen(self) -> None:
        self.manager.close()
        self.manager = self.open()

    def crash(self) -> None:
        """The process is killed before a random operation of a random action."""
        if self.damage is not None:
            return
        self.manager.close()
        before = Operations(crash_at=self.random.randrange(self.place.crash_within))
        kind = self.random.choice(["save", "save", "rollback", "undo", "prune", "delete", "repair"])
        must, may = dict(self.expected), dict(self.expected)
        manager = self.open(before)
        ended = False
        try:
            with quiet():
                must, may = self.crashing_act(kind, manager)
                ended = True
        except Crash:
            self.seen[f"crash in {kind}"] += 1
            must, may = self.survivors(kind)
        except HistoryError:
            ended = True  # nothing to undo, or a pinned step
        finally:
            before.crash_at = -1
            with contextlib.suppress(BaseException):
                manager._run.close()
        present = self.present(may)
        assert must.items() <= present.items(), (
            f"{kind}: lost {sorted(must.keys() - present.keys())}"
        )
        assert present.keys() <= may.keys(), (
            f"{kind}: unexpected {sorted(present.keys() - may.keys())}"
        )
        if not ended and kind in ("rollback", "undo"):
            with Run(self.place.storage(), create=True) as run:
                run.begin_writing()  # it finishes what the crash has left
            present = self.present(may)
            wholes = [
                self.expected.keys(),
                must.keys(),
                {**self.expected, **self.undo_gives}.keys(),
            ]
            assert (kind == "undo" and not self.undo_gives) or present.keys() in wholes, (
                f"{kind}: {sorted(present)} is half of the way, expected one of {wholes}"
            )
        for step in self.expected.keys() - present.keys():
            if kind == "rollback":
                self.aside.append((step, self.expected[step]))
        self.expected = present
        if not ended or kind != "repair":
            self.undo_gives = {}
        self.manager = self.open()

    def crashing_act(self, kind: str, manager: CheckpointManager) -> tuple[Any, Any]:
        """Do the action; the states that must and that may exist if it ends without a crash."""
        self.planned: Any = None
        if kind == "save":
            step, state = self.new_state()
            self.planned = step, bits(state)
            manager.save(step, state, force=True)
            manager.wait_until_finished()
            after = {**self.expected, step: bits(state)}
            kept = self.retained(after, self.keep)
            return kept, kept
        steps = sorted(self.expected)
        if not steps:
            return {}, {}
        run = manager._run
        if kind == "rollback":
            self.planned = self.random.choice(steps)
            run.rollback(self.planned)
            kept = {step: state for step, state in self.expected.items() if step <= self.planned}
            return kept, kept
        if kind == "undo":
            run.undo_rollback()
            return self.expected, {**self.expected, **dict(self.aside)}
        if kind == "prune":
            self.planned = self.random.randint(1, 4)
            run.begin_writing()
            run.execute(plan_prune(run, self.planned, Retention()).store)
            kept = self.retained(self.expected, self.planned)
            return kept, kept
        if kind == "delete":
            self.planned = self.random.choice(steps)
            if self.planned in self.pinned:
                return self.expected, self.expected
            run.delete([self.planned])
            kept = {step: state for step, state in self.expected.items() if step != self.planned}
            return kept, kept
        repair(run)
        return self.expected, self.expected

    def survivors(self, kind: str) -> tuple[dict[int, State], dict[int, State]]:
        """The states that must and that may exist after a crash in the middle of the action."""
        if kind == "save":
            step, state = self.planned
            may = {**self.expected, step: state}
            kept = self.retained(may, self.keep)
            return {other: kept[other] for other in kept if other != step}, may
        if kind == "rollback" and self.planned is not None:
            return {
                step: s for step, s in self.expected.items() if step <= self.planned
            }, self.expected
        if kind == "undo":
            return self.expected, {**self.expected, **dict(self.aside)}
        if kind == "prune" and self.planned is not None:
            return self.retained(self.expected, self.planned), self.expected
        if kind == "delete" and self.planned is not None:
            return {
                step: s for step, s in self.expected.items() if step != self.planned
            }, self.expected
        return self.expected, self.expected

    # ------------------------------------------------------------ what must be there

    def check_invariant(self, act: str) -> None:
        steps = self.without_skipped()
        damaged = self.damaged()
        assert steps == sorted(self.expected), f"{act}: steps {steps}, not {sorted(self.expected)}"
        good = loadable(self.place, self.expected)
        assert good == set(self.expected) - damaged, f"{act}: {good} load, {damaged} are damaged"

    def without_skipped(self) -> list[int]:
        """The steps that are there; damaged ones that the writer has set aside are expected no more."""
        steps = Run(self.place.storage(), create=True).steps()
        for step in self.skipped & self.expected.keys() - set(steps):
            self.forget(step)
        return steps

    def finish(self) -> None:
        self.manager.close()
        if not self.scarred and self.expected:
            report = verify_run(Run(self.place.storage()))
            assert report.ok, report.problems

    def open(self, before: Operations | None = None) -> CheckpointManager:
        options = ManagerOptions(clock=lambda: 0.0)
        return CheckpointManager(self.place.storage(before), max_to_keep=self.keep, options=options)

    def new_state(self) -> tuple[int, dict[str, Any]]:
        step = max(self.expected, default=0) + self.random.randint(1, 4)
        return step, make_state(step, self.random.randrange(10**6))

    def committed(self, step: int, state: State) -> None:
        self.expected[step] = state
        self.undo_gives = {}
        self.without_skipped()  # the writer sets them aside before it counts what to keep
        if self.keep is not None:
            self.retain(self.keep)

    def retained(self, states: dict[int, State], keep: int | None) -> dict[int, State]:
        newest = sorted(states)[-keep:] if keep else list(states)
        return {step: states[step] for step in states if step in newest or step in self.pinned}

    def retain(self, keep: int) -> None:
        kept = self.retained(self.expected, keep)
        if kept != self.expected:
            self.undo_gives = {}
        self.expected = kept

    def forget(self, step: int) -> None:
        del self.expected[step]  # a pin stays until `unpin`, also without its checkpoint

    def present(self, known: dict[int, State] | None = None) -> dict[int, State]:
        """The committed states by step. Each must have bits that were saved as that step."""
        run = Run(self.place.storage(), create=True)
        every = [*self.expected.items(), *self.aside, *(known or {}).items()]
        states: dict[int, State] = {}
        for step in run.steps():
            state = bits(unflatten(run.load(step).leaves))
            assert (step, state) in every, f"step {step} holds bits that were never saved as it"
            states[step] = state
        return states

    def damaged(self) -> set[int]:
        """Steps that need the flipped byte, by the manifests alone (docs/FORMAT.md)."""
        if self.damage is None:
            return set()
        name, good, offset, _ = self.damage
        if self.place.packs().get(name, good) == good:
            return set()
        steps = set()
        present = Run(self.place.storage(), create=True).steps()
        for step in self.expected.keys() & set(present):
            manifest = msgspec.json.decode(self.place.manifest(step))
            for leaf in [*manifest["leaves"], *manifest.get("local", ())]:
                for _, pack, start, length in leaf.get("chunks", ()):
                    if manifest["packs"][pack]["name"] == name and start <= offset < start + length:
                        steps.add(step)
        return steps


def loadable(place: Place, expected: dict[int, State]) -> set[int]:
    """The steps that a new reader restores with the bits that are expected."""
    run, good = Run(place.storage(), create=True), set()
    for step, state in expected.items():
        with contextlib.suppress(CorruptionError):
            assert bits(unflatten(run.load(step).leaves)) == state, f"step {step} has other bits"
            good.add(step)
    return good


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings about damage are expected here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def walk(place: Place, seed: int, acts: int = ACTS) -> Counter[str]:
    """Walk once; return how often each kind of act happened. Asserts the invariant after each."""
    life = Walk(place, seed)
    with quiet():
        for _ in range(acts):
            life.act()
        life.finish()
    return life.seen


def walk_on_disk(seed: int) -> Counter[str]:
    with tempfile.TemporaryDirectory(prefix="perdure-walk-") as name:
        return walk(Disk(Path(name)), seed)


def walk_in_memory(seed: int) -> Counter[str]:
    return walk(Memory(), seed)


def walk_in_bucket(server: ObjectServer, seed: int) -> Counter[str]:
    return walk(Bucket(server), seed)
