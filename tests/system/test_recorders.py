"""What benchmarks share: rounds and their spread, a server of its own, texts, points that make a curve."""

from functools import partial
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI

from benchmarks import part11_listening, part15_goodput
from benchmarks.load_process import server_process
from benchmarks.record import corpus, middle, quartiles
from benchmarks.workloads import faster_threads, ratios, rounds
from engine.requests.listeners import Listener, Listeners


def test_a_cell_has_the_median_of_the_rounds_and_the_least_and_the_most():
    assert middle([3.0, 1.0, 2.5, 2.0, 9.0]) == "2.5 (1 to 9)"
    assert middle([1234.0]) == "1,234 (1,234 to 1,234)"


def test_a_record_keeps_median_and_quartiles():
    assert quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == {"median": 3.0, "first": 2.0, "third": 4.0}
    assert quartiles([7.0]) == {"median": 7.0, "first": 7.0, "third": 7.0}


def test_in_each_round_every_side_has_its_turn():
    turns: list[str] = []

    def side(name: str) -> float:
        turns.append(name)
        return float(len(turns))

    assert rounds({name: partial(side, name) for name in "ab"}, 2) == {"a": [1.0, 3.0], "b": [2.0, 4.0]}
    assert turns == ["a", "b", "a", "b"]


def test_a_ratio_is_of_two_times_of_one_round():
    assert ratios({"a": [2.0, 10.0], "b": [1.0, 20.0]}, "a") == {"a": [1.0, 1.0], "b": [0.5, 2.0]}


def test_each_side_gets_the_number_of_threads_with_which_it_is_faster():
    seconds = {("a", 1): 3.0, ("a", 2): 2.0, ("b", 1): 4.0, ("b", 2): 5.0}
    assert faster_threads("ab", (1, 2), lambda side, n: seconds[side, n]) == {"a": 2, "b": 1}


def test_a_text_that_is_not_there_is_named_in_one_line(tmp_path):
    (tmp_path / "here.txt").write_text("é", encoding="utf-8")
    assert corpus(tmp_path / "here.txt") == "é"
    with pytest.raises(SystemExit, match=r"needs the text gone\.txt, .* RUVON_DATA") as ended:
        corpus(tmp_path / "gone.txt")
    assert "\n" not in str(ended.value)


def test_a_server_of_its_own_answers_and_ends_with_the_block():
    with server_process(partial(FastAPI, title="a benchmark's")) as url:
        assert httpx.get(f"{url}/openapi.json", timeout=60).json()["info"]["title"] == "a benchmark's"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/openapi.json", timeout=60)


def test_a_server_that_cannot_start_is_not_waited_for():
    with pytest.raises(EOFError), server_process(partial(int, "no app")):  # type: ignore[arg-type]
        pass


@pytest.fixture
def points(monkeypatch) -> dict[str, dict]:
    """The records of goodput's points; what is derived from them goes to "derived"."""
    found: dict[str, dict] = {
        f"part15_goodput_{percent}": {
            "machine": {"cpu": "one"},
            "figures": {"percent": percent},
            "tables": {"in_time": {"columns": ["asked for", "a bound"], "rows": [[percent, "5 (4 to 6)"]]}},
        }
        for percent in part15_goodput.PERCENTS
    }

    def derive(name: str, source: str, question: str, figures: dict, tables: dict) -> None:
        found["derived"] = {"name": name, "figures": figures, "tables": tables}

    monkeypatch.setattr(part15_goodput, "read_record", found.__getitem__)
    monkeypatch.setattr(part15_goodput, "derive", derive)
    monkeypatch.setattr(part15_goodput, "show", lambda path, tables: None)
    return found


def test_the_points_of_goodput_make_one_table(points):
    part15_goodput.together()
    derived = points["derived"]
    assert derived["name"] == "part15_goodput"
    assert derived["tables"]["in_time"]["columns"] == ["asked for", "a bound"]
    assert [row[0] for row in derived["tables"]["in_time"]["rows"]] == list(part15_goodput.PERCENTS)
    assert set(derived["figures"]) == {str(percent) for percent in part15_goodput.PERCENTS}


def test_points_of_two_machines_make_none(points):
    points[f"part15_goodput_{part15_goodput.PERCENTS[-1]}"]["machine"] = {"cpu": "another"}
    with pytest.raises(ValueError, match="of several machines"):
        part15_goodput.together()
    assert "derived" not in points


class GrowingSteps:
    """Stands for an engine: each step takes longer than the one before, and 5 more with listeners."""

    def __init__(self, clock: list[float]) -> None:
        self.listeners = Listeners([Listener()])
        self.scheduler = SimpleNamespace(listeners=self.listeners)
        self.clock, self.steps, self.requests = clock, 0, []

    def add_request(self, *request: object) -> None:
        self.requests.append(request)

    def has_unfinished_requests(self) -> bool:
        return False

    def step(self) -> None:
        self.steps += 1
        assert self.scheduler.listeners is self.listeners
        self.clock[0] += self.steps + (5 if self.listeners else 0)


def test_what_a_listener_costs_is_not_mixed_up_with_steps_that_grow(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(part11_listening.time, "process_time", lambda: clock[0])
    engine = GrowingSteps(clock)
    listening, silent = part11_listening.take_turns(engine, sequences=2)
    assert len(listening) == len(silent) >= 5
    assert [a - b for a, b in zip(listening, silent, strict=True)] == pytest.approx([5.0] * len(listening))
    assert engine.steps < part11_listening.TOKENS, "nobody has ended"
    assert part11_listening.TOKENS - engine.steps <= 2 * part11_listening.WINDOW, "room for no more windows"
    assert [request[2].max_tokens for request in engine.requests] == [part11_listening.TOKENS] * 2
    assert engine.listeners, "it listens again"
    assert engine.scheduler.listeners is engine.listeners
