"""Reads records as tests of sentences need them."""

from benchmarks.record import read_record


def figures(name: str) -> dict:
    return read_record(name)["figures"]


def rows_of(name: str, table: str) -> list[list]:
    return read_record(name)["tables"][table]["rows"]


def spread_of(cell: str) -> tuple[float, float]:
    """Least and most of a cell such as "114 (111 to 131)"."""
    least, most = cell.split("(")[1].rstrip(")").split(" to ")
    return float(least), float(most)
