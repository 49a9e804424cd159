"""IDX and npz files of images, and every kind of malformed file."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure.data import load_images, read_idx
from perdure.errors import DataError


def idx(array: np.ndarray[Any, Any], kind: int = 0x08) -> bytes:
    header = bytes([0, 0, kind, array.ndim])
    return header + b"".join(n.to_bytes(4, "big") for n in array.shape) + array.tobytes()


def images(count: int, first: int = 0) -> np.ndarray[Any, Any]:
    values = np.arange(count * 784, dtype=np.int64) % 251 + first
    return values.astype(np.uint8).reshape(count, 28, 28)


def labels(count: int) -> np.ndarray[Any, Any]:
    return (np.arange(count) % 10).astype(np.uint8)


def write(directory: Path, part: str, count: int, *, zipped: bool = False, sep: str = "-") -> Path:
    end = ".gz" if zipped else ""
    pack = gzip.compress if zipped else bytes
    path = directory / f"{part}images{sep}idx3-ubyte{end}"
    path.write_bytes(pack(idx(images(count, len(part)))))
    (directory / f"{part}labels{sep}idx1-ubyte{end}").write_bytes(pack(idx(labels(count))))
    return path


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("sep", ["-", "."])
def test_a_directory_gives_train_then_t10k(tmp_path: Path, zipped: bool, sep: str) -> None:
    write(tmp_path, "t10k-", 3, zipped=zipped, sep=sep)
    write(tmp_path, "train-", 5, zipped=zipped, sep=sep)
    x, y = load_images(tmp_path)
    assert (x == np.concatenate([images(5, 6), images(3, 5)])).all()
    assert y.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert x.dtype == np.uint8


def test_one_file_finds_its_labels_even_if_only_one_is_zipped(tmp_path: Path) -> None:
    path = write(tmp_path, "t10k-", 3)
    plain = tmp_path / "t10k-labels-idx1-ubyte"
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    x, y = load_images(str(path))
    assert (len(x), len(y)) == (3, 3)


@pytest.mark.parametrize(
    "names", [("x_train", "y_train", "x_test", "y_test"), ("images", "labels")]
)
def test_npz_files_are_read(tmp_path: Path, names: tuple[str, ...]) -> None:
    arrays = {n: images(2) if n[0] in "xi" else labels(2).astype(np.int64) for n in names}
    np.savez(tmp_path / "m.npz", **arrays)  # type: ignore[arg-type]
    x, y = load_images(tmp_path / "m.npz")
    assert len(x) == len(y) == len(names)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(0x09, "i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")]
)
def test_every_element_type_of_idx_is_read(tmp_path: Path, kind: int, dtype: str) -> None:
    values = np.arange(-3, 3).astype(dtype).reshape(2, 3)
    (tmp_path / "a").write_bytes(idx(values, kind))
    read = read_idx(tmp_path / "a")
    assert read.dtype.isnative
    assert read.tolist() == values.tolist()


GOOD = idx(labels(9))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a", b"<html>", ["wrong magic number", "found 3c 68 74 6d", "Download it again"]),
        ("a", b"", ["wrong magic number", "an empty file"]),
        ("a", b"\0\0\x07\x01" + GOOD[4:], ["wrong magic number", "00 00 07 01"]),
        ("a", GOOD[:6], ["truncated", "needs 8 bytes, found 6"]),
        ("a", GOOD[:-1], ["truncated", "needs 17 bytes, found 16", "Download the file again"]),
        ("a", GOOD + b"\0", ["too long", "needs 17 bytes, found 18"]),
        ("a.gz", GOOD, ["Not a gzipped file"]),
        ("a.gz", gzip.compress(GOOD, mtime=0)[:-9], ["truncated or damaged"]),
        ("a.gz", gzip.compress(GOOD, mtime=0)[:-5] + b"12345", ["truncated or damaged"]),
    ],
)
def test_a_malformed_idx_file_is_refused(
    tmp_path: Path, name: str, content: bytes, says: list[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_idx(path)
    assert all(text in str(error.value) for text in [str(path), *says]), str(error.value)


def refused(path: Path, *says: str) -> None:
    with pytest.raises(DataError) as error:
        load_images(path)
    assert all(text in str(error.value) for text in says), str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere", "found nothing")
    refused(tmp_path, "found nothing", "images-idx3-ubyte")
    path = write(tmp_path, "t10k-", 2)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    refused(path, "expected labels", "t10k-labels-idx1-ubyte")
    path.rename(tmp_path / "pictures")
    refused(tmp_path / "pictures", "images-idx3-ubyte")
    with pytest.raises(DataError) as error:
        read_idx(tmp_path / "nowhere")
    assert "No such file" in str(error.value)


def test_images_and_labels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "t10k-", 3)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(labels(4)))
    refused(path, "[3, 28, 28]", "shape [4]")
    path.write_bytes(idx(np.zeros((4, 28, 27), np.uint8)))
    refused(path, "expected images uint8 of shape [n, 28, 28]", "[4, 28, 27]")


def test_a_malformed_npz_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, pictures=images(1))
    refused(path, "x_train", "pictures")
    path.write_bytes(b"not a zip")
    refused(path, "not a readable .npz")
    np.savez(path, images=np.zeros((2, 28, 28), np.float32), labels=labels(2))
    refused(path, "m.npz:images", "float32")
