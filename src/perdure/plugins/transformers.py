"""For users of the Hugging Face Trainer: `train`, which resumes by itself, also within an epoch.

    perdure.plugins.transformers.train(trainer, "runs/a")  # in place of trainer.train()

In this module, too, `import transformers` means the library.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping, Sized
from pathlib import Path
from typing import Any

from perdure.checkpoint.manager import CheckpointManager
from perdure.checkpoint.manager_options import Restored
from perdure.errors import ArgumentError, StateError, missing_extra
from perdure.plugins.host import (
    GeneratorStates,
    generator_states,
    has_persistent_workers,
    newest_checkpoint,
    persistent_workers_error,
    require_version,
    restore_generators,
    restore_members,
)

require_version("transformers", "transformers", "5", "6")
try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ModuleNotFoundError as error:
    raise missing_extra("transformers", error) from error

__all__ = ["train"]

_STATE_FILE = "trainer_state.json"  # tells `Trainer.train` where to resume


def train(
    trainer: Trainer, run: str | os.PathLike[str] | CheckpointManager, **arguments: Any
) -> Any:
    """`trainer.train()`, which resumes from the newest good checkpoint and ends with the same bits.

    Model, optimizer, scheduler, gradient scaler, random generators and the state of the Trainer are
    saved every `args.save_steps` steps, in the background, and before the process exits after SIGTERM
    (with status 75). The Trainer's own checkpoints are not needed: use `save_strategy="no"`.

    Args:
        trainer: A Trainer that runs in one process.
        run: The run directory; the newest `args.save_total_limit` checkpoints stay (None: all). Or a
            manager, whose own interval, retention and options then count.
        arguments: Of `trainer.train`, except for `resume_from_checkpoint`.

    Returns:
        What `trainer.train` returns.

    Raises:
        ArgumentError: `save_steps` is a fraction, or `resume_from_checkpoint` is given.
        RecipeMismatchError: The checkpoint was made with another batch size, seed or dataset length.
        StateError: There are several processes, the Trainer shards its model, it does not skip data
            that it has seen, or a loader has `persistent_workers=True`.
    """
    _require_supported(trainer, arguments)
    if isinstance(run, CheckpointManager):
        return _train(trainer, run, arguments)
    with CheckpointManager(
        run,
        save_interval_steps=_interval(trainer.args.save_steps),
        max_to_keep=trainer.args.save_total_limit,
        recipe=_recipe(trainer),
    ) as manager:
        return _train(trainer, manager, arguments)


def _train(trainer: Trainer, manager: CheckpointManager, arguments: dict[str, Any]) -> Any:
    newest = newest_checkpoint(manager)
    callback = _Checkpoints(trainer, manager, newest)
    trainer.add_callback(callback)
    try:
        if newest is None:
            return trainer.train(**arguments)
        # The Trainer reads its position from a file that stands beside weights. Those and all else
        # come from the checkpoint, once the optimizer exists (`on_train_begin`).
        with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
            trainer.save_model(folder)
            Path(folder, _STATE_FILE).write_text(newest.state["trainer"])
            return trainer.train(resume_from_checkpoint=folder, **arguments)
    finally:
        trainer.remove_callback(callback)


class _Checkpoints(TrainerCallback):
    """Saves between two steps, and restores what `Trainer.train` has made.

    The next batch has been drawn when a step begins, and a resumed run draws it too. So generators
    that are saved and restored at that moment continue as they would have.
    """

    def __init__(
        self, trainer: Trainer, manager: CheckpointManager, newest: Restored | None
    ) -> None:
        self._trainer = trainer
        self._manager = manager
        self._newest = newest
        # The order of an epoch, and the seeds of data workers, may be drawn when it begins.
        self._epoch_began: GeneratorStates = {}
        self._at_save = generator_states()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # `get_train_dataloader` of a subclass may not follow the arguments.
        if has_persistent_workers([kwargs.get("train_dataloader")]):
            raise persistent_workers_error("Make the DataLoader with persistent_workers=False.")
        if self._newest is not None:
            read_only = {"trainer", "epoch_began"}
            restore_members(self._manager, self._newest, self._members(), read_only)
            if state.global_step != self._newest.step:
                raise StateError(
                    f"{self._manager.directory}: expected that the Trainer resumes at step "
                    f"{self._newest.step}, found {state.global_step}."
                )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._newest is not None:
            restore_generators(self._newest.state["epoch_began"])
        self._epoch_began = generator_states()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        manager, step = self._manager, state.global_step
        is_resumed = self._newest is not None
        if is_resumed:
            self._newest = None
            restore_generators(self._at_save)
        elif step and manager.should_save(step):  # the state of the Trainer has its whole log
            manager.save(step, self._state(state))
        if manager.reached_preemption(step):
            if is_resumed:  # nothing was trained since
                manager.exit_preempted()
            manager.save_and_exit(step, self._state(state))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop or state.global_step >= state.max_steps:
            if float(state.epoch).is_integer():  # a later run may begin another epoch
                self._epoch_began = generator_states()
            self._manager.save(state.global_step, self._state(state), force=True)

    def _members(self) -> dict[str, Any]:
        trainer = self._trainer
        members = {
            "model": trainer.model,
            # Accelerate's wrapper adds nothing to the state.
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            "scaler": trainer.accelerator.scaler,
        }
        return {name: member for name, member in members.items() if member is not None}

    def _state(self, state: Any) -> dict[str, Any]:
        exported: dict[str, list[Any]] = {}
        for member in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
            if isinstance(member, ExportableState):
                exported.setdefault(type(member).__name__, []).append(member.state())
        values = dataclasses.asdict(state) | {"stateful_callbacks": exported}
        return self._members() | {
            "trainer": json.dumps(values),
            "epoch_began": self._epoch_began,
        }


def _require_supported(trainer: Trainer, arguments: Mapping[str, Any]) -> None:
    if "resume_from_checkpoint" in arguments:
        raise ArgumentError(
            "resume_from_checkpoint: expected none, because `perdure.plugins.transformers.train` "
            "resumes from the run directory; `trainer.train` starts from a folder of the Trainer."
        )
    if trainer.args.world_size > 1:
        raise StateError(
            f"perdure.plugins.transformers: expected one process, found {trainer.args.world_size}. The "
            f"data position of several has not been proved; use the Trainer's own checkpoints."
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise StateError(
            "the Trainer shards its model (FSDP or DeepSpeed): expected a whole model in each process. "
            "Save with the Trainer's own checkpoints, or train with a loop of your own and "
            "perdure.plugins.dcp."
        )
    if trainer.args.ignore_data_skip:
        raise StateError(
            "ignore_data_skip: expected False, found True. The resumed run would see other batches."
        )
    if trainer.args.dataloader_persistent_workers:
        raise persistent_workers_error(
            "Set dataloader_persistent_workers=False in the TrainingArguments."
        )


def _interval(steps: float) -> int:
    if steps < 1 or steps != int(steps):
        raise ArgumentError(
            f"save_steps: expected a whole number of steps from 1, found {steps}. Set it in the "
            f"TrainingArguments, or pass a CheckpointManager with save_interval_steps."
        )
    return int(steps)


def _recipe(trainer: Trainer) -> dict[str, Any]:
    """What decides which examples a step sees."""
    args = trainer.args
    fields = {
        "seed": args.seed,
        "data_seed": args.data_seed,
        "batch_size": args.per_device_train_batch_size * max(1, args.n_gpu),
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
    }
    if isinstance(trainer.train_dataset, Sized):
        fields["examples"] = len(trainer.train_dataset)
    return {name: value for name, value in fields.items() if value is not None}
