"""The 244 requests that were sent to a real vLLM 0.32 and are sent to `ruvon serve`.

Both serve storyteller in float32 with a context of 512 tokens.
"""

import json
from dataclasses import dataclass, field
from typing import Any

M = "storyteller"
PROMPT = "Once upon a time"
IDS = [418, 436, 261, 388]  # the same, by storyteller's tokenizer
ASK = [{"role": "user", "content": "Tell me a story about a dog."}]
GREEDY = {"temperature": 0, "max_tokens": 12}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True)
class Case:
    """One HTTP request. `values`: its answer is greedy, so every value is compared, not the structure
    alone. `use`: how common the request is: much, some, rare.
    """

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    raw: str | None = None  # sent as it is, in place of `body`
    headers: dict[str, str] = field(default_factory=dict)
    values: bool = True
    use: str = "some"


CASES: list[Case] = []


def case(name, path, body=None, **more):
    CASES.append(Case(name, path, body, **more))


def comp(name, values=True, use="some", drop=(), **fields):
    body = {"model": M, "prompt": PROMPT, **GREEDY, **fields}
    for key in drop:
        body.pop(key, None)
    case("completions: " + name, "/v1/completions", body, values=values, use=use)


def chat(name, values=True, use="some", drop=(), **fields):
    body = {"model": M, "messages": ASK, **GREEDY, **fields}
    for key in drop:
        body.pop(key, None)
    case("chat: " + name, "/v1/chat/completions", body, values=values, use=use)


def get(name, path, use="some", values=True, **more):
    case(name, path, method="GET", values=values, use=use, **more)


# ---------------------------------------------------------------- routes beside the two
get("models", "/v1/models", "much")
get("models/storyteller", f"/v1/models/{M}")
get("models/unknown", "/v1/models/nobody")
get("health", "/health", "much")
get("ping", "/ping", "rare")
get("version", "/version", values=False)
get("load", "/load", "rare")
get("metrics", "/metrics", "much")
get("docs", "/docs", "rare", values=False)
get("openapi", "/openapi.json", "rare")
get("unknown path", "/v1/nothing")
get("wrong method", "/v1/completions")
case("tokenize: text", "/tokenize", {"model": M, "prompt": PROMPT}, use="much")
case("tokenize: text, with strings", "/tokenize", {"model": M, "prompt": PROMPT, "return_token_strs": True})
case("tokenize: messages", "/tokenize", {"model": M, "messages": ASK})
case("detokenize", "/detokenize", {"model": M, "tokens": IDS})
case("embeddings of a generating model", "/v1/embeddings", {"model": M, "input": "x"}, use="rare")
case(
    "responses",
    "/v1/responses",
    {"model": M, "input": "Tell me a story", "temperature": 0, "max_output_tokens": 16},
    values=False,
    use="some",
)
case(
    "messages (Anthropic's)",
    "/v1/messages",
    {"model": M, "messages": ASK, "max_tokens": 8, "temperature": 0},
    values=False,
    use="rare",
)
case(
    "load adapter, not switched on",
    "/v1/load_lora_adapter",
    {"lora_name": "a", "lora_path": "/nowhere"},
    use="rare",
)

