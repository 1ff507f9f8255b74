"""OpenAI's completions with logprobs and echo, judged by OpenAI's own client."""

import json
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from engine.core.engine_thread import EngineThread
from engine.decoding.logprobs import TokenScores
from engine.decoding.outputs import CompletionOutput, RequestOutput
from engine.decoding.params import SamplingParams
from engine.server import completion_answer
from engine.server.app import create_app
from engine.server.protocol import CompletionRequest
from engine.server.scored import ScoredCompletions, prompt_offsets
from tests.part04.serving import http, openai_client, serve
from tests.part06.fakes import EOS, TOKENIZER, BlockCache, at_rest, told_alone
from tests.part10.scored import ScoringFake, expected, finish

PROMPT = "The dog and the ball"
ASK = {"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
ALONE = told_alone(PROMPT, GREEDY)


@pytest.fixture
def serving(passed):
    """serving(engine) -> URL of a server in front of it. What does not work without a server fails here."""
    with ExitStack() as stack:

        def start(engine):
            engine.add_request("first", "x", SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1))
            finish(engine)
            backend = stack.enter_context(at_rest(EngineThread(engine, "m"), passed))
            return stack.enter_context(serve(create_app(backend, api=ScoredCompletions(engine.tokenizer))))

        yield start


@pytest.fixture
def client(scoring_engine, serving):
    with openai_client(serving(scoring_engine())) as client:
        yield client


def complete(client, **ask):
    (choice,) = client.completions.create(**ASK | ask).choices
    return choice


def streamed(client, **ask) -> tuple[dict, list]:
    """Per index: the chunks' text and lists joined, checked chunk by chunk; and the chunks."""
    joined, chunks = {}, []
    for chunk in client.completions.create(**ASK | ask, stream=True):
        for choice in chunk.choices:
            chunks.append(choice)
            so_far = joined.setdefault(
                choice.index, {"text": "", "logprobs": [[], [], [], []], "reason": None}
            )
            before = len(so_far["text"])
            so_far["text"] += choice.text
            so_far["reason"] = choice.finish_reason
            new = lists(choice)
            for all_of_them, some in zip(so_far["logprobs"], new, strict=True):
                all_of_them += some
            offsets = new[3]
            assert all(before <= offset for offset in offsets), (
                "a token came after the text in which it begins"
            )
            if not choice.finish_reason:
                assert all(offset < len(so_far["text"]) for offset in offsets), (
                    "a token came before the text in which it begins"
                )
    return joined, chunks


def lists(choice) -> list[list]:
    found = choice.logprobs
    return [found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset]


def test_openais_four_lists_have_every_token_once(client):
    choice = complete(client, logprobs=2)
    ids = TOKENIZER.encode(PROMPT)
    assert choice.text == ALONE.text
    assert [len(one) for one in lists(choice)] == [30] * 4
    right = expected([*ids, *ALONE.token_ids], len(ids))
    assert choice.logprobs.token_logprobs == pytest.approx(right, abs=1e-5)
    for token, logprob, top in zip(*lists(choice)[:3], strict=True):
        assert top[token] == logprob
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert len(top) == 2


@pytest.mark.parametrize("n", [0, 1, 5])
def test_as_many_of_the_likeliest_as_asked_for_and_the_chosen_one(client, n):
    choice = complete(client, logprobs=n, temperature=1.5, seed=2)
    for token, logprob, top in zip(*lists(choice)[:3], strict=True):
        assert top[token] == logprob, "the chosen token is always in"
        assert len(top) in (n, n + 1)


def test_without_logprobs_there_are_none(client):
    assert complete(client).logprobs is None
    assert complete(client, echo=True).text == PROMPT + ALONE.text


def test_tokens_and_offsets_add_up_to_the_text(client):
    choice = complete(client, logprobs=0, echo=True)
    tokens, _, _, offsets = lists(choice)
    assert choice.text == PROMPT + ALONE.text
    assert offsets == sorted(offsets)
    whole = [i for i, token in enumerate(tokens) if not token.startswith("bytes:")]
    for i in whole:
        assert choice.text[offsets[i] :].lstrip("\ufffd").startswith(tokens[i])
    assert "".join(tokens[: len(PROMPT)]) == PROMPT


