"""`--trace FILE` and `ruvon trace FILE`: a server's trace, whole or after a kill, and an `LLM`'s."""

import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice, pairwise

import httpx
import pytest

from engine import LLM, EngineArgs, SamplingParams
from engine.core.engine_thread import EngineThread
from engine.speculation.measuring import ALWAYS_DRAFT
from engine.telemetry.trace_events import DEVICE
from engine.wiring.compose import build_engine
from engine.wiring.devices import load_devices
from engine.wiring.replay import recording_header
from tests.part06.fakes import ask
from tests.part11.traces import counted, lives, names, num_output_tokens, read_cut_off, read_strictly, steps
from tests.system.ready import ruvon
from tests.system.test_commands import refusal, said
from tests.system.test_serve import start
from tests.system.tools import DEADLINE

BUDGET = 64
LONG = "Once upon a time there was a dog who had a red ball. " * 12  # several chunks
ASK = {"model": "storyteller", "temperature": 0}


@contextmanager
def serving(file, *flags: str):
    """A server that writes a trace: (its process, its URL)."""
    process = start("--port", "0", "--max-num-seqs", "3", "--max-num-batched-tokens", str(BUDGET),
                    "--trace", str(file), *flags)  # fmt: skip
    try:
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            pytest.fail("the server did not start")
        threading.Thread(target=process.stdout.read, daemon=True).start()  # or its log would fill the pipe
        yield process, found[0]
    finally:
        process.kill()
        process.wait()


def crowd(url: str) -> dict[str, int]:
    """Ask for a mix: a long prompt, streams, samples, and somebody who leaves. The id of each answer that was
    read to its end, and how many tokens it has.
    """

    def complete(fields: dict) -> tuple[str, int]:
        answer = client.post("/v1/completions", json=ASK | fields)
        return answer.json()["id"], answer.json()["usage"]["completion_tokens"]

    def stream(num_lines: int | None) -> tuple[str, int]:
        fields = {"prompt": "The dog", "max_tokens": 80, "stream": True, "ignore_eos": True}
        fields["stream_options"] = {"include_usage": True}
        with client.stream("POST", "/v1/completions", json=ASK | fields) as answer:
            lines = [line for line in islice(answer.iter_lines(), num_lines) if line]
        chunk = json.loads(lines[0].removeprefix("data: "))
        if num_lines:
            return chunk["id"], -1
        return chunk["id"], json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"]

    # One client for all: each would take as long to make as an answer, and nobody would meet anybody.
    with (
        httpx.Client(base_url=url, timeout=DEADLINE, trust_env=False) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        asked = [pool.submit(stream, None) for _ in range(3)]
        asked.append(pool.submit(complete, {"prompt": LONG, "max_tokens": 8}))
        asked.append(pool.submit(complete, {"prompt": "Once", "max_tokens": 10, "n": 2, "seed": 1}))
        asked.append(pool.submit(stream, 3))
        return dict(future.result() for future in asked)


def test_a_servers_trace_is_whole_after_sigterm_and_the_command_says_what_is_in_it(tmp_path, capsys):
    file = tmp_path / "trace.json"
    with serving(file) as (process, url):
        answers = crowd(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
    events = read_strictly(file)
    of = lives(events)
    for name, num_tokens in answers.items():
        rows = [life for request_id, life in of.items() if request_id.startswith(name)]
        assert rows, f"{name} is in the trace"
        if num_tokens >= 0:
            assert sum(map(num_output_tokens, rows)) == num_tokens, "as the answer's usage says"
    (long,) = [life for life in of.values() if life[0]["args"]["prompt"] > 2 * BUDGET]
    assert names(long).count("prefill") >= 3, "a prompt of more tokens than a step has comes in chunks"
    assert {life[0]["tid"] for life in of.values()} > {1, 2, 3}, "more rows than seats: some waited"
    assert all(tracks[DEVICE]["args"]["tokens"] <= BUDGET for tracks in steps(events).values())
    assert max(values["running"] for values in counted(events, "requests")) == 3
    assert any(values["used"] for values in counted(events, "blocks of the cache"))
    assert events[-1]["name"] == "end"

    found = json.loads(said(capsys, "trace", str(file), "--json"))
    assert found["requests"] == len(of)
    assert found["output_tokens"] == sum(map(num_output_tokens, of.values()))
    assert found["time_to_first_token"]["count"] == sum(num_output_tokens(life) > 0 for life in of.values())
    assert found["step"]["count"] == len(steps(events))
    assert 0 < found["step"]["fill"] <= 1
    shown = said(capsys, "trace", str(file))
    for words in (
        "time to first token",
        "time between tokens",
        "wait in the queue",
        "time of a step",
        "budget",
    ):
        assert words in shown


def test_a_killed_servers_trace_is_read_all_the_same(tmp_path, capsys):
    file = tmp_path / "trace.json"
    with serving(file) as (process, url):
        crowd(url)
        deadline = time.monotonic() + DEADLINE
        while '"reason": "length"' not in file.read_text():
            assert time.monotonic() < deadline, "events reach the file while the server runs"
            time.sleep(0.05)
        process.kill()
        process.wait()
    assert lives(read_cut_off(file))
    assert json.loads(said(capsys, "trace", str(file), "--json"))["end"] is None
    assert "end of the trace: cut off" in said(capsys, "trace", str(file))


MANY = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 160}
SWAPPED = {"swap_space": 0.02, "preemption_mode": "swap"}
DRAFTS = {
    "speculative_config": {
        "model": "storyteller-draft", "num_speculative_tokens": 3, "step_times": ALWAYS_DRAFT.as_dict(),
    },
}  # fmt: skip


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "more", [{}, SWAPPED, DRAFTS, {"kv_cache": "slots"}], ids=["pages", "swapped", "drafts", "slots"]
)
def test_whatever_the_engine_does_slices_do_not_overlap_and_tokens_add_up(more, ahead, tmp_path):
    args = EngineArgs(device="cpu", async_scheduling=ahead, **MANY, **more)
    if args.kv_cache == "paged":  # little memory, so that requests are preempted
        probe = load_devices(args)
        num_bytes = 22 * probe.args.kv_cache_memory_bytes // probe.memory.num_blocks
        more = more | {"kv_cache_memory_bytes": num_bytes}
    file = tmp_path / "trace.json"
    llm = LLM(device="cpu", async_scheduling=ahead, trace=file, **MANY, **more)
    prompts = ["Once upon a time, there was a dog. The dog", "One day, Lily went to the park. " * 4] * 3
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.shutdown()
    events = read_strictly(file)
    of = lives(events)
    assert [num_output_tokens(of[f"{output.request_id}/0"]) for output in outputs] == [60] * 6
    assert {life[-1]["args"]["reason"] for life in of.values()} == {"length"}
    num_preempted = sum(names(life).count("preempted") for life in of.values())
    assert (num_preempted > 0) == (args.kv_cache == "paged"), "this memory is too small for six"
    if more.get("speculative_config"):
        drafts = [values for values in counted(events, "counted in a step") if values["draft_tokens"]]
        assert drafts, "drafts are proposed, and counted"
        assert all(values["accepted_tokens"] <= values["draft_tokens"] for values in drafts)
        several = [e for life in of.values() for e in life if e.get("args", {}).get("new", 0) > 1]
        assert several, "drafts that stand bring several tokens at once"
    of_steps = [steps(events)[number][DEVICE] for number in sorted(steps(events))]
    assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(of_steps)), "the device does one at a time"


