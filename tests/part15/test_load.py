"""The load generator: known latencies in, known percentiles out; each request is counted, however it ends."""

import asyncio

import httpx
import pytest

from benchmarks import load
from engine.load.client import Endpoint, RequestRecord
from engine.load.plan import Job
from engine.load.report import LatencyLimits, generator_lag, run_figures, spread, tables
from tests.part15.instant import Script, event, run, words


def every(seconds: float, number: int) -> list[Job]:
    return [Job(i * seconds, f"prompt {i}", 5) for i in range(number)]


def open_loop(script: Script, jobs, tick=lambda run: None, limits: LatencyLimits | None = None, **options):
    """(what was seen, by arrival; the figures) of an open loop against `script`."""

    async def go():
        async with httpx.AsyncClient(base_url="http://script/v1", transport=script) as http:
            running = load.Run(Endpoint(http, "script", **options).ask)
            await running.watch(running.open_loop(jobs), tick)
            return running

    running = run(go())
    seen = sorted(running.records, key=lambda one: one.due)
    return seen, run_figures(seen, running.start, running.wakeup_delays, limits)


# What is measured


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_known_latencies_in_known_percentiles_out(api):
    """A hundred answers of five tokens: the first after 10, 20, … 1000 ms, the others 20 ms apart. The
    percentile p of 100 values lies between the two nearest: of 10 to 1000 the median is 505.
    """

    async def tell(i, body):
        return words([(i + 1) / 100, 0.02, 0.02, 0.02, 0.02], chat=api == "chat")

    script = Script(tell)
    _, found = open_loop(script, every(2, 100), limits=LatencyLimits(ttft=0.5), api=api)
    assert found["ttft_seconds"] == pytest.approx(
        {
            "count": 100,
            "mean": 0.505,
            "std": 0.2886607,
            "p50": 0.505,
            "p95": 0.9505,
            "p99": 0.9901,
            "max": 1.0,
        }
    )
    assert [found["tpot_seconds"][p] for p in ("p50", "p99")] == pytest.approx([0.02, 0.02])
    assert found["e2e_seconds"]["p95"] == pytest.approx(0.9505 + 4 * 0.02)
    assert (found["prompt_tokens"], found["output_tokens"]) == (700, 500), "tokens are the server's own count"
    assert found["seconds"] == pytest.approx(99 * 2 + 1.0 + 0.08), "to the end of the last answer"
    assert found["output_tokens_per_second"] == pytest.approx(500 / found["seconds"])
    assert found["goodput"]["share"] == 0.5, "50 of 100 keep a first word within 500 ms"
    assert found["goodput"]["answers_per_second"] == pytest.approx(50 / found["seconds"])
    assert found["late_seconds"]["max"] == 0


def test_the_role_that_opens_a_chat_is_not_its_first_word():
    async def tell(i, body):
        return words([0.3, 0.1], chat=True)

    (seen,), _ = open_loop(Script(tell), every(1, 1), api="chat")
    assert seen.ttft == pytest.approx(0.3)
    assert seen.text == " w w"


def test_arrivals_do_not_wait_for_answers_and_a_stall_is_charged_to_all_who_came_in_it():
    """One at a time, 10 ms each, and the eleventh stalls the server for a second: whoever was due meanwhile
    waited from then on, not from when the server had time again (coordinated omission).
    """
    turn = asyncio.Lock()

    async def tell(i, body):
        async with turn:
            await asyncio.sleep(1.0 if i == 10 else 0.01)
        return words([0.0])

    script = Script(tell)
    seen, found = open_loop(script, every(0.1, 30))
    assert [at for at, *_ in script.asked] == pytest.approx([i * 0.1 for i in range(30)])
    expected, free = [], 0.0
    for i in range(30):
        free = max(free, i * 0.1) + (1.0 if i == 10 else 0.01)
        expected.append(free - i * 0.1)
    assert [one.ttft for one in seen] == pytest.approx(expected)
    assert sum(one.ttft > 0.5 for one in seen) == 6
    assert found["late_seconds"]["max"] == 0


def test_a_generator_that_is_late_says_so_and_counts_from_when_each_request_was_due():
    """Its own computer is busy for 0.35 s: four requests are sent late, and their times hold the delay."""

    async def tell(i, body):
        return words([0.05])

    def busy(running):
        if len(running.wakeup_delays) == 5:
            asyncio.get_running_loop().compute(0.35)

    seen, found = open_loop(Script(tell), [Job(0.42 + 0.1 * i, "x", 1) for i in range(10)], busy)
    late = [one for one in seen if one.late > 1e-9]
    assert [one.late for one in late] == pytest.approx([0.33, 0.23, 0.13, 0.03])
    assert [one.ttft for one in late] == pytest.approx([0.38, 0.28, 0.18, 0.08]), "from the moment it was due"
    assert found["late_seconds"]["max"] == pytest.approx(0.33)
    assert found["wakeups_late_seconds"]["max"] == pytest.approx(0.25)
    assert "too busy" in generator_lag(found)


