"""`import_run`: what comes back from an export, what is converted, and files that are refused whole."""

from __future__ import annotations

import json
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from perdure import load_checkpoint
from perdure.cli.main import main
from perdure.convert import NameMap, export, import_run
from perdure.errors import ArgumentError, DataError, UnsupportedLeafError
from perdure.state import flatten
from perdure.store import Leaf, Run
from perdure.store.leaf import Leaves

ONE = np.arange(3.0)
ENDS = {"npz": ".npz", "torch": ".pt", "safetensors": ".safetensors"}


def saved(where: Path, state: Any) -> str:
    """The fingerprint of a run with this state."""
    with Run(where, create=True) as run:
        leaves = state if isinstance(state, Leaves) else flatten(state)
        return run.save(1, leaves).fingerprint


def refused(source: Path, *phrases: str, error: type[Exception] = DataError, **options: Any) -> str:
    """The text of the error of an import, which leaves nothing behind."""
    out = source.with_name("refused")
    with pytest.raises(error) as caught:
        import_run(source, out, **options)
    assert not out.exists()
    for phrase in phrases:
        assert phrase in str(caught.value)
    return str(caught.value)


def npy(descr: Any, shape: Any, content: bytes, *, fortran: bool = False) -> bytes:
    """A member of an archive with any header."""
    header = repr({"descr": descr, "fortran_order": fortran, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + content


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


@pytest.mark.parametrize("to", ["safetensors", "torch", "npz"])
def test_every_path_comes_back(tmp_path: Path, to: str) -> None:
    if to == "torch":
        pytest.importorskip("torch")
    state = {
        "a.b": ONE,
        "x/y": {"p.q": ONE + 1, "50%": ONE, "%2F": ONE},
        "plain": {"weight": ONE},
        "s.t": "text",
        "n/m": 3,
    }
    fingerprint = saved(tmp_path / "run", state)
    out = tmp_path / f"out{ENDS[to]}"
    export(tmp_path / "run", to, out, verify=True)
    assert import_run(out, tmp_path / "back").fingerprint == fingerprint
    below = import_run(out, tmp_path / "below", branch="in")
    paths = {leaf.path for leaf in Run(tmp_path / "run").manifest(1).leaves}
    assert {leaf.path for leaf in below.leaves} == {f"in/{path}" for path in paths}
    # The names of the user come first.
    names = NameMap(["x/y.p.q=mine" if to != "npz" else "x%2Fy/p.q=mine"])
    named = import_run(out, tmp_path / "named", names=names)
    assert {leaf.path for leaf in named.leaves} == {*paths, "mine"} - {"x%2Fy/p.q"}


@pytest.mark.parametrize("to", ["safetensors", "torch", "npz"])
@pytest.mark.parametrize("state", [ONE, 3], ids=["array", "scalar"])
def test_a_state_of_one_value_goes_out_and_in(tmp_path: Path, to: str, state: Any) -> None:
    if to == "torch":
        pytest.importorskip("torch")
    fingerprint = saved(tmp_path / "run", state)
    out = tmp_path / f"out{ENDS[to]}"
    export(tmp_path / "run", to, out, verify=True)
    assert import_run(out, tmp_path / "back").fingerprint == fingerprint
    [leaf] = import_run(out, tmp_path / "named", branch="w").leaves
    assert leaf.path == "w"
    [leaf] = import_run(out, tmp_path / "deep", names=NameMap(["**=a/b**"])).leaves
    assert leaf.path == "a/b"


def test_npz_notes_what_numpy_has_no_name_for(tmp_path: Path) -> None:
    values = {
        "bf": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
        "i4": np.arange(3).astype(ml_dtypes.int4),
        "none": np.zeros((0, 2), ml_dtypes.bfloat16),
        "k": 1,
        "f": 0.5,
        "b": b"\0x",
        "t": True,
        "e": "",
        "c": 1 - 2j,
        "s": "a ü",
    }
    words = memoryview(np.arange(4, dtype=np.uint32).tobytes())
    state = Leaves(
        {
            **flatten(values),
            "keys": Leaf("key<threefry2x32>", (2,), words, frozen=True),
            "weak": Leaf("weak:bfloat16", (), memoryview(b"ab"), frozen=True),
        }
    )
    fingerprint = saved(tmp_path / "run", state)
    out = tmp_path / "out.npz"
    export(tmp_path / "run", "npz", out, verify=True)
    assert import_run(out, tmp_path / "back").fingerprint == fingerprint
    with np.load(out) as found:
        assert set(found) == {"bf", "i4", "none", "keys", "weak", "perdure.json"}
        assert found["bf"].dtype == "V2"
        copy = {"bf": found["bf"]}
    # Negative control: NumPy drops the note, and then nothing says what the elements are.
    np.savez(tmp_path / "copy.npz", **copy)
    refused(tmp_path / "copy.npz", "'bf.npy'", "|V2", "safetensors", "float32")


@pytest.mark.parametrize("to", ["safetensors", "torch", "npz"])
def test_keys_and_weak_types_come_back(tmp_path: Path, to: str) -> None:
    if to == "torch":
        pytest.importorskip("torch")
    words = memoryview(np.arange(4, dtype=np.uint32).tobytes())
    state = Leaves(
        {
            "model/a.b/keys": Leaf("key<threefry2x32>", (2,), words, frozen=True),
            "model/weak": Leaf("weak:float32", (), words[:4], frozen=True),
            "other": Leaf("uint32", (4,), words, frozen=True),
        }
    )
    saved(tmp_path / "run", state)
    out = tmp_path / f"out{ENDS[to]}"
    export(tmp_path / "run", to, out, leaves="model", verify=True)
    # Below the exported branch.
    back = import_run(out, tmp_path / "back", branch="model")
    stored = [leaf for leaf in Run(tmp_path / "run").manifest(1).leaves if leaf.path != "other"]
    assert [(leaf.path, leaf.dtype, leaf.shape, leaf.hashes()) for leaf in back.leaves] == [
        (leaf.path, leaf.dtype, leaf.shape, leaf.hashes()) for leaf in stored
    ]


def test_npz_is_converted_to_rows_and_little_endian(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {
        "fortran": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
        "big": np.array([[1.5, -0.0], [np.nan, 3]], ">f4"),
        "both": np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)),
        "complex": np.array([1 + 2j], ">c16"),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    import_run(tmp_path / "a.npz", tmp_path / "run")
    back = load_checkpoint(tmp_path / "run")
    for name, array in back.items():
        expected = np.ascontiguousarray(arrays[name].astype(arrays[name].dtype.newbyteorder("=")))
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        assert array.tobytes() == expected.tobytes(), name


NO_LEAVES: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
    "Object": lambda: np.array([{}], object),
    "<U1": lambda: np.array(["a", "b"]),
    "|S1": lambda: np.array([b"a"]),
    "datetime64": lambda: np.array(["2020-01-01"], "datetime64[D]"),
    "[('x', '<i4'), ('y', '<f4')]": lambda: np.zeros(2, "i4,f4").view([("x", "i4"), ("y", "f4")]),
    "float128": lambda: np.ones(2, np.longdouble),
    "|V3": lambda: np.zeros(2, "V3"),
}


@pytest.mark.parametrize("dtype", list(NO_LEAVES))
def test_arrays_that_are_no_leaf_are_named(tmp_path: Path, dtype: str) -> None:
    if dtype == "float128" and np.dtype(np.longdouble).itemsize != 16:
        pytest.skip("longdouble is no float128 on this machine")
    np.savez(tmp_path / "a.npz", good=ONE, bad=NO_LEAVES[dtype]())
    refused(tmp_path / "a.npz", str(tmp_path / "a.npz"), "'bad.npy'", dtype)


HOSTILE = {
    "short": npy("<f8", (4,), b"x" * 31),
    "long": npy("<f8", (4,), b"x" * 33),
    "huge": npy("<f8", (2**62,), b""),
    "overflow": npy("<f8", (2**62, 4), b""),
    "negative": npy("<f8", (-1, -4), b"x" * 32),
    "axes": npy("<f8", (1,) * 65, b"x" * 8),
    "subarray": npy(("<f8", (2,)), (2,), b"x" * 32),
    "pickled": npy("|O", (1,), pickle.dumps([1])),
    "header": b"\x93NUMPY\x01\x00\x05\x00{{{{{",
    "magic": b"nothing",
    "surrogate": npy("<U1", (), (0xD800).to_bytes(4, "little")),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_member_has_the_bytes_that_its_header_says(tmp_path: Path, name: str) -> None:
    first = npy("<f8", (1,), b"good one")
    source = archive(tmp_path / "a.npz", first=first, bad=HOSTILE[name], last=b"secret" * 100)
    refused(source, "'bad.npy'")
    import_run(archive(tmp_path / "b.npz", first=first), tmp_path / "good")
    assert load_checkpoint(tmp_path / "good")["first"].tobytes() == b"good one"


def test_a_flipped_bit_in_an_archive_is_found(tmp_path: Path) -> None:
    source = tmp_path / "a.npz"
    large = np.arange(5000.0)  # zipfile reads no further than the header
    np.savez(source, good=np.zeros(3), bad=large)
    data = bytearray(source.read_bytes())
    data[data.index(large[-9:].tobytes())] ^= 1
    source.write_bytes(data)
    refused(source, "'bad.npy'", "CRC")


def test_a_flipped_bit_in_the_notes_of_a_torch_file_is_found(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    saved(tmp_path / "run", {"x/y": ONE})
    source = tmp_path / "a.pt"
    export(tmp_path / "run", "torch", source)
    data = bytearray(source.read_bytes())
    data[data.index(b"x%2Fy")] ^= 1
    source.write_bytes(data)
    refused(source, str(source), "perdure.json")


def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("a.npy", npy("<f8", (1,), b"x" * 8))
        file.writestr("a", npy("<f8", (1,), b"y" * 8))
    refused(tmp_path / "a.npz", "'a'", "two arrays")


def test_names_that_an_archive_cannot_have(tmp_path: Path) -> None:
    for number, (state, phrase) in enumerate(
        (
            ({"a": ONE, "a.npy": ONE + 1}, "found 'a.npy'"),
            ({"k" * 70_000: ONE}, "at most 65,000 bytes"),
            ({"a\0b": ONE}, "NUL"),
        )
    ):
        run, out = tmp_path / f"run{number}", tmp_path / "out.npz"
        saved(run, state)
        with pytest.raises(ArgumentError, match=phrase):
            export(run, "npz", out)
        assert not out.exists()
    # Alone, such a name is no trouble.
    fingerprint = saved(tmp_path / "alone", {"a.npy": ONE})
    export(tmp_path / "alone", "npz", tmp_path / "alone.npz")
    with np.load(tmp_path / "alone.npz") as found:
        assert found["a.npy"].tolist() == ONE.tolist()
    assert import_run(tmp_path / "alone.npz", tmp_path / "back").fingerprint == fingerprint


def test_torch_names_that_meet_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    one, two = torch.ones(2), torch.zeros(3)
    for number, state in enumerate(
        ({"a.b": one, "a": {"b": two}}, {"a/b": one, "a.b": two}, {"a.b": one, "a": two})
    ):
        torch.save(state, tmp_path / f"{number}.pt")
        refused(tmp_path / f"{number}.pt", "'a.b'", error=ArgumentError)
    torch.save({"a.c": one, "a": {"b": two}}, tmp_path / "good.pt")
    assert len(import_run(tmp_path / "good.pt", tmp_path / "good").leaves) == 2


def test_what_is_refused_in_torch_files_has_safe_advice(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2), "code": NameMap}, tmp_path / "class.pt")
    text = refused(tmp_path / "class.pt", "NameMap", "state_dict()", "run any code")
    assert "weights_only" not in text
    eight = torch.ones(2).to(torch.float8_e4m3fn)
    torch.save({"w": eight}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    text = refused(tmp_path / "old.pt", "old.pt", "state_dict()")
    assert "weights_only" not in text
    torch.save({"w": torch.ones(2, 2).to_sparse()}, tmp_path / "sparse.pt")
    refused(tmp_path / "sparse.pt", "sparse.pt", "w: ", "to_dense()")
    for text in (b"nothing of torch", b"epoch 1\nloss 2\n", b""):
        (tmp_path / "text.pt").write_bytes(text)
        found = refused(tmp_path / "text.pt", "text.pt", "of torch.save")
        assert "weights_only" not in found
        assert ": 101" not in found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pt")
    assert "weights_only" not in refused(tmp_path / "script.pt", "TorchScript", "state_dict()")
    torch.save({"w": torch.ones(2), "call": Call()}, tmp_path / "call.pt")
    refused(tmp_path / "call.pt", f"found {os.system.__module__}.system", "run any code")


class Call:
    """A pickle that would call a function."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("exit 1",)


def test_complex32_goes_out_to_torch(tmp_path: Path) -> None:
    half = Leaf("complex32", (2,), memoryview(bytes(range(8))))
    fingerprint = saved(tmp_path / "run", Leaves({"w": half}))
    export(tmp_path / "run", "torch", tmp_path / "w.pt")
    for to in ("npz", "safetensors"):
        with pytest.raises(UnsupportedLeafError, match="; torch can"):
            export(tmp_path / "run", to, tmp_path / "w")
    pytest.importorskip("torch")
    assert import_run(tmp_path / "w.pt", tmp_path / "again").fingerprint == fingerprint


@pytest.mark.parametrize("branch", ["a//b", "/x", "a/", "/"])
def test_a_branch_with_an_empty_part_is_refused(tmp_path: Path, branch: str) -> None:
    np.savez(tmp_path / "a.npz", w=ONE)
    text = refused(tmp_path / "a.npz", "branch: ", repr(branch), error=ArgumentError, branch=branch)
    assert "--names" not in text


def test_what_is_wrong_usage_of_import(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", w=ONE)
    out = str(tmp_path / "out")

    def status(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(main, ["import", *arguments])
        return done.exit_code, done.output

    assert status(str(tmp_path / "none.pt"), out)[0] == 2
    assert status(str(tmp_path / "a.npz"), out)[0] == 0
    found = status(str(tmp_path / "a.npz"), out)
    assert found[0] == 2
    assert "expected an empty or missing directory" in found[1]
    (tmp_path / "bad.npz").write_bytes(b"bad")
    assert status(str(tmp_path / "bad.npz"), f"{out}2")[0] == 1


def test_a_shard_alone_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "run", {"a": ONE, "b": ONE + 1})
    out = tmp_path / "out"
    export(tmp_path / "run", "safetensors", out, shard_bytes=24)
    shard, other = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    (out / other).unlink()
    (out / "model.safetensors.index.json").unlink()
    refused(out, shard, "model.safetensors.index.json", "the other 1")
    # Negative controls: the file itself, and a folder with a file of another name.
    assert len(import_run(out / shard, tmp_path / "part").leaves) == 1
    (out / shard).rename(out / "model.safetensors")
    assert len(import_run(out, tmp_path / "whole").leaves) == 1


def safetensors(path: Path, header: str) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"12345678")
    return path


def test_hostile_headers_and_notes_of_safetensors(tmp_path: Path) -> None:
    entry = '{"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}'

    def noted(name: str, **note: str) -> str:
        notes = json.dumps({"perdure": json.dumps({name: note})})
        return f'{{"x": {entry}, "__metadata__": {notes}}}'

    axes = entry.replace("[8]", json.dumps([1] * 64 + [8]))
    words = noted("e", dtype="key<a>").replace(
        '"x"', '"e": {"dtype": "U32", "shape": [2, 0], "data_offsets": [0, 0]}, "x"', 1
    )
    for number, (header, phrase) in enumerate(
        (
            (f'{{"x": {axes}}}', "at most 64 axes"),
            (words, "key<a>"),
            (f'{{"x": {entry[:-1]}, "dtype": "I8"}}}}', "twice"),
            (f'{{"x": {entry}, "x": {entry}}}', "twice"),
            (noted("n", dtype="py:int 1_000"), "py:int"),
            (noted("n", dtype=f"py:int {'0' * 700}1e1"), "py:int"),
            (noted("n", dtype="py:int 007"), "py:int"),
            (noted("n", dtype="py:float 1_0"), "py:float"),
            (noted("n", dtype="py:bool yes"), "py:bool"),
            (noted("x", path="a//b"), "no path"),
            (noted("x", path="50%"), "no path"),
            (noted("y", path="a"), "no such array"),
        )
    ):
        source = safetensors(tmp_path / f"{number}.safetensors", header)
        refused(source, phrase)
    notes = {"n": {"dtype": f"py:int {'9' * 10_000}"}, "x": {"path": "a%2Fb"}}
    good = f'{{"x": {entry}, "__metadata__": {json.dumps({"perdure": json.dumps(notes)})}}}'
    import_run(safetensors(tmp_path / "g.safetensors", good), tmp_path / "good")
    back = load_checkpoint(tmp_path / "good")
    assert back["n"] == 10**10_000 - 1
    assert back["a/b"].tobytes() == b"12345678"


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    for kind, end in ENDS.items():
        os.mkfifo(tmp_path / f"pipe{end}")
        refused(tmp_path / f"pipe{end}", "pipe", kind=kind)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "model.safetensors")
    refused(tmp_path / "folder", "expected a file")


def test_options_without_a_meaning_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "run", {"model": {"w": ONE, "b": ONE}})
    for to, out in (("npz", "out.npz"), ("torch", "out.pt"), ("safetensors", "out.safetensors")):
        with pytest.raises(ArgumentError, match="shard_bytes"):
            export(tmp_path / "run", to, tmp_path / out, shard_bytes=10**9)
    words = ["export", str(tmp_path / "run"), str(tmp_path / "o.npz"), "--to", "npz"]
    done = CliRunner().invoke(main, [*words, "--shard-size", "5GB"])
    assert done.exit_code == 2
    assert not (tmp_path / "o.npz").exists()
    source = tmp_path / "a.npz"
    np.savez(source, w=ONE, b=ONE)
    names = NameMap(["*=net/*"])
    refused(source, "branch", "'m'", error=ArgumentError, branch="m", names=names)
    some = import_run(source, tmp_path / "some", branch="m", names=NameMap(["w=net/w"]))
    assert [leaf.path for leaf in some.leaves] == ["m/b", "net/w"]


def test_commands_count_and_read_names_with_a_mark(tmp_path: Path) -> None:
    def command(*words: str) -> str:
        done = CliRunner().invoke(main, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    saved(tmp_path / "run", {"w": ONE})
    names = tmp_path / "names"
    names.write_text("w=kernel\n", encoding="utf-8-sig")
    out = str(tmp_path / "o.npz")
    words = ["export", str(tmp_path / "run"), out, "--to", "npz", "--names", str(names)]
    assert "1 leaf," in command(*words)
    assert "1 leaf," in command("import", out, str(tmp_path / "back"))
    with np.load(out) as found:
        assert list(found) == ["kernel"]
