"""The tiny repository of tiny.py, a copy for every test that asks for it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.series.tiny import FILES, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny repository with the real tool in it, committed once."""
    root = tmp_path_factory.mktemp("tiny") / "repo"
    for path, text in FILES.items():
        write(root, path, text)
    for module in (ROOT / "parts").glob("*.py"):
        shutil.copy(module, root / "parts")
    identity = ["-c", "user.name=t", "-c", "user.email=t@t.invalid", "-c", "commit.gpgsign=false"]
    for arguments in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *arguments], cwd=root, check=True)
    return root


@pytest.fixture
def repo(original: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return shutil.copytree(original, tmp_path / "repo")
