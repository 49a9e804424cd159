"""The lines that a user of `tf.train` pastes: Checkpoint, CheckpointManager, latest_checkpoint."""

from __future__ import annotations

import gc
import importlib
import random
import re
import subprocess
import sys
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perdure
import perdure.torch
from perdure import Checkpoint, ManagerOptions, Retention
from perdure.errors import ArgumentError, HistoryError, MismatchError
from perdure.tensorflow_names import FORMS, HABITS

Manager: Any = perdure.CheckpointManager  # in TensorFlow's order, which the annotations do not have


def members(value: float = 0.0) -> dict[str, Any]:
    return {"net": {"w": np.full(3, float(value))}, "step": int(value)}


def test_the_loop_of_the_guide_resumes_with_the_same_bits(tmp_path: Path) -> None:
    def train(where: str, steps: int, **options: Any) -> Any:
        ckpt: Any = Checkpoint(**members())
        manager = Manager(ckpt, where, max_to_keep=3, options=ManagerOptions(**options))
        ckpt.restore(manager.latest_checkpoint)
        random.seed(
            ckpt.step if manager.latest_checkpoint is None else 99
        )  # the restore brings it back
        ckpt.restore(manager.latest_checkpoint)
        for _ in range(ckpt.step, steps):
            ckpt.net = {"w": ckpt.net["w"] + random.random()}
            ckpt.step += 1
            if ckpt.step % 10 == 0:
                assert manager.save() == f"{where}@{ckpt.step // 10}"
        manager.close()
        return ckpt

    whole = train(f"{tmp_path}/whole", 50)
    train(f"{tmp_path}/cut", 27)
    resumed = train(f"{tmp_path}/cut", 50)
    assert resumed.net["w"].tobytes() == whole.net["w"].tobytes()
    train(f"{tmp_path}/control", 27)
    control = train(f"{tmp_path}/control", 50, save_random_state=False)
    assert control.net["w"].tobytes() != whole.net["w"].tobytes()
    assert perdure.latest_checkpoint(f"{tmp_path}/cut") == f"{tmp_path}/cut@5"
    ckpt = Checkpoint(**members())
    manager = Manager(ckpt, f"{tmp_path}/cut")
    assert manager.checkpoints == [f"{tmp_path}/cut@{number}" for number in (3, 4, 5)]
    assert ckpt.restore(perdure.latest_checkpoint(f"{tmp_path}/cut")) == 5


@pytest.mark.parametrize(
    "make",
    [
        lambda ckpt, run: Manager(ckpt, run, 2),
        lambda ckpt, run: Manager(ckpt, run, max_to_keep=2),
        lambda ckpt, run: Manager(ckpt, directory=run, max_to_keep=2),
        lambda ckpt, run: Manager(checkpoint=ckpt, directory=run, max_to_keep=2),
    ],
)
def test_a_manager_takes_the_arguments_in_tensorflows_order(tmp_path: Path, make: Any) -> None:
    with make(Checkpoint(**members(7)), tmp_path) as manager:
        for _ in range(3):
            manager.save()
        assert manager.save(checkpoint_number=10) == f"{tmp_path}@10"
        assert manager.save(checkpoint_number=12, check_interval=False) == f"{tmp_path}@12"
        assert manager.save() == f"{tmp_path}@13"
        manager.wait_until_finished()
        assert manager.all_steps() == [12, 13]
        with pytest.raises(HistoryError):
            manager.save(checkpoint_number=3)
    fresh = Checkpoint(**members())
    with make(fresh, tmp_path) as manager:
        assert manager.restore_or_initialize().step == 13
    assert fresh.step == 7


