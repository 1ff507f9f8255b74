"""The tiny repository of tiny.py, a copy for every test that asks for it, pytest kept
warm, and the parts cut out of the real engine.
"""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parts.manifest import Part
from parts.tree import start
from parts.warm import Warm
from tests.series.tiny import FILES, write

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The trees and mypy first: each takes a minute, and a worker that met one last would end alone."""
    items.sort(key=lambda item: item.path.name not in ("test_trees.py", "test_type_ignores.py"))


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny repository with the real tool in it, committed once."""
    root = tmp_path_factory.mktemp("tiny") / "repo"
    for path, text in FILES.items():
        write(root, path, text)
    for module in (ROOT / "parts").glob("*.py"):
        shutil.copy(module, root / "parts")
    warm = root / "parts/warm.py"  # nothing there imports torch: 10 seconds less per `mistakes`
    warm.write_text(re.sub(r"(?s)\nLIBRARIES = \(.*?\n\)\n", '\nLIBRARIES = ("pytest",)\n', warm.read_text()))
    assert 'LIBRARIES = ("pytest",)' in warm.read_text()
    identity = ["-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    return root


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Runs pytest in trees."""
    with Warm() as warm:
        yield warm


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """trees(part, solved) -> the part cut out of this repository, once per session. To be left as it was."""
    made: dict[tuple[Part, bool], Path] = {}

    def cut(part: Part, solved: bool) -> Path:
        if (part, solved) not in made:
            folder = tmp_path_factory.mktemp(part.name) / ("solved" if solved else "start")
            start(ROOT, part.number, folder, solved)
            made[part, solved] = folder
        return made[part, solved]

    return cut


@pytest.fixture
def repo(original: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return shutil.copytree(original, tmp_path / "repo")
