"""Processes: starting the workers of one machine, hearing from them, ending them."""

from perdure.supervise.group import Ended, Group

__all__ = ["Ended", "Group"]