# ---------------------------------------------------------------- completions: what is asked most
comp("plain", use="much")
comp("max_tokens left out (16)", use="much", drop=["max_tokens"])
comp("max_tokens null", max_tokens=None)
comp("temperature left out", values=False, use="much", drop=["temperature"], seed=1)
comp("model left out", use="some", drop=["model"])
comp("model null", model=None)
comp("unknown model", use="much", model="nobody")
comp(
    "all optional null",
    best_of=None,
    echo=None,
    frequency_penalty=None,
    logit_bias=None,
    logprobs=None,
    presence_penalty=None,
    seed=None,
    stop=None,
    stream=None,
    stream_options=None,
    suffix=None,
    top_p=None,
    user=None,
)
comp("n null", n=None)
comp("prompt: token ids", use="much", prompt=IDS)
comp("prompt: batch of texts", use="much", prompt=[PROMPT, "The little dog"])
comp("prompt: batch of ids", prompt=[IDS, [373, 381, 568]])
comp("prompt: batch of one", prompt=[PROMPT])
comp("prompt: empty text", prompt="")
comp("prompt: empty list", prompt=[])
comp("prompt: null", prompt=None)
comp("prompt: left out", drop=["prompt"])
comp("prompt: number", prompt=5)
comp("prompt: id out of the vocabulary", prompt=[4096])
comp("prompt: negative id", prompt=[-1])
comp("prompt: mixed", prompt=[5, "a"])
comp("prompt: longer than the model", use="much", prompt=" the" * 600)
comp("prompt: exactly the model's length", prompt=[265] * 512)
comp("prompt + max_tokens over the length", use="much", max_tokens=600)
comp("n=3, greedy", n=3)
comp("n=2, sampled", values=False, use="some", n=2, temperature=0.8, seed=3)
comp("n=2 of 2 prompts", n=2, prompt=[PROMPT, "The little dog"])
comp("n=0", n=0)
comp("best_of=1", best_of=1)
comp("best_of=3", use="rare", best_of=3)
comp("suffix", suffix="end")
comp("suffix empty", suffix="")
comp("echo", use="some", echo=True)
comp("echo of ids", echo=True, prompt=IDS)
comp("echo + max_tokens=0", use="some", echo=True, max_tokens=0)
comp("echo + logprobs + max_tokens=0", use="much", echo=True, max_tokens=0, logprobs=1)
comp("echo + logprobs", use="much", echo=True, logprobs=2)
comp("max_tokens=0", max_tokens=0)
comp("max_tokens=-1", max_tokens=-1)
comp("max_tokens text", max_tokens="5")
comp("max_tokens 5.0", max_tokens=5.0)
comp("max_tokens 5.5", max_tokens=5.5)
comp("logprobs=0", logprobs=0)
comp("logprobs=1", use="much", logprobs=1)
comp("logprobs=5", use="much", logprobs=5)
comp("logprobs=10", use="some", logprobs=10)
comp("logprobs=20", logprobs=20)
comp("logprobs=21", logprobs=21)
comp("logprobs=-1", use="rare", logprobs=-1, max_tokens=1)
comp("logprobs=true", logprobs=True)
comp("prompt_logprobs=2", use="some", prompt_logprobs=2)
comp("prompt_logprobs=0", prompt_logprobs=0)
comp("prompt_logprobs + stream", prompt_logprobs=1, stream=True)
comp("logprob_token_ids", use="rare", logprobs=1, logprob_token_ids=[265, 415])
comp("temperature=3", values=False, temperature=3, seed=1)
comp("temperature=-1", temperature=-1)
comp("temperature text", temperature="0")
comp("top_p=0", top_p=0)
comp("top_p=1.1", top_p=1.1)
comp("top_k=-1", top_k=-1)
comp("top_k=-2", top_k=-2)
comp(
    "top_k=5, min_p, sampled",
    values=False,
    use="much",
    temperature=0.8,
    top_k=5,
    min_p=0.05,
    top_p=0.9,
    seed=5,
)
comp("min_p=2", min_p=2)
comp("repetition_penalty=1.3, greedy", use="some", repetition_penalty=1.3, max_tokens=30)
comp("repetition_penalty=0", repetition_penalty=0)
comp("presence_penalty=1, greedy", presence_penalty=1.0, max_tokens=30)
comp("frequency_penalty=1, greedy", frequency_penalty=1.0, max_tokens=30)
comp("frequency_penalty=3", frequency_penalty=3)
comp("logit_bias, greedy", use="some", logit_bias={"267": 100})
comp("logit_bias -100", logit_bias={"265": -100})
comp("logit_bias, id out of the vocabulary", logit_bias={"4096": 1})
comp("logit_bias, no id", logit_bias={"the": 1})
comp("logit_bias 500", logit_bias={"267": 500})
comp("seed", values=False, use="some", seed=7, temperature=1)
comp("seed text", seed="7")
comp("stop text", use="much", max_tokens=40, stop=".")
comp("stop list", use="much", max_tokens=40, stop=["Lily", "girl"])
comp("stop kept", max_tokens=40, stop=["Lily"], include_stop_str_in_output=True)
comp("stop across tokens", max_tokens=40, stop=["tle gi"])
comp("stop empty text", stop="")
comp("stop empty list", stop=[])
comp("stop list with empty", stop=[""])
comp("stop of 5 texts", stop=["a1", "b2", "c3", "d4", "e5"])
comp("stop_token_ids", use="some", max_tokens=40, stop_token_ids=[16])
comp("stop_token_ids kept", max_tokens=40, stop_token_ids=[16], include_stop_str_in_output=True)
comp("stop_token_ids out of the vocabulary", stop_token_ids=[99999])
comp("min_tokens with stop id", use="some", max_tokens=60, min_tokens=30, stop_token_ids=[16])
comp("min_tokens with stop text", max_tokens=60, min_tokens=30, stop=["."])
comp("min_tokens > max_tokens", min_tokens=30, max_tokens=5)
comp("ends by itself", use="much", max_tokens=400)
comp("ignore_eos", use="much", max_tokens=180, ignore_eos=True)
comp("skip_special_tokens=false, eos", max_tokens=400, skip_special_tokens=False)
comp("stop_token_ids=eos", max_tokens=400, stop_token_ids=[0])
comp(
    "eos kept by include_stop_str_in_output",
    max_tokens=400,
    skip_special_tokens=False,
    include_stop_str_in_output=True,
)
comp("special token in the prompt, echo + logprobs", prompt="Once <|endoftext|> a", echo=True, logprobs=0)
comp("max_tokens that only fits alone", use="much", max_tokens=510, ignore_eos=True)
comp("spaces_between_special_tokens", use="rare", spaces_between_special_tokens=False)
comp("truncate_prompt_tokens=2", use="some", truncate_prompt_tokens=2)
comp("truncate_prompt_tokens=-1", use="some", truncate_prompt_tokens=-1, prompt=" the" * 600)
comp("truncation_side", use="rare", truncate_prompt_tokens=2, truncation_side="right")
comp("allowed_token_ids", use="some", allowed_token_ids=[16, 265, 267])
comp("bad_words", use="some", bad_words=["Lily", "girl"])
comp("use_beam_search", use="some", use_beam_search=True, n=3, max_tokens=10)
comp("length_penalty alone", use="rare", length_penalty=1.5)
comp("add_special_tokens=false", use="some", add_special_tokens=False)
comp("response_format text", response_format={"type": "text"})
comp("response_format json_object", use="some", response_format={"type": "json_object"}, max_tokens=30)
comp("structured_outputs choice", use="much", structured_outputs={"choice": ["yes", "no"]})
comp("structured_outputs regex", structured_outputs={"regex": "[0-9]{3}"})
comp("structured_outputs json", structured_outputs={"json": SCHEMA}, max_tokens=40)
comp("guided_choice (old name)", guided_choice=["yes", "no"])
comp("priority=1", use="rare", priority=1)
comp("priority=0", use="rare", priority=0)
comp("cache_salt", use="rare", cache_salt="mine")
comp("cache_salt empty", use="rare", cache_salt="")
comp("request_id", use="some", request_id="mine-1")
case(
    "completions: X-Request-Id",
    "/v1/completions",
    {"model": M, "prompt": PROMPT, **GREEDY},
    headers={"X-Request-Id": "mine-2"},
)
comp("return_token_ids", use="some", return_token_ids=True)
comp("return_tokens_as_token_ids", use="some", return_tokens_as_token_ids=True, logprobs=1)
comp("kv_transfer_params", use="rare", kv_transfer_params={"a": 1})
comp("vllm_xargs", use="rare", vllm_xargs={"a": 1})
comp("unknown field", use="some", foo=1)
comp("user", user="me")
comp("prompt_embeds bad", use="rare", prompt_embeds="AAAA")

