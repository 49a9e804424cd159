"""What a person types: output, JSON, and exit statuses 0 (fine), 1 (a problem), 2 (wrong usage)."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from perdure import CheckpointManager, ManagerOptions, Retention
from perdure.cli import main
from perdure.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]


def perdure(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    recipe = {"replicas": 8, "engine": "jax"}
    with CheckpointManager(tmp_path / "run", recipe=recipe) as manager:
        for step in (10, 20):
            state: dict[str, Any] = {"w": np.full((3, 4), step, np.float32), "name": "digits"}
            manager.save(step, state)
    return tmp_path / "run"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


def test_ls_lists_the_checkpoints(run: Path) -> None:
    result = perdure("ls", run)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0].split() == [
        "step",
        "created",
        "age",
        "leaves",
        "size",
        "fingerprint",
        "kept",
    ]
    assert [line.split()[0] for line in lines[1:]] == ["10", "20"]
    document = json.loads(perdure("ls", run, "--json").output)
    assert [row["step"] for row in document["checkpoints"]] == [10, 20]
    assert document["checkpoints"][1]["nbytes"] == 3 * 4 * 4 + len("digits")


def test_ls_and_show_print_the_metrics(tmp_path: Path) -> None:
    many = {f"m{number}": float(number) for number in range(6)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": 1})
        manager.save(2, {"w": 2}, {"loss": 0.123456789, "accuracy": float("nan")})
        manager.save(3, {"w": 3}, many)
    lines = perdure("ls", tmp_path).output.splitlines()
    assert lines[0].split()[-1] == "metrics"
    assert lines[2].endswith("accuracy=nan loss=0.123457")
    assert lines[3].endswith("m0=0 m1=1 m2=2 m3=3 and 2 more")
    rows = json.loads(perdure("ls", tmp_path, "--json").output)["checkpoints"]
    assert [row["metrics"] for row in rows] == [{}, {"loss": 0.123456789, "accuracy": "NaN"}, many]
    shown = perdure("show", f"{tmp_path}@2").output
    assert "metric       loss = 0.123456789" in shown
    assert "metric       accuracy = NaN" in shown
    assert "metric" not in perdure("show", f"{tmp_path}@1").output
    assert json.loads(perdure("show", f"{tmp_path}@3", "--json").output)["metrics"] == many


@pytest.mark.parametrize(("options", "unbuffered"), [([], ""), (["--json"], ""), ([], "1")])
def test_a_full_standard_output_is_one_line_and_no_traceback(
    run: Path, options: list[str], unbuffered: str
) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "perdure.cli", "ls", *options, str(run)],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "perdure: the standard output cannot be written: [Errno 28] No space left on device\n"
    )


@pytest.mark.parametrize(
    "words",
    ["ls", "show", "diff RUN@10", "prune --max-to-keep 1 --dry-run", "report --plot --norms"],
)
def test_a_closed_standard_output_is_no_error(run: Path, words: str) -> None:
    name, *rest = words.replace("RUN", str(run)).split()
    for module in ("perdure", "perdure.cli"):
        line = [sys.executable, "-m", module, name, str(run), *rest]
        closed = ["sh", "-c", 'exec "$@" >&-', "sh", *line]
        assert subprocess.run(closed, stderr=subprocess.PIPE, text=True).stderr == ""
        usual = subprocess.run(line, capture_output=True)
        assert subprocess.run(closed, capture_output=True).returncode == usual.returncode


@pytest.mark.parametrize(
    "words",
    [
        "rollback RUN",
        "certify --check nowhere.json",
        "prune RUN --max-to-keep x",
        "ls",
        "show RUN --no-such-option",
        "no-such-command",
        "rollback RUN@99",
        "verify RUN/nowhere",
    ],
)
def test_a_mistake_in_the_arguments_is_one_json_document(run: Path, words: str) -> None:
    result = perdure(*words.replace("RUN", str(run)).split(), "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)
    assert error.keys() == {"error", "kind"}
    assert error["error"] in result.stderr


def test_the_json_of_a_program_is_its_own(run: Path) -> None:
    result = perdure("replay", run, "--workers", "x", "--", "true", "--json")
    assert (result.exit_code, result.stdout) == (2, "")


def test_ls_reports_a_damaged_manifest(run: Path) -> None:
    flip(run / "checkpoints" / "000000000010.json")
    result = perdure("ls", run)
    assert result.exit_code == 1
    assert "step 10 is damaged" in result.output
    document = json.loads(perdure("ls", run, "--json").stdout)
    assert [row["step"] for row in document["checkpoints"]] == [20]
    assert [row["step"] for row in document["damaged"]] == [10]


def test_show_gives_recipe_and_leaves_of_the_newest_or_of_a_step(run: Path) -> None:
    result = perdure("show", run)
    assert result.exit_code == 0
    assert "step         20" in result.output
    assert "replicas = 8" in result.output
    assert "float32[3,4]" in result.output
    assert "str digits" in result.output
    document = json.loads(perdure("show", f"{run}@10", "--json").output)
    assert document["step"] == 10
    assert [leaf["path"] for leaf in document["leaves"]] == ["name", "w"]


def test_verify_says_what_is_damaged_and_what_a_restore_would_take(run: Path) -> None:
    result = perdure("verify", run)
    assert (result.exit_code, "2 checkpoints good, 0 damaged" in result.output) == (0, True)
    flip(sorted((run / "packs").iterdir())[1])
    result = perdure("verify", run)
    assert result.exit_code == 1
    assert "DAMAGED" in result.output
    assert "a restore takes step 10, the newest good one" in result.output
    document = json.loads(perdure("verify", run, "--json").output)
    assert (document["ok"], document["good"], document["bad"]) == (False, [10], [20])


@pytest.mark.parametrize("damaged", [False, True])
def test_verify_of_checkpoints_without_a_whole_marker_finds_damage(
    run: Path, damaged: bool
) -> None:
    marker = run / "perdure.json"
    marker.write_text("{") if damaged else marker.unlink()
    result = perdure("verify", run)
    assert (result.exit_code, "--repair" in result.output) == (1, True)
    assert json.loads(perdure("verify", run, "--json").stdout)["kind"] == "CorruptionError"
    assert perdure("verify", run, "--repair").exit_code == 0
    assert perdure("verify", run).exit_code == 0


def test_verify_takes_a_run_and_no_checkpoint(run: Path) -> None:
    result = perdure("verify", f"{run}@10")
    assert result.exit_code == 2
    assert "Leave out @10" in result.output


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_path_that_is_no_run_is_wrong_usage(tmp_path: Path, command: str) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        result = perdure(command, path)
        assert result.exit_code == 2
        assert "expected a run directory" in result.output
        assert "Traceback" not in result.output
        assert json.loads(perdure(command, path, "--json").stdout)["kind"] == "NotARunError"


def test_a_step_that_is_not_there_is_wrong_usage(run: Path) -> None:
    result = perdure("show", f"{run}@15")
    assert result.exit_code == 2
    assert "expected a checkpoint of step 15, found steps 10, 20" in result.output


def test_a_newer_format_is_a_problem(run: Path) -> None:
    (run / "perdure.json").write_text('{"format":4,"created":"2030"}\n')
    result = perdure("verify", run)
    assert result.exit_code == 1
    assert "Install a newer perdure" in result.output


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["ls"], ["show", "x", "more"], ["ls", "x", "-q"]]
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert perdure(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("word", "command"),
    [("resume", "run"), ("list", "ls"), ("inspect", "show"), ("verfy", "verify"), ("zzz", None)],
)
def test_a_word_that_is_no_command_names_the_command_that_is_meant(
    word: str, command: str | None
) -> None:
    result = perdure(word, "runs/first", "--follow")
    assert result.exit_code == 2
    hint = f" Did you mean `perdure {command}`?" if command else ""
    assert result.output.endswith(f"No such command {word!r}.{hint}\n")


# ---------------------------------------------------------------- hostile and long values


def test_show_and_ls_print_no_raw_escapes_and_cut_long_values(tmp_path: Path) -> None:
    title = "\x1b]0;owned\x07"
    state = {f"w{title}": 1, "note": "x" * 10_000, "red": f"\x1b[31m{title}\r\n"}
    recipe = {"replicas": 8, "engine": f"jax{title}", "dataset": "y" * 10_000}
    with CheckpointManager(tmp_path, recipe=recipe) as manager:
        manager.save(1, state, {f"loss{title}": 1.0})
    for command in ("show", "ls"):
        output = perdure(command, tmp_path).output
        assert "\x1b" not in output
        assert "\x07" not in output
        assert max(map(len, output.splitlines())) < 600
    output = perdure("show", tmp_path).output
    assert "\\x1b[31m\\x1b]0;owned\\x07\\r\\n" in output  # visible, in one line
    assert "x" * 100 in output
    assert "... (10000 characters)" in output
    # JSON has all of it, in the escapes of JSON.
    document = json.loads(perdure("show", tmp_path, "--json").output)
    assert document["recipe"]["dataset"] == "y" * 10_000


WITHOUT_EXTRAS = """
import importlib.util, sys
EXTRAS = {"accelerate", "jax", "jinja2", "keras", "lightning", "matplotlib", "obstore", "optax",
    "orbax", "pytest", "ray", "sklearn", "torch", "transformers"}
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in EXTRAS else find_spec(name, *rest)

