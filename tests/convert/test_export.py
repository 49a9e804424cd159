"""`export` and `import_run`: bits in files of other tools and back, names, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from perdure import CheckpointManager, load_checkpoint
from perdure.cli.main import main
from perdure.convert import NameMap, export, import_run
from perdure.errors import (
    ArgumentError,
    CorruptionError,
    DataError,
    SaveError,
    StepExistsError,
    StepNotFoundError,
    UnsupportedLeafError,
)
from perdure.look import origin
from perdure.state import flatten
from perdure.store import Leaf, Run
from perdure.store.leaf import Leaves

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "bool": np.array([True, False, True]),
    "int8": np.arange(-3, 4, dtype=np.int8),
    "uint16": np.arange(5, dtype=np.uint16),
    "int64": np.array(-(2**62)),
    "float16": np.array([[np.nan, -0.0], [1.5, np.inf]], np.float16),
    "bfloat16": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.arange(3).astype(ml_dtypes.float8_e4m3fn),
    "float32": np.arange(1_049_000, dtype=np.float32).reshape(-1, 4),  # two chunks
    "float64": np.array(0.1),
    "complex64": np.array([1 + 2j], np.complex64),
    "empty": np.zeros((0, 3), np.float32),
}
SCALARS: dict[str, Any] = {
    "step": 7,
    "huge": 10**30,
    "rate": 0.1,
    "flag": True,
    "name": "a ü",
    "raw": b"\x00\xff",
    "none": None,
    "phase": 1 - 2j,
}


def leaves() -> Leaves:
    words = np.arange(4, dtype=np.uint32)
    extra = {
        "rng": Leaf("key<threefry2x32>", (2,), memoryview(words.tobytes()), frozen=True),
        "weak": Leaf("weak:float32", (), memoryview(np.float32(3).tobytes()), frozen=True),
    }
    return Leaves({**flatten({"model": {"a/b": ARRAYS}, "other": SCALARS}), **extra})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("export") / "run"
    with Run(directory, create=True) as opened:
        opened.save(5, leaves())
    return f"{directory}@5"


def bits(array: Any) -> tuple[Any, bytes]:
    array = np.asarray(array)
    return array.shape, array.tobytes()


def parse(file: Path) -> tuple[dict[str, str], dict[str, tuple[str, list[int], bytes]]]:
    """A safetensors file by its specification: the metadata, and (dtype, shape, bytes) by name."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    assert end % 8 == 0
    header = json.loads(data[8:end])
    metadata = header.pop("__metadata__")
    found = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        found[name] = entry["dtype"], entry["shape"], data[end + start : end + stop]
    assert sum(len(content) for _, _, content in found.values()) == len(data) - end
    return metadata, found


def test_safetensors_holds_the_bits(run: str, tmp_path: Path) -> None:
    done = export(run, "safetensors", tmp_path / "out", leaves="model/**", verify=True)
    assert done.verified
    assert sorted(os.listdir(tmp_path / "out")) == ["README.md", "model.safetensors"]
    metadata, found = parse(tmp_path / "out" / "model.safetensors")
    # A name with a slash in it would be taken for a path.
    noted = {f"a/b.{name}": {"path": f"a%2Fb/{name}"} for name in ARRAYS}
    assert json.loads(metadata.pop("perdure")) == noted
    assert metadata.keys() == {"format", "perdure_fingerprint"}
    assert metadata["format"] == "pt"
    assert done.names["model/a%2Fb/float32"] == "a/b.float32"
    assert set(found) == {f"a/b.{name}" for name in ARRAYS}
    for name, array in ARRAYS.items():
        assert found[f"a/b.{name}"][1:] == (list(array.shape), array.tobytes()), name
    dtypes = {name: found[f"a/b.{name}"][0] for name in ("bool", "bfloat16", "float8_e4m3fn")}
    assert dtypes == {"bool": "BOOL", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}