def test_the_interval_counts_the_steps_of_a_counter(tmp_path: Path) -> None:
    ckpt = Checkpoint(**members())
    counter = np.zeros((), np.int64)
    with Manager(ckpt, tmp_path, step_counter=counter, checkpoint_interval=5) as manager:
        saved = []
        for _ in range(11):
            counter += 1
            saved.append(manager.save())
        assert [name for name in saved if name] == [f"{tmp_path}@5", f"{tmp_path}@10"]
    with Manager(ckpt, tmp_path / "by function", step_counter=lambda: 4) as manager:
        assert manager.save() == f"{tmp_path / 'by function'}@4"
    with (
        Manager(ckpt, tmp_path / "none", checkpoint_interval=5) as manager,
        pytest.raises(ArgumentError, match="step_counter"),
    ):
        manager.save()


def test_an_init_fn_works_by_side_effect(tmp_path: Path) -> None:
    def init_fn() -> None:
        ckpt.net["w"][:] = 4.0

    for step, w in ((0, 4.0), (1, 5.0)):  # the second is restored
        ckpt: Any = Checkpoint(**members())
        with Manager(ckpt, tmp_path / "run", max_to_keep=3) as manager:
            restored = manager.restore_or_initialize(init_fn)
            assert (restored.state, restored.step) == (ckpt, step)
            assert ckpt.net["w"].tolist() == [w] * 3
            ckpt.net["w"] += 1.0
            manager.save()
    with (
        perdure.CheckpointManager(tmp_path / "none") as manager,
        pytest.raises(ArgumentError, match=r"init_fn.*returned None\. Return the state"),
    ):
        manager.restore_or_initialize(init_fn)


def test_checkpoints_are_kept_by_the_hour(tmp_path: Path) -> None:
    now = [0.0]
    options = perdure.ManagerOptions(clock=lambda: now[0])
    arguments: Any = {"keep_checkpoint_every_n_hours": 1, "options": options}
    with Manager(Checkpoint(**members()), tmp_path, 1, **arguments) as manager:
        for _ in range(5):
            manager.save()
            manager.wait_until_finished()
            now[0] += 1800.0
        assert manager.all_steps() == [1, 3, 5]
    rules = perdure.ManagerOptions(retention=Retention(keep_every_n_hours=1), clock=lambda: now[0])
    with perdure.CheckpointManager(tmp_path, max_to_keep=1, options=rules) as manager:
        assert manager.all_steps() == [1, 3, 5]


def test_there_is_no_latest_checkpoint_before_the_first(tmp_path: Path) -> None:
    assert perdure.latest_checkpoint(tmp_path / "missing") is None
    assert perdure.latest_checkpoint(tmp_path) is None
    assert perdure.latest_checkpoint(perdure.MemoryStorage()) is None
    name = Checkpoint(**members(3)).save(file_prefix=tmp_path / "run" / "ckpt")
    assert name == perdure.latest_checkpoint(tmp_path / "run") == f"{tmp_path / 'run'}@1"
    assert Checkpoint(**members(4)).save(tmp_path / "run") == f"{tmp_path / 'run'}@2"
    with pytest.raises(ArgumentError, match=str(tmp_path / "run")):
        perdure.latest_checkpoint(tmp_path)  # None would be a new start beside two checkpoints
    with pytest.raises(ArgumentError):
        Checkpoint(**members()).save()


def test_a_prefix_of_tensorflow_by_position_is_found_in_its_folder(tmp_path: Path) -> None:
    assert Checkpoint(**members(3)).save(f"{tmp_path}/z/ckpt") == f"{tmp_path}/z/ckpt@1"
    Checkpoint(**members(4)).save(f"{tmp_path}/z/ckpt")
    newest = perdure.latest_checkpoint(f"{tmp_path}/z")
    assert newest == f"{tmp_path}/z/ckpt@2"
    ckpt: Any = Checkpoint(**members())
    assert ckpt.restore(newest).assert_consumed() == 2
    assert ckpt.step == 4
    Checkpoint(**members(5)).save(f"{tmp_path}/z/other")
    with pytest.raises(ArgumentError, match="expected a run directory, found one that contains"):
        perdure.latest_checkpoint(f"{tmp_path}/z")


