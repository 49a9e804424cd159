"""All commands have one form: options, names of checkpoints, keys of JSON, exit statuses, widths."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from perdure import CheckpointManager
from perdure.cli import main
from perdure.cli.main import COMMANDS

PROGRAM = """
import sys
import numpy as np, perdure
with perdure.CheckpointManager("trained") as manager:
    state, start = manager.restore_or_initialize({"w": np.zeros(3)})
    for step in range(start, 4):
        state = {"w": state["w"] + 1}
        manager.save(step + 1, state)
"""
TRAIN = ("--", sys.executable, "train.py")

MISTAKES = {
    "average": ["RUN@1,2", "-o", "new", "--ema", "2"],
    "bisect": ["RUN", "RUN@1"],
    "certify": ["RUN@99"],
    "copy": ["RUN", "new@3"],
    "demo": ["--data", "nowhere"],
    "diff": ["RUN", "RUN@99"],
    "doctor": ["--framework", "bogus"],
    "drill": ["--faults", "bogus", "--", "true"],
    "export": ["RUN@99", "new", "--to", "npz"],
    "fork": ["RUN", "new"],
    "import": ["nowhere", "new"],
    "ls": ["RUN@1"],
    "prune": ["RUN", "--max-to-keep", "0"],
    "replay": ["RUN@1", "--", "true"],
    "report": ["RUN", "--plot", "-o", "picture.pdf"],
    "rollback": ["RUN"],
    "run": ["--elastic", "3:1", "--", "true"],
    "show": ["RUN", "--depth", "1"],
    "status": ["nowhere"],
    "verify": ["RUN@1"],
}
"""Of each command a value that no program can mean."""

DOCUMENTS = {
    "average": [["RUN@1,2", "-o", "new"]],
    "bisect": [["RUN", "other"]],
    "certify": [["RUN@1", "-o", "new"]],
    "copy": [["RUN@1", "new"]],
    "diff": [["RUN@1", "RUN@2"]],
    "export": [["RUN@1", "new", "--to", "npz"]],
    "fork": [["RUN@1", "new"]],
    "import": [["arrays.npz", "new"]],
    "ls": [["RUN"]],
    "prune": [["RUN", "--max-to-keep", "1", "--dry-run"]],
    "replay": [["trained", "--steps", "1:3", *TRAIN]],
    "report": [["RUN"], ["RUN", "other"], ["RUN", "--plot"]],
    "rollback": [["RUN@1", "--dry-run"]],
    "run": [[*TRAIN]],
    "show": [["RUN@1"], ["RUN@1", "--tree"], ["RUN@1", "--stats"]],
    "status": [[]],
    "verify": [["RUN"]],
}
"""Of each command calls that print a document; `demo`, `doctor` and `drill` take long."""

STEPS = {
    "average": ["other@1", "RUN@STEP", "-o", "new"],
    "certify": ["RUN@STEP", "-o", "new"],
    "copy": ["RUN@STEP", "new"],
    "diff": ["RUN@STEP", "RUN@STEP"],
    "export": ["RUN@STEP", "new", "--to", "npz"],
    "fork": ["RUN@STEP", "new"],
    "rollback": ["RUN@STEP", "--dry-run"],
    "show": ["RUN@STEP"],
}

VOCABULARY: dict[str, Any] = {
    "checkpoint": lambda value: isinstance(value, str) and "@" in value,
    "checkpoints": lambda value: isinstance(value, (int, list)),
    "fingerprint": lambda value: isinstance(value, str) and len(value) == 64,
    "fingerprints": list,
    "run": str,
    "runs": list,
    "step": lambda value: value is None or type(value) is int,
    "leaf_count": int,
    "leaves": lambda value: value is None or isinstance(value, list),
}
"""Keys that have one meaning in every document."""

OTHER_NAMES = {"where", "src", "dst", "out", "bytes", "size", "directory_name", "run1", "run2"}
"""What would be a second key for the same thing."""

MEANINGS = {
    "output": {"average", "drill", "export", "report"},
    "log_dir": {"run", "report", "status"},
}


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    for name in ("RUN", "other"):
        with CheckpointManager(name, recipe={"name": name}) as manager:
            for step in (1, 2):
                state = {
                    "model": {"w": np.full(3, step, np.float32), "b": np.array([np.nan, np.inf])}
                }
                manager.save(step, state, {"loss": 1 / step if name == "RUN" else float("inf")})
    np.savez("arrays.npz", w=np.ones(2))
    Path("train.py").write_text(PROGRAM)


def perdure(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env=environment)


def parameters() -> Iterator[tuple[str, click.Parameter]]:
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        yield from ((name, parameter) for parameter in command.params)


def keys(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key of a document with its value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key, item
            if key not in (
                "recipe",
                "metrics",
                "packs",
                "names",
            ):  # keys of the user, of a manifest
                yield from keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from keys(item)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_mistake_in_the_arguments_has_status_2(name: str) -> None:
    for arguments in (MISTAKES[name], [*MISTAKES[name], "--no-such-option"]):
        done = perdure(name, *arguments)
        assert done.exit_code == 2, done.output
        assert done.stderr
        assert "Traceback" not in done.output


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_document_has_the_keys_of_one_vocabulary(name: str) -> None:
    if name in ("replay", "status"):
        assert perdure("run", "--json", *TRAIN).exit_code == 0
    for arguments in DOCUMENTS[name]:
        at = arguments.index("--") if "--" in arguments else len(arguments)
        done = perdure(name, *arguments[:at], "--json", *arguments[at:])
        found = [*keys(json.loads(done.stdout))]
        assert found
        assert not {key for key, _ in found} & OTHER_NAMES
        for key, value in found:
            if key in VOCABULARY:
                kind = VOCABULARY[key]
                fits = isinstance(value, kind) if isinstance(kind, type) else kind(value)
                assert fits, (key, value)
            if key.endswith("bytes"):
                assert key.endswith("nbytes")
                assert value is None or type(value) is int


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("step", ["2", "latest", "best:max:loss"])
def test_a_step_is_named_by_the_run_and_an_at(name: str, step: str) -> None:
    done = perdure(name, *(word.replace("STEP", step) for word in STEPS[name]))
    assert done.exit_code == 0, done.output
    assert Path("new").exists() == (name in ("average", "certify", "copy", "export", "fork"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", "RUN"],
        ["show", "RUN"],
        ["show", "RUN", "--stats"],
        ["diff", "RUN@1", "RUN@2"],
        ["status"],
    ],
    ids=" ".join,
)
def test_a_narrow_terminal_shows_no_broken_table(arguments: list[str]) -> None:
    if arguments == ["status"]:
        assert perdure("run", "--json", *TRAIN).exit_code == 0
    wide, narrow = (perdure(*arguments, COLUMNS=width).stdout for width in ("400", "40"))
    rows = [line for line in wide.splitlines() if len(re.split(r"\S {2,}", line)) > 3]
    assert rows
    assert max(map(len, rows)) > 40
    columns = [line for line in narrow.splitlines() if len(re.split(r"\S {2,}", line)) > 3]
    assert max(map(len, columns), default=0) <= 40
    assert len(narrow.splitlines()) >= len(wide.splitlines())


def test_an_option_means_one_thing_in_all_commands() -> None:
    helps: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    used: dict[str, set[str]] = defaultdict(set)
    for command, parameter in parameters():
        if isinstance(parameter, click.Option):
            for option in parameter.opts:
                helps[option].add(tuple(parameter.opts))
                used[option].add(command)
    assert all(len(forms) == 1 for forms in helps.values()), "one long and one short form"
    assert used["--output"] == {"average", "certify", "drill", "report"}
    assert used["--log-dir"] == {"run", "report"}
    assert used["--devices"] == {"run", "bisect", "doctor", "replay"}
    assert used["--directory"] == {"demo", "drill", "bisect", "replay"}
    assert not {"--out", "--logs", "--html", "--devices-per-worker"} & used.keys()


def test_the_short_forms_are_views_of_show_and_report() -> None:
    for short, command, option in (
        ("tree", "show", "--tree"),
        ("stats", "show", "--stats"),
        ("plot", "report", "--plot"),
    ):
        done = perdure(short, "RUN")
        assert (done.exit_code, done.output) == (0, perdure(command, "RUN", option).output)
        assert short not in COMMANDS
        assert f"\n  {short} " not in perdure("--help").output


def test_the_help_lists_the_commands_in_groups() -> None:
    lines = perdure("--help").output.splitlines()
    titles = [line.rstrip(":") for line in lines if line.endswith(":")]
    assert titles == ["Options", "Train", "Look", "Keep", "Prove", "Move"]
    assert lines.index("Look:") < next(n for n, line in enumerate(lines) if line[:5] == "  ls ")


@pytest.mark.parametrize("flag", ["-n", "-np", "--workers", "--nproc-per-node", "--nproc_per_node"])
def test_the_processes_of_a_run_have_the_names_of_mpirun_and_torchrun(flag: str) -> None:
    refused = perdure("run", flag, "0", "--", "true")
    assert refused.exit_code == 2
    assert "0 is not in the range x>=1" in refused.stderr
