"""`perdure certify`: what a certificate says, and that its check finds every change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner, Result

from damage import flip
from perdure.checkpoint import CheckpointManager, ManagerOptions
from perdure.cli import main
from perdure.drill.replay import ReplayOptions, StretchResult, replay_document, write_record
from perdure.look.certificate import Certificate, Replay
from perdure.store import LocalStorage, Run
from perdure.store.manifest_json import encode_manifest
from perdure.store.run_log import read_journal

HAS_SSH = shutil.which("ssh-keygen") is not None
needs_ssh = pytest.mark.skipif(not HAS_SSH, reason="no ssh-keygen here: signatures are not tested")


def perdure(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


RECIPE = {"engine": "numpy", "rate": 0.1, "seed": 7}
ENVIRONMENT = {"platform": "cpu", "threads": 1}


def trained(run: Path, factor: float = 1.0, steps: int = 4, every: int | None = 1) -> Path:
    options = ManagerOptions(journal_every=every)
    with CheckpointManager(
        run,
        recipe=RECIPE | ENVIRONMENT,
        max_to_keep=None,
        save_interval_steps=2,
        options=options,
    ) as manager:
        state, start = manager.restore_or_initialize({"w": np.zeros(8), "step": 0})
        for step in range(start + 1, steps + 1):
            state = {"w": state["w"] + factor * step, "step": step}
            manager.save(step, state, {"loss": 1 / step})
    return run


def recorded(run: Path, start: int, stop: int, **result: Any) -> Path:
    """The record of a replay, as `perdure replay` writes it."""
    entries = {entry.step: entry.state for entry in read_journal(LocalStorage(run))}
    seen = tuple(
        (step, Run(run).manifest(step).fingerprint, entries.get(step))
        for step in Run(run).steps()
        if start <= step <= stop
    )
    results = [
        StretchResult(start or None, stop, steps=stop - start, checkpoints=1, seen=seen, **result)
    ]
    document = replay_document(str(run), ["true"], ReplayOptions(workers=2), results)
    return run / write_record(LocalStorage(run), document)


def keygen(key: Path) -> None:
    subprocess.run(["ssh-keygen", "-t", "ed25519", "-N", "", "-q", "-f", key], check=True)


class Case(NamedTuple):
    """A signed certificate of step 4 with all that its check looks at, in the directory `at`."""

    at: Path

    @property
    def run(self) -> Path:
        return self.at / "run"

    @property
    def file(self) -> Path:
        return self.at / "c.json"

    @property
    def signature(self) -> Path:
        return self.at / "c.json.sig"

    @property
    def log(self) -> Path:
        return self.run / "log.jsonl"

    def sign(self, key: str, namespace: str = "perdure", text: bytes | None = None) -> None:
        line = ["ssh-keygen", "-q", "-Y", "sign", "-n", namespace, "-f", str(self.at / key)]
        text = self.file.read_bytes() if text is None else text
        done = subprocess.run(line, input=text, capture_output=True, check=True)
        self.signature.write_bytes(done.stdout)

    def check(self, identity: str = "ada") -> tuple[int, set[str]]:
        """The exit status, and what failed."""
        words: list[object] = ["--check", self.file, "--run", self.run]
        if HAS_SSH:
            words += ["--signers", self.at / "signers", "--identity", identity]
        done = perdure("certify", *words, "--json")
        found = json.loads(done.stdout)
        failed = {name for name, result, _ in found["findings"] if result == "FAILED"}
        assert found["holds"] == (not failed)
        return done.exit_code, failed


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("certified")
    run = trained(at / "run")
    trained(at / "other", 2.0)
    recorded(run, 0, 2)
    recorded(run, 2, 4)
    words = []
    if HAS_SSH:
        for name in ("key", "stranger"):
            keygen(at / name)
        kind, blob, *_ = (at / "key.pub").read_text().split()
        stranger = " ".join((at / "stranger.pub").read_text().split()[:2])
        (at / "signers").write_text(f"ada {kind} {blob}\neve {stranger}\n")
        words = ["--key", at / "key"]
    done = perdure("certify", f"{run}@4", "-o", at / "c.json", *words)
    assert done.exit_code == 0, done.output
    return at


@pytest.fixture
def case(template: Path, tmp_path: Path) -> Case:
    return Case(shutil.copytree(template, tmp_path / "case"))


# ---------------------------------------------------------------- what is changed


def forged(**changes: Any) -> Callable[[Case], None]:
    """Change fields, and give the file the right digest again, as one without the key can."""

    def change(case: Case) -> None:
        known = msgspec.json.decode(case.file.read_bytes(), type=Certificate)
        fields = {
            name: c(getattr(known, name)) if callable(c) else c for name, c in changes.items()
        }
        case.file.write_bytes(msgspec.structs.replace(known, **fields).encode())

    return change


def replay(number: int, **changes: Any) -> Callable[[Any], Any]:
    def change(replays: Any) -> Any:
        changed = [*replays]
        part = changes.pop("part", None)
        if part:
            stretch = msgspec.structs.replace(changed[number].stretches[0], **part)
            changes["stretches"] = (stretch,)
        changed[number] = msgspec.structs.replace(changed[number], **changes)
        return tuple(changed)

    return change


def edited(change: Callable[[bytes], bytes], name: str = "c.json") -> Callable[[Case], None]:
    def edit(case: Case) -> None:
        path = case.at / name
        before = path.read_bytes()
        path.write_bytes(change(before))
        assert path.read_bytes() != before

    return edit


def lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Case], None]:
    return edited(lambda data: b"".join(change(data.splitlines(keepends=True))), "run/log.jsonl")


def manifest(**changes: Any) -> Callable[[Case], None]:
    """Change the checkpoint of step 4, with all hashes in its manifest made again."""

    def change(case: Case) -> None:
        known = Run(case.run).manifest(4)
        path = case.run / "checkpoints" / f"{4:012d}.json"
        path.chmod(0o600)
        path.write_bytes(encode_manifest(msgspec.structs.replace(known, **changes)))

    return change


def pack(case: Case) -> Path:
    return max((case.run / "packs").iterdir())


def record(case: Case) -> Path:
    return max((case.run / "replays").iterdir())


def replaced(case: Case, name: str = "") -> None:
    source, target = case.at / "other" / name, case.run / name
    if target.is_dir():
        shutil.rmtree(target)
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def retrained(case: Case) -> None:
    """Another run of the same program, with the same name, and the records of replays."""
    shutil.move(case.run / "replays", case.at / "replays")
    shutil.rmtree(case.run)
    trained(case.run)
    shutil.move(case.at / "replays", case.run / "replays")


def reordered(data: bytes) -> bytes:
    return (
        json.dumps(dict(reversed(json.loads(data).items())), separators=(",", ":")).encode() + b"\n"
    )


CERTIFICATE: dict[str, tuple[Callable[[Case], Any], set[str]]] = {
    "created": (forged(created="2020-01-01T00:00:00Z"), {"signature"}),
    "run": (forged(run="0" * 16), {"signature", "run"}),
    "another step": (
        forged(step=2),
        {"signature", "fingerprint", "manifest", "log", "replays"},
    ),
    "a step that is not there": (forged(step=9), {"signature", "run"}),
    "fingerprint": (forged(fingerprint="0" * 64), {"signature", "fingerprint"}),
    "manifest": (forged(manifest="0" * 64), {"signature", "manifest"}),
    "a value of the recipe": (
        forged(recipe={**RECIPE, "rate": 0.2}),
        {"signature", "recipe"},
    ),
    "the type of a value": (forged(recipe={**RECIPE, "seed": 7.0}), {"signature", "recipe"}),
    "a field of the recipe": (forged(recipe={"rate": 0.1}), {"signature", "recipe"}),
    "environment": (
        forged(environment={**ENVIRONMENT, "threads": 2}),
        {"signature", "environment"},
    ),
    "number of the line": (
        forged(log=lambda log: (log.number - 1, log.hash)),
        {"signature", "log"},
    ),
    "hash of the line": (forged(log=lambda log: (log.number, "0" * 32)), {"signature", "log"}),
    "no line": (forged(log=None), {"signature", "log"}),
    "origin": (forged(origin={"made_by": "average"}), {"signature", "origin"}),
    "verdict of a replay": (
        forged(replays=replay(0, part={"verdict": "differs"})),
        {"signature", "replays"},
    ),
    "steps of a replay": (forged(replays=replay(1, part={"stop": 400})), {"signature", "replays"}),
    "host of a replay": (forged(replays=replay(1, host="cluster")), {"signature", "replays"}),
    "digest": (
        edited(lambda data: data.replace(b'"digest":"', b'"digest":"0')),
        {"signature", "file"},
    ),
    "a byte": (edited(lambda data: data.replace(b'"seed":7', b'"seed":8')), {"signature", "file"}),
    "cut": (edited(lambda data: data[:-40]), {"signature", "file"}),
    "white space": (edited(lambda data: data.replace(b":", b": ", 1)), {"signature", "file"}),
    "order of the keys": (edited(reordered), {"signature", "file"}),
    "a key twice": (edited(lambda data: b'{"step":2,' + data[1:]), {"signature", "file"}),
    "a key more": (edited(lambda data: data[:-2] + b',"x":1}\n'), {"signature", "file"}),
}
SIGNATURE: dict[str, tuple[Callable[[Case], Any], set[str]]] = {
    "signature removed": (lambda case: case.signature.unlink(), {"signature"}),
    "signature changed": (lambda case: flip(case.signature, 200), {"signature"}),
    "signature of another text": (lambda case: case.sign("key", text=b"{}\n"), {"signature"}),
    "signature for another purpose": (lambda case: case.sign("key", "file"), {"signature"}),
    "signature by another key": (lambda case: case.sign("stranger"), {"signature"}),
}
RUN: dict[str, tuple[Callable[[Case], Any], set[str]]] = {
    "a byte of a pack": (lambda case: flip(pack(case), 8), {"run"}),
    "a pack removed": (lambda case: pack(case).unlink(), {"run"}),
    "the recipe of the checkpoint": (
        manifest(recipe={"rate": 0.2}),
        {"manifest", "recipe", "environment"},
    ),
    "the metrics of the checkpoint": (manifest(metrics={"loss": 0.0}), {"manifest"}),
    "a line of the log": (
        lines(lambda rows: [r.replace(b'"step":3', b'"step":5') for r in rows]),
        {"run"},
    ),
    "the log is cut": (lines(lambda rows: rows[:3]), {"run"}),
    "lines exchanged": (lines(lambda rows: [rows[0], rows[2], rows[1], *rows[3:]]), {"run"}),
    "the log of another run": (lambda case: replaced(case, "log.jsonl"), {"run"}),
    "another run": (retrained, {"run", "manifest", "log"}),
    "the record of a replay": (
        lambda case: edited(
            lambda data: data.replace(b'"steps":2', b'"steps":9'), str(record(case))
        )(case),
        {"run"},
    ),
    "a record removed": (lambda case: record(case).unlink(), {"replays"}),
}
CHANGES = {**CERTIFICATE, **SIGNATURE, **RUN}


def test_there_are_40_changes() -> None:
    assert len(CHANGES) == 40


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_found(case: Case, name: str) -> None:
    change, wanted = CHANGES[name]
    if not HAS_SSH and not (wanted := wanted - {"signature"}):
        pytest.skip("no ssh-keygen here: signatures are not tested")
    assert case.check() == (0, set())
    change(case)
    assert case.check() == (1, wanted)


@needs_ssh
def test_another_person_did_not_sign(case: Case) -> None:
    assert case.check("eve") == (1, {"signature"})
    assert case.check("nobody") == (1, {"signature"})
    for key, status in (("key.pub", 0), ("stranger.pub", 1), ("c.json", 2)):
        done = perdure("certify", "--check", case.file, "--public-key", case.at / key)
        assert done.exit_code == status, done.output
    case.sign("stranger")
    assert case.check("eve") == (0, set())
    unnamed = perdure("certify", "--check", case.file)
    assert unnamed.exit_code == 0
    assert "whose key that is" in unnamed.stdout


# ---------------------------------------------------------------- what is no change


def test_a_run_that_goes_on_keeps_its_certificates(case: Case) -> None:
    trained(case.run, steps=8)
    recorded(case.run, 4, 8)
    recorded(case.run, 0, 4)
    assert case.check() == (0, set())
    done = perdure("certify", "--check", case.file, "--run", case.run)
    assert "newer replays" in done.stdout


def replays_of(run: Path, step: int, file: Path) -> list[tuple[int, int, str]]:
    """Certify a step; the stretches of its replays."""
    file.unlink(missing_ok=True)
    done = perdure("certify", f"{run}@{step}", "-o", file)
    assert done.exit_code == 0, done.output
    replays = json.loads(file.read_bytes())["replays"]
    parts = [p for r in replays for p in r["stretches"]]
    return sorted((p["start"] or 0, p["stop"], p["verdict"]) for p in parts)


@pytest.mark.parametrize("every", [1, None])
def test_a_replay_counts_for_the_history_that_it_computed(
    tmp_path: Path, every: int | None
) -> None:
    run, file = tmp_path / "run", tmp_path / "c.json"
    trained(run, steps=6, every=every)
    recorded(run, 2, 6)
    assert replays_of(run, 6, file) == [(2, 6, "reproduced")]
    assert replays_of(run, 4, tmp_path / "4.json") == [(2, 4, "reproduced")]
    assert perdure("rollback", f"{run}@4").exit_code == 0
    trained(run, 2.0, steps=8, every=every)
    check = "certify", "--run", run, "--check"
    assert perdure(*check, file).exit_code == 1
    assert perdure(*check, tmp_path / "4.json").exit_code == 0
    assert replays_of(run, 8, file) == [(2, 4, "reproduced")]
    recorded(run, 4, 8, verdict="differs", step=6, what="state")
    assert replays_of(run, 8, file) == [(2, 4, "reproduced"), (4, 8, "differs")]
    assert perdure("rollback", f"{run}@4").exit_code == 0
    trained(run, steps=6, every=every)  # with the bits of the first history
    assert replays_of(run, 6, file) == [(2, 6, "reproduced")]
    assert perdure(*check, file).exit_code == 0
    again = json.loads(file.read_bytes())
    again["replays"][0]["stretches"][0]["stop"] = 5
    forged(replays=msgspec.convert(again["replays"], tuple[Replay, ...]))(Case(tmp_path))
    assert perdure(*check, file).exit_code == 1


def test_a_deleted_checkpoint_leaves_what_its_replay_reached_to_the_journal(tmp_path: Path) -> None:
    for every, result in ((1, "proved"), (None, "not checked")):
        run, file = tmp_path / f"run-{every}", tmp_path / "c.json"
        trained(run, every=every)
        recorded(run, 0, 2)
        assert replays_of(run, 4, file) == [(0, 2, "reproduced")]
        assert perdure("prune", run, "--max-to-keep", 1).exit_code == 0
        done = perdure("certify", "--check", file, "--run", run, "--json")
        assert done.exit_code == 0, done.output
        findings = {name: found for name, found, _ in json.loads(done.stdout)["findings"]}
        assert findings["replays"] == result
        assert bool(replays_of(run, 4, tmp_path / "new.json")) == (every == 1)


def test_a_signature_that_is_no_file_is_not_waited_for(case: Case) -> None:
    case.signature.unlink(missing_ok=True)
    os.mkfifo(case.signature)
    done = perdure("certify", "--check", case.file)
    assert done.exit_code == 1
    assert "found what is no file" in done.stdout


def test_a_compaction_moves_chunks_and_a_certificate_holds(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", max_to_keep=None) as manager:
        for step in (1, 2):
            state = {"frozen": np.arange(2000), "w": np.full(50_000, step)}
            manager.save(step, state)
    before = Run(tmp_path / "run").manifest(2)
    file = tmp_path / "c.json"
    assert perdure("certify", f"{tmp_path / 'run'}@2", "-o", file).exit_code == 0
    assert perdure("prune", tmp_path / "run", "--max-to-keep", 1).exit_code == 0
    assert Run(tmp_path / "run").manifest(2).packs != before.packs
    done = perdure("certify", "--check", file, "--run", tmp_path / "run")
    assert done.exit_code == 0, done.output


# ---------------------------------------------------------------- making one, and what it says


def test_a_certificate_says_what_the_run_recorded(case: Case) -> None:
    data = case.file.read_bytes()
    found = json.loads(data)
    stored = Run(case.run).manifest(4)
    assert stored.log is not None
    assert data == json.dumps(found, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    assert (found["format"], found["step"], found["run"]) == (1, 4, stored.run)
    assert found["fingerprint"] == stored.fingerprint
    assert (found["recipe"], found["environment"]) == (RECIPE, ENVIRONMENT)
    assert found["log"] == [stored.log.number, stored.log.hash]
    assert found["origin"] is None
    stretches = [(r["workers"], r["stretches"][0]["stop"]) for r in found["replays"]]
    assert sorted(stretches) == [(2, 2), (2, 4)]


def test_an_unsigned_certificate_proves_nothing_about_its_writer(case: Case) -> None:
    case.signature.unlink(missing_ok=True)
    forged(created="2020-01-01T00:00:00Z")(case)
    done = perdure("certify", "--check", case.file)
    assert done.exit_code == 0
    for text in ("not checked", "anyone can have written it", "give --run", "holds: "):
        assert text in done.stdout
    assert "steps 1 to 2 reproduced on" in done.stdout


def test_an_average_names_what_it_was_made_from(case: Case) -> None:
    mean, file = case.at / "mean", case.at / "m.json"
    assert perdure("average", f"{case.run}@2,4", "-o", mean).exit_code == 0
    assert perdure("certify", mean, "-o", file).exit_code == 0
    origin = json.loads(file.read_bytes())["origin"]
    assert [source["step"] for source in origin["sources"]] == [2, 4]
    assert perdure("certify", "--check", file, "--run", mean).exit_code == 0


@pytest.mark.parametrize(
    "name", ["a byte of a pack", "a line of the log", "the record of a replay"]
)
def test_what_is_damaged_gets_no_certificate(case: Case, name: str) -> None:
    RUN[name][0](case)
    done = perdure("certify", f"{case.run}@4", "-o", case.at / "new.json")
    assert (done.exit_code, (case.at / "new.json").exists()) == (1, False)
    assert str(case.run) in done.stderr


def test_a_pack_with_a_cut_index_gets_no_certificate(case: Case) -> None:
    """Every chunk is whole, and a restore takes the checkpoint."""
    os.truncate(pack(case), pack(case).stat().st_size - 10)
    done = perdure("certify", f"{case.run}@4", "-o", case.at / "new.json")
    assert (done.exit_code, (case.at / "new.json").exists()) == (1, False)
    assert "does not end in a pack trailer" in done.stderr
    status, failed = case.check()
    assert (status, "run" in failed) == (1, True)


def test_a_file_is_not_overwritten_and_a_key_has_to_sign(case: Case) -> None:
    done = perdure("certify", f"{case.run}@4", "-o", case.file)
    assert done.exit_code == 2
    assert "expected no file" in done.stderr
    if HAS_SSH:
        new = case.at / "new.json"
        done = perdure("certify", f"{case.run}@4", "-o", new, "--key", case.file)
        assert (done.exit_code, new.exists()) == (2, False)
        assert "expected a key" in done.stderr


def test_a_missing_ssh_keygen_is_named(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(case.at))
    key = case.at / "c.json"
    done = perdure("certify", f"{case.run}@4", "-o", case.at / "new.json", "--key", key)
    assert done.exit_code == 2
    assert "Install OpenSSH" in done.stderr
    assert not (case.at / "new.json").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "RUN@4 --check FILE",
        "RUN@4 --run RUN",
        "--check FILE -o new",
        "--check FILE --identity ada",
        "--check FILE --signers FILE",
        "--check nowhere",
        "--check FILE --run nowhere",
        "RUN@9",
    ],
)
def test_mistakes_in_the_arguments(case: Case, arguments: str) -> None:
    words = arguments.replace("RUN", str(case.run)).replace("FILE", str(case.file)).split()
    done = perdure("certify", *words)
    assert done.exit_code == 2, done.output
