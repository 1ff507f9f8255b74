"""The pages of `ruvon serve` (chat, dashboard, routes) for everyone: axe-core finds nothing serious, light
and dark, on a desk and on a phone; and the tokens view shows what the engine chose from.
"""

import json
import re
from contextlib import ExitStack

import httpx
import pytest

from tests.system.attack import wait_until
from tests.system.chatting import Opened, ask, said
from tests.system.test_serve import start
from tests.system.tools import DEADLINE, axe_core, browser  # noqa: F401

VIEWS = {
    "desk, light": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "light"},
    "desk, dark": {"viewport": {"width": 1280, "height": 800}, "color_scheme": "dark"},
    "phone, light": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "has_touch": True},
    "phone, dark": {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark", "has_touch": True},
}

# What is pressed, and smaller than a finger. A link in a sentence is as high as its line, and a closed menu
# lies outside the window: neither is meant.
SMALL = """() => [...document.querySelectorAll(
    "a, button, summary, .mobile-header label, .play-options label"
  )]
  .filter((one) => getComputedStyle(one).visibility == "visible" && getComputedStyle(one).display != "inline")
  .map((one) => [one.outerHTML.slice(0, 80), one.getBoundingClientRect()])
  .filter(([, at]) => at.width && at.height && at.right > 0 && at.left < innerWidth)
  .filter(([, at]) => at.width < 40 || at.height < 40)
  .map(([text, at]) => `${text}: ${at.width} x ${at.height}`)"""


@pytest.fixture(scope="module")
def server():
    """The URL of `ruvon serve`, without a key."""
    process = start("--port", "0", "--max-num-seqs", "4")
    log = ""
    try:
        for line in process.stdout:
            log += line
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail(f"the server did not start: {log[-2000:]}")
        yield found[0]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def open_page(browser, server):  # noqa: F811
    """open_page(path="", **options of the context) -> a page of the server; in the end, no complaint."""
    with ExitStack() as stack:
        opened = Opened(browser, stack)
        yield lambda path="", **options: opened.at(f"{server}/{path}", **options)
    assert [said for said in opened.complaints if "Failed to load resource" not in said[1]] == []


def findings(one) -> list[str]:
    """What axe-core calls serious or critical. The pages' Content-Security-Policy forbids a script from
    elsewhere: `evaluate` runs it as the browser's debugger would, and leaves the policy on.
    """
    one.evaluate(axe_core())
    found = one.evaluate("async () => (await axe.run({resultTypes: ['violations']})).violations")
    return [
        f"{rule['id']} ({rule['impact']}): {node['html'][:120]}"
        for rule in found
        for node in rule["nodes"]
        if rule["impact"] in ("serious", "critical")
    ]


def with_tokens(one, **knobs: str) -> None:
    one.get_by_role("button", name="Settings").click()
    one.get_by_label("Show the tokens").check()
    for name, value in {"Tokens, at most": "30", "Seed": "7", **knobs}.items():
        one.get_by_label(name).fill(value)


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious_on_the_chat_page(open_page, view):
    one = open_page(**VIEWS[view])
    wait_until(lambda: one.evaluate("document.querySelector('#model').textContent"))
    with_tokens(one)
    assert findings(one) == [], "a page on which nothing was said, with its settings"
    one.keyboard.press("Escape")
    one.get_by_role("button", name="New").click()
    ask(one, "word " * 2000, 2)
    one.locator(".failed").wait_for()
    ask(one, "Tell me a story about a dog and a red ball")
    said(one, "30 tokens").wait_for()
    one.locator(".token").nth(4).focus()
    one.locator("#about").wait_for()
    assert findings(one) == [], "an answer in tokens, what one was chosen from, and an error"


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious_on_the_dashboard(open_page, view):
    one = open_page("dashboard", **VIEWS[view])
    one.locator("#status[data-state=live]").wait_for()
    assert findings(one) == []


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious_on_the_page_of_routes(open_page, view):
    one = open_page("docs", **VIEWS[view])
    one.locator("summary", has_text="/v1/chat/completions").click()
    assert one.get_by_role("rowheader", name="max_completion_tokens").is_visible()
    assert one.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it has to be pushed sideways"
    assert findings(one) == []


def test_the_tokens_view_shows_each_token_and_what_it_was_chosen_from(open_page, server):
    one = open_page(**VIEWS["desk, light"])
    with_tokens(one)
    question = "Tell me a story about a dog and a red ball"
    ask(one, question)
    said(one, "30 tokens").wait_for()
    body = {"model": "storyteller", "messages": [{"role": "user", "content": question}], "seed": 7}
    body |= {"max_tokens": 30, "temperature": 0.8, "top_p": 0.95, "logprobs": True, "top_logprobs": 5}
    answer = httpx.post(f"{server}/v1/chat/completions", json=body, timeout=DEADLINE, trust_env=False).json()
    (choice,) = answer["choices"]
    assert one.locator(".assistant .text").text_content() == choice["message"]["content"]
    assert one.locator(".token").count() == 30
    entry = choice["logprobs"]["content"][4]
    one.keyboard.press("Escape")  # the settings
    for reach in (lambda token: token.hover(), lambda token: token.focus()):
        one.mouse.move(1, 1)
        one.locator("#about").wait_for(state="hidden")
        reach(one.locator(".token").nth(4))
        rows = one.locator("#about p").all_inner_texts()
        assert len(rows) == len({top["token"] for top in entry["top_logprobs"]} | {entry["token"]})
        assert one.locator("#about .chosen").inner_text().endswith(entry["token"].replace(" ", "␣"))
    one.keyboard.press("ArrowRight")
    focused = "[...document.querySelectorAll('.token')].indexOf(document.activeElement)"
    assert one.evaluate(focused) == 5
    one.keyboard.press("Escape")
    assert one.locator("#about").is_hidden()
    one.keyboard.press("Shift+Tab")
    one.keyboard.press("Tab")
    assert one.evaluate(focused) == 5, "an answer is one stop for Tab; the arrows lead to its tokens"


def test_a_character_of_several_tokens_is_shown_once_it_is_whole(open_page):
    one = open_page(**VIEWS["desk, light"])
    thing = "🐉"
    token = {"token": "", "logprob": -0.1, "top_logprobs": []}
    scores = {"content": [token | {"bytes": [byte]} for byte in thing.encode()]}
    choice = {"delta": {"content": thing}, "logprobs": scores, "finish_reason": "stop"}
    body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
    one.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )
    with_tokens(one)
    ask(one)
    said(one, "first word after").wait_for()
    assert one.locator(".assistant .text").text_content() == thing


def test_another_name_or_another_site_gets_no_page(server):
    for path in ("", "chat/chat.js", "chat/api.js", "dashboard"):
        with httpx.Client(base_url=server, timeout=DEADLINE, trust_env=False) as client:
            assert client.get(f"/{path}", headers={"Host": "evil.example"}).status_code == 400
            policy = client.get(f"/{path}").headers["Content-Security-Policy"]
            assert "frame-ancestors 'none'" in policy
            assert "unsafe" not in policy


@pytest.mark.parametrize("path", ["", "dashboard", "engine", "docs"])
def test_what_a_finger_presses_is_as_large_as_a_finger(open_page, path):
    one = open_page(path, **VIEWS["phone, light"], is_mobile=True)
    assert one.evaluate("matchMedia('(pointer: coarse)').matches")
    if path == "":
        one.locator("#model:not(:empty)").wait_for()
    one.locator("a:visible, summary:visible").first.wait_for()
    assert one.evaluate(SMALL) == []
