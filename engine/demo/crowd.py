"""Several people who ask a server at once, and its own numbers meanwhile. Part 20's wiring.

Knows the server by its address alone, and draws nothing.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from engine.client.top import sparkline
from engine.client.untrusted import printable
from engine.load.client import event_data
from engine.telemetry.history import DATA

LOOK = 0.5  # seconds between two looks at the server's numbers
FRAME = 0.1  # and between two pictures
PAUSE = 0.4  # a person reads the end before asking again
QUESTIONS = {
    "Ann": "Tell me a story about a dog and a red ball",
    "Ben": "Tell me a story about a cat and a tree",
    "Cleo": "Tell me a story about a boat and the sea",
    "Dan": "Tell me a story about a bird that could not sing",
    "Eva": "Tell me a story about a girl and the rain",
    "Finn": "Tell me a story about a bear and a big cake",
}


@dataclass
class Person:
    """Asks, reads, and asks again."""

    name: str
    question: str
    text: str = ""  # of the answer that is coming, or came last
    first: str = ""  # the first whole answer
    waits: bool = False  # for a first word
    answers: int = 0
    first_words: list[float] = field(default_factory=list)  # seconds
    failed: str = ""

    async def ask(self, http: httpx.AsyncClient, url: str, body: dict) -> None:
        """One question, read to its end."""
        self.text, self.waits, start = "", True, time.perf_counter()
        async with http.stream("POST", url, json=body) as response:
            if not response.is_success:
                await response.aread()
                self.failed = f"{response.status_code}: {response.text[:200]}"
                return
            async for data in event_data(response.aiter_bytes()):
                if data == b"[DONE]":
                    break
                chunk = json.loads(data)
                if "error" in chunk:  # too late for a status
                    self.failed = str(chunk["error"].get("message"))
                    return
                for choice in chunk.get("choices") or ():
                    if piece := choice.get("text") or (choice.get("delta") or {}).get("content"):
                        if self.waits:
                            self.waits = False
                            self.first_words.append(time.perf_counter() - start)
                        self.text = (self.text + printable(piece)).replace("\n", " ")
        self.answers += 1
        self.first = self.first or self.text


class Numbers:
    """What the server says of itself: its counters since its start, and how fast it was lately."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.now = {"running": 0, "waiting": 0, "kv_usage": 0.0}
        self.tokens = self.per_step = self.prompt_tokens = self.cached = self.drafted = self.accepted = 0.0
        self.history = [0.0]  # tokens per second, between two looks
        self.seconds = 0.0  # from the first look to the last
        self._began = self._looked = time.perf_counter()

    async def look(self, http: httpx.AsyncClient) -> None:
        """Ask the server now. Raises httpx.HTTPError."""
        answer = (await http.get(self.url + DATA)).json()
        metrics = (await http.get(self.url + "/metrics")).text
        now, before, totals = time.perf_counter(), self.tokens, answer["totals"]
        self.now, self.tokens = answer["now"], totals["vllm:generation_tokens"]
        self.history.append((self.tokens - before) / (now - self._looked))
        self._looked, self.seconds = now, now - self._began
        self.prompt_tokens = totals["vllm:prefix_cache_queries"]
        self.cached = totals["vllm:prefix_cache_hits"]
        steps, sequences = (answer["seconds"][name] for name in ("steps", "step_sequences"))
        if steps and steps[-1]:
            self.per_step = sequences[-1] / steps[-1]
        self.drafted, self.accepted = (_counter(metrics, name) for name in ("draft", "accepted"))

    def lines(self, width: int) -> list[str]:
        """Two lines for a terminal."""
        bars = sparkline(self.history[1:], max(8, min(40, width - 20))).strip()
        state = f"running {self.now['running']}, waiting {self.now['waiting']}, "
        state += f"KV cache {self.now['kv_usage']:.1%}"
        if self.drafted:
            state += f", drafts kept {self.accepted / self.drafted:.0%}"
        return [f"{self.history[-1]:,.0f} tokens/s  {bars}", state]


def _counter(metrics: str, name: str) -> float:
    """0 where the server does not speculate."""
    pattern = rf"^vllm:spec_decode_num_{name}_tokens_total\S* (\S+)$"
    line = re.search(pattern, metrics, re.MULTILINE)
    return float(line[1]) if line else 0.0


class Crowd:
    """Everybody, and the server they ask."""

    def __init__(self, url: str, chat: bool) -> None:
        """`chat`: the model has a template; else people begin a story, and it goes on."""
        self.url, self.chat = url, chat
        self.people = [
            Person(name, question if chat else f"Once upon a time, {name}")
            for name, question in QUESTIONS.items()
        ]
        self.numbers = Numbers(url)

    async def run(
        self,
        http: httpx.AsyncClient,
        seconds: float,
        max_seconds: float,
        draw: Callable[[], None] = lambda: None,
    ) -> None:
        """Each person asks until `seconds` are over and one answer was read, or `max_seconds` are."""
        models = (await http.get(self.url + "/v1/models")).json()
        model, end = models["data"][0]["id"], time.perf_counter() + seconds
        watching = [asyncio.create_task(self._look(http)), asyncio.create_task(_draw(draw))]
        with suppress(TimeoutError):
            async with asyncio.timeout(max_seconds), asyncio.TaskGroup() as group:
                for i, person in enumerate(self.people):
                    group.create_task(self._visit(person, i, http, model, end))
        for person in self.people:
            if not (person.answers or person.first_words or person.failed):
                person.failed = f"no word in {max_seconds:g} s"
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await self.numbers.look(http)
        draw()

    async def _visit(self, person: Person, i: int, http: httpx.AsyncClient, model: str, end: float) -> None:
        await asyncio.sleep(i * PAUSE)  # they do not come together
        path = "/v1/chat/completions" if self.chat else "/v1/completions"
        chat = {"messages": [{"role": "user", "content": person.question}]}
        question = chat if self.chat else {"prompt": person.question}
        while not person.failed and (not person.answers or time.perf_counter() < end):
            seed = 100 * i + person.answers
            body = {"model": model, "stream": True, "max_tokens": 160, "temperature": 0.7, "seed": seed}
            try:
                await person.ask(http, self.url + path, body | question)
            except httpx.HTTPError as error:
                person.failed = f"{type(error).__name__}: {error}"
            await asyncio.sleep(PAUSE)

    async def _look(self, http: httpx.AsyncClient) -> None:
        while True:
            await asyncio.sleep(LOOK)
            await self.numbers.look(http)


async def _draw(draw: Callable[[], None]) -> None:
    while True:
        draw()
        await asyncio.sleep(FRAME)
