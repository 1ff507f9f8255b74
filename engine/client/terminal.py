"""A chat in the terminal: words as they come, Ctrl-C stops the answer and not the program. Part 14.

Promises that what a model says is shown as text: it cannot move the cursor, or worse. Knows a `ChatClient`
and nothing of the server behind it.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from engine.client.stream import Answer, ChatClient, ChatFailed

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but a tab and a line's end
HELP = """\
/reset        forget the conversation
/system TEXT  what the model is told first; without TEXT: nothing
/stats        time to first word and tokens per second, of each answer
/save FILE    the conversation as JSON
/exit         or Ctrl-D"""


class Chat:
    """A conversation, and what it took."""

    def __init__(self, client: ChatClient, console: Console, system: str | None = None, **options) -> None:
        """`options`: fields of every request, such as temperature."""
        self.client, self.console, self.system, self.options = client, console, system, options
        self.turns: list[dict[str, str]] = []
        self.answers: list[Answer] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        told = [{"role": "system", "content": self.system}] if self.system else []
        return told + self.turns

    def run(self, read: Callable[[str], str] = input) -> None:
        """Questions and answers until /exit or the end of the input."""
        self.console.print(f"{self.client.model}. Ctrl-C stops an answer; /help", style="dim", markup=False)
        while True:
            try:
                line = read("> ").strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                self.console.print("\n/exit or Ctrl-D ends the chat", style="dim")
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                self._command(*line[1:].split(maxsplit=1))
            elif line:
                try:
                    self.ask(line)
                except ChatFailed as error:
                    self.console.print(f"\n{shown(str(error))}", style="red", markup=False)

    def ask(self, question: str) -> None:
        """One question, and the answer as it comes. What was stopped is kept as far as it came. Raises
        ChatFailed: then the conversation is as it was.
        """
        self.turns.append({"role": "user", "content": question})
        answer = Answer()
        pieces = self.client.stream(self.messages, **self.options)
        try:
            for text, so_far in pieces:
                answer = so_far
                self.console.out(shown(text), end="", highlight=False)
        except KeyboardInterrupt:
            self.console.print(" [stopped]", style="dim", markup=False, end="")
        except ChatFailed:
            self.turns.pop()
            raise
        finally:
            pieces.close()  # the server stops, too
        self.console.print()
        self.turns.append({"role": "assistant", "content": answer.text})
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

    def _stats(self, _: str) -> None:
        for line in stats(self.answers):
            self.console.print(line, style="dim", highlight=False)

    def _save(self, name: str) -> None:
        try:
            Path(name).expanduser().write_text(json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n")
        except OSError as error:
            self.console.print(f"/save {name}: {error.strerror}", style="red", markup=False)
        else:
            self.console.print(f"saved to {name}", style="dim", markup=False, highlight=False)


def stats(answers: list[Answer]) -> Iterator[str]:
    """What each answer took, and the medians."""
    rows = [(a.first_word, a.tokens_per_second, a.num_tokens) for a in answers if a.first_word is not None]
    if not rows:
        yield "no answer yet"
        return
    for number, (first, speed, tokens) in enumerate(rows, 1):
        yield f"{number:3}  first word {1e3 * first:6.0f} ms  {_speed(speed)}  {tokens or '?'} tokens"
    speeds = [speed for _, speed, _ in rows if speed]
    first = statistics.median(first for first, _, _ in rows)
    yield f"median first word {1e3 * first:.0f} ms  {_speed(statistics.median(speeds) if speeds else None)}"


def _speed(tokens_per_second: float | None) -> str:
    return f"{tokens_per_second:6.1f} tokens/s" if tokens_per_second else "     ? tokens/s"


def shown(text: str) -> str:
    """Text for a terminal: characters that would command it become a mark."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
