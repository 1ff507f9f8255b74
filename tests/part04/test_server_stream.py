"""What becomes of a backend's answer: pieces in order, errors in mid-stream, clients that leave."""

import asyncio
import json
import select
import socket
from contextlib import AsyncExitStack

import openai
import pytest

from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import NoRoomError, ParameterError
from engine.server import sse
from engine.server.app import create_app
from engine.server.completion_answer import stream_chunks
from engine.server.errors import RequestError
from engine.server.protocol import CompletionRequest, Completions
from tests.part04.serving import (
    DEADLINE,
    ScriptedBackend,
    client_of,
    http,
    openai_client,
    serve,
    wait_until,
)

ASK = {"model": "script", "prompt": "go"}
BEGUN = RequestOutput("r", "go", [7], [], finished=False)


def events(answer) -> list:
    """The data of each server-sent event."""
    *parts, rest = answer.text.split("\n\n")
    assert rest == ""
    data = [part.removeprefix("data: ") for part in parts]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


def chunks_of(answer) -> list[dict]:
    """The choices of a stream that went well, in order."""
    assert answer.status_code == 200, answer.text
    *chunks, done = events(answer)
    assert done == "[DONE]"
    for chunk in chunks:
        assert "error" not in chunk, answer.text
    return [choice for chunk in chunks for choice in chunk["choices"]]


def test_pieces_are_sent_as_they_come():
    with client_of(ScriptedBackend()) as client:
        choices = chunks_of(client.post("/v1/completions", json=ASK | {"stream": True}))
    assert [choice["text"] for choice in choices] == ["one", " two", " three"]


def test_nothing_is_sent_for_a_token_without_text():
    with client_of(ScriptedBackend(["a", "", "", "b", ""])) as client:
        choices = chunks_of(client.post("/v1/completions", json=ASK | {"stream": True}))
    assert [(choice["text"], choice["finish_reason"]) for choice in choices] == [
        ("a", None),
        ("b", None),
        ("", "length"),
    ]


def test_line_breaks_quotes_and_emoji_survive_the_stream():
    pieces = ["a\n\nb", "\r\n", 'data: "x"', "🦊\u2028", "[DONE]"]
    with serve(create_app(ScriptedBackend(pieces))) as url, openai_client(url) as client:
        chunks = list(client.completions.create(stream=True, **ASK))
    assert [chunk.choices[0].text for chunk in chunks] == pieces


def test_a_choice_is_sent_when_it_has_something_new_and_once_when_it_is_finished():
    states = [
        [("a", None)],
        [("a", None)],
        [("abc", None), ("", None)],
        [("abc", "stop"), ("x", None)],
        [("abc", "stop"), ("xy", None)],
        [("abc", "stop"), ("xyz", "length")],
        [("abc", "stop"), ("xyz", "length")],
    ]

    async def outputs():
        for i, state in enumerate(states):
            samples = [CompletionOutput(j, text, [], reason) for j, (text, reason) in enumerate(state)]
            yield RequestOutput("r", "go", [7], samples, finished=i == len(states) - 1)

    async def sent() -> list[tuple]:
        body = CompletionRequest(**ASK, n=2)
        return [
            (choice["index"], choice["text"], choice["finish_reason"])
            async for chunk in stream_chunks({}, [outputs()], [BEGUN], 2, body, Completions())
            for choice in chunk["choices"]
        ]

    assert asyncio.run(sent()) == [
        (0, "a", None),
        (0, "bc", None),
        (0, "", "stop"),
        (1, "x", None),
        (1, "y", None),
        (1, "z", "length"),
    ]


class Echo(Completions):
    """Echoes the prompt and counts tokens where log probabilities go: what Part 10 needs of the server."""

    def params(self, body):
        return body.model_copy(update={"echo": None}).sampling_params()

    def choice(self, body, output, sample, previous=None):
        plain = super().choice(body, output, sample, previous)
        echoed = output.prompt if body.echo and not previous else ""
        new = len(sample.token_ids) - (len(previous.token_ids) if previous else 0)
        return plain | {"text": echoed + plain["text"], "logprobs": {"tokens": new}}


