"""`python -m perdure`."""

from perdure.cli import main

main(prog_name="python -m perdure")