@pytest.mark.parametrize(
    ("module", "names", "form"),
    [
        ("perdure", "get_replica_context ReduceOp InputContext", "perdure.torch and perdure.jax"),
        ("perdure", "DistributedDataset Strategy TFConfigClusterResolver", "perdure.distribute"),
        ("perdure", "DistributedValues", "perdure.distribute.PerReplica"),
        ("perdure", "InputOptions RunOptions", "leave it out"),
        ("perdure", "SlurmClusterResolver", 'MultiWorkerMirroredStrategy("slurm")'),
        ("perdure", "NcclAllReduce HierarchicalCopyAllReduce", "additions have a fixed order"),
        ("perdure", "ReductionToOneDevice CommunicationImplementation", "fixed order"),
        ("perdure", "AUTOTUNE", "It stays TensorFlow's"),
        ("perdure", "ModeKeys", "eval_fn"),
        ("perdure", "WarmStartSettings", "warm_start_from=RUN"),
        ("perdure", "BestExporter LatestExporter", "perdure export RUN OUT"),
        ("perdure", "SecondOrStepTimer", "perdure.RunConfig"),
        ("perdure", "NanLossDuringTrainingError", "check_finite=True"),
        ("perdure.distribute", "cluster_resolver", "perdure.distribute.ClusterResolver"),
        ("perdure.torch", "InputOptions RunOptions", "leave it out"),
        ("perdure.jax", "NcclAllReduce", "additions have a fixed order"),
        ("perdure.distribute", "coordinator", "leave it out"),
        ("perdure.distribute", "experimental_set_strategy", "with strategy.scope():"),
        ("perdure.distribute", "DistributedIterator", "iter(strategy.distribute_dataset"),
        ("perdure.train", "stop_if_no_decrease_hook stop_if_no_increase_hook", "EarlyStopping"),
        ("perdure.train", "stop_if_higher_hook stop_if_lower_hook", "trainer.request_stop(reason)"),
        ("perdure.train", "make_early_stopping_hook", "perdure.train.EarlyStopping"),
        ("perdure.train", "InMemoryEvaluatorHook", "trainer.train_and_evaluate"),
        ("perdure.train", "GlobalStepWaiterHook", "the same step"),
        ("perdure.train", "SessionRunArgs SessionRunContext SessionRunValues", "after_step"),
        ("perdure.train", "LearningRateScheduler", "perdure.train.ReduceLROnPlateau"),
    ],
)
def test_neighbours_of_names_say_what_to_write(module: str, names: str, form: str) -> None:
    for name in names.split():
        with pytest.raises(AttributeError, match=re.escape(form)):
            getattr(importlib.import_module(module), name)


def test_arguments_of_tensorflow_say_what_to_write(tmp_path: Path) -> None:
    pytest.importorskip("keras", reason="keras is not installed")
    latest: Any = perdure.latest_checkpoint
    for call, name, form in (
        (latest, "latest_filename", "leave it out"),
        (perdure.keras.ModelCheckpoint, "period", "save_freq="),
        (perdure.keras.ModelCheckpoint, "options", "max_to_keep="),
    ):
        with pytest.raises(ArgumentError, match=form):
            call(tmp_path, **{name: 1})
    for name, form in (
        ("export_savedmodel", "perdure export RUN"),
        ("fit", r"trainer\.train\(max_steps=n\)"),
        ("compile", "step_fn"),
        ("get_global_step", r"trainer\.step"),
    ):
        with pytest.raises(AttributeError, match=form):
            getattr(perdure.Trainer.__new__(perdure.Trainer), name)


