"""What `ruvon demo` tells: of answers as they come, of a server's counters, and of its people in the end."""

import asyncio
import json
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console

from engine import EngineArgs
from engine.demo import show
from engine.demo.crowd import Crowd, Person, ServerMetrics
from engine.telemetry.history import DATA_PATH

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
DRAFT = {"model": "storyteller-draft", "num_speculative_tokens": 4}


def asked(answer, ask) -> None:
    """`ask` of a client whose requests `answer` answers."""

    async def run() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            await ask(http)

    asyncio.run(run())


def stream(*pieces: str) -> httpx.Response:
    chunks = [{"choices": [{"delta": {"role": "assistant"}}]}]
    chunks += [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    lines = [json.dumps(chunk) for chunk in chunks] + ["[DONE]"]
    return httpx.Response(200, text="".join(f"data: {line}\n\n" for line in lines))


def test_the_first_answer_is_kept_and_the_last_is_shown():
    answers = iter([stream("One\n", "dog."), stream("Two."), httpx.Response(429, text="come again")])
    person = Person("Ann", "?")

    async def three_times(http: httpx.AsyncClient) -> None:
        for _ in range(3):
            await person.ask(http, "http://x", {})

    asked(lambda request: next(answers), three_times)
    assert person.first_answer == "One dog.", "on one line"
    assert (person.num_answers, len(person.first_text_seconds)) == (2, 2), "a first word for each answer"
    assert person.error == "429: come again"


def test_an_answer_that_ends_in_an_error_is_none():
    error = {"error": {"message": "the engine failed", "code": "engine_error"}}
    lines = [json.dumps({"choices": [{"delta": {"content": "On"}}]}), json.dumps(error), "[DONE]"]
    person = Person("Ann", "?")
    text = "".join(f"data: {line}\n\n" for line in lines)
    asked(lambda request: httpx.Response(200, text=text), lambda http: person.ask(http, "http://x", {}))
    assert (person.num_answers, person.error) == (0, "the engine failed")


def test_who_heard_no_word_in_all_the_time_there_was_got_no_answer():
    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        if request.url.path == "/v1/chat/completions":
            await asyncio.sleep(60)
        return httpx.Response(503)

    crowd = Crowd("http://x", chat=True)
    crowd.people[2:], crowd.metrics.update = [], lambda http: asyncio.sleep(0)
    crowd.people[1].num_answers = 1  # one without words, as a model with random weights gives
    asked(answer, lambda http: crowd.run(http, seconds=0, max_seconds=0.1))
    assert [person.error for person in crowd.people] == ["no word in 0.1 s", ""]


def test_the_servers_counters_are_told_as_speeds_and_shares(monkeypatch):
    seconds = iter(range(100))
    clock = SimpleNamespace(perf_counter=lambda: float(next(seconds)))
    monkeypatch.setattr("engine.demo.crowd.time", clock)
    totals = {"vllm:prefix_cache_queries": 200, "vllm:prefix_cache_hits": 50}
    made = iter([1000, 1010, 1030])

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path != DATA_PATH:
            counts = {"num_draft_tokens": 40.0, "num_accepted_tokens": 30.0}
            lines = [
                f'vllm:spec_decode_{name}_total{{model_name="my model"}} {n}' for name, n in counts.items()
            ]
            return httpx.Response(200, text="\n".join(lines))
        return httpx.Response(200, json={
            "now": {"running": 2, "waiting": 1, "kv_usage": 0.25},
            "totals": totals | {"vllm:generation_tokens": next(made)},
            "seconds": {"steps": [1, 4], "step_sequences": [9, 10]},
        })  # fmt: skip

    metrics = ServerMetrics("http://x")

    assert metrics.lines(60)[0].startswith("0 tokens/s"), "before anything is known"

    async def three_times(http: httpx.AsyncClient) -> None:
        for _ in range(3):
            await metrics.update(http)

    asked(answer, three_times)
    assert metrics.speeds == [10.0, 20.0], "tokens a second, between two updates: 1,000 were before the first"
    assert (metrics.output_tokens, metrics.seconds) == (1030, 3.0)
    assert (metrics.prompt_tokens, metrics.cached_tokens) == (200, 50)
    assert metrics.requests_per_step == 10 / 4
    assert metrics.lines(60)[0].startswith("20 tokens/s")
    assert metrics.lines(60)[1] == "running 2, waiting 1, KV cache 25.0%, drafts kept 75%"


def test_what_is_said_in_the_end():
    crowd = Crowd("http://x", chat=True)
    crowd.people[0].num_answers, crowd.people[0].first_text_seconds = 3, [0.1, 0.2, 0.6]
    metrics = crowd.metrics
    metrics.speeds, metrics.output_tokens, metrics.seconds, metrics.requests_per_step = (
        [120.0, 80.0],
        300,
        4.0,
        2.5,
    )
    metrics.draft_tokens, metrics.accepted_tokens = 40, 30
    metrics.prompt_tokens, metrics.cached_tokens = 200, 50
    console = Console(width=100, force_terminal=False)
    with console.capture() as shown:
        show._sum_up(console, crowd)
    for words in (
        "6, 3 answers", "300 tokens in 4 s, up to 120 tokens/s", "200 ms (median)", "2.5 on average",
        "75% of the drafts were right", "25% of the prompts' tokens were there",
    ):  # fmt: skip
        assert words in shown.get()


@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, DRAFT),
        ({"model": "gpt2"}, NGRAM),
        ({"async_scheduling": True}, DRAFT),
        (
            {"speculative_config": NGRAM | {"num_speculative_tokens": 2}},
            NGRAM | {"num_speculative_tokens": 2},
        ),
    ],
    ids=str,
)
def test_it_speculates_unless_told_otherwise(options, config):
    speculating = EngineArgs(**options | {"speculative_config": config})
    assert show._with_speculation(EngineArgs(**options)) == speculating


