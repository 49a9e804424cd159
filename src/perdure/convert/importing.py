"""`import_run`: arrays of other tools as step 0 of a new run directory."""

from __future__ import annotations

import json
import os

from perdure.convert.foreign_files import READ_FORMATS, kind_of, read_foreign
from perdure.convert.foreign_leaves import ForeignFile
from perdure.convert.leaf_names import NameMap, path_of
from perdure.errors import ArgumentError
from perdure.look.origins import ORIGIN
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
    names: NameMap | None = None,
) -> Manifest:
    """Save the arrays of a file or folder as step 0 of the new run directory `out`.

    A dotted name becomes a path: `encoder.0.weight` the leaf `encoder/0/weight`, as the leaves of a
    torch module are called. A name with `/` is a path as it is, and so is a name of Orbax. Leaves of an
    `export` get their paths back. A file that is one array becomes the leaf `branch`, or a whole state.
    Torch files are read with `weights_only=True` and never otherwise. All is checked before `out` is
    made.

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
    if kind is not None and kind not in READ_FORMATS:
        raise ArgumentError(f"kind: expected one of {', '.join(READ_FORMATS)}, found {kind!r}.")
    if branch and not all(branch.split("/")):
        raise ArgumentError(
            f"branch: expected a path such as 'model' or 'model/encoder', found {branch!r}, which has "
            f"an empty part."
        )
    kind = kind or kind_of(where)
    leaves = _leaves_by_path(read_foreign(where, kind), where, branch, names)
    note = json.dumps({"made_by": "import", "source": os.path.abspath(where), "format": kind})
    with new_run(out) as run:
        origin = Leaf("py:str", (), memoryview(note.encode()), frozen=True)
        return run.save(0, leaves, process_leaves={ORIGIN: origin})


def _leaves_by_path(
    found: ForeignFile, where: str, branch: str, names: NameMap | None
) -> dict[str, Leaf]:
    """The leaves of a file by their paths in a state; raises `ArgumentError` if they make up none."""
    leaves: dict[str, Leaf] = {}
    sources: dict[str, str] = {}
    below_branch = False
    for name, leaf in found.leaves.items():
        path = names and names(name)
        if not path:
            path = _join(branch, found.paths.get(name, path_of(name)))
            below_branch = True
        if path and not all(path.split("/")):
            raise ArgumentError(
                f"{where}: the name {name!r} would become the path {path!r}, which has an empty part; "
                f"give it another one: `--names`."
            )
        if path in leaves:
            raise ArgumentError(
                f"{where}: {sources[path]!r} and {name!r} would both become {path!r}; give one of them "
                f"another path: `--names`."
            )
        leaves[path], sources[path] = leaf, name
    if names is not None:
        names.refuse_unused()
    _refuse_nested(leaves, sources, where)
    if not leaves:
        raise ArgumentError(f"{where}: holds no array.")
    if branch and not below_branch:
        raise ArgumentError(
            f"branch: nothing is put below {branch!r}, because `names` gives every leaf a whole path; "
            f"leave one of them out, or put the branch into the paths of `names`."
        )
    return leaves


def _join(branch: str, path: str) -> str:
    return f"{branch}/{path}" if branch and path else branch or path


def _refuse_nested(leaves: dict[str, Leaf], sources: dict[str, str], where: str) -> None:
    for path in filter(None, leaves):
        if (above := nearest(path.rpartition("/")[0], leaves)) is not None:
            raise ArgumentError(
                f"{where}: {sources[path]!r} would become {path!r}, below {above!r}, which is "
                f"an array ({sources[above]!r}); give one of them another path: `--names`."
            )
