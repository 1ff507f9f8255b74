"""Executes notebooks in place, so that they are committed with the outputs a reader will see.

    python tools/execute_notebooks.py [notebooks/01_*.ipynb ...]     # default: all

Leaves out what changes from run to run without meaning (timestamps, the interpreter's patch version), so that
a diff shows only what a reader would notice.
"""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent


def execute(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=120, coalesce_streams=True, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"
        cell.metadata.pop("execution", None)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    paths = [Path(arg) for arg in sys.argv[1:]] or sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in paths:
        start = time.perf_counter()
        execute(path)
        print(f"{path}: {time.perf_counter() - start:.1f} s")
