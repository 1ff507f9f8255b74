"""The page /engine of `ruvon serve` in a real browser, while others ask: for everyone, behind the key."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from engine.server.limits import MAX_WATCHERS
from engine.speculation.measuring import ALWAYS_DRAFT
from tests.system.attack import wait_until
from tests.system.chatting import Opened
from tests.system.test_accessibility import VIEWS, findings
from tests.system.test_serve import start
from tests.system.tools import DEADLINE, browser  # noqa: F401

KEY = "secret"
LITTLE = ("--kv-cache-memory-bytes", "2000000", "--max-model-len", "96")  # ten blocks
SWAP = ("--swap-space", "0.01", "--preemption-mode", "swap")
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "step_times": ALWAYS_DRAFT.as_dict()}
DRAFTS = ("--speculative-config", json.dumps(NGRAMS))


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """The URL of a server with a key."""
    process = start("--port", "0", "--max-num-seqs", "4", "--api-key", KEY, *flags)
    log = ""
    try:
        for line in process.stdout:
            log += line
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail(f"the server did not start: {log[-2000:]}")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # or its log would fill the pipe
        yield found[0]
    finally:
        process.kill()
        process.communicate()


@contextmanager
def asked(url: str, people: int = 6) -> Iterator[None]:
    """So many people ask, again and again."""
    stopping = threading.Event()

    def ask(number: int) -> None:
        body = {"model": "storyteller", "prompt": f"Once upon a time {number}", "max_tokens": 60}
        body |= {"temperature": 1, "n": 1 + number % 2, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url, timeout=DEADLINE, headers=headers, trust_env=False) as client:
            while not stopping.is_set():
                client.post("/v1/completions", json=body)

    threads = [threading.Thread(target=ask, args=[number]) for number in range(people)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join(DEADLINE)


@pytest.fixture(scope="module")
def busy():
    """The URL of a server with many blocks, which is asked all the while."""
    with serving(*DRAFTS) as url, asked(url):
        yield url


@pytest.fixture(scope="module")
def narrow():
    """The URL of one with few blocks, where requests are preempted and swapped."""
    with serving(*LITTLE, *SWAP) as url, asked(url):
        yield url


@pytest.fixture
def watch(browser):  # noqa: F811
    """watch(url, **options of the context) -> the page, which has the key; in the end, no complaint."""
    with ExitStack() as stack:
        opened = Opened(browser, stack)

        def open_page(url: str, **options):
            one = opened.at(f"{url}/engine", **options)
            one.get_by_label("This server wants its API key").fill(KEY)
            one.get_by_role("button", name="Watch").click()
            one.locator("#status[data-state=live]").wait_for()
            return one

        yield open_page
    assert [said for said in opened.complaints if "Failed to load resource" not in said[1]] == []


def drawn(one, part: str) -> str:
    return one.locator(f"#{part} svg").first.evaluate("svg => svg.outerHTML")


def test_without_the_key_nothing_is_shown_and_a_wrong_one_is_refused(browser, busy):  # noqa: F811
    one = browser.new_page()
    one.goto(f"{busy}/engine")
    one.get_by_text("Incorrect API key").wait_for()
    one.get_by_label("This server wants its API key").fill("wrong")
    one.get_by_role("button", name="Watch").click()
    one.get_by_text("Incorrect API key").wait_for()
    assert one.locator("#memory svg").count() == 0
    one.close()


def test_blocks_steps_and_requests_change_while_others_ask(watch, busy):
    one = watch(busy)
    one.locator("#lanes svg").wait_for()
    for part in ("memory", "fill", "lanes"):
        before = drawn(one, part)
        wait_until(lambda part=part, before=before: drawn(one, part) != before)
    tiles = one.locator("#tiles").inner_text()
    assert "of 4 seats" in tiles
    assert "of a budget of" in tiles
    assert re.search(r"[\d,]+ blocks of 16 tokens: \d+ in use", one.locator("#memory-words").inner_text())
    assert re.search(r"Step [\d,]+ took [\d.]+ ms for \d requests?", one.locator("#step-words").inner_text())


def test_drafts_that_stood_and_those_that_did_not_are_told_apart(watch, busy):
    one = watch(busy)
    wait_until(lambda: re.search(r"\d+ of \d+ drafts? stood", one.locator("#step-words").inner_text()))
    wait_until(lambda: one.locator("#lanes .cell.refused").count() > 0)
    wait_until(lambda: one.locator("#lanes .cell.draft").count() > 0)
    assert "%" in one.locator("#tiles article", has_text="Drafts that stood").inner_text()


def test_whose_memory_is_asked_by_a_row_which_stays_where_it_is(watch, busy):
    one = watch(busy)
    row, words = one.get_by_role("button", name=re.compile("^row 1:")), one.locator("#one")
    row.focus()
    one.keyboard.press("Enter")
    wait_until(lambda: re.search(r"Request [\d.]+: \d+ tokens? of prompt", words.inner_text()))
    wait_until(lambda: one.locator("#memory path.chosen").get_attribute("d"))
    before = words.inner_text()
    wait_until(lambda: words.inner_text() != before)
    assert row.get_attribute("aria-pressed") == "true"
    assert one.evaluate("document.activeElement.getAttribute('aria-label')").startswith("row 1:")
    one.keyboard.press("Enter")
    wait_until(lambda: "Choose a request" in words.inner_text())


def test_few_blocks_are_drawn_token_by_token_and_swapping_is_told(watch, narrow):
    one = watch(narrow)
    one.locator("#memory [data-cell]").first.wait_for()
    wait_until(lambda: "preempted" in one.locator("#events").inner_text())
    wait_until(lambda: "swap space" in one.locator("#events").inner_text())
    assert one.locator("#swap").is_visible()


def test_paused_it_asks_for_nothing_and_goes_on_when_it_is_wanted(watch, busy):
    one = watch(busy)
    one.get_by_role("button", name="Pause").click()
    one.get_by_text("paused").wait_for()
    asked_for = []
    one.on("request", lambda request: asked_for.append(request.url))
    before = one.locator("#step-words").inner_text()
    key = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=busy, trust_env=False, headers=key, timeout=DEADLINE) as client:
        wait_until(lambda: _all_may_watch(client))
    assert one.locator("#step-words").inner_text() == before
    assert asked_for == []
    one.get_by_role("button", name="Pause").click()
    one.locator("#status[data-state=live]").wait_for()
    wait_until(lambda: one.locator("#step-words").inner_text() != before)


def _all_may_watch(client: httpx.Client) -> bool:
    """Whether nobody else watches: as many as may watch are let in at once."""
    with ExitStack() as stack:
        answers = [stack.enter_context(client.stream("GET", "/engine/events")) for _ in range(MAX_WATCHERS)]
        return all(answer.status_code == 200 for answer in answers)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("server", ["busy", "narrow"])
def test_the_page_is_for_everyone_and_as_wide_as_its_window(watch, request, server, view):
    one = watch(request.getfixturevalue(server), **VIEWS[view])
    one.locator("#lanes svg").wait_for()
    assert one.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it has to be pushed sideways"
    one.get_by_role("button", name="Pause").click()
    assert findings(one) == []


def test_the_pages_lead_to_each_other(watch, busy):
    one = watch(busy)
    one.get_by_role("link", name="Dashboard").click()
    one.locator("#status[data-state=live]").wait_for()
    one.get_by_role("link", name="Engine").click()
    one.get_by_label("This server wants its API key").wait_for()
    one.get_by_role("link", name="Chat").click()
    one.get_by_role("link", name="Engine").wait_for()


def test_its_stream_does_not_hold_up_the_servers_end():
    process = start("--port", "0", "--api-key", KEY)
    log = ""
    try:
        for line in process.stdout:
            log += line
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.stream("GET", f"{found[0]}/engine/events", headers=headers, timeout=DEADLINE) as answer:
            lines = answer.iter_lines()
            assert "memory" in next(lines)
            process.send_signal(2)
            assert any("shutting_down" in line for line in lines), "its last event says why"
        log += process.communicate(timeout=DEADLINE)[0]
        assert process.returncode == 0, log
        assert "timeout graceful shutdown exceeded" not in log
        assert "Traceback" not in log
    finally:
        process.kill()
        process.wait()
