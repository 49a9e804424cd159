"""Images from files: IDX (the format of MNIST and Fashion-MNIST), gzipped or not, and .npz.

IDX, from http://yann.lecun.com/exdb/mnist/: two zero bytes, one byte for the element type, one byte
for the number of axes, each axis as a big-endian 32-bit integer, then the elements, row-major and
big-endian.
"""

from __future__ import annotations

import gzip
import math
import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from perdure.errors import DataError
from perdure.text import few

Images = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]

_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_IMAGES = re.compile(r"images[-.]idx3-ubyte(\.gz)?$")
_NPZ = ((("x_train", "y_train"), ("x_test", "y_test")), (("images", "labels"),))


def read_idx(path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    """The array in an IDX file, in native byte order; a gzipped file is recognized by its content.

    Returns:
        An array with the dtype and shape of the file's header.

    Raises:
        DataError: the file cannot be read, or does not match its header.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        if path.suffix == ".gz" or data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be read, or is truncated or damaged ({error}). Download the file again."
        ) from error
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _TYPES:
        raise DataError(
            f"{path}: wrong magic number: an IDX file starts with 00 00, a type (08 to 0e) and a "
            f"number of axes; found {data[:4].hex(' ') or 'an empty file'}. Download it again."
        )
    dtype, start = np.dtype(_TYPES[data[2]]), 4 + 4 * data[3]
    shape = tuple(int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4))
    expected = start if len(data) < start else start + math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise DataError(
            f"{path}: truncated or too long: a header of {data[3]} axes, and {dtype.name} of shape "
            f"{shape}, needs {expected} bytes, found {len(data)}. Download the file again."
        )
    values = np.frombuffer(data, dtype=dtype, offset=start).reshape(shape)
    return values.astype(dtype.newbyteorder("="))


def load_images(path: str | os.PathLike[str]) -> Images:
    """Images and labels in the format of MNIST.

    Args:
        path: a directory with `*images-idx3-ubyte[.gz]` and `*labels-idx1-ubyte[.gz]` (`train-*` is
            read before `t10k-*`), one such images file with its labels in the same directory, or an
            .npz with x_train, y_train, x_test, y_test or images, labels.

    Returns:
        The images, uint8[n, 28, 28], and their labels, integers[n].

    Raises:
        DataError: a file is missing, damaged or of another format.
    """
    path = Path(path)
    if path.suffix == ".npz":
        parts = _from_npz(path)
    else:
        files = sorted(path.iterdir()) if path.is_dir() else [path] if path.exists() else []
        found: dict[str, Path] = {}
        for file in files:  # of a file that is there twice, the plain one is first
            if match := _IMAGES.search(file.name):
                found.setdefault(file.name[: match.start()], file)
        if not found:
            raise DataError(
                f"{path}: expected an .npz, an *images-idx3-ubyte[.gz] file or a directory with such "
                f"files; found {few(file.name for file in files) or 'nothing'}."
            )
        # The two parts of MNIST in the order in which they are concatenated, then others.
        ranks = {"train": 0, "t10k": 1}
        order = sorted(found, key=lambda prefix: (ranks.get(prefix.rstrip("-."), 2), prefix))
        parts = []
        for prefix in order:
            file = found[prefix]
            names = [f"{prefix}labels{mark}idx1-ubyte{end}" for mark in "-." for end in ("", ".gz")]
            at = next((p for p in (file.with_name(name) for name in names) if p.exists()), None)
            if at is None:
                raise DataError(f"{file}: expected labels beside it, {names[0]} or {names[1]}.")
            parts.append(_checked(read_idx(file), read_idx(at), f"{file}", f"{at}"))
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _from_npz(path: Path) -> list[Images]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path}: not a readable .npz ({error}); expected one written by numpy.savez."
        ) from error
    for pairs in _NPZ:
        if all(name in arrays for pair in pairs for name in pair):
            return [_checked(arrays[x], arrays[y], f"{path}:{x}", f"{path}:{y}") for x, y in pairs]
    raise DataError(
        f"{path}: expected the arrays x_train, y_train, x_test, y_test or images, labels; found "
        f"{few(sorted(arrays))}."
    )


def _checked(images: Any, labels: Any, images_at: str, labels_at: str) -> Images:
    is_images = images.shape[1:] == (28, 28) and images.dtype == np.uint8
    is_labels = labels.shape == images.shape[:1] and labels.dtype.kind in "iu"
    if not (is_images and is_labels):
        raise DataError(
            f"expected images uint8 of shape [n, 28, 28] in {images_at}, found {images.dtype} of shape "
            f"{list(images.shape)}, and labels as integers of shape [n] in {labels_at}, found "
            f"{labels.dtype} of shape {list(labels.shape)}."
        )
    return images, labels
