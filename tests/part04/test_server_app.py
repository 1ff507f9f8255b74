"""Routes and middleware in front of any backend: models, options, extensions, keys, hosts, bounds, life."""

import asyncio
import json
import re
import threading

import pytest

from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.server.app import create_app
from engine.server.complete import refuse_if_down, refuse_unknown_model
from engine.server.errors import RequestError
from engine.server.middleware import ApiKey, Head, RequestLimit
from engine.server.protocol import Completions
from tests.part04.serving import ScriptedBackend, client_of, http, wait_until

ASK = {"model": "script", "prompt": "go"}


def test_health_and_errors_show_a_backend_that_is_down():
    backend = ScriptedBackend()
    backend.healthy = False
    with client_of(backend) as client:
        assert client.get("/health").status_code == 503


def test_a_model_name_may_have_a_slash():
    with client_of(ScriptedBackend()) as client:
        assert client.get("/v1/models/team/script-2").json()["id"] == "team/script-2"
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [
            "script",
            "team/script-2",
        ]


@pytest.mark.parametrize(
    "path", ["/health", "/v1/models", "/v1/models/script", "/v1/models/gpt-9", "/openapi.json", "/extra"]
)
def test_head_is_answered_wherever_get_is(path):
    """It was a 405, by which a load balancer takes a server for dead."""

    def extension(app, _):
        @app.get("/extra")
        async def extra():
            return {"a page": "of a later part"}

    with client_of(ScriptedBackend(), extensions=[extension], api_key="secret") as client:
        key = {"authorization": "Bearer secret"}
        get, head = (client.request(method, path, headers=key) for method in ("GET", "HEAD"))
        changing = ("date", "x-request-id")
        same = [{k: v for k, v in answer.headers.items() if k not in changing} for answer in (get, head)]
        assert same[0] == same[1]
        assert (head.status_code, head.content) == (get.status_code, b"")
        without_key = {answer.status_code for answer in (client.get(path), client.head(path))}
        assert without_key == {200 if path in ("/health", "/openapi.json") else 401}
        wrong = client.post(path, headers=key)
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")


def test_head_is_not_allowed_where_get_is_not():
    with client_of(ScriptedBackend()) as client:
        answer = client.head("/v1/completions")
        assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_no_page_of_the_framework_brings_scripts_from_another_host():
    with client_of(ScriptedBackend()) as client:
        assert [client.get(path).status_code for path in ("/redoc", "/docs/oauth2-redirect")] == [404] * 2
        page = client.get("/docs")
    assert "src=" not in page.text
    assert re.findall("href=[^>]+", page.text) == ['href="openapi.json"'], "links, to this host alone"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")


def test_the_description_is_written_once_however_many_ask():
    written = []

    def watched(app, backend):
        describe = app.openapi
        app.openapi = lambda: written.append(1) or describe()

    with client_of(ScriptedBackend(), extensions=[watched]) as client:
        answers = [client.get("/openapi.json") for _ in range(3)]
    assert written == [1], "writing it takes long, and it stays the same"
    assert {answer.headers["content-type"] for answer in answers} == {"application/json"}
    assert "/v1/completions" in answers[2].json()["paths"]


def test_an_extension_adds_a_route_behind_the_same_gate():
    def extension(app, backend):
        @app.get("/v1/extra")
        async def extra():
            return {"models": backend.models()}

        @app.get("/")
        @app.get("/board")
        async def page():
            return "anyone may look"

        @app.get("/v1/broken")
        async def broken():
            raise RequestError(503, "later", retry_after=7)

    with client_of(
        ScriptedBackend(), extensions=[extension], api_key="k", open_paths=["/", "/board"]
    ) as client:
        assert client.get("/v1/extra").status_code == 401
        assert [client.get(path).status_code for path in ("/", "/board", "/health")] == [200] * 3
        assert [client.get(path).status_code for path in ("/board/", "/docs/", "/healthy")] == [401] * 3
        key = {"authorization": "Bearer k"}
        assert client.get("/v1/extra", headers=key).json() == {"models": ["script", "team/script-2"]}
        answer = client.get("/v1/broken", headers=key)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert answer.json()["error"]["message"] == "later"


def test_the_backend_starts_and_stops_with_the_server():
    backend = ScriptedBackend()
    with client_of(backend):
        assert backend.life == ["started"]
    assert backend.life == ["started", "stopped"]