def test_shards_are_greedy_in_the_order_of_names(tmp_path: Path) -> None:
    state = {
        f"layer{i}": np.full(size, i, np.uint8) for i, size in enumerate((40, 50, 200, 30, 60))
    }
    with Run(tmp_path / "run", create=True) as opened:
        opened.save(1, flatten(state))
    out = tmp_path / "out"
    export(tmp_path / "run", "safetensors", out, shard_bytes=100, verify=True)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    mark = Run(tmp_path / "run").manifest(1).fingerprint
    assert index["metadata"] == {"total_size": 380, "perdure_fingerprint": mark}
    files = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    # The array that is larger than a shard has one of its own, which does not close the one before.
    assert index["weight_map"] == {
        "layer0": files[1],
        "layer1": files[1],
        "layer2": files[0],
        "layer3": files[2],
        "layer4": files[2],
    }
    for name, file in index["weight_map"].items():
        assert parse(out / file)[1][name][2] == state[name].tobytes()
    manifest = import_run(out, tmp_path / "back")
    assert manifest.fingerprint == Run(tmp_path / "run").manifest(1).fingerprint
    (out / files[1]).unlink()
    with pytest.raises(DataError, match=files[1]):
        import_run(out, tmp_path / "again")


def test_a_checkpoint_comes_back_from_safetensors(run: str, tmp_path: Path) -> None:
    names = NameMap(["model/a%2Fb/*=model.ab.*"])
    export(run, "safetensors", tmp_path / "one.safetensors", names=names, verify=True)
    back = NameMap(["model.ab.*=model/a%2Fb/*"])
    manifest = import_run(tmp_path / "one.safetensors", tmp_path / "back", names=back)
    original = Run(run.rpartition("@")[0]).manifest(5)
    # Scalars, weak types and random keys too: the header of the file says what they are.
    assert manifest.fingerprint == original.fingerprint
    noted = origin(manifest)
    assert noted is not None
    assert noted["format"] == "safetensors"
    # Negative control: without the names back, other paths.
    assert (
        import_run(tmp_path / "one.safetensors", tmp_path / "b").fingerprint != original.fingerprint
    )


def test_torch_loads_the_bits(run: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    done = export(run, "torch", tmp_path / "out.pt", verify=True)
    assert set(done.names.values()) >= {"rng", "weak"}
    for mapped in (False, True):
        state = torch.load(tmp_path / "out.pt", weights_only=True, mmap=mapped)
        assert {name: state[f"other.{name}"] for name in SCALARS} == SCALARS
        for name, array in ARRAYS.items():
            tensor = state[f"model.a/b.{name}"]
            assert str(tensor.dtype) == f"torch.{array.dtype.name}"
            assert tuple(tensor.shape) == array.shape
            plain = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            assert plain.tobytes() == array.tobytes(), name
        assert state["rng"].dtype == torch.uint32
        assert state["rng"].tolist() == [[0, 1], [2, 3]]
        assert state["weak"].item() == 3
    same = NameMap(["model.a/b.*=model/a%2Fb/*", "other.*=other/*"])
    import_run(tmp_path / "out.pt", tmp_path / "back", names=same)
    back = load_checkpoint(tmp_path / "back")
    assert back["other"] == SCALARS
    for name, array in ARRAYS.items():
        assert bits(back["model"]["a/b"][name]) == bits(array)


def test_a_torch_module_goes_out_and_in(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import perdure.torch

    def module(seed: int) -> Any:
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))

    model = module(1)
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"model": model})
    export(f"{tmp_path}/run@1", "torch", tmp_path / "out.pt", leaves="model")
    state = torch.load(tmp_path / "out.pt", weights_only=True)
    assert list(state) == sorted(perdure.torch.state_dict(tmp_path / "run", "model"))
    other = module(2)
    other.load_state_dict(state)
    assert all(
        torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True)
    )
    # A file that torch.save wrote itself, restored with leaves=... into a module.
    torch.save({"net": model.state_dict(), "epoch": 3}, tmp_path / "saved.pt")
    import_run(tmp_path / "saved.pt", tmp_path / "imported")
    third = module(3)
    with CheckpointManager(tmp_path / "imported") as manager:
        manager.restore(like={"net": third}, leaves="net")
    assert all(
        torch.equal(a, b) for a, b in zip(third.parameters(), model.parameters(), strict=True)
    )
    assert load_checkpoint(tmp_path / "imported")["epoch"] == 3


