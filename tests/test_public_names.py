"""Frozen: the public names of every module that users import, and the command line.

Users build on both, so neither changes by accident. `make freeze` (this file, run as a program)
accepts a change on purpose.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import click
import pytest

FROZEN = Path(__file__).parent / "frozen"
MOST_NAMES = 20

# The modules that users import.
MODULES = (
    "perdure",
    "perdure.plugins.accelerate",
    "perdure.checkpoint",
    "perdure.convert",
    "perdure.data",
    "perdure.plugins.dcp",
    "perdure.digests",
    "perdure.distribute",
    "perdure.errors",
    "perdure.jax",
    "perdure.keras",
    "perdure.plugins.lightning",
    "perdure.look",
    "perdure.plugins.ray",
    "perdure.report",
    "perdure.store",
    "perdure.supervise",
    "perdure.testing",
    "perdure.torch",
    "perdure.train",
    "perdure.plugins.transformers",
)
# Those of them whose import loads a framework.
FRAMEWORKS = {
    "perdure.plugins.accelerate",
    "perdure.plugins.dcp",
    "perdure.jax",
    "perdure.keras",
    "perdure.plugins.lightning",
    "perdure.plugins.ray",
    "perdure.torch",
    "perdure.plugins.transformers",
}


def names_of(module: str) -> list[str]:
    """The public names of a module as its source has them: `__all__`, or without it its classes.

    The module is not imported, so that no framework is needed.
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no module {module}"
    assert spec.origin is not None, f"{module} is no source file"
    classes: list[str] = []
    for statement in ast.parse(Path(spec.origin).read_text()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
            case ast.ClassDef(name=name) if not name.startswith("_"):
                classes.append(name)
    return sorted(classes)


def names() -> list[str]:
    """One line, `module: name`, for each public name."""
    return [f"{module}: {name}" for module in MODULES for name in names_of(module)]


def describe(command: click.Command, name: str, context: click.Context | None = None) -> list[str]:
    """A line for a command and its arguments, one for each option, then its subcommands."""
    context = click.Context(command, parent=context, info_name=name)
    arguments = [_argument(p) for p in command.params if isinstance(p, click.Argument)]
    options = [_option(p) for p in command.params if isinstance(p, click.Option) and not p.hidden]
    lines = [" ".join([name, *arguments]), *sorted(f"{name} {option}" for option in options)]
    if isinstance(command, click.Group):
        for child in sorted(command.list_commands(context)):
            subcommand = command.get_command(context, child)
            assert subcommand is not None, f"{name} lists {child} and does not have it"
            lines += describe(subcommand, f"{name} {child}", context)
    return lines


def command_line() -> list[str]:
    """The whole command line."""
    return describe(importlib.import_module("perdure.cli").main, "perdure")


def _argument(parameter: click.Argument) -> str:
    shown = (parameter.name or "").upper() + ("..." if parameter.nargs != 1 else "")
    return shown if parameter.required else f"[{shown}]"


def _option(parameter: click.Option) -> str:
    shown = "/".join([*parameter.opts, *parameter.secondary_opts])
    if parameter.is_flag or parameter.count:
        return shown
    if isinstance(parameter.type, click.Choice):
        return f"{shown} {{{','.join(map(str, parameter.type.choices))}}}"
    return f"{shown} {parameter.type.name.upper()}"


def test_the_top_level_has_few_names() -> None:
    assert len(names_of("perdure")) <= MOST_NAMES


@pytest.mark.parametrize("module", MODULES)
def test_names_are_sorted(module: str) -> None:
    """As the linter sorts: constants, classes, functions, each by name."""
    public = names_of(module)
    assert public == sorted(public, key=lambda n: (not n.isupper(), n.islower(), n))
    assert len(public) == len(set(public))


@pytest.mark.parametrize("module", sorted(set(MODULES) - FRAMEWORKS))
def test_every_name_resolves(module: str) -> None:
    loaded = importlib.import_module(module)
    assert [name for name in names_of(module) if not hasattr(loaded, name)] == []


def test_every_package_for_users_is_frozen() -> None:
    """A new package is either added to MODULES or named here as one that users do not import."""
    root = Path(importlib.import_module("perdure").__file__ or "").parent
    present = {f"perdure.{path.parent.name}" for path in root.glob("*/__init__.py")}
    present |= {f"perdure.{path.stem}" for path in root.glob("[!_]*.py")}
    inner = {
        "cli",
        "demo",
        "doctor",
        "drill",
        "plugins",
        "runtime",
        "state",
        "tensorflow_names",
        "text",
    }
    assert present - {f"perdure.{name}" for name in inner} <= set(MODULES)


@pytest.mark.parametrize(("file", "current"), [("names.txt", names), ("cli.txt", command_line)])
def test_nothing_changed_by_accident(file, current) -> None:
    assert current() == (FROZEN / file).read_text().splitlines(), "if this is meant: make freeze"


@pytest.mark.parametrize("module", sorted(set(MODULES) - FRAMEWORKS))
def test_completion_finds_every_public_name(module: str) -> None:
    """Some names are imported on first use; `dir` has them before."""
    assert set(names_of(module)) <= set(dir(importlib.import_module(module)))


def test_a_description_shows_what_a_user_can_type() -> None:
    """Negative control: every kind of change to a command line changes its description."""

    @click.group()
    def tool() -> None: ...

    @tool.command()
    @click.argument("run")
    @click.argument("step", required=False, type=int)
    @click.option("--json", is_flag=True)
    @click.option("-e", "--engine", type=click.Choice(["jax", "torch"]))
    @click.option("--steps", type=int)
    @click.option("--color/--no-color")
    def show(**_: object) -> None: ...

    assert describe(tool, "tool") == [
        "tool",
        "tool show RUN [STEP]",
        "tool show --color/--no-color",
        "tool show --json",
        "tool show --steps INTEGER",
        "tool show -e/--engine {jax,torch}",
    ]


if __name__ == "__main__":
    FROZEN.mkdir(exist_ok=True)
    for file, current in (("names.txt", names), ("cli.txt", command_line)):
        (FROZEN / file).write_text("".join(f"{line}\n" for line in current()))
