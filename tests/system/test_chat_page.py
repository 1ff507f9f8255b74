"""The chat page in a real browser: words as they come, stop, several conversations, and nothing of a model's
words is ever run.
"""

from contextlib import ExitStack

from engine.core.engine_thread import EngineThread
from engine.core.llm_engine import LLMEngine
from engine.execution.runner import ModelRunner
from engine.scheduling.continuous import ContinuousScheduler
from tests.part04.serving import ScriptedBackend, lasting_port, serve
from tests.part06.fakes import CONFIG, TOKENIZER, BlockCache, FakeForward, Gate
from tests.system.attack import wait_until
from tests.system.chatting import (  # noqa: F401
    TEMPLATE,
    Echo,
    Held,
    ask,
    asked,
    chat_app,
    ended,
    page,
    prompt_of,
    said,
)
from tests.system.tools import browser  # noqa: F401

# --- an answer ----------------------------------------------------------------------------------------------


def test_words_come_before_the_answer_is_complete(page):  # noqa: F811
    backend = Held(["One", " two"], [" three"])
    one = page(backend)
    one.get_by_text("ready").wait_for()
    ask(one)
    said(one, "One two").wait_for()
    assert one.locator(".running").count() == 1
    backend.go.set()
    said(one, "One two three").wait_for()
    said(one, "3 tokens").wait_for()
    ended(one)


def test_stop_ends_the_work_in_the_engine(page):  # noqa: F811
    cache = BlockCache(64, 16)
    gate = Gate(FakeForward(cache), permits=2)
    engine = LLMEngine(TOKENIZER, CONFIG, ContinuousScheduler(cache, 4, 256), ModelRunner([gate]))
    running = EngineThread(engine, "fake")
    one = page(running)
    try:
        ask(one)
        wait_until(lambda: gate.entered == 3)
        assert len(engine.scheduler.running) == 1
        one.get_by_role("button", name="Stop").click()
        said(one, "stopped").wait_for()
        wait_until(lambda: not running._commands.empty())  # told, and at its third step
        gate.allow(1)
        wait_until(lambda: not engine.has_unfinished_requests())
        assert gate.entered == 3, "a step was made for an answer that nobody reads"
    finally:
        gate.open()


def test_what_was_stopped_stays_and_the_conversation_goes_on(page):  # noqa: F811
    backend = Held(["Half"])
    one = page(backend)
    ask(one, "Hi")
    said(one, "Half").wait_for()
    one.keyboard.press("Escape")
    said(one, "stopped").wait_for()
    wait_until(lambda: backend.open == 0)
    backend.go.set()
    ask(one, "And?")
    said(one, "Half end.").wait_for()
    said(one, "2 tokens").wait_for()
    assert asked(backend, 1) == prompt_of(("user", "Hi"), ("assistant", "Half"), ("user", "And?"))


def test_stopped_before_its_first_word_a_question_was_never_asked(page):  # noqa: F811
    backend = Held([])
    one = page(backend)
    ask(one, "Hi")
    wait_until(lambda: backend.open == 1)
    one.get_by_role("button", name="Stop").click()
    said(one, "stopped").wait_for()
    wait_until(lambda: backend.open == 0)
    backend.go.set()
    ask(one, "And?")
    said(one, "end.").wait_for()
    assert asked(backend, 1) == prompt_of(("user", "And?"))


def test_a_failure_is_told_and_can_be_tried_again(page):  # noqa: F811
    backend = ScriptedBackend(["half an "], error=RuntimeError("broken"))
    one = page(backend)
    ask(one, "Hi")
    said(one, "the engine failed").wait_for()
    backend.error, backend.pieces = None, ["whole"]
    one.get_by_role("button", name="Try again").click()
    said(one, "whole").wait_for()
    said(one, "1 tokens").wait_for()
    assert one.locator(".user").count() == 1, "the question stands once"
    assert asked(backend, 1) == prompt_of(("user", "Hi"))


def test_a_failed_question_is_no_part_of_the_conversation(page):  # noqa: F811
    backend = ScriptedBackend(["half an "], error=RuntimeError("broken"))
    one = page(backend)
    ask(one, "Hi")
    said(one, "the engine failed").wait_for()
    backend.error = None
    ask(one, "And?")
    said(one, "1 tokens").wait_for()
    assert asked(backend, 1) == prompt_of(("user", "And?"))
    assert one.get_by_role("button", name="Try again").count() == 0, "what follows cannot come before"