def test_options_reach_the_backend_and_only_when_given():
    backend = ScriptedBackend(supports=frozenset(["priority", "cache_salt"]))
    with client_of(backend, api=Completions(allow_priority=True)) as client:
        client.post("/v1/completions", json=ASK)
        client.post("/v1/completions", json=ASK | {"priority": -2, "cache_salt": "me", "user": "someone"})
        for priority in (3, -3, -(2**31)):
            assert client.post("/v1/completions", json=ASK | {"priority": priority}).status_code == 400
    assert [options for *_, options in backend.asked] == [{}, {"priority": -2, "cache_salt": "me"}]


def test_a_shape_decides_which_options_reach_the_backend():
    class Adapters(Completions):
        """What Part 18 needs: an adapter goes by the name of a model."""

        def options(self, body):
            return super().options(body) | ({"adapter": body.model} if body.model != "script" else {})

    backend = ScriptedBackend()
    with client_of(backend, api=Adapters()) as client:
        for model in ("script", "team/script-2"):
            client.post("/v1/completions", json=ASK | {"model": model})
    assert [options for *_, options in backend.asked] == [{}, {"adapter": "team/script-2"}]


def test_priorities_are_the_operators_to_allow():
    backend = ScriptedBackend(supports=frozenset(["priority"]))
    with client_of(backend) as client:
        answers = [client.post("/v1/completions", json=ASK | {"priority": p}) for p in (0, 1, -1)]
    assert [answer.status_code for answer in answers] == [200, 400, 400]
    assert "operator" in answers[1].json()["error"]["message"]


@pytest.mark.parametrize(("header", "let_in"), [(b"bearer k", True), (b"bearer x", False), (None, False)])
def test_a_websocket_needs_the_key_too(header, let_in):
    async def run():
        sent, reached = [], []

        async def app(scope, receive, send):
            reached.append(scope["path"])

        async def send(message):
            sent.append(message["type"])

        scope = {
            "type": "websocket",
            "path": "/v1/live",
            "headers": [(b"authorization", header)] if header else [],
        }
        await ApiKey(app, "k", ["/health"])(scope, None, send)
        assert (reached, sent) == ((["/v1/live"], []) if let_in else ([], ["websocket.close"]))

    asyncio.run(run())


def test_an_empty_key_is_no_key():
    for key in ("", "  "):
        with pytest.raises(ValueError, match="empty"):
            create_app(ScriptedBackend(), api_key=key)


def test_a_request_must_be_meant_for_one_of_the_allowed_hosts():
    with client_of(ScriptedBackend(), allowed_hosts=["localhost", "[::1]", "www.here.example"]) as client:
        for host, status in {
            "www.here.example": 200,
            "here.example": 400,  # not sent on to the one with www
            "localhost": 200,
            "LOCALHOST:80": 200,
            "[::1]:9": 200,
            "evil.example": 400,
        }.items():
            answer = client.get("/v1/models", headers={"host": host})
            assert answer.status_code == status, host
        assert answer.json()["error"] == {
            "message": "host='evil.example': this server is not asked for by that name",
            "type": "invalid_request_error", "param": None, "code": "unknown_host",
        }  # fmt: skip
        assert answer.headers["x-request-id"]


@pytest.mark.parametrize("wrong", ["", "a*b", "*b", "http://here.example", "here.example:80", "a b"])
def test_a_host_that_nobody_could_mean_is_refused_at_the_start(wrong):
    with pytest.raises(ValueError, match="allowed_host="):
        create_app(ScriptedBackend(), allowed_hosts=["localhost", wrong])
    create_app(ScriptedBackend(), allowed_hosts=["*", "*.here.example", "[::1]", "10.0.0.1", "a_b"])


def test_one_request_too_many_is_told_to_come_again_but_health_is_answered():
    backend = ScriptedBackend(endless=True)
    with client_of(backend, max_requests=1) as client, http(str(client.base_url)) as other:
        with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}):
            answer = other.post("/v1/completions", json=ASK)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "server_full", "a code, as for other refusals"
            assert other.get("/health").status_code == 200
        backend.endless = False
        wait_until(lambda: other.post("/v1/completions", json=ASK).status_code == 200)


def test_a_request_that_fails_gives_its_place_back():
    async def run():
        async def app(scope, receive, send):
            raise ValueError("the route fails")

        gate = RequestLimit(app, limit=1, open_paths=())
        for _ in range(3):
            with pytest.raises(ValueError, match="the route fails"):
                await gate({"type": "http", "path": "/v1/models"}, None, None)
        assert gate.under_way == 0

    asyncio.run(run())


def test_who_has_no_key_is_told_so_also_while_the_server_is_full():
    key = {"authorization": "Bearer k"}
    with (
        client_of(ScriptedBackend(endless=True), api_key="k", max_requests=1) as client,
        client.stream("POST", "/v1/completions", json=ASK | {"stream": True}, headers=key),
    ):
        assert client.get("/v1/models", headers=key).status_code == 503
        assert client.get("/v1/models").status_code == 401, (
            "the key is asked for first: who has none takes no place, and is not told how busy it is"
        )


