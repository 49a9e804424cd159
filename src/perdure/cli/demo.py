"""`perdure demo`: trains on real digits, is killed, resumes elsewhere, and compares the bits."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from perdure.cli import options as cli
from perdure.cli.output import document
from perdure.demo import GUARDS
from perdure.errors import missing_extra
from perdure.look.tables import Table
from perdure.text import printable_lines

_ENDS = {"SIGKILL": "red", "exit 75": "yellow"}


@cli.command("demo")
@click.option(
    "--engine",
    type=click.Choice(["jax", "torch"]),
    help="The framework.  [default: jax, or torch if that is installed alone]",
)
@click.option("--data", type=click.Path(exists=True), help="MNIST: IDX files or .npz.")
@click.option("--epochs", type=click.IntRange(2), default=6, help="Epochs to train.")
@cli.seed_option
@cli.directory_option
@click.option("--without", type=click.Choice(GUARDS), help="Remove one guard; the demo then fails.")
def demo(
    engine: str | None,
    data: str | None,
    epochs: int,
    seed: int,
    directory: Path | None,
    without: str | None,
    as_json: bool,
) -> bool:
    """Train on real digits, once undisturbed and once killed and resumed elsewhere; compare the bits.

    The exit status is 0 only if both end with the same fingerprint.

    \b
    Example:
      perdure demo --engine torch
    """
    from perdure.demo.digits import load_digits, save_scans
    from perdure.demo.driver import DemoOptions, run_demo

    engine = engine or next((name for name in ("jax", "torch") if find_spec(name)), "jax")
    if find_spec(engine) is None:  # here, where the message is seen, and not in a worker
        raise missing_extra(f"demo,{engine}", ModuleNotFoundError(name=engine))
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="perdure-demo-")
        scratch = Path(stack.enter_context(temporary))
        if data is None:
            # Written once, because scikit-learn would take each worker seconds to import.
            data = str(scratch / "digits.npz")
            save_scans(data)
        examples = len(load_digits(data).train["label"])
        directory = scratch if directory is None else directory
        options = DemoOptions(engine, directory, data, epochs, seed, without)
        result = run_demo(options, examples, lambda text: _say(text, _ENDS, err=True))
        if as_json:
            document(result)
        else:
            color = "green" if result["pass"] else "red"
            ends = (end[:12] for end in result["fingerprints"] if end)
            _say(_text(result), _ENDS | dict.fromkeys((*ends, "PASS", "FAIL"), f"bold {color}"))
    return not result["pass"]


def _say(text: str, colors: Mapping[str, str], err: bool = False) -> None:
    """Print lines, with some words in colour if the output is a terminal."""
    from rich.console import Console
    from rich.text import Text

    lines = Text(printable_lines(text))
    for word, color in colors.items():
        lines.highlight_words([word], color)
    Console(stderr=err, highlight=False, soft_wrap=True).print(lines)


def _text(document: Mapping[str, Any]) -> str:
    rows = [
        (
            phase["phase"],
            phase["topology"],
            f"{phase['from']}-{phase['to']}",
            phase["ended"],
            "-" if phase["resumed_from"] is None else phase["resumed_from"],
            phase["repeated"],
            (phase["fingerprint"] or "-")[:12],
        )
        for phase in document["phases"]
    ]
    header = ("phase", "topology", "steps", "ended", "resumed", "repeated", "fingerprint")
    first, last = document["accuracy"]
    accuracy = f"test accuracy {first:.2%} uninterrupted, {last:.2%} with faults"
    digits = f"on {document['test_examples']} digits; seed {document['seed']}"
    lines = [str(Table(header, rows)), f"{accuracy}, {digits}"]
    if document["without"]:
        lines.append(f"guard removed: {document['without']}")
    verdict, ends = ("PASS", "equal") if document["pass"] else ("FAIL", "different")
    return "\n".join([*lines, f"{verdict}: the final fingerprints are {ends}"])