def test_the_server_is_restarted_in_mid_answer(page):  # noqa: F811
    backend = ScriptedBackend(["word "], endless=True)
    port = lasting_port()
    with ExitStack() as first:
        one = page.at(first.enter_context(serve(chat_app(backend), port, patience=0)))
        ask(one)
        said(one, "word word").wait_for()
        first.close()
    said(one, "the connection to the server broke off").wait_for()
    ask(one)
    said(one, "the server cannot be reached").wait_for()
    another = ScriptedBackend(["back", " again"])
    another.models = lambda: ["another"]
    with serve(chat_app(another), port):
        ask(one)
        said(one, "back again").wait_for()
        one.get_by_text("ready").wait_for()
        assert one.inner_text("#model") == "another", "another server may have another model"
        ended(one)


def test_a_key_is_asked_for_and_sent(page):  # noqa: F811
    one = page(ScriptedBackend(["yes"]), api_key="secret")
    one.get_by_text("Incorrect API key").wait_for()
    one.get_by_role("button", name="Settings").click()
    one.get_by_label("API key").fill("ключ")
    one.get_by_label("API key").press("Tab")
    one.get_by_text("ASCII").wait_for()
    one.get_by_label("API key").fill(" secret ")
    one.get_by_label("API key").press("Tab")
    one.get_by_text("ready").wait_for()
    ask(one)
    said(one, "yes").wait_for()


def test_the_settings_are_what_is_asked(page):  # noqa: F811
    backend = ScriptedBackend(["yes"])
    one = page(backend)
    one.get_by_role("button", name="Settings").click()
    for name, value in (("Temperature", "0.3"), ("Top p", "0.5"), ("Tokens, at most", "7"), ("Seed", "11")):
        one.get_by_label(name).fill(value)
    one.get_by_label("told first").fill("Be kind.")
    ask(one, "Hi")
    said(one, "yes").wait_for()
    params = backend.asked[0][1]
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.3, 0.5, 7, 11)
    assert asked(backend, 0) == prompt_of(("system", "Be kind."), ("user", "Hi"))
    one.get_by_label("Temperature").fill("3")
    ask(one, "kept")
    assert one.evaluate("document.activeElement.name") == "temperature", "what cannot be asked is pointed at"
    assert one.get_by_label("message of conversation 1").input_value() == "kept"
    assert len(backend.asked) == 1


def test_no_more_tokens_are_asked_for_than_the_model_sees(page):  # noqa: F811
    backend = ScriptedBackend(["yes"])
    one = page(backend, details_of=lambda _: {"max_model_len": 64})
    one.get_by_text("ready").wait_for()
    ask(one, "Hi")
    said(one, "yes").wait_for()
    assert backend.asked[0][1].max_tokens == 64


# --- several ------------------------------------------------------------------------------------------------


def test_conversations_side_by_side_are_asked_at_once(page):  # noqa: F811
    backend = ScriptedBackend(["la "], endless=True)
    one = page(backend)
    for _ in range(5):
        one.get_by_role("button", name="New conversation").click()
    assert one.get_by_role("button", name="New conversation").is_disabled(), (
        "a browser opens six connections to a server: a seventh answer would wait for one"
    )
    one.get_by_role("button", name="Settings").click()
    one.get_by_label("Ask all conversations at once").check()
    ask(one)
    said(one, "la la").nth(5).wait_for()
    assert backend.open == 6
    for _ in range(6):
        one.get_by_role("button", name="Stop").first.click()
    said(one, "stopped").nth(5).wait_for()
    one.get_by_role("button", name="Close conversation 2").click()
    assert one.locator(".conversation").count() == 5
    assert one.get_by_role("button", name="New conversation").is_enabled()


def test_two_tabs_at_once_each_with_its_own_text(page):  # noqa: F811
    backend = Echo()
    left = page(backend)
    right = page.tab(left.context, left.url)
    ask(left, "apples and pears")
    ask(right, "boats and trains")
    left.locator(".assistant", has_text="apples").wait_for()
    right.locator(".assistant", has_text="boats").wait_for()
    assert backend.open == 2
    backend.go.set()
    for one, text in ((left, "apples and pears "), (right, "boats and trains ")):
        said(one, "3 tokens").wait_for()
        assert one.locator(".assistant .text").text_content() == text


def test_closing_a_conversation_stops_its_answer(page):  # noqa: F811
    backend = ScriptedBackend(["la "], endless=True)
    one = page(backend)
    ask(one)
    said(one, "la la").wait_for()
    one.get_by_role("button", name="Close conversation 1").click()
    wait_until(lambda: backend.open == 0)
    assert one.get_by_label("message of conversation 2").is_visible(), "there is always one"
