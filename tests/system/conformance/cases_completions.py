"""Cases: `/v1/completions`, by what a field is for."""

from typing import Any

from tests.system.conformance.case import GREEDY, IDS, PROMPT, SCHEMA, Case, M, variant

BODY = {"model": M, "prompt": PROMPT, **GREEDY}


def completion(name: str, **changes: Any) -> Case:
    """A short greedy request with `changes`, as `variant` takes them."""
    return variant("completions: " + name, "/v1/completions", BODY, **changes)


PLAIN = [
    completion("plain", use="much"),
    completion("max_tokens left out (16)", use="much", drop=("max_tokens",)),
    completion("max_tokens null", max_tokens=None),
    completion("temperature left out", values=False, use="much", drop=("temperature",), seed=1),
    completion("model left out", use="some", drop=("model",)),
    completion("model null", model=None),
    completion("unknown model", use="much", model="nobody"),
    completion(
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
    ),
    completion("n null", n=None),
]

PROMPTS = [
    completion("prompt: token ids", use="much", prompt=IDS),
    completion("prompt: batch of texts", use="much", prompt=[PROMPT, "The little dog"]),
    completion("prompt: batch of ids", prompt=[IDS, [373, 381, 568]]),
    completion("prompt: batch of one", prompt=[PROMPT]),
    completion("prompt: empty text", prompt=""),
    completion("prompt: empty list", prompt=[]),
    completion("prompt: null", prompt=None),
    completion("prompt: left out", drop=("prompt",)),
    completion("prompt: number", prompt=5),
    completion("prompt: id out of the vocabulary", prompt=[4096]),
    completion("prompt: negative id", prompt=[-1]),
    completion("prompt: mixed", prompt=[5, "a"]),
    completion("prompt: longer than the model", use="much", prompt=" the" * 600),
    completion("prompt: exactly the model's length", prompt=[265] * 512),
    completion("prompt + max_tokens over the length", use="much", max_tokens=600),
]

SAMPLES = [
    completion("n=3, greedy", n=3),
    completion("n=2, sampled", values=False, use="some", n=2, temperature=0.8, seed=3),
    completion("n=2 of 2 prompts", n=2, prompt=[PROMPT, "The little dog"]),
    completion("n=0", n=0),
    completion("best_of=1", best_of=1),
    completion("best_of=3", use="rare", best_of=3),
]

ECHO = [
    completion("suffix", suffix="end"),
    completion("suffix empty", suffix=""),
    completion("echo", use="some", echo=True),
    completion("echo of ids", echo=True, prompt=IDS),
    completion("echo + max_tokens=0", use="some", echo=True, max_tokens=0),
    completion("echo + logprobs + max_tokens=0", use="much", echo=True, max_tokens=0, logprobs=1),
    completion("echo + logprobs", use="much", echo=True, logprobs=2),
]

LENGTHS = [
    completion("max_tokens=0", max_tokens=0),
    completion("max_tokens=-1", max_tokens=-1),
    completion("max_tokens text", max_tokens="5"),
    completion("max_tokens 5.0", max_tokens=5.0),
    completion("max_tokens 5.5", max_tokens=5.5),
]

LOGPROBS = [
    completion("logprobs=0", logprobs=0),
    completion("logprobs=1", use="much", logprobs=1),
    completion("logprobs=5", use="much", logprobs=5),
    completion("logprobs=10", use="some", logprobs=10),
    completion("logprobs=20", logprobs=20),
    completion("logprobs=21", logprobs=21),
    completion("logprobs=-1", use="rare", logprobs=-1, max_tokens=1),
    completion("logprobs=true", logprobs=True),
    completion("prompt_logprobs=2", use="some", prompt_logprobs=2),
    completion("prompt_logprobs=0", prompt_logprobs=0),
    completion("prompt_logprobs + stream", prompt_logprobs=1, stream=True),
    completion("logprob_token_ids", use="rare", logprobs=1, logprob_token_ids=[265, 415]),
]

SAMPLING = [
    completion("temperature=3", values=False, temperature=3, seed=1),
    completion("temperature=-1", temperature=-1),
    completion("temperature text", temperature="0"),
    completion("top_p=0", top_p=0),
    completion("top_p=1.1", top_p=1.1),
    completion("top_k=-1", top_k=-1),
    completion("top_k=-2", top_k=-2),
    completion(
        "top_k=5, min_p, sampled",
        values=False,
        use="much",
        temperature=0.8,
        top_k=5,
        min_p=0.05,
        top_p=0.9,
        seed=5,
    ),
    completion("min_p=2", min_p=2),
    completion("repetition_penalty=1.3, greedy", use="some", repetition_penalty=1.3, max_tokens=30),
    completion("repetition_penalty=0", repetition_penalty=0),
    completion("presence_penalty=1, greedy", presence_penalty=1.0, max_tokens=30),
    completion("frequency_penalty=1, greedy", frequency_penalty=1.0, max_tokens=30),
    completion("frequency_penalty=3", frequency_penalty=3),
    completion("logit_bias, greedy", use="some", logit_bias={"267": 100}),
    completion("logit_bias -100", logit_bias={"265": -100}),
    completion("logit_bias, id out of the vocabulary", logit_bias={"4096": 1}),
    completion("logit_bias, no id", logit_bias={"the": 1}),
    completion("logit_bias 500", logit_bias={"267": 500}),
    completion("seed", values=False, use="some", seed=7, temperature=1),
    completion("seed text", seed="7"),
]

