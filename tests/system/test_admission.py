"""`ruvon serve` with more guests than it takes on, and its end by signal: a process, a port."""

import asyncio
import json
import re
import signal
from contextlib import contextmanager

import httpx
import pytest

from engine import LLM, SamplingParams
from tests.system.attack import DEADLINE, Process, wait_until

GUESTS = 24
ASK = {"model": "storyteller", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPTS = [f"Once upon a time, {n} little dogs" for n in ("two", "three", "four", "five")]
OPTIONS = ["--max-num-seqs", "2", "--max-num-queued-reqs", "4", "--shutdown-timeout", "240"]


@contextmanager
def serving(folder, *options: str):
    server = Process(folder, "", *OPTIONS, *options)
    try:
        yield server
    finally:
        server.end()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("admission")) as server:
        yield server


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """What each prompt is answered when nobody else asks."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return {p: output.outputs[0].text for p, output in zip(PROMPTS, LLM().generate(PROMPTS, params))}


def metric(client: httpx.Client, name: str) -> float:
    """The sum of its values."""
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[{{ ]", line))


def at_rest(client: httpx.Client) -> bool:
    return not (metric(client, "ruvon:admitted_sequences") or metric(client, "ruvon:admitted_tokens"))


def test_of_a_burst_each_gets_its_own_text_or_a_clean_refusal(server, texts):
    async def one(client: httpx.AsyncClient, prompt: str) -> str:
        answer = await client.post("/v1/completions", json=ASK | {"prompt": prompt})
        if answer.status_code == 429:
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            return "refused"
        assert answer.status_code == 200, answer.text[:500]
        assert answer.json()["choices"][0]["text"] == texts[prompt], "somebody else's text"
        return "served"

    async def burst() -> list[str]:
        url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE, trust_env=False) as client:
            return await asyncio.gather(*(one(client, PROMPTS[i % 4]) for i in range(GUESTS)))

    ended = asyncio.run(burst())
    with server.client() as client:
        wait_until(lambda: at_rest(client))
        assert metric(client, "ruvon:requests_refused_total") == ended.count("refused") > 0
        assert metric(client, "vllm:request_success_total") == ended.count("served") >= 4
        assert metric(client, "ruvon:max_num_queued_reqs") == 4


@pytest.mark.parametrize("body", [{"n": 5}, {"prompt": ["a"] * 5}])
def test_what_never_fits_is_a_400(server, body):
    with server.client() as client:
        answer = client.post("/v1/completions", json=ASK | {"prompt": "a"} | body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_too_large")
        wait_until(lambda: at_rest(client))


def test_chats_and_the_small_route_are_admitted_too(server):
    with server.client() as client:
        chat = {"model": "storyteller", "messages": [{"role": "user", "content": "A story, please."}]}
        headers = {"X-Request-Timeout": "0.000001"}
        for path, body in (("/v1/chat/completions", chat), ("/generate", {"prompt": "a"})):
            answer = client.post(path, json=body, headers=headers)
            assert "queue_timeout" in answer.text, path
        wait_until(lambda: at_rest(client))


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_good_order(tmp_path, kind, texts):
    """The running answer is whole, who comes is refused in words, and the exit code is 0."""
    with serving(tmp_path) as server, server.client() as client:
        ask = ASK | {"prompt": PROMPTS[0], "stream": True, "max_tokens": 600}
        with client.stream("POST", "/v1/completions", json=ask) as running:
            lines = running.iter_lines()
            next(lines)
            server.process.send_signal(kind)
            wait_until(lambda: "; a second Ctrl-C ends them now" in server.said())
            refused = client.post("/v1/completions", json=ASK | {"prompt": "a"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert client.get("/health").status_code == 503
            rest = [line.removeprefix("data: ") for line in lines if line]
        assert rest[-1] == "[DONE]"
        assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length", "the running answer is whole"
        assert server.process.wait(DEADLINE) == 0, server.said()[-2000:]
    assert "Traceback" not in server.said()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--max-num-queued-reqs", "0"),
        ("--max-num-queued-tokens", "-1"),
        ("--request-timeout", "0"),
        ("--allowed-host", "a*b"),
    ],
)
def test_what_an_operator_gets_wrong_is_said(option, value):
    from tests.system.test_serve import refusal

    message = refusal("--model", "storyteller-draft", option, value)
    assert message.startswith("ruvon serve: ")
    assert f"{option[2:].replace('-', '_')}={value}" in message.replace(".0:", ":").replace("'", "")
