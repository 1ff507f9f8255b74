"""The site's own pages, and what a published page gets: no site is built here (tests/system/test_site.py)."""

import importlib.util
import re
import tomllib
from pathlib import Path

import nbformat
import pytest

from parts.manifest import load_parts
from tools.build_site import Stage, whole_links
from tools.site_pages import in_colab, landing, section
from tools.slides import prose, slides

ROOT = Path(__file__).resolve().parents[2]
LANDED = [part for part in load_parts(ROOT) if part.landed]


def test_the_first_page_is_readmes_first_sentence_and_paths_with_a_card_for_each_part():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = landing(readme, LANDED)
    assert section(readme, "ruvon").partition("\n")[0] in text
    assert text.count('<a class="card"') == len(LANDED)
    assert "`" not in text[text.index('<a class="card"') :], "code in a card is set as code"
    assert len(re.sub(r"<[^>]+>|\(.*?\)", " ", text).split()) < 1200, "it is short; README is not"
    with pytest.raises(ValueError, match="no heading 'No such'"):
        section(readme, "No such")


def test_the_page_for_what_is_not_there_finds_its_style_from_anywhere(tmp_path):
    page = tmp_path / "404.html"
    page.write_text("<html><head><title>404</title></head></html>")
    whole_links(page, "https://owner.example/ruvon/")
    assert '<head><base href="/ruvon/">' in page.read_text()


@pytest.mark.parametrize("repository", ["owner/ruvon", ""])
def test_a_notebook_says_how_it_runs_in_colab_where_the_repository_has_an_address(
    tmp_path, monkeypatch, repository
):
    monkeypatch.setenv("GITHUB_REPOSITORY", repository)
    for part in LANDED:
        notebook = nbformat.reads(Stage(tmp_path, LANDED)._notebook(part), as_version=4)
        nbformat.validate(notebook)
        link = f"/github/owner/ruvon/blob/main/notebooks/{part.name}.ipynb)"
        assert (link in notebook.cells[0].source) == bool(repository)


def test_the_cell_that_colab_runs_first_gets_the_repository_and_installs_what_it_names():
    (cell,) = re.findall(r"```python\n(.*?)```", in_colab("notebooks/x.ipynb", "owner/ruvon"), re.DOTALL)
    compile(cell, "cell", "exec")
    assert '"https://github.com/owner/ruvon"' in cell
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.search(r"\[(\w+(?:,\w+)*)\]", cell)[1].split(",")) <= set(extras)


@pytest.fixture
def published(monkeypatch):
    """site/pages.py, where the site and the repository have addresses."""
    monkeypatch.setenv("RUVON_SITE", "https://owner.example/ruvon/")
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/ruvon")
    monkeypatch.delenv("GITHUB_SERVER_URL", raising=False)
    pytest.importorskip("docutils", reason="needs docutils: pip install 'ruvon[site]'")
    spec = importlib.util.spec_from_file_location("pages", ROOT / "site" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("page", "link"),
    [
        ("articles/03_kv_cache", "edit/main/articles/03_kv_cache.md"),
        ("notebooks/03_kv_cache", "edit/main/notebooks/03_kv_cache.ipynb"),
        ("source/engine/core/ahead.py", "blob/main/engine/core/ahead.py"),
        ("readme", "edit/main/README.md"),
        ("search", ""),
    ],
)
def test_a_page_leads_to_the_file_that_has_its_text(published, page, link):
    assert published.edit_link(page) == (link and f"https://github.com/owner/ruvon/{link}")


def test_a_preview_has_a_picture_where_the_site_has_an_address(published):
    tags = published.tags("index", 'a "title"', "what it is")
    assert 'property="og:image" content="https://owner.example/ruvon/_static/card.png"' in tags
    assert 'content="a &quot;title&quot;"' in tags


def test_what_is_pushed_sideways_is_reached_by_a_key(published):
    body = published.reachable('<div class="table-wrapper x"><table></table></div><pre>code</pre>')
    assert body.count('tabindex="0"') == 2


def test_a_picture_leads_to_itself_unless_it_leads_elsewhere(published):
    plain = '<img alt="a step" src="../_images/x.svg"/>'
    linked = '<a href="x.html"><img src="../_images/y.png"></a>'
    enlarged = published.enlarged(plain + linked)
    assert enlarged == f'<a class="enlarge" href="../_images/x.svg">{plain}</a>{linked}'


def test_slides_have_a_sheet_for_each_part_with_its_figure_its_rule_and_a_question():
    sheets = slides(LANDED).split("<section>\n")[1:]
    assert len(sheets) == len(LANDED)
    for part, one in zip(LANDED, sheets, strict=True):
        assert part.title in one
        figure = re.search(r'<img src="_images/(\S+)" alt="[^"]{10,}">', one)
        assert figure, f"{part.name} has a figure"
        assert (ROOT / "articles/figures" / figure[1]).exists()
        assert '<p class="predict">' in one, f"{part.name} asks something"
        assert "](" not in one, "a link is its words"
        assert "**" not in one
        assert "<!-- value" not in one
    assert sum("<blockquote>" in one for one in sheets) >= 20, "the rules that articles set in bold"


def test_a_paragraph_of_markdown_becomes_html():
    assert prose(
        "a < b, **bold** and *it*, `x * y * z`, [words](a.md#b) <!-- value: x -->3<!-- /value -->"
    ) == ("a &lt; b, <b>bold</b> and <em>it</em>, <code>x * y * z</code>, words 3")
