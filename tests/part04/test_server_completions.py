"""OpenAI's own client against the server, with Part 3's engine behind it: the text is the engine's."""

import json
import time

import pytest

from engine.cache.single import CachedForward
from engine.decoding.greedy import FullForward
from engine.decoding.params import SamplingParams
from engine.server.app import create_app
from engine.server.backend import LockedBackend
from tests.part04.serving import http, openai_client, serve

PROMPTS = ["Once upon a time", "The little dog", "🦊 said hello to"]
TOKENS = 24
PARAMS = SamplingParams(temperature=0, max_tokens=TOKENS)
ASK = {"model": "stories", "temperature": 0, "max_tokens": TOKENS}


def app(model, tokenizer, forward):
    return create_app(LockedBackend("stories", tokenizer, model.config, lambda: forward(model)))


@pytest.fixture(scope="module")
def url(model, tokenizer):
    with serve(app(model, tokenizer, CachedForward)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai_client(url) as client:
        yield client


def post(url, path="/v1/completions", **fields):
    with http(url) as client:
        answer = client.post(path, json={"prompt": PROMPTS[0], **ASK, **fields})
    assert answer.status_code == 200, answer.text
    assert '"error"' not in answer.text, answer.text
    return answer


def streamed(chunks) -> dict[int, str]:
    """choice index -> text of all chunks joined."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completion_is_the_text_of_the_engine_asked_directly(client, alone, prompt):
    answer = client.completions.create(prompt=prompt, **ASK)
    expected = alone(prompt, PARAMS)
    assert [choice.text for choice in answer.choices] == [expected.text]
    assert answer.choices[0].finish_reason == expected.finish_reason


def test_the_loop_without_a_cache_says_the_same(model, tokenizer, alone):
    with serve(app(model, tokenizer, FullForward)) as url, openai_client(url) as client:
        answer = client.completions.create(prompt=PROMPTS[0], **ASK)
    assert answer.choices[0].text == alone(PROMPTS[0], PARAMS).text


@pytest.mark.parametrize("prompt", PROMPTS)
def test_streamed_pieces_joined_are_the_completion(client, alone, prompt):
    chunks = list(client.completions.create(prompt=prompt, stream=True, **ASK))
    assert streamed(chunks) == {0: alone(prompt, PARAMS).text}
    assert len(chunks) > 2, "it came in one lump"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["string", "strings", "ids", "lists of ids"])
def test_each_kind_of_prompt_gives_the_text_of_its_prompt(client, alone, tokenizer, kind, stream):
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    prompt = {"string": PROMPTS[0], "strings": PROMPTS, "ids": ids[0], "lists of ids": ids}[kind]
    texts = [alone(prompt, PARAMS).text for prompt in PROMPTS]
    expected = dict(enumerate(texts if "s of" in kind or kind == "strings" else texts[:1]))
    answer = client.completions.create(prompt=prompt, stream=stream, **ASK)
    got = streamed(answer) if stream else {choice.index: choice.text for choice in answer.choices}
    assert got == expected


def test_answer_has_openais_shape(url):
    before = int(time.time())
    answer, other = (post(url, prompt="Once", max_tokens=3).json() for _ in range(2))
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["object"] == "text_completion"
    assert answer["model"] == "stories"
    assert before <= answer["created"] <= time.time()
    assert answer["id"].startswith("cmpl-")
    assert other["id"] != answer["id"]
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "length")


def test_chunks_have_openais_shape_and_share_one_id(url):
    answer = post(url, prompt="Once", stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert {frozenset(chunk) for chunk in chunks} == {
        frozenset({"id", "object", "created", "model", "choices"})
    }
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


def test_stop_reason_is_the_stop_string_whole_and_streamed(url):
    fields = {"prompt": "Once upon a time", "max_tokens": 40, "stop": ["Lily"]}
    (choice,) = post(url, **fields).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Lily")
    *events, _, _ = post(url, **fields, stream=True).text.split("\n\n")
    reasons = [json.loads(event.removeprefix("data: "))["choices"][0]["stop_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["Lily"]
    assert post(url, **fields, stop_token_ids=[14]).json()["choices"][0]["stop_reason"] == 14


@pytest.mark.parametrize("no_model", [{}, {"model": None}])
def test_without_a_model_the_base_model_answers(url, alone, no_model):
    with http(url) as client:
        body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": TOKENS} | no_model
        answer = client.post("/v1/completions", json=body).json()
    assert answer["model"] == "stories"
    assert answer["choices"][0]["text"] == alone(PROMPTS[0], PARAMS).text


def test_token_ids_come_with_the_text_whole_and_streamed(url, tokenizer, alone):
    expected = alone(PROMPTS[0], PARAMS).token_ids
    (choice,) = post(url, return_token_ids=True).json()["choices"]
    assert choice["token_ids"] == list(expected)
    assert choice["prompt_token_ids"] == tokenizer.encode(PROMPTS[0])
    *events, _, _ = post(url, return_token_ids=True, stream=True).text.split("\n\n")
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert [id for choice in choices for id in choice["token_ids"]] == list(expected)
    assert choices[0]["prompt_token_ids"] == tokenizer.encode(PROMPTS[0])
    assert all("prompt_token_ids" not in choice for choice in choices[1:])


def test_usage_so_far_is_in_each_chunk_if_asked_for(client, tokenizer):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.completions.create(prompt=PROMPTS[0], stream=True, stream_options=options, **ASK)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1] == last.usage.completion_tokens == TOKENS
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {len(tokenizer.encode(PROMPTS[0]))}


def test_usage_counts_tokens_of_all_prompts_and_completions(client, tokenizer, alone):
    answer = client.completions.create(prompt=PROMPTS, **ASK)
    prompt = sum(len(tokenizer.encode(prompt)) for prompt in PROMPTS)
    completion = sum(len(alone(prompt, PARAMS).token_ids) for prompt in PROMPTS)
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == completion
    assert answer.usage.total_tokens == prompt + completion


def test_include_usage_adds_one_last_chunk_without_choices(client, tokenizer):
    options = {"include_usage": True}
    *chunks, last = client.completions.create(prompt=PROMPTS[:2], stream=True, stream_options=options, **ASK)
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.prompt_tokens == sum(len(tokenizer.encode(prompt)) for prompt in PROMPTS[:2])
    assert last.usage.completion_tokens == 2 * TOKENS


def test_stop_string_ends_the_text_before_it(client, alone):
    text = alone(PROMPTS[0], PARAMS).text
    stop = text[20:26]
    answer = client.completions.create(prompt=PROMPTS[0], stop=[stop, "never said"], **ASK)
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    chunks = client.completions.create(prompt=PROMPTS[0], stop=stop, stream=True, **ASK)
    assert streamed(chunks) == {0: text[: text.index(stop)]}


def test_end_of_sequence_is_a_stop_and_ignore_eos_goes_on(client, alone):
    prompt = "They all lived happily ever after. The end."
    ends = client.completions.create(prompt=prompt, **ASK | {"max_tokens": 400})
    goes_on = client.completions.create(
        prompt=prompt, extra_body={"ignore_eos": True}, **ASK | {"max_tokens": 400}
    )
    expected = alone(prompt, SamplingParams(temperature=0, max_tokens=400))
    assert expected.finish_reason == "stop"
    assert (ends.choices[0].text, ends.choices[0].finish_reason) == (expected.text, "stop")
    assert (goes_on.choices[0].finish_reason, goes_on.usage.completion_tokens) == ("length", 400)


def test_max_tokens_is_sixteen_when_not_given(client):
    answer = client.completions.create(model="stories", prompt="Once upon a time", temperature=0)
    assert answer.usage.completion_tokens == 16


def test_v1_and_bare_path_are_equal(url):
    first, second = (post(url, path).json() for path in ("/v1/completions", "/completions"))
    assert first["choices"] == second["choices"]
    assert first["usage"] == second["usage"]


def test_models_are_listed_and_retrieved(client):
    (listed,) = client.models.list().data
    assert listed == client.models.retrieve("stories")
    assert (listed.id, listed.object, listed.owned_by) == ("stories", "model", "ruvon")
    assert listed.created <= time.time()


def test_health_is_ok(url):
    with http(url) as client:
        answer = client.get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("asked", [False, True])
def test_the_prompts_ids_are_in_a_choice_and_nowhere_else(url, asked):
    answer = post(url, return_token_ids=asked).json()
    assert "prompt_token_ids" not in answer, "beside the choices they are in a chat's answer alone"
    assert ("prompt_token_ids" in answer["choices"][0]) == asked
