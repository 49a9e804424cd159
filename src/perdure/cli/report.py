"""`perdure report RUN... -o report.html`: what runs are, how they went, and what they hold."""

from __future__ import annotations

from pathlib import Path

import click

from perdure.cli.output import document, json_option, printable

_FILE = click.Path(path_type=Path)


@click.command("report", short_help="Write one HTML file about runs.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=str))
@click.option("-o", "--output", type=_FILE, help="The HTML file. An older page there is replaced.")
@click.option(
    "--logs", multiple=True, type=_FILE, help="A log directory of `perdure run`; found by default."
)
@click.option(
    "--drill", multiple=True, type=_FILE, help="A file with the document of `perdure drill --json`."
)
@click.option(
    "--verify", multiple=True, type=_FILE, help="A file with that of `perdure verify RUN --json`."
)
@click.option(
    "--leaves",
    multiple=True,
    metavar="PATTERN",
    help="Leaves whose changes are shown; all by default.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    runs: tuple[str, ...],
    output: Path | None,
    logs: tuple[Path, ...],
    drill: tuple[Path, ...],
    verify: tuple[Path, ...],
    leaves: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write one HTML file on the run directories RUN..., which needs no network.

    It has the recipe, the attempts, the metrics, the checkpoints, and how much each layer changed
    between them; several runs stand side by side. With --json the same is printed as one document, and
    -o may be left out. Exits with 1 if a checkpoint is damaged or cannot be read.

    \b
    Example:
      perdure report runs/a -o report.html
    """
    from perdure.report import report

    if output is None and not as_json:
        raise click.UsageError("Name the HTML file with -o FILE, or ask for --json.")
    done = report(*runs, logs=logs, drills=drill, verified=verify, leaves=leaves or None)
    if output is not None:
        done.save(output)
    if as_json:
        document(done.document)
    else:
        click.echo(printable(f"{output}: {len(done.html.encode()):,} bytes"), err=True)
    for run in done.document["runs"]:
        for row in run["checkpoints"]:
            if row["state"]:
                click.echo(
                    printable(f"{run['run']}: step {row['step']} is {row['state']}: {row['why']}"),
                    err=True,
                )
    ctx.exit(0 if done.ok else 1)
