"""What the tests of the chat page share: a server with the page on it, backends that wait for the test, and a
browser's page that has complained of nothing.
"""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from engine.decoding.chat_template import ChatTemplate
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.server.app import create_app
from engine.server.chat import chat_routes
from engine.server.chat_page import OPEN_PATHS, chat_page
from tests.part04.serving import ScriptedBackend, serve
from tests.part06.fakes import CONFIG, TOKENIZER
from tests.system.attack import wait_until
from tests.system.tools import DEADLINE

TEMPLATE = ChatTemplate.from_pretrained("storyteller")


def chat_app(backend, **options):
    extensions = [chat_routes(TOKENIZER, CONFIG, TEMPLATE), chat_page]
    return create_app(backend, extensions, open_paths=OPEN_PATHS, **options)


class Held(ScriptedBackend):
    """Says its first pieces, and the rest once the test lets it `go`."""

    def __init__(self, first: Sequence[str], rest: Sequence[str] = (" end.",)) -> None:
        super().__init__([*first, *rest])
        self.hold_at, self.go = len(first), threading.Event()

    async def _outputs(self, prompt, request_id):
        text = ""
        for count, piece in enumerate(self.pieces, 1):
            while count > self.hold_at and not self.go.is_set():
                await asyncio.sleep(0.001)
            text += piece
            sample = CompletionOutput(0, text, range(count), "stop" if count == len(self.pieces) else None)
            yield RequestOutput(request_id, prompt, [7, 8], [sample], finished=count == len(self.pieces))
            await asyncio.sleep(0)


class Echo(Held):
    """Says the last question back, word by word, its second half once it may `go`."""

    def __init__(self) -> None:
        super().__init__([])

    async def _outputs(self, prompt, request_id):
        question = TOKENIZER.decode(prompt).split("<|user|>")[-1].removesuffix("<|assistant|>")
        words = [f"{word} " for word in question.split()]
        one = Held(words[: len(words) // 2], words[len(words) // 2 :])
        one.go = self.go
        async for output in one._outputs(prompt, request_id):
            yield output


class Opened:
    """The pages of one test. They may complain of a refused or broken connection, and of nothing else."""

    def __init__(self, browser, stack: ExitStack) -> None:
        self.browser, self.stack = browser, stack
        self.complaints: list[tuple[str, str]] = []
        self.backends: list[ScriptedBackend] = []

    def __call__(self, backend, viewport=(1200, 800), **options):
        """The chat page of a server of this backend; `options`: create_app's."""
        if isinstance(backend, ScriptedBackend):
            self.backends.append(backend)
        url = self.stack.enter_context(serve(chat_app(backend, **options)))
        return self.at(url, viewport={"width": viewport[0], "height": viewport[1]})

    def at(self, url: str, **options):
        """The page at `url` in a context of its own; `options`: the context's."""
        context = self.stack.enter_context(self.browser.new_context(**options))
        context.set_default_timeout(DEADLINE * 1e3)
        return self.tab(context, url)

    def tab(self, context, url: str):
        one = context.new_page()
        one.on("console", lambda said: self.complaints.append((said.type, said.text)))
        one.on("pageerror", lambda error: self.complaints.append(("error", str(error))))
        one.goto(url)
        return one


@pytest.fixture
def page(browser):
    with ExitStack() as stack:
        opened = Opened(browser, stack)
        yield opened
        # While the server is there: whoever left its pages has left no answer to be made.
        for context in browser.contexts:
            context.close()
        wait_until(lambda: not any(backend.open for backend in opened.backends))
    assert [said for said in opened.complaints if "Failed to load resource" not in said[1]] == []


def ask(one, text="Hello", number=1) -> None:
    box = one.get_by_label(f"message of conversation {number}")
    box.fill(text)
    box.press("Enter")


def said(one, words: str):
    """Where these words stand among the turns. What is read out by a screen reader stands elsewhere."""
    return one.locator(".turns").get_by_text(words)


def ended(one) -> None:
    """Waits until no answer is under way: its last words may be drawn before its stream has ended."""
    one.locator(".running").first.wait_for(state="detached")


def prompt_of(*turns: tuple[str, str]) -> str:
    return TEMPLATE.render([{"role": role, "content": content} for role, content in turns])


def asked(backend, number: int) -> str:
    return TOKENIZER.decode(backend.asked[number][0])
