"""Reading an export back, and comparing it with the hashes of the manifest."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.convert.foreign_files import read_foreign
from perdure.convert.foreign_leaves import plain_dtype
from perdure.convert.leaf_names import NamedLeaf
from perdure.errors import CorruptionError, DataError
from perdure.look.leaf_reader import element_shape


def check_export(arrays: Sequence[NamedLeaf], checkpoint: str, to: str, path: str) -> None:
    """Compare the arrays of an export with the checkpoint of this name.

    Raises:
        CorruptionError: It cannot be read, an array is missing, or its dtype, shape or hash differs
            from the manifest.
    """
    try:
        found = read_foreign(path, to).leaves
    except DataError as error:
        raise CorruptionError(
            f"{path}: the export cannot be read back: {error} It was removed; write it again, on "
            f"another disk if this repeats."
        ) from error
    expected = {leaf.name for leaf in arrays}
    lacking = expected - found.keys()
    if lacking:
        raise CorruptionError(f"{path}: {min(lacking)!r} is not in the export. It was removed.")
    for leaf in arrays:
        entry, array = leaf.entry, found[leaf.name]
        shapes = ((plain_dtype(entry), element_shape(entry)), (entry.dtype, entry.shape))
        if (array.dtype, array.shape) not in shapes or array.hashes() != entry.hashes():
            raise CorruptionError(
                f"{path}: {leaf.name!r} reads back as {array.describe()}, and not with the bytes of "
                f"the leaf {entry.path!r} of {checkpoint}, {entry.dtype}{list(entry.shape)}. "
                f"The export was removed; write it again, on another disk if this repeats."
            )