class Code:
    ran: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        return run_code, (1,)


def run_code(number: int) -> None:
    Code.ran.append(number)


def test_code_in_a_torch_file_never_runs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"weight": torch.ones(2), "code": Code()}, tmp_path / "bad.pt")
    Code.ran.clear()
    with pytest.raises(DataError, match="run any code"):
        import_run(tmp_path / "bad.pt", tmp_path / "run")
    assert not Code.ran
    assert not (tmp_path / "run").exists()
    pickle.loads(pickle.dumps(Code()))
    assert Code.ran, "negative control: unpickling does run it"
    (tmp_path / "no.pt").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"no\.pt"):
        import_run(tmp_path / "no.pt", tmp_path / "run")


def test_npz_loads_the_bits(run: str, tmp_path: Path) -> None:
    export(run, "npz", tmp_path / "out.npz", verify=True)
    with np.load(tmp_path / "out.npz") as found:
        for name, array in ARRAYS.items():
            loaded = found[f"model/a%2Fb/{name}"]
            if array.dtype.type.__module__ != "numpy":
                assert loaded.dtype == f"V{array.dtype.itemsize}"
                loaded = loaded.view(array.dtype)
            assert loaded.dtype == array.dtype
            assert bits(loaded) == bits(array), name
        assert not [name for name in found if name.startswith("other/")], "scalars are notes"
        assert found["rng"].tolist() == [[0, 1], [2, 3]]
    import_run(tmp_path / "out.npz", tmp_path / "back", branch="in")
    back = load_checkpoint(tmp_path / "back", leaves="in/model/**/float32")
    np.testing.assert_array_equal(back["in"]["model"]["a/b"]["float32"], ARRAYS["float32"])


def test_equal_exports_have_equal_bytes(run: str, tmp_path: Path) -> None:
    for to in ("torch", "npz"):
        for name in ("a", "b"):
            export(run, to, tmp_path / name, leaves="model")
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
        (tmp_path / "a").unlink()
        (tmp_path / "b").unlink()


def test_names_by_patterns() -> None:
    names = NameMap(
        [
            "# a comment",
            "",
            "params/layer_*/*/kernel = model.layers.*.*.weight",
            "params/**/scale=**.gain",
        ]
    )
    assert names("params/layer_3/mlp/kernel") == "model.layers.3.mlp.weight"
    assert names("params/layer_3/x/mlp/kernel") is None
    assert names("params/a/b/scale") == "a/b.gain"
    for wrong in ("no equals", "a/*=b", "=b", "a="):
        with pytest.raises(ArgumentError, match="line 2"):
            NameMap(["x=y", wrong])


def test_what_an_export_refuses(run: str, tmp_path: Path) -> None:
    directory = run.rpartition("@")[0]
    out = tmp_path / "out"

    def refused(kind: type[Exception], to: str = "torch", where: str = run, **options: Any) -> str:
        with pytest.raises(kind) as caught:
            export(where, to, out, **options)
        assert os.listdir(tmp_path) == []
        return str(caught.value)

    assert "step 6" in refused(StepNotFoundError, where=f"{directory}@6")
    assert "'modle'" in refused(ArgumentError, leaves="modle")
    assert "'csv'" in refused(ArgumentError, to="csv")
    assert "both be called 'x'" in refused(
        ArgumentError,
        names=NameMap(["other/step=x", "other/rate=x"]),
    )
    assert "matches no leaf" in refused(ArgumentError, names=NameMap(["nothing/*=x.*"]))
    assert "shard_bytes" in refused(ArgumentError, to="npz", shard_bytes=10**9)
    assert "shard_bytes" in refused(ArgumentError, to="safetensors", shard_bytes=0)
    for to, name in (("safetensors", "__metadata__"), ("npz", "perdure.json")):
        text = refused(ArgumentError, to=to, names=NameMap([f"rng={name}"]))
        assert f"{name}" in text
        assert "`--names`" in text
    with pytest.raises(ArgumentError, match="in a directory that exists"):
        export(run, "npz", tmp_path / "no" / "out")
    for make in (lambda: out.write_text("mine"), lambda: (out.unlink(), out.mkdir())):
        make()
        with pytest.raises(ArgumentError, match="exists"):
            export(run, "npz", out)
    assert os.listdir(tmp_path) == ["out"]


