"""The rules are upheld by this repository, and each breach, planted in the tiny one, is caught."""

import json
from pathlib import Path

import pytest

from parts.tree import source_files
from tests.series import checks
from tests.series.tiny import breaches, write

ROOT = Path(__file__).resolve().parents[2]
HOUSE = [checks.rooms, checks.imports_upwards, checks.computed_imports]
RULES = [checks.later_imports, checks.early_showcase, checks.uninstalled_imports, checks.broken_links]


@pytest.mark.parametrize("rule", [checks.ownership, *RULES])
def test_this_repository_keeps_the_rule(rule):
    assert breaches(rule, ROOT) == []


@pytest.mark.parametrize("rule", [checks.ownership, *RULES])
def test_the_tiny_repository_keeps_the_rule(repo, rule):
    assert breaches(rule, repo) == []


@pytest.mark.parametrize("rule", HOUSE)
def test_every_file_of_the_engine_is_in_a_room_and_a_room_imports_only_rooms_below_it(rule):
    found = rule(ROOT, source_files(ROOT))
    assert not found, "\n".join(found)


def test_every_file_under_engine_counts_not_only_python(repo):
    write(repo, "engine/data.json", "{}")
    assert breaches(checks.ownership, repo) == ["engine/data.json: owned by no part"]


def test_a_file_that_git_ignores_needs_no_owner(repo):
    write(repo, "engine/ignored.py", "")
    assert breaches(checks.ownership, repo) == []


def test_a_file_owned_twice_is_caught(repo):
    manifest = repo / "parts/02_two/part.toml"
    text = manifest.read_text(encoding="utf-8").replace(
        '"engine/two.py"]', '"engine/two.py", "engine/o*.py"]'
    )
    manifest.write_text(text, encoding="utf-8")
    assert breaches(checks.ownership, repo) == ["engine/one.py: owned by [1, 2]"]


def test_a_pattern_that_matches_nothing_is_caught(repo):
    (repo / "engine/two.py").unlink()
    assert "part 2: 'engine/two.py' matches nothing" in breaches(checks.ownership, repo)


@pytest.mark.parametrize(
    "code",
    [
        "import engine.two",
        "from engine.two import Two",
        "from engine import two",
        "from engine import Two",
        "import engine\n\nengine.Two()",
        "def later():\n    from engine.two import Two",
        "from importlib import import_module\n\nimport_module('engine.two')",
    ],
)
@pytest.mark.parametrize("place", ["engine/one.py", "parts/01_one/demo.py", "tests/part01/test_one.py"])
def test_an_import_from_a_later_part_is_caught(repo, place, code):
    write(repo, place, code + "\n")
    found = breaches(checks.later_imports, repo)
    assert found
    assert all(f.startswith(place) and "engine/two.py, of part 2 > 1" in f for f in found)


def test_a_relative_import_from_a_later_part_is_caught(repo):
    write(repo, "engine/one.py", "def later():\n    from .two import Two\n    from . import llm\n")
    assert (
        len(breaches(checks.later_imports, repo)) == 3
    )  # engine.two, engine.two.Two (in the same file), engine.llm


def test_a_notebook_cell_that_imports_from_a_later_part_is_caught(repo):
    source = ["%time\n", "if 1:\n", "    !ls\n", "from engine import LLM"]
    cell = json.dumps({"cells": [{"cell_type": "code", "source": source}]})
    write(repo, "notebooks/02_two.ipynb", cell)
    assert "engine/llm.py, of part 20 > 2" in breaches(checks.later_imports, repo)[0]


def test_a_notebook_that_imports_what_is_not_installed_is_caught(repo):
    imports, where = "from parts.stage import served\n", "sys.path.insert(0, str(Path.cwd().parent))\n"

    def of(*source):
        cell = json.dumps({"cells": [{"cell_type": "code", "source": source}]})
        write(repo, "notebooks/02_two.ipynb", cell)
        write(repo, "parts/stage.py", "")
        return breaches(checks.uninstalled_imports, repo)

    assert of(imports) == ["notebooks/02_two.ipynb: imports parts, which is not installed"]
    assert of(where, imports) == []


