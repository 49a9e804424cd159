"""Saves of Lightning that come when a step is over, and runs that continue after it.

Lightning lets its `ModelCheckpoint` save in the middle of a step: before the module's own
`on_train_batch_end` (where many keep an average of the weights), before the validation, and before
the schedulers that need a metric. A run that resumes there leaves all of that out. Here these
callbacks come last. Lightning's checkpoints have no metrics, which decide on rates and on the end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException

from perdure.errors import StateError

_HOOKS = ("on_train_batch_end", "on_validation_end", "on_train_epoch_end")
_SUMS = ("value", "cumulated_batch_size")
_LEFT_OUT = (
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
    "current_score",
)
_NEWEST = "_callback_metrics", "_logged_metrics", "_progress_bar_metrics"
_ARGUMENTS = [each.name for each in fields(_Metadata) if each.name not in ("reduce_fx", "_sync")]


class StepEnds:
    """Lets the checkpoint callbacks of a trainer save when a step is over, and not within it.

    The last step of an epoch is over when the epoch is: after `on_train_epoch_end` of the module, and
    the schedulers that step once an epoch.
    """

    def __init__(self, trainer: Trainer, is_last: Callable[[], bool]) -> None:
        self.is_within = False
        """Whether a step is under way."""
        self._is_last = is_last
        self._due: list[tuple[Any, Callable[[], None]]] = []
        self._replaced: list[tuple[Any, str]] = []
        self._trainer = trainer
        self._epochs = trainer.fit_loop.epoch_progress
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        savers = [each for each in callbacks if isinstance(each, Checkpoint)]
        # Those that a run resumes from come last: they know the files of the others.
        self._savers = sorted(savers, key=_is_resumed_from)
        for callback in savers:
            for name in _HOOKS:
                self._replace(callback, name, partial(self._later, callback))
        self._replace(trainer.fit_loop.epoch_loop, "on_advance_end", self._end_batch)
        self._replace(trainer.fit_loop.epoch_loop.val_loop, "_evaluation_step", _evaluate)
        self._replace(trainer.fit_loop, "on_advance_end", self._end_epoch)

    def close(self) -> None:
        """Give the callbacks and the loops their own methods back."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced, self._due = [], []

    def _replace(self, owner: Any, name: str, method: Callable[..., None]) -> None:
        setattr(owner, name, partial(method, getattr(owner, name)))
        self._replaced.append((owner, name))

    def _later(self, callback: Any, hook: Callable[..., None], *arguments: Any) -> None:
        if self.is_within:
            self._due.append((callback, partial(hook, *arguments)))
        else:
            hook(*arguments)

    def _end_batch(self, end: Callable[..., None], *arguments: Any) -> None:
        try:
            end(*arguments)
        except SIGTERMException:  # which Lightning raises when all else is done; see `_evaluate`
            self._save()
            raise
        if not self._is_last() and not self._trainer.fit_loop.epoch_loop.done:
            self._save()

    def _end_epoch(self, end: Callable[[], None]) -> None:
        self.is_within = True  # also where a hook has cut the epoch short
        try:
            end()
        except SIGTERMException:
            self._save_epoch()
            raise
        self._save_epoch()

    def _save_epoch(self) -> None:
        # The callbacks name their files by this epoch, and not by the next.
        counts = self._epochs.total, self._epochs.current
        for each in counts:
            each.completed -= 1
        try:
            self._save()
        finally:
            for each in counts:
                each.completed += 1

    def _save(self) -> None:
        self.is_within = False
        due, self._due = self._due, []
        if not due:
            return
        trainer: Any = self._trainer
        save = trainer.save_checkpoint
        written: list[tuple[Any, Callable[[], None] | None]] = []

        def write(
            saver: Any, path: Any, weights_only: bool | None = None, storage_options: Any = None
        ) -> None:
            if isinstance(saver, ModelCheckpoint):  # sets it too late for this file
                saver._last_global_step_saved = trainer.global_step
                saver._last_checkpoint_saved = path
            again = partial(save, path, weights_only, storage_options)
            written.append((saver, None if weights_only else again))
            again()

        try:
            for saver in self._savers:
                trainer.save_checkpoint = partial(write, saver)
                for hook in [hook for owner, hook in due if owner is saver]:
                    hook()
        finally:
            trainer.save_checkpoint = save
        # A run may resume from any of these files, and all but the last one lack what came later.
        for number, (saver, again) in enumerate(written, 1):
            has_all = number == len(written) and getattr(saver, "save_last", None) != "link"
            if again is not None and not has_all:
                again()


def _evaluate(step: Callable[..., None], *arguments: Any) -> None:
    """Let a validation end after SIGTERM, which Lightning breaks off: it is a part of the training step
    whose save may follow. Lightning asks again when the step is over."""
    with suppress(SIGTERMException):  # which Lightning raises when a batch is done
        step(*arguments)


def is_over(trainer: Trainer) -> bool:
    """Whether no epoch comes after the one that ends. Lightning's `done` counts while it answers."""
    loop = trainer.fit_loop
    return (
        -1 < loop.max_steps <= trainer.global_step
        or loop.epoch_progress.current.processed == loop.max_epochs
        or (trainer.should_stop and loop._can_stop_early)
    )


def _is_resumed_from(saver: Any) -> bool:
    return bool(getattr(saver, "is_resumed_from", False) or getattr(saver, "save_last", False))


