"""The Hugging Face Trainer on run directories; `make proof-doors` has it installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plugin_programs import answer_of, run_program
from torch.utils.data import DataLoader

from damage import flip
from perdure import EXIT_PREEMPTED, CheckpointManager
from perdure.errors import ArgumentError, StateError
from perdure.store import Run

if not all(map(importlib.util.find_spec, ("transformers", "accelerate"))):
    pytest.skip("the Trainer is not installed; make proof-doors has it", allow_module_level=True)
WORKER = Path(__file__).with_name("transformers_worker.py")
work = partial(run_program, WORKER)
resumed = partial(answer_of, WORKER)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run directory and the end of the undisturbed run."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    return directory, resumed("plugin", directory)


@pytest.fixture(scope="module")
def whole(whole_run: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    """The end of the undisturbed run."""
    return whole_run[1]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in its fifth step."""
    directory = tmp_path_factory.mktemp("killed") / "run"
    assert work("plugin-killed", directory)[0] == -signal.SIGKILL
    assert Run(directory).steps()[0] == 2
    return directory


def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(
    whole: dict[str, Any], killed: Path, tmp_path: Path
) -> None:
    shutil.copytree(killed, tmp_path / "run")
    newest = Run(killed).steps()[-1]
    answer = resumed("plugin", tmp_path / "run")
    assert (answer["bits"], answer["step"]) == (whole["bits"], 9)
    after = {step: loss for step, loss in whole["losses"].items() if int(step) > newest}
    assert after.items() <= answer["losses"].items()
    # Without the random generators, dropout draws other masks.
    shutil.copytree(killed, tmp_path / "without")
    assert resumed("no-random", tmp_path / "without")["bits"] != whole["bits"]


