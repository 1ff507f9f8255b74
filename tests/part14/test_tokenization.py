"""POST /tokenize and /detokenize: what a client asks before it sends a prompt."""

import asyncio
import json

import pytest

from engine.decoding.chat_template import ChatTemplate
from engine.server.app import create_app
from engine.server.limits import LARGE_BODY_BYTES, MAX_BODY_BYTES
from engine.server.tokenization import tokenization_routes
from engine.text.tokenizer import AddedToken, Tokenizer
from engine.text.tokenizer_files import Affixes
from engine.text.vocabulary import byte_alphabet
from tests.part04.serving import ScriptedBackend, client_of, http
from tests.part06.fakes import CONFIG, EOS, TOKENIZER

TEMPLATE = ChatTemplate.from_pretrained("storyteller")
QUESTION = [{"role": "user", "content": "Tell me about the dog."}]


@pytest.fixture
def client(serving):
    with http(serving(api_key="k")) as client:
        client.headers["authorization"] = "Bearer k"
        yield client


def test_a_text_becomes_its_ids_and_the_ids_the_text(client):
    answer = client.post("/tokenize", json={"prompt": "A dög<end>"}).json()
    ids = TOKENIZER.encode("A dög<end>")
    assert answer == {
        "count": len(ids),
        "max_model_len": CONFIG.max_positions,
        "tokens": ids,
        "token_strs": None,
    }
    assert client.post("/detokenize", json={"model": "m", "tokens": ids}).json() == {"prompt": "A dög<end>"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_token_strings_are_the_vocabularys(client):
    answer = client.post("/tokenize", json={"prompt": "A ö<end>", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["A", "Ġ", "Ã", "¶", "<end>"]


@pytest.mark.parametrize(("fields", "begins"), [({}, True), ({"add_generation_prompt": False}, False)])
def test_a_conversation_becomes_the_ids_that_a_chat_sends(client, fields, begins):
    answer = client.post("/tokenize", json={"messages": QUESTION, **fields}).json()
    assert answer["tokens"] == TOKENIZER.encode(TEMPLATE.render(QUESTION, begins))


@pytest.mark.parametrize("field", ["prompt", "messages"])
def test_a_text_may_be_longer_than_the_model_sees(client, field):
    text = "x" * 5 * CONFIG.max_positions
    value = text if field == "prompt" else [{"role": "user", "content": text}]
    assert client.post("/tokenize", json={field: value}).json()["count"] >= len(text)


@pytest.mark.parametrize(("fields", "ids"), [({}, [EOS, 97]), ({"add_special_tokens": False}, [97])])
def test_special_tokens_around_a_text_may_be_left_out(fields, ids):
    vocab = {char: byte for byte, char in byte_alphabet().items()}
    around = Tokenizer(vocab, [], [AddedToken(EOS, "<end>")], affixes=Affixes([EOS], ()))
    routes = tokenization_routes(around, CONFIG, None)
    with client_of(ScriptedBackend(), extensions=[routes]) as client:
        assert client.post("/tokenize", json={"prompt": "a", **fields}).json()["tokens"] == ids


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": QUESTION}, 400, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, 400, "add_generation_prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": "yes"}, 400, "return_token_strs"),
        ("/tokenize", {"messages": QUESTION, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "a"}]}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "tools": []}, 400, "tools"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [EOS + 1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens"),
        ("/detokenize", {"tokens": [0], "model": "gpt-9"}, 404, "model"),
    ],
)
def test_what_is_wrong_is_refused_by_name(client, path, body, status, param):
    content = json.dumps(body)  # httpx could not write half a character
    answer = client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_the_routes_are_behind_the_same_gates(client, path):
    assert client.post(path, json={}, headers={"authorization": "none"}).status_code == 401
    assert client.post(path, content=b"x" * 2_000_000).status_code == 413


def test_without_a_template_only_texts_have_tokens():
    routes = tokenization_routes(TOKENIZER, CONFIG, None)
    with client_of(ScriptedBackend(), extensions=[routes]) as client:
        assert client.post("/tokenize", json={"prompt": "a"}).json()["tokens"] == TOKENIZER.encode("a")
        answer = client.post("/tokenize", json={"messages": QUESTION})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


def test_a_server_that_is_down_has_no_tokens():
    backend = ScriptedBackend()
    with client_of(backend, extensions=[tokenization_routes(TOKENIZER, CONFIG, None)]) as client:
        backend.healthy = False
        assert client.post("/tokenize", json={"prompt": "a"}).json()["error"]["code"] == "engine_down"


class Counting(Tokenizer):
    """A tokenizer that notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__({char: byte for byte, char in byte_alphabet().items()}, [])
        self.asked: list[int] = []  # lengths of texts

    def encode(self, text: str, add_special_tokens: bool = True, guard: str = "") -> list[int]:
        self.asked.append(len(text))
        return super().encode(text, add_special_tokens, guard)


@pytest.mark.parametrize("length", [1, 2 * LARGE_BODY_BYTES], ids=["short", "long"])
@pytest.mark.parametrize("has_left", [False, True], ids=["still here", "has left"])
def test_the_text_of_a_client_that_has_left_is_not_tokenized(length, has_left):
    tokenizer, sent = Counting(), []
    body = json.dumps({"prompt": "x" * length}).encode()
    app = create_app(ScriptedBackend(), [tokenization_routes(tokenizer, CONFIG, None)])
    came = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict:
        if (message := next(came, None)) is None and not has_left:
            await asyncio.Event().wait()  # nothing more comes
        return message or {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "headers": headers}
    asyncio.run(app(scope, receive, send))
    assert tokenizer.asked == ([] if has_left else [length]), "nobody waits for its tokens any more"
    assert sent[0]["status"] == (499 if has_left else 200)


def test_a_template_may_write_more_than_a_body_holds():
    """The tokens that the template itself writes count, too, and nothing bounds their number here."""
    template = ChatTemplate("{% for _ in range(2) %}" + "x" * 600_000 + "{% endfor %}")
    routes = tokenization_routes(TOKENIZER, CONFIG, template)
    with client_of(ScriptedBackend(), extensions=[routes]) as client:
        answer = client.post("/tokenize", json={"messages": QUESTION})
    assert answer.json()["count"] == 1_200_000 > MAX_BODY_BYTES