def test_a_checkpoint_in_place_of_a_run_directory_begins_no_run(tmp_path: Path) -> None:
    Checkpoint(**members(3)).save(tmp_path / "run", 5)
    for name in ("run@5", "run@latest"):
        for ask in (perdure.latest_checkpoint, perdure.CheckpointManager):
            with pytest.raises(ArgumentError, match="expected a run directory, found the name of"):
                ask(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with perdure.CheckpointManager(tmp_path / "other@5") as manager:  # no run has this name
        assert manager.restore_or_initialize(members()).step == 0
        manager.save(1, members())
    assert perdure.latest_checkpoint(tmp_path / "other@5") == f"{tmp_path}/other@5@1"


def test_restoring_nothing_changes_nothing(tmp_path: Path) -> None:
    ckpt = Checkpoint(**members(3))
    status = ckpt.restore(perdure.latest_checkpoint(tmp_path))
    assert status == 0
    assert status.expect_partial() is status
    assert ckpt.step == 3
    for check in (status.assert_consumed, status.assert_existing_objects_matched):
        with pytest.raises(MismatchError):
            check()


@pytest.mark.parametrize("bound", [False, True], ids=["alone", "with its manager"])
def test_members_that_the_checkpoint_has_and_the_target_lacks(tmp_path: Path, bound: bool) -> None:
    Checkpoint(**members(3)).save(tmp_path, 5)
    part = Checkpoint(net=members()["net"])
    manager = Manager(part, tmp_path) if bound else None
    assert part.restore(tmp_path).expect_partial() == 5
    assert part.net["w"].tolist() == [3, 3, 3]
    part.restore(f"{tmp_path}@5").assert_existing_objects_matched()
    with pytest.raises(MismatchError, match="step"):
        part.restore(tmp_path).assert_consumed()
    with pytest.warns(UserWarning, match="step") as caught:
        part.restore(tmp_path)
    assert caught[0].filename == __file__
    whole = Checkpoint(**members())
    if manager is not None:
        manager.close()
        manager = Manager(whole, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole.restore(tmp_path).assert_consumed()
    assert whole.step == 3
    # A member that the checkpoint lacks is refused, and nothing changes.
    for more in (Checkpoint(**members(), bias=np.zeros(2)), Checkpoint(bias=np.zeros(2))):
        if manager is not None:
            manager.close()
            manager = Manager(more, tmp_path)
        with pytest.raises(MismatchError, match="bias"):
            more.restore(tmp_path)
        assert getattr(more, "step", 0) == 0
    if manager is not None:
        manager.close()


def test_the_checkpoint_of_a_manager_may_be_given_by_name(tmp_path: Path) -> None:
    ckpt: Any = Checkpoint(**members())
    for make in (
        lambda where: Manager(where, checkpoint=ckpt),
        lambda where: Manager(checkpoint=ckpt, directory=where),
    ):
        with make(where := tmp_path / str(len(list(tmp_path.iterdir())))) as manager:
            assert manager.save() == f"{where}@1"
    for wrong in ({"a": 1}, members):
        with pytest.raises(ArgumentError, match="checkpoint: expected a Checkpoint, found"):
            Manager(tmp_path / "other", checkpoint=wrong)  # type: ignore[arg-type]


def test_a_checkpoint_in_a_checkpoint_takes_its_part(tmp_path: Path) -> None:
    Checkpoint(net=Checkpoint(l1=np.ones(2), bias=np.full(2, 5.0)), step=1).save(tmp_path)
    layer = Checkpoint(bias=np.zeros(2))
    Checkpoint(net=layer).restore(perdure.latest_checkpoint(tmp_path)).expect_partial()
    assert layer.bias.tolist() == [5, 5]


def trained(steps: int) -> tuple[Any, ...]:
    """A model, three optimizers and a scheduler, after steps; and what the next step makes of them."""
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(net.parameters(), 0.1)
    sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    nested = {"by": [torch.optim.AdamW([{"params": [net.weight]}, {"params": [net.bias]}])]}
    schedule = torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)
    seen: Any = deque(maxlen=3)

    def step() -> bytes:
        for each in (adam, sgd, nested["by"][0]):
            net.zero_grad()
            net(torch.ones(1, 2)).square().sum().backward()
            each.step()
        schedule.step()
        return net.weight.detach().numpy().tobytes() + net.bias.detach().numpy().tobytes()

    for n in range(steps):
        step()
        seen.append(n)
    ckpt = Checkpoint(net=net, adam=adam, sgd=sgd, nested=nested, schedule=schedule, seen=seen)
    return ckpt, step


@pytest.mark.parametrize("by", ["checkpoint", "manager"])
def test_optimizers_of_torch_are_restored_without_a_manager(tmp_path: Path, by: str) -> None:
    ckpt, step = trained(3)
    if by == "checkpoint":
        ckpt.save(tmp_path)
    else:
        with perdure.CheckpointManager(tmp_path) as manager:
            manager.save(1, ckpt)
    whole = step(), step()
    fresh, step = trained(0)
    fresh.restore(tmp_path).assert_consumed()
    assert fresh.adam.param_groups[0]["lr"] == 0.1 * 0.5**3
    assert [*fresh.seen] == [0, 1, 2]
    assert (step(), step()) == whole
    part = Checkpoint(net=fresh.net, adam=fresh.adam)  # an optimizer of the checkpoint left out
    part.restore(tmp_path).expect_partial()


def test_a_member_that_is_a_leaf_in_the_checkpoint_and_a_checkpoint_here(tmp_path: Path) -> None:
    Checkpoint(net=np.ones(2)).save(tmp_path)
    with pytest.raises(MismatchError, match="net"):
        Checkpoint(net=Checkpoint(bias=np.zeros(2))).restore(tmp_path)


def test_a_manager_that_nobody_refers_to_lets_its_checkpoint_be_saved_elsewhere(
    tmp_path: Path,
) -> None:
    ckpt = Checkpoint(**members(1))
    manager = Manager(ckpt, tmp_path)
    manager.save()
    manager.wait_until_finished()
    del manager
    gc.collect()
    with Manager(ckpt, tmp_path) as manager:
        assert ckpt.restore(manager.latest_checkpoint) == 1


def test_a_name_that_is_not_carried_over_says_the_form_to_use(tmp_path: Path) -> None:
    ckpt = Checkpoint(**members())
    with Manager(ckpt, tmp_path) as manager:
        for use, form in (
            (lambda: perdure.TPUStrategy, "perdure.jax"),  # type: ignore[attr-defined]
            (lambda: perdure.list_variables, "load_checkpoint"),  # type: ignore[attr-defined]
            (lambda: ckpt.save_counter, r"save\(step, state\)"),
            (lambda: ckpt.write(tmp_path), "checkpoint.save"),
            (lambda: manager.sync(), "wait_until_finished"),
        ):
            with pytest.raises(AttributeError, match=form):
                use()
        with pytest.raises(AttributeError, match=r"nothing'$"):
            manager.nothing  # noqa: B018
    with pytest.raises(ArgumentError, match="restore_or_initialize"):
        Manager(ckpt, tmp_path, init_fn=dict)
    with pytest.raises(
        ArgumentError, match=r"has no argument 'nothing'\. It has allow, checkpoint"
    ):
        Manager(ckpt, tmp_path, nothing=1)
    with pytest.raises(ArgumentError, match="Did you mean max_to_keep"):
        Manager(tmp_path, maxtokeep=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "name", ["TPUStrategy", "ParameterServerStrategy", "experimental", "CommunicationOptions"]
)
@pytest.mark.parametrize("module", ["perdure.torch", "perdure.jax", "perdure.distribute"])
def test_names_of_strategies_say_the_form_in_each_module(module: str, name: str) -> None:
    with pytest.raises(AttributeError, match=r"In place of TensorFlow's: .*perdure"):
        getattr(importlib.import_module(module), name)
    with pytest.raises(ImportError, match=r"In place of TensorFlow's: "):
        exec(f"from {module} import {name}", {})
    with pytest.raises(AttributeError, match=r"'nothing'$"):
        importlib.import_module(module).nothing  # noqa: B018


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("experimental", "without `experimental`"),
        ("ExponentialMovingAverage", "member of the state"),
        ("ProfilerHook", "profiler"),
        ("FeedFnHook", "Trainer"),
        ("FinalOpsHook", "Hook, with end"),
        ("checkpoint_exists", "latest_checkpoint"),
        ("Coordinator", "leave it out"),
    ],
)
def test_names_of_tf_train_say_the_form(name: str, form: str) -> None:
    for module in ("perdure", "perdure.train"):
        with pytest.raises(AttributeError, match=form):
            getattr(importlib.import_module(module), name)


