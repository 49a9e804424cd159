"""A run directory against a plain dict: saves, deletes, quarantine, crashes and damage in any order.

The oracle reads the bytes of manifests and packs itself, and knows no more of the store than
docs/FORMAT.md says.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import pytest
from helpers import Crash, Operations, contents, make_leaves, repeated
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from object_stores import ObjectServer
from perdure.checkpoint.restorer import load_good
from perdure.errors import CorruptionError, HistoryError, StepNotFoundError
from perdure.store import Leaf, LocalStorage, MemoryStorage, Run, Storage, verify_run

AHEAD = st.integers(-3, 3)
SEEDS = st.integers(0, 5)
SIZES = (700, 40, 0)

State = dict[str, tuple[str, tuple[int, ...], bytes]]


def state_of(seed: int) -> dict[str, Leaf]:
    """States that share leaves: one is frozen, and pairs of seeds share another.

    A codec compresses the two shared leaves and not the others.
    """
    return {
        **repeated({"frozen": make_leaves(99, (300,))["model/layer0"]}, 14),
        **repeated({"half": make_leaves(100 + seed // 2, (300,))["model/layer0"]}, 14),
        **make_leaves(seed, SIZES),
    }


class Machine(RuleBasedStateMachine):
    """The rules for every storage. A subclass gives its place and access to its bytes."""

    seen: ClassVar[Counter[str]] = Counter()
    """How often a fault took effect."""

    def __init__(self) -> None:
        super().__init__()
        self.place = self.make()
        self.model: dict[int, State] = {}
        # Checkpoints that rollbacks set aside, in that order, each with its predecessor.
        self.aside: list[tuple[tuple[int, State], tuple[int, State]]] = []
        self.undo: tuple[str, bytes, bytes] | None = None
        self.codec: str | None = None
        self.run = self.opened()
        self.run.begin_writing()

    def make(self) -> Any:
        """A new, empty place."""
        raise NotImplementedError

    def storage(self, before: Operations | None = None) -> Storage:
        raise NotImplementedError

    def raw(self) -> dict[str, bytes]:
        """Every object, by name."""
        raise NotImplementedError

    def get_raw(self, name: str) -> bytes | None:
        """One object, or None."""
        return self.raw().get(name)

    def set_raw(self, name: str, data: bytes) -> None:
        raise NotImplementedError

    def opened(self, before: Operations | None = None) -> Run:
        storage = self.storage(before)
        return Run(storage, create=True, codec=self.codec, clock=lambda: 0.0)

    # ------------------------------------------------------------ rules

    @rule(ahead=AHEAD, seed=SEEDS)
    def save(self, ahead: int, seed: int) -> None:
        leaves = state_of(seed)
        step = self.step(ahead)
        damaged = self.damaged()
        if self.is_refused(step, contents(leaves), damaged):
            with pytest.raises(HistoryError, match=r"one line of steps|Save once per step"):
                self.run.save(step, leaves)
            self.seen["refused"] += 1
            return
        if not self.model:
            self.run.session.starts_over = True  # what was there may all be set aside
        try:
            self.seen["encoded"] += self.run.save(step, leaves).is_encoded
        except HistoryError:
            # Either only its pack is damaged, and the manifest still says what was saved; or its
            # manifest is damaged and newer checkpoints exist.
            assert step in damaged
            return
        self.model[step] = contents(leaves)

    def step(self, ahead: int) -> int:
        """A step below, at or above the newest one."""
        return max(0, max(self.model, default=0) + ahead)

    def is_refused(self, step: int, state: State, damaged: set[int]) -> bool:
        if step not in self.model:
            return step < max(self.model, default=0)
        return step not in damaged and self.model[step] != state

    @precondition(lambda self: self.model and self.undo is None)
    @rule(data=st.data(), at_once=st.booleans())
    def rollback(self, data: st.DataObject, at_once: bool) -> None:
        """`at_once`: it is undone before anything else can forbid that."""
        step = data.draw(st.sampled_from(sorted(self.model)))
        newer = [other for other in sorted(self.model) if other > step]
        assert self.run.rollback(step) == newer
        self.put_aside(step)
        if at_once:
            self.bring_back()

    def put_aside(self, step: int) -> None:
        """Apply a rollback to `step` to the model."""
        for before, after in itertools.pairwise(sorted(self.model.items())):
            if after[0] > step:
                self.aside.append((before, after))
                del self.model[after[0]]
                self.seen["rolled back"] += 1

    @precondition(lambda self: self.undo is None)
    @rule()
    def undo_a_rollback(self) -> None:
        self.bring_back()

    def bring_back(self) -> None:
        newest = max(self.model.items(), key=lambda checkpoint: checkpoint[0], default=None)
        line = []
        while followers := [checkpoint for checkpoint in self.aside if checkpoint[0] == newest]:
            line.append(followers[-1])
            newest = followers[-1][1]
        if not line and self.aside:
            with pytest.raises(HistoryError, match="nothing was brought back"):
                self.run.undo_rollback()
            return
        assert self.run.undo_rollback() == [after[0] for _, after in line]
        self.seen["undone"] += len(line)
        for checkpoint in line:
            # The last checkpoint that is equal to it.
            del self.aside[len(self.aside) - 1 - self.aside[::-1].index(checkpoint)]
            self.model.update([checkpoint[1]])

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        assert self.run.delete([step]) == [step]
        del self.model[step]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def quarantine(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        before = self.raw()[f"checkpoints/{step:012d}.json"]
        moved = self.run.quarantine(step, "a reason")
        assert self.raw()[moved] == before
        del self.model[step]

    @rule(codec=st.sampled_from([None, "shuffle-zstd"]))
    def change_the_codec(self, codec: str | None) -> None:
        self.codec = codec
        self.reopen()

    def reopen(self) -> None:
        self.run.close()
        self.run = self.opened()

    @precondition(lambda self: self.undo is None)
    @rule(data=st.data())
    def flip_a_bit(self, data: st.DataObject) -> None:
        objects = {
            name: held
            for name, held in self.raw().items()
            if name.startswith(("packs/", "checkpoints/")) and not name.endswith(".tmp")
        }
        if not objects:
            return
        # Names of packs end at random: an order, and a range, that are the same in every execution.
        names = sorted(objects, key=lambda name: (name.rpartition("-")[0] or name, objects[name]))
        name = names[data.draw(st.integers(0, 1000)) % len(names)]
        bit = data.draw(st.integers(0, 10**6)) % (len(objects[name]) * 8)
        damaged = bytearray(objects[name])
        damaged[bit // 8] ^= 1 << bit % 8
        self.undo = name, objects[name], bytes(damaged)
        self.set_raw(name, bytes(damaged))
        self.reopen()

    @precondition(lambda self: self.undo is not None)
    @rule()
    def mend(self) -> None:
        assert self.undo is not None
        if self.is_damaged():
            self.set_raw(*self.undo[:2])
        self.undo = None
        self.reopen()

    # ------------------------------------------------------------ invariants

    @invariant()
    def every_checkpoint_loads_as_it_was_saved(self) -> None:
        reader = self.opened()
        assert reader.steps() == sorted(self.model)
        damaged = self.damaged()
        for step, expected in self.model.items():
            try:
                loaded = contents(reader.load(step).leaves)
            except CorruptionError:
                assert step in damaged, f"step {step} is whole and was not read"
                self.seen["damage"] += 1
            else:
                assert loaded == expected
                assert step not in damaged, f"step {step} is damaged and was read"

    @invariant()
    def the_newest_whole_one_is_restored(self) -> None:
        whole = set(self.model) - self.damaged()
        with contextlib.suppress(CorruptionError):
            loaded = load_good(self.opened()).loaded
            assert (loaded.manifest.step if loaded else None) == max(whole, default=None)
            return
        assert self.model
        assert not whole

    @invariant()
    def the_checker_is_content_unless_something_is_damaged(self) -> None:
        report = verify_run(self.opened())
        is_any_aside = any(re.match(r"quarantine/.*\.json$", name) for name in self.raw())
        is_lost = is_any_aside and not self.model
        assert report.ok is not (self.is_damaged() or is_lost), report.problems
        assert set(self.model) - set(report.good) >= self.damaged()

    @invariant()
    def what_is_missing_is_not_found(self) -> None:
        with pytest.raises(StepNotFoundError):
            self.opened().load(999)

    # ------------------------------------------------------------ the oracle

    def damaged(self) -> set[int]:
        """Damaged steps, as the bytes alone show."""
        if self.undo is None or not self.is_damaged():
            return set()
        name, good, _ = self.undo
        objects = self.raw()
        flipped = next(
            i for i, (a, b) in enumerate(zip(good, objects[name], strict=True)) if a != b
        )
        steps = set()
        for step in self.model:
            manifest = f"checkpoints/{step:012d}.json"
            if manifest == name:
                steps.add(step)
                continue
            document = json.loads(objects[manifest])
            for leaf in document["leaves"]:
                for _, pack, offset, length in leaf.get("chunks", ()):
                    if f"packs/{document['packs'][pack]['name']}" == name and (
                        offset <= flipped < offset + length
                    ):
                        steps.add(step)
        return steps

    def is_damaged(self) -> bool:
        """Whether the flipped bit is still there: not repaired, deleted, replaced or moved away."""
        return self.undo is not None and self.get_raw(self.undo[0]) == self.undo[2]

    def teardown(self) -> None:
        self.run.close()


class LocalMachine(Machine):
    """A run on a disk, with crashes before any operation of a save, delete or rollback."""

    def make(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="perdure-machine-"))

    def storage(self, before: Operations | None = None) -> Storage:
        return LocalStorage(self.place) if before is None else LocalStorage(self.place, before)

    def raw(self) -> dict[str, bytes]:
        files = (path for path in self.place.rglob("*") if path.is_file())
        return {str(path.relative_to(self.place)): path.read_bytes() for path in files}

    def set_raw(self, name: str, data: bytes) -> None:
        (self.place / name).write_bytes(data)

    @precondition(lambda self: self.undo is None)
    @rule(ahead=AHEAD, seed=SEEDS, operation=st.integers(0, 16))
    def crash_in_a_save(self, ahead: int, seed: int, operation: int) -> None:
        leaves = state_of(seed)
        step = self.step(ahead)
        with contextlib.suppress(HistoryError):
            if (
                self.crashed(
                    operation,
                    lambda run: (setattr(run.session, "starts_over", True), run.save(step, leaves)),
                )
                and step not in self.model
            ):
                if step not in Run(self.place).steps():
                    return
            elif step in self.model:
                return
            self.model[step] = contents(leaves)

    @precondition(lambda self: self.undo is None and self.model)
    @rule(data=st.data(), operation=st.integers(0, 8))
    def crash_in_a_delete(self, data: st.DataObject, operation: int) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        if not self.crashed(operation, lambda run: run.delete([step])) or (
            step not in Run(self.place).steps()
        ):
            del self.model[step]

    @precondition(lambda self: self.undo is None and self.model)
    @rule(data=st.data(), operation=st.integers(0, 20))
    def crash_in_a_rollback(self, data: st.DataObject, operation: int) -> None:
        step = data.draw(st.sampled_from(sorted(self.model)))
        if self.crashed(operation, lambda run: run.rollback(step)):
            assert set(Run(self.place).steps()) >= {
                operation for operation in self.model if operation <= step
            }
            self.run.rollback(step)
        self.put_aside(step)

    def crashed(self, operation: int, action: Any) -> bool:
        """Whether `action` crashed before its operation number `operation`; opens the run again."""
        self.run.close()
        operations = Operations(crash_at=operation)
        dying = self.opened(operations)
        try:
            action(dying)
        except Crash:
            assert operations.fired
            self.seen["crash"] += 1
            return True
        finally:
            operations.crash_at = None
            dying.close()
            self.run = self.opened()
        return False

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.place)


class MemoryMachine(Machine):
    """A run in memory."""

    def make(self) -> MemoryStorage:
        return MemoryStorage()

    def storage(self, before: Operations | None = None) -> Storage:
        return self.place

    def raw(self) -> dict[str, bytes]:
        return dict(self.place.objects)

    def set_raw(self, name: str, data: bytes) -> None:
        self.place.objects[name] = data


def on_s3(server: ObjectServer) -> type[Machine]:
    """The rules for a run on an object store."""

    class S3Machine(Machine):
        def make(self) -> str:
            return server.new_url()

        def storage(self, before: Operations | None = None) -> Storage:
            return server.storage(self.place)

        def raw(self) -> dict[str, bytes]:
            names = server.names(self.place)
            return {name: server.read(self.place, name) or b"" for name in names}

        def get_raw(self, name: str) -> bytes | None:
            return server.read(self.place, name)

        def set_raw(self, name: str, data: bytes) -> None:
            server.write(self.place, name, data)

    return S3Machine


def explore(
    machine: type[Machine], examples: int, steps: int, phases: tuple[Phase, ...] = tuple(Phase)
) -> Counter[str]:
    """Run a machine; return the faults that took effect."""
    machine.seen = Counter()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            phases=phases,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    return machine.seen


def explore_until(machine: type[Machine], examples: int, steps: int, *wanted: str) -> Counter[str]:
    """Run a machine until everything `wanted` took effect, in up to 8 rounds of other lengths.

    Hypothesis leaves out whole rules in each example, and what it draws depends on the source code.
    """
    seen: Counter[str] = Counter()
    for more in range(8):
        seen += explore(machine, examples, steps + more)
        if all(seen[name] for name in wanted):
            break
    return seen


def test_a_disk_agrees_with_a_dict() -> None:
    wanted = ("crash", "damage", "encoded", "undone")
    seen = explore_until(LocalMachine, 20, 20, *wanted)
    assert min(seen[name] for name in wanted) > 0


def test_memory_agrees_with_a_dict() -> None:
    wanted = ("damage", "encoded", "refused", "undone")
    seen = explore_until(MemoryMachine, 60, 25, *wanted)
    assert min(seen[name] for name in wanted) > 0


def test_s3_agrees_with_a_dict(s3: ObjectServer) -> None:
    """Few examples: a request takes milliseconds. `make proof-store ARGS=walk` has 200 walks on S3."""
    assert explore_until(on_s3(s3), 3, 12, "damage")["damage"] > 0


def test_control_a_store_that_loses_a_pack_fails_the_machine() -> None:
    """A storage that deletes a pack on its own is found."""

    class Forgetful(MemoryMachine):
        def storage(self, before: Operations | None = None) -> Storage:
            for name in [name for name in self.place.objects if name.startswith("packs/")][1:]:
                del self.place.objects[name]
            return self.place

    with pytest.raises(AssertionError, match="is whole and was not read"):
        explore(Forgetful, 50, 20, (Phase.generate,))
