"""Accelerate on run directories; `make proof-doors` has it installed."""

from __future__ import annotations

import importlib.util
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from plugin_programs import answer_of, run_program

from perdure import EXIT_PREEMPTED
from perdure.errors import StateError
from perdure.store import Run

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
def test_several_processes_are_refused(tmp_path: Path) -> None:
    from perdure.accelerate import batches

    accelerator: Any = SimpleNamespace(num_processes=2)
    with pytest.raises(StateError) as caught:
        next(batches(accelerator, [], tmp_path / "run", epochs=1))
    assert "expected one process, found 2" in str(caught.value)
