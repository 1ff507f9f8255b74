"""`ruvon serve --price-per-hour`: what answers cost, where that is shown, and a log that adds up."""

import csv
import re
import threading
from fractions import Fraction

import httpx
import openai
import pytest

from tests.system.ready import ruvon
from tests.system.test_serve import start
from tests.system.tools import DEADLINE, browser  # noqa: F401

PRICE = Fraction("2.50")
API_PRICE = "0.10,0.40,1.60"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("costs") / "costs.csv"


@pytest.fixture(scope="module")
def server(log):
    """Its URL; stopped as Ctrl-C stops it, and then its log is complete."""
    process = start(
        "--port", "0", "--max-num-seqs", "4", "--price-per-hour", "2.50", "--api-price", API_PRICE,
        "--cost-log", str(log),
    )  # fmt: skip
    for line in process.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            break
    else:
        pytest.fail("the server did not start")
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stdout), daemon=True)
    reader.start()  # or its log would fill the pipe
    try:
        yield found[0]
        process.send_signal(2)
        assert process.wait(DEADLINE) == 0
        reader.join(DEADLINE)
        assert "Traceback" not in "".join(said)
        with open(log, newline="") as file:
            lines = list(csv.DictReader(file))
        assert {line["reason"] for line in lines if not line["request_id"]} >= {"idle"}, "the log was closed"
        total = sum(int(line["ns"]) for line in lines)
        dollars = sum(Fraction(line["dollars"]) for line in lines)
        assert abs(dollars - PRICE * total / (3600 * 10**9)) < Fraction(len(lines), 10**12)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="unused", max_retries=0)


def adds_up(usage) -> None:
    cost, details = usage.cost, usage.cost_details
    parts = sum(details[f"{kind}_cost"] for kind in ("cached", "input", "output"))
    assert cost == pytest.approx(parts, abs=3e-12)
    assert cost == pytest.approx(float(PRICE) * details["device_ns"] / 3600e9, abs=1e-12)
    cached = usage.prompt_tokens_details.cached_tokens
    tokens = cached, usage.prompt_tokens - cached, usage.completion_tokens
    api = sum(Fraction(price) * many for price, many in zip(API_PRICE.split(","), tokens, strict=True))
    assert details["api_cost"] == pytest.approx(float(api / 10**6), abs=1e-12), "the tokens of the usage"


def test_completions_chats_and_streams_say_what_they_cost(client):
    ask = {"model": "storyteller", "max_tokens": 12, "temperature": 0}
    usage = [client.completions.create(**ask, prompt="Once upon a time").usage]
    messages = [{"role": "user", "content": "Tell me a story about a dog."}]
    usage.append(client.chat.completions.create(**ask, messages=messages).usage)
    usage.append(client.completions.create(**ask, prompt="Once there was a dog who", n=3).usage)
    streamed = ask | {"stream": True, "stream_options": {"include_usage": True}}
    usage.append(list(client.completions.create(**streamed, prompt="The dog"))[-1].usage)
    usage.append(list(client.chat.completions.create(**streamed, messages=messages))[-1].usage)
    for one in usage:
        adds_up(one)


def test_a_known_beginning_is_cached_in_usage_and_in_the_log(client, log):
    ask = {"model": "storyteller", "prompt": "The cat sat on the mat. " * 12, "max_tokens": 4}
    first, second = (client.completions.create(**ask) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    found = second.usage.prompt_tokens_details.cached_tokens
    assert found >= 16
    with open(log, newline="") as file:
        line = next(line for line in csv.DictReader(file) if line["request_id"].startswith(second.id))
    assert int(line["cached_tokens"]) == found
    assert int(line["input_tokens"]) == second.usage.prompt_tokens - found
    assert int(line["cached_ns"]) > 0


def test_prometheus_has_dollars(server, client):
    client.completions.create(model="storyteller", prompt="The dog", max_tokens=4)
    text = httpx.get(f"{server}/metrics", timeout=DEADLINE, trust_env=False).text
    for kind in ("input", "output", "idle"):
        (value,) = re.findall(rf'^ruvon:cost_dollars_total{{.*kind="{kind}".*}} (\S+)$', text, re.MULTILINE)
        assert float(value) > 0
    assert re.search(r"^ruvon:price_dollars_per_hour{.*} 2\.5$", text, re.MULTILINE)


@pytest.mark.parametrize("width", [320, 1220])
def test_the_page_shows_it(server, client, browser, width):  # noqa: F811
    client.completions.create(model="storyteller", prompt="The dog", max_tokens=4)
    context = browser.new_context(viewport={"width": width, "height": 800})
    try:
        page = context.new_page()
        page.set_default_timeout(DEADLINE * 1e3)
        complaints = []
        page.on("console", lambda said: complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{server}/dashboard")
        page.wait_for_selector("#panels .panel")
        assert page.inner_text("#panels h2") == "What this run costs"
        assert re.fullmatch(r"\$[\d.,]+", page.inner_text("#panels .value"))
        assert "per output token, idle time included" in page.inner_text("#panels .note")
        labels = page.locator("#panels li > span:first-child").all_inner_texts()
        assert {"prompt tokens", "output tokens", "idle"} <= set(labels)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert complaints == []
    finally:
        context.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--price-per-hour", "free"], "price_per_hour='free': dollars such as 2.50 are accepted"),
        (["--api-price", "1,2,3"], "api_price='1,2,3' needs price_per_hour"),
        (["--price-per-hour", "1", "--cost-log", "/nowhere/costs.csv"], "cost_log='/nowhere/costs.csv'"),
    ],
)
def test_what_an_operator_gets_wrong_is_said_in_one_line(arguments, says):
    done = ruvon("serve", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"ruvon serve: {says}")
    assert done.stderr.count("\n") == 1