def test_without_lag_the_generator_says_so():
    async def tell(i, body):
        return words([0.05])

    assert "of no weight" in generator_lag(open_loop(Script(tell), every(0.5, 3))[1])


def test_a_text_may_hold_what_other_splitters_take_for_the_end_of_a_line():
    async def tell(i, body):
        chunk = {"choices": [{"text": "a\u2028b\x85c\x0bd", "finish_reason": "stop"}]}
        return httpx.Response(200, content=event(chunk) + event("[DONE]"))

    (seen,), _ = open_loop(Script(tell), every(1, 1))
    assert (seen.outcome, seen.text) == ("ok", "a\u2028b\x85c\x0bd")


@pytest.mark.parametrize("size", [1, 2, 7])
def test_an_event_may_come_in_pieces_and_comments_are_passed_over(size):
    sent = b": hello\n\n" + event({"choices": [{"text": "é", "finish_reason": "stop"}]}) + event("[DONE]")

    async def tell(i, body):
        async def body():
            for at in range(0, len(sent), size):
                yield sent[at : at + size]

        return httpx.Response(200, content=body())

    (seen,), _ = open_loop(Script(tell), every(1, 1))
    assert (seen.outcome, seen.text) == ("ok", "é")


# What is counted


async def refused(status: int, **headers: str) -> httpx.Response:
    await asyncio.sleep(0.25)
    return httpx.Response(status, json={"error": {"message": "no"}}, headers=headers)


async def unreachable() -> httpx.Response:
    raise httpx.ConnectError("nobody there")


async def broken() -> httpx.Response:
    return words([0.1], done=False)


async def hopeless() -> httpx.Response:
    return words([10_000.0])


async def failing() -> httpx.Response:
    return httpx.Response(200, content=event({"error": {"message": "the engine failed"}}) + event("[DONE]"))


async def garbled() -> httpx.Response:
    return httpx.Response(200, content=b"data: <html>\n\n")


async def served() -> httpx.Response:
    return words([0.1, 0.1])


ENDS = [
    (lambda: refused(429, **{"retry-after": "2"}), "429"),
    (lambda: refused(429, **{"retry-after": "4"}), "429"),
    (lambda: refused(503), "503"),
    (unreachable, "no connection"),
    (broken, "broken off"),
    (hopeless, "timeout"),
    (failing, "error event"),
    (garbled, "no OpenAI stream"),
    (served, "ok"),
]


def test_every_request_is_counted_whatever_became_of_it():
    """Refusals by status, with their Retry-After; other ends by name; percentiles are of whole answers."""

    async def tell(i, body):
        return await ENDS[i][0]()

    seen, found = open_loop(Script(tell), every(70, len(ENDS)), limits=LatencyLimits(ttft=1), timeout=60)
    assert [one.outcome for one in seen] == [name for _, name in ENDS]
    assert found["refused"] == {"429": 2, "503": 1}
    assert sum(found["failed"].values()) == 5
    assert (found["sent"], found["answered"], found["refusals_with_retry_after"]) == (9, 1, 2)
    assert found["retry_after_seconds"]["p50"] == 3
    assert found["refused_after_seconds"]["max"] == pytest.approx(0.25)
    assert found["ttft_seconds"]["count"] == 1, "a refusal is no fast answer"
    assert found["goodput"]["share"] == pytest.approx(1 / 9), "of all that were sent"


def test_an_answer_without_usage_is_an_answer_without_tokens():
    async def tell(i, body):
        return words([0.1, 0.1], usage=False)

    _, found = open_loop(Script(tell), every(1, 2))
    assert (found["answered"], found["output_tokens"], found["answers_without_usage"]) == (2, 0, 2)
    assert found["tpot_seconds"] is None


def test_a_single_token_has_no_rhythm_and_keeps_any_limit_on_it():
    async def tell(i, body):
        return words([0.1])

    _, found = open_loop(Script(tell), every(1, 2), limits=LatencyLimits(tpot=0.001))
    assert found["tpot_seconds"] is None
    assert found["goodput"]["share"] == 1


@pytest.mark.parametrize(
    ("values", "p50", "p99"), [([3.0], 3.0, 3.0), ([1.0, 2.0], 1.5, 1.99), ([4, 1, 3, 2, 5], 3, 4.96)]
)
def test_percentiles_lie_between_the_two_nearest(values, p50, p99):
    found = spread(values)
    assert (found["p50"], found["p99"]) == pytest.approx((p50, p99))


def test_nothing_sent_is_said_without_a_number():
    found = run_figures([], 0.0, [], LatencyLimits(ttft=1))
    assert (found["sent"], found["ttft_seconds"], found["goodput"]["share"]) == (0, None, 0.0)
    assert tables(found)["latency"]["rows"] == []
    assert generator_lag(found) == "Nothing was sent."


@pytest.mark.parametrize(
    "text", ["ttft", "ttft=", "ttft=x", "speed=1", "ttft=1,ttft=2", "ttft=-1", "ttft=nan", ""]
)
def test_a_limit_that_is_none_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the name or the number is quoted
        LatencyLimits.parse(text)


