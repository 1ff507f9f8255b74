"""A client's own id for its request: in the answer, in the header, and never in another's way."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.part04.serving import ScriptedBackend, client_of

ASK = {"model": "script", "prompt": "go"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"X-Request-Id": "mine-2"}, {}),
        ({}, {"request_id": "mine-2"}),
        ({"X-Request-Id": "mine-2"}, {"request_id": "the-header-counts"}),
        ({"X-Request-Id": "not plain"}, {"request_id": "mine-2"}),
    ],
)
def test_a_clients_id_is_the_answers(headers, fields, stream):
    with client_of(ScriptedBackend()) as client:
        answer = client.post("/v1/completions", json=ASK | fields | {"stream": stream}, headers=headers)
    assert answer.headers["x-request-id"] == "mine-2"
    assert '"id":"cmpl-mine-2"' in answer.text


@pytest.mark.parametrize("odd", ["", "a b", "ä".encode(), "x" * 129, "<script>", "a/b", "a,b"])
def test_an_id_that_is_not_plain_is_not_taken(odd):
    with client_of(ScriptedBackend()) as client:
        answer = client.post("/v1/completions", json=ASK, headers={"X-Request-Id": odd})
    assert answer.status_code == 200
    name = answer.headers["x-request-id"]
    assert name.isalnum()
    assert answer.json()["id"] == f"cmpl-{name}"


def test_an_error_has_the_clients_id_too():
    with client_of(ScriptedBackend(error=OSError("disk"))) as client:
        answer = client.post("/v1/completions", json=ASK, headers={"X-Request-Id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert "under mine" in answer.json()["error"]["message"]


def test_two_requests_with_one_id_at_once_are_two_requests():
    backend = ScriptedBackend(pieces=[f" {i}" for i in range(50)])
    with client_of(backend) as client, ThreadPoolExecutor(4) as pool:
        ask = lambda _: client.post("/v1/completions", json=ASK, headers={"X-Request-Id": "same"})  # noqa: E731
        answers = list(pool.map(ask, range(8)))
    assert {answer.json()["id"] for answer in answers} == {"cmpl-same"}
    assert len({answer.text for answer in answers}) <= 2, "but for `created` they are equal"
    names = [request_id for _, _, request_id, _ in backend.asked]
    assert len(set(names)) == 8, "the engine tells requests apart by name"
