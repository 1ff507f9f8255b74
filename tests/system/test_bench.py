"""`ruvon bench`: what is counted, by known times, and what is said of it, in vLLM's lines."""

import asyncio
import json
import math
import re
import statistics
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import pytest

from engine import LLM
from engine.cli import bench, bench_report, bench_serve, bench_workload
from engine.cli.bench_options import latency_limits, request_url
from engine.cli.main import app
from engine.load.client import RequestRecord
from engine.load.report import LatencyLimits, run_figures
from engine.server.app import create_app
from engine.text.tokenizer import Tokenizer
from tests.part04.serving import ScriptedBackend, serve
from tests.system.test_commands import refusal, said


def test_latency_and_throughput_say_it_in_vllms_lines(capsys, tmp_path):
    file = tmp_path / "latency.json"
    small = ["--model", "storyteller-draft", "--input-len", "4", "--output-len", "3"]
    asked = ["--num-iters-warmup", "0", "--num-iters", "2", "--batch-size", "2", "--output-json", str(file)]
    shown = said(capsys, "bench", "latency", *small, *asked)
    assert re.search(r"^Avg latency: [\d.e-]+ seconds$", shown, re.MULTILINE)
    assert re.search(r"^99% percentile latency: [\d.e-]+ seconds$", shown, re.MULTILINE)
    written = json.loads(file.read_text())
    assert len(written["latencies"]) == 2
    assert written["avg_latency"] == pytest.approx(sum(written["latencies"]) / 2)
    file = tmp_path / "throughput.json"
    asked = ["--num-prompts", "5", "--n", "2", "--output-json", str(file)]
    shown = said(capsys, "bench", "throughput", *small, *asked)
    written = json.loads(file.read_text())
    assert written["total_num_tokens"] == 50, "of prompts and outputs"
    assert written["tokens_per_second"] == pytest.approx(50 / written["elapsed_time"])
    assert re.search(r"^Throughput: \S+ requests/s, \S+ total tokens/s, \S+ output tokens/s$", shown, re.M)
    assert "Total num prompt tokens:  20" in shown
    assert "Total num output tokens:  30" in shown, "n samples of each, of exactly that length"


