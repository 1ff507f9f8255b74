"""The load generator: known latencies in, known percentiles out; what it sends, and when; what it counts."""

import asyncio
import json
import math
from itertools import pairwise
from random import Random

import httpx
import pytest

from benchmarks import load
from engine.load.client import Endpoint
from engine.load.plan import Job, endless, poisson, replay
from engine.load.report import Limits, figures, own_lag, spread, tables
from engine.server.app import create_app
from tests.part04.serving import ScriptedBackend, serve
from tests.part15.instant import Script, event, run, words


def every(seconds: float, number: int) -> list[Job]:
    return [Job(i * seconds, f"prompt {i}", 5) for i in range(number)]


def open_loop(script: Script, jobs, tick=lambda run: None, limits: Limits | None = None, **options):
    """(what was seen, by arrival; the figures) of an open loop against `script`."""

    async def go():
        async with httpx.AsyncClient(base_url="http://script/v1", transport=script) as http:
            running = load.Run(Endpoint(http, "script", **options).ask)
            await running.watched(running.open_loop(jobs), tick)
            return running

    running = run(go())
    seen = sorted(running.seen, key=lambda one: one.due)
    return seen, figures(seen, running.start, running.wakeups, limits)


# What is measured


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_known_latencies_in_known_percentiles_out(api):
    """A hundred answers of five tokens: the first after 10, 20, … 1000 ms, the others 20 ms apart. The
    percentile p of 100 values lies between the two nearest: of 10 to 1000 the median is 505.
    """

    async def tell(i, body):
        return words([(i + 1) / 100, 0.02, 0.02, 0.02, 0.02], chat=api == "chat")

    script = Script(tell)
    _, found = open_loop(script, every(2, 100), limits=Limits(ttft=0.5), api=api)
    assert found["ttft_seconds"] == pytest.approx(
        {"count": 100, "mean": 0.505, "p50": 0.505, "p95": 0.9505, "p99": 0.9901, "max": 1.0}
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
        if len(running.wakeups) == 5:
            asyncio.get_running_loop().compute(0.35)

    seen, found = open_loop(Script(tell), [Job(0.42 + 0.1 * i, "x", 1) for i in range(10)], busy)
    late = [one for one in seen if one.late > 1e-9]
    assert [one.late for one in late] == pytest.approx([0.33, 0.23, 0.13, 0.03])
    assert [one.ttft for one in late] == pytest.approx([0.38, 0.28, 0.18, 0.08]), "from the moment it was due"
    assert found["late_seconds"]["max"] == pytest.approx(0.33)
    assert found["wakeups_late_seconds"]["max"] == pytest.approx(0.25)
    assert "too busy" in own_lag(found)


def test_without_lag_the_generator_says_so():
    async def tell(i, body):
        return words([0.05])

    assert "of no weight" in own_lag(open_loop(Script(tell), every(0.5, 3))[1])


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

    seen, found = open_loop(Script(tell), every(70, len(ENDS)), limits=Limits(ttft=1), timeout=60)
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

    _, found = open_loop(Script(tell), every(1, 2), limits=Limits(tpot=0.001))
    assert found["tpot_seconds"] is None
    assert found["goodput"]["share"] == 1


@pytest.mark.parametrize(
    ("values", "p50", "p99"), [([3.0], 3.0, 3.0), ([1.0, 2.0], 1.5, 1.99), ([4, 1, 3, 2, 5], 3, 4.96)]
)
def test_percentiles_lie_between_the_two_nearest(values, p50, p99):
    found = spread(values)
    assert (found["p50"], found["p99"]) == pytest.approx((p50, p99))


def test_nothing_sent_is_said_without_a_number():
    found = figures([], 0.0, [], Limits(ttft=1))
    assert (found["sent"], found["ttft_seconds"], found["goodput"]["share"]) == (0, None, 0.0)
    assert tables(found)["latency"]["rows"] == []
    assert own_lag(found) == "Nothing was sent."


@pytest.mark.parametrize(
    "text", ["ttft", "ttft=", "ttft=x", "speed=1", "ttft=1,ttft=2", "ttft=-1", "ttft=nan", ""]
)
def test_a_limit_that_is_none_is_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 - the name or the number is quoted
        Limits.parse(text)


# What is sent


def test_poisson_arrivals_keep_the_rate_and_know_nothing_of_each_other():
    jobs = poisson(5, 2000, (8, 32), (16, 64), Random(1))
    assert jobs == poisson(5, 2000, (8, 32), (16, 64), Random(1)), "the same seed, the same jobs"
    assert jobs != poisson(5, 2000, (8, 32), (16, 64), Random(2))
    assert len(jobs) == pytest.approx(10_000, rel=0.03)
    gaps = [b.at - a.at for a, b in pairwise(jobs)]
    assert min(gaps) > 0
    # Of exponential gaps, half are below ln 2 of the mean, and 5% above 3 times the mean.
    assert sum(gap < math.log(2) / 5 for gap in gaps) / len(gaps) == pytest.approx(0.5, abs=0.015)
    assert sum(gap > 3 / 5 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-3), abs=0.01)
    sizes = {len(job.prompt.split()) for job in jobs}
    assert (min(sizes), max(sizes)) == (8, 32)
    assert {job.max_tokens for job in jobs} == set(range(16, 65))
    beginnings = {" ".join(job.prompt.split()[:8]) for job in jobs}
    assert len(beginnings) > 0.999 * len(jobs), "prompts that begin alike would be found in a prefix cache"


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROWS = "".join(
    f"2023-11-16 18:{15 + i // 60}:{i % 60:02}.2500000,{prompt},{output}\n"
    for i, (prompt, output) in enumerate([(100, 20), (1000, 10)] * 60 + [(99_000, 900)])
)


