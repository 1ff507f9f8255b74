"""What surrounds the repository says what it says: hooks, container, forms, releases, versions."""

import json
import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def read(path: str) -> dict:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def recipe(target: str) -> list[str]:
    """The commands of a target of the Makefile."""
    found = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert found, f"the Makefile has no {target}"
    return [line.strip().replace("$(VENV)", ".venv") for line in found[1].splitlines()]


def test_the_hooks_before_a_commit_are_what_make_lint_runs():
    (local,) = read(".pre-commit-config.yaml")["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == recipe("form") + recipe("lint")


def test_the_container_sets_up_what_make_demo_needs():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    program, target = container["postCreateCommand"].split()
    assert program == "make"
    assert f"demo: {target.replace('.venv', '$(VENV)')}\n" in MAKEFILE
    assert (ROOT / ".devcontainer" / container["build"]["dockerfile"]).exists()


def test_versions_agree():
    assert read("CITATION.cff")["version"] == PROJECT["version"]
    assert read("CITATION.cff")["license"] == PROJECT["license"]
    assert PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_a_release_is_tried_in_a_clean_environment_before_it_is_published():
    jobs = read(".github/workflows/release.yml")["jobs"]
    tried = "\n".join(step.get("run", "") for step in jobs["build"]["steps"])
    assert "-m venv" in tried
    assert "ruvon demo" in tried
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}, "no password, and nothing else granted"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_asks_what_is_needed(form):
    found = read(str(form.relative_to(ROOT)))
    assert {"name", "description", "body"} <= found.keys()
    kinds = {field["type"] for field in found["body"]}
    assert kinds <= {"input", "textarea", "dropdown", "checkboxes", "markdown"}, "GitHub knows these"
    names = [field["id"] for field in found["body"]]
    assert len(set(names)) == len(names) > 0
    assert all(field["attributes"]["label"] for field in found["body"])


def test_every_pinned_version_installs_on_the_oldest_python_that_is_promised():
    """Where a pin does not, pip looks for another way for hours, and finds none."""
    (oldest,) = re.findall(r">=(\d+\.\d+)", PROJECT["requires-python"])
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    asked = {
        found.metadata["Name"]: found.metadata.get("Requires-Python") or ""
        for found in distributions()
        if pins.get(found.metadata["Name"].lower().replace("_", "-")) == found.version
    }
    assert len(asked) > 50
    assert [name for name, python in asked.items() if f"{oldest}.0" not in SpecifierSet(python)] == []
