"""Your model as a service: a real server on a free port, and a client that tries everything on it.

python -m parts run 4                                   # ends by itself
python -m parts run 4 -- --serve [--port 8000] [--api-key SECRET]    # serves until Ctrl-C
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import torch
from rich.console import Console
from rich.json import JSON
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import OUT, record  # noqa: E402
from engine.cache.single import CachedForward  # noqa: E402
from engine.decoding.greedy import generate  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from engine.layers.packed_linear import pack_linears  # noqa: E402
from engine.models.config import ModelConfig  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.server.app import create_app  # noqa: E402
from engine.server.backend import LockedBackend  # noqa: E402
from engine.server.run import serve  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402
from parts.stage import HOST, served, title, yes  # noqa: E402

MODEL = "storyteller"
PROMPT = "Once upon a time, there was a little dog named Max. Max had a red ball"
TOKENS = 120
EVENTS_SHOWN = 4
WRONG = (  # what a client may get wrong, beside the model's name
    {"prompt": ""},
    {"prompt": "Once", "max_tokens": -1},
    {"prompt": "Once", "max_tokens": "many"},
    {"prompt": "Once", "max_token": 5},
    {"prompt": "Once", "temperature": 0.7},
    {"prompt": [4, 4096]},
)


class Counted:
    """Part 3's forward, and how often it has run: what the server has spent on a request."""

    calls = 0

    def __init__(self, model: torch.nn.Module) -> None:
        self.forward = CachedForward(model)

    def __call__(self, token_ids: Sequence[int]) -> Tensor:
        Counted.calls += 1
        return self.forward(token_ids)  # [V]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="serve until Ctrl-C instead of the tour")
    parser.add_argument("--port", type=int, default=8000, help="for --serve")
    parser.add_argument("--api-key", help="for --serve: what clients must show")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a second one makes a model this small slower: part03_kv_cache
    console = Console(highlight=False)

    tokenizer, model = Tokenizer.from_pretrained(MODEL), load_model(MODEL, transform=pack_linears)
    backend = LockedBackend(MODEL, tokenizer, model.config, lambda: Counted(model))
    if arguments.serve:
        app = create_app(backend, api_key=arguments.api_key)
        console.print(how_to_call(arguments.port, arguments.api_key), soft_wrap=True)
        serve(app, HOST, arguments.port, log_level="warning")
        return
    with served(create_app(backend)) as address, httpx.Client(base_url=address, timeout=60) as client:
        figures = tour(console, client, tokenizer, model.config, model)
    workload = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS}
    path = record("part04", "What does a client of the server see?", workload, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def tour(
    console: Console, client: httpx.Client, tokenizer: Tokenizer, config: ModelConfig, model: torch.nn.Module
) -> dict:
    """Everything a client can meet, in seven stops. Returns the figures."""
    title(console, "1. Two clients at once")
    warm_up = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    client.post("/v1/completions", json=warm_up).raise_for_status()
    waits = two_at_once(console, client)
    console.print(
        f"The first word after [bold]{waits[0]:.0f} ms[/] for the one, "
        f"[bold]{waits[1]:.0f} ms[/] for the other.\n"
        "One request at a time: the second waits for the first. Part 6 gives them a queue, Part 8 one batch."
    )

    title(console, f"2. The server on {client.base_url}")
    for path in ("/health", "/v1/models"):
        answer = client.get(path)
        console.print(f"GET {path}  [green]{answer.status_code}[/]\n{answer.text}\n", soft_wrap=True)

    title(console, "3. A completion, in one piece")
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    start = time.perf_counter()
    whole = client.post("/v1/completions", json=body).json()
    whole_ms = (time.perf_counter() - start) * 1e3
    console.print(Panel(pretty(body), title="you send"))
    console.print(Panel(pretty(whole), title="you get"))
    console.print(f"{whole_ms:.0f} ms of silence, then all of it.")

    title(console, "4. The same as a stream: server-sent events, as they come")
    text, times, tail = stream(console, client, body)
    console.print(f"\n\n[dim]{tail}[/]\n", soft_wrap=True)
    console.print(
        f"The first word after [bold]{times[0]:.0f} ms[/], the last after {times[-1]:.0f} ms, "
        f"in {len(times)} events. In one piece it took {whole_ms:.0f} ms."
    )
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    alone = generate(CachedForward(model), tokenizer, config, PROMPT, params).outputs[0].text
    same = text == alone == whole["choices"][0]["text"]
    console.print(f"Stream, single piece and Part 3's loop gave the same text: [bold]{yes(same)}[/]")

    title(console, "5. What is wrong is refused, and named")
    console.print(refusals(client))

    title(console, "6. A client that hangs up")
    computed, grown = hang_up(client)
    console.print(
        f"Asked for 400 tokens, left after 5 events. By then the model had run [bold]{computed}[/] times, "
        f"and in the half second after [bold]{grown}[/] more."
    )

    openai_client(console, str(client.base_url), text)
    return {
        "same_text": same,
        "whole_ms": whole_ms,
        "event_ms": times,
        "forwards_before_leaving": computed,
        "forwards_after_leaving": grown,
        "first_words_ms_of_two": waits,
    }


def events(response: httpx.Response) -> Iterator[str]:
    """The data of each event, as it arrives. An event is a `data:` line and an empty one."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def stream(console: Console, client: httpx.Client, body: dict) -> tuple[str, list[float], str]:
    """Print the first events raw, then only their text. Gives text, arrival times in ms, the last events."""
    text, times, tail = "", [], []
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    start = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as response:
        console.print(f"{response.status_code} {response.headers['content-type']}\n")
        for data in events(response):
            chunk = {} if data == "[DONE]" else json.loads(data)
            new = "".join(choice["text"] for choice in chunk.get("choices", ()))
            if new:
                times.append((time.perf_counter() - start) * 1e3)
            else:
                tail.append(f"data: {data}")
            text += new
            if new and len(times) <= EVENTS_SHOWN:
                console.print(f"[cyan]{times[-1]:.0f} ms[/]  ", end="")
                console.out(f"data: {data}\n", style="dim", highlight=False)
                if len(times) == EVENTS_SHOWN:
                    console.print("and from here on, their text alone:\n")
            elif new:
                console.out(new, end="", highlight=False)
    return text, times, "\n\n".join(tail)


def refusals(client: httpx.Client) -> Table:
    table = Table("you send", "status", "error.param", "error.message", box=None, pad_edge=False)
    for wrong in WRONG:
        answer = client.post("/v1/completions", json={"model": MODEL} | wrong)
        error = answer.json()["error"]
        table.add_row(json.dumps(wrong), f"[red]{answer.status_code}[/]", error["param"], error["message"])
    return table


def hang_up(client: httpx.Client) -> tuple[int, int]:
    """Leave a long stream after 5 events: forwards until we left, and in the half second after."""
    before = Counted.calls
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        for _ in zip(range(5), events(response), strict=False):
            pass
    left = Counted.calls
    time.sleep(0.5)
    return left - before, Counted.calls - left


def two_at_once(console: Console, client: httpx.Client) -> list[float]:
    """Show two clients side by side as they read. Gives the milliseconds until each has a word."""
    waits: list[float] = []
    texts = ["", ""]
    start = time.perf_counter()

    def ask(number: int) -> None:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            for data in events(response):
                chunk = {} if data == "[DONE]" else json.loads(data)
                new = "".join(choice["text"] for choice in chunk.get("choices", ()))
                if new and not texts[number]:
                    waits.append((time.perf_counter() - start) * 1e3)
                texts[number] += new

    def side_by_side() -> Table:
        panels = Table.grid(expand=True)
        for _ in texts:
            panels.add_column(ratio=1)
        names = [f"client {'AB'[number]}" for number in range(len(texts))]
        panels.add_row(
            *(Panel(Text(text or "…waits", style="" if text else "dim"), title=name, height=14)
              for name, text in zip(names, texts, strict=True))
        )  # fmt: skip
        return panels

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(texts))]
    for thread in threads:
        thread.start()
    with Live(side_by_side(), console=console, refresh_per_second=20) as live:
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.02)
            live.update(side_by_side())
        live.update(side_by_side())
    console.print()
    return waits


def openai_client(console: Console, address: str, expected: str) -> None:
    """The official client on our server, where it is installed."""
    title(console, "7. The official client")
    try:
        import openai
    except ImportError:
        console.print(
            "[dim]pip install openai, and the official Python client talks to this server as well[/]"
        )
        return
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none needed")
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=TOKENS, temperature=0)
    console.print(
        f"openai {openai.__version__} gets the same text: [bold]{yes(answer.choices[0].text == expected)}[/]"
        f" ({answer.usage.prompt_tokens} + {answer.usage.completion_tokens} tokens)"
    )


def how_to_call(port: int, api_key: str | None) -> str:
    header = f' -H "Authorization: Bearer {api_key}"' if api_key else ""
    body = json.dumps({"model": MODEL, "prompt": "Once upon a time", "max_tokens": 100, "stream": True})
    return (
        f"Serving {MODEL} on http://{HOST}:{port} until Ctrl-C. In another terminal:\n\n"
        f"curl -N http://{HOST}:{port}/v1/completions -H 'Content-Type: application/json'{header} "
        f"-d '{body}'\n"
    )


def pretty(data: dict) -> Text:
    """JSON, coloured, that wraps."""
    text = JSON.from_data(data).text
    text.no_wrap = False
    return text


if __name__ == "__main__":
    main()
