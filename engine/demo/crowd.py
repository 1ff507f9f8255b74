"""Simulates several people who stream from a server, and reads the server's metrics. Part 20's wiring.

The server may run anywhere: only its address is needed. Drawing is left to engine/demo/show.py.
"""

import asyncio
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import httpx

from engine.client.top import sparkline
from engine.client.untrusted import parse_json, printable
from engine.load.client import event_data, piece_of
from engine.telemetry.history import DATA_PATH

METRICS_SECONDS = 0.5  # between two readings of the server's metrics
FRAME_SECONDS = 0.1  # between two calls of `draw`
PAUSE_SECONDS = 0.4  # between the first questions of two people, and between two questions of one person
MAX_TOKENS = 160  # of an answer
GARBLED = (ValueError, LookupError, TypeError, AttributeError)  # what an answer of another form raises
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
    """A simulated user, who asks the same question again and again."""

    name: str
    question: str
    text: str = ""  # of the current answer so far; between two questions, of the last answer
    first_answer: str = ""  # "" before it is whole
    is_waiting: bool = False  # whether the current answer has no text yet
    num_answers: int = 0  # whole answers so far
    # Seconds from each question to the first text of its answer.
    first_text_seconds: list[float] = field(default_factory=list)
    error: str = ""  # why the person stopped asking

    async def ask(self, http: httpx.AsyncClient, url: str, body: dict) -> None:
        """Send one request, and read its answer to the end. `url` is the API's address, and `body` is the
        JSON of a streaming request. An error that the server reports is kept in `error`. Raises
        httpx.HTTPError if the connection fails, and one of GARBLED if the answer has another form.
        """
        self.text, self.is_waiting = "", True
        start = time.perf_counter()
        async with http.stream("POST", url, json=body) as response:
            if not response.is_success:
                await response.aread()
                self.error = f"{response.status_code}: {response.text[:200]}"
                return
            async for data in event_data(response.aiter_bytes()):
                if data == b"[DONE]":
                    break
                chunk = parse_json(data)
                if "error" in chunk:  # the server failed after it had sent its status
                    self.error = str(chunk["error"].get("message"))
                    return
                self._read_chunk(chunk, start)
        self.num_answers += 1
        if self.num_answers == 1:
            self.first_answer = self.text

    def _read_chunk(self, chunk: dict, start: float) -> None:
        """Add the text of one event of the stream. `start`: when the question was sent."""
        for choice in chunk.get("choices") or ():
            piece = piece_of(choice)
            if not piece:
                continue
            if self.is_waiting:
                self.is_waiting = False
                self.first_text_seconds.append(time.perf_counter() - start)
            self.text = (self.text + printable(piece)).replace("\n", " ")


class ServerMetrics:
    """The server's metrics: counters since its start, and its recent speed."""

    def __init__(self, url: str) -> None:
        """`url` is the server's address, without a path."""
        self.url = url
        self.gauges = {"running": 0, "waiting": 0, "kv_usage": 0.0}  # as in the last update
        # Tokens since the server's start.
        self.output_tokens = self.prompt_tokens = self.cached_tokens = 0.0
        self.draft_tokens = self.accepted_tokens = 0.0
        self.requests_per_step = 0.0  # mean since the server's start
        self.speeds: list[float] = []  # output tokens per second, from each update to the next
        self.seconds = 0.0  # from the creation of this object to the last update
        self._start = time.perf_counter()
        self._last_update: float | None = None

    async def update(self, http: httpx.AsyncClient) -> None:
        """Read the metrics from the server. Raises httpx.HTTPError, and changes nothing, if the server does
        not answer with them.
        """
        response = (await http.get(self.url + DATA_PATH)).raise_for_status()
        metrics = (await http.get(self.url + "/metrics")).raise_for_status().text
        answer = response.json()
        self.gauges, totals = answer["now"], answer["totals"]
        now = time.perf_counter()
        if self._last_update is not None:  # before, the server may have served others for hours
            new_tokens = totals["vllm:generation_tokens"] - self.output_tokens
            self.speeds.append(new_tokens / (now - self._last_update))
        self.seconds = now - self._start
        self._last_update = now
        self.output_tokens = totals["vllm:generation_tokens"]
        self.prompt_tokens = totals["vllm:prefix_cache_queries"]  # the cache is asked for all of a prompt
        self.cached_tokens = totals["vllm:prefix_cache_hits"]
        # Both grow from the server's start on; the last entry is the newest.
        steps, sequences = answer["seconds"]["steps"], answer["seconds"]["step_sequences"]
        if steps and steps[-1]:
            self.requests_per_step = sequences[-1] / steps[-1]
        self.draft_tokens = _counter(metrics, "vllm:spec_decode_num_draft_tokens")
        self.accepted_tokens = _counter(metrics, "vllm:spec_decode_num_accepted_tokens")

    def lines(self, width: int) -> list[str]:
        """Two lines for a terminal: the speed with its history in bars, and the state of the engine."""
        speed = self.speeds[-1] if self.speeds else 0.0
        bar_columns = max(8, min(40, width - 20))  # the number takes about 20 columns
        bars = sparkline(self.speeds, bar_columns).strip()
        state = f"running {self.gauges['running']}, waiting {self.gauges['waiting']}, "
        state += f"KV cache {self.gauges['kv_usage']:.1%}"
        if self.draft_tokens:
            state += f", drafts kept {self.accepted_tokens / self.draft_tokens:.0%}"
        return [f"{speed:,.0f} tokens/s  {bars}", state]


