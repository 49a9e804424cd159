"""`export`: leaves of a checkpoint in the file format of another tool.

Invariant: a file or folder with the name that was asked for is complete. It is written under a
temporary name beside it, synced, verified if asked for, and renamed.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from perdure import errors
from perdure.checkpoint.address import StoredCheckpoint, Where, open_checkpoint
from perdure.convert import formats
from perdure.look.leaf_reader import element_dtype, is_scalar, select_leaves
from perdure.look.tables import Shown, Table, leaves_text
from perdure.text import counted

SHARD_BYTES = 5 * 10**9
"""The most bytes of a shard, as in Hugging Face's tools."""


@dataclass(frozen=True, repr=False)
class Exported(Shown):
    """What `export` wrote: the name in the file by path, and whether all arrays were read back."""

    out: str
    to: str
    checkpoint: StoredCheckpoint
    names: dict[str, str]
    nbytes: int
    files: tuple[str, ...]
    verified: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "output": self.out,
            "format": self.to,
            "checkpoint": self.checkpoint.name,
            "fingerprint": self.checkpoint.manifest.fingerprint,
            "nbytes": self.nbytes,
            "files": list(self.files),
            "names": self.names,
            "verified": self.verified,
        }

    def _blocks(self) -> list[str | Table]:
        files = counted(len(self.files), "file")
        blocks: list[str | Table] = [
            f"{self.out}: {leaves_text(len(self.names), self.nbytes)} in {files}"
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
        to: "safetensors" (a folder in Hugging Face's layout, or one file if `out` ends in
            `.safetensors`), "torch" or "npz".
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
    if to not in formats.WRITTEN:
        raise errors.ArgumentError(
            f"to: expected one of {', '.join(formats.WRITTEN)}, found {to!r}."
        )
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
    more = {"shard_bytes": shard_bytes or SHARD_BYTES} if is_folder else {}
    with new_output(out) as temporary:
        formats.format_module(to).write(temporary, found, arrays, scalars, **more)
        if verify:
            _check_export(arrays, found.name, to, temporary)
        files = _files(temporary, out)
    named = {leaf.entry.path: leaf.name for leaf in written}
    nbytes = sum(leaf.entry.nbytes for leaf in arrays)
    return Exported(os.fspath(out), to, found, named, nbytes, files, verify)


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
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
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