def test_echo_scores_the_prompt_and_its_first_token_has_no_score(client):
    tokens, logprobs, top, offsets = lists(complete(client, logprobs=1, echo=True))
    ids = TOKENIZER.encode(PROMPT)
    assert (logprobs[0], top[0], offsets[0]) == (None, None, 0)
    assert logprobs[1:] == pytest.approx(expected([*ids, *ALONE.token_ids], 1), abs=1e-5)
    assert tokens[: len(ids)] == list(PROMPT)
    assert offsets[: len(ids)] == list(range(len(ids)))


@pytest.mark.parametrize("stop", [None, ["e", "qu"]])
def test_a_prompt_alone_is_scored_with_max_tokens_0(client, stop):
    answer = client.completions.create(**ASK | {"max_tokens": 0, "echo": True, "logprobs": 3, "stop": stop})
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert [len(one) for one in lists(choice)] == [len(PROMPT)] * 4
    ids = TOKENIZER.encode(PROMPT)
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected(ids, 1), abs=1e-5)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20, 0, 20)


def test_a_token_that_is_not_shown_does_not_end_the_answer_either(scoring_engine, serving):
    """The fake model's next token after this prompt is the end of sequence."""
    prompt = next(
        p
        for i in range(999)
        if told_alone(p := f"say {i}", replace(GREEDY, ignore_eos=False)).token_ids[0] == 256
    )
    with openai_client(serving(scoring_engine())) as client:
        ask = {"model": "m", "prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
        for stream in (False, True):
            answer = client.completions.create(**ask, stream=stream)
            (choice,) = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
            assert (choice.text, choice.finish_reason) == (prompt, "length")


@pytest.mark.parametrize(
    "ask", [{}, {"echo": True}, {"echo": True, "max_tokens": 0}, {"n": 3, "temperature": 1, "echo": True}]
)
def test_a_stream_joined_is_the_whole_answer(client, ask):
    ask = {"logprobs": 2, "seed": 6} | ask
    whole = client.completions.create(**ASK | ask).choices
    joined, _ = streamed(client, **ask)
    assert len(joined) == len(whole)
    for choice in whole:
        assert joined[choice.index] == {
            "text": choice.text, "logprobs": lists(choice), "reason": choice.finish_reason,
        }  # fmt: skip


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_token_waits_with_its_text_while_a_stop_string_may_have_begun(client, length, included):
    """`streamed` checks chunk by chunk that no token is ahead of its text, nor behind."""
    text = ALONE.text
    start = next(i for i in range(8, 25) if text[i : i + length] not in text[: i + length - 1])
    stop = text[start : start + length]
    near_miss = stop + "never"  # begins like the text, and holds it back
    ask = {"logprobs": 1, "echo": True, "stop": [near_miss, stop]}
    extra = {"extra_body": {"ignore_eos": True, "include_stop_str_in_output": included}}
    whole = complete(client, **ask, **extra)
    joined, _ = streamed(client, **ask, **extra)
    end = start + (length if included else 0)
    assert whole.text == PROMPT + text[:end]
    assert joined[0]["text"] == whole.text
    assert joined[0]["logprobs"] == lists(whole)
    assert max(whole.logprobs.text_offset) <= len(whole.text), (
        "what the stop string cut off begins at the end"
    )


def test_tokens_of_what_was_cut_off_are_listed_as_they_are_counted(client):
    stop = ALONE.text[12:16]
    answer = client.completions.create(**ASK | {"logprobs": 0, "stop": [stop]})
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens


def test_token_ids_as_a_prompt_are_echoed_as_text(client):
    ids = TOKENIZER.encode("Zoë 🦊")
    choice = complete(client, prompt=ids, echo=True, logprobs=0, max_tokens=1)
    assert choice.text.startswith("Zoë 🦊")
    assert choice.logprobs.text_offset[: len(ids)] == [0, 1, 2, 2, 3, 4, 4, 4, 4]
    assert choice.logprobs.tokens[2:4] == ["bytes:\\xc3", "bytes:\\xab"]


def test_several_prompts_are_each_scored(client):
    prompts = ["one", "two and three", "x"]
    answer = client.completions.create(
        **ASK | {"prompt": prompts, "echo": True, "max_tokens": 0, "logprobs": 1}
    )
    assert [choice.text for choice in answer.choices] == prompts
    for choice, prompt in zip(answer.choices, prompts, strict=True):
        ids = TOKENIZER.encode(prompt)
        assert choice.logprobs.token_logprobs == [None, *map(pytest.approx, expected(ids, 1))]


def test_a_long_answer_is_written_choice_by_choice(client, monkeypatch):
    """128 prompts of 1,000 tokens in one piece would keep every other stream waiting."""
    pieces, whole = [], completion_answer._json
    monkeypatch.setattr(completion_answer, "_json", lambda data: pieces.append(data) or whole(data))
    ask = ASK | {"prompt": ["one", "two"], "n": 2, "temperature": 1, "echo": True, "logprobs": 1}
    answer = client.completions.create(**ask)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [piece["index"] for piece in pieces if "index" in piece] == [0, 1, 2, 3], "a piece for each choice"
    assert not any("choices" in piece for piece in pieces), "no piece holds several"


def test_vllms_prompt_logprobs_come_by_token_id(client):
    body = {"ignore_eos": True, "prompt_logprobs": 2}
    (choice,) = client.completions.create(**ASK | {"extra_body": body}).choices
    found = choice.model_extra["prompt_logprobs"]
    ids = TOKENIZER.encode(PROMPT)
    assert (found[0], len(found), choice.logprobs) == (None, len(ids), None)
    for scores, id, right in zip(found[1:], ids[1:], expected(ids, 1), strict=True):
        assert scores[str(id)]["logprob"] == pytest.approx(right, abs=1e-5)
        assert scores[str(id)]["decoded_token"] == chr(id)
        ranks = sorted(one["rank"] for one in scores.values())
        assert ranks[:2] == [1, 2]
        assert len(ranks) in (2, 3)
    both = complete(client, extra_body=body | {"prompt_logprobs": 1}, logprobs=3, echo=True)
    assert {len(scores) for scores in both.model_extra["prompt_logprobs"][1:]} <= {1, 2}
    assert {len(top) for top in both.logprobs.top_logprobs[1:]} <= {3, 4}


def test_more_prompt_logprobs_than_logprobs_come_with_an_echo(client):
    """`echo` with `logprobs` asks for the prompt's scores, too: the engine is asked for the larger number."""
    body = {"ignore_eos": True, "prompt_logprobs": 3}
    both = complete(client, extra_body=body, logprobs=1, echo=True)
    lengths = {len(scores) for scores in both.model_extra["prompt_logprobs"][1:]}
    assert lengths <= {3, 4}, "each prompt token has its own entry and those of the 3 likeliest"
    assert {len(top) for top in both.logprobs.top_logprobs[1:]} <= {1, 2}, (
        "and in `logprobs` of the likeliest one"
    )


REFUSED = [
    *[("logprobs", value, "from 0 to 20") for value in (-1, 21)],
    *[("prompt_logprobs", value, "from 0 to 20") for value in (-1, 21, 10**30)],
    *[
        (name, value, "valid integer")
        for name in ("logprobs", "prompt_logprobs")
        for value in (True, "5", 1.5, [])
    ],
    ("echo", "yes", "valid boolean"),
    ("echo", 1, "valid boolean"),
    ("max_tokens", 0, "max_tokens=0 is accepted with echo=true only"),
    ("max_tokens", -1, "at least 1"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_out_of_range_is_refused_by_name(scoring_engine, serving, stream):
    with http(serving(scoring_engine())) as client:
        for field, value, says in REFUSED:
            body = {"model": "m", "prompt": "x", "stream": stream, field: value}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 400, (field, value, answer.text)
            error = answer.json()["error"]
            assert error["param"] == field, (field, value)
            assert says in error["message"], (field, value)
        with_echo = {"model": "m", "prompt": "x", "echo": True, "logprobs": 5}
        for field, value in (("prompt_logprobs", -1), ("min_tokens", 1), ("max_tokens", -1)):
            body = with_echo | {"max_tokens": 0, field: value}
            assert client.post("/v1/completions", json=body).json()["error"]["param"] == field


def test_null_is_as_if_not_given(scoring_engine, serving):
    with http(serving(scoring_engine())) as client:
        body = {"model": "m", "prompt": "x", "logprobs": None, "prompt_logprobs": None, "echo": None}
        (choice,) = client.post("/v1/completions", json=body).json()["choices"]
        assert choice["logprobs"] is None
        assert "prompt_logprobs" not in choice


def test_what_has_no_probability_at_all_is_still_json(scoring_engine):
    scores = TokenScores(np.array([65, 66]), np.array([-np.inf, 0.0], np.float32), 2, chr)
    sample = CompletionOutput(0, "A", [65], "length", logprobs=[scores], text_offsets=[0])
    output = RequestOutput("r", "x", [120], [sample], True, prompt_logprobs=[None])
    body = CompletionRequest(model="m", prompt="x", logprobs=1, prompt_logprobs=0)
    choice = ScoredCompletions(TOKENIZER).choice(body, output, sample)
    assert json.loads(json.dumps(choice, allow_nan=False))["logprobs"]["token_logprobs"] == [-9999.0]


def test_fields_of_earlier_parts_have_their_effect_as_before(client):
    answer = client.completions.create(
        model="m", prompt="hello", n=2, seed=3, temperature=0.7, max_tokens=9, logprobs=1
    )
    params = SamplingParams(n=2, seed=3, temperature=0.7, max_tokens=9)
    assert [choice.text for choice in answer.choices] == [
        told_alone("hello", params, i).text for i in range(2)
    ]


def test_a_failed_step_is_a_500_with_logprobs_too(scoring_engine, serving):
    forward = ScoringFake(BlockCache(64, 8))
    forward.fail_at = {3: RuntimeError("the cable came loose")}  # the first step is the fixture's
    with http(serving(scoring_engine(forward=forward))) as client:
        body = {"model": "m", "prompt": "x", "logprobs": 2, "echo": True, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 500
        assert client.post("/v1/completions", json=body).status_code == 200


def test_up_to_twenty_of_the_likeliest_are_listed(client):
    """As in vLLM. OpenAI's own limit is 5."""
    tops = complete(client, logprobs=20).logprobs.top_logprobs
    assert {len(top) for top in tops} <= {20, 21}


def test_the_echo_of_a_truncated_prompt_is_what_the_model_read(client):
    """The tokens that are scored are those of the text that is shown."""
    body = {"ignore_eos": True, "truncate_prompt_tokens": 8}
    choice = complete(client, extra_body=body, echo=True, logprobs=1)
    alone = told_alone("the ball", GREEDY)
    assert choice.text == "the ball" + alone.text
    assert "".join(choice.logprobs.tokens[:8]) == "the ball"
    assert choice.logprobs.text_offset[:9] == [*range(9)]


def test_tokens_may_be_named_by_their_ids(client):
    """So a client can tell apart tokens that look the same, such as the halves of a character."""
    named = lists(complete(client, logprobs=2, echo=True))
    ask = {"ignore_eos": True, "return_tokens_as_token_ids": True}
    by_id = lists(complete(client, logprobs=2, echo=True, extra_body=ask))
    ids = [*TOKENIZER.encode(PROMPT), *ALONE.token_ids]
    assert by_id[0] == [f"token_id:{id}" for id in ids]
    assert (by_id[1], by_id[3]) == (named[1], named[3]), "the rest is the same"
    assert [list(top.values()) for top in by_id[2][1:]] == [list(top.values()) for top in named[2][1:]]
    assert all(name.startswith("token_id:") for top in by_id[2][1:] for name in top)


def test_the_token_that_is_not_shown_has_no_id_either(client):
    extra = {"return_token_ids": True, "stop_token_ids": list(range(100))}
    ask = ASK | {"max_tokens": 0, "echo": True, "logprobs": 1, "extra_body": extra}
    choice = client.completions.create(**ask).choices[0].model_dump()
    assert (choice["token_ids"], choice["stop_reason"]) == ([], None)
    assert choice["prompt_token_ids"] == TOKENIZER.encode(PROMPT)


A, B, SPACE = b"ab "


@pytest.mark.parametrize(
    ("ids", "text", "offsets"),
    [
        ([A, EOS, B], "a<end>b", [0, 1, 6]),
        ([EOS, A, B], "<end>ab", [0, 5, 6]),
        ([EOS, A, B], "ab", [0, 0, 1]),
        ([A, B, EOS], "ab", [0, 1, 2]),
        ([A, EOS, B], "ab", [0, 1, 1]),
        ([SPACE, A, B], "ab", [0, 0, 1]),
        ([EOS, SPACE, A, B], "ab", [0, 0, 0, 1]),
        ([EOS, SPACE, SPACE, A, B], " ab", [0, 0, 0, 1, 2]),
        ([SPACE, A, B], " ab", [0, 1, 2]),
        ([EOS, SPACE, A], "<end> a", [0, 5, 6]),
        ([A, SPACE, B], "a b", [0, 1, 2]),
        ([A, B, A, B], "ab", [0, 1, 2, 2]),
    ],
)
def test_a_special_token_takes_room_only_where_the_prompt_spells_it(ids, text, offsets):
    """What a tokenizer adds takes none: a special token, a space before the first word."""
    assert prompt_offsets(TOKENIZER, ids, text) == offsets, f"of {text!r}, each token begins where it stands"