def test_warm_up_is_not_counted_and_outputs_have_their_length(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(LLM, "generate", lambda self, prompts, params, **_: asked.append((prompts, params)))
    counts = ["--num-iters-warmup", "1", "--num-iters", "3", "--batch-size", "2", "--input-len", "400"]
    said(capsys, "bench", "latency", "--model", "storyteller-draft", "--output-len", "5", *counts)
    assert len(asked) == 1 + 3
    for prompts, params in asked:
        assert [len(prompt["prompt_token_ids"]) for prompt in prompts] == [400, 400]
        assert (params.max_tokens, params.ignore_eos) == (5, True), "an output ends at its length alone"


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_what_cannot_be_measured_or_written_is_said_first(command, tmp_path):
    small = ["bench", command, "--model", "storyteller-draft"]
    message = refusal(*small, "--input-len", "1000", "--output-len", "25")
    assert "--input-len 1000 and --output-len 25 are more than max_model_len=1024 together" in message
    message = refusal(*small, "--output-json", str(tmp_path / "none" / "it.json"))
    assert message.endswith("it.json: a file in a folder that is there is accepted")


def test_prompts_have_no_special_token():
    tokenizer = Tokenizer.from_pretrained("storyteller")
    llm = SimpleNamespace(tokenizer=tokenizer)
    (prompt,) = bench._random_prompts(llm, 1, 20 * tokenizer.vocab_size, Random(0))
    assert set(prompt["prompt_token_ids"]) == set(range(tokenizer.vocab_size)) - tokenizer.special_ids


def test_a_server_is_measured_from_outside(capsys, tmp_path):
    backend, file = ScriptedBackend(), tmp_path / "serve.json"
    with serve(create_app(backend)) as url:
        asked = ["--num-prompts", "7", "--goodput", "ttft:60000", "--result-filename", str(file)]
        asked += ["--temperature", "0.5", "--ignore-eos", "--max-concurrency", "2"]
        shown = said(capsys, "bench", "serve", "--base-url", url, *asked)
    found = json.loads(file.read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (7, 0, 21)
    assert re.search(r"^=+ Serving Benchmark Result =+$", shown, re.MULTILINE)
    assert re.search(r"^Successful requests: +7 *$", shown, re.MULTILINE)
    for line in ("Request throughput (req/s):", "Mean TTFT (ms):", "P99 ITL (ms):", "Median TPOT (ms):"):
        assert line in shown
    assert backend.open == 0
    assert {(one[1].temperature, one[1].ignore_eos) for one in backend.asked} == {(0.5, True)}
    assert refusal("bench", "serve", "--base-url", url).startswith(f"ruvon bench serve: {url}: ")


def test_a_server_that_refuses_some_is_measured_and_one_that_refuses_all_is_an_error(capsys):
    backend = ScriptedBackend(error=RuntimeError("broken"))
    with serve(create_app(backend)) as url:
        words = refusal("bench", "serve", "--base-url", url, "--num-prompts", "2")
        assert words.startswith("ruvon bench serve: no request was answered: {'error event': 2}")
        assert re.search(r"^Failed requests: +2 *$", capsys.readouterr().out, re.MULTILINE)
        answers = backend.generate

        async def generate(*arguments, **options):
            backend.error = None if backend.asked[2:] else backend.error
            return await answers(*arguments, **options)

        backend.generate = generate
        counts = ["--num-prompts", "2", "--max-concurrency", "1"]
        assert "Not answered: error event: 1" in said(capsys, "bench", "serve", "--base-url", url, *counts)


def test_with_a_bound_a_request_is_due_when_it_is_its_turn():
    due, ended = [], []

    class Endpoint:
        async def ask(self, job, at):
            due.append(at)
            await asyncio.sleep(0)
            ended.append(asyncio.get_running_loop().time())

    async def both():
        ask = bench_serve._with_bound(Endpoint(), 1)
        await asyncio.gather(ask(None, 0.0), ask(None, 0.0))

    asyncio.run(both())
    assert due[1] >= ended[0] > 0, "the second was not due before the first had ended"


def test_known_times_in_known_numbers_out():
    records = [
        RequestRecord(0.0, 0.0, "ok", first, first + 0.4, 2.0, prompt_tokens=10, tokens=5, gaps=[0.1] * 4)
        for first in (0.1, 0.2, 0.3)
    ]
    # A single token: no time between tokens.
    records.append(RequestRecord(0.0, 0.0, "ok", 0.2, 0.2, 2.0, prompt_tokens=10, tokens=1))
    records.append(RequestRecord(0.0, 0.0, "broken off", end=8.0, prompt_tokens=10, tokens=3))
    measured = run_figures(records, 0.0, [], LatencyLimits(ttft=0.2), [50, 99])
    found = bench_report.vllm_figures(measured, ["ttft", "tpot", "itl"], [99])
    assert (found["completed"], found["failed"]) == (4, 1)
    assert found["outcomes"] == {"broken off": 1, "ok": 4}
    assert found["mean_ttft_ms"] == found["median_ttft_ms"] == pytest.approx(200)
    assert found["p99_ttft_ms"] == pytest.approx(297)
    assert found["median_tpot_ms"] == found["median_itl_ms"] == pytest.approx(100)
    assert found["output_throughput"] == 16 / 8.0, "of what was answered, in all the time"
    assert found["request_goodput"] == 3 / 8.0, "three of the answers kept the limit, two of them just so"
    assert found["std_ttft_ms"] == pytest.approx(70.7107, abs=1e-3), "numpy.std of 100, 200, 300 and 200"
    assert found["std_tpot_ms"] == pytest.approx(0, abs=1e-6)
    found |= {"max_concurrency": None, "request_rate": "inf"}
    found |= {"max_output_tokens_per_s": 9.0, "max_concurrent_requests": 4}
    shown = bench_report.report_lines(found, ["ttft"], [99])
    assert all(len(line) >= 50 for line in shown if line[0] in "=-")
    assert "Not answered: broken off: 1" in shown
    assert f"{'Output token throughput (tok/s):':<40} {2.0:<10.2f}" in shown
    assert latency_limits(["ttft:500", "e2el:2000"]) == LatencyLimits(ttft=0.5, e2e=2.0), "in milliseconds"


def test_arrivals_and_lengths_are_drawn_from_the_seed():
    arrivals = bench_workload.draw_arrivals(200, 4.0, 1.0, Random(1))
    assert arrivals == bench_workload.draw_arrivals(200, 4.0, 1.0, Random(1)) == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(200 / 4.0), "as vLLM scales them: the rate is what was asked for"
    lengths = bench_workload.draw_lengths(200, 20, 10, 0.5, Random(1))
    assert lengths == bench_workload.draw_lengths(200, 20, 10, 0.5, Random(1))
    assert {min(inputs for inputs, _ in lengths), max(inputs for inputs, _ in lengths)} == {10, 30}
    assert {min(outputs for _, outputs in lengths), max(outputs for _, outputs in lengths)} == {5, 15}
    assert bench_workload.draw_arrivals(5, math.inf, 1.0, Random(1)) == [0] * 5


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_gaps_spread_as_a_gamma_distributions(burstiness):
    """Of shape k, the standard deviation is the mean by the root of k. One is Poisson."""
    arrivals = bench_workload.draw_arrivals(4000, 2.0, burstiness, Random(3))
    gaps = [later - earlier for earlier, later in pairwise(arrivals)]
    assert statistics.fmean(gaps) == pytest.approx(1 / 2, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(1 / 2 / math.sqrt(burstiness), rel=0.1)


def test_even_and_extreme_gaps():
    assert bench_workload.draw_arrivals(4, 2.0, math.inf, Random(0)) == [0.5, 1.0, 1.5, 2.0]
    extreme = bench_workload.draw_arrivals(3, 2.0, 1e-300, Random(0))
    assert extreme[-1] == pytest.approx(1.5), "no division by 0"


def test_with_a_tokenizer_a_prompt_has_exactly_its_length():
    encoder = Tokenizer.from_pretrained("storyteller")
    write = bench_workload.prompt_writer("storyteller", Random(0))
    for num_tokens in (1, 2, 17, 200):
        assert len(encoder.encode(write(num_tokens))) == num_tokens


def answered(sent: float, first: float, *gaps: float) -> RequestRecord:
    return RequestRecord(sent, sent, "ok", first, first + sum(gaps), 99.0, gaps=list(gaps))


def test_peaks_are_counted_as_vllm_counts_them():
    """Pieces in each second from the first request on; requests under way, one that ends making room."""
    records = [
        answered(10.5, 10.75, 0.5, 0.125),  # pieces at 0.25, 0.75 and 0.875 seconds; ends at 0.875
        answered(10.5, 11.25, 0.5),  # at 0.75 and 1.25; ends at 1.25
        answered(11.375, 11.5, 0.25, 0.25, 0.125),  # begins when the first ends; at 1, 1.25, 1.5, 1.625
        answered(11.5, 11.625),  # at 1.125, where it ends
        RequestRecord(10.0, 10.0, "broken off", 10.1, 12.0, 12.0, gaps=[0.001] * 50),
    ]
    assert bench_report.peaks(records) == (6.0, 3)
    assert bench_report.peaks(records[-1:]) == (0.0, 0)
    without_text = RequestRecord(1.0, 1.0, "ok", end=2.0)
    assert bench_report.peaks([without_text]) == (0.0, 1)


def test_the_result_has_vllms_keys_and_lines(capsys, tmp_path):
    backend, file = ScriptedBackend(), tmp_path / "serve.json"
    with serve(create_app(backend)) as url:
        port = url.rpartition(":")[2]
        asked = ["--port", port, "--num-prompts", "4", "--num-warmups", "3", "--request-rate", "1000"]
        asked += ["--burstiness", "0.5", "--dataset-name", "random", "--tokenizer", "storyteller"]
        asked += ["--input-len", "7", "--output-len", "2", "--extra-body", '{"top_p": 0.5}']
        asked += ["--endpoint", "/completions", "--result-filename", str(file), "--seed", "3"]
        shown = said(capsys, "bench", "serve", *asked)
    found = json.loads(file.read_text())
    assert len(backend.asked) == 4 + 3, "the first three are not counted"
    encoder = Tokenizer.from_pretrained("storyteller")
    assert {len(encoder.encode(prompt)) for prompt, *_ in backend.asked} == {7}
    assert {(params.top_p, params.max_tokens) for _, params, *_ in backend.asked} == {(0.5, 2)}
    assert len({prompt for prompt, *_ in backend.asked}) == 4
    assert re.fullmatch(r"\d{8}-\d{6}", found["date"])
    expected = {
        "backend": "openai", "tokenizer_id": "storyteller", "num_prompts": 4, "burstiness": 0.5,
        "request_rate": 1000.0, "completed": 4, "failed": 0,
    }  # fmt: skip
    assert found.items() >= expected.items()
    assert 1 <= found["max_concurrent_requests"] <= 4
    assert found["max_output_tokens_per_s"] > 0
    for name in ("ttft", "tpot", "itl"):
        assert found[f"std_{name}_ms"] >= 0
    peak = rf"^Peak concurrent requests: +{found['max_concurrent_requests']}\.00 *$"
    assert re.search(peak, shown, re.MULTILINE)
    for line in ("Peak output token throughput (tok/s):", "Total token throughput (tok/s):"):
        assert f"\n{line} " in shown


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_saved_result_is_named_after_the_api(tmp_path, monkeypatch, backend):
    monkeypatch.chdir(tmp_path)
    with serve(create_app(ScriptedBackend())) as url:
        asked = ["--url", url, "--backend", backend, "--endpoint", "/v1/completions", "--save-result"]
        with pytest.raises(SystemExit):  # with an error for the chat, which this path does not answer
            app(["bench", "serve", *asked, "--num-prompts", "1"], prog_name="ruvon")
    (file,) = tmp_path.glob("*.json")
    assert re.fullmatch(rf"{backend}-infqps-\d{{8}}-\d{{6}}\.json", file.name)


def test_an_endpoint_is_of_the_server_and_not_of_its_v1():
    for base in ("http://x:1", "http://x:1/", "http://x:1/v1", "http://x:1/v1/"):
        assert request_url(base, "/v1/completions") == "http://x:1/v1/completions"
    assert request_url("http://x:1/v1", None) is None


@pytest.mark.parametrize("flag", bench_serve.NEUTRAL_FLAGS)
def test_vllms_other_flags_are_accepted_where_they_ask_for_nothing(flag):
    values = [value for value in bench_serve.NEUTRAL_FLAGS[flag][0] if value is not None]
    name = flag.replace("_", "-")
    for value in values:
        given = [f"--no-{name}"] if value is False else [f"--{name}", str(value)]
        assert "--backend tgi: accepted are" in refusal("bench", "serve", *given, "--backend", "tgi")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "tgi"], "--backend tgi: accepted are openai, openai-chat"),
        (["--percentile-metrics", "ttft,speed"], "speed: accepted are ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "101"], "101: numbers from 0 to 100"),
        (["--goodput", "ttft"], "ttft:MS"),
        (["--goodput", "speed:3"], "ttft:MS"),
        (["--goodput", "ttft:nan"], "ttft:MS"),
        (["--goodput", "ttft:500", "--goodput", "ttft:700"], "each once"),
        (["--request-rate", "0"], "more than 0"),
        (["--burstiness", "0"], "--burstiness 0.0: more than 0"),
        (["--burstiness", "nan"], "--burstiness nan: more than 0"),
        (["--dataset-name", "sharegpt"], "--dataset-name sharegpt: accepted are random"),
        (["--dataset-path", "x.json"], "--dataset-path x.json is not accepted: prompts are random words"),
        (["--trust-remote-code"], "no code of a model's is run here"),
        (["--top-p", "0.9"], "--top-p 0.9: 1, 1.0 is accepted: give it as --extra-body"),
        (["--endpoint", "v1/completions"], "--endpoint v1/completions: a path such as"),
        (["--extra-body", "[1]"], "--extra-body [1]: a JSON object"),
        (["--extra-body", "{"], "--extra-body: not JSON"),
        (["--extra-body", '{"a": NaN}'], "--extra-body: not JSON"),
        (["--extra-body", '{"a": "\\ud800"}'], "--extra-body: not JSON"),
        (["--model", "a\udcff"], "--model 'a\\udcff': UTF-8 is accepted"),
        (["--served-model-name", "a\udcff"], "--served-model-name 'a\\udcff': UTF-8 is accepted"),
        (["--tokenizer", "no-such-model"], "no-such-model"),
        (["--result-filename", "/none/it.json"], "a file in a folder that is there"),
        (["--base-url", "http://127.0.0.1:9"], "ruvon serve starts a server"),
    ],
)
def test_what_is_asked_wrongly_is_said_at_once(arguments, words):
    message = refusal("bench", "serve", *arguments)
    assert message.startswith("ruvon bench serve: ")
    assert words in message


@pytest.mark.parametrize(
    "address",
    [
        ["--base-url", "http://[::1"],
        ["--base-url", "http://127.0.0.1:70000"],
        ["--base-url", "127.0.0.1:8000"],
        ["--base-url", "http://"],
        ["--base-url", "http://127.0.0.1:9", "--endpoint", "/v1/\n"],
        ["--port", "70000"],
    ],
)
def test_where_no_request_can_be_sent_is_said_before_one_is_tried(address):
    message = refusal("bench", "serve", *address, "--model", "m", "--num-prompts", "1")
    assert message.startswith("ruvon bench serve: ")
    assert "an address such as http://127.0.0.1:8000 is accepted" in message


def test_with_a_bound_a_request_that_finds_a_place_is_due_when_it_was():
    """Else a load generator that sends too late would hide its own delay."""
    due = []

    class Endpoint:
        async def ask(self, job, at):
            due.append(at)

    async def one_after_the_other():
        ask = bench_serve._with_bound(Endpoint(), 1)
        await ask(None, 1.0)
        await ask(None, 2.0)

    asyncio.run(one_after_the_other())
    assert due == [1.0, 2.0]