def test_a_trace_changes_no_token_and_is_in_no_recording(tmp_path):
    params = SamplingParams(temperature=0, max_tokens=20)
    plain = LLM().generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text
    traced = LLM(trace=tmp_path / "t.json").generate("Once upon a time", params, use_tqdm=False)[0].outputs[0]
    assert traced.text == plain
    recorded = recording_header(EngineArgs(trace="t.json", record="r.jsonl"))["args"]
    assert not {"trace", "record", "otlp_traces_endpoint"} & set(recorded), "no path of this machine in it"


@pytest.mark.parametrize("where", ["", "no/such/folder/file", "file/below"])
def test_a_trace_that_cannot_be_written_is_refused_before_a_model_is_loaded(where, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="trace=") as refused:
        LLM("no-such-model", trace=tmp_path / where)
    assert "\n" not in str(refused.value)
    said_by_serve = refusal("serve", "storyteller-draft", "--port", "0", "--trace", str(tmp_path / where))
    assert re.fullmatch(r"ruvon serve: trace='.*': [\w ]+", said_by_serve)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_full_disk_is_said_at_once():
    assert "No space left" in refusal("serve", "storyteller-draft", "--port", "0", "--trace", "/dev/full")


def test_a_model_that_cannot_be_loaded_leaves_no_thread(tmp_path):
    before = set(threading.enumerate())
    with pytest.raises(Exception, match="no-such-model"):
        LLM("no-such-model", trace=tmp_path / "trace.json")
    assert set(threading.enumerate()) <= before
    assert read_strictly(tmp_path / "trace.json")


def test_an_engine_that_is_stopped_beside_its_readers_closes_its_trace(tmp_path):
    """AsyncLLMEngine.shutdown: the thread stops, then the engine."""
    import asyncio

    file = tmp_path / "trace.json"
    engine = build_engine(EngineArgs(model="storyteller-draft", trace=file))

    async def run():
        async with EngineThread(engine, "draft") as thread:
            await ask(thread, "Once upon a time", SamplingParams(max_tokens=3), "a")

    asyncio.run(run())
    engine.shutdown()
    assert names(lives(read_strictly(file))["a/0"]) == ["waiting", "prefill", "decode", "decode"]


@pytest.mark.parametrize(
    ("text", "says"), [("{}", "no trace"), (None, "No such file"), ("[\nx\ny\n", "line 2")]
)
def test_what_is_no_trace_is_said_in_one_line(text, says, tmp_path):
    file = tmp_path / "file"
    if text is not None:
        file.write_text(text)
    message = refusal("trace", str(file))
    assert message.startswith("ruvon trace: ")
    assert says in message
    assert message.isprintable()


def test_a_process_that_ends_without_a_shutdown_closes_its_trace(tmp_path):
    file = tmp_path / "trace.json"
    done = ruvon("generate", "The dog", "--max-tokens", "5", "--trace", str(file))
    assert done.returncode == 0, done.stderr
    (life,) = lives(read_strictly(file)).values()
    assert num_output_tokens(life) == 5
