"""A chat in the terminal: words as they come, Ctrl-C stops the answer and not the program. Part 14.

Promises that what a model says is shown as text: it cannot move the cursor, or worse; and that no word is cut
at the right edge. What failed, or was stopped before its first word, is no part of the conversation. Knows a
`ChatClient` and nothing of the server behind it.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console

from engine.client.stream import ChatAnswer, ChatClient, ChatFailed
from engine.client.untrusted import printable

with suppress(ImportError):  # Windows has none
    import readline  # noqa: F401  `input` edits with it, remembers, and takes pasted lines as one

HELP = """\
/reset        forget the conversation
/system TEXT  what the model is told first; without TEXT: nothing
/stats        time to first word and tokens per second, of each answer
/save FILE    the conversation as JSON
/exit         or Ctrl-D
Ctrl-C stops an answer. A pasted text of several lines is one question."""


class TerminalChat:
    """A conversation in the terminal, with the times of its answers."""

    def __init__(self, client: ChatClient, console: Console, system: str | None = None, **options) -> None:
        """`options`: fields of every request, such as temperature."""
        self.client, self.console, self.system, self.options = client, console, system, options
        self.turns: list[dict[str, str]] = []
        self.answers: list[ChatAnswer] = []
        self._saved: set[Path] = set()  # files of this chat, which it may write again

    @property
    def messages(self) -> list[dict[str, str]]:
        """What is sent: the system's message, if there is one, then the turns."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.turns

    def run(self, read: Callable[[str], str] = input) -> None:
        """Questions and answers until /exit or the end of the input."""
        model = printable(self.client.model)
        self.console.print(f"{model}. Ctrl-C stops an answer; /help", style="dim", markup=False)
        while True:
            try:
                line = read("> ").strip()
                if line == "/exit":
                    return
                if line.startswith("/"):
                    self._command(*line[1:].split(maxsplit=1))
                elif line:
                    self.ask(line)
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.console.print("\n/exit or Ctrl-D ends the chat", style="dim")
            except ChatFailed as error:
                self.console.print(str(error), style="red", markup=False)

    def ask(self, question: str) -> None:
        """One question, and the answer as it comes. What was stopped is kept as far as it came. Raises
        ChatFailed: then the conversation is as it was.
        """
        turn = {"role": "user", "content": question}
        answer, wrap = ChatAnswer(), Wrap(self.console)
        stream = self.client.stream([*self.messages, turn], **self.options)
        with closing(stream):  # which closes the connection: by that the server stops, too
            try:
                for text, so_far in stream:
                    answer = so_far
                    self.console.file.write(wrap.push(printable(text)))  # rich would take backspaces out
                    self.console.file.flush()
            except KeyboardInterrupt:
                self.console.print(" [stopped]", style="dim", markup=False, end="")
            except ChatFailed:
                if answer.text:
                    self.console.print()
                raise
        self.console.print()
        if answer.text or answer.finish_reason:
            self.turns += [turn, {"role": "assistant", "content": answer.text}]
            self.answers.append(answer)

    def _command(self, name: str = "", rest: str = "") -> None:
        commands = {
            "reset": self._reset, "system": self._set_system, "stats": self._stats, "save": self._save,
        }  # fmt: skip
        if name in commands:
            commands[name](rest)
        else:
            self.console.print(HELP, style="dim", markup=False, highlight=False)

    def _reset(self, _: str) -> None:
        self.turns.clear()
        self.answers.clear()
        self.console.print("a new conversation", style="dim")

    def _set_system(self, text: str) -> None:
        self.system = text or None
        self.console.print(f"the model is told {'this' if text else 'nothing'} first", style="dim")

    def _stats(self, _: str) -> None:
        for line in stats(self.answers):
            self.console.print(line, style="dim", highlight=False)

    def _save(self, name: str) -> None:
        """Write the conversation. A file that this chat has not written itself is not written over."""
        try:
            if not name:
                raise ValueError("a file's name is wanted")
            path = Path(name).expanduser().resolve()
            text = json.dumps(self.messages, ensure_ascii=False, indent=1).encode() + b"\n"
            with path.open("wb" if path in self._saved else "xb") as file:
                file.write(text)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~nobody has no home
            reason = getattr(error, "strerror", None) or error
            self.console.print(printable(f"/save {name}: {reason}"), style="red", markup=False)
        else:
            self._saved.add(path)
            self.console.print(printable(f"saved to {name}"), style="dim", markup=False, highlight=False)


class Wrap:
    """Breaks lines between words while they come: a word that turns out too long for its line is taken back,
    and begun again on the next. In a pipe, text stays as it is.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._column = 0  # cells of the line that are written
        self._word, self._word_cells = "", 0  # the text behind the line's last space, and its cells

    def push(self, text: str) -> str:
        """What to write to the terminal so that this text comes next."""
        if not self._console.is_terminal:
            return text
        width = self._console.width - 1  # in the last column, terminals differ in what a backspace does
        return "".join(self._push(character, width) for character in text.replace("\t", "    "))

    def _push(self, character: str, width: int) -> str:
        """The same for one character, on lines of `width` cells."""
        cells = cell_len(character)
        fits = self._column + cells <= width
        if character == "\n" or (character == " " and not fits):
            self._word, self._word_cells, self._column = "", 0, 0
            return "\n"
        if character == " ":
            self._word, self._word_cells = "", 0
            self._column += 1
            return " "
        if fits:
            line_break = ""
        elif self._word_cells < self._column:  # the word is erased, and begun again on the next line
            line_break = "\b \b" * self._word_cells + "\n" + self._word
            self._column = self._word_cells
        else:  # the word has the whole line, and goes on in the next
            line_break = "\n"
            self._word, self._word_cells, self._column = "", 0, 0
        self._word += character
        self._word_cells += cells
        self._column += cells
        return line_break + character


def stats(answers: list[ChatAnswer]) -> Iterator[str]:
    """A line for each answer that has text, with its time and speed, and a line of medians."""
    first_texts, speeds = [], []  # seconds, tokens per second
    for answer in answers:
        if answer.first_text_seconds is None:
            continue
        first_texts.append(answer.first_text_seconds)
        speed = answer.tokens_per_second
        if speed:
            speeds.append(speed)
        milliseconds = f"{1e3 * answer.first_text_seconds:6.0f}"
        tokens = answer.num_tokens or "?"
        yield f"{len(first_texts):3}  first word {milliseconds} ms  {_speed(speed)}  {tokens} tokens"
    if not first_texts:
        yield "no answer yet"
        return
    median_speed = statistics.median(speeds) if speeds else None
    yield f"median first word {1e3 * statistics.median(first_texts):.0f} ms  {_speed(median_speed)}"


def _speed(tokens_per_second: float | None) -> str:
    return f"{tokens_per_second:6.1f} tokens/s" if tokens_per_second else "     ? tokens/s"
