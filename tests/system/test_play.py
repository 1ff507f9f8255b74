"""Figures that can be played, in a real browser: buttons, keys, touch, predictions; without scripts the
picture.
"""

import json
from pathlib import Path

import pytest

from tests.system.test_accessibility import VIEWS, findings
from tests.system.tools import DEADLINE, QuietFiles, browser, files_over_http  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "articles" / "figures"
RECORDINGS = sorted(path.name.removesuffix(".play.json") for path in FIGURES.glob("*.play.json"))
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>A figure</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="stylesheet" href="../engine/server/pages/play.css"></head>
<body><main><h1>A figure</h1><ruvon-play src="{name}.play.json">
<p><img src="{name}.svg" alt="A picture" width="300"></p></ruvon-play></main>
<script type="module" src="../engine/server/pages/play.js"></script></body></html>"""


class Handler(QuietFiles):
    """The files of the repository, and a page for each figure."""

    def do_GET(self) -> None:
        name = self.path.removeprefix("/figures/").removesuffix(".html")
        if self.path == f"/figures/{name}.html":
            body = PAGE.format(name=name).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        else:
            super().do_GET()

    def translate_path(self, path: str) -> str:
        return super().translate_path(path.replace("/figures/", "/articles/figures/", 1))


@pytest.fixture(scope="module")
def site():
    with files_over_http(ROOT, Handler) as url:
        yield f"{url}/figures"


@pytest.fixture
def opened(browser, site):  # noqa: F811
    """opened(name, **options of the context) -> a page whose figure runs; in the end, no error was logged."""
    contexts, errors = [], []

    def at(name: str, runs: bool = True, **options):
        contexts.append(browser.new_context(**(VIEWS["desk, light"] | options)))
        page = contexts[-1].new_page()
        page.set_default_timeout(DEADLINE * 1e3)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{site}/{name}.html")
        if runs:
            page.locator(".play-runs svg").first.wait_for()
        return page

    yield at
    for context in contexts:
        context.close()
    assert errors == []


def step(page) -> int:
    return int(page.locator(".play-where").inner_text().split()[1])


def words(page) -> str:
    return page.locator(".play-words").inner_text()


def stop_the_clock(page) -> None:
    """From now on the page's time passes in `page.clock.run_for` alone."""
    page.clock.install(time=0)
    page.clock.pause_at(1_000)


def recorded(name: str) -> dict:
    return json.loads((FIGURES / f"{name}.play.json").read_text())


def test_without_scripts_the_picture_stays(opened):
    page = opened("08_play", runs=False, java_script_enabled=False)
    assert page.get_by_alt_text("A picture").is_visible()
    assert page.locator("button").count() == 0


def test_without_the_recording_the_picture_stays(opened):
    page = opened("no_such_figure", runs=False)
    page.wait_for_load_state("networkidle")
    assert page.locator("ruvon-play img").count() == 1
    assert page.locator(".play-runs").count() == 0


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", RECORDINGS)
def test_a_figure_is_for_everyone_and_as_wide_as_its_window(opened, name, view):
    page = opened(name, **VIEWS[view])
    for key in ("Home", "ArrowRight", "End"):
        page.locator("ruvon-play").focus()
        page.keyboard.press(key)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            "it has to be pushed sideways"
        )
        for svg in page.locator(".play-picture svg").all():
            wide = svg.evaluate(
                "svg => [svg.getBoundingClientRect().right, svg.parentElement.getBoundingClientRect().right]"
            )
            assert wide[0] <= wide[1] + 1
        assert findings(page) == []


def test_buttons_keys_and_slider_lead_to_the_same_steps(opened):
    page = opened("08_play")
    figure = page.locator("ruvon-play")
    assert step(page) == 0
    page.get_by_role("button", name="One step on").click()
    page.get_by_role("button", name="One step on").click()
    assert step(page) == 2
    said = words(page)
    page.get_by_role("button", name="One step back").click()
    assert step(page) == 1
    figure.focus()
    page.keyboard.press("ArrowRight")
    assert (step(page), words(page)) == (2, said)
    page.keyboard.press("End")
    last = len(recorded("08_play")["runs"][0]["steps"])
    assert step(page) == last
    page.keyboard.press("ArrowRight")
    assert step(page) == last, "there is nothing behind the end"
    page.keyboard.press("Home")
    assert step(page) == 0
    page.get_by_role("slider", name="Step").fill("2")
    assert (step(page), words(page)) == (2, said)


