"""Adapters as clients meet them: `model` chooses, two routes load and unload, and no path gets through."""

import asyncio
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import openai
import pytest

from engine.core.engine_thread import EngineError
from engine.decoding.chat_template import ChatTemplate
from engine.decoding.params import NotFoundError, SamplingParams
from engine.lora.adapter import read_adapter
from engine.lora.manager import AdapterError
from engine.server.adapters import AdapterEngineThread, adapter_routes, named_folders
from engine.server.app import create_app
from engine.server.chat import Chat, chat_routes
from engine.server.scored import ScoredCompletions
from tests.part04.serving import DEADLINE, http, openai_client, serve, wait_until
from tests.part06.fakes import TOKENIZER, Gate, at_rest
from tests.part18.test_mixed_batches import told_by_peft
from tests.part18.tiny import GREEDY, MAX_RANK, PROMPT, composed, edited

ASK = {"model": "base", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def text(base, adapters):
    """model -> what it says to PROMPT, by PEFT."""
    folders = {"base": None} | adapters
    return {name: TOKENIZER.decode(told_by_peft(base, folder, PROMPT, 8)) for name, folder in folders.items()}


@pytest.fixture
def folder(adapters, tmp_path):
    """The operator's folder, with adapters good and bad, and a secret beside it."""
    root = tmp_path / "adapters"
    for name, source in adapters.items():
        shutil.copytree(source, root / name)
    shutil.copytree(adapters["poetry"], tmp_path / "outside")
    edited(shutil.copytree(adapters["poetry"], root / "huge"), r=10**9)
    cut = shutil.copytree(adapters["poetry"], root / "cut") / "adapter_model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    (root / "empty").mkdir()
    (root / "file").write_text("no folder")
    return root


@pytest.fixture
def serving(base, folder, passed):
    """serving(routes, gate, **composed's options) -> (client, AdapterEngineThread)"""
    with ExitStack() as stack:

        def start(routes: bool = True, gate: bool = False, **options):
            engine, manager = composed(base, **options)
            if gate:
                held = engine.executor.ways[0] = Gate(engine.executor.ways[0])
                stack.callback(held.open)
            backend = stack.enter_context(at_rest(AdapterEngineThread(engine, "base", manager), passed))
            template = ChatTemplate.from_pretrained("storyteller")
            chats, api = Chat(TOKENIZER), ScoredCompletions(TOKENIZER)
            chats.more_options.append(backend.options)
            api.more_options.append(backend.options)
            extensions = [chat_routes(TOKENIZER, engine.config, template, chats)]
            extensions += [adapter_routes(backend, folder)] if routes else []
            app = create_app(backend, extensions, api=api, details_of=backend.details_of)
            url = stack.enter_context(serve(app))
            start.url = url
            return stack.enter_context(http(url)), backend

        yield start


def completed(client, model: str, **more) -> str:
    answer = client.post("/v1/completions", json=ASK | {"model": model} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def loaded(client, name: str, **more) -> None:
    answer = client.post(LOAD, json={"lora_name": name} | more)
    assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")


def refused(answer, status: int, code: str | None = None, *words: str) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code
    for word in words:
        assert word in error["message"], f"the message says {word}"
    return error["message"]


def test_model_chooses_the_adapter_and_the_list_says_whose_it_is(serving, text):
    client, _ = serving()
    loaded(client, "poetry")
    loaded(client, "business")
    assert {name: completed(client, name) for name in ("base", "poetry", "business")} == {
        name: text[name] for name in ("base", "poetry", "business")
    }
    listed = client.get("/v1/models").json()["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [
        ("base", None), ("poetry", "base"), ("business", "base"),
    ]  # fmt: skip
    assert client.get("/v1/models/poetry").json()["parent"] == "base"
    answer = client.post(UNLOAD, json={"lora_name": "poetry"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'poetry' removed successfully.")
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["base", "business"]
    refused(client.post("/v1/completions", json=ASK | {"model": "poetry"}), 404, "model_not_found", "poetry")


def test_openais_client_streams_and_chats_with_an_adapter(serving, text):
    client, _ = serving()
    loaded(client, "business")
    with openai_client(serving.url) as judge:
        options = {"extra_body": {"ignore_eos": True}, "temperature": 0, "max_tokens": 8}
        pieces = judge.completions.create(model="business", prompt=PROMPT, stream=True, **options)
        assert "".join(piece.choices[0].text for piece in pieces) == text["business"]
        said = {
            model: judge.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "hi"}], temperature=0, max_tokens=6
            ).choices[0].message.content
            for model in ("base", "business")
        }  # fmt: skip
        assert said["base"] != said["business"], "a chat has the adapter, too"
        with pytest.raises(openai.NotFoundError):
            judge.chat.completions.create(model="poetry", messages=[{"role": "user", "content": "hi"}])


def test_without_a_folder_the_routes_are_not_there(serving):
    client, _ = serving(routes=False)
    for route in (LOAD, UNLOAD):
        assert client.post(route, json={"lora_name": "poetry"}).status_code == 404


HOSTILE_NAMES = [
    "..", ".", "../outside", "poetry/../../outside", "/etc", "a/b", "a\\b", "", " ", "poetry ", "poetry\n",
    "~", "%2e%2e", "..%2foutside", "poetry\x00", "-rf", ".hidden", "ä", "x" * 65, "C:", "file:///etc",
]  # fmt: skip


def test_a_name_is_a_name_and_never_a_path(serving, folder):
    client, backend = serving()
    for name in HOSTILE_NAMES:
        refused(client.post(LOAD, json={"lora_name": name}), 400, None, "lora_name=", "are accepted")
    refused(client.post(LOAD, json={"lora_name": "x" * 10**5}), 400)
    for path in ("poetry", str(folder / "poetry"), "../outside", ""):
        answer = client.post(LOAD, json={"lora_name": "poetry", "lora_path": path})
        refused(answer, 400, None, "lora_path=", "adapters are found by lora_name alone")
        assert answer.json()["error"]["param"] == "lora_path"
    assert backend.models() == ["base"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "lora_name is required"),
        ({"lora_name": None}, "lora_name=None"),
        ({"lora_name": 3}, "lora_name=3"),
        ({"lora_name": ["poetry"]}, "lora_name="),
        ({"lora_name": "poetry", "load_inplace": "yes"}, "load_inplace='yes'"),
        ({"lora_name": "poetry", "lora_int_id": 1}, "lora_int_id is not a field"),
        ([], "body"),
    ],
)
def test_bodies_of_another_shape_are_refused_by_name(serving, body, words):
    client, backend = serving()
    answer = client.post(LOAD, json=body)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert client.post(LOAD, content=b"{").status_code == 400
    assert backend.models() == ["base"]


