"""Random walks over a run directory; `make proof-store ARGS=walk` runs 2,000 of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from random_walk import Memory, walk, walk_in_bucket, walk_in_memory, walk_on_disk

from object_stores import ObjectServer
from perdure.store.run_log import LogView


def together(walk_once: Callable[[int], Counter[str]], seeds: range) -> Counter[str]:
    return sum(map(walk_once, seeds), Counter())


ACTS = ("save", "restore", "rollback", "fork", "prune", "locked", "damage", "crash in save", "log")


def test_random_walks_on_a_disk_lose_nothing() -> None:
    seen = together(walk_on_disk, range(12))
    assert min(seen[act] for act in (*ACTS, "copy")) > 0, seen


def test_random_walks_in_memory_lose_nothing() -> None:
    seen = together(walk_in_memory, range(1000, 1045))
    assert min(seen[act] for act in (*ACTS, "undone", "repair", "crash in rollback")) > 0, seen


def test_random_walks_in_a_bucket_lose_nothing(s3: ObjectServer) -> None:
    seen = together(lambda seed: walk_in_bucket(s3, seed), range(2000, 2002))
    assert min(seen[act] for act in ("save", "locked")) > 0, seen


def test_control_a_store_that_loses_a_checkpoint_fails_a_walk() -> None:
    """The oldest of three manifests vanishes."""

    class Forgetful(Memory):
        def manifests(self) -> list[str]:
            return sorted(n for n in self.objects if n.startswith("checkpoints/"))

        @property
        def objects(self) -> dict[str, bytes]:
            return self._objects.objects

        def storage(self, before: Any = None) -> Any:
            if len(names := self.manifests()) >= 3:
                del self.objects[names[0]]
            return super().storage(before)

    caught = 0
    for seed in range(6):
        try:
            walk(Forgetful(), seed)
        except AssertionError:
            caught += 1
    assert caught >= 3


def test_control_a_store_that_believes_a_damaged_log_fails_a_walk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LogView, "problem_with", lambda *_: None)
    with pytest.raises(AssertionError, match="on the word of a damaged log"):
        together(walk_in_memory, range(3000, 3020))
