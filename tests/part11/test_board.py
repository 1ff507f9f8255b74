"""The board in the terminal."""

import io
from contextlib import contextmanager

import pytest
from fastapi import FastAPI
from rich.console import Console

from engine.decoding.params import SamplingParams
from engine.scheduling.continuous import ContinuousScheduler
from engine.telemetry.top import NoAnswer, board, growth, read, sparkline, top
from tests.part04.serving import serve
from tests.part06.fakes import run_to_end


def printed(answer: dict, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(board(answer, width))
    return console.export_text().replace("│", " ")  # without the frame


ANSWER = {
    "model_name": "storyteller",
    "uptime": 1234.2,
    "window": 30,
    "now": {"running": 3, "waiting": 2, "kv_usage": 0.25, "memory": None, "memory_total": 1, "gpus": []},
    "totals": {"vllm:prompt_tokens": 4321, "vllm:generation_tokens": 98765, "vllm:num_preemptions": 7},
    "ended": {"stop": 10, "length": 5, "abort": 4, "error": 2, "reject": 1},
    "buckets": {
        "ttft": {"le": [0.1, 0.2], "cumulative": [10, 20, 20]},
        "tpot": {"le": [0.1, 0.2], "cumulative": [0, 0, 0]},
    },
    "seconds": {
        "second": [-1, 0, 1, 2],
        "generation_tokens": [0, 100, 100, 350],
        "prompt_tokens": [0, 1, 2, 3],
        "steps": [0, 10, 10, 20],
        "step_sequences": [0, 30, 30, 90],
        "running": [0, 3, 0, 3],
        "waiting": [0, 0, 0, 2],
        "kv_usage": [0, 0.5, 0.0, 0.25],
        "ttft": {
            "p50": [None, 0.05, 0.1, 0.123],
            "p95": [None, 0.1, 0.1, 0.15],
            "p99": [None, 0.1, 0.1, 0.16],
        },
        "tpot": {"p50": [None] * 4, "p95": [None] * 4, "p99": [None] * 4},
    },
}  # fmt: skip


def test_what_is_drawn_of_a_counter_is_its_growth():
    assert growth([5, 5, 8, 20]) == [0, 3, 12]
    assert growth([7]) == []


def test_a_sparkline_shows_the_last_values_and_blanks():
    assert sparkline([0, 4, 8], 3) == "▁▅█"
    assert sparkline([1, 2, 3, None, 8], 3) == "▄ █"
    assert sparkline([0.5], 4, top=1.0) == "   ▅"
    assert sparkline([], 3) == "   "
    assert sparkline([None, 0], 2) == " ▁"


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_the_board_says_what_the_answer_says(width):
    text = printed(ANSWER, width)
    assert max(map(len, text.splitlines())) <= width
    flat = " ".join(text.split())
    said = ("storyteller, up for 1,234 s", "output tokens/s 250", "running 3", "waiting 2", "cache 25%")
    for words in said:
        assert words in flat, words
    assert "requests per step 6.0" in flat


def test_percentiles_of_requests_stand_beside_the_buckets_estimates():
    text = " ".join(printed(ANSWER, 120).split())
    # 20 observations, ten up to 0.1 and ten up to 0.2: rank 10 is at 0.1, rank 19 nine tenths further.
    assert "time to first token, last 30 s 123.0 150.0 160.0" in text
    assert "by buckets 100.0 190.0 198.0" in text
    assert "time per output token, last 30 s – – – since the start, by buckets – – –" in text


def test_a_server_that_has_just_begun_can_be_shown(measured):
    _, metrics, _ = measured()
    assert "0 requests done" in " ".join(printed(metrics.snapshot()).split())


def test_the_engines_own_snapshot_can_be_shown(measured):
    engine, metrics, _ = measured(lambda cache: ContinuousScheduler(cache, 4, 16))
    for i in range(3):
        engine.add_request(str(i), "prompt", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    run_to_end(engine)
    metrics.started -= 5
    metrics.history.start -= 5
    text = " ".join(printed(metrics.snapshot()).split())
    assert "3 requests done" in text
    assert "18 prompt and 18 output tokens" in text


@contextmanager
def answering(path: str, answer):
    app = FastAPI()
    app.get(path)(lambda: answer)
    with serve(app) as url:
        yield url


def test_it_reads_a_running_server_and_ends_when_told():
    with answering("/dashboard/data", ANSWER) as url:
        assert read(url) == read(url + "/") == ANSWER
        console = Console(width=100, record=True, file=io.StringIO())
        top(url, console, enough=lambda: True)
    assert "storyteller" in console.export_text()


@pytest.mark.parametrize(("path", "answer", "said"), [
    ("/elsewhere", {}, "answers 404"),
    ("/dashboard/data", {"hello": 1}, "something else"),
    ("/dashboard/data", [1, 2], "something else"),
])  # fmt: skip
def test_a_server_without_a_dashboard_is_named(path, answer, said):
    with answering(path, answer) as url, pytest.raises(NoAnswer, match=said) as caught:
        read(url)
    assert url in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "ftp://127.0.0.1:9"])
def test_no_server_is_said_in_one_line(url):
    with pytest.raises(NoAnswer, match="dashboard/data") as caught:
        read(url)
    assert "\n" not in str(caught.value)
