"""`import_run`: arrays of other tools as step 0 of a new run directory."""

from __future__ import annotations

import json
import os

from perdure.errors import ArgumentError
from perdure.inspect.foreign_files import READ_FORMATS, kind_of, read_foreign
from perdure.inspect.leaf_names import NameMap, path_of
from perdure.inspect.origins import ORIGIN
from perdure.state.paths import nearest
from perdure.store import Leaf, Manifest, Storage
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
    torch module are called. A name with `/` is a path as it is. Torch files are read with
    `weights_only=True` and never otherwise.

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
        ArgumentError: Two names would become one path, or one path would lie below another.
        DataError: `source` cannot be read.
        MissingExtraError: The library of the format is not installed.
        NotARunError, StepExistsError: `out` holds something already.
        SaveError: `out` cannot be written to.
    """
    where = os.fspath(source)
    if kind is not None and kind not in READ_FORMATS:
        raise ArgumentError(f"kind: expected one of {', '.join(READ_FORMATS)}, found {kind!r}.")
    kind = kind or kind_of(where)
    leaves: dict[str, Leaf] = {}
    sources: dict[str, str] = {}
    for name, leaf in read_foreign(where, kind).items():
        path = path_of(name, branch, names)
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
    note = json.dumps({"made_by": "import", "source": os.path.abspath(where), "format": kind})
    with new_run(out) as run:
        origin = Leaf("py:str", (), memoryview(note.encode()), frozen=True)
        return run.save(0, leaves, process_leaves={ORIGIN: origin})


def _refuse_nested(leaves: dict[str, Leaf], sources: dict[str, str], where: str) -> None:
    for path in leaves:
        if (above := nearest(path.rpartition("/")[0], leaves)) is not None:
            raise ArgumentError(
                f"{where}: {sources[path]!r} would become {path!r}, below {above!r}, which is "
                f"an array ({sources[above]!r}); give one of them another path: `--names`."
            )