def test_an_answer_that_the_server_cut_short_is_no_answer_however_soon_it_came():
    """At a request's deadline the server ends it with what there is, in time: goodput must not count that."""
    ends = iter(["abort", "length"])

    async def tell(i, body):
        choices = [{"text": "Once", "finish_reason": None}], [{"text": "", "finish_reason": next(ends)}]
        events = [event({"choices": each}) for each in choices]
        return httpx.Response(200, content=b"".join(events) + event("[DONE]"))

    seen, found = open_loop(Script(tell), every(1, 2), limits=LatencyLimits(e2e=1))
    assert [one.outcome for one in seen] == ["cut short", "ok"]
    assert found["failed"] == {"cut short": 1}
    assert (found["answered"], found["e2e_seconds"]["count"]) == (1, 1)
    assert found["goodput"]["share"] == 1 / 2


# What people read


def test_a_runs_tables_are_in_milliseconds_and_name_every_end():
    records = [
        RequestRecord(0.0, 0.0, "ok", first=0.25, last=1.25, end=1.25, tokens=5),
        RequestRecord(1.0, 1.0, "ok", first=1.5, last=3.5, end=3.5, tokens=5),
        RequestRecord(2.0, 2.0, "429", end=2.0),
        RequestRecord(3.0, 3.0, "timeout", end=8.0),
    ]
    shown = tables(run_figures(records, 0.0, [0.0], LatencyLimits(ttft=0.3)))
    assert shown["latency"] == {
        "columns": ["ms", "mean", "p50", "p95", "p99", "max"],
        "rows": [
            ["time to first text", 375.0, 375.0, 487.5, 497.5, 500.0],
            ["time per output token", 375.0, 375.0, 487.5, 497.5, 500.0],
            ["whole answer", 1875.0, 1875.0, 2437.5, 2487.5, 2500.0],
        ],
    }, "the figures' seconds times 1000"
    assert shown["requests"] == {
        "columns": ["requests", "number"],
        "rows": [
            ["sent", 4],
            ["answered", 2],
            ["refused with 429", 1],
            ["timeout", 1],
            ["answers a second", 0.25],
            ["output tokens a second", 1.2],
            ["good answers a second (ttft=0.3)", 0.125],
            ["good, of all sent", 0.25],
        ],
    }, "each end has a row, and a rate is over the whole run: 8 s"
    millisecond = tables(run_figures([RequestRecord(0, 0, "ok", 0.0012345, 1, 1)], 0.0, [0.0]))
    assert millisecond["latency"]["rows"][0][1:] == [1.23] * 5, "to a hundredth of a millisecond"


@pytest.mark.parametrize(
    ("sent_late", "read_late", "says"),
    [
        (
            0.002,
            0.010,
            "within 2.0 ms of their time (at most 2.0); the clock was read within 10.0 ms (at most",
        ),
        (0.002, 0.010, "10.0): of no weight beside the times."),
        (0.002, 0.011, "11.0): this generator was too busy"),
        (0.011, 0.002, "2.0): this generator was too busy"),
    ],
)
def test_the_generators_own_lag_is_told_in_milliseconds_and_judged(sent_late, read_late, says):
    """At most 10 ms, of sending and of reading the clock, do not distort what is measured."""
    answer = RequestRecord(0.0, sent_late, "ok", first=1.0, last=1.0, end=1.0)
    assert says in generator_lag(run_figures([answer], 0.0, [read_late]))


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ([{"choices": [{"text": "Once", "finish_reason": None}]}], "broken off"),
        ([{"error": {"message": "it failed"}}, {"choices": [{"text": "", "finish_reason": "stop"}]}],
         "error event"),
    ],
    ids=["no finish_reason", "an error before the end"],
)  # fmt: skip
def test_an_answer_is_whole_with_a_finish_reason_and_without_an_error_alone(events, outcome):
    async def tell(i, body):
        return httpx.Response(200, content=b"".join(map(event, events)) + event("[DONE]"))

    (seen,), _ = open_loop(Script(tell), every(1, 1))
    assert seen.outcome == outcome


def test_rates_are_rounded_to_three_places_and_tokens_to_one():
    records = [
        RequestRecord(0.0, 0.0, "ok", first=0.25, last=1.0, end=1.0, tokens=5),
        RequestRecord(0.0, 0.0, "ok", first=0.5, last=7.0, end=7.0, tokens=5),
        RequestRecord(0.0, 0.0, "429", end=0.0),
    ]
    shown = tables(run_figures(records, 0.0, [0.0], LatencyLimits(ttft=0.3)))
    assert shown["requests"]["rows"][-4:] == [
        ["answers a second", 0.286],
        ["output tokens a second", 1.4],
        ["good answers a second (ttft=0.3)", 0.143],
        ["good, of all sent", 0.333],
    ], "2, 10 and 1 in 7 s, and 1 of 3"
