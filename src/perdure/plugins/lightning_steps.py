"""Saves of Lightning that come when a step is over, and runs that continue after it.

Lightning lets its `ModelCheckpoint` save in the middle of a step: before the module's own
`on_train_batch_end` (where many keep an average of the weights), before the validation, and before
the schedulers that need a metric. A run that resumes there leaves all of that out. Here these
callbacks come last. Lightning's checkpoints have no metrics, which decide on rates and on the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException

from perdure.errors import StateError

_HOOKS = ("on_train_batch_end", "on_validation_end", "on_train_epoch_end")
_SUMS = ("value", "cumulated_batch_size")
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
        self._due: list[Callable[[], None]] = []
        self._replaced: list[tuple[Any, str]] = []
        self._epochs = trainer.fit_loop.epoch_progress
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Checkpoint):
                for name in _HOOKS:
                    self._replace(callback, name, self._later)
        self._replace(trainer.fit_loop.epoch_loop, "on_advance_end", self._end_batch)
        self._replace(trainer.fit_loop, "on_advance_end", self._end_epoch)

    def close(self) -> None:
        """Give the callbacks and the loops their own methods back."""
        for owner, name in self._replaced:
            vars(owner).pop(name, None)
        self._replaced, self._due = [], []

    def _replace(self, owner: Any, name: str, method: Callable[..., None]) -> None:
        setattr(owner, name, partial(method, getattr(owner, name)))
        self._replaced.append((owner, name))

    def _later(self, hook: Callable[..., None], *arguments: Any) -> None:
        if self.is_within:
            self._due.append(partial(hook, *arguments))
        else:
            hook(*arguments)

    def _end_batch(self, end: Callable[..., None], *arguments: Any) -> None:
        try:
            end(*arguments)
        except SIGTERMException:  # which Lightning raises when all else is done
            self._save()
            raise
        if not self._is_last():
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
        for hook in due:
            hook()


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
        epoch_loop.reset()  # counts as in a restart
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
    """What the callbacks see of the metrics, and what the epoch has added up of each until now."""
    seen = trainer._logger_connector._callback_metrics
    results = trainer.fit_loop.epoch_loop._results
    sums = [[key, _sums(each)] for key, each in results.items() if not each.has_reset]
    return {"seen": [[name, each.detach().cpu()] for name, each in seen.items()], "sums": sums}


def put_metrics(trainer: Trainer, state: dict[str, Any], is_within_epoch: bool) -> None:
    """Restore what `metrics` has returned."""
    device = trainer.strategy.root_device
    connector = trainer._logger_connector
    connector._callback_metrics.update({name: each.to(device) for name, each in state["seen"]})
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
        metric._update_count = 1
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
    }
