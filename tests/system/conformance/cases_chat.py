"""Cases: `/v1/chat/completions`, by what a field is for."""

from typing import Any

from tests.system.conformance.case import ASK, GREEDY, SCHEMA, TOOL, Case, M, variant

BODY = {"model": M, "messages": ASK, **GREEDY}


def chat(name: str, **changes: Any) -> Case:
    """A short greedy request with `changes`, as `variant` takes them."""
    return variant("chat: " + name, "/v1/chat/completions", BODY, **changes)


PLAIN = [
    chat("plain", use="much"),
    chat("max_tokens left out", use="much", drop=("max_tokens",)),
    chat("max_completion_tokens", use="much", drop=("max_tokens",), max_completion_tokens=7),
    chat("both, different", max_tokens=9, max_completion_tokens=7),
    chat("model left out", drop=("model",)),
    chat("unknown model", use="much", model="nobody"),
]

MESSAGES = [
    chat("system + user", use="much", messages=[{"role": "system", "content": "You tell stories."}, *ASK]),
    chat(
        "three turns",
        use="much",
        messages=[
            *ASK,
            {"role": "assistant", "content": "Once there was a dog."},
            {"role": "user", "content": "And then?"},
        ],
    ),
    chat("developer", messages=[{"role": "developer", "content": "You tell stories."}, *ASK]),
    chat("tool role", messages=[*ASK, {"role": "tool", "content": "sunny", "tool_call_id": "x"}]),
    chat("unknown role", messages=[{"role": "wizard", "content": "Hi"}]),
    chat(
        "content parts",
        use="much",
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Tell me a story "},
                    {"type": "text", "text": "about a dog."},
                ],
            }
        ],
    ),
    chat(
        "content an image",
        messages=[
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
            }
        ],
    ),
    chat("content null", messages=[{"role": "user", "content": None}]),
    chat("content missing", messages=[{"role": "user"}]),
    chat("name in a message", messages=[{"role": "user", "name": "Ann", "content": ASK[0]["content"]}]),
    chat("messages empty", messages=[]),
    chat("messages text", messages="hi"),
    chat("messages left out", drop=("messages",)),
    chat("too long", use="much", messages=[{"role": "user", "content": " the" * 600}]),
]

LENGTHS = [
    chat("max_tokens over the length", max_tokens=600),
    chat("max_tokens=0", max_tokens=0),
]

LOGPROBS = [
    chat("logprobs", use="much", logprobs=True),
    chat("logprobs + top_logprobs=3", use="much", logprobs=True, top_logprobs=3),
    chat("top_logprobs=0", logprobs=True, top_logprobs=0),
    chat("top_logprobs=21", logprobs=True, top_logprobs=21),
    chat("top_logprobs without logprobs", top_logprobs=3),
    chat("top_logprobs=-1", use="rare", logprobs=True, top_logprobs=-1, max_tokens=1),
    chat("prompt_logprobs", use="rare", prompt_logprobs=1),
]

SAMPLING = [
    chat("n=2", n=2),
    chat("n=0", n=0),
    chat("stop", use="much", stop=["dog"], max_tokens=40),
    chat(
        "sampling fields",
        values=False,
        use="much",
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=0.05,
        repetition_penalty=1.1,
        seed=4,
    ),
    chat("ends by itself", use="much", max_tokens=400),
]

CONSTRAINTS = [
    chat("response_format text", response_format={"type": "text"}),
    chat("response_format json_object", use="much", response_format={"type": "json_object"}, max_tokens=30),
    chat(
        "response_format json_schema",
        use="much",
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        max_tokens=40,
    ),
    chat("structured_outputs choice", use="some", structured_outputs={"choice": ["yes", "no"]}),
]

TOOLS = [
    chat("tools, auto", use="much", tools=[TOOL]),
    chat("tools, none", use="some", tools=[TOOL], tool_choice="none"),
    chat("tools, required", tools=[TOOL], tool_choice="required", max_tokens=60),
    chat(
        "tools, named",
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=40,
    ),
    chat("tools empty", tools=[]),
    chat("tool_choice none alone", tool_choice="none"),
    chat("parallel_tool_calls", parallel_tool_calls=True),
]

MORE_FIELDS = [
    chat(
        "store, metadata, service_tier (OpenAI's)",
        use="some",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
    ),
    chat("reasoning_effort", use="some", reasoning_effort="low"),
    chat("chat_template_kwargs", use="much", chat_template_kwargs={"enable_thinking": False}),
    chat("chat_template of one's own", use="rare", chat_template="{{ messages[0]['content'] }}"),
    chat("add_generation_prompt=false", use="some", add_generation_prompt=False),
    chat(
        "continue_final_message",
        use="some",
        add_generation_prompt=False,
        continue_final_message=True,
        messages=[*ASK, {"role": "assistant", "content": "Once upon a"}],
    ),
    chat("echo", use="rare", echo=True),
    chat("add_special_tokens", use="rare", add_special_tokens=True),
    chat("truncate_prompt_tokens", use="rare", truncate_prompt_tokens=5),
    chat("min_tokens, ignore_eos", min_tokens=5, ignore_eos=True),
    chat("allowed_token_ids, bad_words", allowed_token_ids=[16, 265, 267], bad_words=["the"]),
    chat("logit_bias", logit_bias={"267": 100}),
    chat("return_token_ids", return_token_ids=True),
    chat("return_tokens_as_token_ids", return_tokens_as_token_ids=True, logprobs=True),
    chat("return_prompt_text", use="rare", return_prompt_text=True),
    chat("request_id", request_id="mine-3"),
    chat("priority=1", use="rare", priority=1),
    chat("use_beam_search", use="rare", use_beam_search=True, n=2),
    chat(
        "all optional null",
        frequency_penalty=None,
        logit_bias=None,
        logprobs=None,
        top_logprobs=None,
        n=None,
        presence_penalty=None,
        response_format=None,
        seed=None,
        stop=None,
        stream=None,
        stream_options=None,
        top_p=None,
        tools=None,
        tool_choice=None,
        user=None,
    ),
    chat("unknown field", foo=1),
]

STREAMS = [
    chat("stream", use="much", stream=True),
    chat("stream + include_usage", use="much", stream=True, stream_options={"include_usage": True}),
    chat(
        "stream + continuous_usage_stats",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    chat("stream + logprobs", stream=True, logprobs=True, top_logprobs=2),
    chat("stream + n=2", stream=True, n=2),
    chat("stream + stop", stream=True, max_tokens=40, stop=["named"]),
    chat("stream that ends by itself", use="much", stream=True, max_tokens=400),
    chat("stream + tools", use="much", stream=True, tools=[TOOL]),
    chat("stream + return_token_ids", stream=True, return_token_ids=True),
    chat("stream, too long", stream=True, messages=[{"role": "user", "content": " the" * 600}]),
]

CHAT = [
    *PLAIN,
    *MESSAGES,
    *LENGTHS,
    *LOGPROBS,
    *SAMPLING,
    *CONSTRAINTS,
    *TOOLS,
    *MORE_FIELDS,
    *STREAMS,
]
