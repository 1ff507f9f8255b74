"""What clients do to a server in a soak, well and badly; each says how it ended. Part 15.

Promises that every answer is looked at: a greedy text is compared with the one the server gave when nobody
else was there, a refusal must be one that is documented. Everything is drawn from a seed.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

import httpx

from engine.load.client import BROKEN, OK, Endpoint
from engine.load.plan import Job

PATIENCE = 120.0  # seconds after which an answer will never come
PROMPTS = (
    "Once upon a time", "One day, a boy named Tim", "Lily and her mom", "The dog", "It was a sunny day and",
    "a", "“Why?” asked the 🦊 and", "Tom had a red ball. He " * 12,
)  # fmt: skip
ASK = {"prompt": "The dog", "max_tokens": 4, "temperature": 0}
SAYS = {"messages": [{"role": "user", "content": "Tell me a story about a cat"}], "max_tokens": 12}
BUSY = (429, 503)  # refusals that are no fault of the request, if they say when to come again


def _json(body: object) -> bytes:
    return json.dumps(body).encode()


MALFORMED: list[tuple[bytes, int]] = [  # body of a completion, the answer's status
    (b"", 400), (b"{", 400), (b"[]", 400), (b"\xff\xfe", 400), (b"[" * 5000, 400), (b'"x"', 400),
    (_json({"model": "MODEL"}), 400),  # no prompt
    *((_json({"model": "MODEL"} | ASK | wrong), 400) for wrong in (
        {"prompt": ""}, {"prompt": []}, {"prompt": [[]] * 1000}, {"prompt": [10**9]}, {"prompt": {"a": 1}},
        {"max_tokens": -1}, {"max_tokens": "4"}, {"temperature": -1}, {"n": 0},
        {"n": 1000}, {"stop": [""]}, {"stop": ["a"] * 9}, {"logit_bias": {"x": 1}}, {"top_p": 0},
        {"seed": 1.5}, {"unknown": 1}, {"logprobs": 99}, {"best_of": 3}, {"suffix": "x"},
        {"stream_options": {"include_usage": True}}, {"priority": 7}, {"prompt": "word " * 3000},
    )),
    (_json({"model": "nobody's"} | ASK), 404),
    (b'{"model": "MODEL", "prompt": "' + b"x" * 2**20 + b'"}', 413),
]  # fmt: skip


class Wrong(Exception):
    """What a server must not do."""


@dataclass
class Clients:
    """A crowd against one server, and what was found wrong."""

    http: httpx.AsyncClient  # its base_url ends with /v1
    model: str
    done: Counter = field(default_factory=Counter)  # (action, how it ended) -> how often
    wrong: list[str] = field(default_factory=list)
    alone: dict[str, str] = field(default_factory=dict)  # what each prompt is answered when nobody else asks

    def completion(self, prompt: str, tokens: int, **fields) -> dict:
        return {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0} | fields

    async def learn(self) -> None:
        """Ask one by one what the texts are."""
        for prompt in PROMPTS:
            answer = await self._post("completions", self.completion(prompt, 24))
            self.alone[prompt] = answer["choices"][0]["text"]
        answer = await self._post("chat/completions", {"model": self.model, "temperature": 0} | SAYS)
        self.alone["chat"] = answer["choices"][0]["message"]["content"]

    async def _post(self, path: str, body: dict) -> dict | None:
        """A whole answer; None: the server was busy and said when to come again."""
        response = await self.http.post(path, json=body, timeout=PATIENCE)
        if response.status_code in BUSY and "retry-after" in response.headers:
            return None
        self.expect(response.status_code == 200, f"{path} {response.status_code}: {response.text[:200]}")
        return response.json()

    def expect(self, condition: bool, otherwise: str) -> None:
        if not condition:
            raise Wrong(otherwise)

    # What clients do. Each returns how it ended.

    async def stream(self, random: Random, api: str = "completions") -> str:
        """An answer in words, compared with what it is alone."""
        prompt = random.choice(PROMPTS)
        tokens = 24 if api == "completions" else SAYS["max_tokens"]
        said = prompt if api == "completions" else SAYS["messages"][0]["content"]
        endpoint = Endpoint(self.http, self.model, api, PATIENCE, {"temperature": 0})
        seen = await endpoint.ask(Job(0, said, tokens), 0)
        if seen.outcome in map(str, BUSY) and seen.retry_after:
            return seen.outcome
        self.expect(seen.outcome == OK, f"a stream ended as {seen.outcome!r} after {seen.text!r}")
        self.same(seen.text, prompt if api == "completions" else "chat")
        self.expect(seen.tokens is not None, "a stream without usage")
        return "ok"

    async def chat_stream(self, random: Random) -> str:
        return await self.stream(random, "chat")

    async def whole(self, random: Random) -> str:
        prompt = random.choice(PROMPTS)
        if (answer := await self._post("completions", self.completion(prompt, 24))) is None:
            return "busy"
        self.same(answer["choices"][0]["text"], prompt)
        return "ok"

    async def chat(self, random: Random) -> str:
        answer = await self._post("chat/completions", {"model": self.model, "temperature": 0} | SAYS)
        if answer is None:
            return "busy"
        self.same(answer["choices"][0]["message"]["content"], "chat")
        return "ok"

    async def several(self, random: Random) -> str:
        """Several prompts, several choices of each, sampled: one of them greedily compared is enough."""
        prompts, n = random.sample(PROMPTS, random.randint(1, 4)), random.randint(1, 4)
        body = self.completion("", 24) | {"prompt": prompts, "n": n, "seed": random.randrange(100)}
        if (answer := await self._post("completions", body)) is None:
            return "busy"
        self.expect([c["index"] for c in answer["choices"]] == list(range(n * len(prompts))), "choices")
        for i, prompt in enumerate(prompts):
            self.same(answer["choices"][i * n]["text"], prompt)
        return "ok"

    async def scored(self, random: Random) -> str:
        prompt, n = random.choice(PROMPTS), random.randint(0, 5)
        body = self.completion(prompt, 24, logprobs=n, echo=random.random() < 0.5)
        if (answer := await self._post("completions", body)) is None:
            return "busy"
        (choice,) = answer["choices"]
        tokens = choice["logprobs"]["tokens"]
        if not any(token.startswith("bytes:") for token in tokens):  # a part of a character
            self.expect("".join(tokens) == choice["text"], f"tokens {tokens} are not {choice['text']!r}")
        self.same(choice["text"].removeprefix(prompt if body["echo"] else ""), prompt)
        return "ok"

    async def sampled(self, random: Random) -> str:
        fields = {
            "temperature": random.choice([0.5, 1, 2]), "top_p": random.choice([0.1, 1]),
            "presence_penalty": random.choice([-2, 0, 2]), "stop": random.choice([None, ".", ["a", "b"]]),
            "logit_bias": random.choice([None, {"5": 100}]), "seed": random.choice([None, 3]),
        }  # fmt: skip
        answer = await self._post("completions", self.completion(random.choice(PROMPTS), 16, **fields))
        return "busy" if answer is None else "ok"

    async def generate(self, random: Random) -> str:
        body = {"prompt": random.choice(PROMPTS), "max_tokens": 24, "temperature": 0}
        response = await self.http.post(self.root("/generate"), json=body, timeout=PATIENCE)
        if response.status_code in BUSY:
            return "busy"
        events = [line[6:] for line in response.text.split("\n") if line.startswith("data: {")]
        self.same("".join(json.loads(event).get("text", "") for event in events), body["prompt"])
        return "ok"

    async def leave(self, random: Random) -> str:
        """Hang up: after so many pieces of a long answer, or before the first."""
        pieces = random.choice([0, 0, 1, 2, 9])
        body = self.completion(random.choice(PROMPTS), 900, ignore_eos=True, n=random.choice([1, 1, 3]))
        if random.random() < 0.7:
            body["stream"] = True
        try:
            async with asyncio.timeout(PATIENCE if pieces and "stream" in body else random.random() / 4):
                async with self.http.stream("POST", "completions", json=body, timeout=None) as response:
                    async for _ in response.aiter_raw():
                        pieces -= 1
                        if pieces <= 0:
                            return "left"
        except TimeoutError:
            return "left"
        return "was answered first"

    async def half(self, random: Random) -> str:
        """Half a request on a socket that is then closed, or half-closed and left to the server."""
        body = _json(self.completion("The dog", 900, stream=True))
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        sent = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        url = self.http.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        try:
            writer.write(sent[: random.choice([0, 5, 60, len(sent) - 9, len(sent)])])
            await writer.drain()
            if random.random() < 0.3:
                writer.write_eof()
            await asyncio.sleep(random.random() / 10)
        finally:
            writer.transport.abort() if random.random() < 0.5 else writer.close()
        return "left"

    async def malformed(self, random: Random) -> str:
        body, status = random.choice(MALFORMED)
        body = body.replace(b"MODEL", self.model.encode())
        headers = {"content-type": "application/json"}
        response = await self.http.post("completions", content=body, headers=headers, timeout=PATIENCE)
        self.expect(response.status_code == status, f"{body[:80]!r}: {response.status_code}, not {status}")
        self.expect(set(response.json()["error"]) == {"message", "type", "param", "code"}, "an error's shape")
        return str(status)

    async def watch(self, random: Random) -> str:
        path, status = random.choice([
            ("/metrics", 200), ("/health", 200), ("/dashboard", 200), ("/dashboard/data", 200), ("/", 200),
            ("/v1/models", 200), ("/openapi.json", 200), ("/v1/nothing", 404), ("/v1/completions", 405),
        ])  # fmt: skip
        response = await self.http.get(self.root(path), timeout=PATIENCE)
        self.expect(response.status_code == status, f"{path}: {response.status_code}, not {status}")
        return str(status)

    def root(self, path: str) -> httpx.URL:
        return self.http.base_url.copy_with(path=path)

    def same(self, text: str, prompt: str) -> None:
        alone = self.alone[prompt]
        self.expect(text == alone, f"{prompt!r} was answered {text!r}; alone it is {alone!r}")

    async def visit(self, random: Random) -> None:
        """One client, as chance has it; what it finds wrong is noted."""
        actions: list[Callable[[Random], Awaitable[str]]] = [
            self.stream, self.stream, self.chat_stream, self.whole, self.chat, self.several, self.scored,
            self.sampled, self.generate, self.leave, self.leave, self.leave, self.half, self.malformed,
            self.malformed, self.watch,
        ]  # fmt: skip
        action = random.choice(actions)
        try:
            ended = await action(random)
        except Wrong as error:
            ended = "wrong"
            self.wrong.append(f"{action.__name__}: {error}")
        except (httpx.HTTPError, OSError, TimeoutError) as error:
            ended = BROKEN
            self.wrong.append(f"{action.__name__}: {type(error).__name__}: {error}")
        self.done[action.__name__, ended] += 1
