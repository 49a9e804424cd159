"""Any training program under submitit: a signal before the time limit saves and queues the job again.

    python submit.py --workers 4 --minutes 240 -- python train.py /shared/runs/mine
    python submit.py --cluster local --workers 2 -- python train.py runs/mine

The command runs in the directory of the submission: here, that of train.py.

submitit sends SIGUSR2 before the time limit and calls `checkpoint`, which passes it on as the SIGTERM
that perdure listens to, and hands back what to submit next: the same command, which resumes from there.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

import submitit
from submitit.helpers import DelayedSubmission

EXIT_PREEMPTED = 75  # perdure.EXIT_PREEMPTED: saved, start me again


class Training:
    """One task of the job, which runs the command in a new process."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        # For the tasks of the local executor: a new port for each attempt, the same in all tasks.
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def __call__(self) -> None:
        self._process = subprocess.Popen(
            self.command,
            env={**os.environ, **self._group()},
            # Slurm may signal every process of a task; only submitit handles SIGUSR2.
            preexec_fn=lambda: signal.signal(signal.SIGUSR2, signal.SIG_IGN),
        )
        status = _status(self._process)
        if status == EXIT_PREEMPTED and _is_preempted(submitit.JobEnvironment()):
            # Slurm sent SIGTERM to every process of the task, and submitit ignores that signal.
            signal.raise_signal(submitit.JobEnvironment._usr_sig())
        if status != 0:
            raise RuntimeError(f"{self.command} ended with {status}")

    def checkpoint(self) -> DelayedSubmission | None:
        """Called on task 0 by submitit, inside its signal handler. None gives up with an error."""
        self._process.terminate()
        status = _status(self._process)
        return DelayedSubmission(Training(self.command)) if status in (0, EXIT_PREEMPTED) else None

    def _group(self) -> dict[str, str]:
        """Variables that perdure cannot find out by itself; none under Slurm."""
        task = submitit.JobEnvironment()
        if task.cluster != "local" or task.num_tasks == 1:
            return {}
        return {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{self.port}",
            "JAX_NUM_PROCESSES": str(task.num_tasks),
            "JAX_PROCESS_ID": str(task.global_rank),
        }


def _is_preempted(task: submitit.JobEnvironment) -> bool:
    """Whether this task is the one that queues the job again, which SIGTERM has ended.

    Slurm would queue a job again that scancel has ended, too.
    """
    if task.global_rank != 0 or task.cluster == "local":
        return task.global_rank == 0
    command = ["squeue", "--noheader", "--format=%T", "--jobs", task.job_id]
    state = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return state in ("RUNNING", "SIGNALING")


def _status(process: subprocess.Popen[bytes]) -> int:
    if process.returncode is None:
        # Popen.wait holds a lock for which a signal handler would wait; this call holds none.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    return process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", nargs="+", help="after --")
    parser.add_argument("--cluster", choices=["slurm", "local"], default="slurm")
    parser.add_argument("--workers", type=int, default=1, help="Slurm: one for each node")
    parser.add_argument("--minutes", type=int, default=60, help="time limit of one attempt")
    parser.add_argument("--logs", default="submitit", help="where submitit keeps its files")
    options = parser.parse_args()
    if options.cluster == "local":
        executor = submitit.LocalExecutor(options.logs)
        executor.update_parameters(tasks_per_node=options.workers, timeout_min=options.minutes)
    else:
        executor = submitit.SlurmExecutor(options.logs, max_num_timeout=100)
        executor.update_parameters(
            nodes=options.workers, ntasks_per_node=1, time=options.minutes, signal_delay_s=120
        )
    job = executor.submit(Training(options.command))
    print(f"job {job.job_id}, logs: {job.paths.stdout}", flush=True)
    if options.cluster == "local":
        job.results()  # raises the error of a task


if __name__ == "__main__":
    sys.exit(main())