# ---------------------------------------------------------------- completions: streams
comp("stream", use="much", stream=True)
comp("stream + include_usage", use="much", stream=True, stream_options={"include_usage": True})
comp(
    "stream + continuous_usage_stats",
    use="some",
    stream=True,
    stream_options={"include_usage": True, "continuous_usage_stats": True},
)
comp("stream + logprobs", stream=True, logprobs=2)
comp("stream + echo", stream=True, echo=True)
comp("stream + echo + logprobs", stream=True, echo=True, logprobs=1)
comp("stream + echo + max_tokens=0", use="rare", stream=True, echo=True, max_tokens=0)
comp("stream + n=2", stream=True, n=2)
comp("stream + stop", use="much", stream=True, max_tokens=40, stop=["Lily"])
comp("stream of 2 prompts", stream=True, prompt=[PROMPT, "The little dog"])
comp("stream that ends by itself", stream=True, max_tokens=400)
comp("stream + return_token_ids", stream=True, return_token_ids=True)
comp("stream of an unknown model", stream=True, model="nobody")
comp("stream + stream_interval", use="rare", stream=True, stream_interval=4)
comp("stream_options without stream", stream_options={"include_usage": True})
comp("stream_options empty", stream=True, stream_options={})
comp("stream_options unknown key", stream=True, stream_options={"foo": 1})
comp("stream text", stream="yes")

