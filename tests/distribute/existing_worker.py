"""Joins a group that the program itself initialized in the framework, as multi-host scripts do."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
from worker_program import answer, arguments

import perdure
from perdure.checkpoint import PerRank, SingleProcess
from perdure.errors import ClusterError

STEPS = 3


def refused(directory: str) -> str:
    try:
        perdure.CheckpointManager(directory)
    except ClusterError as error:
        return str(error)
    return ""


def native_ddp(directory: str, processes: Any) -> dict[str, Any]:
    """A model with BatchNorm and dropout under DDP, whose buffers differ between ranks."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer releases rename the argument
            return net, DistributedDataParallel(net, broadcast_buffers=False)

    def train(net: Any, model: Any, start: int, stop: int) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(start, stop):
            source = torch.Generator().manual_seed(100 * step + processes.index)
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=source)).square().sum().backward()
            optimizer.step()

    def state(net: Any) -> dict[str, Any]:
        return {
            "params": dict(net.named_parameters()),
            "buffers": PerRank(dict(net.named_buffers())),
        }

    def bits(net: Any) -> list[str]:
        return [value.detach().numpy().tobytes().hex() for value in net.state_dict().values()]

    net, model = made()
    torch.manual_seed(7 + processes.index)  # each rank draws another dropout mask
    with perdure.CheckpointManager(directory, processes=processes) as manager:
        train(net, model, 0, STEPS)
        manager.save(STEPS, state(net))
        train(net, model, STEPS, 2 * STEPS)
        expected = bits(net)
    again, model = made()
    torch.manual_seed(0)
    with perdure.CheckpointManager(directory, processes=processes) as manager:
        restored, step = manager.restore(like=state(again))
        again.load_state_dict({**restored["params"], **restored["buffers"].value})
        train(again, model, step, 2 * STEPS)
    return {"resumed": bits(again) == expected, "buffers": expected[2:]}


def main() -> None:
    args = arguments(engine=str, directory=str)
    out: dict[str, Any] = {}
    if args.engine == "jax":
        import jax

        from perdure.jax import MultiWorkerMirroredStrategy

        jax.distributed.initialize(args.coordinator, args.processes, args.process)
    else:
        import torch.distributed as dist

        from perdure.torch import MultiWorkerMirroredStrategy

        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{args.coordinator}",
            rank=args.process,
            world_size=args.processes,
        )
    out["refused"] = refused(f"{args.directory}/refused")
    perdure.CheckpointManager(f"{args.directory}/own{args.process}", processes=SingleProcess())
    processes = perdure.initialize_distributed(args.engine)
    out["place"] = [processes.index, processes.count, processes.is_chief]
    strategy: Any = MultiWorkerMirroredStrategy(replicas=4)
    out["same"] = strategy.processes is processes
    values = strategy.distribute_values_from_function(
        lambda context: np.float32(2.0**context.replica_id_in_sync_group)
    )
    out["sum"] = float(np.asarray(strategy.reduce("sum", values)))
    with perdure.CheckpointManager(f"{args.directory}/run", processes=processes) as manager:
        manager.save(1, {"x": np.arange(5), "mine": PerRank(np.full(3, args.process))})
        manager.wait_until_finished()
        restored = manager.restore(like={"x": np.arange(5), "mine": PerRank(np.zeros(3, int))})
        out["mine"] = restored.state["mine"].value.tolist()
        out["steps"] = manager.all_steps()
    if args.engine == "torch":
        out["ddp"] = native_ddp(f"{args.directory}/ddp", processes)
        sys.modules["torch.distributed"].destroy_process_group()
    answer(out)


if __name__ == "__main__":
    main()
