"""`perdure report RUN...`: a page on runs, a picture of their metrics, or a graph of text."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from perdure.cli.output import (
    PATH,
    document,
    json_option,
    leaves_option,
    output_option,
    printable,
    runs_argument,
    terminal_width,
)
from perdure.text import counted


@click.command("report", short_help="Write a page on runs, or draw their metrics.")
@runs_argument
@output_option("The HTML file, or with --plot a .png or .svg. An older one is replaced.")
@click.option("--plot", is_flag=True, help="Draw metrics over steps; without -o as text.")
@click.option(
    "--metric", multiple=True, metavar="PATTERN", help="Of --plot: these metrics; all by default."
)
@click.option("--norms", is_flag=True, help="Of --plot: norms and update ratios of leaves instead.")
@leaves_option
@click.option(
    "--log-dir",
    "logs",
    multiple=True,
    type=PATH,
    help="A log directory of `perdure run`; found by default. May be repeated.",
)
@click.option(
    "--drill", multiple=True, type=PATH, help="A file with the document of `perdure drill --json`."
)
@click.option(
    "--verify", multiple=True, type=PATH, help="A file with that of `perdure verify RUN --json`."
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    runs: tuple[str, ...],
    output: Path | None,
    plot: bool,
    metric: tuple[str, ...],
    norms: bool,
    leaves: tuple[str, ...],
    logs: tuple[Path, ...],
    drill: tuple[Path, ...],
    verify: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Write one HTML file on the run directories RUN..., which needs no network.

    It has the recipe, the attempts, the metrics, the checkpoints, and how much each layer changed
    between them; several runs stand side by side. With --plot only the metrics are drawn, or with
    --norms or --leaves the norms of leaves. With --json the same is printed as one document, and -o may
    be left out. Pages and pictures need the extra: pip install 'perdure[report]'. Exits with 1 if a
    checkpoint is damaged or cannot be read, with 2 for a mistake in the arguments.

    \b
    Example:
      perdure report runs/a -o report.html
      perdure report runs/a runs/b --plot --metric loss -o loss.png
    """
    given = {"--metric": metric, "--norms": norms} if not plot else {}
    given |= {"--drill": drill, "--verify": verify} if plot else {}
    for option, value in given.items():
        if value:
            raise click.UsageError(f"{option}: has no meaning with{'' if plot else 'out'} --plot.")
    if plot:
        problems = _plot(runs, output, metric, norms, leaves, logs, as_json)
    else:
        problems = _page(runs, output, leaves, logs, drill, verify, as_json)
    ctx.exit(1 if problems else 0)


def _page(
    runs: tuple[str, ...],
    output: Path | None,
    leaves: tuple[str, ...],
    logs: tuple[Path, ...],
    drill: tuple[Path, ...],
    verify: tuple[Path, ...],
    as_json: bool,
) -> bool:
    from perdure.report import report

    if output is None and not as_json:
        raise click.UsageError("Name the HTML file with -o FILE, or ask for --plot or --json.")
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
                text = f"{run['run']}: step {row['step']} is {row['state']}: {row['why']}"
                click.echo(printable(text), err=True)
    return not done.ok


def _plot(
    runs: tuple[str, ...],
    output: Path | None,
    metric: tuple[str, ...],
    norms: bool,
    leaves: tuple[str, ...],
    logs: tuple[Path, ...],
    as_json: bool,
) -> bool:
    from perdure.report.run_plot import picture_kind, plot_drawing, save_plot
    from perdure.report.text_graph import BLOCKS, PLAIN, text_graph

    if output is not None:
        picture_kind(output)  # before anything is read
    panels, problems, notes = plot_drawing(
        *runs, metrics=metric or None, logs=logs, norms=norms, leaves=leaves or None
    )
    if output is not None:
        save_plot(panels, output)
    if as_json:
        document({"panels": [panel.document() for panel in panels]})
    elif output is not None:
        click.echo(printable(f"{output}: {counted(len(panels), 'panel')}"), err=True)
    else:
        try:
            BLOCKS.encode(sys.stdout.encoding or "ascii")
            levels = BLOCKS
        except (LookupError, UnicodeEncodeError):
            levels = PLAIN
        for line in text_graph(panels, terminal_width() or 80, levels):
            click.echo(printable(line))
    for sentence in (*problems, *notes):
        click.echo(printable(sentence), err=True)
    return bool(problems)
