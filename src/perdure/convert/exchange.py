"""`export` and `import_run`: leaves of a checkpoint in the file format of another tool, and back.

Invariant: a file or folder with the name that was asked for is complete. It is written under a
temporary name beside it, synced, verified if asked for, and renamed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure import errors
from perdure.checkpoint.address import Where, open_checkpoint
from perdure.checkpoint.arguments import require_choice
from perdure.convert import formats, hub
from perdure.look.leaf_reader import ORIGIN, element_dtype, is_scalar, select_leaves
from perdure.look.tables import Shown, Table, leaves_text
from perdure.runtime.system import sync_file
from perdure.state.paths import nearest
from perdure.store import Storage
from perdure.store.leaf import Leaf
from perdure.store.manifest import Manifest
from perdure.store.streamed_save import new_run
from perdure.text import counted

SHARD_BYTES = 5 * 10**9  # as in Hugging Face's tools


@dataclass(frozen=True, repr=False)
class Exported(Shown):
    """What `export` wrote: the name in the file by path, and whether all arrays were read back."""

    output: str
    format: str
    checkpoint: str
    fingerprint: str
    nbytes: int
    files: tuple[str, ...]
    names: dict[str, str]
    verified: bool

    def _blocks(self) -> list[str | Table]:
        files = counted(len(self.files), "file")
        blocks: list[str | Table] = [
            f"{self.output}: {leaves_text(len(self.names), self.nbytes)} in {files}"
        ]
        if self.verified:
            blocks.append("every array was read back and equals the checkpoint")
        return blocks


def export(
    checkpoint: Where,
    to: str,
    out: str | os.PathLike[str],
    *,
    leaves: str | Iterable[str] | None = None,
    names: formats.NameMap | None = None,
    shard_bytes: int | None = None,
    verify: bool = False,
) -> Exported:
    """Write leaves of a checkpoint to the new file or folder `out`.

    A weak type of JAX is left out, and random keys become their `uint32` words. With one plain path in
    `leaves`, such as "model", names begin below it.

    Args:
        checkpoint: `RUN@STEP`, or `RUN` for the newest.
        to: "safetensors" (a folder in Hugging Face's layout with a model card, or one file if `out`
            ends in `.safetensors`), "torch" or "npz".
        out: A path where nothing is, in a directory that exists.
        leaves: Paths or patterns; all leaves by default.
        names: Names of leaves in the file by patterns of their paths.
        shard_bytes: The most bytes of a file, for a folder of safetensors; 5 GB by default.
        verify: Read the result and compare it with the hashes of the manifest.

    Raises:
        ArgumentError: `out` exists, a pattern selects nothing, two leaves get one name, or an argument
            has no meaning for this format.
        UnsupportedLeafError: The format has no such dtype; the text names formats that have it.
        MissingExtraError: The library of the format is not installed.
        CorruptionError: The checkpoint is damaged, or `verify` found a difference.
        UnreachableError: The checkpoint cannot be read.
        SaveError: `out` cannot be written.
    """
    require_choice("to", to, formats.WRITTEN)
    is_folder = to == "safetensors" and not os.fspath(out).endswith(".safetensors")
    if shard_bytes is not None and (shard_bytes < 1 or not is_folder):
        raise errors.ArgumentError(
            f"shard_bytes (`--shard-size`): expected at least 1, and only for a folder of safetensors, "
            f"found {shard_bytes} for {os.fspath(out)} as {to}."
        )
    found = open_checkpoint(checkpoint)
    patterns = None if leaves is None else [leaves] if isinstance(leaves, str) else list(leaves)
    branch = patterns[0].removesuffix("/**") if patterns and len(patterns) == 1 else ""
    branch = "" if "*" in branch else branch
    written = formats.named_leaves(select_leaves(found, patterns), to != "npz", branch, names)
    arrays = [leaf for leaf in written if not is_scalar(leaf.entry)]
    scalars = [leaf for leaf in written if is_scalar(leaf.entry)]
    _refuse_dtypes(arrays, to)
    nbytes = sum(leaf.entry.nbytes for leaf in arrays)
    mark = formats.fingerprint_of((leaf.name, leaf.note.path, leaf.entry) for leaf in written)
    more: dict[str, Any] = {"fingerprint": mark} if to == "safetensors" else {}
    more |= {"shard_bytes": shard_bytes or SHARD_BYTES} if is_folder else {}
    with new_output(out) as temporary:
        formats.format_module(to).write(temporary, found, arrays, scalars, **more)
        if verify:
            _check_export(arrays, found.name, to, temporary)
        if is_folder:
            text = hub.card(found, mark, leaves_text(len(written), nbytes))
            Path(temporary, "README.md").write_text(text, encoding="utf-8")
        files = _files(temporary, out)
    named = {leaf.entry.path: leaf.name for leaf in written}
    fingerprint = found.manifest.fingerprint
    return Exported(os.fspath(out), to, found.name, fingerprint, nbytes, files, named, verify)


@contextmanager
def new_output(out: str | os.PathLike[str]) -> Iterator[str]:
    """A temporary name for a file or folder, which is synced and becomes `out` after the block."""
    path = os.path.abspath(os.fspath(out))
    folder, name = os.path.split(path)
    if "://" in os.fspath(out) or not os.path.isdir(folder):
        raise errors.ArgumentError(f"{os.fspath(out)}: expected a path in a directory that exists.")
    _refuse_existing(path)
    temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        for file in _files(temporary, temporary):
            _sync(os.path.join(temporary, file) if os.path.isdir(temporary) else temporary)
        _refuse_existing(path)
        os.rename(temporary, path)
        _sync(folder)
    except OSError as error:
        raise errors.SaveError(
            f"{os.fspath(out)}: cannot be written: {error}. Nothing is there. Correct the cause (free "
            f"space, permissions), then repeat the call."
        ) from error
    finally:
        if os.path.isdir(temporary):
            shutil.rmtree(temporary, ignore_errors=True)
        elif os.path.exists(temporary):
            os.remove(temporary)


def _refuse_existing(path: str) -> None:
    if os.path.lexists(path):
        raise errors.ArgumentError(
            f"{path}: exists, and was not changed. Name another file or folder."
        )


def _files(path: str, name: str | os.PathLike[str]) -> tuple[str, ...]:
    """The files below a folder, by their paths in it; of a file the last part of `name`."""
    if not os.path.isdir(path):
        return (os.path.basename(os.fspath(name)),)
    found = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return tuple(sorted(os.path.relpath(file, path) for file in found))


def _sync(path: str) -> None:
    if os.name == "nt" and os.path.isdir(path):  # Windows opens no folders
        return
    # Windows syncs only what is open for writing.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def _refuse_dtypes(arrays: Iterable[formats.NamedLeaf], to: str) -> None:
    known = {other: formats.format_module(other).DTYPES for other in formats.WRITTEN}
    for leaf in arrays:
        try:
            element_dtype(leaf.entry)
            unknown = None
        except errors.UnsupportedLeafError as error:
            unknown = error  # complex32, which is PyTorch's alone, or a dtype of a newer perdure
        can = [
            other
            for other, dtypes in known.items()
            if (unknown is None if dtypes is None else leaf.dtype in dtypes)
        ]
        if not can and unknown is not None:
            raise unknown
        if to not in can:
            raise errors.UnsupportedLeafError(
                f"leaf {leaf.entry.path!r} has dtype {leaf.dtype}, which {to} files cannot hold; "
                f"{', '.join(can)} can. Leave it out with `--leaves`, or take another format."
            )


def _check_export(arrays: Sequence[formats.NamedLeaf], checkpoint: str, to: str, path: str) -> None:
    advice = "The export was removed; write it again, on another disk if this repeats."
    try:
        found = formats.read_foreign(path, to).leaves
    except errors.DataError as error:
        raise errors.CorruptionError(
            f"{path}: the export cannot be read back: {error} {advice}"
        ) from error
    for leaf in arrays:
        entry, array = leaf.entry, found.get(leaf.name)
        shapes = ((leaf.dtype, leaf.shape), (entry.dtype, entry.shape))
        if (
            array is None
            or (array.dtype, array.shape) not in shapes
            or array.hashes() != entry.hashes()
        ):
            raise errors.CorruptionError(
                f"{path}: {leaf.name!r} reads back as {array and array.describe()}, and not with the "
                f"bytes of the leaf {entry.path!r} of {checkpoint}, {entry.dtype}{list(entry.shape)}. "
                f"{advice}"
            )


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
    otherwise. All is checked before `out` is made, the fingerprint in a safetensors file too.

    Args:
        source: A .safetensors file, a folder of them with or without an index, a file of `torch.save`,
            a .npz archive, a folder of Orbax, or the safetensors of a repository on the Hugging Face
            Hub: `hf://OWNER/REPO`, or `hf://OWNER/REPO@REVISION`.
        out: An empty or missing directory.
        kind: "safetensors", "torch", "npz" or "orbax"; by default found from the name and contents.
        branch: The path below which the leaves are put, such as "model".
        names: Paths by patterns of the names in the file; `branch` is not put before them.

    Returns:
        The manifest of the checkpoint, which is durable.

    Raises:
        ArgumentError: Two names would become one path, one path would lie below another, or `branch`
            is no path, or of no use because `names` gives all paths.
        DataError: `source` cannot be read or fetched, or holds what cannot be a leaf.
        CorruptionError: The arrays are not those that were exported, by the fingerprint in the file.
        MissingExtraError: The library of the format is not installed.
        NotARunError, StepExistsError: `out` holds something already.
        SaveError: `out` cannot be written to.
    """
    where = os.fspath(source)
    require_choice("kind", kind, (None, *formats.FORMATS))
    if branch and not all(branch.split("/")):
        raise errors.ArgumentError(
            f"branch: expected a path such as 'model' or 'model/encoder', found {branch!r}, which has "
            f"an empty part."
        )
    path, origin = where, os.path.abspath(where)
    if where.startswith(hub.PREFIX):
        if kind not in (None, "safetensors"):
            raise errors.ArgumentError(f"kind: expected safetensors of {where}, found {kind}.")
        path, origin = hub.download(where)
    kind = kind or formats.kind_of(path)
    found = formats.read_foreign(path, kind)
    leaves = _leaves_by_path(found, where, branch, names)
    if found.fingerprint is not None:
        noted = ((name, found.paths.get(name), leaf) for name, leaf in found.leaves.items())
        if (computed := formats.fingerprint_of(noted)) != found.fingerprint:
            raise errors.CorruptionError(
                f"{where}: expected the fingerprint {found.fingerprint}, which the export has noted, "
                f"found {computed}. Remove {path} and get it again; if the arrays were changed on "
                f"purpose, write them without this metadata."
            )
    note = json.dumps({"made_by": "import", "source": origin, "format": kind})
    with new_run(out, f"an import of {where}") as run:
        noted_origin = Leaf("py:str", (), memoryview(note.encode()), frozen=True)
        manifest = run.save(0, leaves, process_leaves={ORIGIN: noted_origin})
        run.finish()
        return manifest


def _leaves_by_path(
    found: formats.ForeignFile, where: str, branch: str, names: formats.NameMap | None
) -> dict[str, Leaf]:
    """The leaves of a file by their paths in a state; raises `ArgumentError` if they make up none."""
    if not found.leaves:
        raise errors.ArgumentError(f"{where}: holds no array.")
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
            raise errors.ArgumentError(f"{where}: {wrong}; give it another path: `--names`.")
        sources[path] = name
    if names is not None:
        names.refuse_unused()
    for path in filter(None, sources):
        if (above := nearest(path.rpartition("/")[0], sources)) is not None:
            raise errors.ArgumentError(
                f"{where}: {sources[path]!r} would become {path!r}, below {above!r}, which is "
                f"an array ({sources[above]!r}); give one of them another path: `--names`."
            )
    if branch and names is not None and all(map(names, found.leaves)):
        raise errors.ArgumentError(
            f"branch: nothing is put below {branch!r}, because `names` gives every leaf a whole path; "
            f"leave one of them out, or put the branch into the paths of `names`."
        )
    return {path: found.leaves[name] for path, name in sources.items()}
