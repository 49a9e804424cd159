"""For users of the Hugging Face Trainer: `train`, which resumes by itself, also within an epoch.

    perdure.plugins.transformers.train(trainer, "runs/a")  # in place of trainer.train()

In this module, too, `import transformers` means the library.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from perdure.checkpoint.manager import CheckpointManager
from perdure.errors import ArgumentError, StateError, needs_extra
from perdure.plugins import trainer_library as library
from perdure.state import bits
from perdure.state.per_rank import PerRank
from perdure.state.value_forms import encode_forms, made_value

library.require_version("transformers", "transformers", "5", "6")
with needs_extra("transformers"):
    import transformers.trainer as trainer_module
    from transformers import Trainer
    from transformers.trainer_callback import ExportableState

__all__ = ["train"]

_STATE_FILE = "trainer_state.json"  # tells `Trainer.train` where to resume
_OWN = "perdure"  # what it does not say
_ENDS = "_finalize_training"  # what the Trainer calls after its loop; not in its first releases
_AT_END = {"train_runtime", "train_loss", "total_flos"}  # are in the last entry of the log of these
_DTYPE = "dtype"
_ACCUMULATION = "gradient_accumulation_steps"
_HOOKS = ("on_train_begin", "on_epoch_begin", "on_step_begin", "on_epoch_end")
_LIMITS = ("max_steps", "num_train_epochs")  # which the Trainer gives its state at each start


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
    with library.manager_of(
        run,
        trainer.args.world_size,
        save_interval_steps=interval,
        max_to_keep=trainer.args.save_total_limit,
        recipe=_recipe(trainer),
    ) as manager:
        rank, count = trainer.args.process_index, trainer.args.world_size
        return _Checkpoints(trainer, library.LibraryRun(manager, rank, count)).train(arguments)


class _Checkpoints:
    """Stands around the callbacks of a Trainer: each of its hooks calls theirs (`others`)."""

    def __init__(self, trainer: Trainer, run: library.LibraryRun) -> None:
        self._trainer = trainer
        self._run = run
        # What the Trainer reads, and what it does not know: where the epochs began, for instance.
        self._told: dict[str, Any] = {}
        self._saved: dict[str, Any] = {}
        if run.resumed is not None:
            self._told = json.loads(run.process_value("trainer"))
            self._saved = self._told.pop(_OWN)
        self._loaded: dict[str, Any] = {}  # the state of the Trainer at the save
        self._args: dict[str, Any] = {}  # before the first step
        self._marks: dict[str, bytes] = {}
        self._limits: dict[str, Any] = {}
        self._begun: int | None = None
        self._per_epoch = 0
        self._batches = math.inf  # of an epoch
        self._accumulation = 1  # in this epoch
        self._place = 0
        self._epoch, self._first, self._at = 0, 0, None
        self._began = self._is_over = self._is_stopped = False

    def train(self, arguments: dict[str, Any]) -> Any:
        with self._loading_apart(), tempfile.TemporaryDirectory(prefix="perdure-") as folder:
            trainer, path = self._trainer, Path(folder, _STATE_FILE)
            count = partial(self._counts, trainer.set_initial_training_values, path)
            handler = trainer.callback_handler
            hooks = {name: partial(getattr(self, name), getattr(handler, name)) for name in _HOOKS}
            with (
                _replaced(trainer, set_initial_training_values=count),
                _replaced(handler, **hooks),
                self._ending(),
            ):
                if self._run.resumed is None:
                    return trainer.train(**arguments)
                # The Trainer reads its position from a file that stands beside weights. Those and all
                # else come from the checkpoint, once the optimizer exists (`on_train_begin`).
                path.write_text(json.dumps(self._told))
                with (
                    _replaced(trainer, _load_from_checkpoint=lambda *_, **__: None),
                    _replaced(trainer.args, eval_on_start=False),  # it was done at step 0
                ):
                    return trainer.train(resume_from_checkpoint=folder, **arguments)

    @contextmanager
    def _loading_apart(self) -> Iterator[None]:
        """Inside, the Trainer loads batches by `Loading`, again for a resumed epoch if need be."""
        trainer, load, skip = (
            self._trainer,
            self._trainer.get_batch_samples,
            trainer_module.skip_first_batches,
        )
        loading = self._run.loading

        def skipped(loader: Any, count: int) -> Any:
            is_loaded = self._run.resumed is not None and self._run.must_load_again(loader)
            if not is_loaded:
                return _Skipped(loader, partial(skip, loader, count), loading)
            # As many as the Trainer loads at once: the first load of an epoch is another one.
            first = min(count, trainer.args.gradient_accumulation_steps)
            return _LoadedAgain(loader, [first, *[1] * (count - first)], loading)

        def loaded(*given: Any) -> Any:
            return loading.apart(partial(load, *given))

        with (
            _replaced(trainer, get_batch_samples=loaded),
            _replaced(trainer_module, skip_first_batches=skipped),
        ):
            yield

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Inside, the last save comes before all that the Trainer does at its end (its last entry of
        the log, the best model, `on_train_end`): a run that has ended does that at each start."""
        trainer = self._trainer
        log, ends = trainer.log, getattr(trainer, _ENDS, None)

        def finalize(*given: Any, **named: Any) -> Any:
            self._finish()
            assert ends is not None
            return ends(*given, **named)

        def logged(logs: Any, *given: Any, **named: Any) -> Any:
            if logs.keys() >= _AT_END:
                self._finish()
            return log(logs, *given, **named)

        with _replaced(trainer, **({"log": logged} if ends is None else {_ENDS: finalize})):
            yield

    def _counts(self, count: Callable[..., Any], path: Path, *given: Any) -> Any:
        """What `count` returns. The Trainer then reads a step, and divides it by the steps of
        an epoch. The file names a step that gives the right epoch, also if some ended early."""
        counts = count(*given)
        epochs, self._per_epoch = counts[:2]
        self._batches = counts[5] or math.inf
        args = self._trainer.args
        self._accumulation = vars(args)[_ACCUMULATION]
        if (resumed := self._run.resumed) is not None:
            saved, end = self._saved, epochs * self._per_epoch
            most = saved.get("state", {}).get("max_steps", counts[-1])
            place = saved["epoch"] * self._per_epoch + saved["steps"]
            self._is_over = saved["stopped"] or resumed.step >= most or place >= end
            self._place = end if self._is_over else place
            self._epoch, steps = divmod(place, self._per_epoch)
            self._first = resumed.step - steps
            self._began = saved["began"] and steps == saved["steps"]
            path.write_text(json.dumps(self._told | {"global_step": self._place}))
            # By which the Trainer multiplies the steps of the epoch, for the batches to skip.
            args.gradient_accumulation_steps = saved.get("accumulation", self._accumulation)
        return counts

    def on_train_begin(
        self, others: Callable[..., Any], args: Any, state: Any, control: Any, **named: Any
    ) -> Any:
        trainer, resumed = self._trainer, self._run.resumed
        if resumed is not None:
            if state.global_step != self._place:
                raise StateError(
                    f"{self._run.manager.directory}: expected that the Trainer resumes at step "
                    f"{self._place}, found {state.global_step}."
                )
            state.global_step = resumed.step
            trainer._initial_global_step = trainer._globalstep_last_logged = resumed.step
            kept = {name: value for name, value in vars(state).items() if name not in _LIMITS}
            self._loaded = copy.deepcopy(kept) | self._saved.get("state", {})
            args.gradient_accumulation_steps = self._accumulation  # as the callbacks saw it
        control = others(args, state, control, **named)
        # `get_train_dataloader` of a subclass may not follow the arguments.
        loader = trainer.callback_handler.train_dataloader
        is_kept = library.keeps_workers([loader])
        library.require_new_workers(is_kept, "Make the DataLoader with persistent_workers=False.")
        collator = trainer.data_collator
        if getattr(collator, "seed", None) and getattr(collator, "generator", self) is None:
            collator.create_rng()  # type: ignore[attr-defined]  # it would for its first batch
        self._run.load_from(loader, *_evaluation_loaders(trainer))
        library.arrange_buckets([trainer.model_wrapped])
        self._args = dict(vars(args))
        self._marks = {name: bits.hash_of(value) for name, value in self._args.items()}
        self._limits = {name: vars(state)[name] for name in _LIMITS}
        self._restore(args)
        vars(state).update(copy.deepcopy(self._loaded))
        if resumed is not None and self._is_over:
            self._run.between_steps(resumed.step, dict)  # there is none to come
            (saved,) = self._told["stateful_callbacks"]["TrainerControl"]
            vars(control).update(saved["args"])
        return control

    def _restore(self, args: Any) -> None:
        # Each module has its mode beside that of the model, which an evaluation changes.
        model = self._trainer.model
        if model.training != (mode := self._saved.get("training", model.training)):
            model.train(mode)
        self._run.begin(self._members(), "trainer")
        saved = copy.deepcopy(self._saved.get("args", {}))
        vars(args).update(self._args | {name: _made(value) for name, value in saved.items()})

    def on_epoch_begin(
        self, others: Callable[..., Any], args: Any, state: Any, control: Any, **named: Any
    ) -> Any:
        is_again = self._run.resumed is not None and self._began
        if is_again:  # the callbacks see what they saw
            state.global_step, state.epoch = self._first, self._saved["at"]
        self._first, self._at = state.global_step, state.epoch
        control = others(args, state, control, **named)
        if is_again:
            callbacks = self._trainer.callback_handler.callbacks
            if any(map(_changes_epochs, callbacks)):
                self._restore(args)
                if args.restore_callback_states_from_checkpoint:
                    _restore_callbacks(callbacks, self._told["stateful_callbacks"])
            vars(state).update(copy.deepcopy(self._loaded))
        self._run.begin_epoch(is_new=not self._began)
        self._began = True
        self._accumulation = args.gradient_accumulation_steps
        return control

    def on_step_begin(
        self, others: Callable[..., Any], args: Any, state: Any, control: Any, **named: Any
    ) -> Any:
        # Before the callbacks, which do this again in a resumed run. The end of an epoch may have
        # accumulated gradients without a step: the next one begins with the same number, and the save
        # of that number repeats them.
        step: int = state.global_step
        is_whole, self._begun = step != self._begun, step
        self._run.between_steps(step, lambda: self._state(state), may_save=is_whole)
        return others(args, state, control, **named)

    def on_epoch_end(
        self, others: Callable[..., Any], args: Any, state: Any, control: Any, **named: Any
    ) -> Any:
        control = others(args, state, control, **named)
        stops = control.should_training_stop or state.global_step >= state.max_steps
        if control.should_epoch_stop or not stops:
            self._epoch, self._first, self._began = self._epoch + 1, state.global_step, False
        return control

    def _finish(self) -> None:
        # After the last evaluation, which may stop the run.
        state, control = self._trainer.state, self._trainer.control
        self._is_stopped = control.should_training_stop and state.global_step < state.max_steps
        if not self._began or self._steps(state) >= self._per_epoch:
            self._run.begin_epoch()  # a later run may begin another epoch
        self._run.finish(state.global_step, lambda: self._state(state))

    def _steps(self, state: Any) -> int:
        """The steps of this epoch; as many as the Trainer has counted for one if its batches are used
        up, which a callback that lets each step accumulate more does with fewer."""
        steps = state.global_step - self._first
        return self._per_epoch if steps * self._accumulation >= self._batches else steps

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
        steps, args = self._steps(state), self._trainer.args
        if self._began and steps < self._per_epoch:
            _require_accumulation(self._accumulation, args.gradient_accumulation_steps)
        self._trainer.store_flos()
        exported: dict[str, list[Any]] = {}
        for member in [*self._trainer.callback_handler.callbacks, self._trainer.control]:
            if isinstance(member, ExportableState):
                exported.setdefault(type(member).__name__, []).append(member.state())
        values = dataclasses.asdict(state)
        own = {
            name: value
            for name, value in vars(state).items()
            if name not in values or (name in self._limits and value != self._limits[name])
        }
        values["stateful_callbacks"] = exported
        values[_OWN] = {
            "epoch": self._epoch,
            "steps": steps,
            "accumulation": self._accumulation,
            "at": self._at,
            "began": self._began,
            "stopped": self._is_stopped,
            "training": self._trainer.model.training,
            "state": own,
            "args": {
                name: _stored(name, value)
                for name, value in vars(args).items()
                if self._marks.get(name) != bits.hash_of(value)
            },
        }
        library.share_buffers(self._trainer.accelerator, [self._trainer.model])
        try:
            text = json.dumps(values)
        except TypeError as error:
            raise StateError(
                f"the state of the Trainer: expected numbers, texts, lists and dicts, because the "
                f"Trainer keeps it as JSON (an attribute, `state()` of a callback, or `log`); found: "
                f"{error}. Turn an array into a list there (`x.tolist()`), or make what has it a part "
                f"of the model."
            ) from error
        # Says also which process this is.
        return self._members() | {"trainer": PerRank(text)}


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Inside, `owner` has these attributes."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            delattr(owner, name)
        for name, value in before.items():
            setattr(owner, name, value)