def test_it_plays_and_stops_by_button_and_by_key(opened):
    page = opened("08_play")
    stop_the_clock(page)
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(3_000)
    assert step(page) == 3
    page.get_by_role("button", name="Pause").click()
    page.clock.run_for(3_000)
    assert step(page) == 3
    page.locator("ruvon-play").focus()
    page.keyboard.press("Space")
    page.clock.run_for(1_000)
    assert step(page) == 4
    page.keyboard.press("End")
    assert page.get_by_role("button", name="Play").count() == 1, "who jumps stops it"
    page.keyboard.press("Space")
    assert step(page) == 0, "at the end it begins anew"


def test_the_site_does_not_turn_its_page_by_a_figures_arrow_keys(opened):
    page = opened("08_play")
    page.evaluate("window.turned = 0; document.addEventListener('keydown', () => { window.turned += 1; })")
    page.locator("ruvon-play").focus()
    for key in ("ArrowRight", "ArrowLeft", "End", "Home", "Space"):
        page.keyboard.press(key)
    assert page.evaluate("window.turned") == 0
    page.keyboard.press("a")
    assert page.evaluate("window.turned") == 1


def test_the_schedulers_are_compared_at_the_same_moment(opened):
    page = opened("08_play")
    page.get_by_role("slider", name="Step").fill("12")
    seen = set()
    for run in recorded("08_play")["runs"]:
        page.get_by_label(run["words"], exact=True).check()
        assert step(page) == 12
        computed = sum(tokens for tokens, _ in run["steps"][11]["work"].values())
        assert words(page).startswith(f"Step 12: {computed} ")
        seen.add(words(page))
    assert len(seen) == len(recorded("08_play")["runs"])
    page.get_by_label("one at a time").check()
    page.keyboard.press("End")
    page.locator("ruvon-play").focus()
    page.keyboard.press("End")
    page.get_by_label("continuous, budget 64").check()
    assert step(page) == len(recorded("08_play")["runs"][2]["steps"]), "a shorter run is at its end"


def test_a_marked_step_is_asked_for_before_it_is_shown(opened):
    page = opened("08_play")
    run = recorded("08_play")["runs"][3]
    page.get_by_label(run["words"]).check()
    page.get_by_label("Let me predict").check()
    stop_the_clock(page)
    page.get_by_role("button", name="Play").click()
    page.clock.run_for(20_000)
    assert step(page) == run["marks"][0] - 1, "it stops before the step"
    work = run["steps"][run["marks"][0] - 1]["work"]
    inputs = page.locator(".play-question input")
    names = [label.inner_text()[0] for label in page.locator(".play-question label").all()]
    assert set(work) <= set(names)
    for i, name in enumerate(names):
        wrong = 1 if i == 0 else 0
        inputs.nth(i).fill(str(work.get(name, [0])[0] + wrong))
    page.keyboard.press("Enter")
    assert step(page) == run["marks"][0]
    assert page.locator(".play-wrong").count() == 1
    assert f"it is {work.get(names[0], [0])[0]}" in page.locator(".play-wrong").inner_text()
    assert (
        page.locator(".play-question p[role=status]").inner_text()
        == f"{len(names) - 1} of {len(names)} right."
    )
    page.keyboard.press("ArrowRight")
    assert page.locator(".play-question").is_visible() == (run["marks"][1] == run["marks"][0] + 1)
    page.get_by_label("Let me predict").uncheck()
    assert page.locator(".play-question").is_hidden()


def test_a_preempted_request_is_shown_with_what_it_lost(opened):
    page = opened("12_pages")
    run = recorded("12_pages")["runs"][1]
    at = next(number for number, one in enumerate(run["steps"], 1) if one.get("preempted"))
    page.get_by_label(run["words"]).check()
    page.get_by_role("slider", name="Step").fill(str(at))
    assert f"{run['steps'][at - 1]['preempted'][0]} is preempted" in words(page)
    assert page.locator(".cell.lost:not(.play-legend .cell)").count() > 0


