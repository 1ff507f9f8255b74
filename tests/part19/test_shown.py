"""Where the cost is shown: the dashboard's data, the terminal's board, Prometheus."""

import io

import pytest
from prometheus_client import generate_latest
from rich.console import Console

from engine.client.top import dashboard
from engine.core.engine_thread import EngineThread
from engine.decoding.params import SamplingParams
from engine.scheduling.continuous import ContinuousScheduler
from engine.server.app import create_app
from engine.server.telemetry_routes import OPEN_PATHS, telemetry_routes
from engine.telemetry.bill import PAID_KINDS, UNPAID_KINDS, ApiPrice, Bill
from engine.telemetry.cost_accounting import CostAccounting, parse_weights
from engine.telemetry.cost_log import COLUMNS
from engine.telemetry.cost_metrics import CostMetrics
from engine.telemetry.metrics import EngineMetrics
from engine.telemetry.shares import Weights
from tests.part04.serving import http, serve
from tests.part06.fakes import run_to_end
from tests.part19.metering import DOLLAR_A_SECOND

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def shown(metered):
    """(an engine, its meter, its metrics), with an API's price."""
    engine, meter = metered(lambda cache: ContinuousScheduler(cache, 4, 16))
    meter.api_price = ApiPrice.parse("1,10,100")
    metrics = EngineMetrics(engine, "fake")
    CostMetrics(meter, metrics)
    return engine, meter, metrics


def test_prometheus_gets_dollars_and_tokens_by_kind(shown):
    engine, meter, metrics = shown
    engine.add_request("a", "prompt", GREEDY)
    run_to_end(engine)

    def read(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(name, {"model_name": "fake", "engine": "0", **labels})

    for kind, tokens in {"cached": 0, "input": 6, "output": 6}.items():
        assert read("ruvon:cost_tokens_total", kind=kind) == tokens
    bill = meter.read()
    for kind in PAID_KINDS:
        assert read("ruvon:cost_dollars_total", kind=kind) == float(bill.price.of(bill.ns[kind]))
    assert read("ruvon:cost_dollars_total", kind="idle") > 0
    assert read("ruvon:cost_dollars_total", kind="under_way") is None, "a counter may not go down"
    assert read("ruvon:api_cost_dollars_total") == pytest.approx((6 * 10 + 6 * 100) / 1e6)
    assert read("ruvon:price_dollars_per_hour") == 3600
    for line in generate_latest(metrics.registry).decode().splitlines():
        assert line.startswith(("#", "vllm:", "ruvon:", "process_")), line


def test_the_board_in_the_terminal_has_a_line(shown):
    engine, _, metrics = shown
    engine.add_request("a", "prompt", GREEDY)
    run_to_end(engine)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(dashboard(metrics.snapshot(), 200))
    text = " ".join(console.export_text().split())
    assert "What this run costs: $" in text
    assert "per output token, idle time included" in text


def test_the_dashboards_data_has_a_panel(shown):
    engine, meter, metrics = shown
    app = create_app(EngineThread(engine, "fake"), [telemetry_routes(metrics)], open_paths=OPEN_PATHS)
    body = {"model": "fake", "prompt": "hello", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    with serve(app) as url, http(url) as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        (panel,) = client.get("/dashboard/data").json()["panels"]
    assert panel["title"] == "What this run costs"
    assert panel["value"].startswith("$")
    assert "per output token, idle time included" in panel["note"]
    assert "the same tokens at the API's price: $" in panel["note"]
    labels, shares, amounts, colours = zip(*panel["rows"], strict=True)
    assert set(labels) >= {"prompt tokens", "output tokens", "idle"}
    of_nobody = {label for label, colour in zip(labels, colours, strict=True) if colour == "b"}
    assert "idle" in of_nobody, "what no request pays for has a colour of its own"
    assert not of_nobody & {"prompt tokens", "output tokens"}
    assert 0 < sum(shares) <= 1 + 1e-9
    assert all(amount.startswith("$") for amount in amounts)
    assert meter.read().num_ended == 1


def test_the_panel_in_numbers(shown, monkeypatch):
    _, meter, metrics = shown
    ns = dict.fromkeys([*PAID_KINDS, *UNPAID_KINDS], 0)
    ns |= {"output": 10**9, "idle": 2 * 10**9, "under_way": 10**9}
    bill = Bill(DOLLAR_A_SECOND, ns, {"cached": 0, "input": 0, "output": 100}, 1)
    monkeypatch.setattr(meter, "read", lambda: bill)
    (draw,) = metrics.panels
    assert draw()["value"] == "$4.00"
    assert draw()["rows"] == [["output tokens", 0.25, "$1.00", "a"], ["idle", 0.5, "$2.00", "b"]], (
        "what is under way is nobody's yet, and no row"
    )
    assert draw()["note"] == (
        "$0.0400 per output token, idle time included ($40,000.00 a million); 25% of the time is paid by "
        "requests; the same tokens at the API's price: $0.0100"
    )


# What an operator asks for.


def test_without_a_price_nothing_is_metered():
    assert CostAccounting.parse(None) is None


@pytest.mark.parametrize("name", ["api_price", "cost_log", "cost_weights"])
def test_what_needs_a_price_says_so(name):
    with pytest.raises(ValueError, match=rf"{name}='1,2,3' needs price_per_hour"):
        CostAccounting.parse(None, **{name: "1,2,3"})


def test_weights_as_an_operator_writes_them():
    assert parse_weights("10, 20,0") == Weights(10, 20, 0)
    for wrong in ("1,2", "1,2,3,4", "1.5,2,3", "-1,2,3", "a,b,c", "9" * 5000 + ",1,1"):
        with pytest.raises(ValueError, match="cost_weights="):
            parse_weights(wrong)
    with pytest.raises(ValueError, match="weight input=0"):
        parse_weights("0,1,1")


def test_from_the_words_of_a_command_line_to_the_last_line_of_the_log(fake_engine, tmp_path):
    costs = CostAccounting.parse("2.50", "1,10,100", str(tmp_path / "costs.csv"), "1,2,3")
    assert costs.weights == Weights(1, 2, 3)
    engine = fake_engine()
    meter = costs.begin(engine, EngineMetrics(engine, "fake"))
    assert (meter.weights, meter.api_price) == (Weights(1, 2, 3), ApiPrice.parse("1,10,100"))
    engine.add_request("a", "prompt", GREEDY)
    run_to_end(engine)
    engine.add_request("b", "prompt", GREEDY)
    costs.end()
    engine.abort_request("b")
    header, request, *rest = (tmp_path / "costs.csv").read_text().splitlines()
    assert header == ",".join(COLUMNS)
    assert request.split(",")[1:6] == ["a", "length", "0", "6", "6"]
    assert float(request.split(",")[-1]) == 0.00066, "the API's price for it"
    assert [line.split(",")[2] for line in rest][:2] == ["unfinished", "idle"]
    logged = sum(int(line.split(",")[COLUMNS.index("ns")]) for line in [request, *rest])
    assert 0 < logged <= meter.read().total_ns, "all the time until the log was closed"
