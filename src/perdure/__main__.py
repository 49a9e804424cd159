"""The command `perdure`, and `python -m perdure`: little is imported before Ctrl-C has an answer."""

from __future__ import annotations

import os
import sys


def main(name: str | None = None) -> None:
    """Run the command line; `name` is what its messages call it, by default the name of the script."""
    try:
        for stream in ("stdout", "stderr"):
            if getattr(sys, stream) is None:  # closed (`>&-`): what is printed goes nowhere
                setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115 (until the process ends)
        from perdure.cli import main as commands  # takes long, and Ctrl-C may come meanwhile

        commands(prog_name=name)
    except KeyboardInterrupt:
        sys.stderr.write("perdure: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main("python -m perdure")
