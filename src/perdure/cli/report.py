"""`perdure report RUN...`: a page on runs, a picture of their metrics, or a graph of text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from perdure.cli import options as cli
from perdure.cli.output import document, say, terminal_width
from perdure.text import counted


@cli.command("report")
@cli.runs_argument
@cli.output_option("The HTML file, or with --plot a .png or .svg. An older one is replaced.")
@click.option("--plot", is_flag=True, help="Draw metrics over steps; without -o as text.")
@click.option("--metric", multiple=True, metavar="PATTERN", help="Of --plot: these metrics.")
@click.option("--norms", is_flag=True, help="Of --plot: norms and update ratios of leaves instead.")
@cli.leaves_option
@click.option("--log-dir", "logs", multiple=True, type=cli.PATH, help="Logs of `perdure run`.")
@click.option("--drill", multiple=True, type=cli.PATH, help="Output of `perdure drill --json`.")
@click.option(
    "--verify", multiple=True, type=cli.PATH, help="Output of `perdure verify RUN --json`."
)
def report(
    runs: tuple[str, ...],
    output: Path | None,
    plot: bool,
    leaves: tuple[str, ...],
    logs: tuple[Path, ...],
    as_json: bool,
    **others: Any,
) -> bool:
    """Write one HTML file on the run directories RUN..., which needs no network.

    It has the recipe, the attempts, the metrics, the checkpoints, and how much each layer changed
    between them; several runs stand side by side. With --plot only the metrics are drawn, or with
    --norms or --leaves the norms of leaves. Pages and pictures need pip install 'perdure[report]'.
    Exits with 1 if a checkpoint is damaged or cannot be read.

    \b
    Example:
      perdure report runs/a -o report.html
      perdure report runs/a runs/b --plot --metric loss -o loss.png
    """
    for option in ("drill", "verify") if plot else ("metric", "norms"):
        if others.pop(option):
            without = "" if plot else "out"
            raise click.UsageError(f"--{option}: has no meaning with{without} --plot.")
    others |= {"leaves": leaves or None, "logs": logs}
    return (_plot if plot else _page)(runs, output, as_json, **others)


def _page(
    runs: tuple[str, ...], output: Path | None, as_json: bool, drill: Any, verify: Any, **which: Any
) -> bool:
    from perdure.report import report

    if output is None and not as_json:
        raise click.UsageError("Name the HTML file with -o FILE, or ask for --plot or --json.")
    done = report(*runs, drills=drill, verified=verify, **which)
    if output is not None:
        done.save(output)
    if as_json:
        document(done.document)
    else:
        say(f"{output}: {len(done.html.encode()):,} bytes", err=True)
    for run in done.document["runs"]:
        for row in run["checkpoints"]:
            if row["state"]:
                text = f"{run['run']}: step {row['step']} is {row['state']}: {row['why']}"
                say(text, err=True)
    return not done.ok


def _plot(
    runs: tuple[str, ...],
    output: Path | None,
    as_json: bool,
    metric: Any,
    norms: bool,
    **which: Any,
) -> bool:
    from perdure.report.figure import BLOCKS, PLAIN, picture_kind, save_plot, text_graph
    from perdure.report.panels import plot_drawing

    if output is not None:
        picture_kind(output)  # before anything is read
    panels, problems, notes = plot_drawing(*runs, metrics=metric or None, norms=norms, **which)
    if output is not None:
        save_plot(panels, output)
    if as_json:
        document({"panels": [panel.document() for panel in panels]})
    elif output is not None:
        say(f"{output}: {counted(len(panels), 'panel')}", err=True)
    else:
        try:
            BLOCKS.encode(sys.stdout.encoding or "ascii")
            levels = BLOCKS
        except (LookupError, UnicodeEncodeError):
            levels = PLAIN
        for line in text_graph(panels, terminal_width() or 80, levels):
            say(line)
    for sentence in (*problems, *notes):
        say(sentence, err=True)
    return bool(problems)