def test_shared_test_support_may_import_only_what_the_first_part_has(repo):
    write(repo, "tests/conftest.py", "from engine.two import Two\n")
    assert breaches(checks.later_imports, repo)


def test_an_import_of_a_missing_or_unowned_module_is_caught(repo):
    write(repo, "tools/train.py", "")
    write(repo, "engine/one.py", "import engine.nothing\nfrom tools import train\n")
    missing, unowned = breaches(checks.later_imports, repo)
    assert "engine.nothing does not exist" in missing
    assert "tools/train.py, which belongs to no part" in unowned


@pytest.mark.parametrize(
    ("place", "text", "name"),
    [
        ("parts/01_one/demo.py", "import engine\n\nengine.LLM()\n", "LLM"),
        ("tests/part01/test_one.py", "from engine import LLM as L\n", "LLM"),
        ("tests/part01/test_one.py", "run(['ruvon', 'generate'])\n", "ruvon"),
        ("tests/part01/test_one.py", "run('ruvon generate')\n", "ruvon"),
        ("articles/01_one.md", "Try\n```\nruvon generate\n```\n", "ruvon"),
        ("articles/01_one.md", "Try `ruvon generate`.\n", "ruvon"),
        ("articles/01_one.md", "`LLM.generate` does it all.\n", "LLM"),
        (
            "notebooks/02_two.ipynb",
            '{"cells": [{"cell_type": "code", "source": ["!ruvon generate"]}]}',
            "ruvon",
        ),
        ("notebooks/02_two.ipynb", '{"cells": [{"cell_type": "markdown", "source": ["`LLM()`"]}]}', "LLM"),
    ],
)
def test_the_last_parts_names_are_caught_in_earlier_ones(repo, place, text, name):
    write(repo, place, text)
    assert breaches(checks.early_showcase, repo) == [f"{place}: uses {name}, which part 20 brings"]


def test_the_project_may_be_named_in_prose(repo):
    write(repo, "articles/01_one.md", "ruvon is an engine for an LLM.\n\n```\ncd ruvon\n```\n")
    assert breaches(checks.early_showcase, repo) == []


def test_an_article_may_end_with_what_switches_its_capability_on(repo):
    section = "# One\n\n{}\n\n```\nruvon serve\n```\n\n## Behind it\n"
    write(repo, "articles/01_one.md", section.format("## Switch it on"))
    assert breaches(checks.early_showcase, repo) == []
    write(repo, "articles/01_one.md", section.format("## Switch it on") + "\n`ruvon serve`\n")
    assert breaches(checks.early_showcase, repo) == ["articles/01_one.md: uses ruvon, which part 20 brings"]


def test_a_link_out_of_the_learners_tree_is_caught(repo):
    write(repo, "tools/train.py", "")
    write(repo, "articles/01_one.md", "See [it](../tools/train.py#L3) and [that](https://example.org/x).\n")
    assert breaches(checks.broken_links, repo) == [
        "articles/01_one.md: links to ../tools/train.py, which is not in the tree of part 1"
    ]


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """Two rooms in order: high/ imports low/."""
    write(tmp_path, "engine/__init__.py", '_HOME = {"Top": "high.top"}\n')
    write(tmp_path, "engine/low/__init__.py", '"""What lies below."""\n')
    write(tmp_path, "engine/low/base.py", "import torch\n")
    write(tmp_path, "engine/high/__init__.py", '"""What stands on it."""\n')
    write(tmp_path, "engine/high/top.py", "import engine.low.base\n\n\nclass Top: ...\n")
    return tmp_path


def crooked(rule, house: Path) -> list[str]:
    """The breaches of a rule of the house, whose files are those that stand there."""
    files = sorted(path.relative_to(house).as_posix() for path in house.rglob("*") if path.is_file())
    return rule(house, files, ("low", "high"))


@pytest.mark.parametrize("rule", HOUSE)
def test_a_house_in_order_keeps_the_rule(house, rule):
    assert crooked(rule, house) == []