STOPS = [
    completion("stop text", use="much", max_tokens=40, stop="."),
    completion("stop list", use="much", max_tokens=40, stop=["Lily", "girl"]),
    completion("stop kept", max_tokens=40, stop=["Lily"], include_stop_str_in_output=True),
    completion("stop across tokens", max_tokens=40, stop=["tle gi"]),
    completion("stop empty text", stop=""),
    completion("stop empty list", stop=[]),
    completion("stop list with empty", stop=[""]),
    completion("stop of 5 texts", stop=["a1", "b2", "c3", "d4", "e5"]),
    completion("stop_token_ids", use="some", max_tokens=40, stop_token_ids=[16]),
    completion("stop_token_ids kept", max_tokens=40, stop_token_ids=[16], include_stop_str_in_output=True),
    completion("stop_token_ids out of the vocabulary", stop_token_ids=[99999]),
    completion("min_tokens with stop id", use="some", max_tokens=60, min_tokens=30, stop_token_ids=[16]),
    completion("min_tokens with stop text", max_tokens=60, min_tokens=30, stop=["."]),
    completion("min_tokens > max_tokens", min_tokens=30, max_tokens=5),
    completion("ends by itself", use="much", max_tokens=400),
    completion("ignore_eos", use="much", max_tokens=180, ignore_eos=True),
    completion("skip_special_tokens=false, eos", max_tokens=400, skip_special_tokens=False),
    completion("stop_token_ids=eos", max_tokens=400, stop_token_ids=[0]),
    completion(
        "eos kept by include_stop_str_in_output",
        max_tokens=400,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    ),
    completion(
        "special token in the prompt, echo + logprobs", prompt="Once <|endoftext|> a", echo=True, logprobs=0
    ),
    completion("max_tokens that only fits alone", use="much", max_tokens=510, ignore_eos=True),
]

TOKENS = [
    completion("spaces_between_special_tokens", use="rare", spaces_between_special_tokens=False),
    completion("truncate_prompt_tokens=2", use="some", truncate_prompt_tokens=2),
    completion("truncate_prompt_tokens=-1", use="some", truncate_prompt_tokens=-1, prompt=" the" * 600),
    completion("truncation_side", use="rare", truncate_prompt_tokens=2, truncation_side="right"),
    completion("allowed_token_ids", use="some", allowed_token_ids=[16, 265, 267]),
    completion("bad_words", use="some", bad_words=["Lily", "girl"]),
    completion("use_beam_search", use="some", use_beam_search=True, n=3, max_tokens=10),
    completion("length_penalty alone", use="rare", length_penalty=1.5),
    completion("add_special_tokens=false", use="some", add_special_tokens=False),
]

CONSTRAINTS = [
    completion("response_format text", response_format={"type": "text"}),
    completion(
        "response_format json_object", use="some", response_format={"type": "json_object"}, max_tokens=30
    ),
    completion("structured_outputs choice", use="much", structured_outputs={"choice": ["yes", "no"]}),
    completion("structured_outputs regex", structured_outputs={"regex": "[0-9]{3}"}),
    completion("structured_outputs json", structured_outputs={"json": SCHEMA}, max_tokens=40),
    completion("guided_choice (old name)", guided_choice=["yes", "no"]),
]

MORE_FIELDS = [
    completion("priority=1", use="rare", priority=1),
    completion("priority=0", use="rare", priority=0),
    completion("cache_salt", use="rare", cache_salt="mine"),
    completion("cache_salt empty", use="rare", cache_salt=""),
    completion("request_id", use="some", request_id="mine-1"),
    Case(
        "completions: X-Request-Id",
        "/v1/completions",
        BODY,
        headers={"X-Request-Id": "mine-2"},
    ),
    completion("return_token_ids", use="some", return_token_ids=True),
    completion("return_tokens_as_token_ids", use="some", return_tokens_as_token_ids=True, logprobs=1),
    completion("kv_transfer_params", use="rare", kv_transfer_params={"a": 1}),
    completion("vllm_xargs", use="rare", vllm_xargs={"a": 1}),
    completion("unknown field", use="some", foo=1),
    completion("user", user="me"),
    completion("prompt_embeds bad", use="rare", prompt_embeds="AAAA"),
]

STREAMS = [
    completion("stream", use="much", stream=True),
    completion("stream + include_usage", use="much", stream=True, stream_options={"include_usage": True}),
    completion(
        "stream + continuous_usage_stats",
        use="some",
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    ),
    completion("stream + logprobs", stream=True, logprobs=2),
    completion("stream + echo", stream=True, echo=True),
    completion("stream + echo + logprobs", stream=True, echo=True, logprobs=1),
    completion("stream + echo + max_tokens=0", use="rare", stream=True, echo=True, max_tokens=0),
    completion("stream + n=2", stream=True, n=2),
    completion("stream + stop", use="much", stream=True, max_tokens=40, stop=["Lily"]),
    completion("stream of 2 prompts", stream=True, prompt=[PROMPT, "The little dog"]),
    completion("stream that ends by itself", stream=True, max_tokens=400),
    completion("stream + return_token_ids", stream=True, return_token_ids=True),
    completion("stream of an unknown model", stream=True, model="nobody"),
    completion("stream + stream_interval", use="rare", stream=True, stream_interval=4),
    completion("stream_options without stream", stream_options={"include_usage": True}),
    completion("stream_options empty", stream=True, stream_options={}),
    completion("stream_options unknown key", stream=True, stream_options={"foo": 1}),
    completion("stream text", stream="yes"),
]

COMPLETIONS = [
    *PLAIN,
    *PROMPTS,
    *SAMPLES,
    *ECHO,
    *LENGTHS,
    *LOGPROBS,
    *SAMPLING,
    *STOPS,
    *TOKENS,
    *CONSTRAINTS,
    *MORE_FIELDS,
    *STREAMS,
]