def test_a_trace_keeps_its_bursts_and_its_proportions_and_fits_the_context(tmp_path):
    """121 rows, one a second, of 120 and 1,010 tokens and a last one of 99,900. 99 of 100 fit 960 of 1024
    tokens (a sixteenth is left for a template) when all are multiplied by 960/1010; the last prompt is cut.
    """
    file = tmp_path / "trace.csv"
    file.write_text(HEAD + ROWS)
    trace = replay(file, 1024, math.inf, Random(0))
    assert (trace.size_factor, trace.speed, trace.cut) == (pytest.approx(960 / 1010), 1.0, 1)
    assert [job.at for job in trace.jobs] == pytest.approx(range(121))
    sizes = [(len(job.prompt.split()), job.max_tokens) for job in trace.jobs]
    assert sizes[:2] == [(95, 19), (950, 10)]
    assert sizes[-1] == (960 - 855, 855)
    faster = replay(file, 1024, 10, Random(0), rate=4)
    assert [job.at for job in faster.jobs] == pytest.approx([i / 4 for i in range(40)]), (
        "the first 10 seconds"
    )
    assert replay(file, 10**6, 1, Random(0)).size_factor == 1, "nothing is made larger"


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", HEAD, HEAD + ROWS.splitlines()[0]])
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    file = tmp_path / "trace.csv"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"needed"):
        replay(file, 1024, 60, Random(0))


def test_a_trace_of_one_moment_has_no_pace_to_be_changed(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(HEAD + "2023-11-16 18:15:00,0,0\n" * 3)
    assert [(job.at, job.max_tokens) for job in replay(file, 1024, 60, Random(0)).jobs] == [(0.0, 1)] * 3
    with pytest.raises(ValueError, match=r"trace.csv: .* rate=2"):
        replay(file, 1024, 60, Random(0), rate=2)


def test_the_production_trace_fits_storytellers_context(data):
    """Microsoft's: 19,366 rows in 58 minutes."""
    trace = replay(data / "AzureLLMInferenceTrace_conv.csv", 1024, math.inf, Random(0), rate=2)
    assert len(trace.jobs) == 19_366
    assert (len(trace.jobs) - 1) / trace.jobs[-1].at == pytest.approx(2)
    totals = [len(job.prompt.split()) + job.max_tokens for job in trace.jobs]
    assert max(totals) <= 960
    assert trace.cut <= 0.011 * 19_366
    assert min(totals) >= 2


def test_a_closed_loop_has_so_many_users_and_no_more():
    async def tell(i, body):
        script.under_way += 1
        script.most_under_way = max(script.most_under_way, script.under_way)
        await asyncio.sleep(0.5)
        script.under_way -= 1
        return words([0.0])

    script = Script(tell)

    async def go():
        async with httpx.AsyncClient(base_url="http://script/v1", transport=script) as http:
            running = load.Run(Endpoint(http, "script").ask)
            await running.closed_loop(endless((4, 4), (1, 1), Random(0)), 7, 9.9)
            return running.seen

    assert len(run(go())) == 7 * 20
    assert script.most_under_way == 7


# The command


def test_what_the_command_line_asks_for_is_what_reaches_the_server(tmp_path):
    async def tell(i, body):
        return words([0.05])

    script = Script(tell)
    given = "--rate 3 --seconds 20 --prompt-tokens 9 --max-tokens 4-6 --ignore-eos --slo ttft=1 --api-key k"
    options = load.arguments(given.split())

    async def go():
        async with load.client(options.url, options.api_key, transport=script) as http:
            return await load.load(options, http)

    workload, found = run(go())
    assert (workload["model"], workload["arrivals"], workload["rate"]) == ("script", "Poisson", 3)
    assert found["answered"] == len(script.asked) > 30
    for _, body, headers in script.asked:
        assert headers["authorization"] == "Bearer k"
        assert len(body.pop("prompt").split()) == 9
        assert 4 <= body.pop("max_tokens") <= 6
        assert body == {
            "model": "script", "stream": True, "stream_options": {"include_usage": True},
            "temperature": 0, "ignore_eos": True,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("", "one of --rate"),
        ("--rate 1 --concurrency 2", "one of --rate"),
        ("--trace x.csv --concurrency 2", "one of --rate"),
        ("--rate 0", "above 0"),
        ("--rate nan", "above 0"),
        ("--concurrency 0", "at least 1"),
        ("--rate 1 --prompt-tokens 9-3", "8-128"),
        ("--rate 1 --slo speed=3", "ttft, tpot and e2e"),
    ],
)
def test_what_is_asked_wrongly_is_said(given, says, capsys):
    with pytest.raises(SystemExit):
        load.arguments(given.split())
    assert says in capsys.readouterr().err


def test_a_real_server_from_the_command_line(tmp_path, capsys):
    backend, file = ScriptedBackend(), tmp_path / "some.json"
    with serve(create_app(backend)) as url:
        load.main(["--url", url, "--rate", "20", "--seconds", "0.5", "--out", str(file)])
        written = json.loads(file.read_text())
        assert written["figures"]["answered"] == written["figures"]["sent"] > 0
        assert written["figures"]["output_tokens"] == 3 * written["figures"]["sent"]
        assert written["workload"]["model"] == "script"
        assert "Own lag" in capsys.readouterr().out
        with serve(create_app(backend, max_requests=1)) as full:
            load.main(["--url", full, "--concurrency", "2", "--seconds", "0.2", "--out", str(file)])
    assert backend.open == 0
    with pytest.raises(SystemExit, match=r"benchmarks\.load: "):
        load.main(["--url", url, "--rate", "20", "--seconds", "0.5"])
