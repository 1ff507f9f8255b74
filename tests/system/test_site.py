"""The site of articles and notebooks is built, without a warning, and asks nothing of another host."""

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from parts.manifest import load_parts
from tests.system.tools import browser, needed  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
LANDED = [part for part in load_parts(ROOT) if part.landed]
LOADS = {"script": "src", "img": "src", "iframe": "src", "link": "href"}


class Page(HTMLParser):
    """What a page loads from other hosts, how many answers it folds, and where its links to files lead."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.foreign, self.answers, self.links = [], 0, []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.answers += tag == "details"
        at = found.get(LOADS.get(tag, ""), "") or ""
        if re.match(r"(https?:)?//", at):
            self.foreign.append(at)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    needed("myst_nb", importlib.util.find_spec("myst_nb"), "pip install 'ruvon[site]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(ROOT / "tools/build_site.py"), str(folder)]
    built = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=600)
    assert built.returncode == 0, built.stderr[-2000:]
    return folder


@pytest.mark.timeout(900)
def test_every_landed_part_is_on_the_road_with_article_and_notebook(site):
    front = Page(site / "index.html")
    for part in LANDED:
        article, notebook = (site / kind / f"{part.name}.html" for kind in ("articles", "notebooks"))
        assert f"articles/{part.name}.html" in front.links, "the road leads to each article"
        assert f"../notebooks/{part.name}.html" in Page(article).links, "an article leads to its notebook"
        asked = (ROOT / f"articles/{part.name}.md").read_text().count("<details>")
        assert Page(article).answers >= asked, "folded answers stay folded"
        assert notebook.exists()


@pytest.mark.timeout(900)
def test_pages_load_nothing_from_elsewhere_and_their_links_lead_somewhere(site):
    for path in site.rglob("*.html"):
        page = Page(path)
        assert page.foreign == [], f"{path.name} asks another host"
        for link in page.links:
            target, _, _ = link.partition("#")
            if target and not re.match(r"\w+:", target):
                assert (path.parent / target).exists(), f"{path.relative_to(site)}: {link} leads nowhere"


@pytest.mark.timeout(900)
def test_a_search_finds_what_explains_before_the_code(site, browser):  # noqa: F811
    page = browser.new_page()
    page.goto(f"{site.as_uri()}/search.html?q=speculative+decoding")
    page.get_by_text("Search finished").wait_for()
    found = [link.get_attribute("href") for link in page.locator("#search-results li > a").all()]
    code = ["source/" in at for at in found]
    assert any(code)
    assert not all(code)
    assert code == sorted(code), "the code that has the words comes after the texts that explain them"
    page.close()
