"""Runs the programs of the plug-ins' tests, which print one JSON object at their end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def trainer_settings(directory: str) -> dict[str, Any]:
    """Arguments of every `TrainingArguments`: two steps of accumulation, three epochs, no output."""
    return {
        "output_dir": f"{directory}-own",
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "learning_rate": 0.05,
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def run_program(program: Path, how: str, directory: Path) -> tuple[int, Any, str]:
    """Exit status, answer and standard error of one program."""
    done = subprocess.run(
        [sys.executable, program, how, directory], capture_output=True, text=True, timeout=300
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    return done.returncode, json.loads(lines[-1]) if lines else None, done.stderr


def answer_of(program: Path, how: str, directory: Path) -> dict[str, Any]:
    """The answer of a program that has to end with status 0."""
    status, answer, err = run_program(program, how, directory)
    assert status == 0, err
    return answer
