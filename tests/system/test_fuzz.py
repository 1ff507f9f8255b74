"""`ruvon serve` under bodies that a fuzzer draws.

Schemathesis makes requests from /openapi.json, right and wrong ones, by thousands. It judges that no answer
is a 500, that none is late, that each has a status, a content type, headers and a body that /openapi.json
describes, and that what the description forbids is refused. Its settings are in fuzz/schemathesis.toml.

What no schema tells is drawn here: numbers of 5,000 digits, half characters, markup and templates in a text,
names that lead out of a folder, JSON that is broken or is none, on every route that takes a POST.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import httpx
import pytest

from engine.demo.server import served

FUZZ = Path(__file__).parent / "fuzz"
DEADLINE = 600.0  # seconds after which it will never end: not a promise about speed


@pytest.mark.timeout(2 * DEADLINE)
def test_nothing_outside_the_published_schema_comes_back(tmp_path):
    log, report = tmp_path / "server.log", tmp_path / "report.json"
    with served(log, "--model", "storyteller-draft", "--max-model-len", "32") as (url, _):
        httpx.get(f"{url}/openapi.json", timeout=DEADLINE)  # made once; schemathesis waits 10 s for it
        run = subprocess.run(
            [
                sys.executable, "-m", "schemathesis.cli", "--config-file", FUZZ / "schemathesis.toml", "run",
                f"{url}/openapi.json", "--no-color", "--report-json-path", report,
                "--exclude-path", "/engine/events",  # a stream without an end
            ],
            cwd=FUZZ, capture_output=True, text=True, timeout=DEADLINE,
        )  # fmt: skip
    print(run.stdout[-4000:])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "Traceback" not in log.read_text()
    cases = json.loads(report.read_text())["test_cases"]
    print(cases)
    assert cases["generated"] > 500, "nearly nothing was tried"


# From here on, values are JSON as it is sent: much of it no program would write.
TEMPLATE = json.dumps(
    "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for i in range(10**9) %}x{% endfor %}"
)
NUMBERS = (
    "-1", "0", "1", "1.5", "-0.0", "1e400", "1e-320", "NaN", "Infinity", "-Infinity", str(2**31), str(2**63),
    str(2**64), "-" + str(2**63), "9" * 4000, "9" * 5000,
)  # fmt: skip
TEXTS = (
    '""', '"a"', '"%s"' % ("x" * 300), '"../../etc/passwd"', '"a\\u0000b"', '"\\ud800"', '"\\ufdd0"',
    '"\\u202e\\u001b[31m"', '"<|user|>"', '"<|endoftext|>"', '"e%s"' % ("\\u0301" * 200), TEMPLATE,
)  # fmt: skip
LISTS = (
    "[]", "[[]]", "[null]", '[""]', '["a","b","c","d","e"]', "[0]", "[4096]", "[-1]", "[1e3]", "[[0]]",
    "[" * 500 + "]" * 500,
)  # fmt: skip
OBJECTS = (
    "{}", '{"a":1}', '{"0":1}', '{"0":-100,"1":100}', '{"-1":1}', '{"9999999999":1}', '{"1_0":1}', '{"٣":1}',
    '{"0":NaN}', '{"0":1e400}', '{"":1}', '{"type":"json_object"}', '{"include_usage":true}',
    '{"a":' * 500 + "1" + "}" * 500,
)  # fmt: skip
ODD = ("null", "true", "false", *NUMBERS, *TEXTS, *LISTS, *OBJECTS)
CONTENTS = (
    "null", "[]", "5", '""', '[{"type":"text","text":"a"}]', json.dumps([{"type": "text"}] * 129),
    '[{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}]', json.dumps("a" * 30_000), *TEXTS,
)  # fmt: skip
MESSAGES = [
    *(f'[{{"role":"user","content":{content}}}]' for content in CONTENTS),
    *(f'[{{"role":{role},"content":"x"}}]' for role in ('"tool"', '"system"', '"assistant"', '{"a":1}')),
    *(
        "[]",
        "[{}]",
        "[[]]",
        '["hi"]',
        '[{"role":"user"}]',
        '[{"role":"user","content":"a","tool_calls":[1]}]',
        '[{"role":"user","content":"a"},{"role":"tool","content":"x","tool_call_id":"c"}]',
        '[{"role":"tool","content":"x","tool_call_id":"%s"}]' % ("c" * 300),
        *(
            '[{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":'
            f'{{"name":"f","arguments":{arguments}}}}}]}}]'
            for arguments in ('"{}"', '"{"', '"[1]"', '""', "{}", '"{\\"a\\":\\"<|user|>\\"}"', TEMPLATE)
        ),
    ),
]
NAMES = tuple(map(json.dumps, (
    "..", ".", "../poetry", "a/../poetry", "poetry/", "/etc", "poetry\0", "", "storyteller", "-a", "poetry@1",
    "a" * 65, "POETRY", "poetry ", "\u200bpoetry", "%2e%2e", "poe\ntry",
)))  # fmt: skip
TOOLS = (
    "null", "[]", '[{"type":"function","function":{"name":"f"}}]',
    *(f'[{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}]' for schema in (
        '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}', '{"type":"array"}', "{}",
        '{"properties":{"a":{"$ref":"#"}}}', '{"$ref":"file:///etc/passwd"}', '{"$ref":"#/nowhere"}',
        '{"type":[]}', '{"properties":{"a":{"pattern":"(a*)*b"}}}', '{"enum":[]}', "[]", '{"not":{}}',
    )),
    '[{"type":"function","name":"f"}]', json.dumps([{"type": "function", "function": {"name": "f"}}] * 2),
)  # fmt: skip
TOOL_CHOICES = (
    '"auto"', '"none"', '"required"', '{"type":"function","function":{"name":"f"}}',
    '{"type":"function","function":{"name":"g"}}', '{"type":"function","name":"f"}',
)  # fmt: skip
RIGHT = {
    "n": ("1", "2", "3"), "temperature": ("0", "1", "2"), "stop": ('"a"', '["a","b"]'), "stream": ("true",),
    "logprobs": ("0", "2", "true"), "top_logprobs": ("0", "3"), "echo": ("true",), "seed": ("1",),
    "logit_bias": ('{"5":3}',), "prompt": ('["a","b"]', "[1,2]", "[[1],[2]]"), "max_tokens": ("0", "1"),
    "prompt_logprobs": ("1",), "tools": TOOLS, "parallel_tool_calls": ("true", "false"),
    "store": ("false",), "metadata": ('{"a":"b"}',),
    "add_generation_prompt": ("false",), "continue_final_message": ("true",), "tool_choice": TOOL_CHOICES,
    "include_reasoning": ("true", "false"),
    "chat_template_kwargs": ('{"enable_thinking":false}', '{"self":1}', '{"loop":[]}', '{"range":0}'),
    "input": [*MESSAGES, '"hi"', '[{"type":"reasoning"}]', '[{"type":[],"role":"user","content":"a"}]'],
    "include": ('["message.output_text.logprobs"]',), "text": ('{"format":{"type":"text"}}',),
    "messages": MESSAGES, "lora_name": NAMES,
    "return_token_ids": ("true",), "request_id": ('"mine"',), "tokens": ("[]", "[5]"),
    "return_token_strs": ("true",),
    "bad_words": ('["a","b c"]', '["the"]'), "allowed_token_ids": ("[5,6]",),
    "truncate_prompt_tokens": ("2", "-1"),
    "response_format": (
        '{"type":"json_object"}', '{"type":"json_schema","json_schema":{"name":"a","schema":{"enum":[1]}}}',
        '{"type":"json_schema","json_schema":{"name":"a","schema":{"$ref":"#"}}}',
    ),
    "structured_outputs": (
        '{"choice":["a","b"]}', '{"regex":"(a|b)*"}', '{"json":{}}', '{"grammar":"start: x"}',
    ),
}  # fmt: skip
SAMPLING = (
    "model", "max_tokens", "temperature", "top_p", "n", "stream", "stream_options", "stop", "seed", "user",
    "presence_penalty", "frequency_penalty", "logit_bias", "top_k", "min_p", "repetition_penalty",
    "min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "priority", "cache_salt", "response_format", "structured_outputs", "use_beam_search", "request_id",
    "spaces_between_special_tokens", "bad_words", "allowed_token_ids", "truncate_prompt_tokens",
    "return_token_ids", "return_tokens_as_token_ids", "zzz", "__proto__", "__class__",
)  # fmt: skip
CHAT = (
    "tools", "tool_choice", "store", "metadata", "chat_template_kwargs", "add_generation_prompt",
    "continue_final_message", "add_special_tokens", "echo", "prompt_logprobs", "chat_template",
    "reasoning_effort", "service_tier", "parallel_tool_calls", "include_reasoning",
)  # fmt: skip
# A route's body that is right, and the fields that are drawn.
ROUTES = {
    "/v1/completions": (
        {"model": '"storyteller"', "prompt": '"a"', "max_tokens": "2"},
        (*SAMPLING, "prompt", "logprobs", "echo", "best_of", "suffix", "prompt_logprobs"),
    ),
    "/v1/chat/completions": (
        {"model": '"storyteller"', "messages": '[{"role":"user","content":"hi"}]', "max_tokens": "2"},
        (*SAMPLING, *CHAT, "messages", "max_completion_tokens", "logprobs", "top_logprobs"),
    ),
    "/v1/responses": (
        {"model": '"storyteller"', "input": '"hi"', "max_output_tokens": "2"},
        (*SAMPLING, *CHAT, "input", "instructions", "max_output_tokens", "top_logprobs", "include", "text",
         "tools", "tool_choice", "parallel_tool_calls",
         "reasoning", "previous_response_id", "background", "truncation"),
    ),
    "/tokenize": (
        {"prompt": '"a"'},
        ("model", "prompt", "messages", "add_special_tokens", "add_generation_prompt", "return_token_strs"),
    ),
    "/detokenize": ({"tokens": "[1,2]"}, ("model", "tokens", "zzz")),
    "/generate": ({"prompt": '"a"', "max_tokens": "2"}, ("prompt", "max_tokens", "temperature", "zzz")),
    "/v1/load_lora_adapter": ({"lora_name": '"poetry"'}, ("lora_name", "lora_path", "load_inplace")),
    "/v1/unload_lora_adapter": ({"lora_name": '"poetry"'}, ("lora_name", "lora_int_id")),
}  # fmt: skip
KINDS = (*["application/json"] * 9, "application/json; charset=utf-16", "text/plain", "application/x-json")
DRAWN = 2000


def drawn(random: Random, path: str) -> bytes:
    """A body for this route: some of its fields are odd; one in twenty is broken."""
    right, names = ROUTES[path]
    fields = dict(right)
    for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
        name = random.choice(names)
        fields[name] = random.choice(RIGHT[name] if name in RIGHT and random.random() < 0.75 else ODD)
    body = ("{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}").encode()
    if random.random() < 0.05:
        place = random.randrange(len(body))
        body = random.choice((body[:place], body + body, body[:place] + b"\xff\x00{" + body[place:]))
    return body


def complaint(answer: httpx.Response) -> str:
    """What is wrong with an answer; "" if nothing is."""
    said = answer.text
    if answer.status_code >= 500 or "engine_error" in said:
        return "the server failed"
    if str(Path(__file__).parents[2]) in said or "Traceback" in said:
        return "it tells of this machine"
    if answer.status_code < 400:
        return ""
    try:
        error = answer.json()["error"]
    except (ValueError, LookupError, TypeError):
        return "the error has no shape"
    if set(error) != {"message", "type", "param", "code"} or len(error["message"]) > 600:
        return "the error has another shape"
    return ""


def test_odd_bodies_are_answered_or_refused_in_one_shape_and_leave_nothing_behind(tmp_path):
    log, random, statuses, wrong = tmp_path / "server.log", Random(22), Counter(), []
    flags = ("--max-model-len", "64", "--enable-lora", "--lora-dir", "adapters")
    with (
        served(log, "--model", "storyteller", *flags) as (url, _),
        httpx.Client(base_url=url, timeout=240) as client,
    ):
        for _ in range(DRAWN):
            path = random.choice((*ROUTES, "/v1/completions", "/v1/chat/completions"))
            body = drawn(random, path)
            answer = client.post(path, content=body, headers={"content-type": random.choice(KINDS)})
            statuses[answer.status_code] += 1
            if why := complaint(answer):
                wrong.append((why, path, answer.status_code, body[:300], answer.text[:300]))
        metrics = client.get("/metrics").text
    left = re.findall(r"^vllm:(?:num_requests_\w+|kv_cache_usage_perc){.*} (.+)$", metrics, re.MULTILINE)
    print(f"{DRAWN} requests: {dict(statuses)}, wrong {len(wrong)}; left behind: {left}")
    assert not wrong, wrong[:3]
    assert "Traceback" not in log.read_text()
    assert left, "the metrics have other names"
    assert set(map(float, left)) == {0.0}, "running, waiting, or held in the cache"
    assert statuses[200] > DRAWN / 30, "nearly nothing was right"
    assert statuses[400] > DRAWN / 2, "nearly nothing was odd"
