"""`perdure bisect RUN1 RUN2`: the first step at which two runs part."""

from __future__ import annotations

from dataclasses import asdict

import click

from perdure.cli.output import document, json_option


@click.command("bisect")
@click.argument("one", metavar="RUN1", type=click.Path(path_type=str))
@click.argument("two", metavar="RUN2", type=click.Path(path_type=str))
@json_option
@click.pass_context
def command(ctx: click.Context, one: str, two: str, as_json: bool) -> None:
    """Find the first step at which the run directories RUN1 and RUN2 part.

    Their journals are compared, or their checkpoints if one has none. The exit status is 0 if all steps
    that both have are equal, 1 if one differs.
    """
    from perdure.inspect.journal_bisect import bisect_runs

    found = bisect_runs(one, two)
    if as_json:
        document({"run1": one, "run2": two, **asdict(found)})
    elif found.step is None:
        click.echo(
            f"equal up to step {found.last_equal}, the last that both have ({found.compared})"
        )
    else:
        equal = (
            "" if found.last_equal is None else f", after step {found.last_equal}, which is equal"
        )
        click.echo(f"they part at step {found.step}{equal} ({found.compared})")
        click.echo(f"  {found.what}: {found.values[0]} and {found.values[1]}")
        start = f"{found.last_equal or 0}:{found.step}"
        click.echo(f"`perdure replay RUN --steps {start} -- COMMAND` shows which of them is right")
    ctx.exit(0 if found.step is None else 1)
