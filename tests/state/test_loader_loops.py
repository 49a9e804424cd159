"""Loops over a `ResumableLoader` that are no plain `for` loop: kept, read ahead, or Lightning's."""

from __future__ import annotations

from typing import Any

import pytest
from noisy_loader import EPOCHS, batches, loader, resumed, until

from perdure.torch import ResumableLoader

pytestmark = pytest.mark.usefixtures("generators_stay")


def test_a_loop_that_is_kept_is_over_after_the_last_batch() -> None:
    """Lightning takes as many batches as there are, and keeps the loop until it has the next one."""

    def taken(data: ResumableLoader, stop: int = -1) -> list[bytes]:
        received: list[bytes] = []
        for _ in range(EPOCHS - data.epoch):
            loop = iter(data)
            for _ in range(len(data) - data.batch):
                received.append(next(loop).numpy().tobytes())
                if len(received) == stop:
                    return received
        return received

    whole = [batch for batch in batches(loader()) if len(batch) > 16]
    assert taken(loader()) == whole
    for stop in (2, 4):
        data = loader()
        first = taken(data, stop)
        assert first + taken(resumed(data.state_dict(), loader)) == whole
    data = resumed(until(loader(), 3)[1], loader)
    assert list(iter(data)) == []  # what follows the loop comes next
    assert data.epoch == 1


def test_a_loop_that_reads_ahead_saves_the_position_from_before() -> None:
    def used(
        data: ResumableLoader, is_before: bool = True, stop: int = -1
    ) -> tuple[list[bytes], Any]:
        received: list[bytes] = []
        position = data.state_dict()
        for _ in range(data.epoch, EPOCHS):
            loop = iter(data)
            batch = next(loop, None)
            while batch is not None:
                position = data.state_dict()
                ahead = next(loop, None)
                received.append(batch.numpy().tobytes())
                if len(received) == stop:
                    return received, position if is_before else data.state_dict()
                batch = ahead
        return received, position

    whole, _ = used(loader())
    for stop in (1, 3, 5):  # the third batch ends an epoch
        for is_before in (True, False):
            first, position = used(loader(), is_before, stop)
            rest, _ = used(resumed(position, loader))
            left_out = 0 if is_before or stop == 3 else 1
            assert first + rest == whole[:stop] + whole[stop + left_out :]


def test_lightning_begins_the_next_epoch_at_the_end_of_one() -> None:
    data = loader()
    loop = iter(data)
    for _ in range(len(data)):
        next(loop)
    call = "def load(loader, state): loader.load_state_dict(state)"
    for module, epoch in (("lightning.pytorch.utilities.combined_loader", 1), ("program", 0)):
        names: dict[str, Any] = {"__name__": module}
        exec(call, names)
        again = loader()
        names["load"](again, data.state_dict())
        assert (again.epoch, again.batch) == (epoch, 3 * (1 - epoch))