def _counter(metrics: str, name: str) -> float:
    """The value of a counter in Prometheus' text format, or 0 if the counter is missing: a server without
    speculation has no counters of drafts.
    """
    line = re.search(rf"^{name}_total(?:{{.*}})? (\S+)$", metrics, re.MULTILINE)  # a label may have spaces
    return float(line[1]) if line else 0.0


class Crowd:
    """Several people, and the metrics of the server that they ask."""

    def __init__(self, url: str, chat: bool) -> None:
        """`url` is the server's address, without a path. With `chat`, people ask for stories, for which the
        model needs a chat template; otherwise the model continues the beginnings of stories.
        """
        self.url, self.chat = url, chat
        self.people = [
            Person(name, question if chat else f"Once upon a time, {name}")
            for name, question in QUESTIONS.items()
        ]
        self.metrics = ServerMetrics(url)

    async def run(
        self,
        http: httpx.AsyncClient,
        seconds: float,
        max_seconds: float,
        draw: Callable[[], None] = lambda: None,
    ) -> None:
        """Let each person ask until `seconds` are over and the person has at least one answer. After
        `max_seconds`, all stop. `draw` is called every FRAME_SECONDS, and once at the end.

        Raises httpx.HTTPError if the server does not answer at the start or at the end. An error of one
        person is kept in `Person.error`.
        """
        models = (await http.get(self.url + "/v1/models")).json()
        model = models["data"][0]["id"]
        deadline = time.perf_counter() + seconds
        background = [asyncio.create_task(self._update(http)), asyncio.create_task(_draw(draw))]
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(max_seconds), asyncio.TaskGroup() as group:
                    for i, person in enumerate(self.people):
                        group.create_task(self._visit(person, i, http, model, deadline))
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        for person in self.people:
            if not (person.num_answers or person.first_text_seconds or person.error):
                person.error = f"no word in {max_seconds:g} s"
        await self.metrics.update(http)
        draw()

    async def _visit(
        self, person: Person, i: int, http: httpx.AsyncClient, model: str, deadline: float
    ) -> None:
        """Person number `i` asks until `deadline`, which is a time of `time.perf_counter`, or until an error.
        The person gets at least one answer, even after the deadline.
        """
        await asyncio.sleep(i * PAUSE_SECONDS)  # people come one after another
        body: dict = {"model": model, "stream": True, "max_tokens": MAX_TOKENS, "temperature": 0.7}
        if self.chat:
            url = self.url + "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": person.question}]
        else:
            url = self.url + "/v1/completions"
            body["prompt"] = person.question
        while not person.error and (not person.num_answers or time.perf_counter() < deadline):
            seed = 100 * i + person.num_answers  # differs for each answer, and is the same in each run
            try:
                await person.ask(http, url, body | {"seed": seed})
            except (httpx.HTTPError, *GARBLED) as error:
                person.error = f"{type(error).__name__}: {error}"
            await asyncio.sleep(PAUSE_SECONDS)

    async def _update(self, http: httpx.AsyncClient) -> None:
        """Read the metrics every METRICS_SECONDS, until the task is cancelled. A reading that fails is
        skipped.
        """
        while True:
            await asyncio.sleep(METRICS_SECONDS)
            with suppress(httpx.HTTPError):
                await self.metrics.update(http)


async def _draw(draw: Callable[[], None]) -> None:
    """Call `draw` every FRAME_SECONDS, until the task is cancelled."""
    while True:
        draw()
        await asyncio.sleep(FRAME_SECONDS)
