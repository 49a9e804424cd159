"""Which checkpoints stay: a pure function of their steps."""

from __future__ import annotations

from collections.abc import Sequence


def steps_to_delete(steps: Sequence[int], max_to_keep: int | None) -> list[int]:
    """The steps that go so that the newest `max_to_keep` stay; None keeps all of them."""
    if max_to_keep is None:
        return []
    return sorted(steps)[:-max_to_keep]