def test_the_names_of_checkpoints_come_after_the_save_under_way(tmp_path: Path) -> None:
    run = f"{tmp_path}/run"
    ckpt: Any = Checkpoint(w=np.zeros(500_000), step=0)
    manager = Manager(ckpt, run, max_to_keep=2)
    asks = [
        lambda: manager.latest_checkpoint,
        lambda: manager.checkpoints[-1],
        lambda: perdure.latest_checkpoint(run),
    ]
    for step, ask in enumerate(asks, 1):
        ckpt.step, ckpt.w = step, ckpt.w + 1
        saved = manager.save()
        assert ask() == saved
        assert not manager.is_saving_in_progress()
    ckpt.step = 9
    saved = manager.save()
    ckpt.step = 0
    assert ckpt.restore(saved) == len(asks) + 1
    assert ckpt.step == 9
    manager.close()


@pytest.mark.parametrize(
    ("given", "named"), [((object(), "run", 3), {}), ((object(),), {"directory": "run"})]
)
def test_another_object_in_the_place_of_the_checkpoint_is_named(given: Any, named: Any) -> None:
    with pytest.raises(ArgumentError, match=r"Checkpoint and then the directory, found object"):
        Manager(*given, **named)


def test_the_page_for_people_has_every_name() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/from-tf-train.md").read_text()
    table = page.partition("## All names")[2].partition("\n## ")[0]
    shown = {word for code in re.findall(r"`[^`]*`", table) for word in re.findall(r"\w+", code)}
    assert {name for names in FORMS.values() for name in names} - shown == set()


