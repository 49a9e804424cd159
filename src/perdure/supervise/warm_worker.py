"""`WarmWorkers`: processes that have imported their frameworks before they are needed.

Invariant: a spare is a process of its own from its start, never a fork of one that has threads; it gets
its part (arguments and variables) once, and runs the program as `python` would. What it has done before
is importing the modules that were named, and nothing else.

The program of such a process is `warm_worker_main`, which nothing imports.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from perdure import heartbeats
from perdure.errors import LaunchError
from perdure.supervise.worker_environment import ATTEMPT, DESCRIPTIONS


class WarmWorkers:
    """One spare for each place, for a command that is `python script.py ...` or `python -m module ...`.

    `warm` names the modules to import. `prepare` starts the processes and `take` hands one out; `say`
    is called for a process whose imports failed.
    """

    def __init__(
        self, command: Sequence[str], warm: Sequence[str], say: Callable[[str], None] = print
    ) -> None:
        python = os.path.basename(command[0]).startswith("python")
        if warm and not (
            python
            and len(command) > 1
            and (command[1].endswith(".py") or (command[1] == "-m" and len(command) > 2))
        ):
            raise LaunchError(
                "warm workers need a command of the form python script.py or python -m module, found "
                f"{' '.join(command[:3])}"
            )
        self._command = list(command)
        self._warm = list(warm)
        self._say = say
        self._ready: dict[int, subprocess.Popen[bytes]] = {}
        self._began: dict[int, dict[str, str]] = {}

    def prepare(self, place: int, environment: Mapping[str, str]) -> None:
        """Start the spare of `place`, if it has none; `environment` is that of the worker there now."""
        if not self._warm or (place in self._ready and self._ready[place].poll() is None):
            return
        self.drop(place)
        self._began[place] = _lasting(environment)
        self._ready[place] = subprocess.Popen(
            [self._command[0], "-m", "perdure.supervise.warm_worker_main", *self._warm],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._began[place],
            start_new_session=True,
        )

    def take(self, place: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
        """The spare of `place`, now running the program; None where there is none that lives, or where
        it imported under other variables than these."""
        spare = self._ready.pop(place, None)
        if spare is None:
            return None
        assert spare.stdin is not None
        if spare.poll():
            self._explain(place, spare)
        part = {"arguments": self._command[1:], "environment": dict(environment)}
        try:
            if spare.poll() is None and self._began[place] == _lasting(environment):
                spare.stdin.write(json.dumps(part).encode() + b"\n")
                spare.stdin.close()
                return spare
        except BrokenPipeError:
            pass
        self._end(spare)
        return None

    def drop(self, place: int) -> None:
        """End the spare of `place`."""
        if (spare := self._ready.pop(place, None)) is not None:
            self._end(spare)

    def close(self) -> None:
        """End all."""
        for place in list(self._ready):
            self.drop(place)

    @property
    def pids(self) -> frozenset[int]:
        """Those that wait."""
        return frozenset(spare.pid for spare in self._ready.values())

    def _explain(self, place: int, spare: subprocess.Popen[bytes]) -> None:
        assert spare.stdout is not None
        lines = spare.stdout.read().decode(errors="replace").strip().splitlines()
        self._say(
            f"the spare of place {place} ended while it imported {', '.join(self._warm)}: "
            f"{lines[-1] if lines else f'status {spare.returncode}'}"
        )

    @staticmethod
    def _end(spare: subprocess.Popen[bytes]) -> None:
        spare.kill()
        spare.wait()
        for stream in (spare.stdin, spare.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    """What stays the same from one attempt to the next. Without the heartbeat: a spare says nothing."""
    passing = {*DESCRIPTIONS, ATTEMPT, heartbeats.VARIABLE}
    return {name: value for name, value in environment.items() if name not in passing}
