"""`ruvon chat` and `ruvon ui` talk to a server, and `ruvon top` watches a server. Part 20."""

import importlib.util
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from engine.cli.options import with_hint

DEFAULT_URL = "http://127.0.0.1:8000"  # where `ruvon serve` listens by default
Url = Annotated[str, typer.Option(help="Any server with OpenAI's chat API.")]


def chat(
    question: Annotated[
        str | None, typer.Argument(help="Ask this and print the answer alone; default: a conversation.")
    ] = None,
    url: Url = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Default: the server's first.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Default: RUVON_API_KEY, if set.", envvar="RUVON_API_KEY")
    ] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default: the server's.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer; default: the server's.")
    ] = None,
) -> None:
    """Talk to a model: words as they come, Ctrl-C stops an answer. A question may come through a pipe."""
    from rich.console import Console

    from engine.client.stream import ChatClient, ChatFailed
    from engine.client.terminal import TerminalChat

    fields = {"temperature": temperature, "max_completion_tokens": max_tokens}
    options = {name: value for name, value in fields.items() if value is not None}
    if question is None and not sys.stdin.isatty():
        question = sys.stdin.read().strip()
        if not question:
            sys.exit("ruvon chat: no question came through the pipe")
    try:
        with closing(ChatClient(url, api_key, model)) as client:
            terminal_chat = TerminalChat(client, Console(highlight=False), system, **options)
            if question is None:
                terminal_chat.run()
            else:
                terminal_chat.ask(question)
    except ChatFailed as error:
        sys.exit(f"ruvon chat: {with_hint(str(error))}")


def ui(
    url: Url = DEFAULT_URL,
    api_key: Annotated[str | None, typer.Option(help="Default: RUVON_API_KEY, if set.")] = None,
    port: Annotated[int, typer.Option(help="Port of the page.", min=1, max=65535)] = 8501,
) -> None:
    """The chat as a Streamlit page on this machine, until Ctrl-C."""
    if importlib.util.find_spec("streamlit") is None:
        sys.exit("ruvon ui: streamlit is not installed; pip install 'ruvon[ui]'")
    page = Path(__file__).parents[1] / "client" / "streamlit_page.py"
    flags = ["--server.address=127.0.0.1", f"--server.port={port}", "--server.headless=true"]
    flags += ["--browser.gatherUsageStats=false"]  # by default, Streamlit sends statistics to its makers
    environment = os.environ | {"RUVON_URL": url}
    if api_key:  # otherwise, the page has the RUVON_API_KEY of this process's environment, if there is one
        environment["RUVON_API_KEY"] = api_key
    command = [sys.executable, "-m", "streamlit", "run", str(page), *flags]
    os.execve(sys.executable, command, environment)  # replaces this process with Streamlit


def top(
    server: Annotated[str | None, typer.Argument(help="The server's address, in place of --url.")] = None,
    url: Annotated[str, typer.Option(help="The server's address.")] = DEFAULT_URL,
    once: Annotated[bool, typer.Option("--once", help="Show the dashboard once, and end.")] = False,
) -> None:
    """Watch a running server: tokens per second, latencies, queue and memory, until Ctrl-C."""
    from rich.console import Console

    from engine.client.top import NoAnswer
    from engine.client.top import top as watch
    from engine.client.untrusted import printable

    try:
        # `enough` is asked after each answer, so with --once it ends after the first.
        watch(server or url, Console(highlight=False), enough=lambda: once)
    except NoAnswer as error:
        sys.exit(f"ruvon top: {printable(with_hint(str(error)))}")
    except KeyboardInterrupt:
        pass