def test_a_dtype_that_a_format_lacks_names_the_others(tmp_path: Path) -> None:
    with Run(tmp_path / "run", create=True) as opened:
        opened.save(1, flatten({"w": np.arange(3).astype(ml_dtypes.int4), "x": np.ones(2)}))
    for to in ("safetensors", "torch"):
        with pytest.raises(UnsupportedLeafError, match=r"int4.*npz can"):
            export(tmp_path / "run", to, tmp_path / "out")
        export(tmp_path / "run", to, tmp_path / to, leaves="x")
    export(tmp_path / "run", "npz", tmp_path / "out.npz", verify=True)


@pytest.mark.parametrize("to", ["safetensors", "torch", "npz"])
def test_an_unfinished_export_never_looks_finished(
    run: str, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Path(run.rpartition("@")[0])
    broken = tmp_path / "broken"
    shutil.copytree(directory, broken)
    manifest = Run(broken).manifest(5)
    entry = next(leaf for leaf in manifest.leaves if leaf.path.endswith("float32"))
    pack = broken / "packs" / manifest.packs[entry.chunks[1].pack].name
    data = bytearray(pack.read_bytes())
    data[entry.chunks[1].offset] ^= 1
    pack.write_bytes(data)
    with pytest.raises(CorruptionError, match="float32"):
        export(broken, to, tmp_path / "out")
    pack.unlink()
    with pytest.raises(CorruptionError, match=pack.name):
        export(broken, to, tmp_path / "out")
    fired = []

    def full(_: int) -> None:
        fired.append(1)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("perdure.convert.exchange.os.fsync", full)
    with pytest.raises(SaveError, match="No space left"):
        export(run, to, tmp_path / "out")
    assert fired
    assert os.listdir(tmp_path) == ["broken"]


@pytest.mark.parametrize("to", ["safetensors", "torch", "npz"])
def test_verify_finds_a_changed_byte(
    run: str, tmp_path: Path, to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.convert.formats import read_foreign as read

    changed = []

    def after_a_flip(path: str, kind: str) -> Any:
        file = Path(path) / "model.safetensors" if os.path.isdir(path) else Path(path)
        data = bytearray(file.read_bytes())
        place = data.index(ARRAYS["float32"][1000:1010].tobytes())
        data[place] ^= 1
        file.write_bytes(data)
        changed.append(path)
        return read(path, kind)

    monkeypatch.setattr("perdure.convert.formats.read_foreign", after_a_flip)
    with pytest.raises(CorruptionError):
        export(run, to, tmp_path / "out", leaves="model", verify=True)
    assert len(changed) == 1
    assert os.listdir(tmp_path) == []


def hostile() -> Iterator[tuple[str, bytes]]:
    def file(header: Any, content: bytes = b"12345678") -> bytes:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content

    entry = {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}
    yield "empty", b""
    yield "length", (2**60).to_bytes(8, "little") + b"{}"
    yield "json", file(b"{" * 1000)
    yield "short", file({"x": entry}, b"1234")
    yield "rest", file({"x": entry}, b"123456789")
    yield "overlap", file({"x": entry, "y": entry})
    yield "gap", file({"x": {**entry, "data_offsets": [1, 8], "shape": [7]}})
    yield "backwards", file({"x": {**entry, "data_offsets": [8, 0]}})
    yield "shape", file({"x": {**entry, "shape": [9]}})
    yield "negative", file({"x": {**entry, "shape": [-8, -1]}})
    yield "dtype", file({"x": {**entry, "dtype": "Q9"}})
    yield "note", file({"x": entry, "__metadata__": {"perdure": '{"x": {"dtype": "key<a>"}}'}})
    yield "field", file({"x": {"dtype": "U8"}})


@pytest.mark.parametrize(
    ("name", "data"), list(hostile()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_hostile_safetensors_are_refused(tmp_path: Path, name: str, data: bytes) -> None:
    file = tmp_path / f"{name}.safetensors"
    file.write_bytes(data)
    with pytest.raises(DataError) as caught:
        import_run(file, tmp_path / "run")
    assert str(file) in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_what_an_import_refuses(tmp_path: Path) -> None:
    source = tmp_path / "a.npz"
    arrays: dict[str, Any] = {"w": np.ones(2), "b.c": np.ones(3)}
    np.savez(source, **arrays)
    out = tmp_path / "run"

    def refused(message: str, **options: Any) -> None:
        with pytest.raises(ArgumentError) as caught:
            import_run(source, out, **options)
        assert message in str(caught.value)
        assert not out.exists()

    refused("both become 'x'", names=NameMap(["w=x", "b.c=x"]))
    refused("below 'w'", names=NameMap(["b.c=w/c"]))
    refused("matches no leaf", names=NameMap(["v=x"]))
    refused("empty part", names=NameMap(["w=x//y"]))
    refused("found 'csv'", kind="csv")
    with pytest.raises(DataError, match="found nothing"):
        import_run(tmp_path / "none", out)
    (tmp_path / "data").write_bytes(b"")
    with pytest.raises(ArgumentError, match="not known from its name"):
        import_run(tmp_path / "data", out)
    np.savez_compressed(tmp_path / "c.npz", x=np.ones(2))
    import_run(tmp_path / "c.npz", tmp_path / "compressed")
    assert load_checkpoint(tmp_path / "compressed")["x"].tolist() == [1, 1]
    np.savez(tmp_path / "o.npz", x=np.array([{}], object))
    with pytest.raises(DataError, match="Object"):
        import_run(tmp_path / "o.npz", out)
    import_run(source, out)
    assert load_checkpoint(out)["b"]["c"].tolist() == [1, 1, 1]
    with pytest.raises(StepExistsError):
        import_run(source, out)


def test_memory_is_that_of_a_few_chunks(tmp_path: Path) -> None:
    state = {f"w{i}": np.full(20 << 20, i, np.uint8) for i in range(2)}
    with Run(tmp_path / "run", create=True) as opened:
        opened.save(1, flatten(state))
    del state
    for to in ("safetensors", "npz"):
        tracemalloc.start()
        export(tmp_path / "run", to, tmp_path / to)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 28 << 20, to


def test_commands(run: str, tmp_path: Path) -> None:
    def command(*words: str) -> Any:
        return CliRunner().invoke(main, list(words), catch_exceptions=False)

    names = tmp_path / "names"
    names.write_text("model/a%2Fb/*=net.*\n")
    out = str(tmp_path / "out")
    words = ["export", run, out, "--to", "safetensors", "--leaves", "model", "--names", str(names)]
    done = command(*words, "--shard-size", "1MB", "--verify", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["verified"]
    assert document["names"]["model/a%2Fb/int8"] == "net.int8"
    assert len(document["files"]) == 4, "two shards, the index and the card"
    assert command(*words).exit_code == 2, "OUT exists"
    assert command(*words, "--shard-size", "some").exit_code == 2
    done = command("import", out, str(tmp_path / "in"), "--branch", "model")
    assert done.exit_code == 0, done.output
    assert "11 leaves" in done.output
    assert "model/net/int8" in [leaf.path for leaf in Run(tmp_path / "in").manifest(0).leaves]
    done = command("export", run, str(tmp_path / "a.npz"), "--to", "npz")
    assert "21 leaves" in done.output
