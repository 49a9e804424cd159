"""Small states, and a storage whose operations are recorded, counted and failed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from perdure.store import Leaf, LocalStorage, Run, Storage


class Crash(BaseException):
    """The process is killed. No `Exception`, so that no handler of the library cleans up."""


class Failing(LocalStorage):
    """Reads of names that contain `part` fail with `code`."""

    def __init__(self, root: Path, part: str, code: int) -> None:
        super().__init__(root)
        self.part, self.code, self.fired = part, code, 0

    def _fail(self, name: str) -> None:
        if self.part and self.part in name:
            self.fired += 1
            raise OSError(self.code, os.strerror(self.code), self.path(name))

    def read(self, name: str) -> bytes:
        self._fail(name)
        return super().read(name)

    def read_into(self, name: str, offset: int, target: memoryview) -> int:
        self._fail(name)
        return super().read_into(name, offset, target)


def make_leaves(seed: int, sizes: tuple[int, ...] = (1000, 40, 0)) -> dict[str, Leaf]:
    """A state of a few byte arrays and a scalar; other seeds give other bytes in every array."""
    source = random.Random(seed)
    leaves = {
        f"model/layer{i}": Leaf("uint8", (size,), memoryview(source.randbytes(size)), frozen=True)
        for i, size in enumerate(sizes)
    }
    leaves["step"] = Leaf("py:int", (), memoryview(str(seed).encode()), frozen=True)
    return leaves


def local_leaves(seed: int, processes: int = 2) -> dict[str, Leaf]:
    """One local leaf for each process, which is no part of the state."""
    source = random.Random(f"local {seed}")
    return {
        f"process/{process}/random": Leaf("uint8", (500,), memoryview(source.randbytes(500)), True)
        for process in range(processes)
    }


def sharing_states() -> dict[int, dict[str, Leaf]]:
    """Four steps; the later ones share little with step 1, and nothing of its bulk."""

    def leaf(seed: int, size: int) -> Leaf:
        return make_leaves(seed, (size,))["model/layer0"]

    base = leaf(1, 2000)
    return {
        1: {"base": base, "bulk": leaf(10, 50_000)},
        2: {"base": base, "own": leaf(2, 3000)},
        3: {"base": base, "own": leaf(3, 3000)},
        4: {"base": base, "own": leaf(3, 3000), "more": leaf(4, 100)},
    }


def repeated(leaves: dict[str, Leaf], times: int = 4) -> dict[str, Leaf]:
    """The same arrays, each repeated several times, so that a codec compresses them."""
    return {
        path: leaf
        if leaf.is_scalar
        else Leaf(leaf.dtype, (leaf.shape[0] * times,), memoryview(bytes(leaf.data) * times), True)
        for path, leaf in leaves.items()
    }


def contents(leaves: dict[str, Leaf]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """What a load must return exactly."""
    return {path: (leaf.dtype, leaf.shape, bytes(leaf.data)) for path, leaf in leaves.items()}


class Operations:
    """A `before` hook that records every operation, and crashes or fails before a chosen one."""

    def __init__(
        self,
        crash_at: int | None = None,
        fail: Callable[[int, str, str], OSError | None] = lambda *_: None,
    ) -> None:
        self.done: list[tuple[str, str]] = []
        self.paths: list[tuple[str, str]] = []
        self.crash_at = crash_at
        self.fail = fail
        self.fired = 0

    def __call__(self, operation: str, path: str) -> None:
        number = len(self.done)
        if self.crash_at is not None and number >= self.crash_at:
            # A killed process writes nothing more to the disk and cleans nothing up.
            self.fired += 1
            raise Crash
        if (error := self.fail(number, operation, path)) is not None:
            self.fired += 1
            raise error
        self.done.append((operation, Path(path).name))
        self.paths.append((operation, path))


def run_on(path: Path | Storage, before: Operations | None = None, codec: str | None = None) -> Run:
    """A run directory with a fixed clock."""
    storage = path
    if isinstance(path, Path):
        storage = LocalStorage(path) if before is None else LocalStorage(path, before)
    return Run(storage, create=True, codec=codec, clock=lambda: 0.0)
