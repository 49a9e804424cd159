"""The checkpoints of Lightning's `ModelParallelStrategy` (FSDP2, tensor parallel) as run directories.

The strategy has its own storage and no plugin for it, so these functions take the place of its methods.
Each process writes its shards through `perdure.plugins.dcp`; nothing is gathered. Everything beside
model and optimizers is one object, which the first process has pickled.
"""

from __future__ import annotations

import io
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from perdure.checkpoint.arguments import step_number
from perdure.errors import NotARunError, StateError
from perdure.plugins.dcp import Reader, Writer
from perdure.store import Run

_REST = "rest"


def equip(strategy: ModelParallelStrategy) -> None:
    """Let a strategy save and load run directories; `StateError` if it gathers what it saves."""
    if not strategy._save_distributed_checkpoint:
        raise StateError(
            "fit: expected ModelParallelStrategy(save_distributed_checkpoint=True), its default, found "
            "False. Every process writes its own shards, and `perdure export` gathers them."
        )
    strategy.save_checkpoint = MethodType(_save, strategy)
    strategy.load_checkpoint = MethodType(_load, strategy)


def is_equipped(strategy: Any) -> bool:
    """Whether a strategy saves run directories."""
    method = getattr(strategy, "save_checkpoint", None)
    return getattr(method, "__func__", None) is _save


def _save(
    strategy: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
) -> None:
    """Save in all processes; durable on return."""
    if storage_options is not None:
        raise TypeError(f"storage_options: expected None, found {storage_options!r}.")
    path = Path(strategy.broadcast(filepath))
    older = strategy.broadcast(_steps(path) if strategy.is_global_zero else [])
    step = step_after(checkpoint, older)
    state = _members(checkpoint.pop("state_dict"), checkpoint.pop("optimizer_states", []))
    torch.save(checkpoint, rest := io.BytesIO())
    # `ExactResume` has the generators.
    writer = Writer(path, step, save_random_state=False)
    dcp.save({**state, _REST: rest.getvalue()}, storage_writer=writer)
    if strategy.is_global_zero:
        with Run(path) as run:
            run.delete(older)


def _load(strategy: Any, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
    """Give model and optimizers the stored values, and return the rest. CorruptionError."""
    path = Path(strategy.broadcast(checkpoint_path))
    rest: dict[str, Any] = {_REST: b""}
    dcp.load(rest, storage_reader=Reader(path, save_random_state=False))
    checkpoint = torch.load(io.BytesIO(rest[_REST]), weights_only=bool(weights_only))
    # By itself this loads nothing here. `ExactResume` makes the buffers that the run has made.
    strategy.load_model_state_dict(checkpoint)
    model, optimizers = strategy.model, strategy.optimizers
    # The optimizers come first: to have moments at all, PyTorch lets them take a step without change.
    moments = [get_optimizer_state_dict(model, optimizer) for optimizer in optimizers]
    state = _members(get_model_state_dict(model), moments)
    dcp.load(state, storage_reader=Reader(path, save_random_state=False))
    for number, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(model, optimizer, optim_state_dict=state[f"optimizer_{number}"])
    options = StateDictOptions(strict=strategy.lightning_module.strict_loading)
    set_model_state_dict(model, state["state_dict"], options=options)
    return checkpoint


def step_after(checkpoint: dict[str, Any], older: list[int]) -> int:
    """The step of a checkpoint at a path that had checkpoints of `older` steps: `last.ckpt` is written
    again and again, perhaps twice after one step."""
    return max([step_number(checkpoint.get("global_step", 0)), *(step + 1 for step in older)])


def _members(model: Any, optimizers: list[Any]) -> dict[str, Any]:
    named = {f"optimizer_{number}": each for number, each in enumerate(optimizers)}
    return {"state_dict": model, **named}


def _steps(path: Path) -> list[int]:
    try:
        return Run(path).steps()
    except NotARunError:  # nothing was saved there, or a save was killed before its commit
        return []
