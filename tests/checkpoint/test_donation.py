"""A step that donates its state while a save of that state is still running."""

from __future__ import annotations

from donation_cases import equal_to_copies, save_while_donating, taken_over_without_saves

from perdure import MemoryStorage
from perdure.testing import check_run

STEPS = 500


def test_every_asynchronous_save_of_a_donated_state_equals_a_synchronous_copy() -> None:
    storage = MemoryStorage()
    assert any(save_while_donating(storage, STEPS)), "a buffer that no save holds is used again"
    assert equal_to_copies(storage, STEPS) == [True] * STEPS
    assert check_run(storage).good == tuple(range(1, STEPS + 1))


def test_control_without_a_save_every_state_is_taken_over() -> None:
    assert taken_over_without_saves(3) == [True] * 3