def _stored(name: str, value: Any) -> Any:
    """What JSON keeps of a changed argument, from which `_made` makes the same bits."""
    stored = value
    if isinstance(value, np.generic):
        stored = {_DTYPE: value.dtype.str, "bytes": value.tobytes().hex()}
    elif isinstance(value, enum.Enum):
        stored = encode_forms(value)
    try:
        is_same = bits.same(_made(json.loads(json.dumps(stored))), value)
    except (TypeError, ValueError):
        is_same = False
    if not is_same:
        raise StateError(
            f"args.{name}: expected a number, a text, None, a member of an enum, or lists and dicts of "
            f"numbers and texts, because the run has changed it; found {type(value).__name__}, which "
            f"would not come back. Set it before the training or in `on_train_begin`."
        )
    return stored


def _made(stored: Any) -> Any:
    if not isinstance(stored, dict):
        return stored
    if stored.keys() == {_DTYPE, "bytes"}:
        return np.frombuffer(bytes.fromhex(stored["bytes"]), stored[_DTYPE])[0]
    return made_value(stored)


def _require_accumulation(began: int, found: int) -> None:
    if found != began:
        raise StateError(
            f"args.{_ACCUMULATION}: expected {began}, as where the epoch began, found {found}. The "
            f"Trainer finds its place in an epoch by it, and a resumed run would accumulate other "
            f"batches. Change it where an epoch begins or ends (`on_epoch_begin`, `on_epoch_end`)."
        )


