"""A step that donates its state while a save of that state is still running."""

from __future__ import annotations

import threading
from pathlib import Path

import jax.numpy as jnp
import pytest
from donation_cases import (
    bits,
    donating,
    equal_to_copies,
    initial,
    pure,
    save_while_donating,
    taken_over_without_saves,
)

from perdure import CheckpointManager, LocalStorage, MemoryStorage
from perdure.state import restore
from perdure.state.snapshot_buffer import SnapshotBuffer
from perdure.store import Run
from perdure.testing import check_run

STEPS = 500


def test_every_asynchronous_save_of_a_donated_state_equals_a_synchronous_copy() -> None:
    storage = MemoryStorage()
    assert any(save_while_donating(storage, STEPS)), "a buffer that no save holds is used again"
    assert equal_to_copies(storage, STEPS) == [True] * STEPS
    assert check_run(storage).good == tuple(range(1, STEPS + 1))


def test_control_without_a_save_every_state_is_taken_over() -> None:
    assert taken_over_without_saves(3) == [True] * 3


@pytest.mark.parametrize("noted", [True, False])
def test_the_save_after_a_donation_copies_the_state(
    noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the step that is given a state makes the copy, as long as the save holds its memory."""
    if not noted:  # the control
        monkeypatch.setattr(SnapshotBuffer, "note_donations", lambda _: None)
    go = threading.Event()

    def before(operation: str, path: str) -> None:
        if operation == "fsync":
            assert go.wait(60)

    large = jnp.zeros((200, 50))  # more than is copied to see whether a step was given the state
    start = {**initial(), "w": large, "m": large}
    state, alone, expected, taken_over = pure(start), pure(start), [], []
    with CheckpointManager(LocalStorage(tmp_path, before), max_to_keep=None) as manager:
        for number, donates in enumerate((True, True, False, True), 1):
            go.clear()
            manager.save(number, state)
            expected.append(bits(alone))
            if donates:
                given, state, alone = state, donating(state), pure(alone)
                taken_over.append(given["w"].is_deleted())
            go.set()
            manager.wait_until_finished()
    assert taken_over == [False, noted, False]
    saved = [Run(tmp_path).load(number).leaves for number in range(1, 5)]
    assert [bits(restore(start, leaves)) for leaves in saved] == expected
    assert check_run(tmp_path).good == (1, 2, 3, 4)
