"""Starts the worker processes of one machine, watches them, restarts them, and ends them.

Imports neither numpy nor a framework, so that the supervising process stays small.
"""

from perdure.supervise.attempts_log import AttemptRecord, RunHistory
from perdure.supervise.options import Limits, RunOptions
from perdure.supervise.supervisor import Observer, Supervisor
from perdure.supervise.worker_environment import Nodes

__all__ = ["Observer", "RunOptions", "Supervisor"]