def test_first_steps_that_fingers_type_from_habit() -> None:
    assert (
        perdure.keras.BackupAndRestore is importlib.import_module("perdure.keras").BackupAndRestore
    )
    unnamed: Any = ({"w": 1},)
    with pytest.raises(ArgumentError, match=r"such as Checkpoint\(model=model\), found"):
        perdure.Checkpoint(*unnamed)
    with pytest.raises(ImportError, match=r"TensorFlow's: perdure\.Trainer"):
        exec("from perdure import Estimator", {})
    with pytest.raises(ImportError, match=r"^cannot import name 'Nothing' from 'perdure' \("):
        exec("from perdure import Nothing", {})
    assert not hasattr(perdure, "Estimator")


def pasted(directory: Path, last: int) -> tuple[list[float], int]:
    """A loop as TensorFlow's guide has it: the names of the loop are those of the members."""
    step, w = np.zeros((), np.int64), np.zeros(3)
    ckpt = Checkpoint(step=step, w=w)
    with Manager(ckpt, directory, 3, step_counter=step, checkpoint_interval=4) as manager:
        ckpt.restore(manager.latest_checkpoint)
        while step < last:
            step += 1
            w += step
            manager.save()
    return w.tolist(), int(step)


def test_the_arrays_of_a_loop_are_restored_in_place(tmp_path: Path) -> None:
    assert pasted(tmp_path / "run", 9)[1] == 9
    assert pasted(tmp_path / "run", 20) == pasted(tmp_path / "whole", 20)
    w, narrow = np.zeros(3), np.zeros(3, np.float32)
    step = np.zeros((), np.int64)
    with Manager(Checkpoint(w=w, step=step), tmp_path / "run") as manager:
        with pytest.raises(MismatchError):
            manager.restore(like=Checkpoint(w=w, other=0))
        other = Checkpoint(w=narrow, step=step)
        manager.restore(20, other, cast=True)
    assert (w.tolist(), int(step)) == ([0.0] * 3, 20)
    assert other.w is narrow
    assert narrow.tolist() == [210.0] * 3


