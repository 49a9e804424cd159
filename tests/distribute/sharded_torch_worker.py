"""One process of a group with FSDP2 modules and DTensors: it trains, is killed, resumes, restores."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from worker_program import answer, arguments

import perdure
from perdure.checkpoint import PerRank, SingleProcess
from perdure.errors import PerdureError
from perdure.torch import process_group

STEPS, SAVED, KILLED = 6, 3, 5
SHAPES = {"even": (4, 6), "uneven": (7, 3), "one_row": (1, 5), "large": (1030, 1100)}


def whole(name: str) -> torch.Tensor:
    """Of the largest one, most chunks have elements of several shards."""
    values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name)))
    return values.to(torch.bfloat16) if name == "uneven" else values


def placements(mesh: Any, name: str) -> list[Any]:
    if mesh.ndim == 2:
        return {
            "even": [Shard(0), Shard(1)],
            "uneven": [Replicate(), Shard(0)],
            "one_row": [Shard(0), Shard(0)],
            "large": [Shard(1), Shard(0)],
        }[name]
    return [{"even": Replicate(), "large": Shard(1)}.get(name, Shard(0))]


def tensors(mesh: Any, *, fill: bool) -> dict[str, Any]:
    return {
        name: distribute_tensor(
            whole(name) if fill else torch.zeros_like(whole(name)), mesh, placements(mesh, name)
        )
        for name in SHAPES
    }


def plain_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))


def members(mesh: Any) -> dict[str, Any]:
    """A module and its optimizer, sharded over a mesh; with two dimensions also by tensors."""
    model: Any = plain_model()
    if mesh is not None:
        if mesh.ndim == 2:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(model, mesh["tp"], plan)
            mesh = mesh["dp"]
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    return {"model": model, "optimizer": optimizer}


def train(state: dict[str, Any], start: int, stop: int, rank: int) -> None:
    for step in range(start, stop):
        source = torch.Generator().manual_seed(100 * step + rank)
        state["optimizer"].zero_grad()
        state["model"](torch.randn(4, 6, generator=source)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(state["model"].parameters(), 0.1)
        state["optimizer"].step()


def recipe_of(options: Any, processes: Any) -> dict[str, int]:
    """Only the undisturbed run asks for the same number of processes."""
    return {"processes": processes.count} if options.action == "run" else {}


def run(options: Any, processes: Any, mesh: Any) -> dict[str, Any]:
    """Train to the end: undisturbed, until SIGKILL, or on from the newest checkpoint."""
    state, tree = members(mesh), tensors(mesh, fill=options.action != "resume")
    with (
        warnings.catch_warnings(record=True) as caught,
        perdure.CheckpointManager(
            options.directory, processes=processes, recipe=recipe_of(options, processes)
        ) as manager,
    ):
        warnings.simplefilter("always")
        restored, start = manager.restore_or_initialize({**state, "tree": tree})
        for step in range(start, STEPS):
            train(state, step, step + 1, processes.index)
            if step + 1 in (SAVED, STEPS):
                manager.save(step + 1, {**state, "tree": restored["tree"]})
            if step + 1 == KILLED and options.action == "kill":
                manager.wait_until_finished()
                kill_all(Path(f"{options.directory}-ending"), processes)
    return {"start": start, "warnings": [str(warning.message) for warning in caught]}


def kill_all(mark: Path, processes: Any) -> None:
    """End this process; process 0, which serves the messages of the others, after the last of them."""
    pipes = [mark.with_name(f"{mark.name}{index}") for index in range(processes.count)]
    if not processes.index:
        for pipe in pipes[1:]:
            os.mkfifo(pipe)
    processes.barrier()
    if processes.index:
        os.open(pipes[processes.index], os.O_WRONLY)
    else:
        for pipe in pipes[1:]:
            pipe.read_bytes()  # ends with the process that holds the other end
    os.kill(os.getpid(), signal.SIGKILL)


def restore(options: Any, processes: Any, mesh: Any) -> dict[str, Any]:
    """Restore the last step on another mesh, compare every leaf, and save it again."""
    expected = perdure.load_checkpoint(options.directory, STEPS)
    state, tree = members(mesh), tensors(mesh, fill=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with perdure.CheckpointManager(options.directory, processes=processes) as manager:
            (restored, _) = manager.restore(STEPS, like={**state, "tree": tree})
    layouts = {name: repr(value.placements) for name, value in restored["tree"].items()}
    full = {name: value.full_tensor() for name, value in restored["tree"].items()}
    sharded = dict(state["model"].state_dict())
    moments = [state["optimizer"].state[p]["exp_avg"] for p in state["model"].parameters()]
    with perdure.CheckpointManager(options.directory + "-again", processes=processes) as manager:
        manager.save(STEPS, restored)
    return {
        "equal": all(torch.equal(full[name], whole(name)) for name in SHAPES)
        and all(
            torch.equal(
                value.full_tensor(),
                torch.from_numpy(expected["model"][name[0]][name[2:]]),
            )
            for name, value in sharded.items()
        ),
        "placements": layouts == {n: repr(tuple(placements(mesh, n))) for n in SHAPES},
        "moments": all(isinstance(moment, DTensor) for moment in moments),
        "model": {name: repr(value.placements) for name, value in sharded.items()},
        "warnings": [str(warning.message) for warning in caught],
        "drifted": drifted(options, processes, mesh) if mesh.ndim == 2 else "",
        "recipe": refused(lambda: with_recipe(options, processes, {**state, "tree": tree})),
    }


def drifted(options: Any, processes: Any, mesh: Any) -> str:
    """Save an array whose copies, on the two rows of a mesh, are not equal."""
    local = torch.full((2,), float(processes.index // 2))
    copies = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)

    def save() -> None:
        with perdure.CheckpointManager(
            options.directory + "-drifted", processes=processes
        ) as manager:
            manager.save(1, {"w": copies})

    return refused(save)


def with_recipe(options: Any, processes: Any, like: Any) -> None:
    recipe = {"processes": processes.count}
    with perdure.CheckpointManager(
        options.directory, processes=processes, recipe=recipe
    ) as manager:
        manager.restore(STEPS, like)


def alone(options: Any) -> dict[str, Any]:
    """Restore plain tensors without any group, and save them again."""
    out: dict[str, Any] = {"no_group": refused(process_group)}
    state = members(None)
    tree = {name: torch.zeros_like(whole(name)) for name in SHAPES}
    with perdure.CheckpointManager(options.directory) as manager:
        restored, _ = manager.restore(STEPS, like={**state, "tree": tree})
    out["equal"] = all(torch.equal(restored["tree"][name], whole(name)) for name in SHAPES)
    with perdure.CheckpointManager(options.directory + "-again") as manager:
        manager.save(STEPS, restored)
    return out


def refused(action: Any) -> str:
    try:
        action()
    except PerdureError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def errors(options: Any, processes: Any, mesh: Any) -> dict[str, Any]:
    """What is refused, and that the group still saves afterwards."""
    tree = tensors(mesh, fill=True)
    rank = processes.index

    def attempt(name: str, step: int, state: Any, group: Any = processes) -> str:
        directory = f"{options.directory}/{name}"

        def save() -> None:
            with perdure.CheckpointManager(directory, processes=group) as manager:
                manager.save(step, state)

        return refused(save)

    pending = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    # Each process has every third part of what `flatten` makes of columns.
    flat = distribute_tensor(torch.arange(18.0).reshape(2, 9), mesh, [Shard(1)]).flatten()
    other_shape = distribute_tensor(torch.zeros(4, 7), mesh, [Replicate()])
    out: dict[str, Any] = {
        "no_processes": refused(lambda: perdure.CheckpointManager(f"{options.directory}/none")),
        "alone": attempt(f"alone-{rank}", 1, {"tree": tree}, SingleProcess()),
        "partial": attempt("partial", 1, {"net": {"sum": pending}}),
        "strided": attempt("strided", 1, {"flat": flat}),
        "per_rank": attempt("per_rank", 1, {"mine": PerRank(tree["large"])}),
        "steps": attempt("steps", 1 + rank, {"tree": tree}),
        "good": attempt("good", 1, {"tree": tree}),
    }
    with perdure.CheckpointManager(f"{options.directory}/good", processes=processes) as manager:
        like = {"tree": {**tree, "even": other_shape}}
        out["shape"] = refused(lambda: manager.restore(like=like))
    ranks = [[0, 2], [1]]
    groups = [dist.new_group(members) for members in ranks]
    own = next(group for group, some in zip(groups, ranks, strict=True) if rank in some)
    other = next(group for group, some in zip(groups, ranks, strict=True) if rank not in some)
    part = process_group(own)
    out["subgroup"] = [part.index, part.count, [int(data) for data in part.gather(b"%d" % rank)]]
    out["not_a_member"] = refused(lambda: process_group(other))
    return out


def main() -> None:
    options = arguments(directory=str, action=str, two=0)
    if options.action == "alone":
        answer(alone(options))
        return
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{options.coordinator}",
        rank=options.process,
        world_size=options.processes,
    )
    processes = process_group()
    shape, names = (options.processes,), ("dp",)
    if options.two:
        shape, names = (2, 2), ("dp", "tp")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    action = {"restore": restore, "errors": errors}.get(options.action, run)
    answer(action(options, processes, mesh))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
