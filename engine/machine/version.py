"""The version of ruvon that is installed here. Part 4."""

from importlib.metadata import PackageNotFoundError, version


def ruvon_version() -> str:
    """The installed package's version; "from a folder" if the package is not installed."""
    try:
        return version("ruvon")
    except PackageNotFoundError:
        return "from a folder"