def left_out(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """What each `ModelCheckpoint` knows and its `state_dict` leaves out, or does not load."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return {
        each.state_key: {name: getattr(each, name) for name in _LEFT_OUT if hasattr(each, name)}
        for each in callbacks
        if isinstance(each, ModelCheckpoint)
    }


def loaders_made(trainer: Trainer) -> list[Any]:
    """The epochs in which the loaders of the training and the validation were made, and how many
    batches each of the latter has given, by which Lightning logs."""
    training = trainer.fit_loop
    validation = training.epoch_loop.val_loop
    epochs = [training._last_train_dl_reload_epoch, validation._last_val_dl_reload_epoch]
    seen = getattr(validation, "_seen_batches_per_dataloader", {})
    return [*epochs, [[loader, count] for loader, count in seen.items()]]


def resume_run(trainer: Trainer, made: list[Any]) -> None:
    """Let a run that resumes make its loaders in the epochs of `loaders_made`, and call the hooks of
    its begin and its end also if nothing is left to do, where Lightning calls none."""
    loop: Any = trainer.fit_loop

    def run() -> None:
        del loop.run
        *epochs, seen = made
        validation = loop.epoch_loop.val_loop
        progress = loop.epoch_progress.current
        now = progress.completed
        for each, epoch in zip((loop, validation), epochs, strict=True):
            if epoch == float("-inf") or (each is validation and not trainer.enable_validation):
                continue  # none was made, or none is given now
            trainer.validating = each is validation
            progress.completed = epoch
            each.setup_data()
            trainer.training = True
        progress.completed = now
        validation._seen_batches_per_dataloader = defaultdict(int, seen)
        if trainer.limit_train_batches == 0 or loop.max_batches == 0 or not loop.done:
            loop.run()
            return
        loop.reset()
        loop.on_run_start()
        loop.restarting = False
        loop.on_run_end()

    loop.run = run


def continue_epoch(trainer: Trainer) -> None:
    """Let a run that has resumed between two steps of an epoch begin with the next one.

    Lightning would look for what a save within a step leaves undone, and would not let the schedulers
    that need a metric step at the end of the epoch.
    """
    fit_loop = trainer.fit_loop
    epoch_loop: Any = fit_loop.epoch_loop
    fit_loop._restarting = False

    def reset() -> None:
        del epoch_loop.reset
        stepped = epoch_loop._batches_that_stepped
        epoch_loop.reset()  # counts as in a restart, and perhaps the last step once more
        epoch_loop._batches_that_stepped = stepped
        epoch_loop.restarting = False

    epoch_loop.reset = reset


def begin_next_epoch(trainer: Trainer) -> None:
    """Let a run that has resumed between two epochs begin the next one, also if it counts steps alone,
    where Lightning would end the epoch once more."""
    fit_loop = trainer.fit_loop
    for each in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
        each.completed = each.processed
    fit_loop.reset_restart_stage()
    fit_loop._restarting = False
    fit_loop.epoch_loop.restarting = False


def metrics(trainer: Trainer) -> dict[str, Any]:
    """The newest value of each metric, and what the epoch has added up of each until now."""
    connector = trainer._logger_connector
    results = trainer.fit_loop.epoch_loop._results
    sums = [[key, _sums(each)] for key, each in results.items() if not each.has_reset]
    state: dict[str, Any] = {"sums": sums}
    for name in _NEWEST:
        newest = getattr(connector, name).items()
        state[name] = [[metric, _on("cpu", each)] for metric, each in newest]
    return state


def _on(device: Any, value: Any) -> Any:
    return value.detach().to(device) if torch.is_tensor(value) else value


def put_metrics(trainer: Trainer, state: dict[str, Any], is_within_epoch: bool) -> None:
    """Restore what `metrics` has returned."""
    device = trainer.strategy.root_device
    connector = trainer._logger_connector
    for name in _NEWEST:
        newest = {metric: _on(device, each) for metric, each in state[name]}
        getattr(connector, name).update(newest)
    if not is_within_epoch:
        return
    connector._first_loop_iter = False  # in the first step of an epoch Lightning begins new sums
    modules = dict(trainer.lightning_module.named_modules())
    for key, saved in state["sums"]:
        meta = _Metadata(**saved["meta"])
        meta.sync = _Sync(fn=trainer.strategy.reduce, **saved["sync"])
        metric = _ResultMetric(meta, is_tensor=bool(saved["sums"]))
        if saved["sums"]:
            for name, each in saved["sums"].items():
                setattr(metric, name, each)
        else:  # it is the module's own, which comes back with the module
            metric.value = modules[str(meta.metric_attribute)]
        metric._update_count, metric._forward_cache = 1, saved["newest"]
        trainer.fit_loop.epoch_loop._results[key] = metric.to(device)


def _sums(metric: _ResultMetric) -> dict[str, Any]:
    meta, sync = metric.meta, metric.meta.sync
    if sync.group is not None:
        raise StateError(
            f"ExactResume: the metric {meta.name} is logged with sync_dist_group, which no checkpoint "
            f"can have. Expected a metric of all processes: leave it out."
        )
    own = {name: getattr(meta, name) for name in _ARGUMENTS}
    sums = {name: getattr(metric, name).cpu() for name in _SUMS if name in metric._defaults}
    return {
        "meta": own | {"reduce_fx": meta.reduce_fx.__name__},
        "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only},
        "sums": sums,
        "newest": _on("cpu", metric._forward_cache),
    }
