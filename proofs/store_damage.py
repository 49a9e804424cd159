"""Part "damage" of the proof of the store: every flipped bit, cut and zeroed block is found."""

from __future__ import annotations

import errno
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from report import Row, row

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "store"))

from helpers import Failing, contents, run_on, sharing_states

from damage import files
from damage import flip as flip_bit
from perdure import CheckpointManager
from perdure.checkpoint.restorer import load_good
from perdure.errors import NoGoodCheckpointError, UnreachableError
from perdure.store import Manifest, Run, verify_run
from perdure.store.format import MANIFESTS, PACKS, manifest_name, pack_step, step_of

FLIPS = 10_000
TRUNCATIONS = 1_000
BLOCKS = 1_000
BLOCK = 512
FAILURES = 1_000
CODES = (errno.EACCES, errno.EPERM, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ESTALE)


def damage_rows(work: Path) -> Iterator[Row]:
    """Damage that is found and survived, and failing reads that are no damage."""
    patient = Patient(work / "run")
    for what, times, damage in (
        ("flipped bits", FLIPS, flip),
        ("truncations", TRUNCATIONS, cut),
        ("zeroed blocks", BLOCKS, zero),
    ):
        results = [patient.suffer(damage) for _ in range(times)]
        yield row(f"{what} in packs and manifests that the check finds", (f for f, _ in results))
        yield row(f"restores after {what} that took the newest good one", (r for _, r in results))
    yield row("control: the same files without damage pass the check", [verify_run(patient.run).ok])
    failing = [fails(patient, seed) for seed in range(FAILURES)]
    yield row("reads that fail and are neither quarantined nor skipped", (f for f, _ in failing))
    yield row("control: a flipped bit at the same place is both", (c for _, c in failing))


def fails(patient: Patient, seed: int) -> tuple[bool, bool]:
    """Whether a failing read of the newest checkpoint raises and changes nothing; and whether a flipped
    bit in the same file makes a manager quarantine the checkpoint and restore an older one."""
    chance = random.Random(seed)
    newest = max(patient.manifests)
    manifest = patient.manifests[newest]
    packs = [pack.name for pack in manifest.packs if pack_step(pack.name) == newest]
    name = chance.choice([manifest_name(newest), *(PACKS + pack for pack in packs)])
    before = files(patient.path)
    storage = Failing(patient.path, name, chance.choice(CODES))
    with CheckpointManager(storage) as manager:
        manager.claim()
        try:
            manager.restore()
            raised = False
        except UnreachableError:
            raised = storage.fired > 0
    kept = raised and files(patient.path) == before
    flip_bit(patient.path / name, chance.randrange(100))
    with CheckpointManager(patient.path) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        manager.claim()
        skipped = manager.restore().step < newest
        aside = newest not in manager.all_steps()
    patient.heal(before)
    return kept, skipped and aside


class Patient:
    """A run directory whose files are damaged one at a time."""

    def __init__(self, path: Path) -> None:
        with run_on(path) as run:
            for step, leaves in sharing_states().items():
                run.save(step, leaves)
        self.run = Run(path)
        self.path = path
        self._chance = random.Random(4)
        self.manifests = {step: self.run.manifest(step) for step in self.run.steps()}
        self._files = {
            name: (path / name).read_bytes()
            for prefix in (PACKS, MANIFESTS)
            for name in self.run.storage.list(prefix)
        }

    def heal(self, wanted: dict[str, bytes]) -> None:
        """Restore all files."""
        for name in files(self.path).keys() - wanted.keys():
            (self.path / name).unlink()
        for name, data in wanted.items():
            (self.path / name).write_bytes(data)

    def suffer(self, damage) -> tuple[bool, bool]:
        """Damage a file; whether a check finds it, and a restore takes the newest good checkpoint."""
        # By size, so that all bytes are equally likely.
        names = list(self._files)
        (name,) = self._chance.choices(names, [len(self._files[file]) for file in names])
        whole = self._files[name]
        data, start, stop = damage(whole, self._chance)
        (self.path / name).write_bytes(data)
        detected = not verify_run(self.run).ok
        sound = [step for step, man in self.manifests.items() if not needs(man, name, start, stop)]
        try:
            loaded = load_good(self.run).loaded
            assert loaded is not None
            step = loaded.manifest.step
            right = step == max(sound, default=None) and contents(loaded.leaves) == contents(
                sharing_states()[step]
            )
        except NoGoodCheckpointError:
            right = not sound
        (self.path / name).write_bytes(whole)
        return detected, right


def needs(manifest: Manifest, name: str, start: int, stop: int) -> bool:
    """Whether a checkpoint reads any of the bytes from `start` to `stop` of a file."""
    if step_of(name) is not None:
        return step_of(name) == manifest.step
    return any(
        PACKS + manifest.packs[chunk.pack].name == name
        and chunk.offset < stop
        and start < chunk.offset + chunk.length
        for leaf in manifest.leaves
        for chunk in leaf.chunks
    )


def flip(whole: bytes, chance: random.Random) -> tuple[bytes, int, int]:
    """Flip one bit; return the data and the range of damaged bytes."""
    bit = chance.randrange(len(whole) * 8)
    data = bytearray(whole)
    data[bit // 8] ^= 1 << bit % 8
    return bytes(data), bit // 8, bit // 8 + 1


def cut(whole: bytes, chance: random.Random) -> tuple[bytes, int, int]:
    """Cut off everything from a random offset on."""
    keep = chance.randrange(len(whole))
    return whole[:keep], keep, len(whole)


def zero(whole: bytes, chance: random.Random) -> tuple[bytes, int, int]:
    """Zero one block of the disk."""
    start = chance.randrange(-(-len(whole) // BLOCK)) * BLOCK
    stop = min(start + BLOCK, len(whole))
    assert any(whole[start:stop])
    return whole[:start] + bytes(stop - start) + whole[stop:], start, stop
