"""/metrics and /dashboard, over HTTP."""

import asyncio
import re
import threading
from pathlib import Path

import pytest
import yaml

from engine.core.engine_thread import EngineThread
from engine.scheduling.continuous import ContinuousScheduler
from engine.server.app import create_app
from engine.server.telemetry_routes import FILES, OPEN_PATHS, PAGES, SharedAnswer, telemetry_routes
from engine.telemetry import history
from tests.part04.serving import DEADLINE, http, serve


@pytest.fixture
def server(measured):
    """server(**settings of create_app) -> a client of a server over the fake model."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def start(**settings):
            engine, metrics, _ = measured(lambda cache: ContinuousScheduler(cache, 4, 16))
            app = create_app(
                EngineThread(engine, "fake"), [telemetry_routes(metrics)], open_paths=OPEN_PATHS, **settings
            )
            return stack.enter_context(http(stack.enter_context(serve(app))))

        yield start


def ask(client, **headers) -> None:
    body = {"model": "fake", "prompt": "hello", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    assert client.post("/v1/completions", json=body, headers=headers).status_code == 200


def test_metrics_are_text_that_counts_what_was_served(server):
    client = server()
    ask(client)
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'vllm:generation_tokens_total{engine="0",model_name="fake"} 5.0' in answer.text
    assert (
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="fake"} 1.0' in answer.text
    )


def test_names_are_the_same_for_every_reader(server):
    client = server()
    for accept in ("application/openmetrics-text; version=1.0.0", "text/plain; version=1.0.0", "*/*"):
        answer = client.get("/metrics", headers={"accept": accept})
        assert "\nvllm:generation_tokens_total{" in answer.text, f"asked for {accept}"
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_the_dashboards_data_tells_of_what_was_served(server):
    client = server()
    ask(client)
    answer = client.get("/dashboard/data")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json()["totals"]["vllm:generation_tokens"] == 5
    assert answer.json()["ended"]["length"] == 1
    assert "hello" not in answer.text


def test_they_are_open_when_a_key_is_set_and_nothing_else_is(server):
    client = server(api_key="secret")
    ask(client, Authorization="Bearer secret")
    for path in OPEN_PATHS:
        assert client.get(path).status_code == 200, path
    assert client.get("/v1/models").status_code == 401
    assert client.get("/dashboard/../v1/models").status_code == 401
    assert client.get("/metrics/").status_code in (401, 404)


def test_who_asks_for_the_head_of_a_page_gets_no_more(server):
    client = server()
    for path in OPEN_PATHS:
        get, head = client.get(path), client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
        assert int(head.headers["content-length"]) > 0


def test_whoever_asks_under_another_name_is_turned_away(server):
    client = server(allowed_hosts=["127.0.0.1"])
    for path in OPEN_PATHS:
        assert client.get(path).status_code == 200
        assert client.get(path, headers={"host": "evil.example"}).status_code == 400


def test_the_page_may_talk_to_its_own_server_alone(server):
    client = server()
    for path in FILES:
        answer = client.get(path)
        policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"
    kinds = {path: client.get(path).headers["content-type"].split(";")[0] for path in FILES}
    assert kinds["/dashboard"] == "text/html"
    assert kinds["/dashboard/dashboard.css"] == "text/css"
    assert kinds["/dashboard/dashboard.js"] in ("text/javascript", "application/javascript")


def test_the_page_asks_no_other_host_and_carries_no_inline_code():
    for file in FILES.values():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.", text), f"{file.name} names another host"
    page = (PAGES / "dashboard.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|<style|\sstyle=", page)


def test_the_board_and_the_configuration_name_only_what_there_is(server):
    import json

    folder = Path(history.__file__).parent
    client = server()
    ask(client)
    there = set(re.findall(r"^([a-z0-9_]+(?::[a-z0-9_]+)?)", client.get("/metrics").text, re.MULTILINE))
    panels = json.loads((folder / "grafana.json").read_text())["panels"]
    used = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"\b(?:vllm|ruvon):\w+|\bprocess_\w+", target["expr"])
    }
    assert len(panels) == 13
    gpu = {name for name in used if "gpu" in name}  # there only where a GPU is in use
    assert gpu == {"ruvon:gpu_memory_used_bytes"}
    assert used - gpu <= there
    (job,) = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
    assert "metrics_path" not in job  # /metrics is Prometheus' own default


class Making:
    """`make` of a SharedAnswer, which waits in each call until it may go on."""

    def __init__(self):
        self.made, self.at_once, self.most_at_once = [], 0, 0
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def __call__(self) -> bytes:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.made.append(len(self.made))
        content = b"%d" % self.made[-1]
        self.begun.set()
        assert self.goes_on.wait(DEADLINE)
        self.at_once -= 1
        return content

    async def first_call(self, shared: SharedAnswer) -> asyncio.Task:
        """Who has asked first, once its call has begun."""
        asked = asyncio.create_task(shared.answer())
        assert await asyncio.to_thread(self.begun.wait, DEADLINE)
        return asked


def test_who_asks_at_once_shares_an_answer_that_is_not_older_than_the_asking():
    """The first one's answer was begun before the others asked: they wait for the next, all for the same."""
    make = Making()

    async def crowd() -> list[bytes]:
        shared = SharedAnswer(make)
        first = await make.first_call(shared)
        asked = [asyncio.create_task(shared.answer()) for _ in range(50)]
        await asyncio.sleep(0)  # each of them has asked
        make.goes_on.set()
        return await asyncio.gather(first, *asked)

    assert asyncio.run(crowd()) == [b"0"] + [b"1"] * 50
    assert make.made == [0, 1]


def test_who_leaves_neither_ends_the_others_answer_nor_has_two_made_at_once():
    make = Making()

    async def crowd() -> list[bytes]:
        shared = SharedAnswer(make)
        first = await make.first_call(shared)
        second, third = (asyncio.create_task(shared.answer()) for _ in range(2))
        await asyncio.sleep(0)  # both have asked
        first.cancel()
        second.cancel()
        await asyncio.wait([first, second])
        make.goes_on.set()
        return [await third, await shared.answer()]

    assert asyncio.run(crowd()) == [b"1", b"2"]
    assert make.most_at_once == 1, "a call goes on when the one who asked for it has left"


def test_a_failure_is_raised_for_all_who_share_it_and_the_next_call_is_tried():
    failures = [OSError("no memory"), None]

    def make() -> bytes:
        error = failures.pop(0)
        if error:
            raise error
        return b"again"

    async def crowd() -> list:
        shared = SharedAnswer(make)
        both = await asyncio.gather(shared.answer(), shared.answer(), return_exceptions=True)
        return [*both, await shared.answer()]

    first, second, third = asyncio.run(crowd())
    assert str(first) == str(second) == "no memory"
    assert third == b"again"
