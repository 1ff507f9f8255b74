"""`ruvon serve` watched from outside: by Prometheus, by a browser, by `ruvon top`."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams
from engine.execution.runner import ModelRunner
from engine.scheduling.continuous import ContinuousScheduler
from engine.telemetry.metrics import EngineMetrics
from tests.part04.serving import lasting_port
from tests.part06.fakes import CONFIG, TOKENIZER, BlockCache, FakeForward, run_to_end
from tests.part13.aheads import ahead
from tests.system.test_serve import ENVIRONMENT, ROOT, start
from tests.system.tools import browser, program  # noqa: F401

TELEMETRY = ROOT / "engine" / "telemetry"
DEADLINE = 240.0  # seconds after which what we wait for will never come: not a promise about speed


@pytest.fixture(scope="module")
def server():
    """The URL of a server that has served four requests, with a key."""
    process = start("--port", "0", "--max-num-seqs", "4", "--api-key", "secret")
    try:
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail("the server did not start")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # or its log would fill the pipe
        for _ in range(4):
            complete(found[0], max_tokens=20)
        yield found[0]
    finally:
        process.kill()
        process.wait()


def complete(url: str, **fields) -> None:
    body = {"model": "storyteller", "prompt": "Once upon a time", "ignore_eos": True} | fields
    key = {"Authorization": "Bearer secret"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=key, timeout=DEADLINE, trust_env=False)
    assert answer.status_code == 200


def get(url: str, **options) -> httpx.Response:
    return httpx.get(url, timeout=DEADLINE, trust_env=False, **options)


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"{what}: waited {DEADLINE:.0f} s"
        time.sleep(0.1)


def test_promtool_reads_the_metrics_and_complains_of_vllms_names_alone(server):
    text = get(f"{server}/metrics").text
    done = subprocess.run(
        [program("promtool"), "check", "metrics"],
        input=text,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode in (0, 3), f"promtool cannot read it: {done.stderr[:500]}"  # 3: it has opinions
    opinions = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    ours = [
        line
        for line in opinions
        if "metric names should not contain ':'" not in line  # every name of vLLM's does
        and not re.match(r'vllm:iteration_tokens_total non-counter metrics should not have "_total"', line)
    ]
    assert ours == []


def test_promtool_accepts_the_configuration():
    done = subprocess.run(
        [program("promtool"), "check", "config", "--syntax-only", str(TELEMETRY / "prometheus.yml")],
        capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[:500]


@contextmanager
def prometheus(target: str, folder: Path):
    """A Prometheus of its own that scrapes `target` each second; gives its URL."""
    address = f"127.0.0.1:{lasting_port()}"
    config = (TELEMETRY / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:8000", target.removeprefix("http://")).replace("5s", "1s")
    (folder / "prometheus.yml").write_text(config)
    process = subprocess.Popen(
        [
            program("prometheus"), f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}", "--log.level=error",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(DEADLINE)


def is_ready(url: str) -> bool:
    try:
        return get(f"{url}/-/ready").status_code == 200
    except httpx.HTTPError:  # it does not listen yet
        return False


def test_a_real_prometheus_scrapes_it_and_answers_every_panel_of_the_board(server, tmp_path):
    panels = json.loads((TELEMETRY / "grafana.json").read_text())["panels"]
    with prometheus(server, tmp_path) as url:

        def ask(query: str) -> list:
            answer = get(f"{url}/api/v1/query", params={"query": query})
            assert answer.status_code == 200, f"{query}: {answer.text[:300]}"
            return answer.json()["data"]["result"]

        wait_for(lambda: is_ready(url), "Prometheus itself")
        wait_for(lambda: ask("vllm:generation_tokens_total >= 80"), "the first scrape")
        (sample,) = ask("vllm:generation_tokens_total")
        assert sample["metric"]["model_name"] == "storyteller"
        assert sample["metric"]["engine"] == "0"
        before = float(sample["value"][1])
        complete(server, max_tokens=30)
        wait_for(lambda: ask(f"vllm:generation_tokens_total >= {before + 30}"), "a scrape after a request")
        wait_for(lambda: ask("increase(vllm:generation_tokens_total[2m]) > 0"), "an increase")
        empty = []
        for panel in panels:
            for target in panel["targets"]:
                query = target["expr"].replace("$__rate_interval", "2m")
                query = query.replace("$model_name", ".*").replace("$job", ".*")
                if not ask(query) and "gpu" not in query:
                    empty.append(query)
        assert empty == []
        assert ask('up{job="ruvon"}')[0]["value"][1] == "1"


# --- the page, in a browser ---------------------------------------------------------------------------------


@pytest.fixture
def page(browser, server):  # noqa: F811
    """page(**options of a browser's context) -> the dashboard once it shows numbers, without a complaint."""
    contexts, complaints, hosts = [], [], set()

    def open_page(**options):
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(DEADLINE * 1e3)
        one = context.new_page()
        one.on("console", lambda said: complaints.append((said.type, said.text)))
        one.on("pageerror", lambda error: complaints.append(("error", str(error))))
        one.on("request", lambda request: hosts.add(request.url.split(",")[0].split("/")[:3][-1]))
        one.goto(f"{server}/dashboard")
        one.wait_for_selector("#status[data-state=live]")
        one.wait_for_selector("#charts path.curve", state="attached")
        return one

    yield open_page
    for context in contexts:
        context.close()
    assert [said for said in complaints if said[0] in ("error", "warning") and "503" not in said[1]] == []
    assert hosts - {"data:"} == {server.removeprefix("http://")}


def test_the_page_shows_what_the_engine_did(page, server):
    one = page()
    assert one.title() == "ruvon: live"
    assert one.inner_text("#model") == "storyteller"
    heads, notes = (one.locator(f".tile {part}").all_inner_texts() for part in ("h2", ".note"))
    tiles = dict(zip(heads, notes, strict=True))
    total = get(f"{server}/dashboard/data").json()["totals"]["vllm:generation_tokens"]
    assert tiles["Output tokens/s"] == f"{total:,} in all"
    assert one.locator(".chart h2").all_inner_texts() == [
        "Output tokens per second", "Time to first token", "Time per output token", "Requests",
        "Requests per step, mean", "KV cache in use",
    ]  # fmt: skip
    ended = get(f"{server}/dashboard/data").json()["ended"]
    assert one.inner_text("#early").endswith(f": {ended['abort']} aborted, 0 failed, 0 refused.")
    complete(server, max_tokens=25)
    one.wait_for_function(
        "words => [...document.querySelectorAll('.tile .note')].some(note => note.textContent === words)",
        arg=f"{total + 25:,} in all",
    )


def test_a_tile_shows_the_mean_of_five_seconds_and_the_moment_of_the_legend(page, server):
    data = get(f"{server}/dashboard/data").json()
    columns = data["seconds"]
    columns["second"] = list(range(-1, 9))
    for name in (
        "generation_tokens",
        "prompt_tokens",
        "steps",
        "step_sequences",
        "running",
        "waiting",
        "kv_usage",
    ):
        columns[name] = [0] * 10
    for kind in ("ttft", "tpot"):
        columns[kind] = {percentile: [None] * 10 for percentile in columns[kind]}
    columns["generation_tokens"][-1], columns["running"][-1], columns["waiting"][-1] = 50, 3, 2
    data["now"] |= {"running": 9, "waiting": 9}
    one = page()
    one.route("**/dashboard/data", lambda route: route.fulfill(json=data))
    one.wait_for_function(
        "() => { const tiles = [...document.querySelectorAll('.tile')].map(tile => tile.textContent);"
        " return tiles.some(text => text.startsWith('Output tokens/s10'))"
        " && tiles.some(text => text.startsWith('Requests3 running2 waiting')); }"
    )
    one.unroute("**/dashboard/data")


def test_pointing_at_a_second_shows_its_values_in_every_chart(page):
    one = page()
    chart = one.locator("svg").first
    box = chart.bounding_box()
    before = one.locator(".chart").last.bounding_box()
    one.mouse.move(box["x"] + box["width"] - 12, box["y"] + box["height"] / 2)
    one.wait_for_selector(".chart b:not(:empty)")
    words = one.locator(".chart b").all_inner_texts()
    assert len(words) == 6
    assert all(re.fullmatch(r"\d+ s ago", said) for said in words)
    assert one.locator(".chart").last.bounding_box() == before, "pointing moves nothing"
    one.mouse.move(2, 2)
    one.wait_for_selector(".chart b:not(:empty)", state="detached")


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_runs_over_the_edge_at_any_width(page, width):
    one = page(viewport={"width": width, "height": 800})
    assert one.evaluate("document.documentElement.scrollWidth") <= width
    clipped = one.evaluate(
        "[...document.querySelectorAll('.tile > *')].filter(e => e.scrollWidth > e.clientWidth + 1)"
        ".map(e => e.textContent)"
    )
    assert clipped == []


def test_it_is_dark_where_the_reader_wants_it_dark_and_legible_in_both(page):
    def contrast(one) -> float:
        """WCAG's ratio of the soft text on a card."""
        colours = one.evaluate(
            "[getComputedStyle(document.querySelector('.tile h2')).color,"
            " getComputedStyle(document.querySelector('.tile')).backgroundColor]"
        )
        light = []
        for colour in colours:
            parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
            linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
            light.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
        return (max(light) + 0.05) / (min(light) + 0.05)

    grounds = {}
    for scheme in ("light", "dark"):
        one = page(color_scheme=scheme)
        assert contrast(one) >= 4.5
        grounds[scheme] = one.evaluate("getComputedStyle(document.body).backgroundColor")
    assert grounds["light"] != grounds["dark"]


def test_the_page_says_when_the_server_no_longer_answers(page):
    one = page()
    one.route("**/dashboard/data", lambda route: route.fulfill(status=503, body="{}"))
    one.wait_for_selector("#status[data-state=lost]")
    assert "503" in one.inner_text("#status")
    assert float(one.evaluate("getComputedStyle(document.querySelector('main')).opacity")) < 1, (
        "what is shown is no longer how things are, and must not look so"
    )
    one.unroute("**/dashboard/data")
    one.wait_for_selector("#status[data-state=live]")


# --- the board in the terminal, and the rest ----------------------------------------------------------------


def top(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "engine.cli.main", "top", *arguments],
        cwd=ROOT, env=ENVIRONMENT | {"COLUMNS": "100"}, capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip


def test_top_shows_a_running_server(server):
    done = top(server, "--once")
    assert done.returncode == 0, done.stderr
    assert "storyteller, up for" in done.stdout
    assert "output tokens/s" in done.stdout
    assert done.stdout.endswith("╯\n")


def test_top_says_in_one_line_that_nobody_answers():
    done = top("http://127.0.0.1:9", "--once")
    assert done.returncode == 1
    assert done.stderr.startswith("ruvon top: http://127.0.0.1:9/dashboard/data: ")
    assert done.stderr.endswith("; ruvon serve starts a server\n")
    assert done.stderr.count("\n") == 1


def test_metrics_are_open_and_the_rest_is_not(server):
    assert get(f"{server}/metrics").status_code == get(f"{server}/dashboard").status_code == 200
    assert get(f"{server}/v1/models").status_code == 401
    assert get(f"{server}/metrics", headers={"host": "evil.example"}).status_code == 400


def test_one_step_ahead_counts_the_same():
    """Steps that land late (Part 13's seam) leave every count as it was."""
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    counted = []
    for runs_ahead in (False, True):
        cache = BlockCache(64, 16)
        if runs_ahead:
            engine = ahead(cache, seats=4, budget=16)
        else:
            scheduler = ContinuousScheduler(cache, 4, 16)
            engine = LLMEngine(TOKENIZER, CONFIG, scheduler, ModelRunner([FakeForward(cache)]))
        metrics = EngineMetrics(engine, "fake")
        for name in "abcdef":
            engine.add_request(name, f"prompt {name}", params)
        run_to_end(engine)
        names = ("vllm:generation_tokens", "vllm:prompt_tokens")
        counted.append([*(metrics.counters[name] for name in names), dict(metrics.succeeded)])
    assert counted[0] == counted[1] == [42, 48, {"stop": 0, "length": 6}]
