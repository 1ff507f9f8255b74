"""`python -m parts test N --report FILE`, in trees of the tiny repository."""

import json
from pathlib import Path

import pytest

from parts.report import folder_hash
from parts.tree import start
from tests.series.tiny import parts, write


def reported(tree: Path, *more: str) -> dict:
    """The report of Part 2's tests in `tree`."""
    target = tree.parent / "report.json"
    done = parts(tree, "test", "2", "--report", str(target), *more)
    assert target.exists(), done.stdout + done.stderr
    return json.loads(target.read_text(encoding="utf-8"))


@pytest.fixture
def opened(repo: Path, tmp_path: Path) -> Path:
    """A start folder of Part 2, both exercises open."""
    start(repo, 2, tmp_path / "x", solved=False)
    return tmp_path / "x"


def counts(exercise: dict) -> list[int]:
    return [exercise[word] for word in ("passed", "failed", "waiting", "skipped")]


def test_in_a_start_folder_nothing_is_written_or_done(opened):
    report = reported(opened)
    assert [(e["written"], e["done"]) for e in report["exercises"]] == [(False, False)] * 2
    assert report["tests"] == {
        "passed": 1, "failed": 0, "waiting": 2, "skipped": 0, "complete": True, "exit_code": 1,
    }  # fmt: skip


def test_a_written_function_whose_files_are_green_is_done(repo, tmp_path):
    start(repo, 2, tmp_path / "x", solved=True)
    report = reported(tmp_path / "x")
    assert [e["where"] for e in report["exercises"]] == ["engine/two.py:Two.value", "engine/two.py:words"]
    assert all(e["written"] and e["done"] for e in report["exercises"])
    assert counts(report["exercises"][0]) == [3, 0, 0, 0]
    assert report["tests"]["exit_code"] == 0


def test_a_written_function_that_is_wrong_is_not_done_and_all_files_run(opened, repo):
    write(opened, "tests/part02/test_more.py", "def test_more():\n    pass\n")
    wrong = (repo / "engine/two.py").read_text().replace("total + one()", "total").replace('"two"', '"too"')
    (opened / "engine/two.py").write_text(wrong)
    report = reported(opened)
    assert [(e["written"], e["done"]) for e in report["exercises"]] == [(True, False)] * 2
    assert report["tests"]["failed"] == 2
    assert report["tests"]["passed"] == 2, "files behind one that failed are run as well"


def test_a_part_of_the_tests_is_no_complete_run_and_nothing_of_it_is_done(repo, tmp_path):
    start(repo, 2, tmp_path / "x", solved=True)
    write(tmp_path / "x", "tests/part02/test_more.py", "def test_more():\n    pass\n")
    report = reported(tmp_path / "x", "tests/part02/test_more.py")
    assert report["tests"]["complete"] is False
    assert not any(e["done"] for e in report["exercises"])


def test_a_file_that_cannot_be_imported_counts_as_failed(opened):
    write(opened, "engine/two.py", "def words(:\n")
    report = reported(opened)
    assert report["tests"]["failed"] == 1
    assert not any(e["done"] for e in report["exercises"])


def test_the_hashes_are_those_of_the_folder_and_change_with_any_file_of_it(opened):
    before = reported(opened)
    assert before["engine_sha256"] == folder_hash(opened / "engine")
    assert before["engine_is_this_folders"] is True
    said = dict(line.split() for line in parts(opened, "hash", "2").stdout.splitlines())
    assert said == {name: before[name] for name in ("engine_sha256", "tests_sha256")}
    (opened / "engine/data/weights.bin").write_text("0110")
    after = reported(opened)
    assert after["engine_sha256"] != before["engine_sha256"], "data counts, too"
    assert after["tests_sha256"] == before["tests_sha256"]
    write(opened, "tests/part02/test_two.py", "def test_two():\n    pass\n")
    assert reported(opened)["tests_sha256"] != before["tests_sha256"], "weaker tests are seen"


def test_a_hash_knows_names_and_leaves_caches_out(tmp_path):
    write(tmp_path, "a/one.py", "1\n")
    first = folder_hash(tmp_path / "a")
    write(tmp_path, "a/__pycache__/one.pyc", "compiled")
    assert folder_hash(tmp_path / "a") == first
    (tmp_path / "a/one.py").rename(tmp_path / "a/two.py")
    assert folder_hash(tmp_path / "a") != first


def test_an_old_report_is_gone_if_the_run_does_not_end(opened, tmp_path):
    write(opened, "tests/part02/test_two.py", "import os\n\nos._exit(3)\n")
    (tmp_path / "report.json").write_text("{}")
    parts(opened, "test", "2", "--report", str(tmp_path / "report.json"))
    assert not (tmp_path / "report.json").exists()


def test_a_place_where_no_file_can_be_is_refused(opened, tmp_path):
    for place in (tmp_path, tmp_path / "nowhere" / "report.json"):
        done = parts(opened, "test", "2", "--report", str(place))
        assert done.returncode == 2
        assert "accepted is a file in a folder that is there" in done.stderr


def test_without_the_option_nothing_is_written(opened):
    parts(opened, "test", "2")
    assert not list(opened.parent.glob("*.json"))


def test_the_versions_that_may_change_a_result_are_named(opened):
    assert {"python", "pytest"} <= reported(opened)["versions"].keys()
