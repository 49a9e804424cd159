"""Gradients that FSDP2 keeps outside of `.grad` are in no checkpoint, so the save is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from perdure import CheckpointManager, MemoryStorage
from perdure.errors import UnsupportedLeafError


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_save_between_micro_batches_of_fsdp2_is_refused() -> None:
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(4, 2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = {"model": model, "optimizer": optimizer}
    with CheckpointManager(MemoryStorage()) as manager:
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            model(torch.ones(3, 4)).sum().backward()
            if is_last:  # the control
                manager.save(2, state)
                continue
            with pytest.raises(
                UnsupportedLeafError, match="model: FSDP2 has gradients that are not"
            ):
                manager.save(1, state)
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
