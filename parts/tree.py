"""Cuts a part out of the finished engine: the tree a learner starts from, the solved one, the history of all.

Promises: a folder with anything in it is refused and left alone; only files that git tracks, or would, are
copied. A tree's articles link to nothing that it lacks. It carries `parts/cut.toml`, which says what it is,
and is not cut again. Does not know what the files do.
"""

import os
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

from parts.manifest import (
    PARTS_PLANNED,
    TAG,
    Number,
    Part,
    SeriesError,
    find_part,
    load_parts,
    matches,
    owners,
)
from parts.readme import readme
from parts.stubs import stub

CUT = "parts/cut.toml"
STAYS_BEHIND = "parts/*/mistakes.toml"  # holds pieces of the solutions
# A link to another part's article or notebook.
LINK = re.compile(rf"\[(?P<words>[^\[\]]*)\]\((?:\.\./(?:articles|notebooks)/)?(?P<part>{TAG})_[^()\s]*\)")
AUTHOR = {"NAME": "ruvon series", "EMAIL": "series@ruvon.invalid"}
LEARNER_CONFTEST = '''"""Lists the tests that wait for an exercise apart from those that fail."""

pytest_plugins = ["parts.pytest_plugin"]
'''


@dataclass(frozen=True)
class Cut:
    """What a cut tree says about itself: the part it was cut at, and whether the exercises are written."""

    part: Number
    solved: bool


def read_cut(root: Path) -> Cut | None:
    """What `root` was cut as; None for the full checkout."""
    path = root / CUT
    if not path.exists():
        return None
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    return Cut(Number.read(raw["part"]), raw["solved"])


def start(root: Path, number: int | str, target: Path, solved: bool) -> Part:
    """Write part `number`, as a learner starts it or finished, into the empty or new folder `target`."""
    files, parts = _open(root, target)
    part = find_part(parts, number)
    _write(root, files, parts, part, target, solved)
    return part


def history(root: Path, target: Path) -> list[str]:
    """Write a git repository with one commit and one tag (`part-01`, ..., `part-A`) per landed part.

    Returns the tags.

    The same source commit gives the same commit ids: author, dates and contents come from the source alone.
    """
    files, parts = _open(root, target)
    made_at = _git(root, "log", "-1", "--format=%cI", check=False).strip() or "2000-01-01T00:00:00+00:00"
    who = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in AUTHOR.items()}
    # The reader's own git settings (signing, hooks, line endings) must not change the commits.
    plain = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    env = who | plain | {"GIT_AUTHOR_DATE": made_at, "GIT_COMMITTER_DATE": made_at}
    target.mkdir(parents=True, exist_ok=True)
    _git(target, "init", "--quiet", "--initial-branch=main", env=env)
    tags = []
    for part in [part for part in parts if part.landed]:
        for entry in target.iterdir():
            if entry.name != ".git":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        _write(root, files, parts, part, target, solved=True)
        _git(target, "add", "--all", "--force", env=env)
        _git(target, "commit", "--quiet", "--message", f"{part.number.label}: {part.title}", env=env)
        tags.append(f"part-{part.number.tag}")
        _git(target, "tag", tags[-1], env=env)
    return tags


def source_files(root: Path) -> list[str]:
    """The files of the checkout that git tracks, or would track if they were added."""
    if not (root / ".git").exists():
        raise SeriesError(
            f"{root} is not a git checkout of the series, and parts can only be cut from one. "
            "Clone the repository and run `python -m parts` in it."
        )
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    return sorted(path for path in set(listed) if path and (root / path).is_file())


def tree_files(files: list[str], parts: list[Part], number: int) -> list[str]:
    """Those of `files` that a tree of part `number` holds: the shared ones and those of parts up to it."""
    landed = [part for part in parts if part.landed and part.number <= number]
    return [path for path in files if owners(path, landed) and not matches(path, STAYS_BEHIND)]


def _open(root: Path, target: Path) -> tuple[list[str], list[Part]]:
    if cut := read_cut(root):
        raise SeriesError(
            f"{root} is itself a tree cut at {cut.part.label}: `start` and `history` need the full checkout "
            "of the series, where all parts are."
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SeriesError(f"{target} is not empty: nothing was written. Name a new or an empty folder.")
    return source_files(root), load_parts(root)


def _write(root: Path, files: list[str], parts: list[Part], part: Part, target: Path, solved: bool) -> None:
    """One tree. Everything that can be refused is worked out before the first file is written."""
    paths = tree_files(files, parts, part.number)
    texts = {
        "README.md": readme(part, parts, solved),
        "pyproject.toml": _pyproject(root, part),
        CUT: f'# Written by `python -m parts`.\npart = "{part.number}"\nsolved = {str(solved).lower()}\n',
    }
    texts |= {path: text for path in paths if (text := _without_later_links(root, path, part))}
    if not solved:
        texts["conftest.py"] = LEARNER_CONFTEST
        for path in {exercise.path for exercise in part.exercises}:
            messages = {e.name: part.announcement(e) for e in part.exercises if e.path == path}
            texts[path] = stub((root / path).read_text(encoding="utf-8"), messages, path)
    for path in [*paths, *texts]:
        destination = target / path
        destination.parent.mkdir(parents=True, exist_ok=True)
        if path in texts:
            destination.write_text(texts[path], encoding="utf-8", newline="\n")
        else:
            shutil.copy(root / path, destination)


def _without_later_links(root: Path, path: str, part: Part) -> str | None:
    """An article's or notebook's text with links to later ones, which the tree lacks, as plain words."""
    if not path.endswith((".md", ".ipynb")) or not path.startswith(("articles/", "notebooks/")):
        return None
    text = (root / path).read_text(encoding="utf-8")
    return LINK.sub(lambda link: link["words"] if Number.read(link["part"]) > part.number else link[0], text)


def _pyproject(root: Path, part: Part) -> str:
    """The project file; without the `ruvon` command where the part that brings its code is absent."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    if part.number >= PARTS_PLANNED:
        return text
    return re.sub(r"(?m)^\[project\.scripts\]\n(?:(?!\[).*\n)*", "", text)


def _git(folder: Path, *arguments: str, env: dict[str, str] | None = None, check: bool = True) -> str:
    # Variables such as GIT_DIR, set where git itself runs us, would point at another repository.
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    env = clean | (env or {})
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", check=False)
    if check and done.returncode:
        raise SeriesError(f"git {arguments[0]} in {folder}: {done.stderr.strip()}")
    return done.stdout
