"""`ruvon chat`, `ruvon top` and `ruvon bench serve` as clients of a server that means harm: one line is said,
nothing reaches the terminal that would command it, and the process ends. What else such servers answer: the
tests of Parts 11, 14 and 15.
"""

import json
import os
import pty
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from engine.client.untrusted import printable
from engine.text.tokenizer import Tokenizer
from tests.system.ready import Popen, ruvon

ESCAPES = "\x1b]0;title\x07\x1b[2J"
MODELS = {"data": [{"id": "m"}]}


def answer(body: dict | bytes, status: bytes = b"200 OK", kind: bytes = b"application/json") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\nconnection: close\r\n\r\n%b" % (status, kind, content)


def told(*chunks: dict) -> bytes:
    events = b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks)
    return answer(events + b"data: [DONE]\n\n", kind=b"text/event-stream")


def chunk(text: str, reason: str | None = None, **more) -> dict:
    choice = {"index": 0, "delta": {"content": text}, "text": text, "finish_reason": reason}
    return {"choices": [choice], **more}


@contextmanager
def server(models: bytes, else_: bytes = b"") -> Iterator[str]:
    """Answers a GET of the models so, and all else as `else_`."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                head = connection.recv(2**16)
                connection.sendall(models if b"/models" in head else else_)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(2**16):  # what is unread would reset the connection
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


CHAT, BENCH = ["chat", "Hi", "--url"], ["bench", "serve", "--num-prompts", "2", "--base-url"]
TOP = ["top", "--once"]
COMMANDS = {
    "an error": (CHAT, answer({"error": {"message": ESCAPES}}, b"400 Bad"), b""),
    "a reason": (CHAT, answer(b"<html>", b"500 " + ESCAPES.encode()), b""),
    "half a character": (CHAT, answer(MODELS), told(chunk("a\ud800"), chunk(ESCAPES, "stop"))),
    "a deep model": (CHAT, answer(b"[" * 100_000), b""),
    "a deep dashboard": (TOP, b"", answer(b"[" * 100_000)),
    "no HTTP": (TOP, b"", ESCAPES.encode() + b"\r\n\r\n"),
    "no dashboard": (TOP, b"", answer({"seconds": [ESCAPES]})),
    "no models": (BENCH, answer(b"[1]"), b""),
    "a bad status": (BENCH, answer(b"", b"500 " + ESCAPES.encode()), b""),
    "a number of tokens": (
        BENCH, answer(MODELS), told(chunk("a"), chunk("", "stop", usage={"prompt_tokens": "x"})),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_is_wrong_and_commands_no_terminal(name):
    arguments, models, else_ = COMMANDS[name]
    with server(models, else_) as url:
        done = ruvon(*arguments, url)
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said[-500:]
    assert "\x1b]" not in said
    assert "\x1b[2J" not in said
    assert done.returncode == (0 if name == "half a character" else 1)


def in_a_terminal(*arguments: str, keys: bytes = b"") -> bytes:
    """What the command, which ends well, writes there."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "engine.cli.main", *arguments]
    with Popen(command, stdin=slave, stdout=slave, stderr=slave) as process:
        os.close(slave)
        os.write(master, keys)
        said = b""
        with suppress(OSError):  # its end
            while piece := os.read(master, 2**16):
                said += piece
        assert process.wait(240) == 0, said
    os.close(master)
    return said


def test_a_conversation_with_a_model_of_an_odd_name():
    with server(answer({"data": [{"id": f"[/b]{ESCAPES}\ud800"}]})) as url:
        said = in_a_terminal("chat", "--url", url, keys=b"/exit\n")
    assert b"[/b]\xef\xbf\xbd]0;title" in said
    assert b"\x1b]" not in said


def test_tokens_are_text_in_a_terminal_and_as_they_are_in_a_pipe():
    ids = json.dumps(Tokenizer.from_pretrained("storyteller").encode(ESCAPES))
    decode = ("tokenize", "--decode", ids)
    assert ruvon(*decode).stdout == ESCAPES + "\n"
    assert in_a_terminal(*decode).decode() == printable(ESCAPES) + "\r\n"
