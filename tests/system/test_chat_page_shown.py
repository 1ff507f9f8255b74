"""What the chat page shows in a real browser: a model's words are never run, and everyone can use it."""

from contextlib import ExitStack

import pytest

from tests.part04.serving import ScriptedBackend
from tests.system.attack import wait_until
from tests.system.chatting import TEMPLATE, Echo, Held, ask, asked, chat_app, ended, page, prompt_of, said  # noqa: F401
from tests.system.tools import browser  # noqa: F401

# --- hostile ------------------------------------------------------------------------------------------------

HOSTILE = [
    "<img src=x onerror=\"document.title = 'run'\">",
    "<script>document.title = 'run'</script>",
    "<style>*{display:none}</style> & &lt;b> [a](javascript:alert(1)) ![](http://evil.example/x.png)",
]


def test_what_the_model_says_is_text(page):  # noqa: F811
    backend = ScriptedBackend(HOSTILE)
    backend.models = lambda: [f"m{HOSTILE[0]}"]
    one = page(backend)
    ask(one, HOSTILE[1])
    said(one, "3 tokens").wait_for()
    assert one.locator(".assistant .text").inner_text() == "".join(HOSTILE)
    assert one.locator(".user .text").inner_text() == HOSTILE[1]
    assert one.locator("#model").inner_text() == f"m{HOSTILE[0]}"
    assert one.locator(".text > *, #model > *, main img, main script, main style").count() == 0, (
        "what was said became an element"
    )
    assert one.title() == "ruvon: chat"


DRAWS = """() => {
  window.draws = window.frames_ = 0;
  const frame = () => { window.frames_ += 1; requestAnimationFrame(frame); };
  requestAnimationFrame(frame);
  new MutationObserver((records) => {
    window.draws += records.some((record) => record.target.parentElement?.matches(".assistant .text"));
  }).observe(document.querySelector(".turns"), { characterData: true, subtree: true });
}"""  # text nodes that change, in batches: a batch is a draw""


def test_ten_thousand_tiny_pieces_are_drawn_once_a_frame(page):  # noqa: F811
    backend = Held(["x "] * 10_000)
    one = page(backend)
    one.evaluate(DRAWS)
    ask(one)
    wait_until(
        lambda: one.evaluate("document.querySelector('.assistant .text').textContent.length === 20_000")
    )
    draws, frames = one.evaluate("[window.draws, window.frames_]")
    assert 1 <= draws <= frames + 1, "pieces are drawn once a frame, however fast they come"
    box = one.get_by_label("message of conversation 1")
    box.press_sequentially("still here")
    assert box.input_value() == "still here"
    assert one.locator(".running").count() == 1
    backend.go.set()
    said(one, "10001 tokens").wait_for()


def test_an_answer_of_a_megabyte(page):  # noqa: F811
    text = "word " * 200_000
    one = page(Held([text[:500_000], text[500_000:]], ["end"]))
    ask(one)
    wait_until(
        lambda: one.evaluate("document.querySelector('.assistant .text').textContent.length === 1_000_000")
    )
    box = one.get_by_label("message of conversation 1")
    box.press_sequentially("still here")
    one.get_by_role("button", name="Stop").click()
    said(one, "stopped").wait_for()
    assert box.input_value() == "still here"


def test_nothing_is_kept_and_the_key_least_of_all(page):  # noqa: F811
    one = page(ScriptedBackend(["yes"]), api_key="secret-key")
    one.get_by_role("button", name="Settings").click()
    one.get_by_label("API key").fill("secret-key")
    one.get_by_label("API key").press("Tab")
    one.get_by_text("ready").wait_for()
    ask(one)
    said(one, "yes").wait_for()
    kept = one.evaluate(
        "async () => [localStorage.length, sessionStorage.length, document.cookie,"
        " (await indexedDB.databases()).length, document.documentElement.outerHTML.includes('secret-key')]"
    )
    assert kept == [0, 0, "", 0, False]
    one.reload()
    one.get_by_text("Incorrect API key").wait_for()
    assert one.locator("#knobs [name=key]").input_value() == ""
    assert one.locator(".turns > li").count() == 0


def test_no_other_page_may_frame_it(page, browser):  # noqa: F811
    one = page(ScriptedBackend())
    with ExitStack() as stack:
        other = stack.enter_context(browser.new_context()).new_page()
        with other.expect_console_message(lambda said: "frame-ancestors" in said.text):
            other.set_content(f'<iframe src="{one.url}"></iframe>')


# --- for everyone -------------------------------------------------------------------------------------------


