"""The Streamlit page, run by Streamlit's own test runner, with a server that waits for the test."""

from contextlib import ExitStack
from pathlib import Path

import pytest

import engine.client
from tests.part04.serving import DEADLINE
from tests.part14.speaker import Speaker

AppTest = pytest.importorskip("streamlit.testing.v1", reason="needs streamlit: the extra ui").AppTest
PAGE = Path(engine.client.__file__).with_name("streamlit_page.py")


@pytest.fixture
def open_page(monkeypatch):
    """open_page(speaker) -> the page of its server, once run."""
    with ExitStack() as stack:

        def start(speaker: Speaker):
            monkeypatch.setenv("RUVON_URL", stack.enter_context(speaker.serve()))
            monkeypatch.delenv("RUVON_API_KEY", raising=False)
            return AppTest.from_file(str(PAGE), default_timeout=DEADLINE).run()

        yield start


def speaker_of(*pieces: str) -> Speaker:
    speaker = Speaker(pieces[:1], pieces[1:])
    speaker.go.set()
    return speaker


def ask(page, question: str):
    page.chat_input[0].set_value(question).run()
    failed = [f"{error.proto.type}: {error.message}" for error in page.exception]
    assert not failed, "the page's run ended with this"
    return page


def texts(page) -> list[str]:
    return [text.value for text in page.text]


def test_an_answer_and_what_it_took(open_page):
    page = ask(open_page(speaker_of("Hello", " you")), "Hi")
    assert texts(page) == ["Hi", "Hello you"]
    assert page.caption[-1].value.startswith("first word after ")
    assert page.caption[-1].value.endswith("2 tokens")
    assert [button.label for button in page.button] == ["New conversation"], "Stop goes with the answer"


def test_the_conversation_goes_on_and_can_be_begun_anew(open_page):
    speaker = speaker_of("Yes")
    page = ask(ask(open_page(speaker), "One"), "Two")
    said = [(turn["role"], turn["content"]) for turn in speaker.asked[1]["messages"]]
    assert said == [("user", "One"), ("assistant", "Yes"), ("user", "Two")]
    page.button[0].click().run()
    assert texts(page) == []
    ask(page, "Three")
    assert len(speaker.asked[2]["messages"]) == 1


def test_the_knobs_are_what_is_asked(open_page):
    speaker = speaker_of("Yes")
    page = open_page(speaker)
    page.slider[0].set_value(0.3)
    page.slider[1].set_value(0.5)
    page.number_input[0].set_value(7)
    page.text_area[0].set_value("Be kind.")
    ask(page, "Hi")
    (asked,) = speaker.asked
    assert (asked["temperature"], asked["top_p"], asked["max_completion_tokens"]) == (0.3, 0.5, 7)
    assert asked["messages"][0] == {"role": "system", "content": "Be kind."}


def test_what_is_stopped_is_kept_and_the_server_stops(open_page, monkeypatch):
    """Streamlit stops a run by raising in it where it next shows something: so does this test."""
    from streamlit.delta_generator import DeltaGenerator
    from streamlit.runtime.scriptrunner import StopException

    speaker = Speaker(["Half", " of"])
    page, text = open_page(speaker), DeltaGenerator.text

    def stopped(place, words, **options):
        if words == "Half of":
            raise StopException
        return text(place, words, **options)

    with monkeypatch.context() as patch:
        patch.setattr(DeltaGenerator, "text", stopped)
        ask(page, "Hi")
    assert speaker.left.wait(DEADLINE), "the server was not told"
    page.run()
    assert texts(page) == ["Hi", "Half of"]
    assert page.caption[-1].value.endswith("stopped")
    speaker.go.set()
    ask(page, "And?")
    assert [turn["content"] for turn in speaker.asked[1]["messages"]] == ["Hi", "Half of", "And?"]


def test_an_error_is_shown_as_text_and_leaves_the_conversation_as_it_was(open_page, monkeypatch):
    speaker = speaker_of("Yes")
    speaker.error = "![](http://evil.example/x.png)"
    page = ask(open_page(speaker), "Hi")
    assert texts(page) == ["Hi", "⚠ ![](http://evil.example/x.png)"]
    assert not page.markdown
    speaker.error = None
    ask(page, "Again")
    assert [turn["content"] for turn in speaker.asked[1]["messages"]] == ["Again"]
    monkeypatch.setenv("RUVON_URL", "http://127.0.0.1:9")
    ask(page, "Anybody?")
    assert "http://127.0.0.1:9" in texts(page)[-1]


def test_a_visitor_can_set_what_the_api_accepts_in_steps_of_a_twentieth(open_page):
    page = open_page(speaker_of("Yes"))
    knobs = {knob.label: (knob.min, knob.max, knob.value, knob.step) for knob in page.slider}
    assert knobs == {"Temperature": (0.0, 2.0, 0.8, 0.05), "Top p": (0.05, 1.0, 0.95, 0.05)}
    assert [(knob.label, knob.min, knob.value) for knob in page.number_input] == [("Tokens, at most", 1, 400)]