def test_damage_is_skipped_where_the_trainer_goes_on_in_silence(
    whole_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    directory, whole = whole_run
    run = tmp_path / "run"
    shutil.copytree(directory, run)
    for step in Run(run).steps()[2:]:
        for pack in (run / "packs").glob(f"{step:012d}-*.pack"):
            pack.chmod(0o600)
            flip(pack, 0)
    status, answer, err = work("plugin", run)
    assert status == 0, err
    assert answer["bits"] == whole["bits"]
    assert "is damaged and was skipped" in err
    # The Trainer's own checkpoint without the optimizer.
    assert work("own-killed", tmp_path / "own")[0] == -signal.SIGKILL
    (tmp_path / "own-own" / "checkpoint-4" / "optimizer.pt").unlink()
    assert resumed("own", tmp_path / "own")["bits"] != whole["bits"]


def test_a_terminated_run_has_saved_its_last_step(whole: dict[str, Any], tmp_path: Path) -> None:
    assert work("plugin-terminated", tmp_path / "run")[0] == EXIT_PREEMPTED
    assert Run(tmp_path / "run").steps()[-1] == 5
    assert resumed("plugin", tmp_path / "run")["bits"] == whole["bits"]


def test_another_batch_size_is_refused(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed, tmp_path / "run")
    status, _, err = work("plugin-batch4", tmp_path / "run")
    assert status == 1
    assert "RecipeMismatchError" in err
    assert "batch_size" in err


@pytest.mark.parametrize(
    ("settings", "fsdp", "arguments", "found"),
    [
        ({"world_size": 2}, False, {}, "the dataset has no length"),
        ({}, True, {}, "shards its model"),
        ({"ignore_data_skip": True}, False, {}, "ignore_data_skip"),
        (
            {"dataloader_persistent_workers": True},
            False,
            {},
            "Set dataloader_persistent_workers=False",
        ),
        ({"save_steps": 0.5}, False, {}, "save_steps"),
        ({}, False, {"resume_from_checkpoint": True}, "resumes from the run directory"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the import of transformers
def test_what_cannot_be_exact_is_refused(
    tmp_path: Path, settings: dict[str, Any], fsdp: bool, arguments: dict[str, Any], found: str
) -> None:
    from perdure.plugins.transformers import train

    usual = {
        "world_size": 1,
        "ignore_data_skip": False,
        "save_steps": 2,
        "dataloader_persistent_workers": False,
    }
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(**(usual | settings)),
        is_fsdp_enabled=fsdp,
        is_deepspeed_enabled=False,
        accelerator=SimpleNamespace(state=None),
        train_dataset=iter(()),
    )
    with pytest.raises((ArgumentError, StateError)) as caught:
        train(trainer, tmp_path / "run", **arguments)
    assert found in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore")  # of the import of transformers
def test_a_loader_of_a_subclass_that_keeps_its_workers_is_refused(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from perdure.plugins.transformers import train

    class Keeping(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader([{"x": 1.0}] * 4, num_workers=1, persistent_workers=True)  # type: ignore[arg-type]

    args = TrainingArguments(str(tmp_path / "own"), report_to=[], use_cpu=True, save_strategy="no")
    with pytest.raises(StateError, match="persistent_workers=False"):
        train(Keeping(torch.nn.Linear(1, 1), args), tmp_path / "run")


def quiet(directory: Path, **settings: Any) -> Any:
    """Settings of a Trainer that saves nothing itself and prints nothing."""
    from transformers import TrainingArguments

    return TrainingArguments(
        f"{directory}-own",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )


class Stopped(Exception):
    pass


def changing_model(seen: list[Any]) -> torch.nn.Module:
    """A model that keeps what no `state_dict` has, and computes with it."""

    class Model(torch.nn.Module):
        queue: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
            self.mean, self.place = 0.0, 0
            self.hidden: torch.Tensor | None = None
            self.register_buffer("queue", torch.zeros(3), persistent=False)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            inner = self.inner(x) + (0 if self.hidden is None else self.hidden)
            out = self.out(inner + self.mean) + self.queue.sum()
            loss = (out - labels).square().mean()
            self.hidden, self.mean = 0.1 * inner.detach().mean(0), 0.1 * float(loss)
            self.queue[self.place] = self.mean
            self.place = (self.place + 1) % 3
            seen.append((loss.item().hex(), self.inner.weight.requires_grad))
            return {"loss": loss}

    torch.manual_seed(0)
    return Model()


@pytest.mark.filterwarnings("ignore")  # of the import of transformers
@pytest.mark.parametrize("end", [3, 7])
def test_what_no_state_dict_has_comes_back(tmp_path: Path, end: int) -> None:
    from transformers import Trainer, TrainerCallback

    from perdure.plugins.transformers import train

    class Changes(TrainerCallback):
        def __init__(self, end: int) -> None:
            self.end = end

        def on_step_end(
            self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
        ) -> None:
            if state.global_step in (1, 3, 5, 8):
                model.inner.requires_grad_(state.global_step in (3, 8))
            if state.global_step == self.end:
                raise Stopped

    def trained(directory: Path, end: int = 0) -> tuple[list[Any], list[Any]]:
        seen: list[Any] = []
        model = changing_model(seen)
        rows = [{"x": torch.arange(4.0) - row, "labels": torch.ones(1) * row} for row in range(8)]
        args = quiet(
            directory,
            per_device_train_batch_size=2,
            max_steps=10,
            save_steps=2,
            learning_rate=0.05,
        )
        trainer = Trainer(model, args, train_dataset=rows, callbacks=[Changes(end)])  # type: ignore[arg-type]
        try:
            train(trainer, directory)
        except Stopped:
            assert end
        return seen, [value.tolist() for value in model.parameters()]

    whole, bits = trained(tmp_path / "whole")
    trained(tmp_path / "run", end)
    newest = Run(tmp_path / "run").steps()[-1]
    assert newest == end - 1  # the save of a step begins with the next one
    assert trained(tmp_path / "run") == (whole[newest:], bits)


@pytest.mark.filterwarnings("ignore")  # of the import of transformers
def test_what_a_program_keeps_in_a_model_of_transformers_comes_back(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    def made() -> Any:
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2))

    model = made()
    with CheckpointManager(tmp_path / "run") as manager:
        manager.restore_or_initialize({"model": model})
        model.average = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
        model.transformer.seen = 3
        manager.save(1, {"model": model})
    fresh = made()
    with CheckpointManager(tmp_path / "run") as manager:
        manager.restore_or_initialize({"model": fresh})
    assert fresh.transformer.seen == 3
    assert fresh.average.keys() == model.average.keys()
    assert all(torch.equal(fresh.average[name], model.average[name]) for name in model.average)


@pytest.mark.filterwarnings("ignore")  # of the import of transformers
def test_the_state_of_a_callback_that_is_no_json_is_refused_with_the_way_out(
    tmp_path: Path,
) -> None:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState

    from perdure.plugins.transformers import train

    class Mean(TrainerCallback, ExportableState):
        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"mean": torch.ones(2)}}

    args = quiet(tmp_path / "run", max_steps=2, save_steps=1)
    rows = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(4)]
    trainer = Trainer(changing_model([]), args, train_dataset=rows, callbacks=[Mean()])  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"Tensor.*`x\.tolist\(\)`"):
        train(trainer, tmp_path / "run")


