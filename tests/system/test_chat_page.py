"""The chat page in a real browser: words as they come, stop, several conversations, and nothing of a model's
words is ever run.
"""

from contextlib import ExitStack

import pytest

from engine.chat_template import ChatTemplate
from engine.server.app import create_app
from engine.server.chat import chat
from engine.server.chat_page import OPEN_PATHS, chat_page
from tests.part04.serving import ScriptedBackend, serve, wait_until
from tests.part06.fakes import CONFIG, TOKENIZER
from tests.system.tools import DEADLINE, browser  # noqa: F401

TEMPLATE = ChatTemplate.from_pretrained("storyteller")


@pytest.fixture
def page(browser):  # noqa: F811
    """page(backend, **options of create_app) -> the chat page of a server of this backend; in the end the
    browser has complained of nothing but a refused or broken connection, and no stream is open.
    """
    complaints, backends = [], []
    with ExitStack() as stack:

        def open_page(backend, **options):
            backends.append(backend)
            extensions = [chat(TOKENIZER, CONFIG, TEMPLATE), chat_page]
            url = stack.enter_context(
                serve(create_app(backend, extensions, open_paths=OPEN_PATHS, **options))
            )
            context = stack.enter_context(browser.new_context(viewport={"width": 1200, "height": 800}))
            context.set_default_timeout(DEADLINE * 1e3)
            one = context.new_page()
            one.on("console", lambda said: complaints.append((said.type, said.text)))
            one.on("pageerror", lambda error: complaints.append(("error", str(error))))
            one.goto(url)
            return one

        yield open_page
    wait_until(lambda: not any(backend.open for backend in backends))
    assert [said for said in complaints if "Failed to load resource" not in said[1]] == []


def ask(one, text="Hello", number=1) -> None:
    box = one.get_by_label(f"message of conversation {number}")
    box.fill(text)
    box.press("Enter")


def test_words_come_before_the_answer_is_complete_and_stop_stops_the_server(page):
    backend = ScriptedBackend(["word "], endless=True)
    one = page(backend)
    one.get_by_text("ready").wait_for()
    ask(one)
    one.get_by_text("word word").wait_for()
    assert one.locator(".running").count() == 1
    assert backend.open == 1
    one.get_by_role("button", name="Stop").click()
    one.get_by_text("stopped").wait_for()
    wait_until(lambda: backend.open == 0)
    one.get_by_role("button", name="New conversation").click()
    ask(one, number=2)
    one.get_by_text("word word").nth(1).wait_for()
    one.keyboard.press("Escape")  # stops, too
    one.get_by_text("stopped").nth(1).wait_for()
    wait_until(lambda: backend.open == 0)


def test_a_conversation_goes_on(page):
    backend = ScriptedBackend(["Hello", " you"])
    one = page(backend)
    for count, text in enumerate(["Hi", "And?"], 1):
        ask(one, text)
        one.get_by_text("first word after").nth(count - 1).wait_for()
    turns = [("user", "Hi"), ("assistant", "Hello you"), ("user", "And?")]
    prompt = TEMPLATE.render([{"role": role, "content": content} for role, content in turns])
    assert TOKENIZER.decode(backend.asked[1][0]) == prompt


def test_what_the_model_says_is_text(page):
    words = [
        "<img src=x onerror=\"document.title = 'run'\">",
        "<script>document.title = 'run'</script>",
        " & <b>",
    ]
    one = page(ScriptedBackend(words))
    ask(one)
    one.get_by_text("first word after").wait_for()
    assert one.locator(".assistant .text").inner_text() == "".join(words)
    assert one.locator(".assistant .text > *").count() == 0, "what a model says became an element"
    assert one.title() == "ruvon: chat"


def test_conversations_side_by_side_are_asked_at_once(page):
    backend = ScriptedBackend(["la "], endless=True)
    one = page(backend)
    one.get_by_role("button", name="New conversation").click()
    one.get_by_text("Settings").click()
    one.get_by_label("Ask all conversations at once").check()
    ask(one)
    one.get_by_text("la la").nth(1).wait_for()
    assert backend.open == 2
    for _ in range(2):
        one.get_by_role("button", name="Stop").first.click()
    one.get_by_text("stopped").nth(1).wait_for()
    one.get_by_role("button", name="Close conversation 2").click()
    assert one.locator(".conversation").count() == 1


def test_a_failure_is_told_and_can_be_tried_again(page):
    backend = ScriptedBackend(["half an "], error=RuntimeError("broken"))
    one = page(backend)
    ask(one)
    one.get_by_text("the engine failed").wait_for()
    backend.error, backend.pieces = None, ["whole"]
    one.get_by_role("button", name="Try again").click()
    one.get_by_text("whole").wait_for()
    assert one.locator(".user").count() == 1, "the question stands once"


def test_a_key_is_asked_for_and_sent(page):
    one = page(ScriptedBackend(["yes"]), api_key="secret")
    one.get_by_text("API key").first.wait_for()
    assert "key" in one.inner_text("#status").lower()
    one.get_by_text("Settings").click()
    one.get_by_label("API key").fill("secret")
    one.get_by_label("API key").press("Tab")
    one.get_by_text("ready").wait_for()
    ask(one)
    one.get_by_text("yes").wait_for()
