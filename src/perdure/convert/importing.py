"""`import_run`: arrays of other tools as step 0 of a new run directory."""

from __future__ import annotations

import json
import os

from perdure.convert import formats
from perdure.errors import ArgumentError
from perdure.look.leaf_reader import ORIGIN
from perdure.state.paths import nearest
from perdure.store import Storage
from perdure.store.leaf import Leaf
from perdure.store.manifest import Manifest
from perdure.store.streamed_save import new_run


def import_run(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str] | Storage,
    *,
    kind: str | None = None,
    branch: str = "",
    names: formats.NameMap | None = None,
) -> Manifest:
    """Save the arrays of a file or folder as step 0 of the new run directory `out`.

    A dotted name becomes a path: `encoder.0.weight` the leaf `encoder/0/weight`. A name with `/`, or of
    Orbax, is a path as it is. Leaves of an `export` get their paths back. A file that is one array
    becomes the leaf `branch`, or a whole state. Torch files are read with `weights_only=True` and never
    otherwise. All is checked before `out` is made.

    Args:
        source: A .safetensors file, a folder of them with or without an index, a file of `torch.save`,
            a .npz archive, or a folder of Orbax.
        out: An empty or missing directory.
        kind: "safetensors", "torch", "npz" or "orbax"; by default found from the name and contents.
        branch: The path below which the leaves are put, such as "model".
        names: Paths by patterns of the names in the file; `branch` is not put before them.

    Returns:
        The manifest of the checkpoint, which is durable.

    Raises:
        ArgumentError: Two names would become one path, one path would lie below another, or `branch`
            is no path, or of no use because `names` gives all paths.
        DataError: `source` cannot be read, or holds what cannot be a leaf.
        MissingExtraError: The library of the format is not installed.
        NotARunError, StepExistsError: `out` holds something already.
        SaveError: `out` cannot be written to.
    """
    where = os.fspath(source)
    if kind is not None and kind not in formats.FORMATS:
        raise ArgumentError(f"kind: expected one of {', '.join(formats.FORMATS)}, found {kind!r}.")
    if branch and not all(branch.split("/")):
        raise ArgumentError(
            f"branch: expected a path such as 'model' or 'model/encoder', found {branch!r}, which has "
            f"an empty part."
        )
    kind = kind or formats.kind_of(where)
    leaves = _leaves_by_path(formats.read_foreign(where, kind), where, branch, names)
    note = json.dumps({"made_by": "import", "source": os.path.abspath(where), "format": kind})
    with new_run(out, f"an import of {where}") as run:
        origin = Leaf("py:str", (), memoryview(note.encode()), frozen=True)
        return run.save(0, leaves, process_leaves={ORIGIN: origin})


def _leaves_by_path(
    found: formats.ForeignFile, where: str, branch: str, names: formats.NameMap | None
) -> dict[str, Leaf]:
    """The leaves of a file by their paths in a state; raises `ArgumentError` if they make up none."""
    if not found.leaves:
        raise ArgumentError(f"{where}: holds no array.")
    sources: dict[str, str] = {}
    for name in found.leaves:
        inside = found.paths.get(name, formats.path_of(name))
        path = (names and names(name)) or "/".join(filter(None, (branch, inside)))
        wrong = None
        if path and not all(path.split("/")):
            wrong = f"the name {name!r} would become the path {path!r}, which has an empty part"
        elif path in sources:
            wrong = f"{sources[path]!r} and {name!r} would both become {path!r}"
        if wrong:
            raise ArgumentError(f"{where}: {wrong}; give it another path: `--names`.")
        sources[path] = name
    if names is not None:
        names.refuse_unused()
    for path in filter(None, sources):
        if (above := nearest(path.rpartition("/")[0], sources)) is not None:
            raise ArgumentError(
                f"{where}: {sources[path]!r} would become {path!r}, below {above!r}, which is "
                f"an array ({sources[above]!r}); give one of them another path: `--names`."
            )
    if branch and names is not None and all(map(names, found.leaves)):
        raise ArgumentError(
            f"branch: nothing is put below {branch!r}, because `names` gives every leaf a whole path; "
            f"leave one of them out, or put the branch into the paths of `names`."
        )
    return {path: found.leaves[name] for path, name in sources.items()}
