"""Kills of a run with a mirror at random operations, and what must hold after each of them.

Shared by the tests and by `make proof-store`. Everything runs in one thread, so that a seed gives the
same run every time: saves happen inside the operations of a copy, as those of another thread would.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from perdure import CheckpointManager, ManagerOptions, MemoryStorage
from perdure.errors import StoreError
from perdure.state import flatten
from perdure.state.per_rank import RankContext
from perdure.store import Run, verify_run
from perdure.store.copy import copy_checkpoint
from perdure.store.format import manifest_name
from perdure.store.manifest_json import encode_manifest
from perdure.store.storage import create_whole

SESSIONS = 6


class Killed(BaseException):
    """The process is killed. No `Exception`, so that no handler of the library cleans up."""


class Hook:
    """Called before every operation of every storage of the process."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.fired = 0
        self.then: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.left is not None:
            if self.left <= 0:
                self.fired += 1
                raise Killed
            self.left -= 1
        if self.then is not None:
            self.then()


class _Sink:
    def __init__(self, sink: Any, hook: Hook) -> None:
        self._sink, self._hook = sink, hook

    def write(self, data: memoryview) -> None:
        self._hook()
        self._sink.write(data)

    def commit(self) -> None:
        self._hook()
        self._sink.commit()

    def abort(self) -> None:
        self._sink.abort()


class Watched(MemoryStorage):
    """A storage in memory that calls a hook before each operation."""

    def __init__(self, name: str, hook: Hook) -> None:
        super().__init__()
        self.where, self._hook = f"memory:{name}", hook

    def create(self, name: str, size: int) -> Any:
        self._hook()
        return _Sink(super().create(name, size), self._hook)

    def replace(self, name: str, data: bytes) -> None:
        self._hook()
        super().replace(name, data)

    def read(self, name: str) -> bytes:
        self._hook()
        return super().read(name)

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        self._hook()
        part = super().read(name)[offset : offset + len(target)]
        target[: len(part)] = part
        return len(part)

    def size(self, name: str) -> int:
        self._hook()
        return len(super().read(name))

    def list(self, prefix: str) -> Iterator[str]:
        self._hook()
        return super().list(prefix)

    def move(self, name: str, target: str) -> None:
        self._hook()
        super().move(name, target)

    def delete(self, name: str) -> None:
        self._hook()
        super().delete(name)


def following(state: dict[str, Any], noise: int) -> dict[str, Any]:
    """The state after one more step. Machines that compute other bits get another state."""
    step = state["step"] + 1
    source = np.random.default_rng([int(state["w"][0]), step, noise])
    return {
        "frozen": state["frozen"],
        "w": source.integers(0, 2**31, 700, dtype=np.int64),
        "step": step,
    }


def fresh() -> dict[str, Any]:
    return {
        "frozen": np.arange(400, dtype=np.int64),
        "w": np.zeros(700, np.int64),
        "step": 0,
    }


def manifest_first(source: Run, step: int, target: Run, **_: Any) -> int:
    """The control: a copy in the wrong order, which writes the manifest before its packs."""
    target.begin_writing()
    manifest = source.manifest(step)
    create_whole(target.storage, manifest_name(step), encode_manifest(manifest))
    for pack in manifest.packs:
        name = f"packs/{pack.name}"
        if name not in set(target.storage.list("packs/")):
            try:
                create_whole(target.storage, name, source.storage.read(name))
            except FileNotFoundError as error:
                raise StoreError(f"{name} is gone") from error
    return 0


class Story:
    """Sessions on two machines that share a mirror, each killed at a random operation.

    `lost` lists the broken promises, `kills` counts the kills that happened, and `moved` the saves
    that happened during a copy.
    """

    def __init__(self, seed: int, copy: Callable[..., int] = copy_checkpoint) -> None:
        self._copy = copy
        self._random = random.Random(seed)
        self._hook = Hook()
        self._there = Watched("mirror", self._hook)
        self._here = {name: Watched(name, self._hook) for name in "AB"}
        self._reported = {"A": 0, "B": 0}
        self._reached = 0
        self._known: dict[str, int] = {}
        self.lost: list[str] = []
        self.kills = self.moved = self.mirrored = 0

    def play(self) -> Story:
        with (
            mock.patch(
                "perdure.store.compact.map_ahead", lambda _, work, items, __: map(work, items)
            ),
            mock.patch("perdure.checkpoint.retention.COMPACT_FROM", 0),
            mock.patch("perdure.checkpoint.mirror.copy_checkpoint", self._copy),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            for _ in range(SESSIONS):
                self._session(self._random.choice("AAAB"))
        return self

    def _session(self, machine: str) -> None:
        if self._random.random() < 0.2:  # the disk is lost
            self._here[machine] = Watched(machine, self._hook)
            self._reported[machine] = 0
        local = self._here[machine]
        manager: CheckpointManager | None = None
        options = ManagerOptions(clock=lambda: 0.0)
        try:
            manager = CheckpointManager(local, mirror=self._there, max_to_keep=2, options=options)
            state, step = manager.restore_or_initialize(fresh)
            least = max(self._reported[machine], self._reached)
            if step < least:
                self.lost.append(f"{machine} restored step {step}, {least} was reported")
            self._train(manager, machine, state)
        except Killed:
            self.kills += 1
        except StoreError as error:
            self.lost.append(f"{machine}: {error}")
        self._hook.left = self._hook.then = None
        if manager is not None and manager._mirror is not None:
            manager._mirror._release()
            manager._run.close()
        for storage in (local, self._there):
            self._examine(storage)

    def _train(self, manager: CheckpointManager, machine: str, state: dict[str, Any]) -> None:
        mirror = manager._mirror
        assert mirror is not None
        current = [state]

        def save() -> None:
            current[0] = following(current[0], ord(machine))
            step = current[0]["step"]
            leaves = flatten(current[0])
            manager._saver.save_snapshot(step, leaves, {}, RankContext(), {})
            self._reported[machine] = step

        with mock.patch.object(mirror, "notify"):
            self._hook.left = self._random.randrange(20, 400)
            for _ in range(self._random.randrange(1, 5)):
                save()
                saves = self._random.randrange(4)
                pace = self._random.randrange(1, 12)
                calls = 0

                def meanwhile(pace: int = pace) -> None:
                    nonlocal calls, saves
                    calls += 1
                    if saves and calls % pace == 0:
                        saves -= 1
                        self.moved += 1
                        then, self._hook.then = self._hook.then, None
                        try:
                            save()
                        finally:
                            self._hook.then = then

                self._hook.then = meanwhile
                mirror.catch_up()
                self._hook.then = None
                self.mirrored += 1
                self._reached = max(self._reached, mirror._reached)

    def _examine(self, storage: Watched) -> None:
        """Check that every checkpoint can be read and has the bits of some save."""
        if not storage.objects:
            return
        run = Run(storage, create=True)
        for step in run.steps():
            try:
                loaded = run.load(step)
            except StoreError as error:
                self.lost.append(str(error))
                continue
            known = self._known.setdefault(loaded.manifest.fingerprint, step)
            if known != step:
                self.lost.append(f"{storage.where}: step {step} has the bits of step {known}")
        if run.steps() and not verify_run(run).ok:
            self.lost.append(f"{storage.where}: {verify_run(run).problems}")
