"""TensorFlow's names that are not carried over, each with the form to write instead.

A module or a class that takes the place of one of TensorFlow's asks `missing` for the error of a name
that it lacks. docs/how-to/from-tf-train.md has the same table for people, with the names that work.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from functools import wraps
from inspect import signature
from opcode import opname
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from perdure.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_STEP = "The number of a checkpoint is the step that `manager.save(step, state)` is given."
_NO_SESSIONS = "There are no sessions and no servers: leave it out."
_STRATEGIES = "Strategies are in perdure.jax and perdure.torch, under TensorFlow's names."
_STEPS = "Each step has its number: `Hook.after_step(trainer, logs)`, `manager.save(step, state)`."
_SAVES = "Checkpoints, logs and summaries have their intervals in perdure.RunConfig."
_ITS_OWN = "It stays TensorFlow's: perdure has the checkpoints, the loop and the strategies."
_CLUSTER = (
    "`perdure.distribute.ClusterResolver` and `strategy.cluster_resolver` describe the group."
)

_FIXED = (
    "Nothing: additions have a fixed order. Time limits are in perdure.distribute.ClusterOptions."
)

_ROWS = {
    _STEPS: "global_step get_global_step create_global_step get_or_create_global_step",
    _SAVES: "CheckpointSaverHook LoggingTensorHook SummarySaverHook StepCounterHook SecondOrStepTimer",
    "perdure.train.EarlyStopping, or a Hook that calls `trainer.request_stop(reason)`.": """
        make_early_stopping_hook stop_if_higher_hook stop_if_lower_hook stop_if_no_decrease_hook
        stop_if_no_increase_hook""",
    "`strategy.step(..., check_finite=True)`, or a Hook that raises.": (
        "NanTensorHook NanLossDuringTrainingError"
    ),
    "A method of a perdure.train.Hook gets the trainer: `after_step(trainer, logs)`.": (
        "SessionRunArgs SessionRunContext SessionRunValues"
    ),
    "trainer.train_and_evaluate(data, max_steps, every=steps)": """
        TrainSpec EvalSpec train_and_evaluate InMemoryEvaluatorHook""",
    "`perdure export RUN OUT` after the training, or RUN@best.": "BestExporter LatestExporter",
    _CLUSTER: "ClusterSpec cluster_resolver",
    _ITS_OWN: """Variable Module GradientTape function io random summary config saved_model tensorflow
        compat nn losses initializers AUTOTUNE""",
    "Keras's own, keras.optimizers and so on.": "optimizers models layers",
    _STRATEGIES: "MirroredStrategy MultiWorkerMirroredStrategy OneDeviceStrategy get_strategy",
    f"{_STRATEGIES} There is none for TPUs or parameter servers.": (
        "TPUStrategy ParameterServerStrategy CentralStorageStrategy"
    ),
    "The same name in perdure.torch and perdure.jax.": "get_replica_context InputContext ReduceOp",
    "The same name in perdure.distribute.": "DistributedDataset Strategy TFConfigClusterResolver",
    _FIXED: """CommunicationOptions CommunicationImplementation CrossDeviceOps NcclAllReduce
        HierarchicalCopyAllReduce ReductionToOneDevice""",
    "Nothing to choose: leave it out.": "InputOptions RunOptions",
    "There are no queues and no parameter servers: leave it out.": "Coordinator coordinator",
}
"""Names of `perdure` and its modules, by what to write in their place."""

FORMS: dict[str, dict[str, str]] = {
    "perdure": {
        **{name: form for form, names in _ROWS.items() for name in names.split()},
        "CheckpointOptions": "perdure.ManagerOptions",
        "checkpoints_iterator": "Call perdure.latest_checkpoint(directory) again until it changes.",
        "get_checkpoint_state": "perdure.latest_checkpoint(directory), or `perdure ls RUN`.",
        "list_variables": "perdure.load_checkpoint(run), or `perdure show RUN`.",
        "load_variable": "perdure.load_checkpoint(run, leaves=path)",
        "Estimator": "perdure.Trainer",
        "EstimatorSpec": "perdure.Trainer(step_fn, state, data, config, eval_fn=eval_fn)",
        "estimator": "perdure.Trainer and perdure.RunConfig",
        "SessionRunHook": "perdure.train.Hook",
        "CheckpointSaverListener": "perdure.train.Hook, with before_save and after_save.",
        "Saver": "perdure.CheckpointManager(directory, max_to_keep=5)",
        "NewCheckpointReader": "perdure.load_checkpoint(run), or `perdure show RUN`.",
        "StopAtStepHook": "trainer.train(max_steps=n)",
        "MonitoredTrainingSession": "perdure.Trainer",
        "MonitoredSession": "perdure.Trainer",
        "Scaffold": _NO_SESSIONS,
        "Server": _NO_SESSIONS,
        "PreemptionCheckpointHandler": "perdure.PreemptionCheckpointHandler",
        "BackupAndRestore": "perdure.keras.BackupAndRestore",
        "ModelCheckpoint": "perdure.keras.ModelCheckpoint",
        "experimental": f"The same names without `experimental`. {_STRATEGIES}",
        "ExponentialMovingAverage": "A copy of the weights that is a member of the state, averaged in "
        "each step (docs/MODELS.md).",
        "ProfilerHook": "jax.profiler or torch.profiler, in a perdure.train.Hook.",
        "GlobalStepWaiterHook": "Nothing: the processes of a strategy compute the same step.",
        "LearningRateScheduler": "A schedule of the optimizer, or perdure.train.ReduceLROnPlateau.",
        "ModeKeys": "A function for each mode: step_fn, eval_fn, and predict_fn of `trainer.predict`.",
        "WarmStartSettings": "perdure.Trainer(..., warm_start_from=RUN)",
        "SlurmClusterResolver": 'MultiWorkerMirroredStrategy("slurm")',
        "DistributedValues": "perdure.distribute.PerReplica, which `strategy.run` returns.",
        "DistributedIterator": "iter(strategy.distribute_dataset(dataset))",
        "experimental_set_strategy": "with strategy.scope():",
        "FeedFnHook": "The data are an argument of perdure.Trainer.",
        "FinalOpsHook": "perdure.train.Hook, with end.",
        "checkpoint_exists": "perdure.latest_checkpoint(directory) is not None",
    },
    "perdure.train": {
        name: f"perdure.{name}"
        for name in ("Checkpoint", "CheckpointManager", "latest_checkpoint", "load_checkpoint")
    },
    "perdure.keras": {
        "callbacks": "perdure.keras.BackupAndRestore and perdure.keras.ModelCheckpoint; all other "
        "callbacks are Keras's."
    },
    "Checkpoint": {
        "read": "checkpoint.restore(directory)",
        "write": "checkpoint.save(directory, step)",
        "save_counter": _STEP,
        "sync": "manager.wait_until_finished()",
    },
    "CheckpointManager": {
        "checkpoint": "The state that `save` is given; keep the Checkpoint in a name of your own.",
        "checkpoint_name": "A checkpoint is named by its step, RUN@STEP.",
        "init_fn": "manager.restore_or_initialize(init_fn)",
        "max_to_keep": "What a run keeps, and why: `perdure ls RUN`.",
        "sync": "manager.wait_until_finished()",
    },
    "save": {"options": "CheckpointManager(..., options=perdure.ManagerOptions(...))"},
    "restore": {"options": "CheckpointManager(..., options=perdure.ManagerOptions(...))"},
    "latest_checkpoint": {"latest_filename": "A run directory has its own list: leave it out."},
    "ModelCheckpoint": {
        "period": "save_freq=, 'epoch' or a number of batches.",
        "options": "max_to_keep=, or nothing.",
    },
    "RunConfig": {
        "tf_random_seed": "RunConfig(seed=...)",
        "train_distribute": "Trainer(..., strategy=strategy)",
        "eval_distribute": "Trainer(..., strategy=strategy)",
        "experimental_distribute": "Trainer(..., strategy=strategy)",
        "cluster_spec": _CLUSTER,
        "master": _CLUSTER,
        "evaluation_master": _CLUSTER,
        "global_id_in_cluster": "RunConfig.task_id",
        "num_ps_replicas": "There are no parameter servers.",
        **dict.fromkeys(
            (
                "session_config",
                "device_fn",
                "protocol",
                "service",
                "session_creation_timeout_secs",
                "experimental_max_worker_delay_secs",
                "checkpoint_save_graph_def",
            ),
            _NO_SESSIONS,
        ),
    },
    "Trainer": {
        "input_fn": "Trainer(step_fn, state, data, config), and evaluate(data).",
        "checkpoint_path": "Trainer reads the newest checkpoint of model_dir; see warm_start_from.",
        "params": "The step function closes over its parameters.",
        "model_fn": "step_fn, the first argument of Trainer.",
        "eval_dir": "Evaluations are in the summaries of model_dir, under `eval/`.",
        "get_variable_value": "perdure.load_checkpoint(run, leaves=name)",
        **dict.fromkeys(
            ("export_saved_model", "export_savedmodel", "experimental_export_all_saved_models"),
            "`perdure export RUN`, or Keras's `model.export(path)`",
        ),
        "fit": "trainer.train(max_steps=n)",
        "compile": "Trainer(step_fn, state, data, config): step_fn has the loss and the optimizer.",
        "get_global_step": "trainer.step",
    },
    "Strategy": {
        "experimental_run_v2": "strategy.run(fn, args)",
        "experimental_distribute_datasets_from_function": "strategy.distribute_datasets_from_function",
        "experimental_distribute_values_from_function": "strategy.distribute_values_from_function",
        "experimental_make_numpy_dataset": "perdure.ArrayDataset(arrays, batch_size)",
        "make_dataset_iterator": "strategy.distribute_dataset(dataset)",
        **dict.fromkeys(("cross_device_ops", "communication_options"), _FIXED),
        "extended": "There is no `extended`: a strategy has its methods itself.",
    },
    "Metric": {
        "variables": "metric.state_dict()",
        "weights": "metric.state_dict()",
        "merge_state": "metric.merge(accumulators, total)",
        "add_weight": "A metric of your own has `fields`, `contribution` and `value`.",
    },
}


_MANAGER = "perdure.CheckpointManager(directory)"
_NEWEST = "`state, step = manager.restore_or_initialize(state)`"
_SAVE = "`manager.save(step, state)`"
_WAIT = "manager.wait_until_finished()"
_RULES = "options=perdure.ManagerOptions(retention=perdure.Retention(...))"
_OPTIONS = (
    "on_error",
    "codec",
    "save_random_state",
    "mirror_wait",
    "preemption_signals",
    "journal_every",
)
_NO_TYPES = "no type handlers: `manager.save(step, state)` takes the tree itself"
_OPTIMIZER = "{'params': params, 'opt_state': opt_state}, a plain dict, for the state"
HABITS: dict[str, dict[str, str]] = {
    "perdure": {
        **dict.fromkeys(("StandardCheckpointer", "PyTreeCheckpointer", "Checkpointer"), _MANAGER),
        **dict.fromkeys(("AsyncCheckpointer", "checkpoints"), _MANAGER),
        **dict.fromkeys(("save", "save_checkpoint", "args", "save_pytree", "Composite"), _SAVE),
        **dict.fromkeys(("async_save", "save_state"), _SAVE),
        "ResumableLoader": "perdure.torch.ResumableLoader",
        "PerRank": "perdure.torch.PerRank",
        **dict.fromkeys(("StandardSave", "PyTreeSave", "JsonSave", "type_handlers"), _NO_TYPES),
        **dict.fromkeys(("restore", "restore_checkpoint", "resume"), _NEWEST),
        **dict.fromkeys(
            ("StandardRestore", "PyTreeRestore"), "`manager.restore(step, like=state)`"
        ),
        **dict.fromkeys(("load", "load_pytree", "load_weights"), "perdure.load_checkpoint(run)"),
        **dict.fromkeys(("BestN", "LatestN"), "perdure.Retention"),
        "TrainState": _OPTIMIZER,
        "EarlyStopping": "perdure.train.EarlyStopping, or Keras's own",
        "Dataset": "perdure.data.Dataset",
        "CheckpointManagerOptions": f"{_MANAGER[:-1]}, max_to_keep=..., save_interval_steps=...)",
        "callbacks": "perdure.keras.BackupAndRestore and perdure.keras.ModelCheckpoint",
    },
    "CheckpointManager": {
        **dict.fromkeys(("load", "load_state_dict", "restore_latest", "resume"), _NEWEST),
        **dict.fromkeys(("latest", "latest_checkpoint_step"), "manager.latest_step()"),
        **dict.fromkeys(("wait", "flush", "join", "check_for_errors"), _WAIT),
        **dict.fromkeys(("save_pytree", "save_checkpoint"), _SAVE),
        **dict.fromkeys(("keep_period", "best_fn", "best_metric", "best_mode"), _RULES),
        **dict.fromkeys(("retention", "monitor"), _RULES),
        **dict.fromkeys(("save_interval", "every_n_steps", "every"), "save_interval_steps=..."),
        **dict.fromkeys(("keep", "max_keep", "save_top_k"), "max_to_keep=..."),
        **dict.fromkeys(("save_every", "every_n_train_steps"), "save_interval_steps=..."),
        **dict.fromkeys(("dirpath", "path", "checkpoint_dir"), _MANAGER),
        **{name: f"options=perdure.ManagerOptions({name}=...)" for name in _OPTIONS},
        "item_metadata": "manager.metadata(step)",
        "item_names": _NO_TYPES,
        "enable_async_checkpointing": "nothing: a save runs in the background",
        "async_options": "nothing: a save runs in the background",
        "create": "nothing: the first save makes the directory",
        "reload": "nothing: a manager sees what others have saved",
    },
    "ManagerOptions": {
        **dict.fromkeys(("max_to_keep", "save_interval_steps"), f"{_MANAGER[:-1]}, ...)"),
        **dict.fromkeys(
            ("keep_period", "best_fn", "best_mode"), "retention=perdure.Retention(...)"
        ),
        "create": "nothing: the first save makes the directory",
    },
    "ResumableLoader": dict.fromkeys(
        ("batch_size", "shuffle", "num_workers", "dataset", "sampler", "drop_last"),
        "perdure.torch.ResumableLoader(torch.utils.data.DataLoader(...), seed=...)",
    ),
    "BackupAndRestore": {
        **dict.fromkeys(("filepath", "directory", "dirpath"), "backup_dir=..."),
        "max_to_keep": "perdure.keras.ModelCheckpoint, which keeps more than one",
    },
    "save": dict.fromkeys(("args", "items"), _SAVE),
    "restore": dict.fromkeys(("args", "items", "restore_kwargs", "restore_args"), "like=state"),
    "restore_or_initialize": {
        "leaves": "`manager.restore(like=state, leaves=[...])` for a part of the state",
        "strict": "`manager.restore(like=state, strict=False)`",
        "step": "`manager.restore(step, like=state)`",
    },
    "perdure.keras": {"CheckpointManager": "perdure.CheckpointManager"},
}
"""Names of Orbax, Flax and PyTorch, and those that fingers type."""


def refuse_arguments(owner: str, names: Iterable[str], known: Collection[str] = ()) -> None:
    """Raise `ArgumentError` if one of the names is an argument that others have and `owner` lacks, or
    none of the `known` ones."""
    for name in names:
        text = f"{owner} has no argument {name!r}"
        if habit := HABITS.get(owner, {}).get(name):
            raise ArgumentError(f"{text}. Write {habit}.")
        if form := FORMS.get(owner, {}).get(name):
            raise ArgumentError(f"{text}. In place of TensorFlow's: {form}")
        if known and name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise ArgumentError(f"{text}. {hint}It has {', '.join(sorted(known))}.")


def names_forms(owner: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A method whose error for an argument of TensorFlow's says what to write."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        parameters = signature(method).parameters.values()
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
        known = () if takes_any else [each.name for each in parameters if each.name != "self"]

        @wraps(method)
        def checked(*given: P.args, **named: P.kwargs) -> R:
            refuse_arguments(owner, named, known)
            return method(*given, **named)

        return checked

    return decorate


def missing(owner: str, name: str) -> AttributeError | ImportError:
    """The error for a name that `owner`, a module or a class of `FORMS`, does not have.

    `from owner import name` drops an AttributeError and says only that the name cannot be imported,
    so for a name that has a form it is an ImportError there.
    """
    text = f"{owner} has no attribute {name!r}"
    if not (form := _form(owner, name)):
        return AttributeError(text)
    caller = sys._getframe(2)  # `importlib` asks a package, the program itself another module
    importing = caller.f_globals.get("__name__") == "importlib._bootstrap"
    importing = importing or opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM"
    return (ImportError if importing else AttributeError)(f"{text}. {form}")


def _form(owner: str, name: str) -> str | None:
    """What to write in place of a name that `owner` does not have."""
    if owner == "perdure.keras" and name not in FORMS[owner]:
        keras = sys.modules["keras"]
        for module in (keras, keras.callbacks, keras.models):
            if hasattr(module, name):
                place = module.__name__.removeprefix("keras.").removeprefix("api.")
                full = name if module is keras else f"{place}.{name}"
                return f"Use keras.{full} beside perdure's."
    if habit := HABITS.get(owner, {}).get(name):
        return f"Write {habit}."
    forms = FORMS["perdure"] if owner.startswith("perdure.") else {}
    form = (forms | FORMS.get(owner, {})).get(name)
    return f"In place of TensorFlow's: {form}" if form else None


class TensorFlowNames:
    """Base of a class of `FORMS`: the error for one of TensorFlow's names says what to write."""

    if not TYPE_CHECKING:  # a type checker reports such names itself

        def __getattr__(self, name: str) -> Any:
            owner = next(cls.__name__ for cls in type(self).__mro__ if cls.__name__ in FORMS)
            raise missing(owner, name)
