"""Frozen: the public names of `perdure`, and the commands and options of its command line.

Users build on both, so neither changes by accident. `make freeze` (this file, run as a program)
accepts a change that is meant.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import click
import pytest

FROZEN = Path(__file__).parent / "frozen"
MOST_NAMES = 20


def names() -> list[str]:
    """The public names of the top level, as its `__all__` has them."""
    return list(importlib.import_module("perdure").__all__)


def describe(command: click.Command, name: str, context: click.Context | None = None) -> list[str]:
    """A line for a command and its arguments, one for each option, then its subcommands."""
    context = click.Context(command, parent=context, info_name=name)
    arguments = [_argument(p) for p in command.params if isinstance(p, click.Argument)]
    options = [_option(p) for p in command.params if isinstance(p, click.Option) and not p.hidden]
    lines = [" ".join([name, *arguments]), *sorted(f"{name} {option}" for option in options)]
    if isinstance(command, click.Group):
        for child in sorted(command.list_commands(context)):
            found = command.get_command(context, child)
            assert found is not None, f"{name} lists {child} and does not have it"
            lines += describe(found, f"{name} {child}", context)
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


def test_names_are_sorted_and_few() -> None:
    """Sorted as the linter sorts: constants, classes, functions, each by name."""
    found = names()
    assert found == sorted(found, key=lambda name: (not name.isupper(), name.islower(), name))
    assert len(found) == len(set(found)) <= MOST_NAMES


def test_every_name_resolves() -> None:
    package = importlib.import_module("perdure")
    missing = [name for name in names() if not hasattr(package, name)]
    assert missing == []


@pytest.mark.parametrize(("file", "current"), [("names.txt", names), ("cli.txt", command_line)])
def test_nothing_changed_by_accident(file, current) -> None:
    assert current() == (FROZEN / file).read_text().splitlines(), "if this is meant: make freeze"


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
