"""Loops over a `ResumableLoader` that are no plain `for` loop: kept, read ahead, or Lightning's."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from noisy_loader import EPOCHS, batches, loader, resumed, until

from perdure import CheckpointManager
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


def in_parts(run: Path, stop: int, saves_within: bool) -> list[bytes]:
    """Batches of five iterations of one batch each; an epoch has three."""
    data = loader()
    received: list[bytes] = []
    with CheckpointManager(run, recipe={}) as manager:
        state, start = manager.restore_or_initialize({"loader": data})
        for step in range(start, stop):
            for batch in itertools.islice(data, 1):
                received.append(batch.numpy().tobytes())
                if saves_within:
                    manager.save(step + 1, state)
            if not saves_within:
                manager.save(step + 1, state)
    return received


def test_a_save_after_a_loop_of_islice_resumes_with_the_next_batch(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = in_parts(tmp_path / "whole", 5, saves_within=False)
        for stop in (2, 3, 4):
            first = in_parts(tmp_path / str(stop), stop, saves_within=False)
            assert first + in_parts(tmp_path / str(stop), 5, saves_within=False) == whole


def test_a_save_within_a_loop_of_islice_at_the_end_of_an_epoch_is_warned_about_once(
    tmp_path: Path,
) -> None:
    with pytest.warns(RuntimeWarning, match="step 3: the state of this") as caught:
        whole = in_parts(tmp_path / "whole", 7, saves_within=True)
    assert len([line for line in caught if line.category is RuntimeWarning]) == 1
    assert caught[0].filename == __file__
    first = in_parts(tmp_path / "end", 3, saves_within=True)
    assert first + in_parts(tmp_path / "end", 7, saves_within=True) != whole  # as it says


def test_epochs_that_are_left_at_their_last_batch_are_not_warned_about() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = loader()
        for _ in range(2):
            for _ in zip(range(len(data)), data, strict=True):
                data.state_dict()
            data = resumed(until(loader(), 2)[1], loader)
            for _ in zip(range(1), data, strict=False):  # the rest of a resumed epoch
                data.state_dict()
            data.set_epoch(1)


def endless(data: ResumableLoader) -> Iterator[torch.Tensor]:
    while True:
        yield from data


def beside(data: ResumableLoader, again: Callable[[Any], Any], count: int) -> list[bytes]:
    """Batches beside those of another loader, which makes more of them."""
    return [batch.numpy().tobytes() for _, batch in zip(range(count), again(data), strict=False)]


def test_a_cycle_over_a_loader_is_warned_about_and_an_endless_generator_is_exact() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = beside(loader(), endless, 8)
        first = beside(data := loader(), endless, 5)
        assert first + beside(resumed(data.state_dict(), loader), endless, 3) == whole
        beside(loader(), itertools.cycle, 3)  # none is given again
    with pytest.warns(RuntimeWarning, match="itertools.cycle keeps") as caught:
        whole = beside(loader(), itertools.cycle, 8)
    assert [line.filename for line in caught] == [__file__]
    with pytest.warns(RuntimeWarning, match="itertools.cycle keeps"):
        first = beside(data := loader(), itertools.cycle, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rest = beside(resumed(data.state_dict(), loader), itertools.cycle, 3)
    assert first + rest != whole  # as it says