from importlib import import_module
from pathlib import Path
from click.testing import CliRunner
import perdure
from perdure.cli import main

with perdure.CheckpointManager("run") as manager:
    manager.save(1, {"model": 1.0}, {"loss": 1.0})
Path("a.pt").write_bytes(b"PK")

def calls():
    for line in Path(sys.argv[1]).read_text().split():
        module, _, name = line.partition(":")
        yield line, lambda: getattr(import_module(module), name)
    for engine in ("jax", "torch"):
        yield f"group:{engine}", lambda: perdure.initialize_distributed(engine)
    yield "mirror", lambda: perdure.CheckpointManager("run", mirror="s3://bucket/run")

for name, call in calls():
    try:
        call()
    except ImportError as error:
        print(f"{name}|{type(error).__name__}: {error}")
for command in COMMANDS:
    output = CliRunner().invoke(main, command.split()).output
    print(f"{command}|" + " ".join(output.split()))
"""

NEEDS = {
    "demo": "demo,jax",
    "demo --engine torch": "demo,torch",
    "doctor": "jax",
    "doctor --framework torch": "torch",
    "ls s3://bucket/run": "cloud",
    "copy run gs://bucket/run": "cloud",
    "report run --plot -o a.png": "report",
    "report run -o a.html": "report",
    "drill -o a.html -- true": "report",
    "export run@1 out.pt --to torch": "torch",
    "import a.pt new --from torch": "torch",
    "import . new --from orbax": "orbax",
}
"""Commands that cannot do their work without an extra."""


NAME_NEEDS = {
    "perdure.plugins.accelerate": "accelerate",
    "perdure.plugins.dcp": "torch",
    "perdure.jax": "jax",
    "perdure.keras": "keras",
    "perdure.plugins.lightning": "lightning",
    "perdure.plugins.ray": "ray",
    "perdure.torch": "torch",
    "perdure.plugins.transformers": "transformers",
}
"""Modules whose names need an extra."""


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path: Path) -> None:
    """In one process, which sees none of the packages: every public name, and these commands."""
    names = Path(__file__).parents[1] / "frozen" / "names.txt"
    public = names.read_text().replace(": ", ":").split()
    listed = tmp_path / "names"
    listed.write_text("\n".join(public))
    run = subprocess.run(
        [sys.executable, "-c", f"COMMANDS = {list(NEEDS)}\n{WITHOUT_EXTRAS}", listed],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    said = dict(line.split("|", 1) for line in run.stdout.splitlines())
    extras = {name: NAME_NEEDS.get(name.partition(":")[0]) for name in public}
    extras |= {f"group:{engine}": engine for engine in ("jax", "torch")}
    extras["mirror"] = "cloud"
    wanted = {name: extra for name, extra in {**extras, **NEEDS}.items() if extra is not None}
    missing = "perdure.testing:StorageConformance"
    assert "MissingExtraError" in said[missing]
    assert "pip install pytest" in said.pop(missing)
    assert said.keys() == wanted.keys()
    for name, extra in wanted.items():
        assert f"pip install 'perdure[{extra}]'" in said[name], said[name]
        assert " " in name or ":" not in name or said[name].startswith("MissingExtraError: "), said[
            name
        ]


def test_ctrl_c_is_no_verdict(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    assert perdure("verify", run).exit_code == 0
    monkeypatch.setattr("perdure.store.verify_run", interrupted)
    result = perdure("verify", run)
    assert (result.exit_code, result.output) == (130, "perdure: interrupted\n")


@pytest.mark.parametrize("module", ["click", "perdure.errors", "perdure.cli.look", "perdure.store"])
def test_ctrl_c_during_the_imports_is_no_traceback(run: Path, module: str) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    entry, _, name = scripts["perdure"].partition(":")
    code = f"""
import importlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background has none
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.exit(importlib.import_module({entry!r}).{name}())
"""
    line = [sys.executable, "-c", code, "ls", str(run)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "perdure: interrupted\n")


@pytest.mark.parametrize("command", ["run", "drill", "doctor", "replay RUN"])
def test_a_program_that_is_not_there_is_a_mistake_in_the_arguments(run: Path, command: str) -> None:
    words = [str(run) if word == "RUN" else word for word in command.split()]
    result = perdure(*words, "--", "no-such-program")
    assert result.exit_code == 2
    assert "no-such-program: no such command" in result.output
    assert f"perdure {command} -- python train.py" in result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_says_what_the_exit_status_means(name: str) -> None:
    long, short = perdure(name, "--help"), perdure(name, "-h")
    assert (long.exit_code, long.output) == (0, short.output)
    assert re.search(r"exit status|exits\s+with", long.output, re.IGNORECASE)


def test_python_m_perdure_and_the_names_that_completion_offers() -> None:
    import perdure as package

    command = [sys.executable, "-m", "perdure", "--version"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["perdure,", "version", package.__version__]
    assert set(package.__all__) <= set(dir(package))


def examples(help_text: str) -> list[str]:
    """The commands of the part "Example:" of a help."""
    part = help_text.partition("  Example:\n")[2].partition("\n\n")[0]
    return [line.strip() for line in part.splitlines()]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example_that_it_accepts(name: str) -> None:
    help_text = perdure(name, "--help").output
    assert re.search("[Ee]xits?( status|\\s+with)", help_text)
    shown = examples(help_text)
    assert shown
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for line in shown:
        program, called, *arguments = shlex.split(line)
        assert (program, called) == ("perdure", name)
        command.make_context(name, arguments)
    with pytest.raises(click.UsageError):
        command.make_context(name, ["--no-such-option"])


def test_without_arguments_every_command_is_listed_with_all_of_its_line() -> None:
    output = perdure().output
    listed = dict(re.findall(r"^  ([a-z]+) +([A-Z].*\.)$", output, re.MULTILINE))
    assert tuple(listed) == COMMANDS
    assert not [line for line in listed.values() if line.endswith("..")]
    assert "perdure COMMAND --help" in output


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["re"], ["report", "replay"]),
        ([""], list(COMMANDS)),
        (["prune", "run", "--max"], ["--max-to-keep"]),
        (["demo", "--engine", ""], ["jax", "torch"]),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands_options_and_values(
    shell: str, typed: list[str], offered: list[str]
) -> None:
    words = {
        "COMP_WORDS": shlex.join(["perdure", *typed])
        if typed[-1]
        else f"perdure {' '.join(typed)}",
        "COMP_CWORD": typed[-1] if shell == "fish" else str(len(typed)),
        "_PERDURE_COMPLETE": f"{shell}_complete",
    }
    output = CliRunner().invoke(main, [], prog_name="perdure", env=words).output
    found = {
        "bash": re.findall(r"^plain,(.*)$", output, re.M),
        "zsh": re.findall(r"^plain\n(.*)$", output, re.M),
        "fish": re.findall(r"^plain,([^\t\n]*)", output, re.M),
    }
    assert found[shell] == offered
    script = CliRunner().invoke(
        main, [], prog_name="perdure", env={"_PERDURE_COMPLETE": f"{shell}_source"}
    )
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text()
    assert f"_PERDURE_COMPLETE={shell}_source perdure" in page
    assert "_perdure_completion" in script.output


def test_prune_keeps_what_the_recorded_rules_keep_unless_it_is_given_others(tmp_path: Path) -> None:
    best = ManagerOptions(retention=Retention(best_metric="loss", best_mode="min"))
    with CheckpointManager(tmp_path, max_to_keep=None, options=best) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, {"w": step}, {"loss": abs(step - 2.0)})

    def kept(*options: str) -> list[int]:
        result = perdure("prune", tmp_path, "--dry-run", "--json", *options)
        assert result.exit_code == 0, result.output
        return [row["step"] for row in json.loads(result.output)["checkpoints"] if row["keep"]]

    assert kept("--max-to-keep", "1") == [2, 4]
    assert kept("--max-to-keep", "1", "--keep-period", "3") == [3, 4]
    assert kept("--max-to-keep", "1", "--best-metric", "loss", "--best-mode", "max") == [4]
    for options in (["--best-metric", "los"], ["--best-mode", "min"], ["--best-to-keep", "2"]):
        result = perdure("prune", tmp_path, "--max-to-keep", "1", *options)
        assert result.exit_code == 2, options
    assert len(json.loads(perdure("ls", tmp_path, "--json").output)["checkpoints"]) == 4