def test_others_have_their_turn_between_two_of_many_prompts_and_two_of_many_choices():
    turns, prompts, choices = [], [], []  # how many turns others have had, at each prompt and at each choice

    def note(seen: list[int]) -> None:
        seen.append(len(turns))
        asyncio.get_running_loop().call_soon(turns.append, None)

    class Noting(ScriptedBackend):
        async def generate(self, *asked, **options):
            note(prompts)
            return await super().generate(*asked, **options)

    class NotingApi(Completions):
        def choice(self, *shown, previous=None):
            note(choices)
            return super().choice(*shown, previous)

    with client_of(Noting(), api=NotingApi()) as client:
        assert client.post("/v1/completions", json=ASK | {"prompt": ["a"] * 4}).status_code == 200
    assert prompts == [0, 1, 2, 3], "the event loop had no turn between two prompts"
    assert len(set(choices)) == 4, "the event loop had no turn between two choices"


def test_a_body_limit_is_an_argument():
    def body(size: int) -> bytes:
        return json.dumps(ASK).encode().ljust(size)

    with client_of(ScriptedBackend(), max_body_bytes=200) as client:
        for size, status in {200: 200, 201: 413}.items():
            answer = client.post(
                "/v1/completions", content=body(size), headers={"content-type": "application/json"}
            )
            assert answer.status_code == status, f"a body of {size} bytes where 200 are allowed"


def test_no_thread_outlives_the_server():
    before = set(threading.enumerate())
    with client_of(ScriptedBackend()) as client:
        client.post("/v1/completions", json=ASK)
    wait_until(lambda: set(threading.enumerate()) <= before)


class Counted(RequestOutput):
    """Outputs that know how many of them there are."""

    alive = most = 0

    def __init__(self, *fields) -> None:
        super().__init__(*fields)
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)

    def __del__(self) -> None:
        Counted.alive -= 1


def test_an_answer_in_one_piece_holds_the_latest_output_alone():
    """Each has everything so far: 4,000 of them took 70 MB, for one request."""

    class Talkative(ScriptedBackend):
        async def _outputs(self, prompt, request_id):
            for count in range(1, 51):
                reason = "length" if count == 50 else None
                sample = CompletionOutput(0, "x" * count, [1] * count, reason)
                yield Counted(request_id, prompt, [7], [sample], reason is not None)

    with client_of(Talkative()) as client:
        answer = client.post("/v1/completions", json=ASK)
    assert answer.json()["choices"][0]["text"] == "x" * 50
    assert Counted.most <= 3, "outputs that are out of date were kept"


def test_to_the_server_a_head_stays_one():
    """A route reads it as GET; the server, whose scope it is, leaves the body out."""
    scope, read = {"type": "http", "method": "HEAD"}, []

    async def app(scope, receive, send):
        read.append(scope["method"])

    asyncio.run(Head(app)(scope, None, None))
    assert (read, scope["method"]) == (["GET"], "HEAD")


def test_a_route_can_ask_whether_the_engine_has_ended_and_has_a_model():
    """As the routes of later parts do, before they begin anything."""
    backend = ScriptedBackend()
    refuse_if_down(backend)
    refuse_unknown_model("script", backend)
    with pytest.raises(RequestError, match="'gpt-9' does not exist; here are: script, ") as unknown:
        refuse_unknown_model("gpt-9", backend)
    found = (unknown.value.status, unknown.value.param, unknown.value.code)
    assert found == (404, "model", "model_not_found"), "the client named a model that is not here"
    backend.healthy = False
    with pytest.raises(RequestError, match="has ended") as down:
        refuse_if_down(backend)
    assert (down.value.status, down.value.code) == (503, "engine_down"), "503: another server may be up"


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_the_answer_to_a_head_ends_once_where_its_body_would_begin(method):
    """A stream, which goes on for as long as it likes, ends there, too. GET has what the route sends."""
    start = {"type": "http.response.start", "status": 200, "headers": []}
    pieces = [
        {"type": "http.response.body", "body": body, "more_body": more}
        for body, more in ((b"a", True), (b"b", True), (b"", False))
    ]
    sent = []

    async def app(scope, receive, send):
        for message in (start, *pieces):
            await send(dict(message))

    async def send(message):
        sent.append(message)

    asyncio.run(Head(app)({"type": "http", "method": method}, None, send))
    body = [{"type": "http.response.body", "body": b"", "more_body": False}] if method == "HEAD" else pieces
    assert sent == [start, *body], "to HEAD: the status and the headers, and one end without a body"
