"""The Hugging Face Trainer on run directories; `make proof-doors` has it installed."""

from __future__ import annotations

import importlib.util
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plugin_programs import answer_of, run_program
from torch.utils.data import DataLoader

from damage import flip
from perdure import EXIT_PREEMPTED
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