def test_files_that_cannot_be_loaded_are_refused_without_this_machines_paths(serving, folder):
    client, backend = serving()
    for name, code, words in [
        ("nothing", "adapter_not_found", "the server's folder has no adapter 'nothing'"),
        ("file", "adapter_not_found", "has no adapter 'file'"),
        ("empty", "bad_adapter", "empty/adapter_config.json: no such file"),
        ("huge", "bad_adapter", f"r=1000000000: at most max_lora_rank={MAX_RANK} is accepted"),
        ("cut", "bad_adapter", "cut/adapter_model.safetensors: truncated or not a safetensors file"),
        ("base", None, "that is the base model"),
    ]:
        (folder / "base").mkdir(exist_ok=True)
        status = 404 if code == "adapter_not_found" else 400
        said = refused(client.post(LOAD, json={"lora_name": name}), status, code, words)
        assert str(folder.parent) not in said, "where files lie is not the client's business"
    assert backend.models() == ["base"]
    loaded(client, "poetry")  # and the server goes on


def test_a_taken_name_and_one_that_is_not_there_are_refused_with_a_code(serving):
    client, _ = serving(max_loras=1)
    loaded(client, "poetry")
    refused(client.post(LOAD, json={"lora_name": "poetry"}), 400, "already_loaded", "is loaded already")
    loaded(client, "poetry", load_inplace=True)
    refused(
        client.post(UNLOAD, json={"lora_name": "business"}), 404, "not_loaded", "'business' is not loaded"
    )
    refused(client.post(UNLOAD, json={"lora_name": "../x"}), 404, "not_loaded")