def _evaluation_loaders(trainer: Trainer) -> list[Any]:
    data = trainer.eval_dataset
    names = [] if data is None else data if isinstance(data, dict) else [None]
    return [*map(trainer.get_eval_dataloader, names)]


def _changes_epochs(callback: Any) -> bool:
    """Whether a callback, which is none of transformers, does something where an epoch begins."""
    return not type(callback).on_epoch_begin.__module__.startswith("transformers.")


def _restore_callbacks(callbacks: Iterable[Any], exported: Mapping[str, Iterable[Any]]) -> None:
    states = {name: iter(each) for name, each in exported.items()}
    for callback in callbacks:
        state = next(states.get(type(callback).__name__, iter(())), {})
        vars(callback).update(state.get("attributes", {}))


class _Skipped(library.LoaderInPlace):
    """A loader without its first batches, whose parts hear of an epoch as without a resume. The loader
    that Accelerate makes for it looks for them one level too high."""

    def __init__(self, loader: Any, skip: Callable[[], Any], loading: library.Loading) -> None:
        super().__init__(loader, loading)
        self._skip = skip

    def __iter__(self) -> Iterator[Any]:
        rest = self._skip()
        if hasattr(self._loader, "set_epoch"):
            rest.set_epoch = self._loader.set_epoch
        return iter(rest)


class _LoadedAgain(library.LoaderInPlace):
    """A loader whose first batches are loaded and not used."""

    def __init__(self, loader: Any, counts: list[int], loading: library.Loading) -> None:
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
    library.require_new_workers(
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
