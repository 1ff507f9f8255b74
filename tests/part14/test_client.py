"""The client's side: words as they come, errors in the server's words, a stopped answer stops the server."""

import io
import json
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from engine.client.stream import ChatAnswer, ChatClient, ChatFailed
from engine.client.terminal import TerminalChat, printable, stats
from engine.decoding.params import SamplingParams
from tests.part04.serving import DEADLINE, wait_until
from tests.part06.fakes import TOKENIZER, told_alone
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

        chat = TerminalChat(client, Console(file=screen, width=200), **ASK | options)
        chat.run(read)
        return screen.getvalue(), chat

    return start


def test_the_pieces_are_the_answer_and_the_last_one_tells_what_it_took(client):
    pieces = list(client.stream(QUESTION, **ASK))
    text, answer = pieces[-1]
    assert text == ""
    assert "".join(text for text, _ in pieces) == answer.text == ALONE.text
    assert (answer.finish_reason, answer.num_tokens) == ("length", 20)
    assert answer.num_prompt_tokens == len(TOKENIZER.encode(TEMPLATE.render(QUESTION)))
    assert 0 < answer.first_text_seconds <= answer.last_text_seconds


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


def test_a_server_of_this_machine_is_asked_without_a_proxy(serving, monkeypatch):
    """One that the environment names knows no server that listens on 127.0.0.1 alone."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody is
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    client = ChatClient(serving())
    assert client.model == "m"
    client.close()
    with pytest.raises(ChatFailed, match="Connection refused"):
        ChatClient("http://elsewhere.example").model  # noqa: B018


def test_nobody_there():
    with pytest.raises(ChatFailed, match=r"127\.0\.0\.1:9"):
        ChatClient("http://127.0.0.1:9").model  # noqa: B018


def test_what_is_no_address_and_no_key_is_told():
    with pytest.raises(ChatFailed, match="no address"):
        ChatClient("http://x:port")
    with pytest.raises(ChatFailed, match="begins with http://"):
        ChatClient("localhost:8000")
    with pytest.raises(ChatFailed, match="API key"):
        ChatClient("http://127.0.0.1:9", "ключ")


class Scripted(BaseHTTPRequestHandler):
    """A server that says what it is told to, and hangs up."""

    answer: tuple[int, str, bytes]  # status, content type, body

    def do_POST(self):
        status, kind, body = self.answer
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def scripted():
    """scripted(status, content type, body) -> the pieces that a client makes of this answer."""
    with ExitStack() as stack:

        def ask(status, kind, body):
            handler = type("Handler", (Scripted,), {"answer": (status, kind, body)})
            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), handler))
            thread = threading.Thread(target=server.serve_forever, args=[0.01])
            thread.start()
            stack.callback(thread.join, DEADLINE)
            stack.callback(server.shutdown)
            client = ChatClient(f"http://127.0.0.1:{server.server_port}", model="m")
            stack.callback(client.close)
            return [text for text, _ in client.stream(QUESTION)]

        yield ask


def said(content, reason=None):
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]}, ensure_ascii=False)}\n\n".encode()


STREAM = "text/event-stream; charset=utf-8"


def test_what_only_python_takes_for_a_lines_end_arrives(scripted):
    """Every server but a few sends U+2028 as it is: in JSON it may stand so."""
    text = "one\u2028two\u2029three\x85four"
    assert scripted(200, STREAM, said(text, "stop") + b"data: [DONE]\n\n") == [text, ""]


def test_other_servers_other_lines(scripted):
    body = b": wait\r\n\r\n" + said("Hi", "stop").replace(b"\n", b"\r\n") + b"event: x\r\ndata:[DONE]\r\n\r\n"
    assert scripted(200, STREAM, body + b"data: never read\n\n") == ["Hi", ""]


@pytest.mark.parametrize(
    ("status", "kind", "body", "words"),
    [
        (200, STREAM, said("Hi"), "the answer broke off"),
        (200, STREAM, said("Hi") + b'data: {"error": {"message": "no more"}}\n\n', "no more"),
        (200, STREAM, b"data: {\n\n", "does not speak"),
        (200, STREAM, b"data: 3\n\n", "does not speak"),
        (200, "text/html", b"<h1>Welcome</h1>", "text/html, no event stream"),
        (302, "text/html", b"", "302 Found"),
        (502, "text/html", b"<h1>Bad</h1>", "502 Bad Gateway"),
        (429, "application/json", b'{"error": {"message": "come back later"}}', "come back later"),
    ],
)
def test_an_answer_that_is_none_is_told(scripted, status, kind, body, words):
    with pytest.raises(ChatFailed, match=words):
        scripted(status, kind, body)


def test_a_conversation_goes_on_from_what_was_said(talk):
    screen, chat = talk([QUESTION[0]["content"], "And then?"])
    assert printable(ALONE.text) in screen
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
    assert len(chat.answers) == 1, "what the answers took is forgotten, too"
    for words in ("no answer yet", "first word", "tokens/s", "20 tokens", "No such file", "/reset "):
        assert words in screen, f"{words!r} is not shown"


def test_an_error_leaves_the_conversation_as_it_was(talk):
    screen, chat = talk(["Hi"], temperature=-1)
    assert "temperature" in screen
    assert chat.turns == []


def test_what_a_model_says_commands_no_terminal():
    assert printable("a\x1b[2Jb\x9b1m\r\x07\n\tc 🐉\u200d") == "a\ufffd[2Jb\ufffd1m\ufffd\ufffd\n\tc 🐉\u200d"


def test_speeds():
    assert ChatAnswer(num_tokens=11, first_text_seconds=1.0, last_text_seconds=2.0).tokens_per_second == 10
    assert ChatAnswer(num_tokens=1, first_text_seconds=1.0, last_text_seconds=1.0).tokens_per_second is None
    rows = list(
        stats([ChatAnswer("x", "stop", 11, 1.0, 2.0), ChatAnswer("x", "stop", 5, 0.5, 0.5), ChatAnswer()])
    )
    assert len(rows) == 3, "an answer that never came is not counted"
    assert "750 ms" in rows[-1]


def test_of_a_stopped_answer_the_tokens_that_came_are_told():
    answer = ChatAnswer()
    for seconds, text in enumerate(("Once", " upon", " a"), 1):
        answer.add_text(text, seconds)
    line, _ = stats([answer])
    assert line.endswith("3 or more tokens"), (
        "the server's count comes last: without it, each piece is a token"
    )


@pytest.mark.parametrize("port", [65536, 99999, -1])
def test_a_port_that_no_server_has_is_refused_before_anybody_is_asked(port):
    with pytest.raises(ChatFailed, match=f"127.0.0.1:{port}' is no address"):
        ChatClient(f"http://127.0.0.1:{port}")
