"""Many who ask for constraints that take long to compile: one compiles at a time, a bounded number waits,
and nobody else does.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from engine import EngineArgs
from engine.core.engine_thread import MAX_PREPARING, EngineThread
from engine.core.one_at_a_time import OneAtATime
from engine.decoding.chat_template import ChatTemplate
from engine.server.app import create_app
from engine.server.chat import Chat, chat_routes
from engine.server.responses_route import responses_route
from engine.server.tool_flags import chat_extension
from engine.structured.capability import StructuredOutput
from engine.wiring.compose import build_engine
from tests.part04.serving import DEADLINE, http, serve, wait_until

FREE = {"prompt": "Once upon a time", "max_tokens": 3, "temperature": 0}
KNOWN = {"structured_outputs": {"choice": ["yes"]}}
MAX_WAITING = 3


class Gate:
    """Stands before a compiler's work: who comes waits until it is open, and is counted."""

    def __init__(self, compiler, monkeypatch) -> None:
        self.is_open = threading.Event()
        self.num_come = self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        work = compiler._compile_with_guidance

        def waits(params):
            with self.lock:
                self.num_come += 1
                self.at_once += 1
                self.most_at_once = max(self.most_at_once, self.at_once)
            self.is_open.wait(DEADLINE)
            with self.lock:
                self.at_once -= 1
            return work(params)

        monkeypatch.setattr(compiler, "_compile_with_guidance", waits)


@pytest.fixture(scope="module")
def thread():
    thread = EngineThread(build_engine(EngineArgs(model="storyteller-draft", device="cpu")), "m")
    assert thread.preparing.max_waiting == MAX_PREPARING
    thread.preparing = OneAtATime("constraints", MAX_WAITING)
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture(scope="module")
def compiler(thread):
    return next(item.compiler for item in thread.engine.capabilities if isinstance(item, StructuredOutput))


@pytest.fixture(scope="module")
def url(thread):
    engine = thread.engine
    chat = Chat(engine.tokenizer)
    chat.extension = chat_extension(thread, None, False, None)
    parts = (engine.tokenizer, engine.config, ChatTemplate.from_pretrained("storyteller-draft"), chat)
    with serve(create_app(thread, [chat_routes(*parts), responses_route(*parts)])) as url:
        assert answer(url, KNOWN).status_code == 200, "from now on, its constraint is known"
        yield url


@pytest.fixture
def gate(compiler, monkeypatch):
    gate = Gate(compiler, monkeypatch)
    yield gate
    gate.is_open.set()


@pytest.fixture
def crowd():
    with ThreadPoolExecutor(20) as crowd:
        yield crowd


def answer(url: str, fields: dict, path: str = "/v1/completions") -> httpx.Response:
    with http(url) as client:
        return client.post(path, json=FREE | fields if path == "/v1/completions" else fields)


def regex(name: str) -> dict:
    return {"structured_outputs": {"regex": f"{name}."}}


def calling(name: str) -> dict:
    parameters = {"type": "object", "properties": {name: {"enum": [1]}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    messages = [{"role": "user", "content": "Hi"}]
    return {"messages": messages, "tools": tools, "tool_choice": "required", "max_tokens": 3}


def fill(crowd: ThreadPoolExecutor, url: str, thread: EngineThread, name: str) -> list[Future]:
    """The answers of as many as may wait, and of the one that compiles."""
    asked = []
    for i in range(1 + MAX_WAITING):
        asked.append(crowd.submit(answer, url, regex(f"{name}{i}")))
        wait_until(lambda i=i: thread.preparing.num_calls == i + 1)
    return asked


def test_one_constraint_compiles_at_a_time_and_all_are_answered(url, thread, gate, crowd):
    asked = fill(crowd, url, thread, "a")
    asked.append(crowd.submit(answer, url, {}))
    wait_until(lambda: gate.num_come == 1)
    gate.is_open.set()
    assert [got.result().status_code for got in asked] == [200] * len(asked)
    assert gate.num_come == 1 + MAX_WAITING
    assert gate.most_at_once == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_who_finds_too_many_waiting_is_told_to_come_again(url, thread, gate, crowd, path):
    asked = fill(crowd, url, thread, f"b{len(path)}")
    more = {"/v1/completions": regex("x"), "/v1/chat/completions": calling("x")}
    more["/v1/responses"] = {
        "input": "Hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": {"enum": [path]}}},
    }  # fmt: skip
    refused = answer(url, more[path], path)
    assert refused.status_code == 429, refused.text
    assert refused.json()["error"] == {
        "message": "3 constraints wait for their turn already", "type": "rate_limit_error", "param": None,
        "code": "no_room",
    }  # fmt: skip
    assert refused.headers["retry-after"] == "1"
    assert len(asked) == 1 + MAX_WAITING
    gate.is_open.set()
    assert {got.result().status_code for got in asked} == {200}
    assert answer(url, more[path], path).status_code == 200, "later, the same request is accepted"


def test_many_who_ask_for_the_same_constraint_take_one_place(url, thread, gate, crowd):
    asked = [crowd.submit(answer, url, regex("same") | {"seed": i}) for i in range(3 * MAX_WAITING)]
    wait_until(lambda: gate.num_come == 1)
    gate.is_open.set()
    assert {got.result().status_code for got in asked} == {200}
    assert gate.num_come == 1, "it compiles once"


def test_nobody_else_waits(url, thread, gate, crowd):
    asked = fill(crowd, url, thread, "c")
    assert answer(url, {}).status_code == 200, "a request without a constraint"
    assert answer(url, KNOWN).json()["choices"][0]["text"] == "yes", "one whose constraint is known"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert answer(url, chat, "/v1/chat/completions").status_code == 200, "a chat"
    assert not any(got.done() for got in asked), "all the while, the others wait"
    gate.is_open.set()
    assert {got.result().status_code for got in asked} == {200}


def test_a_call_that_is_required_waits_for_its_turn_too(url, thread, gate, crowd):
    asked = [crowd.submit(answer, url, calling(name), "/v1/chat/completions") for name in "uvw"]
    wait_until(lambda: thread.preparing.num_calls == 3)
    wait_until(lambda: gate.num_come == 1)
    gate.is_open.set()
    assert {got.result().status_code for got in asked} == {200}
    assert gate.most_at_once == 1


def test_tools_are_refused_by_words_for_an_engine_without_structured_output(thread, monkeypatch):
    monkeypatch.setattr(thread.engine, "capabilities", [])
    with pytest.raises(ValueError, match="tools need an engine with structured output"):
        chat_extension(thread, None, False, None)
