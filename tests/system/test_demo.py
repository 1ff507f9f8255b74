"""`ruvon demo`, the main job: it runs without a terminal, beside a taken port, and leaves nothing behind."""

import io
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from rich.console import Console

from engine.demo import server
from engine.demo.crowd import QUESTIONS, Crowd
from engine.demo.server import is_free
from engine.demo.show import _introduce, crowd_board
from engine.demo.story import tell_story
from engine.wiring.engine_args import EngineArgs
from tests.system.test_serve import DEADLINE, ENVIRONMENT, ROOT

DEMO = [sys.executable, "-m", "engine.cli.main", "demo"]


@pytest.fixture
def taken():
    """Port 8000 is somebody else's."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", 8000))
            other.listen()
        except OSError:
            pass  # it is already
        yield


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_people_are_answered_numbers_are_shown_and_the_server_ends(taken):
    done = subprocess.run(
        [*DEMO, "--seconds", "0", "--max-num-seqs", "4"], cwd=ROOT, encoding="utf-8", capture_output=True,
        env=ENVIRONMENT | {"RUVON_API_KEY": "of another server", "COLUMNS": "100"}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    ports = {int(port) for port in re.findall(r"http://127\.0\.0\.1:(\d+)/", done.stdout)}
    assert len(ports) == 1
    assert 8000 not in ports, "it must find a free port where 8000 is taken"
    assert not listens(ports.pop()), "the server is still there"
    for name, question in QUESTIONS.items():
        assert f"{name}: {question}" in done.stdout
    assert "6, 6 answers" in done.stdout, "with no time left, each person asks once, and is answered"
    assert re.search(r"[1-9]\d* tokens in \d+ s, up to [1-9]", done.stdout)
    assert re.search(r"speculation +\d+% of the drafts were right", done.stdout)
    assert "make serve" in done.stdout
    assert "\x1b" not in done.stdout, "without a terminal there is nothing to command"


def test_who_ends_it_ends_its_server():
    with subprocess.Popen(
        [*DEMO, "--seconds", "600", "--model", "storyteller-draft"], cwd=ROOT, env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)/dashboard", line):
                break
        else:
            pytest.fail("no server was started")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE)
    assert process.returncode == 143
    assert not listens(int(found[1])), "the server outlived the demo"


def test_a_port_that_is_taken_is_not_taken_again():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert not is_free(other.getsockname()[1])
        port = other.getsockname()[1]
    assert is_free(port)


def test_who_loses_the_port_to_another_takes_any(tmp_path, monkeypatch):
    """Two demos that begin at once both see it free."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        answers = iter([True])
        monkeypatch.setattr(server, "is_free", lambda port: next(answers, False))
        with server.served(tmp_path / "log", "--model", "storyteller-draft", port=port) as (url, _):
            assert not url.endswith(f":{port}")


def test_a_port_that_was_given_back_just_now_is_free():
    """Its last connection lingers in the system for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""
    assert is_free(port)


def test_what_a_model_says_is_text_and_its_end_is_shown():
    crowd = Crowd("http://x", chat=True)
    crowd.people[0].text = "long " * 50 + "the end [red]"
    console = Console(width=60, force_terminal=False)
    with console.capture() as shown:
        console.print(crowd_board(crowd, 60))
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= 60
    assert len(lines) == 2 * len(QUESTIONS) + 3
    assert lines[1].rstrip().endswith("the end [red]")


def test_a_known_shape_is_called_by_its_name():
    console = Console(width=100, record=True, file=io.StringIO())
    _introduce(console, "http://here", EngineArgs(model="GPT2", load_format="dummy"))
    assert "serves gpt2 on this machine" in console.export_text()


@pytest.mark.parametrize(
    ("max_model_len", "max_tokens", "reason"),
    [(64, 4, "it reached --max-tokens"), (24, 64, "the context is full")],
)
def test_a_story_says_why_it_ends(capsys, monkeypatch, max_model_len, max_tokens, reason):
    monkeypatch.setenv("COLUMNS", "120")
    tell_story(EngineArgs(model="storyteller-draft", max_model_len=max_model_len, max_num_seqs=1), max_tokens)
    assert f"({reason})" in capsys.readouterr().out


def test_a_server_that_does_not_end_is_killed_and_the_blocks_own_error_stays(tmp_path, monkeypatch):
    """A program that ignores SIGTERM stands for the server."""
    deaf = tmp_path / "python"
    deaf.write_text(
        f"#!{sys.executable}\nimport signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('Uvicorn running on http://here', flush=True)\ntime.sleep(3600)\n"
    )
    deaf.chmod(0o755)
    monkeypatch.setattr(server, "STOP_SECONDS", 0.01)
    monkeypatch.setattr(server.sys, "executable", str(deaf))
    with pytest.raises(KeyError, match="of the block"), server.served(tmp_path / "log") as (_, pid):
        raise KeyError("of the block")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
