"""examples/cluster/train.sbatch under a real Slurm: a controller, and a slurmd on each of two machines.

The job is warned at its time limit, preempted by another job, and loses a machine; each time it is
queued again, and it ends with the fingerprint of one undisturbed process. A cancelled job stays ended.
A part of `make proof-nodes`. It needs slurmctld, slurmd and the commands of Slurm: installed, or
unpacked below $PERDURE_SLURM (on Debian `apt-get download` and `dpkg-deb -x` for slurmctld, slurmd,
slurm-client, slurm-wlm-basic-plugins and what they need).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from machines import HEAD, HEAD_ADDRESS, Machine

from perdure.store import Run
from report import Row, row

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "cluster"
FAULTY = ROOT / "tests" / "launch" / "faulty.py"
STEPS, WARNED_AT, PREEMPTED_AT, LOST_AT = 60, 13, 25, 37
LIMIT_S = 240

CONFIGURATION = """
ClusterName=proof
SlurmctldHost={head}({address})
SlurmUser=root
AuthType=auth/none
CredType=cred/none
# A requeued job begins when its credential has expired: after two minutes by default.
AuthInfo=cred_expire=5
StateSaveLocation={work}/state
SlurmdSpoolDir={work}/spool-%n
SlurmctldPidFile={work}/slurmctld.pid
SlurmdPidFile={work}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=20
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node[0-1] CPUs=8 RealMemory=1000
PartitionName=low Nodes=node[0-1] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=node[0-1] PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """A controller on the head, and a slurmd on every machine."""

    def __init__(self, work: Path, nodes: list[Machine], unpacked: Path | None) -> None:
        self.work = work
        self._daemons = ExitStack()
        self.environ = {**os.environ, "SLURM_CONF": str(work / "slurm.conf")}
        self._programs = "/usr/sbin"
        text = CONFIGURATION.format(head=HEAD, address=HEAD_ADDRESS, work=work)
        if unpacked is not None:
            # Not where Slurm was built for.
            library = next(unpacked.glob("usr/lib/*/slurm-wlm"))
            self._programs = str(unpacked / "usr" / "sbin")
            self.environ["LD_LIBRARY_PATH"] = f"{library.parent}:{library}"
            self.environ["PATH"] = f"{unpacked}/usr/bin:{os.environ['PATH']}"
            text += f"PluginDir={library}\n"
        (work / "slurm.conf").write_text(text)
        (work / "state").mkdir()
        self._start([self._program("slurmctld"), "-D"])
        for node in nodes:
            self.start(node)

    def start(self, node: Machine) -> None:
        """Start the slurmd of a machine."""
        (self.work / f"spool-{node.name}").mkdir(exist_ok=True)
        stepd = ["-d", self._program("slurmstepd")]
        self._start(node.inside([self._program("slurmd"), "-D", "-N", node.name, *stepd]))

    def ask(self, command: str) -> str:
        """What a command of Slurm writes."""
        done = subprocess.run(
            shlex.split(command),
            env=self.environ,
            cwd=self.work,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.strip() or done.stderr.strip()

    def job(self, number: str) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        words = self.ask(f"scontrol show job {number}").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def await_job(self, number: str, met: Callable[[dict[str, str]], bool]) -> dict[str, str]:
        """The fields of the job when they are as wished, or after the limit."""
        until = time.monotonic() + LIMIT_S
        while not met(fields := self.job(number)) and time.monotonic() < until:
            time.sleep(0.5)
        return fields

    def close(self) -> None:
        self._daemons.close()

    def _program(self, name: str) -> str:
        path = Path(self._programs, name)
        return str(path if path.exists() else path.with_name(f"{name}-wlm"))

    def _start(self, command: list[str]) -> None:
        log = (self.work / "daemons.log").open("a")
        daemon = subprocess.Popen(command, env=self.environ, stdout=log, stderr=log)
        self._daemons.callback(daemon.wait)
        self._daemons.callback(daemon.kill)


def unpacked() -> Path | None:
    """$PERDURE_SLURM; None for an installed Slurm. Raises LookupError if there is none."""
    if named := os.environ.get("PERDURE_SLURM"):
        return Path(named)
    if not Path("/usr/sbin/slurmctld").exists() or shutil.which("sbatch") is None:
        raise LookupError("no slurmctld and no $PERDURE_SLURM")
    return None


def rows(work: Path, nodes: list[Machine], expected: str) -> Iterator[Row]:
    """The rows; `work` is an empty directory, `expected` the fingerprint of step STEPS."""
    try:
        slurm = Slurm(work, nodes, unpacked())
    except LookupError as error:
        print(f"       Slurm: left out, {error}")
        return
    try:
        up = [_until(lambda: slurm.ask("sinfo -h -t idle -o %D") == "2")]
        yield row("Slurm: a controller and two machines", up)
        yield from _disturbed(slurm, nodes, expected)
        yield from _cancelled(slurm)
    finally:
        slurm.close()


def _disturbed(slurm: Slurm, nodes: list[Machine], expected: str) -> Iterator[Row]:
    faults = [f"{step}:0:SIGCONT:launcher" for step in (WARNED_AT, PREEMPTED_AT)]
    faults.append(f"{LOST_AT}:1:SIGSTOP:self")
    job = _submit(slurm, "disturbed", faults)
    run = slurm.work / "disturbed"
    _until(lambda: _marked(slurm, WARNED_AT))
    # Less than the two minutes of --signal=TERM@120 are left then.
    minutes = int(slurm.job(job)["RunTime"].split(":")[1]) + 2
    slurm.ask(f"scontrol update JobId={job} TimeLimit={minutes}")
    slurm.await_job(job, lambda job: job.get("Restarts") == "1")
    yield row(
        "Slurm: warned of the time limit, saved at that step, queued again",
        [_steps(run)[-1:] == [WARNED_AT]],
    )
    slurm.ask(f"scontrol update JobId={job} TimeLimit=60")
    _until(lambda: _marked(slurm, PREEMPTED_AT))
    other = slurm.ask("sbatch --parsable -N2 --exclusive -p high -o /dev/null --wrap true")
    slurm.await_job(job, lambda job: job.get("Restarts") == "2")
    saved = _steps(run)[-1:] == [PREEMPTED_AT]
    came = slurm.await_job(other, lambda job: job.get("JobState") == "COMPLETED")
    yield row(
        "Slurm: preempted by another job, saved at that step, queued again",
        [saved, came.get("JobState") == "COMPLETED"],
    )
    _until(lambda: _marked(slurm, LOST_AT))
    nodes[1].lose(silent=True)
    slurm.await_job(job, lambda job: job.get("Restarts") == "3")
    yield row("Slurm: lost a machine, queued again", [slurm.job(job).get("Restarts") == "3"])
    nodes[1].boot()
    slurm.start(nodes[1])
    ended = slurm.await_job(job, lambda job: job.get("JobState") in ("COMPLETED", "FAILED"))
    done = STEPS in _steps(run) and Run(run).manifest(STEPS).fingerprint == expected
    yield row(
        "Slurm: the machine is back, the job is done: the fingerprint of one undisturbed process",
        [ended.get("JobState") == "COMPLETED", done],
    )
    log = (slurm.work / f"slurm-{job}.out").read_text()
    if not done:
        print(log[-4000:])
    yield row("Slurm: one log of all attempts", [log.count("processes, from step") >= 4])


def _cancelled(slurm: Slurm) -> Iterator[Row]:
    shutil.rmtree(slurm.work / "marks")
    job = _submit(slurm, "cancelled", [f"{WARNED_AT}:0:SIGCONT:launcher"])
    _until(lambda: _marked(slurm, WARNED_AT))
    slurm.ask(f"scancel {job}")
    fields = slurm.await_job(job, lambda job: job.get("JobState") == "CANCELLED")
    # The script would have asked for a requeue by the time that another job has run.
    after = slurm.ask("sbatch --parsable -N2 --exclusive -o /dev/null --wrap true")
    slurm.await_job(after, lambda job: job.get("JobState") == "COMPLETED")
    fields = slurm.job(job)
    held = [fields.get("JobState") == "CANCELLED", fields.get("Restarts") == "0"]
    yield row("Slurm: control: a cancelled job is not queued again", held)


def _submit(slurm: Slurm, run: str, faults: list[str]) -> str:
    """The number of the job of train.sbatch with the faults."""
    work = slurm.work
    (work / "marks").mkdir(exist_ok=True)
    program = f"import runpy\nrunpy.run_path({str(FAULTY)!r}, run_name='__main__')\n"
    (work / "train.py").write_text(program)
    # A link to the Python of a virtual environment would not find its packages.
    (work / "bin").mkdir(exist_ok=True)
    python = work / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    arguments = ["marks", *faults, "--", run, "--steps", str(STEPS)]
    environ = f"PATH={work}/bin:{slurm.environ['PATH']}"
    options = "--nodes=2 --time=60 --parsable"
    return slurm.ask(
        f"env {environ} sbatch {options} {EXAMPLE / 'train.sbatch'} {shlex.join(arguments)}"
    )


def _marked(slurm: Slurm, step: int) -> bool:
    return any((slurm.work / "marks").glob(f"{step}-*"))


def _steps(run: Path) -> list[int]:
    return Run(run).steps() if run.exists() else []


def _until(met: Callable[[], bool]) -> bool:
    until = time.monotonic() + LIMIT_S
    while not (held := met()) and time.monotonic() < until:
        time.sleep(0.2)
    return held
