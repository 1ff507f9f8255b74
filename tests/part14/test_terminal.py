"""The chat in a real terminal: words as they come, Ctrl-C, pasted lines, a window that changes, a server that
goes.
"""

import io
import json
from contextlib import ExitStack, contextmanager

import pytest
from rich.console import Console

from engine.client.stream import ChatAnswer
from engine.client.terminal import LineWrapper, TerminalChat
from tests.part04.serving import DEADLINE, lasting_port, wait_until
from tests.part14.speaker import Speaker
from tests.part14.terminal import Terminal


@contextmanager
def chat(speaker: Speaker, **options):
    with speaker.serve() as url, Terminal(url, **options) as terminal:
        terminal.shows("> ")
        yield terminal


def test_words_stream_and_the_chat_ends_with_ctrl_d():
    speaker = Speaker(["One", " two"], [" three"])
    with chat(speaker) as terminal:
        terminal.type("Count.\r")
        terminal.shows("One two")
        assert "three" not in "".join(terminal.screen.lines)
        speaker.go.set()
        terminal.shows("One two three")
        terminal.shows("> ", times=2)
        terminal.type("\x04")
        assert terminal.ended() == 0
        assert "Traceback" not in "".join(terminal.screen.lines)


def test_ctrl_c_stops_the_answer_and_not_the_program():
    speaker = Speaker(["Half"])
    with chat(speaker) as terminal:
        terminal.type("Hi\r")
        terminal.shows("Half")
        terminal.type("\x03")
        terminal.shows("[stopped]")
        assert speaker.left.wait(DEADLINE), "the server was not told"
        terminal.shows("> ", times=2)
        terminal.waits()
        terminal.type("\x03")
        terminal.shows("/exit or Ctrl-D ends the chat")
        speaker.go.set()
        terminal.type("And?\r")
        terminal.shows("Half end.")
        said = [(turn["role"], turn["content"]) for turn in speaker.asked[1]["messages"]]
        assert said == [("user", "Hi"), ("assistant", "Half"), ("user", "And?")], "what was stopped is kept"
        terminal.type("/exit\r")
        assert terminal.ended() == 0


def test_a_pasted_text_of_several_lines_is_one_question():
    import readline

    if "libedit" in (readline.__doc__ or ""):
        pytest.skip("needs GNU readline: libedit takes each pasted line for itself")
    speaker = Speaker()
    speaker.go.set()
    with chat(speaker) as terminal:
        terminal.type("\x1b[200~first\nsecond\x1b[201~\r")
        terminal.shows("Hello end.")
        assert [turn["content"] for turn in speaker.asked[0]["messages"]] == ["first\nsecond"]


TALE = "Once upon a time there was a dog who had a red ball and an unbelievably long tail. 日本語の話"


def pieces(text: str) -> list[str]:
    return [text[i : i + 3] for i in range(0, len(text), 3)]


