"""`ruvon chat` and `ruvon ui` as a user meets them: one line for an error, an answer alone in a pipe, a page
on this machine only.
"""

import importlib.util
import re
import subprocess
import sys
from contextlib import suppress

import pytest

from engine.cli.main import app
from tests.part04.serving import lasting_port
from tests.part14.speaker import Speaker
from tests.system.test_serve import ENVIRONMENT, ROOT
from tests.system.tools import DEADLINE, browser, streamlit  # noqa: F401

RUVON = [sys.executable, "-m", "engine.cli.main"]


def chat(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*RUVON, "chat", *arguments],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE, **options,
    )  # fmt: skip


@pytest.fixture
def speaker():
    speaker = Speaker()
    speaker.go.set()
    with speaker.serve() as speaker.url:
        yield speaker


def test_in_a_pipe_the_answer_stands_alone(speaker):
    wishes = ["--system", "Be kind.", "--max-tokens", "9", "--temperature", "0"]
    done = chat("Hi", "--url", speaker.url, *wishes)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Hello end.\n", "")
    assert speaker.asked[0]["max_completion_tokens"] == 9
    assert speaker.asked[0]["temperature"] == 0, "nothing is asked for only if it is left out"
    assert [turn["content"] for turn in speaker.asked[0]["messages"]] == ["Be kind.", "Hi"]
    done = chat("--url", speaker.url, input="line one\nline two\n")
    assert done.stdout == "Hello end.\n"
    assert speaker.asked[1]["messages"][-1]["content"] == "line one\nline two"


def test_an_empty_pipe_asks_nothing(speaker):
    done = chat("--url", speaker.url, input="\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "ruvon chat: no question came through the pipe\n"
    assert speaker.asked == []


def test_a_reader_who_has_enough_is_no_error(speaker):
    with subprocess.Popen(
        [*RUVON, "chat", "Hi", "--url", speaker.url],
        cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--url", "http://127.0.0.1:9"], "; ruvon serve starts a server"),
        (["--url", "localhost:8000"], "http://"),
        (["--url", "http://127.0.0.1:9", "--api-key", "ключ"], "key"),
    ],
)
def test_what_cannot_be_asked_is_said_in_one_line(arguments, says):
    done = chat("Hi", *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(rf"ruvon chat: .*{re.escape(says)}.*\n", done.stderr)


def test_without_streamlit_ui_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        app(["ui"], prog_name="ruvon")
    assert caught.value.code == "ruvon ui: streamlit is not installed; pip install 'ruvon[ui]'"


def test_ui_becomes_streamlit_on_this_machine_with_what_it_was_given(monkeypatch):
    became = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr("os.execve", lambda *given: became.append(given))
    monkeypatch.delenv("RUVON_API_KEY", raising=False)
    for key in ([], ["--api-key", "secret"]):
        with pytest.raises(SystemExit):
            app(["ui", "--url", "http://x:1", "--port", "1234", *key], prog_name="ruvon")
    (path, command, without), (*_, environment) = became
    assert path == command[0] == sys.executable
    assert {"--server.address=127.0.0.1", "--server.port=1234"} < set(command)
    assert environment["RUVON_URL"] == without["RUVON_URL"] == "http://x:1"
    assert (environment["RUVON_API_KEY"], without.get("RUVON_API_KEY")) == ("secret", None)


def test_the_streamlit_page_in_a_browser(browser, streamlit):  # noqa: F811
    speaker = Speaker(["Half", " of"], meanwhile=" it")  # Streamlit stops at the next word
    port = lasting_port()
    with (
        speaker.serve() as url,
        subprocess.Popen(
            [*RUVON, "ui", "--url", url, "--port", str(port)],
            cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            assert any(f"127.0.0.1:{port}" in line for line in process.stdout), "the page is not there"
            context = browser.new_context()
            context.set_default_timeout(DEADLINE * 1e3)
            one, hosts = context.new_page(), set()
            one.on("request", lambda request: hosts.add(request.url.split("/")[2]))
            one.goto(f"http://127.0.0.1:{port}")
            one.get_by_placeholder("Say something").fill("Hi")
            one.keyboard.press("Enter")
            one.get_by_text("Half of").wait_for()
            one.get_by_test_id("stMainBlockContainer").get_by_role("button", name="Stop").click()
            assert speaker.left.wait(DEADLINE), "the server was not told"
            one.get_by_text("stopped").wait_for()
            speaker.go.set()
            one.get_by_placeholder("Say something").fill("And?")
            one.keyboard.press("Enter")
            one.get_by_text("Half of end.").wait_for()
            first, kept, second = (turn["content"] for turn in speaker.asked[1]["messages"])
            assert (first, kept[:10], second) == ("Hi", "Half of it", "And?")
            assert hosts == {f"127.0.0.1:{port}"}, "no other host is asked for anything"
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):  # at times Streamlit waits for its open page for ever
                process.wait(10)
            process.kill()
