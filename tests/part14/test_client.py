"""The client's side: words as they come, errors in the server's words, a stopped answer stops the server."""

import io
import json
import threading

import pytest
from rich.console import Console

from engine.client.stream import Answer, ChatClient, ChatFailed, _events
from engine.client.terminal import Chat, shown, stats
from engine.decoding.params import SamplingParams
from tests.part04.serving import wait_until
from tests.part06.fakes import told_alone
from tests.part14.test_chat import ALONE, QUESTION, TEMPLATE

ASK = {"temperature": 0, "max_completion_tokens": 20, "ignore_eos": True}


@pytest.fixture
def client(serving):
    client = ChatClient(serving())
    yield client
    client.close()


@pytest.fixture
def talk(client):
    """talk(lines) -> what the terminal shows when these are typed, and the chat."""

    def start(lines, **options):
        screen, typed = io.StringIO(), iter(lines)

        def read(_):
            line = next(typed, EOFError)
            if not isinstance(line, str):
                raise line
            return line

        chat = Chat(client, Console(file=screen, width=200), **ASK | options)
        chat.run(read)
        return screen.getvalue(), chat

    return start


def test_the_pieces_are_the_answer_and_the_last_one_tells_what_it_took(client):
    pieces = list(client.stream(QUESTION, **ASK))
    text, answer = pieces[-1]
    assert text == ""
    assert "".join(text for text, _ in pieces) == answer.text == ALONE.text
    assert (answer.finish_reason, answer.num_tokens) == ("length", 20)
    assert 0 < answer.first_word <= answer.last_word


def test_a_stream_that_is_left_stops_on_the_server(serving):
    client = ChatClient(serving())
    pieces = client.stream(QUESTION, **ASK | {"max_completion_tokens": 200})
    next(pieces)
    pieces.close()
    engine = serving.backend.engine
    wait_until(lambda: not engine.has_unfinished_requests())
    client.close()


def test_the_servers_words(client, serving):
    with pytest.raises(ChatFailed, match="temperature"):
        list(client.stream(QUESTION, temperature=-1))
    with pytest.raises(ChatFailed, match="'nobody' does not exist"):
        list(ChatClient(str(client._http.base_url), model="nobody").stream(QUESTION))
    locked = serving(api_key="secret")
    with pytest.raises(ChatFailed, match="API key"):
        ChatClient(locked).model  # noqa: B018
    assert ChatClient(locked, "secret").model == "m"


def test_nobody_there():
    with pytest.raises(ChatFailed, match=r"127\.0\.0\.1:9"):
        ChatClient("http://127.0.0.1:9").model  # noqa: B018


def test_events_pass_over_what_is_none():
    lines = [": comment", "", "event: x", 'data: {"a": 1}', "data:[DONE]", "data: never read"]
    assert list(_events(iter(lines))) == [{"a": 1}]


def test_a_conversation_goes_on_from_what_was_said(talk):
    screen, chat = talk([QUESTION[0]["content"], "And then?"])
    assert shown(ALONE.text) in screen
    history = [
        *QUESTION,
        {"role": "assistant", "content": ALONE.text},
        {"role": "user", "content": "And then?"},
    ]
    second = told_alone(
        TEMPLATE.render(history), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    )
    assert chat.turns == [*history, {"role": "assistant", "content": second.text}]


def test_reset_system_stats_and_save(talk, tmp_path):
    file = tmp_path / "chat.json"
    screen, chat = talk(
        ["/stats", "Hi", "/reset", "/system Be kind.", "Hi", "/stats", f"/save {file}", "/save /no/x/y",
         "/what"]
    )  # fmt: skip
    saved = json.loads(file.read_text())
    assert [m["role"] for m in saved] == ["system", "user", "assistant"], "what was reset is forgotten"
    assert saved == chat.messages
    for words in ("no answer yet", "first word", "tokens/s", "20 tokens", "No such file", "/reset "):
        assert words in screen, f"{words!r} is not shown"


def test_ctrl_c_stops_the_answer_and_keeps_what_came(client):
    class Interrupted:
        """A reader who presses Ctrl-C at the third piece."""

        model, closed = "m", threading.Event()

        def stream(self, messages, **options):
            try:
                for i, piece in enumerate(client.stream(messages, **options)):
                    if i == 3:
                        raise KeyboardInterrupt
                    yield piece
            finally:
                self.closed.set()

    screen = io.StringIO()
    chat = Chat(Interrupted(), Console(file=screen, width=200), **ASK)
    lines = iter(["Tell me about the dog.", KeyboardInterrupt(), "/exit"])

    def read(_):
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    chat.run(read)
    assert Interrupted.closed.is_set()
    assert ALONE.text.startswith(chat.turns[-1]["content"])
    assert chat.turns[-1]["role"] == "assistant"
    assert "[stopped]" in screen.getvalue()
    assert "Ctrl-D ends" in screen.getvalue(), "at the prompt, Ctrl-C ends nothing"


def test_an_error_leaves_the_conversation_as_it_was(talk):
    screen, chat = talk(["Hi"], temperature=-1)
    assert "temperature" in screen
    assert chat.turns == []


def test_what_a_model_says_commands_no_terminal():
    assert shown("a\x1b[2Jb\x9b1m\r\x07\n\tc 🐉\u200d") == "a\ufffd[2Jb\ufffd1m\ufffd\ufffd\n\tc 🐉\u200d"


def test_speeds():
    assert Answer(num_tokens=11, first_word=1.0, last_word=2.0).tokens_per_second == 10
    assert Answer(num_tokens=1, first_word=1.0, last_word=1.0).tokens_per_second is None
    rows = list(stats([Answer("x", "stop", 11, 1.0, 2.0), Answer("x", "stop", 5, 0.5, 0.5), Answer()]))
    assert len(rows) == 3, "an answer that never came is not counted"
    assert "750 ms" in rows[-1]
