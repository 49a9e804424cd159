"""The command line: a table of commands in `main`, no logic that the library does not have.

Exit status: 0 fine, 1 a problem was found, 2 wrong usage.
"""

from perdure.cli.main import main

__all__ = ["main"]
