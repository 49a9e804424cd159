"""What FSDP2 has beside parameters: gradients that are not added yet, and shards in attributes."""

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


@pytest.mark.usefixtures("group")
def test_shards_that_an_attribute_has_come_back_or_are_refused() -> None:
    storage, found = MemoryStorage(), []
    for number in range(2):
        torch.manual_seed(0)
        model: Any = torch.nn.Linear(4, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model.average = {name: each.detach().clone() for name, each in model.named_parameters()}
        with CheckpointManager(storage) as manager:
            state = {"model": model}
            assert manager.restore_or_initialize(state).step == number
            if not number:
                for each in model.average.values():
                    each.mul_(0.5).add_(3)
                manager.save(1, state)
                model.late = model.weight.detach().clone()
                with pytest.raises(UnsupportedLeafError, match="model/late: a sharded tensor that"):
                    manager.save(2, state)
        assert all(hasattr(each, "full_tensor") for each in model.average.values())
        found.append([each.full_tensor().tolist() for each in model.average.values()])
    assert found[0] == found[1]