def test_how_a_completion_is_asked_for_and_shown_can_be_extended():
    ask = ASK | {"prompt": ["a: ", "b: "], "echo": True}
    with client_of(ScriptedBackend(["x", "y", "z"]), api=Echo()) as client:
        whole = client.post("/v1/completions", json=ask).json()["choices"]
        stream = client.post("/v1/completions", json=ask | {"stream": True})
    assert [choice["text"] for choice in whole] == ["a: xyz", "b: xyz"]
    assert [choice["logprobs"]["tokens"] for choice in whole] == [3, 3]
    told, tokens = ["", ""], [0, 0]
    for choice in chunks_of(stream):
        told[choice["index"]] += choice["text"]
        tokens[choice["index"]] += choice["logprobs"]["tokens"]
    assert (told, tokens) == (["a: xyz", "b: xyz"], [3, 3])


def test_each_prompt_has_its_own_choice_and_request_id():
    backend = ScriptedBackend()
    with client_of(backend) as client:
        answer = client.post("/v1/completions", json=ASK | {"prompt": ["a", "b", "c"], "stream": True})
    texts = {0: "", 1: "", 2: ""}
    for choice in chunks_of(answer):
        texts[choice["index"]] += choice["text"]
    assert set(texts.values()) == {"one two three"}
    assert [prompt for prompt, *_ in backend.asked] == ["a", "b", "c"]
    assert len({request_id for *_, request_id, _ in backend.asked}) == 3


@pytest.mark.parametrize("prompts", [["go"], ["go", "go"]])
def test_an_error_in_mid_stream_arrives_as_an_event(prompts):
    with client_of(ScriptedBackend(error=RuntimeError("the disk is on fire"))) as client:
        answer = client.post("/v1/completions", json=ASK | {"prompt": prompts, "stream": True})
    assert answer.status_code == 200
    *chunks, error, done = events(answer)
    assert len(chunks) >= 3, answer.text
    assert [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == 0] == [
        "one",
        " two",
        " three",
    ]
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert error["error"]["type"] == "server_error"
    assert answer.headers["x-request-id"] in error["error"]["message"]
    assert "fire" not in answer.text, "what the error says is for the log"
    assert done == "[DONE]"


def test_openais_client_raises_an_error_in_mid_stream():
    app = create_app(ScriptedBackend(error=RuntimeError("the disk is on fire")))
    with serve(app) as url, openai_client(url) as client:
        chunks = client.completions.create(stream=True, **ASK)
        assert [next(chunks).choices[0].text for _ in range(3)] == ["one", " two", " three"]
        with pytest.raises(openai.APIError, match="the engine failed"):
            next(chunks)


@pytest.mark.parametrize(
    ("error", "status", "kind", "header"),
    [
        (RuntimeError("/home/me/secret.txt"), 500, "server_error", None),
        (RequestError(429, "too many", retry_after=2.6), 429, "rate_limit_error", "3"),
        (RequestError(503, "full", retry_after=0.1), 503, "server_error", "1"),
        (ParameterError("prompt", "prompt: no"), 400, "invalid_request_error", None),
        (NoRoomError("8 things wait already"), 429, "rate_limit_error", "1"),
    ],
)
def test_an_error_without_a_stream_has_its_status(error, status, kind, header):
    with client_of(ScriptedBackend(error=error)) as client:
        answer = client.post("/v1/completions", json=ASK)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["type"] == kind
    shown = answer.headers["x-request-id"] if status == 500 else str(error)
    assert shown in answer.json()["error"]["message"]
    assert "secret" not in answer.text, "what an unknown error says is for the log"
    assert answer.headers.get("retry-after") == header


@pytest.mark.parametrize("stream", [False, True])
def test_when_one_of_several_prompts_fails_the_others_are_closed(stream):
    class HalfBroken(ScriptedBackend):
        async def _outputs(self, prompt, request_id):
            self.endless = prompt == "endless"
            if not self.endless:
                raise RuntimeError("broken")
            async for output in super()._outputs(prompt, request_id):
                self.endless = True
                yield output

    backend = HalfBroken()
    with client_of(backend) as client:
        answer = client.post("/v1/completions", json=ASK | {"prompt": ["endless", "x"], "stream": stream})
        assert "engine_error" in answer.text, answer.text
        assert answer.status_code == (200 if stream else 500), "a stream tells of an error as an event"
        wait_until(lambda: backend.open == 0)


def test_a_client_that_leaves_a_stream_closes_the_backends_iterator():
    backend = ScriptedBackend(endless=True)
    with client_of(backend) as client:
        with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as answer:
            lines = answer.iter_lines()
            assert "error" not in next(lines)
            assert backend.open == 1
        wait_until(lambda: backend.open == 0)


