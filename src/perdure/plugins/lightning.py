"""For users of Lightning: verified checkpoints, and a resume within an epoch that is exact.

    perdure.plugins.lightning.fit(trainer, "runs/a", model, loader)  # in place of trainer.fit

In this module, too, `import lightning` means the library.
"""

from __future__ import annotations

import io
import os
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from perdure import errors
from perdure.checkpoint.checkpoint import load_verified
from perdure.checkpoint.chunk_sharing import ChunkSharing
from perdure.checkpoint.preemption import EXIT_PREEMPTED
from perdure.plugins import trainer_library as library
from perdure.runtime.heartbeats import beat
from perdure.state import flatten
from perdure.state.adapter import Stateful
from perdure.state.object_restore import ObjectStates
from perdure.store import Run

library.require_version("lightning", "lightning", "2.5", "3")
with errors.needs_extra("lightning"):
    import torch
    from lightning.fabric.utilities import move_data_to_device
    from lightning.fabric.utilities.data import _set_sampler_epoch
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.callbacks import (
        BatchSizeFinder,
        Checkpoint,
        LearningRateFinder,
        ModelCheckpoint,
        ModelPruning,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.plugins.precision import DoublePrecision
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    from perdure.plugins import lightning_buffers, lightning_shards, lightning_steps
    from perdure.state.torch_loader import ResumableLoader

__all__ = ["CheckpointIO", "ExactResume", "fit"]

# `AsyncCheckpointIO` removes checkpoints in another thread than it saves them. Not in the plugin, which
# Lightning pickles when it spawns processes.
_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


def fit(
    trainer: Trainer,
    directory: str | os.PathLike[str],
    model: Any,
    *loaders: Any,
    every_n_train_steps: int = 500,
    **arguments: Any,
) -> None:
    """`trainer.fit(model, *loaders)`, which resumes from the newest good checkpoint in `directory`.

    The trainer gets `ExactResume`, `CheckpointIO` in place of Lightning's own storage plugin (another
    one stays), and a `ModelCheckpoint` that keeps the two newest checkpoints. Its other callbacks stay.

    Args:
        trainer: A Trainer that runs in one process, or in several with `strategy="ddp"` or with a
            `ModelParallelStrategy` (FSDP2), of which each process saves its shards.
        directory: Where the checkpoints are, one run directory each.
        model: The module.
        loaders: As of `trainer.fit`.
        every_n_train_steps: Optimizer steps between two checkpoints, each durable before the next step.
        arguments: Of `trainer.fit`, except for `ckpt_path`.

    Raises:
        ArgumentError: `ckpt_path` is given, or `every_n_train_steps` is not a positive integer.
        CorruptionError: All checkpoints are damaged.
        StateError: Several processes have another strategy than these, another number of them made the
            checkpoint, a loader has `persistent_workers=True`, the loader of the validation is a
            `ResumableLoader`, or another `fit` of this trainer had another directory.
    """
    if "ckpt_path" in arguments:
        raise errors.ArgumentError("fit: it selects the checkpoint itself; leave out ckpt_path.")
    if type(every_n_train_steps) is not int or every_n_train_steps < 1:
        raise errors.ArgumentError(
            f"every_n_train_steps: expected a positive integer, found {every_n_train_steps!r}."
        )
    where = Path(directory).absolute()
    newest = _newest(where)
    _equip(trainer, where, every_n_train_steps)
    trainer.fit(model, *loaders, ckpt_path=newest, **arguments)


class _Saver(ModelCheckpoint):
    """The checkpoints of `fit`; a separate class, so that its state is not the state of the user's."""

    is_resumed_from = True

    def __init__(self, where: Path, interval: int) -> None:
        super().__init__(
            where, monitor="step", mode="max", save_top_k=2, every_n_train_steps=interval
        )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Save at the end too: started again, the run has no step to make."""
        super().on_train_epoch_end(trainer, pl_module)
        if lightning_steps.is_over(trainer) and not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, torch.Tensor]:
        # A module may log a metric `step`, which Lightning then takes for the axis of its plots.
        found: dict[str, torch.Tensor] = super()._monitor_candidates(trainer)
        return found | {"step": torch.tensor(trainer.global_step)}


def _equip(trainer: Trainer, where: Path, interval: int) -> None:
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelStrategy):
        lightning_shards.equip(strategy)
    elif type(strategy.checkpoint_io) is TorchCheckpointIO:
        strategy.checkpoint_io = CheckpointIO()
    callbacks = list(trainer.callbacks)  # type: ignore[attr-defined]
    for saver in callbacks:
        if isinstance(saver, _Saver) and Path(str(saver.dirpath)) != where:
            raise errors.StateError(
                f"fit: this trainer has its checkpoints in {saver.dirpath}; expected that directory "
                f"again, found {where}. Make another Trainer."
            )
    if not any(isinstance(each, ExactResume) for each in callbacks):
        callbacks.append(ExactResume())
    if not any(isinstance(each, _Saver) for each in callbacks):
        callbacks.append(_Saver(where, interval))
    # Those that save come last, as Lightning orders them: they see what the others have counted.
    trainer.callbacks = sorted(callbacks, key=lambda each: isinstance(each, Checkpoint))  # type: ignore[attr-defined]


def _newest(where: Path) -> Path | None:
    """The checkpoint with the most steps that is whole; None if none was committed yet."""
    steps: list[tuple[int, Path]] = []
    for path in where.glob("*.ckpt"):
        try:
            run = Run(path)
        except errors.NotARunError:  # of another plugin, or killed before it was committed
            continue
        steps += [(step, path) for step in run.steps()[-1:]]
    damage: list[str] = []
    for _, path in sorted(steps, reverse=True):
        try:
            load_verified(path)
        except errors.CorruptionError as error:
            damage.append(f"{path}: {error}")
            continue
        for text in damage:
            warnings.warn(f"{text} Resuming from {path}, an older checkpoint.", stacklevel=3)
        return path
    if damage:
        raise errors.CorruptionError(f"no checkpoint in {where} is whole: {' '.join(damage)}")
    return None


class CheckpointIO(TorchCheckpointIO):
    """Writes each checkpoint of Lightning as a run directory of one checkpoint, at Lightning's path.

    It is committed by its manifest, survives a power loss, and is verified when it is loaded: damage is
    a `CorruptionError`. A checkpoint that Lightning has written as a file is loaded as before.
    """

    requires_state_on_load = False  # newer releases ask for it

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any = None,
    ) -> None:
        """Save `checkpoint`, durable on return. Values that have no exact form are pickled."""
        if storage_options is not None:
            raise TypeError(f"storage_options: expected None, found {storage_options!r}.")
        counts = {name: checkpoint[name] for name in ("epoch", "global_step") if name in checkpoint}
        state: dict[str, Any] = {"exact": {}, "pickled": {}, "order": list(checkpoint)}
        for name, value in checkpoint.items():
            try:
                flatten(_State({"value": value}))
                state["exact"][name] = value
            except errors.UnsupportedLeafError:
                torch.save(value, buffer := io.BytesIO())
                state["pickled"][name] = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
        leaves = flatten(_State(state))
        with _locks[os.fspath(path)], Run(path, create=True) as run:
            older = run.steps()
            run.save(lightning_shards.step_after(checkpoint, older), leaves, metrics=counts)
            run.delete(older)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,
        **newer: Any,
    ) -> dict[str, Any]:
        """The checkpoint at `path`, verified, with its tensors on the CPU; or a file of Lightning.

        `map_location` is used for a file only, `weights_only` for values that were pickled. Raises
        CorruptionError.
        """
        if os.path.isfile(path):
            return super().load_checkpoint(os.fspath(path), map_location, weights_only)
        with closing(ChunkSharing()) as sharing:
            _meet(sharing, os.fspath(path))
            leaves = load_verified(os.fspath(path), sharing=sharing).leaves
        if others := {path.partition("/")[0] for path in leaves} - {"exact", "pickled", "order"}:
            raise errors.StateError(
                f"{os.fspath(path)}: expected a checkpoint of CheckpointIO, found one with the members "
                f"{', '.join(sorted(others))}. Restore it with a CheckpointManager."
            )
        state = ObjectStates(leaves, takes=True).state(_StoredState(_State({})), "")
        values = dict(state["exact"])
        for name, data in state["pickled"].items():
            buffer = io.BytesIO(data.numpy().tobytes())
            values[name] = torch.load(buffer, weights_only=bool(weights_only))
        return {name: values[name] for name in state["order"]}

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete the checkpoint at `path`, after a save of it that is under way."""
        with _locks[os.fspath(path)]:
            super().remove_checkpoint(path)


_loads: Counter[str] = Counter()
"""How often this process has loaded each path."""

_MEET_S = 1.0
"""So long a process waits for the others to load the same checkpoint, before it reads all by itself."""


def _meet(sharing: ChunkSharing, path: str) -> None:
    """Let the processes of this machine read `path` together. No collective, because a program may
    load a checkpoint in one process alone."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    _loads[path] += 1
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    prefix = f"perdure/load/{path}/{_loads[path]}"
    keys = [f"{prefix}/{rank}" for rank in range(torch.distributed.get_world_size())]
    store.set(keys[torch.distributed.get_rank()], sharing.listen())
    try:
        store.wait(keys, timedelta(seconds=_MEET_S))
        sharing.meet([store.get(key).decode() for key in keys])
    except RuntimeError:  # another process did not come, or the store is gone
        sharing.close()  # who comes later does not wait for this process


class _State:
    """A value as the state of an object, which comes back with its types."""

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def state_dict(self) -> Any:
        return self._value

    def load_state_dict(self, state: Any) -> None:
        self._value = state


class _StoredState(Stateful):
    changes_no_array = True


class ExactResume(Callback):
    """Adds to Lightning's checkpoints what an exact resume needs, also in the middle of an epoch.

    That is the random generators, and those with which the epoch began: a resumed run begins the epoch
    with them again, draws the batches that were trained on already without using them, and continues
    with the generators of the save. Lightning restores loaders that have `state_dict` itself.
    """

    def __init__(self) -> None:
        self._rank, self._count = 0, 1
        self._batches = 0
        self._has_ended = False  # the epoch, also of a loader without a length
        self._epoch_began: library.GeneratorStates = {}
        self._loading = library.Loading()
        self._loading_at_save: dict[str, Any] = {}
        self._in_ddp: set[int] | None = None
        self._resumed: library.GeneratorStates | None = None
        self._loaders: list[ResumableLoader] = []
        self._positions: list[dict[str, Any]] = []
        self._trainer: Trainer | None = None
        self._extras = library.LibraryExtras()
        self._extras_at_save: dict[str, Any] = {}
        self._callbacks_at_save: dict[str, Any] = {}
        self._buffers_at_save: dict[str, Any] = {}
        self._changed_buffers = lightning_buffers.ChangedBuffers()
        self._savers_at_save: dict[str, Any] = {}  # what their own states leave out
        self._accumulation: tuple[int, int | None] = 1, None  # at the begin, and in the checkpoint
        self._steps: lightning_steps.StepEnds | None = None
        self._was_within = False  # a step, when the checkpoint was saved
        self._metrics_at_save: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        strategy = trainer.strategy
        is_exact = isinstance(strategy, DDPStrategy) or lightning_shards.is_equipped(strategy)
        if trainer.world_size > 1 and not is_exact:
            raise errors.StateError(
                f"ExactResume: expected one process, `strategy='ddp'`, or a ModelParallelStrategy and "
                f"`perdure.plugins.lightning.fit(trainer, ...)`; found {trainer.world_size} processes "
                f"with {type(strategy).__name__}, which saves past the callbacks of others."
            )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        for each in callbacks:
            if isinstance(each, (LearningRateFinder, BatchSizeFinder)):
                raise errors.StateError(
                    f"ExactResume: the callback {type(each).__name__} runs at each start, and would "
                    f"train a resumed run again. Expected a `Tuner(trainer)` which searches before."
                )
        if any(isinstance(each, StochasticWeightAveraging) for each in callbacks):
            raise errors.StateError(
                "ExactResume: the callback StochasticWeightAveraging exchanges the schedulers during "
                "the training, and has the averaged model in no checkpoint. Train without it, and "
                "average checkpoints afterwards (`perdure average`)."
            )
        if any(isinstance(each, ModelPruning) for each in callbacks):
            raise errors.StateError(
                "ExactResume: the callback ModelPruning gives layers masks and other parameters, which "
                "a new module does not have, so that Lightning cannot load its checkpoints. Train "
                "without it, or prune with `torch.nn.utils.prune` in a loop with a CheckpointManager."
            )
        self._rank, self._count = trainer.global_rank, trainer.world_size
        vars(trainer.fit_loop).pop("run", None)  # of a resume that failed before it began
        self._extras = library.LibraryExtras(self._rank, self._count)
        self._changed_buffers = lightning_buffers.ChangedBuffers()
        vars(strategy).pop("load_model_state_dict", None)
        load = strategy.load_model_state_dict

        def load_all(checkpoint: Mapping[str, Any], strict: bool = True) -> None:
            if isinstance(strategy.precision_plugin, DoublePrecision):
                # Lightning converts a module after it has loaded, so that values lose bits on the way.
                strategy.precision_plugin.convert_module(strategy.lightning_module)
            self._changed_buffers.make(strategy.lightning_module, checkpoint)
            load(checkpoint, strict=strict)

        strategy.load_model_state_dict = load_all

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        vars(trainer.strategy).pop("load_model_state_dict", None)
        self._trainer = None
        if self._steps is not None:
            self._steps.close()
        self._steps = None

    def state_dict(self) -> dict[str, Any]:
        """Of all processes: Lightning asks each one, and saves what the first returns."""
        own: dict[str, Any] = {
            "epoch_began": _tensors(self._epoch_began),
            "now": _tensors(library.generator_states()),
        }
        try:
            own["loading"] = _with_tensors(self._loading.state())
            self._require_in_ddp()
            own["extras"] = {}
            if self._trainer is not None:
                own["extras"] = self._extras.capture(_members(self._trainer))
                own["metrics"] = lightning_steps.metrics(self._trainer)
        except errors.StateError as error:  # the others wait for what this process gathers
            own["refused"] = error
        states = self._states_of_the_first() if self._count > 1 else {}
        digests = {key: library.digest_of(_State(state)) for key, state in states.items()}
        gathered = self._gathered((own, digests))
        processes = [each for each, _ in gathered]
        for each in processes:
            if "refused" in each:
                raise each["refused"]
        # Lightning saves those of one process, and they may be large.
        found = {item for _, seen in gathered for item in seen.items()}
        if differing := {key for key, n in Counter(key for key, _ in found).items() if n > 1}:
            different = {key: states[key] for key in differing & states.keys()}
            found_there = self._gathered(move_data_to_device(different, "cpu"))
            for each, there in zip(processes, found_there, strict=True):
                for (kind, name), state in there.items():
                    each.setdefault(kind, {})[name] = state
        positions = [loader.state_dict() for loader in self._loaders]
        state = {"batches": self._batches, "positions": positions, "processes": processes}
        state |= {"has_ended": self._has_ended, "within": self._warn_within()}
        state["should_stop"] = self._trainer is not None and self._trainer.should_stop
        if self._trainer is not None:
            state["savers"] = lightning_steps.left_out(self._trainer)
            state["made"] = lightning_steps.loaders_made(self._trainer)
        count = 1 if self._trainer is None else self._trainer.accumulate_grad_batches
        return state if count == self._accumulation[0] else state | {"accumulation": count}

    def _gathered(self, own: Any) -> list[Any]:
        """What each process has."""
        values: list[Any] = [own] * self._count
        if self._count > 1:
            torch.distributed.all_gather_object(values, own)
        return values

    def _states_of_the_first(self) -> dict[tuple[str, str], Any]:
        """What Lightning saves of the first process alone, by kind and name."""
        if self._trainer is None:
            return {}
        callbacks: list[Any] = self._trainer.callbacks  # type: ignore[attr-defined]
        states = {each.state_key: each.state_dict() for each in callbacks if each is not self}
        return {("callbacks", key): state for key, state in states.items() if state} | {
            (kind, name): buffer
            for kind, module in _with_buffers(self._trainer).items()
            for name, buffer in lightning_buffers.persistent(module).items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batches, self._has_ended = state_dict["batches"], state_dict["has_ended"]
        self._was_within = state_dict["within"]
        self._positions = state_dict["positions"]
        self._accumulation = 1, state_dict.get("accumulation")
        library.require_count("ExactResume", len(state_dict["processes"]), self._count)
        own = state_dict["processes"][self._rank]
        self._epoch_began = _arrays(own["epoch_began"])
        self._loading_at_save = _without_tensors(own["loading"])
        self._resumed = _arrays(own["now"])
        self._extras_at_save = own["extras"]
        self._metrics_at_save = own.get("metrics")
        self._callbacks_at_save = own.get("callbacks", {})
        self._buffers_at_save = {kind: own[kind] for kind in own if kind.startswith("buffers")}
        self._savers_at_save = state_dict.get("savers", {})

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self._changed_buffers.save(pl_module, checkpoint)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        """Leave a run at its end that a callback has stopped, and check a model once: Lightning does it
        again for a checkpoint of an epoch's end."""
        state = checkpoint.get("callbacks", {}).get(self.state_key, {})
        trainer.should_stop = state.get("should_stop", trainer.should_stop)
        trainer.num_sanity_val_steps = 0
        if "made" in state and trainer.state.fn == "fit":
            lightning_steps.resume_run(trainer, state["made"])

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Any) -> None:
        """What this validation changes in the module is none of a resumed run's."""
        self._extras.observe(_members(trainer))
        self._changed_buffers.observe(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        beat("compile", trainer.global_step)
        self._trainer = trainer
        self._steps = lightning_steps.StepEnds(trainer, lambda: self._has_ended)
        library.arrange_buckets([trainer.strategy.model])
        self._in_ddp = None
        if isinstance(trainer.strategy.model, torch.nn.parallel.DistributedDataParallel):
            parameters = trainer.strategy.model.parameters()
            self._in_ddp = {id(each) for each in parameters if each.requires_grad}
        self._extras.observe(members := _members(trainer))
        self._extras.restore(members, self._extras_at_save, "ExactResume")
        self._extras_at_save = {}
        self._changed_buffers.observe(pl_module)
        for kind, module in _with_buffers(trainer).items():
            lightning_buffers.restore(module, self._buffers_at_save.pop(kind, {}))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if (state := self._callbacks_at_save.pop(callback.state_key, None)) is not None:
                callback.load_state_dict(state)
            vars(callback).update(self._savers_at_save.pop(callback.state_key, {}))
        before, changed = trainer.accumulate_grad_batches, self._accumulation[1]
        self._accumulation = before, None
        if changed is not None:  # a callback sets it where an epoch begins, and this one has begun
            trainer.accumulate_grad_batches = changed
        fetcher = _fetcher(trainer)
        _require_new_workers([*fetcher.combined_loader.flattened, *_validation_loaders(trainer)])
        _require_positions(fetcher)
        if not (is_positioned := _is_positioned(fetcher)):
            self._load_apart(fetcher)
        resumed, self._resumed = self._resumed, None
        is_moved = self._restore_positions(fetcher)
        is_new = resumed is None or self._has_ended
        if is_new:
            self._batches = 0
            if resumed is not None:
                lightning_steps.begin_next_epoch(trainer)
        is_over = resumed is not None and trainer.fit_loop.done
        if not is_new and not is_over and not self._was_within:
            lightning_steps.continue_epoch(trainer)
        if self._metrics_at_save is not None:
            lightning_steps.put_metrics(trainer, self._metrics_at_save, not is_new)
        self._metrics_at_save = None
        if not is_new and not is_over and not is_positioned:
            library.restore_generators(self._epoch_began)
            self._loading.restore(self._loading_at_save["began"])
            for loader in fetcher.combined_loader.flattened:
                # Lightning does it when it begins the epoch, which is later.
                _set_sampler_epoch(loader, trainer.fit_loop.epoch_progress.current.processed)
            iter(fetcher)
            for _ in range(self._batches):
                next(fetcher)
            fetcher.fetched -= self._batches  # Lightning adds those that were trained on
        library.restore_generators(resumed or {})
        if resumed is not None and not is_positioned:
            self._loading.restore(self._loading_at_save["now"])
        if is_over:  # a loader would draw from the generators
            return
        if (is_new and _leave_epochs(self._loaders)) or is_moved:
            iter(fetcher)
        if is_new and not is_positioned:
            iter(fetcher)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        fetcher = _fetcher(trainer)
        self._loaders = _resumable_loaders(fetcher)
        _leave_epochs(self._loaders)
        if not _is_positioned(fetcher) and not isinstance(fetcher.combined_loader, _LoadedApart):
            self._load_apart(fetcher)  # `reload_dataloaders_every_n_epochs` has made new loaders
            iter(fetcher)
        self._batches, self._has_ended = 0, False

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if self._steps is not None:
            self._steps.is_within = True

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        _require_new_workers(_validation_loaders(trainer))

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Count the batches of the epoch. Lightning's own checkpoints are saved after this."""
        self._batches += 1
        self._has_ended = _fetcher(trainer).done or self._batches >= trainer.num_training_batches
        beat("step", trainer.global_step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """The epoch may have been cut short. Callbacks that save come later."""
        self._has_ended = True

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        """After SIGTERM exit with status 75, "start me again"; Lightning's own 0 means done."""
        if self._steps is not None:
            self._steps.close()
        if trainer.received_sigterm and isinstance(exception, SystemExit) and not exception.code:
            exception.code = EXIT_PREEMPTED

    def _warn_within(self) -> bool:
        """Whether a step is under way: a checkpoint would have only a part of it."""
        is_within = self._steps is not None and self._steps.is_within
        if is_within and self._rank == 0:
            warnings.warn(
                "ExactResume: this checkpoint is saved in the middle of a step, and a run that resumes "
                "from it leaves the rest of the step out. Expected a save by a ModelCheckpoint, which "
                "ExactResume calls when the step is over.",
                stacklevel=2,
            )
        return is_within

    def _restore_positions(self, fetcher: Any) -> bool:
        """Whether a loader had to be moved: Lightning restores none at the end of an epoch."""
        self._loaders = _resumable_loaders(fetcher)
        pairs = list(zip(self._loaders, self._positions, strict=False))
        moved = [(loader, state) for loader, state in pairs if loader.state_dict() != state]
        for loader, state in moved:
            loader.load_state_dict(state)
        self._positions = []
        return bool(moved)

    def _load_apart(self, fetcher: Any) -> None:
        loader = fetcher.combined_loader
        self._loading.of(*loader.flattened)
        fetcher.setup(_LoadedApart(loader, self._loading, self._begin_epoch))

    def _begin_epoch(self) -> None:
        self._epoch_began = library.generator_states()
        self._loading.begin_epoch()

    def _require_in_ddp(self) -> None:
        """Refuse parameters that each process trains alone: a checkpoint has the first process's."""
        if self._in_ddp is None or self._trainer is None:
            return
        module = self._trainer.lightning_module
        others = (
            name
            for name, each in module.named_parameters()
            if each.requires_grad and id(each) not in self._in_ddp
        )
        if (first := next(others, None)) is not None:
            raise errors.StateError(
                f"ExactResume: {first} is trained now and was frozen when DDP wrapped the module, so "
                f"that DDP does not add its gradients, and each process has other values. Expected "
                f"that it is trainable until training begins: freeze it in `on_train_start`, or "
                f"train in one process."
            )


class _LoadedApart(library.LoaderInPlace):
    """What a fetcher draws batches from: each pass begins when its first batch is drawn, and not when
    the fetcher asks for an iterator, because a validation may come in between."""

    def __init__(self, loader: Any, loading: library.Loading, begin: Callable[[], None]) -> None:
        super().__init__(loader, loading)
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        batches = iter(self._loader)
        while True:
            try:
                batch = self._loading.apart(partial(next, batches))
            except StopIteration:
                return
            yield batch


def _members(trainer: Trainer) -> dict[str, Any]:
    """The objects that Lightning restores itself, by their `state_dict`."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return {
        "module": trainer.strategy.model,  # perhaps in DDP, which has a state of its own
        "optimizers": list(trainer.optimizers),
        "schedulers": schedulers,
    }


def _with_buffers(trainer: Trainer) -> dict[str, torch.nn.Module]:
    """The module and the modules of callbacks (averages), by the kind of their buffers in a save."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    held = {
        f"buffers {callback.state_key} {name}": each
        for callback in callbacks
        for name, each in vars(callback).items()
        if isinstance(each, torch.nn.Module) and each is not trainer.lightning_module
    }
    return {"buffers": trainer.lightning_module, **held}


def _fetcher(trainer: Trainer) -> Any:
    fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
    if fetcher is None or not hasattr(fetcher, "combined_loader"):
        raise errors.StateError(
            "ExactResume: this release of Lightning draws its batches in another way."
        )
    if hasattr(fetcher, "iterator_wrapper"):
        raise errors.StateError(
            "ExactResume: `training_step` takes a `dataloader_iter`, so that nobody can tell which "
            "batches were trained on; take a batch instead."
        )
    return fetcher


def _is_positioned(fetcher: Any) -> bool:
    return all(map(_has_position, fetcher.combined_loader.flattened))


def _has_position(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _require_positions(fetcher: Any) -> None:
    """Refuse loaders whose position Lightning would not save exactly."""
    if not _resumable_loaders(fetcher):
        return
    if not _is_positioned(fetcher):
        raise errors.StateError(
            "ExactResume: some loaders are ResumableLoaders and others have no position. Expected that "
            "all are ResumableLoaders, or none."
        )
    if fetcher.length is None:
        raise errors.StateError(
            "ExactResume: the sampler of a ResumableLoader has no length, so that Lightning reads a "
            "batch ahead, which a resumed run would leave out. Expected a sampler with `__len__`."
        )


def _resumable_loaders(fetcher: Any) -> list[ResumableLoader]:
    loaders = fetcher.combined_loader.flattened
    return [loader for loader in loaders if isinstance(loader, ResumableLoader)]


def _leave_epochs(loaders: list[ResumableLoader]) -> bool:
    """Begin the next epoch of each loader that is within one, as after `limit_train_batches`."""
    within = [loader for loader in loaders if loader.batch]
    for loader in within:
        loader.set_epoch(loader.epoch + 1)
    return bool(within)


def _validation_loaders(trainer: Trainer) -> list[Any]:
    loop = trainer.fit_loop.epoch_loop.val_loop
    loaders = [] if loop._combined_loader is None else loop._combined_loader.flattened
    if any(isinstance(loader, ResumableLoader) for loader in loaders):
        raise errors.StateError(
            "ExactResume: a validation has a ResumableLoader, whose passes continue where the last one "
            "has ended. Expected a DataLoader there."
        )
    return loaders


def _require_new_workers(loaders: list[Any]) -> None:
    library.require_new_workers(
        library.keeps_workers(loader for loader in loaders if not _has_position(loader)),
        "Make each DataLoader with persistent_workers=False, or wrap that of the training in a "
        "perdure.torch.ResumableLoader, which may keep its workers.",
    )


def _with_tensors(state: Any) -> Any:
    """The state of a generator with tensors for arrays, which Lightning's own files can have."""
    if isinstance(state, dict):
        return {name: _with_tensors(each) for name, each in state.items()}
    return torch.from_numpy(state.astype("int64")) if isinstance(state, np.ndarray) else state


def _without_tensors(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _without_tensors(each) for name, each in state.items()}
    is_array = torch.is_tensor(state) and state.dtype == torch.int64
    return state.numpy().astype("uint64") if is_array else state


def _tensors(states: library.GeneratorStates) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(state) for name, state in states.items()}


def _arrays(tensors: Mapping[str, torch.Tensor]) -> library.GeneratorStates:
    return {name: tensor.numpy() for name, tensor in tensors.items()}