def test_drafts_that_stand_and_those_that_do_not_are_shown(opened):
    page = opened("16_play")
    run = recorded("16_play")["runs"][1]
    page.get_by_label(run["words"], exact=True).check()
    for number, one in enumerate(run["steps"][:12], 1):
        page.get_by_role("slider", name="Step").fill(str(number))
        work = [numbers for numbers in one["work"].values() if len(numbers) == 3]
        stood, refused = (
            sum(said - 1 for _, said, _ in work),
            sum(drafts - said + 1 for _, said, drafts in work),
        )
        assert page.locator(".play-picture .draft:not(.play-legend .draft)").count() == stood
        assert page.locator(".play-picture .refused:not(.play-legend .refused)").count() == refused


def lit(page) -> str:
    return page.locator(".play-lit").inner_text()


def test_a_token_lights_up_where_it_lies_by_pointer_keys_and_touch(opened):
    moment = recorded("12_play")["runs"][0]["moments"][5]
    name, (_, _, table) = next(iter(moment["sequences"].items()))
    where = f"6 // 4 = 1, 6 % 4 = 2. table[1] is block {table[1]}, place 2"
    page = opened("12_play")
    page.get_by_role("slider", name="Step").fill("6")
    token = page.locator(f"[role=button][data-sequence='{name}'][data-token='6']")
    token.hover()
    assert where in lit(page)
    assert page.locator(f".place.lit[data-cell='{table[1]}:2']").count() >= 2, "in the row and in the memory"
    assert page.locator(".entry.lit").text_content() == str(table[1])
    page.locator("[role=button][tabindex='0']").focus()
    page.keyboard.press("ArrowLeft")
    assert "5 // 4 = 1, 5 % 4 = 1" in lit(page)
    assert step(page) == 6, "arrows lead from token to token"
    page.get_by_role("button", name="One step on").click()
    assert "5 // 4 = 1" in lit(page), "a token stays lit from step to step"
    phone = opened("12_play", **VIEWS["phone, light"])
    phone.get_by_role("slider", name="Step").fill("6")
    phone.locator(f"[role=button][data-sequence='{name}'][data-token='6']").tap()
    assert where in lit(phone)


def test_the_switches_of_the_block_table_change_the_memory(opened):
    page = opened("12_play")
    page.get_by_role("slider", name="Step").fill("10")
    seen = [words(page)]
    for label, group in (("off", "Prefix cache"), ("16", "Tokens in a block"), ("slots", "Memory")):
        page.get_by_role("group", name=group).get_by_label(label, exact=True).check()
        assert step(page) == 10
        assert "unused" in words(page)
        seen.append(words(page))
    assert len(set(seen)) == len(seen)
    for name in ("Prefix cache", "Tokens in a block"):
        radio = page.get_by_role("group", name=name).get_by_role("radio").first
        assert radio.is_disabled(), "slots have none"


def test_nothing_fades_for_a_reader_who_wants_no_motion(opened):
    page = opened("08_play", reduced_motion="reduce")
    page.get_by_role("button", name="One step on").click()
    assert page.locator(".fresh").last.evaluate("cell => getComputedStyle(cell).animationName") == "none"
    page = opened("08_play", reduced_motion="no-preference")
    page.get_by_role("button", name="One step on").click()
    assert page.locator(".fresh").last.evaluate("cell => getComputedStyle(cell).animationName") != "none"


@pytest.mark.parametrize("size", [(844, 390), (740, 360), (667, 375)])
@pytest.mark.parametrize("name", [name for name in RECORDINGS if name != "13_roofline"])  # has no steps
def test_on_a_phone_that_lies_on_its_side_picture_and_buttons_are_seen_together(opened, name, size):
    width, height = size
    page = opened(name, viewport={"width": width, "height": height}, has_touch=True, is_mobile=True)
    for chosen in range(page.locator(".play-choices input").count()):
        radio = page.locator(".play-choices input").nth(chosen)
        if radio.is_enabled():
            radio.check()
        page.locator("ruvon-play").focus()
        page.keyboard.press("End")
        high = page.evaluate(
            "document.querySelector('.play-controls').getBoundingClientRect().bottom"
            " - document.querySelector('.play-picture').getBoundingClientRect().top"
        )
        assert high <= height, f"picture and buttons are {high} pixels high"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert findings(page) == []
