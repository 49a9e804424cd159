"""Programs of other repositories with the lines that perdure needs, as recipes that hold none of them.

A recipe names a file in a clone, short fragments of it as places for edits, and the lines to put there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPOSITORIES = {
    "examples": "pytorch/examples",
    "nanoGPT": "karpathy/nanoGPT",
    "pytorch-lightning": "Lightning-AI/pytorch-lightning",
    "accelerate": "huggingface/accelerate",
    "stanford_alpaca": "tatsu-lab/stanford_alpaca",
    "flax": "google/flax",
    "equinox": "patrick-kidger/equinox",
    "orbax": "google/orbax",
}


@dataclass(frozen=True)
class Edit:
    """Lines at one place of a program.

    Attributes:
        anchor: A fragment that is in exactly one line of the program (in any, if `every`).
        lines: Inserted with the indentation of that line; for a replacement, the new fragment.
        how: "after" or "before" that line, or "replace" for the fragment itself.
        every: Replace it wherever it is.
    """

    anchor: str
    lines: tuple[str, ...]
    how: str
    every: bool = False


def after(anchor: str, *lines: str) -> Edit:
    return Edit(anchor, lines, "after")


def before(anchor: str, *lines: str) -> Edit:
    return Edit(anchor, lines, "before")


def replace(anchor: str, text: str, every: bool = False) -> Edit:
    return Edit(anchor, (text,), "replace", every)


@dataclass(frozen=True)
class Program:
    """A program of others, and how it is run small.

    Attributes:
        name: What it is called in the report.
        folder: Below the folder of the clones; it is copied, and the program runs in the copy.
        file: The program in it, or a notebook.
        main: What is started instead, if `file` is a module.
        edits: What perdure needs. The lines added and changed are counted.
        needs: Modules that must be importable.
        imports: Modules that the server of its runs imports, for speed.
        limit: The lines that a program of this kind is meant to need.
        small: Edits that make it run here, small and without a GPU, with and without perdure.
        arguments: Of its command line.
        cells: Of a notebook, those that are the program.
        steps: What counts as a step (see observe.py).
        epoch: How many steps are an epoch.
        first: The first step at which it may be interrupted. A save runs in the background, and is
            durable when the next one begins.
        ranks: Above 1 it runs under torchrun.
        is_standing_in: Whether it needs modules of `stand_ins`, which read the digits on this disk.
        prepare: Makes its data in the copy, from the folder of the digits.
        own: How it resumes by itself, or "" if it cannot.
        own_edits: What it needs for that.
        own_arguments: Of its command line when it is started again.
    """

    name: str
    folder: str
    file: str
    edits: tuple[Edit, ...]
    needs: tuple[str, ...]
    imports: tuple[str, ...] = ("perdure.torch", "torch._dynamo")
    limit: int = 8
    small: tuple[Edit, ...] = ()
    arguments: str = ""
    main: str = ""
    cells: tuple[int, ...] = ()
    steps: str = ""
    epoch: int = 10
    first: int = 11
    ranks: int = 1
    is_standing_in: bool = False
    prepare: Callable[[Path], None] | None = None
    own: str = ""
    own_edits: tuple[Edit, ...] = ()
    own_arguments: str = ""

    @property
    def lines(self) -> int:
        """Lines that perdure adds or changes."""
        return sum(len(edit.lines) for edit in self.edits)

    @property
    def clone(self) -> str:
        """The folder of its clone."""
        return self.folder.split("/")[0]

    def copy(self, programs: Path, target: Path, edits: tuple[Edit, ...]) -> Path:
        """The program with `edits` in a new folder `target`; its path."""
        shutil.copytree(programs / self.folder, target, symlinks=True)
        path = target / self.file
        text = path.read_text()
        if path.suffix == ".ipynb":
            cells = json.loads(text)["cells"]
            text = "\n\n".join("".join(cells[index]["source"]) for index in self.cells)
            path = path.with_suffix(".py")
        for edit in (*self.small, *edits):
            text = _edited(text, edit, self.name)
        path.write_text(text)
        if self.prepare is not None:
            self.prepare(target)
        return target / self.main if self.main else path


def _edited(text: str, edit: Edit, name: str) -> str:
    lines = text.splitlines()
    places = [number for number, line in enumerate(lines) if edit.anchor in line]
    if not places or (len(places) > 1 and not edit.every):
        raise SystemExit(
            f"{name}: expected {edit.anchor!r} in one line of the program, found it in {len(places)}. "
            f"The repository has changed; correct the recipe."
        )
    if edit.how == "replace":
        for place in places:
            lines[place] = lines[place].replace(edit.anchor, edit.lines[0])
    else:
        (place,) = places
        indent = re.match(r"\s*", lines[place]).group()  # type: ignore[union-attr]
        at = place + (edit.how == "after")
        lines[at:at] = [indent + line for line in edit.lines]
    return "\n".join(lines) + "\n"
