"""`perdure plot RUN...`: metrics over steps, as a picture or as text."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from perdure.cli.output import document, json_option, printable
from perdure.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perdure.report.panels import Panel

_FILE = click.Path(path_type=Path)


@click.command("plot", short_help="Draw the metrics of runs over steps.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=str))
@click.option("-o", "--output", type=_FILE, help="A file that ends in .png or .svg.")
@click.option("--metric", multiple=True, metavar="PATTERN", help="Metrics to draw; all by default.")
@click.option("--norms", is_flag=True, help="Draw norms and update ratios of layers, not metrics.")
@click.option(
    "--leaves", multiple=True, metavar="PATTERN", help="The leaves of --norms; all by default."
)
@click.option(
    "--logs", multiple=True, type=_FILE, help="A log directory of `perdure run`; found by default."
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    runs: tuple[str, ...],
    output: Path | None,
    metric: tuple[str, ...],
    norms: bool,
    leaves: tuple[str, ...],
    logs: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Draw the metrics of the run directories RUN... over steps, with their interruptions.

    Without -o the picture is shown in the terminal, if that shows pictures; otherwise each metric is a
    line of text. Pictures need matplotlib: pip install 'perdure[plot]'. Exits with 1 if a checkpoint
    is damaged or cannot be read; the others are drawn.

    \b
    Example:
      perdure plot runs/a runs/b --metric loss -o loss.png
    """
    from perdure.report.run_plot import picture_kind, plot_drawing, save_plot

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
        count = f"{len(panels)} {'panel' if len(panels) == 1 else 'panels'}"
        click.echo(printable(f"{output}: {count}"), err=True)
    elif (picture := _picture(panels)) is not None:
        click.echo(picture, nl=False)
    else:
        _print(panels)
    for sentence in (*problems, *notes):
        click.echo(printable(sentence), err=True)
    ctx.exit(1 if problems else 0)


def _picture(panels: Sequence[Panel]) -> str | None:
    """The text that draws the panels in this terminal; None if it shows no pictures."""
    from perdure.report.terminal_picture import picture_protocol, picture_sequence

    protocol = picture_protocol(os.environ)
    if protocol is None or not sys.stdout.isatty():
        return None
    from perdure.report.figure import draw_figure, figure_bytes

    try:
        return picture_sequence(figure_bytes(draw_figure(panels), "png"), protocol)
    except MissingExtraError:
        return None


def _print(panels: Sequence[Panel]) -> None:
    from perdure.report.sparkline import BLOCKS, PLAIN, sparklines

    try:
        BLOCKS.encode(sys.stdout.encoding or "ascii")
        levels = BLOCKS
    except (LookupError, UnicodeEncodeError):
        levels = PLAIN
    for line in sparklines(panels, shutil.get_terminal_size().columns, levels):
        click.echo(printable(line))
