"""Machines on this machine: name spaces with a network, a host name and processes of their own.

They share the disk, and a switch connects them to each other and to this process, which is the host
"head". `lose` takes a machine away as a loss of power does: nothing that ran there is left, and
nothing tells the others. It needs `unshare`, `nsenter` and `ip`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_INSIDE = "PERDURE_MACHINES_INSIDE"
_NETWORK = "10.77.0"
HEAD = "head"
HEAD_ADDRESS = f"{_NETWORK}.254"


def enter() -> None:
    """Start this program again in name spaces of its own, where it may make machines."""
    if _INSIDE in os.environ:
        return
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--net", "--uts", "--mount", sys.executable, *sys.argv]
    os.execvpe(command[0], command, {**os.environ, _INSIDE: "1"})


class Machine:
    """The host node0, node1, ...: its first process holds its name spaces."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"node{number}"
        self.address = f"{_NETWORK}.{number + 1}"
        self._cable = f"cable{number}"
        self.boot()

    def boot(self) -> None:
        """Start the machine, or start it again after `lose`."""
        spaces = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc"]
        setup = f"hostname {self.name} && ip link set lo up && echo && exec cat"
        self._outside = subprocess.Popen(
            ["unshare", *spaces, "sh", "-c", setup], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._outside.stdout is not None
        if self._outside.stdout.readline() != b"\n":
            raise RuntimeError(f"{self.name} could not be made")
        children = Path(f"/proc/{self._outside.pid}/task/{self._outside.pid}/children")
        self.pid = int(children.read_text())
        ends = ["type", "veth", "peer", "name", "eth0", "netns", str(self.pid)]
        _ip("link", "add", "name", self._cable, *ends)
        _ip("link", "set", self._cable, "master", "switch", "up")
        for words in (f"addr add {self.address}/24 dev eth0", "link set eth0 up"):
            subprocess.run(self.inside(["ip", *words.split()]), check=True)

    def inside(self, command: list[str], directory: Path | None = None) -> list[str]:
        """The command that runs `command` on this machine, by default in this directory."""
        spaces = ["--net", "--uts", "--mount", "--pid"]
        return [
            "nsenter",
            "--target",
            str(self.pid),
            *spaces,
            f"--wd={directory or Path.cwd()}",
            *command,
        ]

    def lose(self, *, silent: bool) -> None:
        """Kill all that runs here. `silent`: without the cable, so that no connection is closed."""
        if silent:
            _ip("link", "set", self._cable, "down")
        os.kill(self.pid, signal.SIGKILL)  # and with it the kernel kills everything of the machine
        self._outside.wait()
        # The kernel takes the cable away with the machine, a moment later.
        subprocess.run(["ip", "link", "del", self._cable], check=False, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        """End the machine, if it is not lost."""
        if self._outside.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self._outside.wait()


@contextmanager
def machines(count: int, work: Path) -> Iterator[list[Machine]]:
    """The machines, connected; /etc/hosts of this process has their names."""
    hosts = [f"{_NETWORK}.{number + 1} node{number}" for number in range(count)]
    names = work / "hosts"
    names.write_text("\n".join(["127.0.0.1 localhost", f"{HEAD_ADDRESS} {HEAD}", *hosts, ""]))
    subprocess.run(["mount", "--bind", str(names), "/etc/hosts"], check=True)
    subprocess.run(["hostname", HEAD], check=True)
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "name", "switch", "type", "bridge")
    _ip("addr", "add", f"{HEAD_ADDRESS}/24", "dev", "switch")
    _ip("link", "set", "switch", "up")
    made = [Machine(number) for number in range(count)]
    try:
        yield made
    finally:
        for machine in made:
            machine.close()
        _ip("link", "del", "switch")
        subprocess.run(["umount", "/etc/hosts"], check=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
