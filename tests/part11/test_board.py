"""The board in the terminal."""

import io
import math
import socket
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.responses import Response
from rich.console import Console

from engine.client import top as board_module
from engine.client.top import NoAnswer, dashboard, growth, read_dashboard, sparkline, top
from engine.client.untrusted import ByteLimit, token_count
from engine.decoding.params import SamplingParams
from engine.scheduling.continuous import ContinuousScheduler
from tests.part04.serving import serve
from tests.part06.fakes import run_to_end


def printed(answer: dict, width: int = 100) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(dashboard(answer, width))
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
    assert sparkline([0.5], 4, highest=1.0) == "   ▅"
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
        assert read_dashboard(url) == read_dashboard(url + "/") == ANSWER
        console = Console(width=100, record=True, file=io.StringIO())
        top(url, console, enough=lambda: True)
    assert "storyteller" in console.export_text()
    assert console.file.getvalue().endswith("╯\n"), "what comes next in a pipe begins a line of its own"


def test_a_server_of_this_machine_is_asked_without_a_proxy(monkeypatch):
    """One that the environment names knows no server that listens on 127.0.0.1 alone."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody is
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with answering("/dashboard/data", ANSWER) as url:
        assert read_dashboard(url) == ANSWER
    with pytest.raises(NoAnswer, match="Connection refused"):
        read_dashboard("http://elsewhere.example")


@pytest.mark.parametrize(("path", "answer", "said"), [
    ("/elsewhere", {}, "answers 404: it has no dashboard"),
    ("/dashboard/data", Response(status_code=401), "answers 401$"),
    ("/dashboard/data", {"hello": 1}, "does not answer with a dashboard"),
    ("/dashboard/data", [1, 2], "does not answer with a dashboard"),
    ("/dashboard/data", Response(b"[" * 100_000), "nested too deeply"),
    ("/dashboard/data", Response(b'{"seconds": ' + b"9" * 5000), "limit"),
])  # fmt: skip
def test_a_server_without_a_dashboard_is_named(path, answer, said):
    with answering(path, answer) as url, pytest.raises(NoAnswer, match=said) as caught:
        read_dashboard(url)
    assert url in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "ftp://127.0.0.1:9"])
def test_no_server_is_said_in_one_line(url):
    with pytest.raises(NoAnswer, match="dashboard/data") as caught:
        read_dashboard(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sent", [
    b"\x00\x1b[31mno HTTP\r\n\r\n",
    b"HTTP/1.1 99999 x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200,
    b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000,
], ids=lambda sent: ascii(sent)[-20:])  # fmt: skip
def test_what_is_no_http_is_no_answer(sent):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def say() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(sent)

        saying = threading.Thread(target=say)
        saying.start()
        with pytest.raises(NoAnswer):
            read_dashboard(f"http://127.0.0.1:{server.getsockname()[1]}")
        saying.join()


@pytest.mark.parametrize(
    ("begin", "go_on"),
    [(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), (b"HTTP/1.1 200 OK\r\ncontent-length: 99999\r\n\r\n", b" ")],
    ids=["100 Continue without end", "a body that drips"],
)
def test_an_answer_that_does_not_end_in_time_is_none(monkeypatch, begin, go_on):
    """Each read of the socket was in time: it was waited for as long as the server went on."""
    monkeypatch.setattr(board_module, "TIMEOUT", 0.5)
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def say() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.recv(1000)
                connection.sendall(begin)
                while not over.wait(0.01):
                    connection.sendall(go_on)

        saying = threading.Thread(target=say)
        saying.start()
        try:
            with pytest.raises(NoAnswer, match=r"has not answered in 0\.5 s"):
                read_dashboard(f"http://127.0.0.1:{server.getsockname()[1]}")
        finally:
            over.set()
            saying.join()


def test_an_answer_without_end_is_read_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(board_module, "ByteLimit", lambda: ByteLimit(10))
    with answering("/dashboard/data", ANSWER) as url, pytest.raises(NoAnswer, match="longer than"):
        read_dashboard(url)


ODD = {
    "running": {"now": {**ANSWER["now"], "running": "\x1b[2J"}},
    "nothing now": {"now": {}},
    "usage": {"now": {**ANSWER["now"], "kv_usage": 10**400}},
    "no number": {"seconds": {**ANSWER["seconds"], "kv_usage": [math.nan] * 4}},
    "lists": {"seconds": []},
    "totals": {"totals": None},
    "uptime": {"uptime": "long"},
    "window": {"window": "\x1b[2J"},
    "panels": {"panels": [5]},
}


@pytest.mark.parametrize("name", ODD)
def test_data_of_another_shape_are_no_dashboards(monkeypatch, name):
    monkeypatch.setattr(board_module, "read_dashboard", lambda url: ANSWER | ODD[name])
    with pytest.raises(NoAnswer, match="does not answer with a dashboard"):
        top("http://there", Console(width=100, file=io.StringIO()), enough=lambda: True)


def test_what_a_server_says_commands_no_terminal():
    panel = {"title": "\x1b]0;x\x07", "value": "[red]", "note": "\ud800"}
    text = printed(ANSWER | {"model_name": "[/b]\x1b[2J", "panels": [panel]})
    assert not set(text) & {"\x1b", "\x07", "\ud800"}
    assert "[/b]" in text
    assert "[red]" in text


@pytest.mark.parametrize(("width", "num_columns"), [(10, 4), (44, 4), (45, 5), (100, 60)])
def test_bars_have_what_the_names_leave_and_four_columns_at_least(width, num_columns):
    bars = board_module._bars(ANSWER, width).columns[2].cells
    assert {len(bar) for bar in bars} == {num_columns}


def test_a_number_of_tokens_is_whole_and_from_0_to_the_last_that_json_readers_agree_on():
    assert [token_count(value) for value in (None, 0, 2**53)] == [None, 0, 2**53]
    for value in (-1, 2**53 + 1, 1.0, True, "1"):
        with pytest.raises(ValueError, match="no whole number from 0 to 9007199254740992"):
            token_count(value)


def test_it_is_renewed_a_second_after_each_answer_and_by_nothing_else(monkeypatch):
    happened, before = [], set(threading.enumerate())
    monkeypatch.setattr(board_module, "read_dashboard", lambda url: happened.append("answer") or ANSWER)
    monkeypatch.setattr(board_module, "time", SimpleNamespace(sleep=happened.append))

    def enough() -> bool:
        assert set(threading.enumerate()) <= before, "a thread would draw the same four times a second"
        return happened.count("answer") == 3

    top("http://there", Console(width=100, file=io.StringIO()), enough)
    assert happened == ["answer", 1, "answer", 1, "answer"]


def test_the_board_fits_sixty_columns():
    lines = [line[2:].rstrip() for line in printed(ANSWER, 60).splitlines()]  # [2:]: behind the frame
    assert lines[1:12] == [
        "output tokens/s         250                   ▄▁█",
        "running                   3                   █▁█",
        "waiting                   2                   ▁▁█",
        "requests per step       6.0                   ▅ █",
        "KV cache                25%                   ▅▁▃",
        "",
        "milliseconds                         p50     p95     p99",
        "time to first token, last 30 s     123.0   150.0   160.0",
        "  since the start, by buckets      100.0   190.0   198.0",
        "time per output token, last 30 s       –       –       –",
        "  since the start, by buckets          –       –       –",
    ], "a line for each row, two or three spaces between columns and none at the edges: so no cell is broken"


def test_a_port_above_the_last_is_not_taken_modulo_65536():
    with answering("/dashboard/data", ANSWER) as url:
        host, _, port = url.rpartition(":")
        with pytest.raises(NoAnswer, match="Port out of range"):
            read_dashboard(f"{host}:{int(port) + 65536}")
