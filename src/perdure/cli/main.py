"""The `perdure` command: loads the commands, and turns errors into one message and an exit status."""

from __future__ import annotations

import errno
import json
from importlib import import_module
from typing import Any

import click

from perdure import __version__
from perdure.cli.output import discard_unwritten, is_output_error, report
from perdure.errors import ArgumentError, NotARunError, PerdureError, StepNotFoundError
from perdure.runtime import heartbeats

GROUPS = {
    "Train": ("run", "status", "demo"),
    "Look": ("ls", "show", "diff", "report"),
    "Keep": ("verify", "prune", "rollback"),
    "Prove": ("drill", "replay", "bisect", "doctor"),
    "Move": ("copy", "fork", "average", "export", "import"),
}
COMMANDS = tuple(name for names in GROUPS.values() for name in names)

_ALIASES = {
    "plot": ("report", "--plot"),
    "stats": ("show", "--stats"),
    "tree": ("show", "--tree"),
}
"""Short forms, which the help does not list."""

_MODULES = {"import": "import_run"}
"""Commands whose module has another name, because theirs is a keyword of Python."""


class _Commands(click.Group):
    """Imports the module of a command only when that command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        return import_module(f"perdure.cli.{_MODULES.get(cmd_name, cmd_name)}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, [*_ALIASES.get(args[0], args[:1]), *args[1:]])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self._line(ctx, name)) for name in names])

    def _line(self, ctx: click.Context, name: str) -> str:
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(100)

    def invoke(self, ctx: click.Context) -> Any:
        # Under `perdure run` a command is no training loop, and a program beside it may be one.
        heartbeats.release()
        try:
            return self._invoke(ctx)
        except OSError as error:
            # click ends a command whose reader has gone (`| head`) by itself.
            if error.errno == errno.EPIPE or not is_output_error(error):
                raise
            discard_unwritten()
            report(f"the standard output cannot be written: {error}")
            ctx.exit(1)
        except KeyboardInterrupt:
            # click would exit with 1, which is the verdict "differs" of several commands.
            report("interrupted")
            ctx.exit(130)

    def _invoke(self, ctx: click.Context) -> Any:
        as_json = "--json" in ctx.args
        try:
            return super().invoke(ctx)
        except PerdureError as error:
            if as_json:
                click.echo(json.dumps({"error": str(error), "kind": type(error).__name__}))
            report(str(error))
            usage = (ArgumentError, NotARunError, StepNotFoundError)
            ctx.exit(2 if isinstance(error, usage) else 1)


@click.group(
    cls=_Commands,
    epilog="`perdure COMMAND --help` shows the options of a command and an example.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="perdure")
def main() -> None:
    """Training that comes out the same, whatever happens to it."""
