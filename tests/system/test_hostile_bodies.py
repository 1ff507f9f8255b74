"""`ruvon serve` under bodies that mean harm, or are careless: too large, too many, of the wrong kind, or as
heavy as is accepted. What is bounded is processor time and memory: a busy machine changes neither.
"""

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.system.attack import (
    ASK,
    JSON,
    MAIN_SERVER,
    MB,
    Neighbour,
    Process,
    attacked,
    send_and_leave,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Process]:
    server = Process(tmp_path_factory.mktemp("server"), *MAIN_SERVER)
    try:
        with attacked(server):
            yield server
    finally:
        server.end()


@pytest.fixture
def client(server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def listed(field: str, item: str, size: int = MB - 200) -> bytes:
    """A body of about a megabyte whose `field` is a list of `item`."""
    items = ",".join([item] * (size // (len(item) + 1)))
    return json.dumps(ASK | {field: 0}).replace(f'"{field}": 0', f'"{field}": [{items}]').encode()


def mapped(field: str, value: str, count: int = 80_000) -> str:
    return f'"{field}": {{' + ",".join(f'"{i}":{value}' for i in range(count)) + "}"


BODIES = {
    "empty lists": listed("prompt", "[]"),
    "empty objects": listed("prompt", "{}"),
    "lists of one": listed("prompt", "[1]"),
    "token ids": listed("prompt", "1"),
    "stops that are numbers": listed("stop", "1"),
    "stops": listed("stop", '"a"'),
    "stop tokens that are texts": listed("stop_token_ids", '""'),
    "stop tokens": listed("stop_token_ids", "1"),
    "biases that are texts": ("{" + mapped("logit_bias", '""') + "}").encode(),
    "biases": ("{" + mapped("logit_bias", "1") + "}").encode(),
    "unknown fields": ("{" + ",".join(f'"{i}":0' for i in range(80_000)) + "}").encode(),
    "unknown options": ("{" + mapped("stream_options", "0") + "}").encode(),
    "a long name": json.dumps(ASK | {"model": "a" * (MB - 200)}).encode(),
    "a long salt": json.dumps(ASK | {"cache_salt": "a" * (MB - 200)}).encode(),
    "a long unknown field": json.dumps(ASK | {"a" * (MB - 200): 1}).encode(),
    "a long text": json.dumps(ASK | {"prompt": "word " * (MB // 5 - 100)}).encode(),
    "brackets": b"[" * (MB - 1),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_body_costs_little_time_and_little_memory_and_is_not_sent_back(server, client, name):
    """1.4 GB and 82 s for 4 MB of empty lists, it was."""
    assert len(BODIES[name]) <= MB
    client.post("/v1/completions", content=BODIES[name], headers=JSON)  # the first one warms up
    server.forget_peak()
    memory, cpu = server.peak(), server.cpu()
    for _ in range(3):
        answer = client.post("/v1/completions", content=BODIES[name], headers=JSON)
    cpu, memory = (server.cpu() - cpu) / 3, server.peak() - memory
    assert answer.status_code == 400, answer.text[:500]
    assert len(answer.content) < 2000, "the error repeats what it is about"
    assert cpu < 0.5, f"{cpu:.2f} s of processor time for a body of one megabyte"
    assert memory < 150, f"{memory:.0f} MB for a body of one megabyte"


def test_a_body_over_the_limit_is_refused(client):
    assert client.post("/v1/completions", content=b"x" * 2 * MB, headers=JSON).status_code == 413


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": "a" * 65}, "stop"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"prompt": ["a"] * 256, "n": 128}, "prompt"),
        ({"prompt": ["a"] * 2, "n": 65}, "n"),
        ({"prompt": [[1]] * 129}, "prompt"),
        ({"n": 129}, "n"),
        ({"user": "a" * 257}, "user"),
        ({"priority": -(2**31)}, "priority"),
        ({"priority": -1}, "priority"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_has_a_bound_is_refused_beyond_it_by_name(client, change, field):
    answer = client.post("/v1/completions", json=ASK | change)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


def test_as_many_stops_as_are_accepted_slow_nobody_down_much(server, client):
    """100,000 were accepted once: 0.18 s of processor time per token."""

    def seconds(**fields) -> float:
        before = server.cpu()
        answer = client.post("/v1/completions", json=ASK | {"max_tokens": 150, "ignore_eos": True} | fields)
        assert answer.status_code == 200, answer.text
        return server.cpu() - before

    stops = [letter * 63 + "!" for letter in "etao"]
    seconds()
    with_stops = min(seconds(stop=stops) for _ in range(3))
    assert with_stops < 3 * max(seconds() for _ in range(2))


ATTACKS = {
    "empty lists": BODIES["empty lists"],
    "a long text": BODIES["a long text"],
    "texts that fit": json.dumps(ASK | {"prompt": ["word " * 1000] * 128, "max_tokens": 1}).encode(),
    "one word that fits": json.dumps(ASK | {"prompt": ["specially" * 1000] * 100, "max_tokens": 1}).encode(),
    "many sequences": json.dumps(ASK | {"prompt": ["a"] * 128, "max_tokens": 2}).encode(),
    "many samples": json.dumps(ASK | {"n": 128, "max_tokens": 2}).encode(),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_nobody_elses_stream_pauses_for_what_one_client_sends(server, client, name):
    """87 s, it was."""
    with Neighbour(server) as neighbour:
        assert not neighbour.pauses_for(lambda: send_and_leave(client, ATTACKS[name]))