def test_with_the_keyboard_alone(page):  # noqa: F811
    backend = Held(["Hello"])
    one = page(backend)
    keys = one.keyboard
    focus = lambda: one.evaluate(  # noqa: E731
        "(document.activeElement.ariaLabel ?? document.activeElement.textContent).trim()"
    )
    assert focus() == "message of conversation 1", "one can type at once"
    keys.type("first")
    keys.press("Shift+Enter")
    keys.type("second")
    assert one.get_by_label("message of conversation 1").input_value() == "first\nsecond"
    keys.press("Enter")
    said(one, "Hello").wait_for()
    assert asked(backend, 0) == prompt_of(("user", "first\nsecond"))
    assert focus() == "message of conversation 1"
    keys.type("next")
    keys.press("Enter")  # not while an answer comes
    assert one.get_by_label("message of conversation 1").input_value() == "next"
    keys.press("Tab")
    assert focus() == "Stop"
    keys.press("Enter")
    said(one, "stopped").wait_for()
    assert focus() == "Send", "the focus stays where it was"
    one.get_by_role("button", name="Settings").focus()
    keys.press("Enter")
    assert one.get_by_label("Temperature").is_visible()
    keys.press("Escape")
    assert not one.get_by_label("Temperature").is_visible()
    assert focus() == "Settings"


LINES = [f"line {i}\n" for i in range(100)]


def test_it_follows_the_words_until_its_reader_scrolls_up(page):  # noqa: F811
    backend = Held(LINES, [*LINES, "last"])
    one = page(backend)
    ask(one)
    at_end = "t => t.scrollHeight - t.scrollTop - t.clientHeight < 2"
    turns = one.locator(".turns")
    said(one, "line 99").wait_for()
    wait_until(lambda: turns.evaluate(at_end))
    top = turns.evaluate("t => t.scrollTop") - 600
    turns.hover()
    one.mouse.wheel(0, -600)
    wait_until(lambda: turns.evaluate("t => t.scrollTop") == top)  # scrolling may take its time
    backend.go.set()
    said(one, "201 tokens").wait_for()
    assert turns.evaluate("t => t.scrollTop") == top, "who reads further up is left in peace"


def test_a_screen_reader_hears_whole_sentences(page):  # noqa: F811
    words = "The dog, Mr. Max, ran. “Wait!” said Tim. They went home and slept"
    backend = Held([f"{word} " for word in words.split()[:-2]], ["and ", "slept"])
    one = page(backend)
    one.evaluate(
        "() => { window.heard = []; const live = document.querySelector('[aria-live]');"
        " new MutationObserver(() => window.heard.push(live.textContent)).observe(live, {childList: true}); }"
    )
    ask(one)
    wait_until(lambda: one.evaluate("window.heard.join(' ').endsWith('Tim.')"))
    backend.go.set()
    wait_until(lambda: one.evaluate("window.heard.join(' ').endsWith('slept')"))
    heard = one.evaluate("window.heard")
    assert " ".join(heard) == words
    assert all(said.rstrip("”")[-1] in ".!" for said in heard[:-1]), f"not whole sentences: {heard}"
    assert one.locator(".turns[aria-live], .turns [aria-live]").count() == 0, (
        "tokens are not spoken one by one"
    )


def test_a_screen_reader_hears_all_of_an_answer_that_comes_within_a_frame(page):  # noqa: F811
    """The end was told in the place of the sentences before it."""
    one = page(ScriptedBackend(["It rains. ", "Go in"]))
    one.evaluate("window.requestAnimationFrame = () => 0")  # no frame comes
    ask(one)
    ended(one)
    assert one.locator("[aria-live]").text_content() == "It rains. Go in"


@pytest.mark.parametrize("size", [(320, 640), (390, 844), (390, 420), (1280, 800)], ids=str)
def test_the_composer_stays_in_view_and_nothing_runs_over_the_edge(page, size):  # noqa: F811
    backend = ScriptedBackend([*LINES, "x" * 3000])
    backend.models = lambda: ["a-model-with-a-name-of-its-own/" * 6]
    one = page(backend, viewport=size)
    ask(one, "y" * 120)
    said(one, "101 tokens").wait_for()
    box = one.get_by_label("message of conversation 1").bounding_box()
    assert box["y"] + box["height"] <= size[1]
    assert one.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert one.evaluate("document.documentElement.scrollHeight") <= size[1], "the page itself never scrolls"
    one.get_by_role("button", name="Settings").click()
    assert one.locator("#knobs").bounding_box()["width"] <= size[0]


def test_nothing_moves_for_whoever_wants_no_motion(page):  # noqa: F811
    one = page(Held(["word"]))
    one.emulate_media(reduced_motion="reduce")
    ask(one)
    one.locator(".running .text", has_text="word").wait_for()
    assert one.evaluate("document.getAnimations().length") == 0
    one.emulate_media(reduced_motion="no-preference")
    assert one.evaluate("document.getAnimations().length") == 1
    one.keyboard.press("Escape")
    said(one, "stopped").wait_for()
