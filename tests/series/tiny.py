"""A tiny repository of this one's shape: two landed parts and the last one, to be cut and broken at will."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from parts.manifest import load_parts
from parts.tree import source_files
from tests.series import checks
from tests.system import ready


def mistakes(exercise: str, replace: str, says: str, **named: str) -> str:
    """Entries of a mistakes.toml: name -> what stands in place of `replace`."""
    head = f'[[mistakes]]\nexercise = "{exercise}"\n'
    return "\n".join(
        f"{head}name = \"{name}\"\nreplace = '{replace}'\nwith = '{by}'\nsays = \"{says}\"\n"
        for name, by in named.items()
    )


TWO = mistakes(
    "engine/two.py:Two.value", "return total + one()", "two is one and one",
    one="return total", three="return total + total + one()", none="return None", words='return "two"' ,
)  # fmt: skip
WORDS = mistakes(
    "engine/two.py:words", '"two"', "word", one='"one"', three='"three"', none="None", number="2"
)
FILES = {
    "LICENSE": "MIT\n",
    "constraints.txt": "torch==2.13.0\n",
    "pyproject.toml": """
        [project]
        name = "tiny"

        [project.scripts]
        ruvon = "engine.cli:app"

        [tool.pytest.ini_options]
        testpaths = ["tests"]
        addopts = "-p no:nbval -p no:schemathesis"
        """,
    ".gitignore": "__pycache__/\nignored.py\n",
    "engine/__init__.py": """
        _HOME = {"one": "one", "Two": "two", "LLM": "llm"}
        """,
    "engine/one.py": '''
        """Part 1."""


        def one() -> int:
            """The number one."""
            # the learner finds this out
            return 1
        ''',
    "engine/two.py": '''
        """Part 2."""

        import functools

        from engine.one import one  # stays


        class Two:
            """Counts to two."""

            @functools.cached_property
            def value(self) -> int:
                """Two,
                at last."""
                total = one()

                return total + one()

            # between the methods
            def half(self) -> float: return self.value / 2


        def words() -> str:
            """The word."""
            return "two"
        ''',
    "engine/llm.py": '"""Part 20."""\n\nfrom engine.two import Two\n',
    "engine/data/weights.bin": "0101",
    "tests/conftest.py": "",
    "tests/part01/test_one.py": """
        from engine.one import one


        def test_one_is_one():
            assert one() == 1, "one is 1"
        """,
    "tests/part02/test_two.py": """
        from engine.two import Two, words


        def test_two_is_two():
            assert Two().value == 2, "two is one and one"


        def test_two_has_a_word():
            assert words() == "two", "the word is two"


        def test_two_can_be_made():
            assert Two()
        """,
    "tests/series/test_none_of_the_learners_business.py": "",
    "articles/01_one.md": "How I counted to one: see [it](../engine/one.py), next is [two](02_two.md).\n",
    "articles/02_two.md": "How an LLM counts to two.\n",
    "notebooks/02_two.ipynb": """
        {"cells": [{"cell_type": "code", "source": ["%time\\n", "from engine import Two"]}]}
        """,
    "parts/01_one/demo.py": """
        import sys

        import engine.one

        print(engine.one.__file__, *sys.argv[1:])
        sys.exit(7)
        """,
    "parts/01_one/part.toml": """
        number = 1
        slug = "one"
        title = "One"
        article = "How I counted to one"
        capability = "Counts to one."
        minutes = 5
        landed = true
        adds = ["engine/__init__.py", "engine/one.py", "engine/data/*"]

        [[exercises]]
        where = "engine/one.py:one"
        write = "return the number one"
        tests = ["tests/part01/test_one.py"]
        """,
    "parts/01_one/mistakes.toml": mistakes(
        "engine/one.py:one",
        "return 1",
        "one is 1",
        zero="return 0",
        two="return 2",
        none="return None",
        minus="return -1",
    ),
    "parts/02_two/mistakes.toml": f"{TWO}\n{WORDS}",
    "parts/02_two/part.toml": """
        number = 2
        slug = "two"
        title = "Two"
        article = "How I counted to two"
        capability = "Counts to two."
        minutes = 10
        needs = [1]
        landed = true
        adds = ["engine/two.py"]

        [[exercises]]
        where = "engine/two.py:Two.value"
        write = "add one to one, and say it in so many words that the line would be longer than may be"
        tests = ["tests/part02/test_two.py"]

        [[exercises]]
        where = "engine/two.py:words"
        write = "write the word"
        tests = ["tests/part02/test_two.py"]
        """,
    "parts/20_showcase/part.toml": """
        number = 20
        slug = "showcase"
        title = "Showcase"
        article = "All together"
        capability = "Everything."
        minutes = 60
        needs = [1, 2]
        landed = false
        adds = ["engine/llm.py"]
        """,
}


def write(root: Path, path: str, text: str) -> None:
    """Put `text`, without its common indent, at root/path."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` by its relative path, git's own and caches left out."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not {".git", "__pycache__", ".pytest_cache"} & set(path.parts)
    }


class Tool(ready.Popen):
    """A process that finds imported what the tool asks for, and pytest: 0.1 s each time instead of 0.5."""

    libraries = ("pytest", "rich.console", "rich.markup", "rich.padding", "rich.table", "typer")


def python(root: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    """Python in `root`, without this process's paths."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # seconds per run, and the tiny repository needs none
    return ready.run([sys.executable, *arguments], cwd=root, env=env | more, kind=Tool)


def parts(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The tool of the repository or tree at `root`, in a wide terminal."""
    return python(root, "-m", "parts", *arguments, COLUMNS="200")


def git(folder: Path, *arguments: str) -> str:
    """What git prints there."""
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, encoding="utf-8")
    return done.stdout


def breaches(rule, root: Path) -> list[str]:
    """What breaks one of the rules of checks.py in the repository at `root`."""
    files, parts = source_files(root), load_parts(root)
    return rule(files, parts) if rule is checks.ownership else rule(root, files, parts)