# ---------------------------------------------------------------- chat
chat("plain", use="much")
chat("max_tokens left out", use="much", drop=["max_tokens"])
chat("max_completion_tokens", use="much", drop=["max_tokens"], max_completion_tokens=7)
chat("both, different", max_tokens=9, max_completion_tokens=7)
chat("model left out", drop=["model"])
chat("unknown model", use="much", model="nobody")
chat("system + user", use="much", messages=[{"role": "system", "content": "You tell stories."}, *ASK])
chat(
    "three turns",
    use="much",
    messages=[
        *ASK,
        {"role": "assistant", "content": "Once there was a dog."},
        {"role": "user", "content": "And then?"},
    ],
)
chat("developer", messages=[{"role": "developer", "content": "You tell stories."}, *ASK])
chat("tool role", messages=[*ASK, {"role": "tool", "content": "sunny", "tool_call_id": "x"}])
chat("unknown role", messages=[{"role": "wizard", "content": "Hi"}])
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
)
chat(
    "content an image",
    messages=[
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
        }
    ],
)
chat("content null", messages=[{"role": "user", "content": None}])
chat("content missing", messages=[{"role": "user"}])
chat("name in a message", messages=[{"role": "user", "name": "Ann", "content": ASK[0]["content"]}])
chat("messages empty", messages=[])
chat("messages text", messages="hi")
chat("messages left out", drop=["messages"])
chat("too long", use="much", messages=[{"role": "user", "content": " the" * 600}])
chat("max_tokens over the length", max_tokens=600)
chat("max_tokens=0", max_tokens=0)
chat("logprobs", use="much", logprobs=True)
chat("logprobs + top_logprobs=3", use="much", logprobs=True, top_logprobs=3)
chat("top_logprobs=0", logprobs=True, top_logprobs=0)
chat("top_logprobs=21", logprobs=True, top_logprobs=21)
chat("top_logprobs without logprobs", top_logprobs=3)
chat("top_logprobs=-1", use="rare", logprobs=True, top_logprobs=-1, max_tokens=1)
chat("prompt_logprobs", use="rare", prompt_logprobs=1)
chat("n=2", n=2)
chat("n=0", n=0)
chat("stop", use="much", stop=["dog"], max_tokens=40)
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
)
chat("ends by itself", use="much", max_tokens=400)
chat("response_format text", response_format={"type": "text"})
chat("response_format json_object", use="much", response_format={"type": "json_object"}, max_tokens=30)
chat(
    "response_format json_schema",
    use="much",
    response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    max_tokens=40,
)
chat("structured_outputs choice", use="some", structured_outputs={"choice": ["yes", "no"]})
chat("tools, auto", use="much", tools=[TOOL])
chat("tools, none", use="some", tools=[TOOL], tool_choice="none")
chat("tools, required", tools=[TOOL], tool_choice="required", max_tokens=60)
chat(
    "tools, named",
    tools=[TOOL],
    tool_choice={"type": "function", "function": {"name": "weather"}},
    max_tokens=40,
)
chat("tools empty", tools=[])
chat("tool_choice none alone", tool_choice="none")
chat("parallel_tool_calls", parallel_tool_calls=True)
chat(
    "store, metadata, service_tier (OpenAI's)",
    use="some",
    store=False,
    metadata={"a": "b"},
    service_tier="auto",
)
chat("reasoning_effort", use="some", reasoning_effort="low")
chat("chat_template_kwargs", use="much", chat_template_kwargs={"enable_thinking": False})
chat("chat_template of one's own", use="rare", chat_template="{{ messages[0]['content'] }}")
chat("add_generation_prompt=false", use="some", add_generation_prompt=False)
chat(
    "continue_final_message",
    use="some",
    add_generation_prompt=False,
    continue_final_message=True,
    messages=[*ASK, {"role": "assistant", "content": "Once upon a"}],
)
chat("echo", use="rare", echo=True)
chat("add_special_tokens", use="rare", add_special_tokens=True)
chat("truncate_prompt_tokens", use="rare", truncate_prompt_tokens=5)
chat("min_tokens, ignore_eos", min_tokens=5, ignore_eos=True)
chat("allowed_token_ids, bad_words", allowed_token_ids=[16, 265, 267], bad_words=["the"])
chat("logit_bias", logit_bias={"267": 100})
chat("return_token_ids", return_token_ids=True)
chat("return_tokens_as_token_ids", return_tokens_as_token_ids=True, logprobs=True)
chat("return_prompt_text", use="rare", return_prompt_text=True)
chat("request_id", request_id="mine-3")
chat("priority=1", use="rare", priority=1)
chat("use_beam_search", use="rare", use_beam_search=True, n=2)
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
)
chat("unknown field", foo=1)
chat("stream", use="much", stream=True)
chat("stream + include_usage", use="much", stream=True, stream_options={"include_usage": True})
chat(
    "stream + continuous_usage_stats",
    stream=True,
    stream_options={"include_usage": True, "continuous_usage_stats": True},
)
chat("stream + logprobs", stream=True, logprobs=True, top_logprobs=2)
chat("stream + n=2", stream=True, n=2)
chat("stream + stop", stream=True, max_tokens=40, stop=["named"])
chat("stream that ends by itself", use="much", stream=True, max_tokens=400)
chat("stream + tools", use="much", stream=True, tools=[TOOL])
chat("stream + return_token_ids", stream=True, return_token_ids=True)
chat("stream, too long", stream=True, messages=[{"role": "user", "content": " the" * 600}])

# ---------------------------------------------------------------- bodies that are none
JSON = {"Content-Type": "application/json"}
case("bad JSON", "/v1/completions", raw="{", headers=JSON, use="some")
case("empty body", "/v1/completions", raw="", headers=JSON)
case("a JSON list", "/v1/completions", raw="[1]", headers=JSON)
case(
    "text/plain",
    "/v1/completions",
    raw=json.dumps({"model": M, "prompt": PROMPT, **GREEDY}),
    headers={"Content-Type": "text/plain"},
)
case(
    "JSON with NaN",
    "/v1/completions",
    raw='{"model":"storyteller","prompt":"a","temperature":NaN}',
    headers=JSON,
    use="rare",
)
case("chat: bad JSON", "/v1/chat/completions", raw="{", headers=JSON)
case(
    "an API key nobody wants",
    "/v1/completions",
    {"model": M, "prompt": PROMPT, **GREEDY},
    headers={"Authorization": "Bearer EMPTY"},
    use="much",
)