def test_who_got_no_answer_is_an_error(monkeypatch):
    @contextmanager
    def served(*arguments, **options):
        yield "http://x", 1

    async def watch(console, crowd, seconds):
        crowd.people[1].error = "500: broken"

    monkeypatch.setattr(show, "served", served)
    monkeypatch.setattr(show, "_watch", watch)
    with pytest.raises(RuntimeError, match=r"^Ben: 500: broken$"):
        show.show_crowd(EngineArgs(), 0)


@pytest.mark.parametrize(
    "event", ["{", "[" * 100_000, '{"error": "down"}', '{"choices": [{"text": 5}]}', "5"]
)
def test_a_garbled_answer_is_the_error_of_one_person(event, monkeypatch):
    monkeypatch.setattr("engine.demo.crowd.PAUSE_SECONDS", 0)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        is_first = b"boat" in request.content
        return httpx.Response(200, text=f"data: {event}\n\n") if is_first else stream("One.")

    crowd = Crowd("http://x", chat=True)
    crowd.people[:2], crowd.metrics.update = [], lambda http: asyncio.sleep(0)
    asked(answer, lambda http: crowd.run(http, seconds=0, max_seconds=60))
    first, *others = crowd.people
    assert first.error
    assert [(person.first_answer, person.error) for person in others] == [("One.", "")] * 3


def test_a_reading_that_fails_is_skipped(monkeypatch):
    monkeypatch.setattr("engine.demo.crowd.METRICS_SECONDS", 0)
    readings = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal readings
        if request.url.path != DATA_PATH:
            return httpx.Response(200)
        readings += 1
        if readings == 2:
            raise httpx.ReadTimeout("", request=request)
        if readings == 3:
            return httpx.Response(503, text="busy")
        totals = ("generation_tokens", "prefix_cache_queries", "prefix_cache_hits")
        return httpx.Response(200, json={
            "now": {}, "totals": {f"vllm:{name}": readings for name in totals},
            "seconds": {"steps": [], "step_sequences": []},
        })  # fmt: skip

    crowd = Crowd("http://x", chat=True)

    async def until_the_fifth(http: httpx.AsyncClient) -> None:
        task = asyncio.create_task(crowd._update(http))
        while readings < 6 and not task.done():
            await asyncio.sleep(0)
        task.cancel()

    asked(answer, until_the_fifth)
    assert crowd.metrics.output_tokens >= 5
