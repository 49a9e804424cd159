"""The releases of other packages that a plug-in of perdure supports."""

from __future__ import annotations

import re
from importlib import metadata

from perdure.errors import MissingExtraError


def require_version(extra: str, package: str, first: str, before: str) -> None:
    """Raise unless the installed release of `package` is at least `first` and below `before`.

    Args:
        extra: The extra of perdure that installs it.
        package: The name of the distribution.
        first: The first supported release, as "2.5".
        before: The first release that is not supported any more, as "3".

    Raises:
        MissingExtraError: The package is not installed, or has another release.
    """
    install = f"Install the extra: pip install 'perdure[{extra}]'."
    try:
        release = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise MissingExtraError(f"{package} is not installed. {install}", name=package) from None
    if not _numbers(first) <= _numbers(release) < _numbers(before):
        raise MissingExtraError(
            f"expected {package} from release {first} on and below {before}, found {release}. "
            f"{install}",
            name=package,
        )


def _numbers(release: str) -> tuple[int, ...]:
    """The leading numbers of a release: (2, 13, 0) of "2.13.0+cpu"."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", release)
    return tuple(map(int, match[0].split("."))) if match else ()