@pytest.mark.parametrize("if_there_is_one", [True, False])
def test_dicts_and_lists_of_a_loop_are_restored_in_place_after_one_save(
    tmp_path: Path, if_there_is_one: bool
) -> None:
    def train(where: Path, last: int) -> Any:
        log: list[Any] = []
        info = {"n": 0, "sum": np.zeros(2), "seen": deque[int](maxlen=3)}
        total, checkpoint = info["sum"], Checkpoint(log=log, info=info)
        with Manager(checkpoint, where, max_to_keep=3) as manager:
            if manager.latest_checkpoint or not if_there_is_one:
                checkpoint.restore(manager.latest_checkpoint)
            while len(log) < last:
                total += len(log)
                log.append({"loss": float(total[0])})
                info["n"] += 1
                info["seen"].append(len(log))
                manager.save()
        return log, info["n"], total.tolist(), list(info["seen"])

    train(tmp_path / "run", 1)
    assert train(tmp_path / "run", 5) == train(tmp_path / "whole", 5)


def test_names_of_hooks_sessions_and_callbacks_say_what_to_write() -> None:
    pytest.importorskip("keras", reason="keras is not installed")
    for owner, name, form in (
        (perdure, "Saver", "perdure.CheckpointManager"),
        (perdure, "StopAtStepHook", "max_steps=n"),
        (perdure.train, "NanTensorHook", "check_finite=True"),
        (perdure.train, "get_or_create_global_step", "after_step"),
        (perdure.distribute, "experimental", "perdure.jax and perdure.torch"),
        (perdure.keras, "EarlyStopping", "keras.callbacks.EarlyStopping"),
    ):
        with pytest.raises(AttributeError, match=re.escape(form)):
            getattr(owner, name)
    ckpt = Checkpoint(step=0)
    for call in (ckpt.save, ckpt.restore, Manager(perdure.MemoryStorage()).save):
        with pytest.raises(ArgumentError, match=re.escape("options=perdure.ManagerOptions(...)")):
            call(1, options=None)  # type: ignore[operator]
    with pytest.raises(AttributeError, match="`perdure ls RUN`"):
        _ = Manager(perdure.MemoryStorage()).max_to_keep  # type: ignore[attr-defined]


def test_modules_need_no_import_of_their_own() -> None:
    program = (
        "import perdure, sys; perdure.train.Hook, perdure.distribute, perdure.data, perdure.errors"
    )
    program += "; print([name for name in ('torch', 'jax', 'keras') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("owner", HABITS)
def test_names_of_other_libraries_say_what_to_write(owner: str) -> None:
    manager = perdure.CheckpointManager(perdure.MemoryStorage())
    if owner.startswith("perdure"):
        value: Any = importlib.import_module(owner)
    else:
        others: dict[str, Any] = {
            "CheckpointManager": manager,
            "ManagerOptions": perdure.ManagerOptions,
            "ResumableLoader": perdure.torch.ResumableLoader,
            "BackupAndRestore": perdure.keras.BackupAndRestore,
        }
        value = others.get(owner) or getattr(manager, owner)
    for name, habit in HABITS[owner].items():
        said = re.escape(f"{name!r}. Write {habit}.")
        if owner.startswith("perdure") or owner == "CheckpointManager":
            with pytest.raises(AttributeError, match=said):
                getattr(value, name)
        if not owner.startswith("perdure"):
            call: Any = Manager if owner == "CheckpointManager" else value
            with pytest.raises(ArgumentError, match=said):
                call("run" if call is Manager else 1, **{name: 2})
    for path in re.findall(r"(?:manager|perdure)\.([\w.]+)", " ".join(HABITS[owner].values())):
        held: Any = perdure
        for part in path.split("."):
            held = getattr(held, part, None) or getattr(manager, part)