class Model(torch.nn.Module):
    main_input_name = "x"  # the Trainer counts operations

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(4, 1), torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.layer(self.drop(x))
        return {"loss": (out - labels).square().mean(), "logits": out}

    def num_parameters(self, exclude_embeddings: bool) -> int:
        return 5


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Growing(torch.utils.data.Dataset[Any]):
    """Has more examples in each epoch."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 5 + self.epoch

    def __getitem__(self, place: int) -> Any:
        return self.rows[place]


class Noisy(torch.utils.data.Dataset[Any]):
    """Has a random generator of its own."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.source = rows, torch.Generator().manual_seed(2)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> Any:
        row = self.rows[place]
        return row | {"x": row["x"] + torch.randn(4, generator=self.source)}


def epochs_of_two(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
    control.should_epoch_stop = state.global_step % 2 == 0


def clips(self: Any, args: Any, state: Any, *_: Any, **__: Any) -> None:
    if state.global_step == 2:
        args.max_grad_norm = 0.01


def decays(self: Any, args: Any, *_: Any, optimizer: Any, **__: Any) -> None:
    optimizer.param_groups[0]["weight_decay"] += 0.1
    args.max_grad_norm *= 0.5


def drops(self: Any, args: Any, state: Any, *_: Any, model: Any, **__: Any) -> None:
    model.drop.p = 0.1 * (1 + (state.epoch or 0)) + 0.01 * state.global_step


def counts(self: Any, args: Any, *_: Any, optimizer: Any, **__: Any) -> None:
    self.count = getattr(self, "count", 0) + 1
    optimizer.param_groups[0]["weight_decay"] = 0.1 * self.count


def limits(self: Any, args: Any, state: Any, *_: Any, model: Any, **__: Any) -> None:
    state.seen = getattr(state, "seen", 0) + 1
    model.drop.p = 0.01 * state.seen
    if state.global_step == 3:
        state.max_steps = 9


def logs(self: Any, *_: Any, **__: Any) -> None:
    self.trainer.log({"begins": 1.0})


def logs_runtime(self: Any, *_: Any, **__: Any) -> None:
    self.trainer.log({"train_runtime": 1.0})


def accumulates_two(self: Any, args: Any, *_: Any, **__: Any) -> None:
    args.gradient_accumulation_steps = 2


def accumulates_one(self: Any, args: Any, *_: Any, **__: Any) -> None:
    args.gradient_accumulation_steps = 1


def alternates(self: Any, args: Any, *_: Any, **__: Any) -> None:
    args.gradient_accumulation_steps = 3 - args.gradient_accumulation_steps


def clips_by_numpy(self: Any, args: Any, state: Any, *_: Any, **__: Any) -> None:
    if state.global_step == 2:
        args.max_grad_norm, args.run_name = np.float32(0.01), [np.pi, {"a": None}]
    elif state.global_step > 2:
        assert type(args.max_grad_norm) is np.float32
        assert args.run_name == [np.pi, {"a": None}]


def evaluates_no_more(self: Any, args: Any, state: Any, *_: Any, **__: Any) -> None:
    if state.global_step == 2:
        args.eval_strategy = type(args.eval_strategy).NO
    assert (args.eval_strategy is type(args.eval_strategy).NO) == (state.global_step >= 2)


def shifts(self: Any, *_: Any, model: Any, **__: Any) -> None:
    with torch.no_grad():
        model.layer.bias.add_(torch.rand(1))


def sets_an_object(self: Any, args: Any, *_: Any, **__: Any) -> None:
    args.run_name = object()


def ends_epoch(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
    control.should_epoch_stop = state.global_step == 2 and not hasattr(self, "has_ended")
    if control.should_epoch_stop:
        self.has_ended = True


def ends_epoch_and_run(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
    ends_epoch(self, args, state, control)
    if control.should_epoch_stop:
        os.kill(os.getpid(), signal.SIGTERM)


def stops(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
    control.should_training_stop = state.global_step in (6, 8)


def terminates(self: Any, args: Any, state: Any, *_: Any, **__: Any) -> None:
    if state.global_step == 3:
        os.kill(os.getpid(), signal.SIGTERM)


def state_of(self: Any) -> dict[str, Any]:
    return {"args": {}, "attributes": vars(self)}


def with_callback(
    directory: Path, methods: dict[str, Any], data: type = list, end: int = 0, **settings: Any
) -> tuple[list[tuple[int, str]], Any]:
    """The step and the loss of each batch, and what there is at the end: parameters, modes, whether
    it was stopped, step, epoch, operations, log."""
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState

    from perdure.plugins.transformers import train

    def interrupts(self: Any, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == end:
            raise Stopped

    losses: list[tuple[int, str]] = []

    class Seeing(Trainer):
        def training_step(self, *given: Any, **named: Any) -> Any:
            loss = super().training_step(*given, **named)
            losses.append((self.state.global_step, float(loss).hex()))
            return loss

    bases = (TrainerCallback, ExportableState) if "state" in methods else (TrainerCallback,)
    kinds = [type("Changes", bases, methods), type("Ends", (TrainerCallback,), {})]
    kinds[1].on_step_end = interrupts  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = Model()
    source = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(4, generator=source), "labels": torch.ones(1)} for _ in range(8)]
    args = quiet(
        directory,
        per_device_train_batch_size=2,
        save_steps=1,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        **settings,
    )
    each: Any = [kind() for kind in kinds]
    trainer = Seeing(model, args, None, data(rows), Noisy(rows), callbacks=each)  # type: ignore[arg-type]
    kinds[0].trainer = trainer  # type: ignore[attr-defined]
    try:
        train(trainer, directory)
    except Stopped:
        assert end
    state = trainer.state
    log = [(entry["step"], entry.get("eval_loss")) for entry in state.log_history]
    bits = [value.tolist() for value in model.parameters()]
    modes = [module.training for module in model.modules()]
    is_stopped = trainer.control.should_training_stop
    return losses, (bits, modes, is_stopped, state.global_step, state.epoch, state.total_flos, log)


@pytest.mark.filterwarnings("ignore")  # of the import of transformers
@pytest.mark.parametrize(
    ("methods", "data", "settings"),
    [
        ({"on_step_end": epochs_of_two}, list, {"num_train_epochs": 5}),
        ({}, Stream, {"max_steps": 10}),
        ({}, Stream, {"max_steps": 10, "gradient_accumulation_steps": 3}),  # and a rest
        ({}, Growing, {"max_steps": 10}),
        ({}, list, {"eval_strategy": "steps", "eval_steps": 3}),
        ({}, list, {"include_num_input_tokens_seen": "all", "logging_steps": 1}),
        ({"on_step_end": logs_runtime}, list, {}),
        (
            {"on_epoch_end": accumulates_one},
            list,
            {"num_train_epochs": 5, "gradient_accumulation_steps": 2},
        ),
        ({"on_epoch_begin": alternates}, list, {"num_train_epochs": 5}),
        ({"on_step_end": clips_by_numpy}, list, {}),
        ({"on_step_end": evaluates_no_more}, list, {"eval_strategy": "steps", "eval_steps": 1}),
        ({"on_step_end": clips}, list, {}),
        ({"on_step_end": limits}, list, {}),
        ({"on_step_begin": decays}, list, {}),
        ({"on_epoch_begin": decays}, list, {}),
        ({"on_epoch_begin": drops}, list, {}),
        ({"on_train_begin": logs, "on_epoch_begin": logs}, list, {}),
        (
            {"on_epoch_begin": counts, "state": state_of},
            list,
            {"restore_callback_states_from_checkpoint": True},
        ),
    ],
)
def test_what_callbacks_change_is_as_in_the_undisturbed_run(
    tmp_path: Path, methods: dict[str, Any], data: type, settings: dict[str, Any]
) -> None:
    whole, at_end = with_callback(tmp_path / "whole", methods, data, **settings)
    newest = 0
    for end in (2, 4, 5, 7):
        losses, _ = with_callback(tmp_path / "run", methods, data, end, **settings)
        assert losses == [each for each in whole if newest <= each[0] < end]
        newest = Run(tmp_path / "run").steps()[-1]
        assert newest == end - 1
    rest = [each for each in whole if newest <= each[0]]
    assert with_callback(tmp_path / "run", methods, data, **settings) == (rest, at_end)


@pytest.mark.filterwarnings("ignore")  # of the import of transformers
def test_gradients_that_no_step_has_used_delay_the_end_of_a_terminated_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "num_train_epochs": 3}
    whole, at_end = with_callback(tmp_path / "whole", {"on_substep_end": ends_epoch}, **settings)
    with pytest.raises(SystemExit) as caught:
        with_callback(tmp_path / "run", {"on_substep_end": ends_epoch_and_run}, **settings)
    assert caught.value.code == EXIT_PREEMPTED
    assert Run(tmp_path / "run").steps() == [1, 2, 3]
    rest = [each for each in whole if each[0] >= 3]
    answer = with_callback(tmp_path / "run", {"on_substep_end": ends_epoch}, **settings)
    assert answer == (rest, at_end)


@pytest.mark.filterwarnings("ignore")  # of the import of transformers
@pytest.mark.parametrize(
    ("methods", "settings", "continues"),
    [
        ({}, {"num_train_epochs": 2.5}, True),
        ({"on_step_end": epochs_of_two}, {"num_train_epochs": 2}, True),
        ({"on_step_end": stops}, {}, False),
        ({"on_evaluate": stops}, {"eval_strategy": "epoch"}, False),
        ({"on_log": shifts, "on_train_end": shifts}, {"logging_steps": 1}, True),
    ],
)
def test_a_run_that_has_ended_makes_no_step_more(
    tmp_path: Path, methods: dict[str, Any], settings: dict[str, Any], continues: bool
) -> None:
    run = tmp_path / "run"
    _, at_end = with_callback(run, methods, **settings)
    assert with_callback(run, methods, **settings) == ([], at_end)
    longer: dict[str, Any] = settings | {"num_train_epochs": 4}
    more, _ = with_callback(run, methods, **longer)
    assert bool(more) == continues


@pytest.mark.filterwarnings("ignore")  # of the import of transformers
@pytest.mark.parametrize("ends", ["_finalize_training", "not_in_the_first_releases"])
def test_a_longer_run_is_one_that_has_not_ended_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    from perdure.plugins import transformers as plugin

    monkeypatch.setattr(plugin, "_ENDS", ends)
    settings: dict[str, Any] = {"logging_steps": 1, "include_num_input_tokens_seen": "all"}
    # The fourth step ends the first epoch, and the sixth one the second.
    methods = {"on_epoch_end": accumulates_two, "on_step_end": shifts}
    whole, at_end = with_callback(tmp_path / "whole", methods, max_steps=12, **settings)
    for steps in (4, 5, 6):
        run = tmp_path / f"run{steps}"
        with_callback(run, methods, max_steps=steps, **settings)
        assert Run(run).steps() == [*range(1, steps + 1)]
        rest = [each for each in whole if each[0] >= steps]
        assert with_callback(run, methods, max_steps=12, **settings) == (rest, at_end)


@pytest.mark.filterwarnings("ignore")  # of the import of transformers
@pytest.mark.parametrize(
    ("method", "found"),
    [
        (accumulates_two, r"gradient_accumulation_steps: expected 1.*`on_epoch_end`"),
        (sets_an_object, r"args\.run_name: .*found object"),
    ],
)
def test_a_change_of_an_argument_that_would_not_come_back_is_refused(
    tmp_path: Path, method: Any, found: str
) -> None:
    with pytest.raises(StateError, match=found):
        with_callback(tmp_path / "run", {"on_step_end": method})
    assert not Run(tmp_path / "run").steps()


@pytest.mark.filterwarnings("ignore")  # of the import of transformers
def test_a_run_that_is_terminated_in_its_last_step_exits_after_the_last_save(
    tmp_path: Path,
) -> None:
    _, at_end = with_callback(tmp_path / "whole", {}, max_steps=3)
    with pytest.raises(SystemExit) as caught:
        with_callback(tmp_path / "run", {"on_step_end": terminates}, max_steps=3)
    assert caught.value.code == EXIT_PREEMPTED
    assert Run(tmp_path / "run").steps() == [1, 2, 3]
    assert with_callback(tmp_path / "run", {}, max_steps=3) == ([], at_end)
