"""Cases: the routes beside completions and chats, and bodies that are none."""

import json

from tests.system.conformance.case import ASK, GREEDY, IDS, PROMPT, Case, M

JSON = {"Content-Type": "application/json"}


def get(name: str, path: str, use: str = "some", values: bool = True) -> Case:
    return Case(name, path, method="GET", values=values, use=use)


ROUTES = [
    get("models", "/v1/models", "much"),
    get("models/storyteller", f"/v1/models/{M}"),
    get("models/unknown", "/v1/models/nobody"),
    get("health", "/health", "much"),
    get("ping", "/ping", "rare"),
    get("version", "/version", values=False),
    get("load", "/load", "rare"),
    get("metrics", "/metrics", "much"),
    get("docs", "/docs", "rare", values=False),
    get("openapi", "/openapi.json", "rare"),
    get("unknown path", "/v1/nothing"),
    get("wrong method", "/v1/completions"),
    Case("tokenize: text", "/tokenize", {"model": M, "prompt": PROMPT}, use="much"),
    Case(
        "tokenize: text, with strings", "/tokenize", {"model": M, "prompt": PROMPT, "return_token_strs": True}
    ),
    Case("tokenize: messages", "/tokenize", {"model": M, "messages": ASK}),
    Case("detokenize", "/detokenize", {"model": M, "tokens": IDS}),
    Case("embeddings of a generating model", "/v1/embeddings", {"model": M, "input": "x"}, use="rare"),
    Case(
        "responses",
        "/v1/responses",
        {"model": M, "input": "Tell me a story", "temperature": 0, "max_output_tokens": 16},
        values=False,
        use="some",
    ),
    Case(
        "messages (Anthropic's)",
        "/v1/messages",
        {"model": M, "messages": ASK, "max_tokens": 8, "temperature": 0},
        values=False,
        use="rare",
    ),
    Case(
        "load adapter, not switched on",
        "/v1/load_lora_adapter",
        {"lora_name": "a", "lora_path": "/nowhere"},
        use="rare",
    ),
]

BODIES = [
    Case("bad JSON", "/v1/completions", raw="{", headers=JSON, use="some"),
    Case("empty body", "/v1/completions", raw="", headers=JSON),
    Case("a JSON list", "/v1/completions", raw="[1]", headers=JSON),
    Case(
        "text/plain",
        "/v1/completions",
        raw=json.dumps({"model": M, "prompt": PROMPT, **GREEDY}),
        headers={"Content-Type": "text/plain"},
    ),
    Case(
        "JSON with NaN",
        "/v1/completions",
        raw='{"model":"storyteller","prompt":"a","temperature":NaN}',
        headers=JSON,
        use="rare",
    ),
    Case("chat: bad JSON", "/v1/chat/completions", raw="{", headers=JSON),
    Case(
        "an API key nobody wants",
        "/v1/completions",
        {"model": M, "prompt": PROMPT, **GREEDY},
        headers={"Authorization": "Bearer EMPTY"},
        use="much",
    ),
]