def test_more_adapters_than_slots_are_served_to_all_who_ask_at_once(serving, text):
    client, backend = serving(max_loras=1)
    names = ["poetry", "business", "stable"]
    for name in names:
        loaded(client, name)
    with ThreadPoolExecutor(6) as pool:
        asked = [name for _ in range(10) for name in names]
        told = list(pool.map(lambda name: completed(client, name), asked))
    assert told == [text[name] for name in asked]
    assert list(backend.manager.slots.slot_of.values()) == [0]


def test_a_stream_keeps_its_adapter_while_it_is_unloaded_and_another_takes_its_name(serving, text, folder):
    client, backend = serving(gate=True, max_loras=1)
    gate = backend.engine.executor.ways[0]
    gate.allow(1)
    loaded(client, "poetry")
    with client.stream("POST", "/v1/completions", json=ASK | {"model": "poetry", "stream": True}) as answer:
        lines = answer.iter_lines()
        pieces = [next(lines)]  # it runs
        gate.open()
        assert client.post(UNLOAD, json={"lora_name": "poetry"}).status_code == 200
        shutil.rmtree(folder / "poetry")
        shutil.copytree(folder / "business", folder / "poetry")
        pieces += [line for line in lines if line]
    chunks = [json.loads(p.removeprefix("data: ")) for p in pieces if p != "data: [DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text["poetry"]
    loaded(client, "poetry")
    assert completed(client, "poetry") == text["business"], "the name stands for what it was given last"


def test_a_request_has_the_adapter_that_its_name_stands_for_when_it_is_queued(base, adapters, text):
    """Not what it stood for when the request was checked; and no key of the engine's is in any message."""
    engine, manager = composed(base, max_loras=1)
    backend = AdapterEngineThread(engine, "base", manager)

    async def run():
        async with backend:
            await backend.load_adapter("style", adapters["poetry"])
            first, second = [await backend.generate(PROMPT, GREEDY, i, adapter="style") for i in "ab"]
            await backend.load_adapter("style", adapters["business"], load_inplace=True)
            *_, last = [output async for output in first]
            assert last.outputs[0].text == text["business"]
            await backend.unload_adapter("style")
            with pytest.raises(NotFoundError, match=r"^adapter 'style' is not loaded$"):
                await anext(second)
        with pytest.raises(EngineError, match="not running"):
            await backend.unload_adapter("style")

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


@pytest.mark.parametrize("stream", [False, True])
def test_a_name_that_is_unloaded_while_its_request_is_checked_is_a_404(serving, stream, monkeypatch):
    """By its public name, as for a model that was never there."""
    client, backend = serving()
    loaded(client, "poetry")
    generate = backend.generate

    async def slowly(*asked, **options):
        made = await generate(*asked, **options)
        await backend.unload_adapter("poetry")
        return made

    monkeypatch.setattr(backend, "generate", slowly)
    answer = client.post("/v1/completions", json=ASK | {"model": "poetry", "stream": stream})
    if stream:
        error = json.loads(answer.text.removeprefix("data: ").split("\n")[0])["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["message"] == "adapter 'poetry' is not loaded"
    else:
        refused(answer, 404, "model_not_found", "adapter 'poetry' is not loaded")


def test_what_is_done_between_steps_may_fail_and_nobody_notices(base):
    engine, manager = composed(base)
    backend = AdapterEngineThread(engine, "base", manager)

    async def run():
        async with backend:
            stream = await backend.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True), "a")
            with pytest.raises(ZeroDivisionError):
                await backend.between_steps(lambda: 1 / 0)
            assert await backend.between_steps(lambda: "done") == "done"
            assert [output async for output in stream][-1].finished

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_files_are_read_outside_the_event_loop_and_copied_by_the_engines_thread(base, adapters, monkeypatch):
    """Neither stops anybody's stream: a step waits for the copy alone."""
    engine, manager = composed(base)
    backend, threads = AdapterEngineThread(engine, "base", manager), {}

    def read(*arguments):
        threads["read"] = threading.current_thread()
        return read_adapter(*arguments)

    monkeypatch.setattr("engine.server.adapters.read_adapter", read)
    write = manager.slots.write
    monkeypatch.setattr(
        manager.slots, "write", lambda *a: threads.update(write=threading.current_thread()) or write(*a)
    )

    async def run():
        async with backend:
            await backend.load_adapter("poetry", adapters["poetry"])
            assert threads["read"] is not threading.current_thread()
            assert "write" not in threads, "nobody has asked for it yet"
            await anext(await backend.generate(PROMPT, GREEDY, "a", adapter="poetry"))
            assert threads["write"] is backend._thread

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


