"""The formats of other tools: a module for each, and the names and notes of leaves in their files.

A module has `read`, and for a format that is written `write` and `DTYPES` (None for all of NumPy and
ml_dtypes). Invariant: a leaf of a `ForeignFile` can be saved and restored; its bytes are as many as its
shape says.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

import msgspec

from perdure.errors import ArgumentError, DataError, UnsupportedLeafError
from perdure.look.leaf_reader import KEY_PREFIX, element_shape, is_scalar, scalar_value
from perdure.store.format import WEAK_PREFIX, escape, unescape
from perdure.store.leaf import Leaf
from perdure.store.manifest import LeafEntry, fingerprint
from perdure.store.manifest_json import MAX_DIMENSIONS, holds

_MODULES = {
    "safetensors": "safetensors_files",
    "torch": "torch_file",
    "npz": "npz_file",
    "orbax": "orbax_folder",
}
FORMATS = tuple(_MODULES)
WRITTEN = FORMATS[:3]

_ENDS = {".safetensors": "safetensors", ".npz": "npz"}
_ENDS |= dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), "torch")


class LeafNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a file cannot say of a leaf: its dtype (and text), its path in the branch."""

    dtype: str | None = None
    path: str | None = None


class ForeignFile(NamedTuple):
    """What a file of another tool holds: leaves by name, and the paths and fingerprint it notes."""

    leaves: dict[str, Leaf]
    paths: dict[str, str]
    fingerprint: str | None = None


class NamedLeaf(NamedTuple):
    """A leaf of a checkpoint as a file has it: random keys are words, `note` the rest."""

    name: str
    entry: LeafEntry
    dtype: str
    shape: tuple[int, ...]
    note: LeafNote


