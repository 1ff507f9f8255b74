"""`ruvon demo`: shows the whole engine at work in a terminal. Part 20's wiring. Imports no torch.

The demo starts `ruvon serve` in a process of its own, with pages, continuous batching, telemetry and
speculation. Several simulated people stream from the server at once, and the terminal shows their answers and
the server's metrics.
"""

import asyncio
import select
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from engine.decoding.chat_template import ChatTemplate
from engine.demo.crowd import Crowd, Person
from engine.demo.server import environment, served, to_flags
from engine.wiring.engine_args import EngineArgs
from engine.wiring.loading import public_name

PORT = 8000  # taken if it is free
MAX_SECONDS = 40.0  # after which the crowd stops even without answers, for instance on a busy machine
LINGER_SECONDS = 12  # how long the server stays afterwards, for a user who wants to open its pages
NAME_COLUMNS = 6
SIGTERM_STATUS = 128 + signal.SIGTERM  # the exit status that a shell reports for a process ended by SIGTERM
NUM_SPECULATIVE_TOKENS = 4


def show_crowd(args: EngineArgs, seconds: float) -> None:
    """Start a server, and show people who ask it for `seconds` seconds.

    Raises CheckpointError or ValueError if the model or an option is refused, and RuntimeError if the server
    does not start, is lost, or does not answer a person.
    """
    console = Console(highlight=False)
    chat = ChatTemplate.from_pretrained(args.tokenizer or args.model) is not None
    args = _with_speculation(args)
    # An exit by exception leaves the `with` block below, which ends the server; SIGTERM alone would not.
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(SIGTERM_STATUS))
    env = {name: value for name, value in environment().items() if name != "RUVON_API_KEY"}
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            log = Path(folder) / "server.log"
            with console.status(f"Starting a server with {public_name(args.model)}"):
                flags = [*to_flags(args), "--shutdown-timeout", "1"]
                server = served(log, *flags, env=env, port=PORT)
                try:  # the server starts while the status is shown, and ends with the outer block
                    url, _ = stack.enter_context(server)
                except RuntimeError as error:
                    raise _refusal(error) from None
            _introduce(console, url, args)
            crowd = Crowd(url, chat)
            try:
                asyncio.run(_watch(console, crowd, seconds))
            except httpx.HTTPError as error:
                raise RuntimeError(f"the server was lost: {error}; it said:\n{log.read_text()}") from None
            _sum_up(console, crowd)
            _linger(console, url)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    errors = [f"{person.name}: {person.error}" for person in crowd.people if person.error]
    if errors:
        raise RuntimeError("; ".join(errors))


def _with_speculation(args: EngineArgs) -> EngineArgs:
    """The options with speculation: by a draft model for storyteller, which has one with the same tokenizer,
    and by n-grams of the text itself for any other model. Options that set speculation stay as they are.
    """
    if args.speculative_config is not None:
        return args
    method = {"model": "storyteller-draft"} if args.model == "storyteller" else {"method": "ngram"}
    return replace(args, speculative_config={**method, "num_speculative_tokens": NUM_SPECULATIVE_TOKENS})


def _refusal(error: RuntimeError) -> Exception:
    """A ValueError with the message of `ruvon serve` if the server refused its options, else `error`."""
    last_line = str(error).strip().splitlines()[-1]
    prefix = "ruvon serve: "
    if last_line.startswith(prefix):
        return ValueError(last_line.removeprefix(prefix))
    return error


def _introduce(console: Console, url: str, args: EngineArgs) -> None:
    """Print which model is served, and the addresses of the server's pages."""
    name = public_name(args.model)
    console.print(f"\n[bold]ruvon[/] serves [bold]{name}[/] on this machine, through our own engine:")
    console.print("paged keys and values, continuous batching, telemetry, speculation.\n")
    console.print(f"  chat       [link={url}/]{url}/[/link]")
    console.print(f"  dashboard  [link={url}/dashboard]{url}/dashboard[/link]")
    console.print(f"  engine     [link={url}/engine]{url}/engine[/link]\n")


async def _watch(console: Console, crowd: Crowd, seconds: float) -> None:
    """Let the people ask for `seconds` seconds. A terminal shows `crowd_board` meanwhile; otherwise the
    questions and answers are printed at the end. Raises httpx.HTTPError if the server is lost.
    """
    async with httpx.AsyncClient(timeout=MAX_SECONDS, trust_env=False) as http:
        if console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                await crowd.run(
                    http,
                    seconds,
                    MAX_SECONDS,
                    lambda: live.update(crowd_board(crowd, console.width), refresh=True),
                )
            return
        await crowd.run(http, seconds, MAX_SECONDS)
        for person in crowd.people:
            console.print(f"{person.name}: {person.question}", markup=False)
            console.print(f"  {person.first_answer or person.text}\n", markup=False)


def crowd_board(crowd: Crowd, width: int) -> Table:
    """A table of `width` columns: each person's question with the end of the answer, and below them the
    server's metrics.
    """
    table = Table.grid(padding=(0, 1))
    text_width = max(20, width - NAME_COLUMNS - 2)
    table.add_column(style="bold", no_wrap=True, width=NAME_COLUMNS)
    table.add_column(no_wrap=True, width=text_width)
    for person in crowd.people:
        table.add_row(person.name, person.question, style="cyan" if person.is_waiting else "")
        table.add_row("", _end_of_text(person, text_width))
    table.add_row()
    for line in crowd.metrics.lines(text_width):
        table.add_row("", line, style="dim")
    return table


def _end_of_text(person: Person, width: int) -> Text:
    """The last `width` characters of the person's text."""
    text = person.text
    return Text(text if len(text) <= width else "…" + text[-width + 1 :])  # Text reads no markup


def _sum_up(console: Console, crowd: Crowd) -> None:
    """Print the figures of the whole run as a table."""
    people, metrics = crowd.people, crowd.metrics
    num_answers = sum(person.num_answers for person in people)
    first_text_seconds: list[float] = []
    for person in people:
        first_text_seconds += person.first_text_seconds
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("people at once", f"{len(people)}, {num_answers} answers")
    speed = f"up to {max(metrics.speeds, default=0.0):,.0f} tokens/s"
    table.add_row("output", f"{metrics.output_tokens:,.0f} tokens in {metrics.seconds:.0f} s, {speed}")
    if first_text_seconds:
        table.add_row(
            "time to first token", f"{statistics.median(first_text_seconds) * 1e3:,.0f} ms (median)"
        )
    table.add_row("requests in a step", f"{metrics.requests_per_step:.1f} on average")
    if metrics.draft_tokens:
        share = metrics.accepted_tokens / metrics.draft_tokens
        table.add_row("speculation", f"{share:.0%} of the drafts were right")
    if metrics.cached_tokens:
        share = metrics.cached_tokens / metrics.prompt_tokens
        table.add_row("prefix cache", f"{share:.0%} of the prompts' tokens were there")
    console.print(table)


def _linger(console: Console, url: str) -> None:
    """In a terminal, wait LINGER_SECONDS or until Enter, so that the user can open the server's pages."""
    if console.is_terminal and sys.stdin.isatty():
        console.print(f"\nThe server stays for {LINGER_SECONDS} seconds; Enter ends it. Click:")
        console.print(f"  chat {url}/   dashboard {url}/dashboard   engine {url}/engine")
        select.select([sys.stdin], [], [], LINGER_SECONDS)
    console.print("\nNext: [cyan]make serve[/] keeps a server running; [cyan]ruvon --help[/] says what else")
    console.print("there is; [cyan]python -m parts list[/] shows how it is built, part by part.")