def test_no_word_is_cut_at_the_edge_and_a_new_width_counts_at_once():
    speaker = Speaker(pieces(TALE), ["\n", *pieces(TALE)])
    with chat(speaker, columns=30) as terminal:
        terminal.type("Go\r")
        terminal.shows("話")
        terminal.resize(50)
        speaker.go.set()
        terminal.shows("話", times=2)
        terminal.shows("> ", times=2)
        lines = [line.rstrip() for line in terminal.screen.lines]
    assert lines[lines.index("> Go") + 1 : -1] == [
        "Once upon a time there was a", "dog who had a red ball and an", "unbelievably long tail.",
        "日本語の話",
        "Once upon a time there was a dog who had a red", "ball and an unbelievably long tail. 日本語の話",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "text", "written"),
    [
        (80, "a b\n\nc", "a b\n\nc"),
        (6, "ab cd ef", "ab cd\nef"),
        (6, "abc def", "abc d\b \b\ndef"),
        (6, "abcdefgh", "abcde\nfgh"),
        (80, "a\tb", "a    b"),
        (6, "日本語", "日本\n語"),
    ],
)
def test_wrapping_character_by_character(width, text, written, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # a dumb one is 80 wide, whatever it is told
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    for size in (1, 3, 99):
        wrap = LineWrapper(console)
        assert "".join(wrap.push(text[i : i + size]) for i in range(0, len(text), size)) == written


def test_in_a_pipe_text_stays_as_it_is():
    assert LineWrapper(Console(file=io.StringIO(), width=6)).push("abc def\tghi") == "abc def\tghi"


def test_the_server_goes_and_comes_back():
    speaker, port = Speaker(["Half"]), lasting_port()
    with ExitStack() as first, Terminal(first.enter_context(speaker.serve(port))) as terminal:
        terminal.shows("> ")
        terminal.type("Hi\r")
        terminal.shows("Half")
        first.close()
        terminal.shows("broke off")
        terminal.type("Still there?\r")
        terminal.shows("refused")
        speaker.go.set()
        with speaker.serve(port):
            terminal.type("And now?\r")
            terminal.shows("Half end.")
        said = [turn["content"] for turn in speaker.asked[-1]["messages"]]
        assert said == ["And now?"], "a question that failed is no part of the conversation"
        terminal.type("/exit\r")
        assert terminal.ended() == 0
        assert "Traceback" not in "".join(terminal.screen.lines)


def test_an_error_is_the_servers_own_words_in_one_line():
    speaker = Speaker()
    speaker.error = "temperature=9: a number from 0 to 2 is accepted \x1b[2J"
    with chat(speaker) as terminal:
        terminal.type("Hi\r")
        terminal.shows("temperature=9: a number from 0 to 2 is accepted \ufffd[2J")
        terminal.shows("> ", times=2)


class Silent:
    """A client that answers nothing, or is stopped before it does."""

    model = "m"

    def __init__(self, stopped: bool) -> None:
        self.stopped = stopped

    def stream(self, messages, **options):
        if self.stopped:
            raise KeyboardInterrupt
        yield "", ChatAnswer(finish_reason="stop", num_tokens=1)


@pytest.mark.parametrize(("stopped", "turns"), [(True, 0), (False, 2)])
def test_a_question_stopped_before_the_first_word_was_never_asked(stopped, turns):
    talk = TerminalChat(Silent(stopped), Console(file=io.StringIO()))
    talk.ask("Hi")
    assert len(talk.turns) == turns


def commands(*lines: str) -> tuple[str, TerminalChat]:
    screen, typed = io.StringIO(), iter([*lines, "/exit"])
    talk = TerminalChat(Silent(False), Console(file=screen, width=200))
    talk.run(lambda _: next(typed))
    return screen.getvalue(), talk


def test_save_writes_over_no_file_but_its_own(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.write_text("precious")
    screen, talk = commands(f"/save {theirs}", f"/save {ours}", "Grüße", f"/save {ours}")
    assert theirs.read_text() == "precious"
    assert "File exists" in screen
    assert json.loads(ours.read_text(encoding="utf-8")) == talk.messages
    assert "Grüße" in ours.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["", "/no/such/folder/x", "\0", "~nobody-here/x", "."])
def test_save_names_what_is_wrong_and_goes_on(name):
    screen, talk = commands(f"/save {name}", "Hi")
    assert f"/save {name}:".replace("\0", "\ufffd") in screen
    assert len(talk.turns) == 2


def test_system_says_what_it_did():
    screen, talk = commands("/system Be kind.", "/system")
    assert "this first" in screen
    assert "nothing first" in screen
    assert talk.messages == []


def test_leaving_takes_the_connection_along():
    speaker = Speaker(["Half"])
    with chat(speaker) as terminal:
        terminal.type("Hi\r")
        terminal.shows("Half")
        terminal.process.kill()  # the window was closed
        wait_until(speaker.left.is_set)


def test_a_models_name_is_shown_as_it_is_spelled(monkeypatch):
    monkeypatch.setattr(Silent, "model", "me/model[bold]")
    screen, _ = commands()
    assert screen.startswith("me/model[bold]. "), "brackets are the name's, and no markup of the terminal's"