class NameMap:
    """Renames by patterns: in `old=new`, `*` is any text without a separator and `**` any text.

    Each wildcard of `new` stands for what the same one of `old`, counted from the left, has matched.
    The first pattern that matches the whole text counts; without one, the text has no new name.

    Args:
        lines: `old=new`; empty lines and lines that begin with `#` are ignored.
        where: The name of the file, for errors.

    Raises:
        ArgumentError: A line has another form, or its two sides have different wildcards.
    """

    def __init__(self, lines: Iterable[str], where: str = "names") -> None:
        self.where = where
        self._rules: list[tuple[str, re.Pattern[str], list[str]]] = []
        self._used: set[str] = set()
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            old, equals, new = (part.strip() for part in text.partition("="))
            old_parts, new_parts = re.split(r"(\*\*?)", old), re.split(r"(\*\*?)", new)
            if not (equals and old and new) or len(old_parts) != len(new_parts):
                raise ArgumentError(
                    f"{where}, line {number}: expected old=new with as many wildcards on both sides, "
                    f"found {text!r}."
                )
            wild = {"*": "([^/.]*)", "**": "(.*)"}
            regex = "".join(wild.get(part) or re.escape(part) for part in old_parts)
            self._rules.append((text, re.compile(regex, re.DOTALL), new_parts[::2]))

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> NameMap:
        """The patterns of a file in UTF-8; raises `ArgumentError` if it cannot be read."""
        try:
            with open(file, encoding="utf-8-sig") as lines:
                return cls(lines, os.fspath(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"{os.fspath(file)}: the names cannot be read: {error}.") from error

    def __call__(self, text: str) -> str | None:
        """The new name; None if no pattern matches."""
        for rule, regex, literals in self._rules:
            if match := regex.fullmatch(text):
                self._used.add(rule)
                groups = [*match.groups(), ""]
                return "".join(a + b for a, b in zip(literals, groups, strict=True))
        return None

    def refuse_unused(self) -> None:
        """Raise `ArgumentError` if a pattern has matched nothing."""
        if unused := [rule for rule, _, _ in self._rules if rule not in self._used]:
            raise ArgumentError(
                f"{self.where}: {unused[0]!r} matches no leaf that is selected. Left of the = stands "
                f"the whole name before the change."
            )


def named_leaves(
    entries: Iterable[LeafEntry], dotted: bool, branch: str, names: NameMap | None
) -> list[NamedLeaf]:
    """The leaves with their names: of `names`, or the path inside `branch`, `dotted` or not.

    Raises `ArgumentError` if two have one name, or a pattern of `names` matches nothing.
    """
    named: dict[str, NamedLeaf] = {}
    for entry in entries:
        inside = entry.path.removeprefix(f"{branch}/") if branch else entry.path
        name = ".".join(map(unescape, inside.split("/"))) if dotted else inside
        noted_path = None if path_of(name) == inside else inside
        if names is not None and (renamed := names(entry.path)):
            name, noted_path = renamed, None
        if (other := named.get(name)) is not None:
            raise ArgumentError(
                f"leaves {other.entry.path!r} and {entry.path!r} would both be called {name!r}; give "
                f"one of them another name: `--names`."
            )
        if is_scalar(entry):
            scalar_value(entry)  # raises for a type that this perdure does not know
        dtype = entry.dtype.removeprefix(WEAK_PREFIX)
        dtype = "uint32" if dtype.startswith(KEY_PREFIX) else dtype
        note = LeafNote(entry.dtype if entry.dtype != dtype else None, noted_path)
        named[name] = NamedLeaf(name, entry, dtype, element_shape(entry), note)
    if names is not None:
        names.refuse_unused()
    return list(named.values())


def fingerprint_of(leaves: Iterable[tuple[str, str | None, Leaf | LeafEntry]]) -> str:
    """The fingerprint that a plain import gives a file with these names, noted paths and leaves."""
    paths = ((path_of(name) if path is None else path, leaf) for name, path, leaf in leaves)
    return fingerprint((path, leaf.dtype, leaf.shape, leaf.hashes()) for path, leaf in paths)


def path_of(name: str) -> str:
    """The path of a name in a file: one with `/` is a path (`%2F` for `/`), others split at dots."""
    if "/" in name:
        return "/".join(escape(unescape(part)) for part in name.split("/"))
    return "/".join(map(escape, name.split(".")))


def format_module(kind: str) -> Any:
    return import_module(f"perdure.convert.{_MODULES[kind]}")


def read_foreign(path: str, kind: str) -> ForeignFile:
    """The arrays and scalars of a file or folder, mapped where the format allows it.

    Raises DataError if it holds what cannot be a leaf, ArgumentError for a name twice,
    MissingExtraError.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise DataError(f"{path}: expected a file or folder, found a pipe or a device.")
    return format_module(kind).read(path)


def kind_of(path: str) -> str:
    """The format of a file or folder; DataError if there is nothing, ArgumentError if unknown."""
    if os.path.isdir(path):
        names = os.listdir(path)
        if any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
            return "safetensors"
        if "_METADATA" in names or "_CHECKPOINT_METADATA" in names:
            return "orbax"
    elif not os.path.exists(path):
        raise DataError(f"{path}: expected a file or folder, found nothing.")
    elif kind := _ENDS.get(os.path.splitext(path)[1]):
        return kind
    raise ArgumentError(
        f"{path}: its format is not known from its name; name it: one of {', '.join(FORMATS)}."
    )


def text_notes(scalars: Iterable[NamedLeaf]) -> dict[str, LeafNote]:
    return {
        leaf.name: LeafNote(f"{leaf.dtype} {leaf.entry.text}", leaf.note.path) for leaf in scalars
    }


def add_notes(path: str, member: str, notes: Mapping[str, LeafNote]) -> None:
    """Put notes that say something into a zip archive, as JSON."""
    if notes := {name: note for name, note in notes.items() if note != LeafNote()}:
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(zipfile.ZipInfo(member), msgspec.json.encode(notes))


def read_notes(path: str, member: str) -> dict[str, LeafNote]:
    """The notes in a zip archive; none in a file of another writer."""
    if not zipfile.is_zipfile(path):
        return {}
    with zipfile.ZipFile(path) as archive:
        text = archive.read(member) if member in archive.namelist() else b"{}"
    return msgspec.json.decode(text, type=dict[str, LeafNote])


def noted_file(leaves: dict[str, Leaf], notes: Mapping[str, LeafNote]) -> ForeignFile:
    """The leaves that were written as `leaves`; `ValueError` if a note or leaf does not fit."""
    paths: dict[str, str] = {}
    for name, note in notes.items():
        if note.dtype is not None:
            leaves[name] = _noted_leaf(leaves.get(name), note.dtype)
        if name not in leaves:
            raise ValueError(f"it has a note on {name!r}, and no such array")
        if note.path is not None:
            parts = note.path.split("/")
            if not all(parts) or [escape(unescape(part)) for part in parts] != parts:
                raise ValueError(f"the note {note.path!r} on {name!r} is no path")
            paths[name] = note.path
    for name, leaf in leaves.items():
        if not leaf.is_scalar and not holds(leaf.dtype, leaf.shape, leaf.nbytes):
            raise ValueError(
                f"{name!r} is said to be {leaf.describe()}, and has {leaf.nbytes} bytes; expected as "
                f"many as its shape says, and at most {MAX_DIMENSIONS} axes"
            )
    return ForeignFile(leaves, paths)


def _noted_leaf(array: Leaf | None, note: str) -> Leaf:
    """The leaf that was written as `array` with a note on its dtype, or with the note alone."""
    if array is None:
        dtype, _, text = note.partition(" ")
        if _is_exact_text(dtype, text):
            return Leaf(dtype, (), memoryview(text.encode()), frozen=True)
    elif note == array.dtype:
        return array
    elif note == WEAK_PREFIX + array.dtype:
        return Leaf(note, array.shape, array.data, frozen=True)
    elif re.fullmatch(f"{KEY_PREFIX}[^<>]+>", note) and array.dtype == "uint32" and array.shape:
        return Leaf(note, array.shape[:-1], array.data, frozen=True)
    raise ValueError(f"the note {note[:80]!r} does not fit what it is about")


def _is_exact_text(dtype: str, text: str) -> bool:
    from perdure.state.leaf_values import scalar_text  # takes long to import

    if dtype == "py:int" and not re.fullmatch("-?[0-9]+", text):
        return False  # an exponent could stand for more digits than memory holds
    with suppress(UnsupportedLeafError, ValueError):
        return scalar_text(scalar_value(LeafEntry("", dtype, text=text))) == (dtype, text)
    return False
