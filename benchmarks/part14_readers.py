"""People who ask at the same moment and read the answer: as it comes, or once all of it is there.

The workload of Part 14's demo and benchmark. Each has a stopwatch of their own.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from engine.client.stream import ChatClient

# Silent reading of English fiction, 260 words a minute: Brysbaert 2019, a review of 190 studies,
# https://doi.org/10.1016/j.jml.2019.104047
WORDS_PER_SECOND = 260 / 60
THINGS = ("dog", "ball", "cat", "boat", "bird", "cake", "tree", "hat", "fish", "box", "bear", "kite")


@dataclass
class Seen:
    """What one reader saw. Times are seconds since the question was sent."""

    words: list[float] = field(default_factory=list)  # when each whole word was there
    text: str = ""
    num_tokens: int = 0
    bytes_read: int = 0  # of the body; counted for answers in one piece, and by `wire_bytes` for streams

    @property
    def first_word(self) -> float:
        return self.words[0]

    @property
    def last_word(self) -> float:
        return self.words[-1]

    @property
    def read(self) -> float:
        """When somebody has read it all who reads on as soon as there is a next word."""
        now = 0.0
        for there in self.words:
            now = max(now, there) + 1 / WORDS_PER_SECOND
        return now

    def add(self, text: str, now: float, last: bool = False) -> None:
        """More text is there. Its last word is whole once something stands behind it."""
        self.text += text
        whole = len(self.text.split()) - (not last and not self.text[-1:].isspace())
        self.words += [now] * (whole - len(self.words))


def question(number: int) -> list[dict[str, str]]:
    first, second = THINGS[number % len(THINGS)], THINGS[(number // len(THINGS) + number + 1) % len(THINGS)]
    return [{"role": "user", "content": f"Tell me a story about a {first} and a {second}"}]


def streamed(
    address: str, number: int, wishes: dict, watch: Callable[[Seen], None] = lambda seen: None
) -> Seen:
    """Ask question `number`, and read along."""
    client, seen = ChatClient(address), Seen()
    try:
        wishes = {"model": client.model, "seed": number} | wishes
        start = time.perf_counter()
        for text, answer in client.stream(question(number), **wishes):
            seen.add(text, time.perf_counter() - start, last=not text)
            seen.num_tokens = answer.num_tokens or 0
            watch(seen)
    finally:
        client.close()
    return seen


def at_once(
    address: str, number: int, wishes: dict, watch: Callable[[Seen], None] = lambda seen: None
) -> Seen:
    """Ask question `number`, and get the answer in one piece."""
    seen = Seen()
    with httpx.Client(base_url=address, timeout=300) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "messages": question(number), "seed": number} | wishes
        start = time.perf_counter()
        answer = http.post("/v1/chat/completions", json=body)
        content = answer.raise_for_status().json()
        seen.add(content["choices"][0]["message"]["content"], time.perf_counter() - start, last=True)
    seen.num_tokens, seen.bytes_read = content["usage"]["completion_tokens"], len(answer.content)
    watch(seen)
    return seen


def wire_bytes(address: str, number: int, wishes: dict) -> int:
    """How many bytes the body of a stream has."""
    with httpx.Client(base_url=address, timeout=300) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        body = {"model": model, "messages": question(number), "seed": number, "stream": True} | wishes
        return len(http.post("/v1/chat/completions", json=body).raise_for_status().content)


def crowd(
    address: str,
    ways: Sequence[Callable[..., Seen]],
    wishes: dict,
    watch: Callable[[int, Seen], None] = lambda reader, seen: None,
) -> list[Seen]:
    """As many people as there are ways (`streamed` or `at_once`), who all ask at the same moment."""
    ready = threading.Barrier(len(ways))

    def person(number: int) -> Seen:
        ready.wait()
        return ways[number](address, number, wishes, lambda seen: watch(number, seen))

    with ThreadPoolExecutor(len(ways)) as pool:
        return list(pool.map(person, range(len(ways))))
