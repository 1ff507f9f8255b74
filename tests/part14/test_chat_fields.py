"""OpenAI's and vLLM's fields of a chat beside the sampling: what asks for nothing, and what has an effect."""

import pytest

from engine.core.engine_thread import EngineThread
from engine.decoding.chat_template import ChatTemplate
from engine.decoding.params import SamplingParams
from engine.server.app import create_app
from engine.server.chat import chat_routes
from tests.part04.serving import http, serve
from tests.part06.fakes import TOKENIZER, at_rest, told_alone

TEMPLATE = ChatTemplate.from_pretrained("storyteller")
QUESTION = [{"role": "user", "content": "Tell me about the dog."}]
BODY = {"model": "m", "messages": QUESTION, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ALONE = told_alone(TEMPLATE.render(QUESTION), GREEDY).text
# A template that thinks, as Qwen3's, and tells who speaks.
THINKING = """{% for m in messages %}<{{ m.role }}{{ ":" + m.name if m.name }}>{{ m.content }};{% endfor -%}
{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined and enable_thinking is false %}()\
{% endif %}{% endif %}{% if reasoning_effort == "low" %}low{% endif %}"""
NOTHING = {
    "tools": (None, []), "tool_choice": (None, "none", "auto"), "parallel_tool_calls": (None, True, False),
    "functions": (None, []), "function_call": (None, "none", "auto"), "store": (None, False),
    "metadata": (None, {}, {"run": "7"}), "service_tier": (None, "auto", "default"), "user": (None, "me"),
    "reasoning_effort": (None, "none"), "modalities": (None, ["text"]), "audio": (None,), "seed": (None,),
    "prediction": (None,), "verbosity": (None, "medium"), "web_search_options": (None,),
    "response_format": (None, {"type": "text"}), "structured_outputs": (None,), "safety_identifier": ("x",),
    "prompt_cache_key": ("x",), "use_beam_search": (None, False), "chat_template": (None,),
    "chat_template_kwargs": (None, {}, {"enable_thinking": False}), "add_generation_prompt": (None, True),
    "continue_final_message": (None, False), "add_special_tokens": (None, False), "echo": (None, False),
    "prompt_logprobs": (None,),
}  # fmt: skip


@pytest.fixture
def client(serving):
    with http(serving()) as client:
        yield client


@pytest.fixture
def thinking(scoring_engine, passed):
    """A server whose chat template is THINKING."""
    engine = scoring_engine()
    with at_rest(EngineThread(engine, "m"), passed) as backend:
        app = create_app(backend, [chat_routes(engine.tokenizer, engine.config, ChatTemplate(THINKING))])
        with serve(app) as url, http(url) as client:
            yield client


def said(client, **fields) -> dict:
    answer = client.post("/v1/chat/completions", json=BODY | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client, **fields) -> dict:
    answer = client.post("/v1/chat/completions", json=BODY | fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def text_of(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", NOTHING)
def test_a_value_that_asks_for_nothing_changes_nothing(client, name):
    for value in NOTHING[name]:
        assert text_of(said(client, **{name: value})) == ALONE


@pytest.mark.parametrize(
    ("name", "value"),
    [("store", 0), ("parallel_tool_calls", 1), ("tools", {}), ("tool_choice", ""), ("modalities", "text"),
     ("response_format", {"type": "text", "x": 1}), ("use_beam_search", 0)],
)  # fmt: skip
def test_a_value_of_another_kind_is_no_neutral_value(client, name, value):
    error = refused(client, **{name: value})
    assert error["param"] == name
    assert name in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("tools", [{"type": "function", "function": {"name": "f"}}]), ("tool_choice", "required"),
     ("tool_choice", {"type": "function", "function": {"name": "f"}}), ("include_reasoning", False),
     ("response_format", {"type": "json_object"}), ("structured_outputs", {"regex": "a"}),
     ("use_beam_search", True),
     ("messages", [{"role": "tool", "content": "x", "tool_call_id": "1"}]),
     ("messages", [{"role": "assistant", "content": "x", "reasoning": "y"}]),
     ("messages", [{"role": "assistant", "tool_calls": [
         {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}])],
)  # fmt: skip
def test_what_an_extension_brings_is_refused_with_its_name(client, name, value):
    error = refused(client, **{name: value})
    assert error["param"] == name
    assert "Extension B" in error["message"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("tools", [{"type": "function"}], "tools.0.function is required"),
     ("tools", [{"type": "web_search"}], "Input should be 'function'"),
     ("tools", [{"type": "function", "function": {"name": "a b"}}], "match pattern"),
     ("tools", [{"type": "function", "function": {"name": "f", "parameters": []}}], "valid dictionary"),
     ("tool_choice", {"type": "function"}, "function is required"), ("tool_choice", 3, '"required"'),
     ("functions", [{}], "is the old name of tools"),
     ("function_call", "f", "is the old name of tool_choice"),
     ("messages", [{"role": "tool", "content": "x"}], "needs a tool_call_id"),
     ("messages", [{"role": "user", "content": "x", "tool_call_id": "1"}], "no other message has one"),
     ("messages", [{"role": "function", "content": "x"}], "'tool' is its newer name"),
     ("messages", [{"role": "user", "content": "x", "tool_calls": [
         {"id": "1", "function": {"name": "f", "arguments": "{}"}}]}], "role user has no tool_calls")],
)  # fmt: skip
def test_a_tool_of_another_shape_is_refused_by_name(client, name, value, words):
    error = refused(client, **{name: value})
    assert error["param"] == name
    assert words in error["message"]


def test_an_assistants_turn_may_be_empty_and_nobody_elses(client):
    turn = {"role": "user", "content": "And?"}
    text = TEMPLATE.render([*QUESTION, {"role": "assistant", "content": ""}, turn])
    for empty in ({"content": None}, {}, {"content": "", "refusal": None, "tool_calls": []}):
        answer = said(client, messages=[*QUESTION, {"role": "assistant", **empty}, turn])
        assert text_of(answer) == told_alone(text, GREEDY).text
    for role in ("user", "system"):
        assert f"role {role} needs a content" in refused(client, messages=[{"role": role}])["message"]


def test_a_name_is_the_templates(client, thinking):
    named = [QUESTION[0] | {"name": "Ann"}]
    assert text_of(said(client, messages=named)) == ALONE, "a template that knows no names"
    text = "<user:Ann>Tell me about the dog.;<assistant>"
    assert text_of(said(thinking, messages=named)) == told_alone(text, GREEDY).text


def test_variables_reach_the_template(thinking):
    text = "<user>Tell me about the dog.;<assistant>"
    for kwargs, end in (({"enable_thinking": False}, "()"), ({"enable_thinking": True}, ""), ({}, "")):
        answer = said(thinking, chat_template_kwargs=kwargs)
        assert text_of(answer) == told_alone(text + end, GREEDY).text
    answer = said(thinking, reasoning_effort="low")
    assert text_of(answer) == told_alone(text + "low", GREEDY).text


def test_a_message_goes_on(client):
    begun = [*QUESTION, {"role": "assistant", "content": "Once upon a"}]
    text = TEMPLATE.render(QUESTION) + "Once upon a"
    fields = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    answer = said(client, **fields)
    assert text_of(answer) == told_alone(text, GREEDY).text
    assert answer["usage"]["prompt_tokens"] == len(TOKENIZER.encode(text))
    assert text_of(said(client, **fields, echo=True)) == "Once upon a" + told_alone(text, GREEDY).text


def test_an_echo_streamed_comes_first(client):
    begun = [*QUESTION, {"role": "assistant", "content": "Once upon a"}]
    fields = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True, "echo": True}
    with client.stream("POST", "/v1/chat/completions", json=BODY | fields | {"stream": True}) as answer:
        first = next(line for line in answer.iter_lines() if line)
    assert '"delta":{"role":"assistant","content":"Once upon a"}' in first


def test_without_a_generation_prompt_the_users_part_goes_on(client):
    answer = said(client, add_generation_prompt=False)
    text = TEMPLATE.render(QUESTION, add_generation_prompt=False)
    assert text_of(answer) == told_alone(text, GREEDY).text
    assert answer["choices"][0]["message"]["role"] == "user", "as in vLLM: whose words these are"
    assert text_of(said(client, echo=True)) == ALONE, "the assistant begins: there is nothing to echo"


def test_the_prompts_log_probabilities_stand_beside_the_choices(client):
    answer = said(client, prompt_logprobs=2, n=2)
    ids = TOKENIZER.encode(TEMPLATE.render(QUESTION))
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert [str(id) in scores for id, scores in zip(ids[1:], others, strict=True)] == [True] * (len(ids) - 1)
    assert all({"logprob", "rank", "decoded_token"} == set(score) for s in others for score in s.values())
    assert "prompt_logprobs" not in said(client)
