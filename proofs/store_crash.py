"""Parts "crash" and "power" of the proof of the store: committed checkpoints survive."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from report import Row, row

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "store"))

from crash_cases import CASES, assert_whole, crashes, durable, left_over, operations_of, prepared
from disks import NoMount, mounted
from helpers import contents, make_leaves

from perdure.errors import StoreError
from perdure.store import Leaf, LocalStorage, PruneRequest, Run, repair, verify_run
from perdure.store.format import MAX_STEP

POWER_CUTS = 50
CONTROL_CUTS = 20
MOST_DELAY = 0.3
SIZES = (1_500_000, 3000)
# Linux ext4: shut the file system down at once; with NO_LOG_FLUSH not even the journal is written.
EXT4_IOC_SHUTDOWN = 0x8004587D
NO_LOG_FLUSH = 2


def crash_rows(work: Path) -> Iterator[Row]:
    """A crash before every operation, and the control with a sync left out."""
    for name, case in CASES.items():
        yield row(
            f"crashes ahead of an operation of: {name.replace('_', ', ')}",
            (holds(path, name) for path in crashes(work / name, case)),
        )
    yield row("orders of operations in which every sync is in place", in_order(work, None))
    yield row("the same with the directory sync left out, refused", in_order(work, "fsync_dir"))
    yield row("the same with the sync of files left out, refused", in_order(work, "fsync"))


def holds(path: Path, name: str) -> bool:
    """Whether earlier checkpoints restore with their bytes, and a check after a repair is clean."""
    try:
        assert_whole(path, CASES[name])
    except AssertionError as error:
        print(f"       {path.name} of {name}: {error}")
        return False
    return True


def in_order(work: Path, left_out: str | None) -> Iterator[bool]:
    """Whether the check of the order accepts each case, and refuses it with a sync left out.

    A case without that sync is no control: a line of the log, for example, changes no directory.
    """
    for name, case in CASES.items():
        done = operations_of(prepared(work / f"order-{left_out}-{name}", case), case).paths
        kept = [entry for entry in done if entry[0] != left_out]
        if left_out is None or kept != done:
            yield durable(kept) == (left_out is None)


def power_rows(work: Path) -> Iterator[Row]:
    """A real file system that is shut down in the middle of saves and prunes."""
    try:
        with loop_device(work / "image") as device:
            cuts = Cuts(device, work / "power", random.Random(3))
            yield row(
                f"power cuts (ext4, EXT4_IOC_SHUTDOWN) after which no committed checkpoint is lost; "
                f"{MOST_DELAY} s of saves and prunes at most",
                [cuts.cut() for _ in range(POWER_CUTS)],
            )
            print(
                f"       {cuts.saves} saves were reported as committed, {cuts.in_save} cuts fell "
                f"into a save, {cuts.in_prune} into a prune"
            )
            with mock.patch("os.fsync", return_value=None):
                lost = sum(not cuts.cut() for _ in range(CONTROL_CUTS))
            yield row(
                f"control: without syncs checkpoints are lost ({lost} of {CONTROL_CUTS} cuts)",
                [lost > 0],
            )
    except NoMount as reason:
        print(f"       skipped: power cuts: {reason}")


@contextlib.contextmanager
def loop_device(image: Path) -> Iterator[str]:
    """A block device over a file; raises `NoMount` if that is not possible."""
    if os.geteuid() != 0:
        raise NoMount("a loop device needs root")
    with image.open("wb") as file:
        file.truncate(128 * 1024 * 1024)
    device = _tool("losetup", "--find", "--show", str(image)).strip()
    try:
        yield device
    finally:
        _tool("losetup", "--detach", device)


class Cuts:
    """Power cuts on one device, with counts of the saves and prunes that they hit."""

    def __init__(self, device: str, place: Path, chance: random.Random) -> None:
        self._device = device
        self._place = place
        self._chance = chance
        self.saves = self.in_save = self.in_prune = 0

    def cut(self) -> bool:
        """Format, save and prune until the power fails; mount again: are all committed steps there?."""
        _tool("mkfs.ext4", "-q", "-F", self._device)
        promised: dict[int, dict[str, Leaf]] = {}
        with mounted(self._place, self._device):
            fd = os.open(self._place, os.O_RDONLY)
            delay = self._chance.uniform(0.0, MOST_DELAY)
            power = threading.Timer(delay, _shut_down, args=(fd,))
            power.start()
            try:
                self._work(promised)
            finally:
                power.join()
                os.close(fd)
        with mounted(self._place, self._device):
            return _all_there(self._place / "run", promised)

    def _work(self, promised: dict[int, dict[str, Leaf]]) -> None:
        # Half of every state is shared with the next state, so that prunes compact packs as well.
        shared = make_leaves(0, (200_000,))["model/layer0"]
        with (
            contextlib.suppress(OSError),
            Run(LocalStorage(self._place / "run"), create=True) as run,
        ):
            for step in range(1, 10_000):
                leaves = {"shared": shared, **make_leaves(step, SIZES)}
                try:
                    run.save(step, leaves)
                except (StoreError, OSError):
                    self.in_save += 1
                    return
                promised[step] = leaves
                self.saves += 1
                gone = run.steps()[:-2]
                for old in gone:
                    del promised[old]
                request = PruneRequest(frozenset(gone), MAX_STEP, 0, everywhere=True)
                try:
                    run.execute(run.plan(request))
                except (StoreError, OSError):
                    self.in_prune += 1
                    return


def _shut_down(fd: int) -> None:
    fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH.to_bytes(4, sys.byteorder))


def _all_there(path: Path, promised: dict[int, dict[str, Leaf]]) -> bool:
    if not promised:
        return True
    try:
        with Run(path) as run:
            for step, leaves in promised.items():
                if contents(run.load(step).leaves) != contents(leaves):
                    return False
            return verify_run(run).ok and not left_over(repair(run).report)
    except (StoreError, OSError):
        return False


def _tool(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NoMount(f"there is no `{command[0]}` here") from None
    if done.returncode:
        raise NoMount(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
