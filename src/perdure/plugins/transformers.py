"""For users of the Hugging Face Trainer: `train`, which resumes by itself, also within an epoch.

    perdure.plugins.transformers.train(trainer, "runs/a")  # in place of trainer.train()

In this module, too, `import transformers` means the library.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from perdure.checkpoint.manager import CheckpointManager
from perdure.errors import ArgumentError, StateError, needs_extra
from perdure.plugins import host
from perdure.state.per_rank import PerRank

host.require_version("transformers", "transformers", "5", "6")
with needs_extra("transformers"):
    import transformers.trainer as hosts
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState

__all__ = ["train"]

_STATE_FILE = "trainer_state.json"  # tells `Trainer.train` where to resume


def train(
    trainer: Trainer, run: str | os.PathLike[str] | CheckpointManager, **arguments: Any
) -> Any:
    """`trainer.train()`, which resumes from the newest good checkpoint and ends with the same bits.

    Model, optimizer, scheduler, gradient scaler, random generators and the state of the Trainer are
    saved every `args.save_steps` steps, in the background, and before the process exits after SIGTERM
    (with status 75). The Trainer's own checkpoints are not needed: use `save_strategy="no"`. Under
    `torchrun` or `accelerate launch` every process calls this (DDP, FSDP2).

    Args:
        trainer: The Trainer.
        run: The run directory; the newest `args.save_total_limit` checkpoints stay (None: all). Or a
            manager, whose own interval, retention and options then count.
        arguments: Of `trainer.train`, except for `resume_from_checkpoint`.

    Returns:
        What `trainer.train` returns.

    Raises:
        ArgumentError: `save_steps` is a fraction, or `resume_from_checkpoint` is given.
        RecipeMismatchError: The checkpoint was made with another batch size, seed or dataset length.
        StateError: The checkpoint is of another number of processes, the Trainer shards its model with
            FSDP1 or DeepSpeed, it does not skip data that it has seen, a loader has
            `persistent_workers=True`, or processes read parts of a dataset without a length.
    """
    _require_supported(trainer, arguments)
    interval = 1 if isinstance(run, CheckpointManager) else _interval(trainer.args.save_steps)
    with host.manager_of(
        run,
        trainer.args.world_size,
        save_interval_steps=interval,
        max_to_keep=trainer.args.save_total_limit,
        recipe=_recipe(trainer),
    ) as manager:
        rank, count = trainer.args.process_index, trainer.args.world_size
        callback = _Checkpoints(trainer, host.HostRun(manager, rank, count))
        trainer.add_callback(callback)
        try:
            return callback.train(arguments)
        finally:
            trainer.remove_callback(callback)


class _Checkpoints(TrainerCallback):
    def __init__(self, trainer: Trainer, run: host.HostRun) -> None:
        self._trainer = trainer
        self._run = run

    def train(self, arguments: dict[str, Any]) -> Any:
        with self._loading_apart():
            return self._train(arguments)

    @contextmanager
    def _loading_apart(self) -> Iterator[None]:
        """Inside, the Trainer loads batches by `Loading`, those of a resumed epoch again if need be."""
        trainer, load, skip = (
            self._trainer,
            self._trainer.get_batch_samples,
            hosts.skip_first_batches,
        )
        loading = self._run.loading

        def skipped(loader: Any, count: int) -> Any:
            is_loaded = self._run.resumed is not None and self._run.must_load_again(loader)
            if not is_loaded:
                return skip(loader, count)
            # As many as the Trainer loads at once: the first load of an epoch is another one.
            first = min(count, trainer.args.gradient_accumulation_steps)
            return _LoadedAgain(loader, [first, *[1] * (count - first)], loading)

        trainer.get_batch_samples = lambda *given: loading.apart(partial(load, *given))  # type: ignore[method-assign]
        hosts.skip_first_batches = skipped  # type: ignore[attr-defined]
        try:
            yield
        finally:
            hosts.skip_first_batches = skip  # type: ignore[attr-defined]
            del trainer.get_batch_samples

    def _train(self, arguments: dict[str, Any]) -> Any:
        if self._run.resumed is None:
            return self._trainer.train(**arguments)
        # The Trainer reads its position from a file that stands beside weights. Those and all else
        # come from the checkpoint, once the optimizer exists (`on_train_begin`).
        trainer = self._trainer
        load = trainer._load_from_checkpoint
        trainer._load_from_checkpoint = lambda *_, **__: None  # type: ignore[method-assign]
        starts = trainer.args.eval_on_start
        trainer.args.eval_on_start = False  # it was done at step 0
        try:
            with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
                Path(folder, _STATE_FILE).write_text(self._run.of_process("trainer"))
                return trainer.train(resume_from_checkpoint=folder, **arguments)
        finally:
            trainer._load_from_checkpoint = load  # type: ignore[method-assign]
            trainer.args.eval_on_start = starts

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # `get_train_dataloader` of a subclass may not follow the arguments.
        loader = kwargs.get("train_dataloader")
        is_kept = host.keeps_workers([loader])
        host.require_new_workers(is_kept, "Make the DataLoader with persistent_workers=False.")
        collator = self._trainer.data_collator
        if getattr(collator, "seed", None) and getattr(collator, "generator", self) is None:
            collator.create_rng()  # type: ignore[attr-defined]  # it would for its first batch
        self._run.load_from(loader)
        host.arrange_buckets([self._trainer.model_wrapped])
        self._run.begin(self._members(), "trainer")
        resumed = self._run.resumed
        if resumed is not None and state.global_step != resumed.step:
            raise StateError(
                f"{self._run.manager.directory}: expected that the Trainer resumes at step "
                f"{resumed.step}, found {state.global_step}."
            )

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._run.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The state of the Trainer has its whole log only now.
        self._run.between_steps(state.global_step, lambda: self._state(state))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop or state.global_step >= state.max_steps:
            if float(state.epoch).is_integer():  # a later run may begin another epoch
                self._run.begin_epoch()
            self._run.finish(state.global_step, lambda: self._state(state))

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
        host.share_buffers(self._trainer.accelerator, [self._trainer.model])
        try:
            text = json.dumps(values)
        except TypeError as error:
            raise StateError(
                f"the state of the Trainer: expected numbers, texts, lists and dicts, because the "
                f"Trainer keeps it as JSON (`state()` of a callback, or `log`); found: {error}. Turn "
                f"an array into a list there (`x.tolist()`), or make what has it a part of the model."
            ) from error
        # Says also which process this is.
        return self._members() | {"trainer": PerRank(text)}


class _LoadedAgain(host.LoaderInPlace):
    """A loader whose first batches are loaded and not used."""

    def __init__(self, loader: Any, counts: list[int], loading: host.Loading) -> None:
        super().__init__(loader, loading)
        self._counts = counts

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        for count in self._counts:
            self._loading.apart(lambda count=count: [*itertools.islice(batches, count)])
        return batches


def _require_supported(trainer: Trainer, arguments: Mapping[str, Any]) -> None:
    if "resume_from_checkpoint" in arguments:
        raise ArgumentError(
            "resume_from_checkpoint: expected none, because `perdure.plugins.transformers.train` "
            "resumes from the run directory; `trainer.train` starts from a folder of the Trainer."
        )
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    is_fsdp1 = trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) < 2
    if is_fsdp1 or trainer.is_deepspeed_enabled:
        raise StateError(
            "the Trainer shards its model with FSDP1 or DeepSpeed: expected FSDP2 (`version: 2` in "
            "`fsdp_config`) or a whole model in each process. Or save with the Trainer's own "
            "checkpoints."
        )
    if trainer.args.world_size > 1 and not isinstance(trainer.train_dataset, Sized):
        raise StateError(
            "the dataset has no length, and each of several processes would read its own part up to "
            "another place. Give the Trainer a dataset with `__len__`, or train in one process."
        )
    if trainer.args.ignore_data_skip:
        raise StateError(
            "ignore_data_skip: expected False, found True. The resumed run would see other batches."
        )
    host.require_new_workers(
        trainer.args.dataloader_persistent_workers,
        "Set dataloader_persistent_workers=False in the TrainingArguments.",
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
        "processes": args.world_size,
    }
    if isinstance(trainer.train_dataset, Sized):
        fields["examples"] = len(trainer.train_dataset)
    return {name: value for name, value in fields.items() if value is not None}
