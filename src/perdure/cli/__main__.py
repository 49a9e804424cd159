"""`python -m perdure.cli`."""

from perdure.__main__ import main

if __name__ == "__main__":
    main("python -m perdure.cli")
