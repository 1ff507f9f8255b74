"""A chat in the terminal, which shows words as they come. Ctrl-C stops the answer, not the program. Part 14.

The model's answer is shown as plain text: control characters in it cannot move the cursor or do worse. Lines
break between words. An answer that failed, or that was stopped before its first word, does not become part
of the conversation, and neither does its question. `ChatClient` talks to the server.
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

with suppress(ImportError):  # Windows has no readline
    import readline  # noqa: F401  gives `input` line editing, a history, and pasted lines as one input

HELP = """\
/reset        forget the conversation
/system TEXT  what the model is told first; without TEXT: nothing
/stats        time to first word and tokens per second, of each answer
/save FILE    the conversation as JSON
/exit         or Ctrl-D
Ctrl-C stops an answer. A pasted text of several lines is one question."""


class TerminalChat:
    """A conversation in the terminal."""

    def __init__(self, client: ChatClient, console: Console, system: str | None = None, **options) -> None:
        """`system` is the message before the conversation, or None. `options` are fields of every request,
        such as temperature.
        """
        self.client, self.console, self.system, self.options = client, console, system, options
        self.turns: list[dict[str, str]] = []
        self.answers: list[ChatAnswer] = []  # with their times, for /stats
        self._saved: set[Path] = set()  # files that this chat has written, and so may overwrite

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages that are sent before a new question: the system message if there is one, then all
        turns.
        """
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.turns

    def run(self, read: Callable[[str], str] = input) -> None:
        """Read questions and commands, and answer them, until /exit or the end of the input. `read` gets a
        prompt to show and returns a line, as `input` does. Raises ChatFailed if the server names no model.
        """
        model = printable(self.client.model)
        self.console.print(f"{model}. Ctrl-C stops an answer; /help", style="dim", markup=False)
        while True:
            try:
                line = read("> ").strip()
                if line == "/exit":
                    return
                if line.startswith("/"):
                    self._command(line)
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
        """Ask one question, and show the answer as it comes. Ctrl-C stops the answer, and the text so far is
        kept. Raises ChatFailed, and leaves the conversation as it was, if the answer fails.
        """
        turn = {"role": "user", "content": question}
        answer, wrap = ChatAnswer(), LineWrapper(self.console)
        stream = self.client.stream([*self.messages, turn], **self.options)
        with closing(stream):  # which closes the connection, so that the server stops, too
            try:
                for text, so_far in stream:
                    answer = so_far  # the same object each time, which grows
                    # Console.print would remove the backspaces that `wrap` writes.
                    self.console.file.write(wrap.push(printable(text)))
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

    def _command(self, line: str) -> None:
        """Carry out a command, such as "/system TEXT". An unknown name prints the help."""
        name, *rest = line.split(maxsplit=1)
        text = rest[0] if rest else ""
        if name == "/reset":
            self._reset()
        elif name == "/system":
            self._set_system(text)
        elif name == "/stats":
            self._print_stats()
        elif name == "/save":
            self._save(text)
        else:
            self.console.print(HELP, style="dim", markup=False, highlight=False)

    def _reset(self) -> None:
        """Forget the conversation, but not the system message."""
        self.turns.clear()
        self.answers.clear()
        self.console.print("a new conversation", style="dim")

    def _set_system(self, text: str) -> None:
        """Replace the system message; "" removes it."""
        self.system = text or None
        self.console.print(f"the model is told {'this' if text else 'nothing'} first", style="dim")

    def _print_stats(self) -> None:
        """Print the lines of `stats`."""
        for line in stats(self.answers):
            self.console.print(line, style="dim", highlight=False)

    def _save(self, name: str) -> None:
        """Write the conversation to a file as JSON. A file that this chat has not written is never
        overwritten.
        """
        try:
            if not name:
                raise ValueError("a file's name is wanted")
            path = Path(name).expanduser().resolve()
            text = json.dumps(self.messages, ensure_ascii=False, indent=1).encode() + b"\n"
            with path.open("wb" if path in self._saved else "xb") as file:
                file.write(text)
        except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~user names an unknown user
            reason = str(error)
            if isinstance(error, OSError) and error.strerror:
                reason = error.strerror  # without the path, which the message has already
            self.console.print(printable(f"/save {name}: {reason}"), style="red", markup=False)
        else:
            self._saved.add(path)
            self.console.print(printable(f"saved to {name}"), style="dim", markup=False, highlight=False)


class LineWrapper:
    """Breaks lines between words while the text comes. If a word turns out too long for the rest of its line,
    the word is erased and begun again on the next line. If stdout is not a terminal, the text is not changed.
    """

    def __init__(self, console: Console) -> None:
        """`console` says whether stdout is a terminal, and how wide it is."""
        self._console = console
        # Sizes are in cells of the terminal. A wide character takes two.
        self._column = 0  # the size of the line so far
        self._word = ""  # the text after the line's last space
        self._word_cells = 0  # the size of this word; equal to `_column` if the word begins the line

    def push(self, text: str) -> str:
        """The characters to write to the terminal in order to show `text` next."""
        if not self._console.is_terminal:
            return text
        width = self._console.width - 1  # terminals treat a backspace in the last column differently
        return "".join(self._push(character, width) for character in text.replace("\t", "    "))

    def _push(self, character: str, width: int) -> str:
        """As `push`, for one character and lines of `width` cells."""
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
        elif self._word_cells == self._column:  # the word fills the whole line, and continues on the next
            line_break = "\n"
            self._word, self._word_cells, self._column = "", 0, 0
        else:  # erase the word, and begin it again on the next line
            line_break = "\b \b" * self._word_cells + "\n" + self._word
            self._column = self._word_cells
        self._word += character
        self._word_cells += cells
        self._column += cells
        return line_break + character


def stats(answers: list[ChatAnswer]) -> Iterator[str]:
    """Yield a line for each answer that has text, with its time and speed, and then a line of medians."""
    first_texts, speeds = [], []  # in seconds, and in tokens per second
    for answer in answers:
        if answer.first_text_seconds is None:
            continue
        first_texts.append(answer.first_text_seconds)
        speed = answer.tokens_per_second
        if speed:
            speeds.append(speed)
        milliseconds = f"{1e3 * answer.first_text_seconds:6.0f}"
        tokens = answer.num_tokens or f"{answer.num_pieces} or more"  # no count comes if it was stopped
        yield f"{len(first_texts):3}  first word {milliseconds} ms  {_speed(speed)}  {tokens} tokens"
    if not first_texts:
        yield "no answer yet"
        return
    median_speed = statistics.median(speeds) if speeds else None
    yield f"median first word {1e3 * statistics.median(first_texts):.0f} ms  {_speed(median_speed)}"


def _speed(tokens_per_second: float | None) -> str:
    """The speed in ten columns and more; a question mark if it is not known."""
    return f"{tokens_per_second:6.1f} tokens/s" if tokens_per_second else "     ? tokens/s"