@pytest.mark.parametrize(
    "code",
    [
        "import engine.high.top",
        "from engine.high.top import Top",
        "from engine.high import top",
        "from ..high.top import Top",
        "from engine import Top",
        "def later():\n    from engine.high.top import Top",
        "from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from engine.high.top import Top",
        "from importlib import import_module\n\nimport_module('engine.high.top')",
    ],
)
def test_a_circle_of_rooms_is_caught_and_named_with_the_files_that_close_it(house, code):
    write(house, "engine/low/base.py", code + "\n")
    line = len(code.splitlines())
    assert crooked(checks.imports_upwards, house) == [
        f"low imports high, which stands above it, in engine/low/base.py:{line}; "
        "this closes the circle low → high → low (engine/high/top.py:1)"
    ]


@pytest.mark.parametrize(
    "code", ["command = ['python', '-m', 'engine.high.top']", "def f(engine): return engine.high.top"]
)
def test_a_program_that_is_started_and_a_field_of_an_engine_are_no_imports(house, code):
    write(house, "engine/low/base.py", code + "\n")
    assert crooked(checks.imports_upwards, house) == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("ROOM = 'high'\nimport_module(f'engine.{ROOM}.top')", "f'engine.{ROOM}.top'"),
        ("ROOM = 'high'\npackage = f'engine.{ROOM}'\nimport_module(f'{package}.top')", "f'{package}.top'"),
        ("TOP = 'engine.high.top'\nimport_module(TOP)", "TOP"),
        ("def load(name):\n    return import_module(name)", "name"),
    ],
)
def test_a_computed_import_is_caught_since_no_rule_sees_where_it_goes(house, code, name):
    write(house, "engine/low/base.py", f"from importlib import import_module\n\n{code}\n")
    assert crooked(checks.computed_imports, house) == [
        f"engine/low/base.py:{len(code.splitlines()) + 2}: imports {name}, which is computed"
    ]


@pytest.mark.parametrize(
    "code",
    [
        "import_module('engine.high.top')",  # for `imports_upwards` to see
        "import_module(f'engine.low.{kind}')",
        "OTHER = f'{__package__}.other'\nimport_module(OTHER)",
    ],
)
def test_what_is_computed_within_a_room_stays_there(house, code):
    write(house, "engine/low/base.py", f"from importlib import import_module\n\n{code}\n")
    assert crooked(checks.computed_imports, house) == []


def test_an_import_of_a_room_above_is_caught_where_it_closes_no_circle(house):
    write(house, "engine/low/base.py", "from engine.high import top\n")
    write(house, "engine/high/top.py", "")
    assert crooked(checks.imports_upwards, house) == [
        "low imports high, which stands above it, in engine/low/base.py:1"
    ]


def test_a_path_of_vllms_stands_beside_the_rooms_and_no_room_imports_it(house):
    write(house, "engine/inputs.py", "from engine.high.top import Top\n")
    write(house, "engine/utils/__init__.py", "")
    assert [crooked(rule, house) for rule in HOUSE] == [[], [], []]
    write(house, "engine/low/more.py", "def late():\n    from engine.inputs import Top\n")
    assert crooked(checks.imports_upwards, house) == [
        "engine/low/more.py:2: imports engine/inputs.py, which is there for scripts written for vLLM alone"
    ]


@pytest.mark.parametrize(
    ("place", "text", "breach"),
    [
        (
            "engine/loose.py",
            "",
            "engine/loose.py: stands in no room; only engine/__init__.py stands at the root of engine/",
        ),
        ("engine/new/__init__.py", '"""New."""\n', "engine/new: is not in the order of rooms"),
        *[
            (
                "engine/low/__init__.py",
                text,
                "engine/low/__init__.py: must begin with the room's contract, a docstring of one line",
            )
            for text in ("", "import os\n", '"""Two\nlines."""\n')
        ],
    ],
)
def test_a_loose_file_an_unknown_room_and_a_room_without_its_contract_are_caught(house, place, text, breach):
    write(house, place, text)
    assert crooked(checks.rooms, house) == [breach]


def test_a_room_that_went_and_is_still_in_the_order_is_caught(house):
    for path in (house / "engine/high").iterdir():
        path.unlink()
    assert crooked(checks.rooms, house) == ["engine/high: is in the order, and no room"]


def test_a_room_without_an_init_is_caught(house):
    (house / "engine/low/__init__.py").unlink()
    assert crooked(checks.rooms, house) == [
        "engine/low/__init__.py: must begin with the room's contract, a docstring of one line"
    ]
