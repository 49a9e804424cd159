"""`perdure average RUN@STEP... -o OUT`: the weighted mean of checkpoints, as a new run directory."""

from __future__ import annotations

from typing import Any

import click

from perdure.cli.output import (
    EXIT_STATUS,
    NewRun,
    checkpoint_argument,
    document,
    json_option,
    leaves_option,
    new_run_argument,
    output_option,
    show,
)
from perdure.convert import average
from perdure.convert.average_weights import SCHEDULES
from perdure.look import origin


class _Numbers(click.ParamType):
    name = "W,W,..."

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[float]:
        try:
            return [float(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"expected numbers with commas between them, found {value!r}.", param, ctx)


@click.command(
    "average", short_help="Average checkpoints into a new run directory.", epilog=EXIT_STATUS
)
@checkpoint_argument("checkpoints", "RUN@STEP...", nargs=-1, required=True)
@output_option("The new run directory.", required=True, type=NewRun())
@click.option("--weights", type=_Numbers(), help="A weight for each checkpoint, in their order.")
@click.option("--ema", type=float, metavar="DECAY", help="Exponential moving average, by steps.")
@click.option(
    "--schedule",
    type=click.Choice(SCHEDULES),
    default="uniform",
    help="How the weights depend on the order of the steps.",
)
@leaves_option
@click.option("--like", metavar="RUN@STEP", help="Where all other leaves come from.")
@json_option
def command(
    checkpoints: tuple[str, ...],
    output: str,
    leaves: tuple[str, ...],
    as_json: bool,
    **how: Any,
) -> None:
    """Average checkpoints into the new run directory of -o: RUN@100,200,300 or several RUN@STEP.

    Arrays of floating-point numbers are averaged in float64, in the order of the steps, and rounded
    once, so that the result has the same fingerprint wherever it is made. All other leaves are those
    of the newest of the checkpoints, or of --like. It has the step of that one, and its manifest
    says what it was made from.

    \b
    Example:
      perdure average runs/a@800,900,1000 -o runs/mean
    """
    with new_run_argument():
        made = average(checkpoints, output, leaves=leaves or None, **how)
    manifest = made.manifest
    if as_json:
        document(
            {
                "run": made.run,
                "step": manifest.step,
                "fingerprint": manifest.fingerprint,
                "averaged": list(made.averaged),
                "equal": list(made.equal),
                "taken": list(made.taken),
                **(origin(manifest) or {}),
            }
        )
        return
    show(made)
