"""Accelerate on run directories; `make proof-doors` has it installed."""

from __future__ import annotations

import importlib.util
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plugin_programs import answer_of, run_program
from torch.utils.data import DataLoader, TensorDataset

from perdure import EXIT_PREEMPTED
from perdure.errors import StateError
from perdure.store import Run
from perdure.torch import ResumableLoader

if importlib.util.find_spec("accelerate") is None:
    pytest.skip("Accelerate is not installed; make proof-doors has it", allow_module_level=True)
WORKER = Path(__file__).with_name("accelerate_worker.py")
BATCHES = 18
work = partial(run_program, WORKER)
ended = partial(answer_of, WORKER)


def test_a_killed_run_ends_with_the_bits_of_an_undisturbed_one(tmp_path: Path) -> None:
    whole = ended("plugin", tmp_path / "whole")
    assert whole["steps"] == list(range(BATCHES))
    assert work("plugin-killed", tmp_path / "run")[0] == -signal.SIGKILL
    status, answer, err = work("plugin", tmp_path / "run")
    assert status == 0, err
    assert "only in part" not in err
    assert answer["bits"] == whole["bits"]
    assert answer["steps"][0] in (4, 8)  # the save of step 8 may have been under way
    assert answer["steps"] == list(range(answer["steps"][0], BATCHES))
    assert ended("plugin", tmp_path / "run") == {"bits": whole["bits"], "steps": []}
    assert work("plugin-terminated", tmp_path / "terminated")[0] == EXIT_PREEMPTED
    assert Run(tmp_path / "terminated").steps()[-1] == 10
    assert ended("plugin", tmp_path / "terminated")["bits"] == whole["bits"]


def test_accelerate_alone_ends_with_other_bits(tmp_path: Path) -> None:
    whole = ended("own", tmp_path / "whole")
    assert work("own-killed", tmp_path / "run")[0] == -signal.SIGKILL
    answer = ended("own", tmp_path / "run")
    assert answer["steps"][0] == 8
    assert answer["bits"] != whole["bits"]


@pytest.mark.filterwarnings("ignore")  # of the import of accelerate
def test_loaders_that_cannot_be_resumed_exactly_are_refused(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from perdure.plugins.accelerate import batches

    def plain(**options: Any) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.zeros(4, 5)), shuffle=True, **options)

    def refusal(loader: Any, accelerator: Accelerator) -> str:
        with pytest.raises(StateError) as caught:
            next(batches(accelerator, loader, tmp_path / "run", epochs=1))
        return str(caught.value)

    keeping = {"num_workers": 1, "persistent_workers": True}
    accelerator = Accelerator(cpu=True)
    assert "persistent_workers=False" in refusal(accelerator.prepare(plain(**keeping)), accelerator)
    accelerator = Accelerator(cpu=True)
    loader, _ = accelerator.prepare(plain(), plain(**keeping))  # the other for an evaluation
    assert "persistent_workers=False" in refusal(loader, accelerator)
    for loader in (plain(), ResumableLoader(plain())):
        assert "that it has not prepared" in refusal(loader, Accelerator(cpu=True))
