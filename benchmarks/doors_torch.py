"""One process of PyTorch that saves and loads the state of a DDP or FSDP2 training.

doors_torch.py LAYOUT DIRECTORY SAVES SUBJECT...     with the environment of torchrun
"""

# DCP does not list its public names.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from doors_measure import LAYERS, SHAPES, WIDTH, measure_each, report
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.norm2 = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)


class Training:
    """A model and its optimizer, which each way to save extends."""

    is_durable = False

    def __init__(self, path: Path, layout: str) -> None:
        self.path = path
        self.layout = layout
        self.rank = dist.get_rank()
        self.renew()

    def renew(self) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)))
        assert {name: tuple(p.shape) for name, p in model[0].named_parameters()} == SHAPES
        if self.layout == "FSDP2":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for module in (*model, model):
                fully_shard(module, mesh=mesh)
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self._gradients: list[Any] = []

    def change(self) -> None:
        if not self._gradients:
            torch.manual_seed(0)
            self._gradients = [torch.randn_like(p) for p in self.model.parameters()]
        for parameter, gradient in zip(self.model.parameters(), self._gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass

    def digest(self) -> str:
        found = blake3()
        for parameter in self.model.parameters():
            entry = self.optimizer.state[parameter]
            for value in (parameter.detach(), entry["exp_avg"], entry["exp_avg_sq"], entry["step"]):
                local = getattr(value, "_local_tensor", value)
                octets: Any = local.contiguous().reshape(-1).view(torch.uint8).numpy()
                found.update(octets)
        return found.hexdigest()


class TorchSave(Training):
    """One file of rank 0, or of each rank if the state is sharded."""

    def _file(self, step: int) -> Path:
        return self.path / f"{step}-{self.rank if self.layout == 'FSDP2' else 0}.pt"

    def save(self, step: int) -> None:
        if self.rank == 0 or self.layout == "FSDP2":
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, self._file(step))
        dist.barrier()  # as in scripts of DDP: nobody reads or deletes a file that is being written

    def load(self, step: int) -> None:
        state = torch.load(self._file(step), weights_only=self.layout != "FSDP2")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class Lightning(Training):
    """What Lightning's DDP strategy does with its `CheckpointIO`: rank 0 saves."""

    def __init__(self, path: Path, layout: str) -> None:
        super().__init__(path, layout)
        from lightning.pytorch.plugins.io import TorchCheckpointIO

        self.io: Any = TorchCheckpointIO()

    def save(self, step: int) -> None:
        if self.rank == 0:
            state = {
                "global_step": step,
                "epoch": 0,
                "state_dict": self.model.state_dict(),
                "optimizer_states": [self.optimizer.state_dict()],
            }
            self.io.save_checkpoint(state, str(self.path / f"{step}.ckpt"))
        dist.barrier()

    def load(self, step: int) -> None:
        state = self.io.load_checkpoint(str(self.path / f"{step}.ckpt"))
        self.model.load_state_dict(state["state_dict"])
        self.optimizer.load_state_dict(state["optimizer_states"][0])


class PerdureLightning(Lightning):
    is_durable = True

    def __init__(self, path: Path, layout: str) -> None:
        super().__init__(path, layout)
        import perdure.plugins.lightning

        self.io = perdure.plugins.lightning.CheckpointIO()


class Dcp(Training):
    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _writer(self, step: int) -> dict[str, Any]:
        return {"checkpoint_id": self.path / str(step)}

    def _reader(self, step: int) -> dict[str, Any]:
        return {"checkpoint_id": self.path / str(step)}

    def save(self, step: int) -> None:
        dcp.save(self._state(), **self._writer(step))

    def load(self, step: int) -> None:
        state = self._state()
        dcp.load(state, **self._reader(step))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class DcpAsync(Dcp):
    future: Any

    def save(self, step: int) -> None:
        self.future = dcp.async_save(self._state(), **self._writer(step))

    def finish(self, step: int) -> None:
        self.future.result()


class _PerdureStorage(Dcp):
    is_durable = True

    def _writer(self, step: int) -> dict[str, Any]:
        import perdure.plugins.dcp

        return {"storage_writer": perdure.plugins.dcp.Writer(self.path / "run", step)}

    def _reader(self, step: int) -> dict[str, Any]:
        import perdure.plugins.dcp

        return {"storage_reader": perdure.plugins.dcp.Reader(self.path / "run", step)}


class PerdureDcp(_PerdureStorage):
    pass


class PerdureDcpAsync(_PerdureStorage, DcpAsync):
    pass


class Manager(Training):
    is_durable = True

    def __init__(self, path: Path, layout: str) -> None:
        super().__init__(path, layout)
        from perdure import CheckpointManager
        from perdure.torch import process_group

        self.manager = CheckpointManager(
            path / "run", max_to_keep=None, processes=process_group(), recipe={"seed": 0}
        )

    def save(self, step: int) -> None:
        self.manager.save(step, {"model": self.model, "optimizer": self.optimizer})

    def finish(self, step: int) -> None:
        self.manager.wait_until_finished()

    def load(self, step: int) -> None:
        self.manager.restore(step, {"model": self.model, "optimizer": self.optimizer})

    def close(self) -> None:
        self.manager.close()


SUBJECTS: dict[str, type[Any]] = {
    "torch.save": TorchSave,
    "Lightning": Lightning,
    "DCP": Dcp,
    "DCP async": DcpAsync,
    "perdure": Manager,
    "perdure.plugins.dcp": PerdureDcp,
    "perdure.plugins.dcp async": PerdureDcpAsync,
    "perdure.plugins.lightning": PerdureLightning,
}


def main() -> None:
    layout, directory, saves, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    is_chief = dist.get_rank() == 0

    def make(name: str, path: Path) -> Training:
        return SUBJECTS[name](path, layout)

    report(measure_each(make, names, Path(directory), dist.barrier, is_chief, int(saves)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