def test_files_of_one_adapter_at_a_time_and_none_under_a_name_that_is_a_path(base, adapters, monkeypatch):
    """Many that are loaded at once do not hold all their files in memory."""
    engine, manager = composed(base)
    backend, reading, most = AdapterEngineThread(engine, "base", manager), [], []

    def read(folder, *arguments):
        reading.append(folder)
        most.append(len(reading))
        found = read_adapter(folder, *arguments)
        reading.remove(folder)
        return found

    monkeypatch.setattr("engine.server.adapters.read_adapter", read)
    for name in ("a/b", "a b", "base"):
        with pytest.raises(ValueError, match="lora_name="):
            backend.read(name, adapters["poetry"])

    async def run():
        async with backend:
            async with backend._read_lock:
                names = "poetry", "business"
                asked = [asyncio.create_task(backend.load_adapter(name, adapters[name])) for name in names]
                await asyncio.wait(asked, timeout=0.2)
                assert not most, "somebody else's files are read just now"
            await asyncio.gather(*asked)
        assert most == [1, 1]
        assert sorted(manager.key_of) == ["business", "poetry"]

    asyncio.run(asyncio.wait_for(run(), DEADLINE))


@pytest.mark.parametrize("modules", [["poetry"], ["=x"], ["poetry="], ["a=x", "a=y"]])
def test_modules_are_names_and_folders(modules):
    with pytest.raises(ValueError, match="name=folder is accepted"):
        named_folders(modules)
    assert [str(folder) for folder in named_folders(["a=x", "b=y=z"]).values()] == ["x", "y=z"]


def test_more_loads_at_once_than_are_taken_on_are_told_to_come_again(serving, monkeypatch):
    """One adapter is read at a time: a thousand loads would hold every place that requests may have."""
    monkeypatch.setattr("engine.server.adapters.MAX_LOADS", 2)
    reading, go_on = threading.Event(), threading.Event()

    def slowly(*arguments):
        reading.set()
        assert go_on.wait(DEADLINE)
        return read_adapter(*arguments)

    monkeypatch.setattr("engine.server.adapters.read_adapter", slowly)
    client, backend = serving(max_loras=3)
    with ThreadPoolExecutor(2) as pool:
        try:
            first = pool.submit(loaded, client, "poetry")
            assert reading.wait(DEADLINE)
            second = pool.submit(loaded, client, "business")
            wait_until(lambda: backend._num_loads == 2)
            answer = client.post(LOAD, json={"lora_name": "stable"})
            refused(answer, 429, "too_many_loads", "2 adapters are being loaded already")
            assert answer.headers["Retry-After"] == "1"
        finally:
            go_on.set()
        first.result(DEADLINE), second.result(DEADLINE)
    loaded(client, "stable")  # and there is room again


def test_an_engine_that_has_ended_loads_nothing_and_says_so(serving):
    client, backend = serving()
    loaded(client, "poetry")
    backend.stop()
    for route in (LOAD, UNLOAD):
        refused(client.post(route, json={"lora_name": "poetry"}), 503, "engine_down", "has ended")


def test_an_engine_that_ends_meanwhile_is_no_failure_of_ours(serving, monkeypatch):
    client, backend = serving()
    backend.stop()
    monkeypatch.setattr(backend, "health", lambda: True)  # it was, when somebody looked
    for route in (LOAD, UNLOAD):
        refused(client.post(route, json={"lora_name": "poetry"}), 503, "engine_down", "not running")


def test_a_loaded_adapter_is_replaced_only_where_that_is_asked_for(base, adapters):
    engine, manager = composed(base, max_loras=1)
    backend = AdapterEngineThread(engine, "base", manager)

    async def run():
        async with backend:
            await backend.load_adapter("style", adapters["poetry"])
            with pytest.raises(AdapterError, match="style"):
                await backend.load_adapter("style", adapters["business"])

    asyncio.run(asyncio.wait_for(run(), DEADLINE))
