"""Certificates: one file on one checkpoint, which can be signed, and the check of such a file.

Invariant: a certificate is canonical JSON, and its signature is over these bytes.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from perdure.checkpoint.address import StoredCheckpoint, checkpoint_at, open_run, with_advice
from perdure.errors import ArgumentError, CorruptionError, StepNotFoundError, StoreError
from perdure.look.leaf_reader import origin
from perdure.look.tables import Shown, Table
from perdure.store import Run, Storage
from perdure.store.failures import read_error
from perdure.store.format import Natural, hash_bytes, span_text, time_text
from perdure.store.log import LineReference, log_place, read_log
from perdure.store.manifest import Manifest, RecipeValue, fingerprint
from perdure.store.run_log import read_journal
from perdure.store.verify import Packs
from perdure.text import few

States = Mapping[int, tuple[str | None, str | None]]
"""By step the fingerprint of its checkpoint and the digest in its line of the journal."""

Finding = tuple[str, str, str]
"""What was checked; `proved`, `FAILED` or `not checked`; the evidence."""

_SETTINGS = ("jax.", "tensorflow.", "torch.")  # of frameworks that the program has imported


class ReplayedSteps(Struct, frozen=True, omit_defaults=True):
    """The steps after `start` (None: a fresh state) up to `stop`, and the verdict of their replay.

    A record has the first `step` that differs, too, and what was `seen` (`StretchResult.seen`).
    """

    start: Natural | None
    stop: Natural
    verdict: str
    step: Natural | None = None
    seen: tuple[tuple[Natural, str | None, str | None], ...] = ()

    def in_history(self, states: States, last: int, *, trusted: bool) -> ReplayedSteps | None:
        """The steps up to `last` that are of the history with these states: up to the last of them
        that was seen, or, if `trusted`, up to the first that is another one; None for no step."""
        stop = -1
        for step, *seen in self.seen:
            if step > last:
                break
            pairs = zip(states.get(step, ()), seen, strict=False)
            are_equal = {one == other for one, other in pairs if None not in (one, other)}
            if False in are_equal:
                break
            stop = step if trusted or are_equal else stop
        if stop <= (self.start or 0):
            return None
        is_before = self.step is None or stop < self.step
        return ReplayedSteps(self.start, stop, "reproduced" if is_before else self.verdict)


class Replay(Struct, frozen=True):
    """What the record of a replay says, with its name and its hash."""

    host: str
    version: str
    workers: Natural
    devices: Natural | None
    stretches: tuple[ReplayedSteps, ...]
    name: str = ""
    hash: str = ""


class Certificate(Struct, frozen=True):
    """What a run directory says about one checkpoint: see "A certificate" in docs/JOURNAL.md."""

    created: str
    run: str
    step: Natural
    fingerprint: str
    manifest: str
    recipe: dict[str, RecipeValue]
    environment: dict[str, RecipeValue]
    log: LineReference | None
    origin: dict[str, Any] | None
    replays: tuple[Replay, ...]
    digest: str = ""
    format: Literal[1] = 1

    def encode(self) -> bytes:
        """The canonical bytes; `digest` is the hash of the same with an empty text in its place."""
        digest = hash_bytes(_json(msgspec.structs.replace(self, digest="")))
        return _json(msgspec.structs.replace(self, digest=digest)) + b"\n"


@dataclass(frozen=True, repr=False)
class CertificateCheck(Shown):
    """What was checked, and what no certificate can prove."""

    certificate: str
    holds: bool
    findings: tuple[Finding, ...]
    not_proved: tuple[str, ...]

    def _blocks(self) -> list[str | Table]:
        rows = [*self.findings, *(("", "not proved", sentence) for sentence in self.not_proved)]
        ending = "holds" if self.holds else "DOES NOT HOLD"
        return [Table(("what", "result", "evidence"), rows), f"{ending}: {self.certificate}"]


def certify(checkpoint: StoredCheckpoint, output: Path | None, key: Path | None) -> Path:
    """Verify every byte of a checkpoint, and write its certificate and signature; returns the file.

    Raises CorruptionError (the checkpoint, the log, the record of a replay), UnreachableError, and
    ArgumentError: there is such a file, it cannot be written, or the key cannot sign.
    """
    name = os.path.basename(checkpoint.run.where.rstrip("/"))
    path = output or Path(f"{name}-{checkpoint.step}.certificate.json")
    for file in filter(os.path.lexists, (path, f"{path}.sig")):
        raise ArgumentError(f"{file}: expected no file, found one. Name another by -o.")
    data = certificate_of(checkpoint).encode()
    try:
        if key is not None:
            is_signed, signature, text = _ssh_keygen(data, "sign", "-f", key)
            if not is_signed:
                advice = "`ssh-keygen -t ed25519 -f FILE` makes one."
                raise ArgumentError(f"{key}: expected a key that signs, found: {text}. {advice}")
            Path(f"{path}.sig").write_bytes(signature)
        path.write_bytes(data)
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be written: {error}. Name another by -o.") from error
    return path


def certificate_of(checkpoint: StoredCheckpoint) -> Certificate:
    """The certificate of a checkpoint, of which every byte is verified first; raises as `certify`."""
    run, manifest = checkpoint.run, checkpoint.manifest
    run.require_finished()
    run.log.view.require({} if manifest.log is None else {manifest.step: manifest.log})
    packs = Packs(run)
    try:
        packs.require(manifest)
        for pack in manifest.packs:
            if why := packs.damaged.get(pack.name):
                raise CorruptionError(why)
        replays = tuple(_replays(run, manifest.step))
    except CorruptionError as error:
        raise CorruptionError(with_advice(error, run)) from error
    except OSError as error:
        raise read_error(error, run.where) from error
    recipe, environment = split_recipe(manifest)
    # A compaction changes the places of chunks, and a copy has no line of the log.
    rest = msgspec.structs.replace(manifest, packs=(), leaves=(), process_leaves=(), log=None)
    own = ((leaf.path, leaf.dtype, leaf.shape, leaf.hashes()) for leaf in manifest.process_leaves)
    return Certificate(
        created=time_text(time.time()),
        run=manifest.run,
        step=manifest.step,
        fingerprint=manifest.fingerprint,
        manifest=hash_bytes(_json([rest, fingerprint(own)])),
        recipe=recipe,
        environment=environment,
        log=manifest.log,
        origin=origin(manifest),
        replays=replays,
    )


def split_recipe(manifest: Manifest) -> tuple[dict[str, RecipeValue], dict[str, RecipeValue]]:
    """The recipe of a checkpoint without the fields of the environment, and those fields."""
    from perdure.checkpoint.recipe import ENVIRONMENT_FIELDS  # takes long to import

    recipe, environment = {}, {}
    for name, value in manifest.recipe.items():
        is_setting = name in ENVIRONMENT_FIELDS or name.startswith(_SETTINGS)
        (environment if is_setting else recipe)[name] = value
    return recipe, environment


def _replays(run: Run, step: int, known: Iterable[Replay] | None = None) -> Iterator[Replay]:
    """The records of replays with the steps that led to the checkpoint of `step`, the oldest first.

    Of `known` ones, those steps of which nothing in the run says that they are of another history.
    """
    records, storage = list[Replay](), run.storage
    for name in replay_names(storage):
        place, lines = f"{storage.where}/{log_place(storage, name)}", [*read_log(storage, name)]
        if len(lines) != 1:
            found = f"expected one line, the record of a replay, found {len(lines)}"
            raise CorruptionError(f"{place}: {found}. Bring it back from a copy, or remove it.")
        replay = lines[0].decode(msgspec.json.Decoder(Replay), place)
        records.append(msgspec.structs.replace(replay, name=name, hash=lines[0].hash))
    states = states_seen(run, (part for replay in records for part in replay.stretches))
    stops = {(r.name, part.start): part.stop for r in known or () for part in r.stretches}
    for replay in records:
        parts = [
            part.in_history(states, min(step, stop), trusted=known is not None)
            for part in replay.stretches
            if (stop := stops.get((replay.name, part.start), -1 if known is not None else step)) > 0
        ]
        if stretches := tuple(filter(None, parts)):
            yield msgspec.structs.replace(replay, stretches=stretches)


def replay_names(storage: Storage) -> list[str]:
    """The names of the records of replays, the oldest first."""
    names = {re.sub(r"(/\d+\.json|\.jsonl)$", "", name) for name in storage.list("replays/")}
    return sorted(names)


def states_seen(run: Run, stretches: Iterable[ReplayedSteps]) -> States:
    """What the run has now of the states that replays have seen; raises as `read_journal`."""
    steps = {step for part in stretches for step, *_ in part.seen}
    fingerprints, digests = dict[int, str](), dict[int, str]()
    for step in steps.intersection(run.steps()):
        with suppress(CorruptionError, StepNotFoundError):  # `perdure verify` reports damage
            fingerprints[step] = run.manifest(step).fingerprint
    for entry in read_journal(run.storage) if steps else ():
        if entry.step in steps:
            digests[entry.step] = entry.state
    return {step: (fingerprints.get(step), digests.get(step)) for step in steps}


def check_certificate(
    path: Path, run: str | None, signers: Path | None, identity: str | None, public_key: Path | None
) -> CertificateCheck:
    """Check a certificate: the file, its signature, and what the run directory `run` has now.

    The signature has to be that of `identity` in the file `signers` ("ALLOWED SIGNERS" of ssh-keygen),
    or of `public_key`; without both it only has to fit the file. Raises ArgumentError, NotARunError.
    """
    data, found, certificate = path.read_bytes(), "other bytes", None
    try:
        certificate = msgspec.json.decode(data, type=Certificate)
        certificate = certificate if certificate.encode() == data else None
    except (ValueError, RecursionError, OverflowError) as error:
        found = str(error)
    signature = _signature(path, data, signers, identity, public_key)
    missing = [
        "that the training was honest, and its recipe, its environment and its data are what is stated",
        "when it was made: the time is that of its maker's clock",
    ]
    if certificate is None:
        text = f"{path}: expected what was written, found: {found}. Ask for the certificate again."
        findings = [("file", "FAILED", text), signature]
    else:
        text = f"of step {certificate.step}, as it was written"
        findings = [("file", "proved", text), signature]
        findings += _compared(certificate, run) if run is not None else ()
        done = _replayed(certificate.replays)
        missing.append(f"that the steps were computed so; replays, by their own records: {done}")
    if signature[1] == "not checked":
        missing.append("who wrote it: without a signature anyone can have written it")
    elif signers is None and public_key is None:
        missing.append("whose key that is: give --signers and --identity, or --public-key")
    if run is None:
        missing.append("that a run has this checkpoint: give --run")
    holds = all(result != "FAILED" for _, result, _ in findings)
    return CertificateCheck(str(path), holds, tuple(findings), tuple(missing))


def _signature(
    path: Path, data: bytes, signers: Path | None, identity: str | None, public_key: Path | None
) -> Finding:
    wanted = f"of {public_key or identity or 'this file'}"
    with tempfile.TemporaryDirectory(prefix="perdure-certify-") as temporary:
        if public_key is not None:
            if not (key := public_key.read_bytes()).startswith((b"ssh-", b"ecdsa-", b"sk-")):
                raise ArgumentError(
                    f"{public_key}: expected a public key, found none. Name a .pub."
                )
            identity, signers = "key", Path(temporary, "signers")
            signers.write_bytes(b"key " + key)
        if not os.path.isfile(f"{path}.sig"):
            is_there = os.path.lexists(f"{path}.sig")
            if signers is None and not is_there:
                return "signature", "not checked", "there is none"
            found = "what is no file" if is_there else "no file"
            text = f"{path}.sig: expected the signature {wanted}, found {found}. Ask for it."
            return "signature", "FAILED", text
        who = ["check-novalidate"]
        if signers is not None:
            who = ["verify", "-f", str(signers), "-I", str(identity)]
        is_good, _, text = _ssh_keygen(data, *who, "-s", f"{path}.sig")
    if is_good:
        return "signature", "proved", text
    text = f"{path}.sig: expected the signature {wanted}, found: {text}. Ask for the certificate again."
    return "signature", "FAILED", text


def _compared(certificate: Certificate, where: str) -> Iterator[Finding]:
    """A finding on each field of a certificate, by one that is made again from the run directory."""
    run = open_run(where)
    try:
        now = certificate_of(checkpoint_at(run, certificate.step))
        trusted = tuple(_replays(run, certificate.step, certificate.replays))
    except StoreError as error:
        yield "run", "FAILED", str(error)
        return
    evidence = {
        "fingerprint": "computed again from all bytes",
        "log": "no line up to this one was changed" if now.log else "the checkpoint names none",
        "replays": _replayed(certificate.replays),
    }
    known = {replay.name for replay in certificate.replays}
    if newer := tuple(replay for replay in now.replays if replay.name not in known):
        yield "newer replays", "not checked", f"the run has {len(newer)}: {_replayed(newer)}"
    now = msgspec.structs.replace(now, replays=tuple(r for r in now.replays if r.name in known))
    for name in Certificate.__struct_fields__[1:-2]:
        ours, theirs = (_json(getattr(side, name)).decode() for side in (certificate, now))
        if ours == theirs:
            yield name, "proved", evidence.get(name, "as in the run")
        elif name == "replays" and certificate.replays == trusted:
            text = "as recorded; the run has no checkpoint or line any more of a state they reached"
            yield name, "not checked", text
        else:
            text = f"{where}: expected {ours}, found {theirs}. It was changed, or is another run."
            yield name, "FAILED", text


def _replayed(replays: tuple[Replay, ...]) -> str:
    texts = [
        f"{span_text((part.start or 0) + 1, part.stop)} {part.verdict} on {replay.host}"
        for replay in replays
        for part in replay.stretches
    ]
    return few(texts) or "none"


def _ssh_keygen(data: bytes, command: str, *words: str | Path) -> tuple[bool, bytes, str]:
    """Whether it succeeded, what it wrote, and that or the error as one line."""
    # The namespace: a signature that the key made for anything else does not count.
    line = ["ssh-keygen", "-Y", command, "-n", "perdure", *words]
    try:
        done = subprocess.run(line, input=data, capture_output=True, check=False)
    except FileNotFoundError:
        text = "ssh-keygen: not found. Install OpenSSH, such as by `apt install openssh-client`."
        raise ArgumentError(text) from None
    is_done = done.returncode == 0
    said = done.stdout if is_done else done.stderr or done.stdout
    lines = said.decode(errors="replace").splitlines()
    return is_done, done.stdout, "; ".join(lines).strip(" .")


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")
