"""The `perdure` command: loads the commands, and turns errors into one message and an exit status."""

from __future__ import annotations

import errno
from difflib import get_close_matches
from importlib import import_module
from itertools import takewhile
from typing import Any

import click

from perdure import __version__
from perdure.cli.output import discard_unwritten, is_output_error, print_error, report
from perdure.errors import ArgumentError, NotARunError, PerdureError, StepNotFoundError
from perdure.runtime import heartbeats

GROUPS = {
    "Train": {
        "run": ("run", "Start a program as workers, watch and restart them."),
        "status": ("run", "Show the attempts of the newest `perdure run`."),
        "demo": ("demo", "Train, kill, resume elsewhere, and compare the bits."),
    },
    "Look": {
        "ls": ("look", "List the checkpoints of a run directory."),
        "show": ("look", "Show a checkpoint: recipe, metrics, leaves, figures."),
        "diff": ("look", "Compare two checkpoints or two runs, leaf by leaf."),
        "report": ("report", "Write a page on runs, or draw their metrics."),
    },
    "Keep": {
        "verify": ("keep", "Read and hash everything, and report damage."),
        "prune": ("keep", "Delete the checkpoints that a policy does not keep."),
        "rollback": ("keep", "Set aside the checkpoints after a step."),
    },
    "Prove": {
        "drill": ("drill", "Interrupt your own program, and compare the bits."),
        "replay": ("replay", "Compute steps again, and compare them with the journal."),
        "bisect": ("replay", "Find the first step at which two runs part."),
        "certify": ("certify", "Write or check a certificate of a checkpoint."),
        "doctor": ("doctor", "Check that this machine computes the same bits again."),
    },
    "Move": {
        "copy": ("move", "Copy checkpoints into another run directory or bucket."),
        "fork": ("move", "Start a new run directory from a checkpoint."),
        "average": ("move", "Average checkpoints into a new run directory."),
        "export": ("move", "Write a checkpoint in the format of another library."),
        "import": ("move", "Begin a run directory with the arrays of other files."),
    },
}
"""The commands by group: the module of each, in which it has its own name, and its line of the help."""

COMMANDS = tuple(name for group in GROUPS.values() for name in group)

_ALIASES = {"plot": ("report", "--plot"), "stats": ("show", "--stats"), "tree": ("show", "--tree")}
"""Short forms, which the help does not list."""

_HABITS = {
    **dict.fromkeys(("continue", "launch", "resume", "start", "train"), "run"),
    **dict.fromkeys(("cat", "describe", "info", "inspect"), "show"),
    **dict.fromkeys(("clean", "delete", "gc", "rm"), "prune"),
    **dict.fromkeys(("check", "fsck"), "verify"),
    "compare": "diff",
    "convert": "export",
    "cp": "copy",
    "list": "ls",
}
"""Words of other tools, and the command that does the same here: the error for the word names it."""


class _Commands(click.Group):
    """Imports the module of a command only when that command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for group in GROUPS.values():
            if cmd_name in group:
                module, line = group[cmd_name]
                attribute = "import_" if cmd_name == "import" else cmd_name
                command = getattr(import_module(f"perdure.cli.{module}"), attribute)
                command.short_help = line
                return command
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word.isalpha() and word not in (*COMMANDS, *_ALIASES):
            near = (
                [_HABITS[word]] if word in _HABITS else get_close_matches(word, COMMANDS, 1, 0.75)
            )
            hint = f" Did you mean `perdure {near[0]}`?" if near else ""
            ctx.fail(f"No such command {word!r}.{hint}")
        return super().resolve_command(ctx, [*_ALIASES.get(word, args[:1]), *args[1:]])

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, line) for name, (_, line) in group.items()])

    def invoke(self, ctx: click.Context) -> Any:
        # Under `perdure run` a command is no training loop, and a program beside it may be one.
        heartbeats.release()
        try:
            return self._invoke(ctx)
        except OSError as error:
            # click ends a command whose reader has gone (`| head`) by itself.
            if error.errno == errno.EPIPE:
                raise
            discard_unwritten()
            report(f"the standard output cannot be written: {error}")
            ctx.exit(1)
        except KeyboardInterrupt:
            # click would exit with 1, which is the verdict "differs" of several commands.
            report("interrupted")
            ctx.exit(130)

    def _invoke(self, ctx: click.Context) -> Any:
        as_json = "--json" in takewhile("--".__ne__, ctx.args)  # after `--` it is the program's
        try:
            ctx.exit(int(super().invoke(ctx) or 0))
        except click.UsageError as error:  # click prints it
            if as_json:
                print_error(error.format_message(), ArgumentError.__name__)
            raise
        except (PerdureError, OSError) as error:
            text = str(error)
            if isinstance(error, OSError):
                if error.errno == errno.EPIPE or is_output_error(error):
                    raise
                text = f"{error.filename or 'the system'}: {error.strerror or error}"
            if as_json:
                print_error(text, type(error).__name__)
            report(text)
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
