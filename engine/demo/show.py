"""`ruvon demo`: the whole engine at work, watched from a terminal. Part 20's wiring.

Starts `ruvon serve` in a process of its own, with pages, continuous batching, telemetry and speculation, lets
several people stream from it at once, shows its own numbers meanwhile, and ends. Imports no torch.
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
from engine.demo.server import environment, free_port, served, to_flags
from engine.wiring.engine_args import EngineArgs
from engine.wiring.loading import public_name

PORT = 8000  # if it is free
MAX_SECONDS = 40.0  # for the crowd, on a machine that is busy with something else
LINGER = 12  # seconds in which who sits at the terminal may click
NAME = 6  # columns
SPECULATION = {"num_speculative_tokens": 4}


def show_crowd(args: EngineArgs, seconds: float) -> None:
    """A server, and people who ask it for so long. Raises CheckpointError, ValueError, or RuntimeError: the
    server did not start, or somebody got no answer.
    """
    console = Console(highlight=False)
    chat = ChatTemplate.from_pretrained(args.tokenizer or args.model) is not None
    args = _speculating(args)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server must end, too
    env = {name: value for name, value in environment().items() if name != "RUVON_API_KEY"}
    try:
        with ExitStack() as stack:
            log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "server.log"
            with console.status(f"Starting a server with {public_name(args.model)}"):
                flags = [*to_flags(args), "--shutdown-timeout", "1"]
                server = served(log, *flags, env=env, port=free_port(PORT))
                try:
                    url, _ = stack.enter_context(server)
                except RuntimeError as error:
                    raise _in_its_words(error) from None
            _introduce(console, url, args)
            crowd = Crowd(url, chat)
            try:
                asyncio.run(_watch(console, crowd, seconds))
            except httpx.HTTPError as error:
                raise RuntimeError(f"the server was lost: {error}; it said:\n{log.read_text()}") from None
            _sum_up(console, crowd)
            _linger(console, url)
    finally:
        signal.signal(signal.SIGTERM, before)
    if failed := [f"{person.name}: {person.failed}" for person in crowd.people if person.failed]:
        raise RuntimeError("; ".join(failed))


def _speculating(args: EngineArgs) -> EngineArgs:
    """With a draft model where one shares the tokenizer, else with what the text itself has said."""
    if args.speculative_config is not None:
        return args
    how = {"model": "storyteller-draft"} if args.model == "storyteller" else {"method": "ngram"}
    return replace(args, speculative_config=how | SPECULATION)


def _in_its_words(error: RuntimeError) -> Exception:
    """What the server refused, without the way it got here."""
    *_, last = str(error).strip().splitlines()
    name, _, why = last.partition("ruvon serve: ")
    return ValueError(why) if why and not name else error


def _introduce(console: Console, url: str, args: EngineArgs) -> None:
    name = public_name(args.model)
    console.print(f"\n[bold]ruvon[/] serves [bold]{name}[/] on this machine, through our own engine:")
    console.print("paged keys and values, continuous batching, telemetry, speculation.\n")
    console.print(f"  chat       [link={url}/]{url}/[/link]")
    console.print(f"  dashboard  [link={url}/dashboard]{url}/dashboard[/link]\n")


async def _watch(console: Console, crowd: Crowd, seconds: float) -> None:
    """Everybody asks until the time is over; drawn where there is a terminal, else told at the end."""
    async with httpx.AsyncClient(timeout=MAX_SECONDS, trust_env=False) as http:
        if console.is_terminal:
            with Live(console=console, auto_refresh=False) as live:
                await crowd.run(
                    http,
                    seconds,
                    MAX_SECONDS,
                    lambda: live.update(board(crowd, console.width), refresh=True),
                )
            return
        await crowd.run(http, seconds, MAX_SECONDS)
        for person in crowd.people:
            console.print(f"{person.name}: {person.question}", markup=False)
            console.print(f"  {person.first or person.text}\n", markup=False)


def board(crowd: Crowd, width: int) -> Table:
    """Who asks what, the end of what each is told, and the server's numbers below."""
    table = Table.grid(padding=(0, 1))
    room = max(20, width - NAME - 2)
    table.add_column(style="bold", no_wrap=True, width=NAME)
    table.add_column(no_wrap=True, width=room)
    for person in crowd.people:
        table.add_row(person.name, person.question, style="cyan" if person.waits else "")
        table.add_row("", _end(person, room))
    table.add_row()
    for line in crowd.numbers.lines(room):
        table.add_row("", line, style="dim")
    return table


def _end(person: Person, width: int) -> Text:
    text = person.text
    return Text(text if len(text) <= width else "…" + text[-width + 1 :])  # no markup, whatever it says


def _sum_up(console: Console, crowd: Crowd) -> None:
    people, numbers = crowd.people, crowd.numbers
    answers, firsts = sum(p.answers for p in people), [t for p in people for t in p.first_words]
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_row("people at once", f"{len(people)}, {answers} answers")
    speed = f"up to {max(numbers.history):,.0f} tokens/s"
    table.add_row("output", f"{numbers.tokens:,.0f} tokens in {numbers.seconds:.0f} s, {speed}")
    if firsts:
        table.add_row("time to first token", f"{statistics.median(firsts) * 1e3:,.0f} ms (median)")
    table.add_row("requests in a step", f"{numbers.per_step:.1f} on average")
    if numbers.drafted:
        table.add_row("speculation", f"{numbers.accepted / numbers.drafted:.0%} of the drafts were right")
    if numbers.cached:
        known = numbers.cached / numbers.prompt_tokens
        table.add_row("prefix cache", f"{known:.0%} of the prompts' tokens were there")
    console.print(table)


def _linger(console: Console, url: str) -> None:
    """Time to click, for who sits there."""
    if console.is_terminal and sys.stdin.isatty():
        console.print(f"\nThe server stays for {LINGER} seconds; Enter ends it. Click:")
        console.print(f"  chat {url}/   dashboard {url}/dashboard")
        select.select([sys.stdin], [], [], LINGER)
    console.print("\nNext: [cyan]make serve[/] keeps a server running; [cyan]ruvon --help[/] says what else")
    console.print("there is; [cyan]python -m parts list[/] shows how it is built, part by part.")
