"""Adapters are loaded, unloaded and swapped in place by many at once, while many ask. Nobody is lost.

All of `ruvon serve` in this process, so that what is left afterwards can be counted; its clients are threads.
"""

import gc
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx
import pytest

from engine import EngineArgs
from engine.cli.serve_flags import ServeFlags
from engine.cli.serving import Service
from engine.lora.adapter import Adapter
from engine.server.deadline import HEADER
from tests.part04.serving import http, serve
from tests.part06.fakes import Gate
from tests.system.attack import wait_until

ADAPTERS = Path(__file__).parents[2] / "adapters"
NAMES = ("poetry", "business")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
KEY = re.compile(r"@\d")  # the engine's own name of an adapter: nobody's business outside
SWAPPED_ASKS = 208  # as many as the attack that lost 25 of them
ASKERS, ADMINS, ASKS, CHANGES = 20, 20, 10, 10  # each asker's asks, each admin's changes


@dataclass
class Server:
    """A server with two slots, or one, and the folder of adapters that its clients may load."""

    service: Service
    client: httpx.Client
    folder: Path
    before: list[Adapter]  # other tests' that were in memory

    def ask(self, model: str, words: str = "Dear", timeout: float = 240) -> httpx.Response:
        """Eight tokens, greedily. `timeout`: seconds that the request gives itself."""
        body = {"model": model, "prompt": words, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        return self.client.post("/v1/completions", json=body, headers={HEADER: str(timeout)})

    def text(self, model: str, *asked) -> str:
        answer = self.ask(model, *asked)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def change(self, kind: str, name: str) -> httpx.Response:
        body = {"lora_name": name} | ({"load_inplace": True} if kind == "in place" else {})
        return self.client.post(UNLOAD if kind == "unload" else LOAD, json=body)

    def assert_nothing_is_left(self) -> None:
        """Neither a request, nor an adapter that has no name."""
        engine, manager = self.service.engine, self.service.engine.adapters
        wait_until(lambda: not engine.has_unfinished_requests())
        assert engine.scheduler.waiting == engine.scheduler.running == []
        assert engine.scheduler.cache.usage().num_sequences == 0
        assert self.service.backend.capacity.sequences == self.service.backend.capacity.tokens == 0
        assert self.service.engine_thread._num_loads == 0
        for name in NAMES:
            if name in manager.key_of:
                assert self.change("unload", name).status_code == 200
        assert manager.slots.adapters == manager.slots.slot_of == {}
        others = set(map(id, self.before))
        # A thread that has just answered may still hold what it worked on.
        wait_until(lambda: all(id(adapter) in others for adapter in in_memory()))


def in_memory() -> list[Adapter]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is Adapter]


@pytest.fixture(params=[1, 2], ids=["one slot", "two slots"])
def server(request, tmp_path) -> Iterator[Server]:
    before = in_memory()
    for name in NAMES:
        shutil.copytree(ADAPTERS / name, tmp_path / name)
    args = EngineArgs(
        model="storyteller", enable_lora=True, max_loras=request.param, kv_cache_memory_bytes=100_000_000
    )
    service = Service(args, ServeFlags(lora_dir=tmp_path))
    with serve(service.app([], None, False, None)) as url, http(url) as client:
        yield Server(service, client, tmp_path, before)


def all_at_once(*jobs: Callable[[], None]) -> None:
    """Each in a thread of its own. Raises what one raises."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result()


def code(answer: httpx.Response) -> str | None:
    assert not KEY.search(answer.text), answer.text
    return None if answer.status_code == 200 else answer.json()["error"]["code"]


@pytest.mark.parametrize("server", [1], indirect=True)
def test_one_whose_time_is_over_while_it_waits_for_a_slot_leaves_nothing_behind(server):
    """The only slot's request stands still meanwhile."""
    engine = server.service.engine
    assert [server.change("load", name).status_code for name in NAMES] == [200, 200]
    gate = Gate(engine.executor.ways[-1], permits=1)
    engine.executor.ways.insert(0, gate)
    with ThreadPoolExecutor(2) as pool:
        try:
            runs = pool.submit(server.text, "poetry")
            wait_until(lambda: gate.entered == 2)
            waits = pool.submit(server.ask, "business", timeout=20)
            wait_until(lambda: not server.service.engine_thread._commands.empty())
            gate.allow(1)
            wait_until(lambda: [request.adapter for request in engine.scheduler.waiting] == ["business@2"])
            answer = waits.result()
            assert (answer.status_code, code(answer)) == (503, "queue_timeout")
        finally:
            gate.open()
        engine.executor.ways.remove(gate)
        assert runs.result() == server.text("poetry")
    server.assert_nothing_is_left()


