"""What the load generator sends, and when: its plans, its closed loop, its command."""

import asyncio
import json
import math
from contextlib import suppress
from itertools import pairwise
from random import Random

import httpx
import pytest

from benchmarks import load
from engine.load.client import Endpoint
from engine.load.plan import endless_jobs, jobs_of_trace, poisson_jobs
from engine.load.run import http_client
from engine.server.app import create_app
from tests.part04.serving import ScriptedBackend, serve
from tests.part15.instant import Script, run, words


def test_poisson_arrivals_keep_the_rate_and_know_nothing_of_each_other():
    jobs = poisson_jobs(5, 2000, (8, 32), (16, 64), Random(1))
    assert jobs == poisson_jobs(5, 2000, (8, 32), (16, 64), Random(1)), "the same seed, the same jobs"
    assert jobs != poisson_jobs(5, 2000, (8, 32), (16, 64), Random(2))
    assert len(jobs) == pytest.approx(10_000, rel=0.03)
    gaps = [b.offset - a.offset for a, b in pairwise(jobs)]
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
    trace = jobs_of_trace(file, 1024, math.inf, Random(0))
    assert (trace.size_factor, trace.speed, trace.num_cut) == (pytest.approx(960 / 1010), 1.0, 1)
    assert [job.offset for job in trace.jobs] == pytest.approx(range(121))
    sizes = [(len(job.prompt.split()), job.max_tokens) for job in trace.jobs]
    assert sizes[:2] == [(95, 19), (950, 10)]
    assert sizes[-1] == (960 - 855, 855)
    faster = jobs_of_trace(file, 1024, 10, Random(0), rate=4)
    assert [job.offset for job in faster.jobs] == pytest.approx([i / 4 for i in range(40)]), (
        "the first 10 seconds"
    )
    assert jobs_of_trace(file, 10**6, 1, Random(0)).size_factor == 1, "nothing is made larger"


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", HEAD, HEAD + ROWS.splitlines()[0]])
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    file = tmp_path / "trace.csv"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"needed"):
        jobs_of_trace(file, 1024, 60, Random(0))


@pytest.mark.parametrize(("row", "says"), [
    ("2023-11-16 18:15:09.0", "line 3: a value is missing"),
    ("2023-11-16 18:14:00,1,1", "line 3: earlier than the line before"),
])  # fmt: skip
def test_a_row_that_is_cut_off_or_out_of_order_is_named(tmp_path, row, says):
    file = tmp_path / "trace.csv"
    file.write_text(HEAD + "2023-11-16 18:15:00,5,5\n" + row + "\n")
    with pytest.raises(ValueError, match=says):
        jobs_of_trace(file, 1024, 60, Random(0))


def test_a_trace_of_one_moment_has_no_pace_to_be_changed(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(HEAD + "2023-11-16 18:15:00,0,0\n" * 3)
    assert [(job.offset, job.max_tokens) for job in jobs_of_trace(file, 1024, 60, Random(0)).jobs] == [
        (0.0, 1)
    ] * 3
    with pytest.raises(ValueError, match=r"trace.csv: .* rate=2"):
        jobs_of_trace(file, 1024, 60, Random(0), rate=2)


def test_the_production_trace_fits_storytellers_context(data):
    """Microsoft's: 19,366 rows in 58 minutes."""
    trace = jobs_of_trace(data / "AzureLLMInferenceTrace_conv.csv", 1024, math.inf, Random(0), rate=2)
    assert len(trace.jobs) == 19_366
    assert (len(trace.jobs) - 1) / trace.jobs[-1].offset == pytest.approx(2)
    totals = [len(job.prompt.split()) + job.max_tokens for job in trace.jobs]
    assert max(totals) <= 960
    assert trace.num_cut <= 0.011 * 19_366
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
            await running.closed_loop(endless_jobs((4, 4), (1, 1), Random(0)), 7, 9.9)
            return running.records

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
        async with load.http_client(options.url, options.api_key, transport=script) as http:
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


@pytest.mark.parametrize("decimals", ["25", "2500", "25000", "2500000"])
def test_a_time_may_have_any_number_of_decimals_and_a_zone(tmp_path, decimals):
    file = tmp_path / "trace.csv"
    file.write_text(HEAD + f"2024-05-10 00:00:00+00:00,5,5\n2024-05-10 00:00:01.{decimals}+00:00,5,5\n")
    assert [job.offset for job in jobs_of_trace(file, 1024, 60, Random(0)).jobs] == [0, 1.25]


def test_a_context_without_room_for_a_request_is_refused(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(HEAD + ROWS)
    assert {job.max_tokens for job in jobs_of_trace(file, 3, math.inf, Random(0)).jobs} == {1}
    with pytest.raises(ValueError, match="context=2: at least 3"):
        jobs_of_trace(file, 2, 60, Random(0))


def test_each_request_has_a_connection_of_its_own():
    connections = []

    async def answer(reader, writer):
        connections.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    async def go():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with http_client(f"http://127.0.0.1:{port}") as http:
                for _ in range(3):
                    await http.get("models")

    asyncio.run(go())
    assert len(connections) == 3, "a connection that was kept may be closed by the server as it is used again"
