"""Every request that cannot be served gets a clear error in OpenAI's shape, and leaves nothing behind."""

import json

import openai
import pytest

from engine.cache.single import CachedForward
from engine.server.app import create_app
from engine.server.backend import LockedBackend
from engine.server.protocol import CompletionRequest
from tests.part04.serving import http, openai_client, serve

JSON = {"content-type": "application/json"}
GOOD = {"model": "stories", "prompt": "Once", "max_tokens": 2}

# what is wrong, the changed fields, the field to blame, what the message says
REFUSED = [
    ("unknown field", {"colour": "red"}, "colour", "colour"),
    ("max_tokens 0", {"max_tokens": 0}, "max_tokens", "at least 1"),
    ("max_tokens negative", {"max_tokens": -5}, "max_tokens", "-5"),
    ("max_tokens a string", {"max_tokens": "5"}, "max_tokens", "integer"),
    ("max_tokens a fraction", {"max_tokens": 1.5}, "max_tokens", "1.5"),
    ("max_tokens true", {"max_tokens": True}, "max_tokens", "integer"),
    ("min_tokens over max_tokens", {"min_tokens": 3}, "min_tokens", "max_tokens=2"),
    ("temperature negative", {"temperature": -1}, "temperature", "-1"),
    ("temperature a string", {"temperature": "hot"}, "temperature", "hot"),
    ("stream a string", {"stream": "yes"}, "stream", "yes"),
    ("no prompt", {"prompt": None}, "prompt", "prompt"),
    ("empty prompt", {"prompt": ""}, "prompt", "empty"),
    ("no prompts", {"prompt": []}, "prompt", "empty"),
    ("one empty prompt of two", {"prompt": ["Once", ""]}, "prompt", "0 tokens"),
    ("empty ids", {"prompt": [[]]}, "prompt", "prompt"),
    ("mixed prompts", {"prompt": ["Once", [1]]}, "prompt", "prompt"),
    ("a wrong prompt of several", {"prompt": [[5], [5, "x"]]}, "prompt", "'x'"),
    ("prompt an object", {"prompt": {"text": "Once"}}, "prompt", "prompt"),
    ("prompt id true", {"prompt": [True]}, "prompt", "prompt"),
    ("prompt id negative", {"prompt": [-1]}, "prompt", "-1"),
    ("prompt id out of range", {"prompt": [10**6]}, "prompt", "1000000"),
    ("prompt too long", {"prompt": [5] * 1024}, "prompt", "1024"),
    ("one prompt too long", {"prompt": [[5], [5] * 5000]}, "prompt", "5000"),
    ("prompt not Unicode", {"prompt": "\ud800"}, "prompt", "U+D800"),
    ("stop empty", {"stop": ""}, "stop", "empty"),
    ("stop a number", {"stop": 5}, "stop", "5"),
    ("stop numbers", {"stop": [5]}, "stop", "list of texts"),
    ("stop token out of range", {"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
    ("bad word empty", {"bad_words": ["a", " "]}, "bad_words", "no space"),
    ("bad word not Unicode", {"bad_words": ["\ud800"], "stream": True}, "bad_words", "unicode"),
    ("no token allowed", {"allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
    ("truncated to nothing", {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "leaves no prompt"),
    ("truncated to too much", {"truncate_prompt_tokens": 1024}, "truncate_prompt_tokens", "at most 1023"),
    ("logit_bias of a word", {"logit_bias": {"cat": 5}}, "logit_bias", "token ids"),
    *[(f"logit_bias key {key!r}", {"logit_bias": {key: 5}}, "logit_bias", "token ids")
      for key in ("1_0", " 5", "+5", "-5", "05", "٣", "")],
    ("logit_bias too large", {"logit_bias": {"5": 101}}, "logit_bias", "101"),
    ("echo", {"echo": True}, "echo", "not supported by this server"),
    ("suffix", {"suffix": "the end"}, "suffix", "suffix"),
    ("chunks padded", {"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options",
     "include_obfuscation"),
    ("best_of over n", {"best_of": 2}, "best_of", "2"),
    ("stream_options alone", {"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ("unknown stream option", {"stream": True, "stream_options": {"x": 1}}, "stream_options", "x"),
    ("priority", {"priority": 1}, "priority", "priority=1"),
    ("cache_salt", {"cache_salt": "me"}, "cache_salt", "me"),
]  # fmt: skip
LATER = [
    *[("temperature", 0.7), ("top_k", 5), ("top_p", 0.5), ("min_p", 0.1), ("n", 2), ("seed", 1)],
    *[("repetition_penalty", 1.1), ("frequency_penalty", 0.5), ("presence_penalty", -0.5)],
    ("logit_bias", {"5": 1}),
    ("allowed_token_ids", [5]),
]


@pytest.fixture(scope="module")
def forwards():
    """One entry for each forward pass."""
    return []


@pytest.fixture(scope="module")
def url(model, tokenizer, forwards):
    def make():
        forward = CachedForward(model)
        return lambda token_ids: forwards.append(1) or forward(token_ids)

    backend = LockedBackend("stories", tokenizer, model.config, make)
    with serve(create_app(backend, api_key="secret")) as url:
        yield url
    assert not backend._live
    assert not backend._lock.locked()


@pytest.fixture(scope="module")
def client(url):
    with http(url) as client:
        client.headers["authorization"] = "Bearer secret"
        yield client


@pytest.fixture(autouse=True)
def nothing_is_computed(forwards):
    forwards.clear()
    yield
    assert not forwards, "a refused request reached the model"


def error_of(answer, status: int, param: str | None = None, kind: str = "invalid_request_error") -> dict:
    """The error's body, once its shape is what OpenAI's is."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == (kind, param)
    assert error["message"]
    return error


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("change", "param", "says"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_refused_before_anything_is_sent_naming_the_field(client, change, param, says, stream):
    if stream and {"stream", "stream_options"} & set(change):
        change = {**change, "model": "stories"}  # these two say themselves whether they stream
    else:
        change = {"stream": stream, **change}
    error = error_of(
        client.post("/v1/completions", content=json.dumps(GOOD | change), headers=JSON), 400, param
    )
    assert says in error["message"]


@pytest.mark.parametrize(("field", "value"), LATER)
def test_a_field_of_part_5_is_refused_saying_so(client, field, value):
    error = error_of(client.post("/v1/completions", json=GOOD | {field: value}), 400, field)
    assert "Part 5" in error["message"]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_a_field_of_part_10_is_refused_saying_so(client, field):
    error = error_of(client.post("/v1/completions", json=GOOD | {field: 2}), 400, field)
    assert "Part 10" in error["message"]


def test_a_missing_field_is_named(client):
    body = {"model": GOOD["model"]}
    assert "prompt" in error_of(client.post("/v1/completions", json=body), 400, "prompt")["message"]


def test_not_a_number_is_refused(client):
    body = b'{"model": "stories", "prompt": "Once", "temperature": NaN}'
    error_of(client.post("/v1/completions", content=body, headers=JSON), 400, "temperature")


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'"text"', b"null", b"\xff\xfe\xfd", b'{"model": "stories", "prompt": "\xff"}'),
        b'{"model": "stories", "prompt": "Once"',
        b"[" * 100_000,
        b'{"model": "stories", "prompt": "Once", "seed": ' + b"1" * 5000 + b"}",
        b'{"model": "stories", "prompt": "Once", "\\ud800": 1}',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_a_body_that_is_no_json_object_is_a_400(client, body):
    error_of(client.post("/v1/completions", content=body, headers=JSON), 400)


@pytest.mark.parametrize("headers", [{}, {"content-type": "application/x-www-form-urlencoded"}])
def test_a_body_without_its_content_type_is_a_400_that_names_the_header(client, headers):
    answer = client.post("/v1/completions", content=json.dumps(GOOD), headers=headers)
    assert "Content-Type: application/json" in error_of(answer, 400)["message"]


@pytest.mark.parametrize("announced", [True, False], ids=["content-length", "chunked"])
def test_a_huge_body_is_a_413(client, announced):
    body = b'{"model": "stories", "prompt": "' + b"a" * (2 * 2**20) + b'"}'
    content = body if announced else iter([body[i : i + 2**16] for i in range(0, len(body), 2**16)])
    error_of(client.post("/v1/completions", content=content, headers=JSON), 413)


def test_unknown_model_is_a_404_that_lists_the_known(client):
    error = error_of(
        client.post("/v1/completions", json=GOOD | {"model": "gpt-9"}), 404, "model", "not_found_error"
    )
    assert error["code"] == "model_not_found"
    assert "gpt-9" in error["message"]
    assert "stories" in error["message"]
    error_of(client.get("/v1/models/gpt-9"), 404, "model", "not_found_error")


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/embeddings", "/redoc", "/" + "x" * 2000])
def test_unknown_route_is_a_404_that_lists_the_known(client, path):
    error = error_of(client.get(path), 404, kind="not_found_error")
    assert error["message"].startswith(f"no route '{path[:10]}")
    assert error["message"].endswith(", /v1/completions, described in /openapi.json")
    assert ", /v1/models/{name}, " in error["message"], "as the schema has it"
    assert len(error["message"]) <= 500


@pytest.mark.parametrize("path", ["/v1/completions", "/completions"])
def test_wrong_method_is_a_405_that_says_which_is_allowed(client, path):
    answer = client.get(path)
    error_of(answer, 405)
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer secret2", "secret", "Basic secret"])
@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions", "/nothing", "/version"])
def test_without_the_api_key_every_route_is_a_401(url, path, header):
    with http(url) as client:
        answer = client.post(path, json=GOOD, headers={"authorization": header} if header else {})
    assert error_of(answer, 401, kind="authentication_error")["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("header", ["Bearer secret", "bearer secret", "BEARER  secret"])
def test_the_word_bearer_may_be_written_in_any_case(url, header):
    with http(url) as client:
        assert client.get("/v1/models", headers={"authorization": header}).status_code == 200


def test_an_api_key_outside_ascii_is_a_401(url):
    with http(url) as client:
        answer = client.get("/v1/models", headers={"authorization": "Bearer schlüssel".encode()})
    error_of(answer, 401, kind="authentication_error")


def test_health_needs_no_api_key(url):
    with http(url) as client:
        assert client.get("/health").status_code == 200


def test_openais_client_raises_its_own_exceptions(url):
    with openai_client(url, "secret") as client:
        with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
            client.completions.create(**GOOD | {"max_tokens": 0})
        assert caught.value.param == "max_tokens"
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            client.completions.create(**GOOD | {"model": "gpt-9"})
    with openai_client(url, "wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


OPTIONAL = [name for name, field in CompletionRequest.model_fields.items() if not field.is_required()]


@pytest.mark.parametrize("field", OPTIONAL)
def test_null_means_not_given(client, field, forwards):
    answer = client.post("/v1/completions", json=GOOD | {field: None})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 1
    forwards.clear()


@pytest.mark.parametrize("change", [{"suffix": ""}, {"priority": 0}, {"stream_options": None}])
def test_what_asks_for_nothing_is_accepted(client, change, forwards):
    assert client.post("/v1/completions", json=GOOD | change).status_code == 200
    forwards.clear()


def test_unpadded_chunks_may_be_asked_for(client, forwards):
    fields = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert '"error"' not in client.post("/v1/completions", json=GOOD | fields).text
    forwards.clear()


def test_usage_in_each_chunk_needs_a_usage_to_be_asked_for(client):
    fields = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    error = error_of(client.post("/v1/completions", json=GOOD | fields), 400, "stream_options")
    assert "needs include_usage=true" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_salt", ""),
        ("request_id", ""),
        ("request_id", "a b"),
        ("request_id", "a" * 129),
        ("request_id", 5),
    ],
)
def test_a_name_that_is_none_is_refused(client, field, value):
    error_of(client.post("/v1/completions", json=GOOD | {field: value}), 400, field)


def test_every_answer_has_a_name_of_its_own(client):
    names = [client.get(path).headers["x-request-id"] for path in ("/health", "/health", "/nothing")]
    assert len(set(names)) == 3


def test_the_described_api_has_the_statuses_that_occur(client):
    paths = client.get("/openapi.json").json()["paths"]
    statuses = set(paths["/v1/completions"]["post"]["responses"])
    assert statuses == {"200", "400", "401", "404", "405", "413", "429", "500", "503", "4XX"}
    assert "422" not in json.dumps(paths)