@pytest.mark.parametrize("prompts", [["go"], ["go"] * 3])
def test_a_client_that_leaves_before_a_whole_answer_closes_the_backends_iterators(prompts):
    backend = ScriptedBackend(endless=True)
    body = json.dumps(ASK | {"prompt": prompts}).encode()
    with client_of(backend) as client:
        with socket.create_connection((client.base_url.host, client.base_url.port)) as connection:
            lines = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json"]
            head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""])
            connection.sendall(head.encode() + body)
            wait_until(lambda: backend.open == len(prompts) or select.select([connection], [], [], 0)[0])
            assert backend.open == len(prompts), connection.recv(10_000)
        wait_until(lambda: backend.open == 0)


def test_a_slow_client_does_not_hold_up_others():
    backend = ScriptedBackend(endless=True)
    with client_of(backend) as client, client.stream("POST", "/v1/completions", json=ASK | {"stream": True}):
        backend.endless = False  # for those who ask from now on; the first is not read
        backend.pieces = ("quick",)
        with http(str(client.base_url)) as other:
            assert other.post("/v1/completions", json=ASK).json()["choices"][0]["text"] == "quick"


@pytest.mark.parametrize("stream", [False, True])
def test_when_a_later_prompt_is_refused_none_stays_admitted(stream):
    class Full(ScriptedBackend):
        """Admits two; what Part 15 needs."""

        async def generate(self, prompt, params, request_id, **options):
            if self.open == 2:
                raise RequestError(429, "full", retry_after=2)
            return await super().generate(prompt, params, request_id, **options)

    backend = Full()
    with client_of(backend) as client:
        ask = ASK | {"prompt": ["a", "b", "c"], "stream": stream}
        assert client.post("/v1/completions", json=ask).status_code == 429
        assert backend.open == 0, "prompts that were admitted before the refused one were not closed"
        whole = client.post("/v1/completions", json=ask | {"prompt": ["a", "b"]})
        assert whole.status_code == 200


def test_a_stream_is_read_no_faster_than_its_client_reads():
    taken = []

    async def outputs():
        for count in range(1, 101):
            taken.append(count)
            sample = CompletionOutput(0, "x" * count, [], None)
            yield RequestOutput("r", "go", [7], [sample], finished=False)

    async def run():
        chunks = stream_chunks({}, [outputs()], [BEGUN], 1, CompletionRequest(**ASK), Completions())
        await anext(chunks)
        for _ in range(10):
            await asyncio.sleep(0)
        await chunks.aclose()

    asyncio.run(run())
    assert len(taken) <= 3, (
        "one is shown, one lies ready, one waits for its place: no more are held in memory"
    )


def test_when_the_chunks_are_closed_nobody_reads_the_streams_any_more():
    over = []

    async def outputs():
        try:
            yield RequestOutput("r", "go", [7], [CompletionOutput(0, "x", [], None)], finished=False)
            await asyncio.sleep(DEADLINE)
        finally:
            await asyncio.sleep(0)  # unwinding takes a turn
            over.append(True)

    async def run():
        chunks = stream_chunks({}, [outputs()], [BEGUN], 1, CompletionRequest(**ASK), Completions())
        await anext(chunks)
        await asyncio.sleep(0)
        await chunks.aclose()
        assert over == [True], "a stream that is being read cannot be closed: its reader must have unwound"

    asyncio.run(run())


class Sent(Exception):
    """The client is gone when this is raised by `send`."""


@pytest.mark.parametrize("messages", [0, 1, 3])
def test_a_stream_whose_client_is_gone_is_closed_before_it_is_forgotten(messages):
    """Not when the garbage collector comes by: the response is still held when the streams are counted."""

    async def run():
        backend, sent = ScriptedBackend(endless=True), []
        closed = []

        async def chunks():
            try:
                while True:
                    yield {"a": 1}
            finally:
                closed.append(True)

        async def send(message):
            if len(sent) == messages:
                raise Sent
            sent.append(message)

        async def receive():
            await asyncio.sleep(DEADLINE)

        owned, source = AsyncExitStack(), chunks()
        owned.push_async_callback((await backend.generate("a", None, "0")).aclose)
        response = sse.stream(source, owned)
        with pytest.raises(Sent):
            await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
        assert backend.open == 0, "what the stream was made from is still admitted"
        assert closed == [True] * (messages > 0), "the generator waits for the garbage collector"
        return response

    asyncio.run(run())