def test_no_request_is_lost_while_one_name_is_swapped_in_place(server):
    """One admin gives `poetry` the one adapter and the other by turns, four times in a row, and again once
    twelve more have been answered; eight clients ask for it.

    A request gets the adapter that the name stood for at some moment while it was under way: what a swap
    that was answered before it began has brought, or a later one's.
    """
    shutil.copytree(server.folder / "poetry", server.folder / "0")
    shutil.copytree(server.folder / "business", server.folder / "1")
    assert server.change("load", "poetry").status_code == 200
    assert server.change("load", "business").status_code == 200
    words = "Once upon a time there was " * 12 + "Dear"
    texts = [server.text(name, words) for name in NAMES]
    assert texts[0] != texts[1]
    begun = answered = 0  # swaps: version v of the name is texts[v % 2]
    done, count = threading.Event(), Counter()

    def admin() -> None:
        nonlocal begun, answered
        while not done.is_set():
            shutil.rmtree(server.folder / "poetry")
            shutil.copytree(server.folder / str((begun + 1) % 2), server.folder / "poetry")
            begun += 1
            assert server.change("in place", "poetry").status_code == 200
            answered += 1
            if answered % 4 == 0:
                wait_until(lambda until=count[200, None] + 12: count[200, None] >= until or done.is_set())

    def asker() -> None:
        for _ in range(SWAPPED_ASKS // 8):
            first = answered
            answer = server.ask("poetry", words)
            versions = range(first, begun + 1)
            count[answer.status_code, code(answer)] += 1
            if answer.status_code == 200:
                said = answer.json()["choices"][0]["text"]
                count["wrong"] += said not in {texts[version % 2] for version in versions}
                count["certain"] += len(versions) == 1

    def askers() -> None:
        try:
            all_at_once(*[asker] * 8)
        finally:
            done.set()

    all_at_once(admin, askers)
    print(dict(count), f"{answered} swaps")
    assert count[200, None] == SWAPPED_ASKS, "requests are lost"
    assert count["wrong"] == 0
    assert count["certain"] > 0, "some asked between two swaps"
    assert answered > 10
    server.assert_nothing_is_left()


def test_twenty_who_load_and_unload_and_twenty_who_ask(server):
    """Whoever asks gets the text of the model asked for, or is told that it is not there; nothing else."""
    assert [server.change("load", name).status_code for name in NAMES] == [200, 200]
    want = {name: server.text(name) for name in ("storyteller", *NAMES)}
    assert len(set(want.values())) == 3
    count, wrong = Counter(), []

    def admin(seed: int) -> None:
        random = Random(seed)
        for _ in range(CHANGES):
            kind = random.choice(["load", "unload", "in place"])
            answer = server.change(kind, random.choice(NAMES))
            count[kind, answer.status_code, code(answer)] += 1

    def asker(seed: int) -> None:
        random = Random(seed)
        for _ in range(ASKS):
            model = random.choice(list(want))
            answer = server.ask(model)
            count["ask", answer.status_code, code(answer)] += 1
            if answer.status_code == 200 and answer.json()["choices"][0]["text"] != want[model]:
                wrong.append(model)

    all_at_once(
        *(lambda seed=seed: admin(seed) for seed in range(ADMINS)),
        *(lambda seed=seed: asker(seed) for seed in range(ASKERS)),
    )
    print(dict(count))
    assert wrong == []
    assert sum(n for (kind, *_), n in count.items() if kind == "ask") == ASKERS * ASKS
    assert {(kind, *rest) for kind, *rest in count} <= {
        ("ask", 200, None), ("ask", 404, "model_not_found"),
        ("load", 200, None), ("load", 400, "already_loaded"), ("load", 429, "too_many_loads"),
        ("in place", 200, None), ("in place", 429, "too_many_loads"),
        ("unload", 200, None), ("unload", 404, "not_loaded"),
    }  # fmt: skip
    assert count["ask", 200, None] > 0
    server.assert_nothing_is_left()
