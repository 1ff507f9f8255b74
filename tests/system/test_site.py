"""The site of articles and notebooks is built, without a warning, and asks nothing of another host."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path

import pytest

from engine import LLM, EngineArgs, SamplingParams
from engine.telemetry.metric_names import COUNTERS
from parts.manifest import load_parts
from tests.system.test_accessibility import SMALL, VIEWS, findings
from tests.system.tools import browser, files_over_http, needed  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
LANDED = [part for part in load_parts(ROOT) if part.landed]
LOADS = {"script": "src", "img": "src", "iframe": "src", "link": "href"}


# Pages of each kind, as a reader sees them.
SHOWN = (
    "index",
    "readme",
    "articles/08_continuous_batching",
    "articles/13_triton_decode_kernel",
    "articles/course",
    "slides",
    "api",
    "404",
    "search",
)


class Page(HTMLParser):
    """What a page loads from other hosts, how many answers it folds, where its links to files lead, its
    pictures, those without words, and what it says of itself.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.foreign, self.answers, self.links = [], 0, []
        self.pictures, self.ways, self.wordless, self.meta = [], {}, [], {}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.answers += tag == "details"
        at = found.get(LOADS.get(tag, ""), "") or ""
        if re.match(r"(https?:)?//", at):
            self.foreign.append(at)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
            self.ways[found.get("class")] = found["href"]
        if tag in ("img", "source"):
            self.pictures.append(found.get("src") or found.get("srcset"))
        if tag == "img" and not found.get("alt"):
            self.wordless.append(at)
        if tag == "meta":
            self.meta[found.get("property") or found.get("name")] = found.get("content")


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
        for link in page.links + page.pictures:
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


@pytest.mark.timeout(900)
def test_an_article_leads_to_the_next_one_and_back(site):
    names = [part.name for part in LANDED]
    for before, name, after in zip([None, *names], names, [*names[1:], None], strict=False):
        ways = Page(site / f"articles/{name}.html").ways
        assert ways.get("prev-page") == (before and f"{before}.html"), f"{name}: the way back"
        assert ways.get("next-page") == (after and f"{after}.html"), f"{name}: the way on"
        assert Page(site / f"notebooks/{name}.html").ways["prev-page"] == f"../articles/{name}.html"


@pytest.mark.timeout(900)
def test_every_page_of_the_road_describes_itself_and_its_pictures(site):
    for path in [site / "index.html", *(site / "articles").glob("*.html")]:
        page = Page(path)
        assert page.wordless == [], f"{path.name}: a picture without words"
        assert 60 <= len(page.meta.get("description", "")) <= 203, f"{path.name}: a sentence or two"
        assert page.meta["og:title"]


@pytest.mark.timeout(900)
def test_the_reference_has_every_method_field_route_and_metric(site):
    text = (site / "api.html").read_text()
    methods = [f"LLM.{name}" for name in vars(LLM) if not name.startswith("_")]
    named = [spec.name for kind in (EngineArgs, SamplingParams) for spec in fields(kind)]
    routes = (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/tokenize",
        "/v1/load_lora_adapter",
    )
    metrics = (*COUNTERS, "vllm:spec_decode_num_drafts", "vllm:lora_requests_info", "ruvon:cost_dollars")
    assert [name for name in (*methods, *named, *routes, *metrics) if name not in text] == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", SHOWN)
def test_a_page_is_for_everyone_and_as_wide_as_its_window(site, browser, name, view):  # noqa: F811
    page = browser.new_page(**VIEWS[view])
    page.goto(f"{site.as_uri()}/{name}.html")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it has to be pushed sideways"
    assert findings(page) == []
    page.close()


@pytest.mark.timeout(900)
def test_figures_follow_the_dark_and_terminals_are_dark_already(site, browser):  # noqa: F811
    for scheme, turned in (("light", "none"), ("dark", "invert(0.92) hue-rotate(180deg)")):
        page = browser.new_page(color_scheme=scheme)
        page.goto(f"{site.as_uri()}/readme.html")
        for picture, expected in (("20_rise", turned), ("14_terminal", "none")):
            shown = page.locator(f"article img[src*='{picture}']").first
            assert shown.evaluate("image => getComputedStyle(image).filter") == expected, (
                f"{picture}, {scheme}"
            )
        page.close()


@pytest.mark.timeout(900)
def test_slides_are_a_sheet_a_part_and_a_cover(site, browser):  # noqa: F811
    page = browser.new_page()
    page.goto(f"{site.as_uri()}/slides.html")
    assert all(page.locator("img").evaluate_all("images => images.map(image => image.naturalWidth > 0)"))
    printed = page.pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == len(LANDED) + 1
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 1123, "height": 632})  # of a sheet
    cut = page.locator("section").evaluate_all(
        "all => all.filter((one) => one.scrollHeight > one.clientHeight).length"
    )
    assert cut == 0, "what does not fit on its sheet is cut off"
    page.close()


@pytest.mark.timeout(900)
def test_a_figure_can_be_enlarged_without_a_script(site, browser):  # noqa: F811
    page = browser.new_page(java_script_enabled=False)
    page.goto(f"{site.as_uri()}/articles/12_paged_kv_cache.html")
    page.locator("a.enlarge").first.click()
    assert "/_images/12_" in page.url
    page.close()


@pytest.mark.timeout(900)
def test_a_picture_with_a_recording_is_played_on_its_page(site, browser):  # noqa: F811
    articles = "".join(path.read_text() for path in (site / "articles").glob("*.html"))
    recordings = {path.name for path in (ROOT / "articles" / "figures").glob("*.play.json")}
    assert set(re.findall(r'<ruvon-play src="\.\./_static/([^"]+)">', articles)) == recordings
    with files_over_http(site) as url:
        page = browser.new_page()
        page.goto(f"{url}/articles/08_continuous_batching.html")
        figure = page.locator("ruvon-play")
        figure.locator(".play-picture svg").first.wait_for()
        figure.focus()
        page.keyboard.press("ArrowRight")
        assert figure.locator(".play-where").inner_text().startswith("step 1 of")
        assert page.url.endswith("08_continuous_batching.html"), "the arrow keys turn no page"
        for theme, paper in (("dark", "rgb(19, 25, 32)"), ("light", "rgb(255, 255, 255)")):
            page.evaluate(f"document.body.dataset.theme = '{theme}'")
            assert figure.evaluate("one => getComputedStyle(one).backgroundColor") == paper
        page.close()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", ["index", "articles/12_paged_kv_cache", "articles/13_triton_decode_kernel", "api"]
)
def test_what_a_finger_presses_is_as_large_as_a_finger(site, browser, name):  # noqa: F811
    with files_over_http(site) as url:
        page = browser.new_page(**VIEWS["phone, light"], is_mobile=True)
        page.goto(f"{url}/{name}.html")
        if figures := page.locator("ruvon-play").all():
            figures[0].locator("svg").first.wait_for()
        assert page.evaluate("matchMedia('(pointer: coarse)').matches")
        assert page.evaluate(SMALL) == []
        page.close()
