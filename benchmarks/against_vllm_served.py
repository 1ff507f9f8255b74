"""The served half of against_vllm.py: `ruvon serve` and `vllm serve`, each asked by both benchmark programs.

`ruvon bench serve` and `vllm bench serve` send the same number of requests of the same lengths, greedy, past
every end of sequence, 16 at once. Both servers are up; whoever is not asked is stopped. At first both answer
the same requests, and the texts are compared.
"""

import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from benchmarks.against_vllm_settings import OURS, THEIRS, Setting, vllm_command
from benchmarks.processes import Racer
from benchmarks.record import ROOT

AT_ONCE, IN, OUT = 16, 64, 32  # requests, and tokens of a prompt and of an answer
START_SECONDS = 300
PROGRAMS = ("ruvon bench serve", "vllm bench serve")
PROMPTS = ("Once upon a time", "The dog and the cat", "Lily had a red ball", "One day, a boy named Tim")
KEYS = ("output_throughput", "p50_ttft_ms", "p95_ttft_ms", "p50_tpot_ms", "p95_tpot_ms")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(url: str, racer: Racer) -> None:
    """Until the server answers. Raises RuntimeError with the end of its log if it does not."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and racer.process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"no server at {url}:\n{racer.log.read_text()[-4000:]}")


def greedy_texts(url: str) -> list[str]:
    body = {"model": "model", "max_tokens": OUT, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=300, trust_env=False) as http:
        answers = [http.post("/v1/completions", json=body | {"prompt": prompt}) for prompt in PROMPTS]
    return [answer.raise_for_status().json()["choices"][0]["text"] for answer in answers]


def asked(
    program: str, url: str, folder: Path, python: Path, env: Mapping[str, str], requests: int, seed: int
) -> dict[str, float]:
    """What one benchmark program says of one server."""
    with tempfile.TemporaryDirectory() as out:
        command = {
            "ruvon bench serve": [sys.executable, "-m", "engine.cli.main", "bench", "serve"],
            "vllm bench serve": [str(vllm_command(python)), "bench", "serve", "--save-result"],
        }[program]
        command += [
            "--backend",
            "openai",
            "--base-url",
            url,
            "--model",
            str(folder),
            "--dataset-name",
            "random",
        ]
        command += ["--served-model-name", "model", "--tokenizer", str(folder), "--seed", str(seed)]
        command += ["--random-input-len", str(IN), "--random-output-len", str(OUT), "--ignore-eos"]
        command += ["--num-prompts", str(requests), "--max-concurrency", str(AT_ONCE), "--temperature", "0"]
        command += [
            "--num-warmups",
            "2",
            "--percentile-metrics",
            "ttft,tpot",
            "--metric-percentiles",
            "50,95",
        ]
        command += ["--result-filename", f"{out}/result.json"]
        done = subprocess.run(command, cwd=ROOT, env=dict(env), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command}:\n{(done.stdout + done.stderr)[-4000:]}")
        result = json.loads(Path(out, "result.json").read_text())
    assert not result["failed"], result
    assert result["total_output_tokens"] == requests * OUT, result
    return {key: result[key] for key in KEYS}


def served_race(
    settings: dict[str, Setting], folder: Path, python: Path, requests: int, rounds: int, max_model_len: int,
    exact: bool,
) -> tuple[dict[str, Any], dict[str, list]]:  # fmt: skip
    """Both servers in turns, in the setting in which each engine is the fastest with many requests: figures
    of each program, and a table of medians.
    """
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        engine: {program: [] for program in PROGRAMS} for engine in (OURS, THEIRS)
    }
    texts: dict[str, list[str]] = {}
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[str, tuple[str, Racer]] = {}
        for engine, setting in settings.items():
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            racer = setting.server(folder, python, logs / f"{engine}.txt", max_model_len, port)
            stack.callback(racer.end)
            servers[engine] = (url, racer)
            with racer:
                wait_for(url, racer)
                texts[engine] = greedy_texts(url)
        equal = sum(ours == theirs for ours, theirs in zip(texts[OURS], texts[THEIRS], strict=True))
        assert equal == len(PROMPTS) or not exact, texts
        envs = {
            "ruvon bench serve": settings[OURS].environment(python),
            "vllm bench serve": settings[THEIRS].environment(python),
        }
        for seed in range(rounds):
            for program in PROGRAMS:
                for engine, (url, racer) in servers.items():
                    with racer:
                        one = asked(program, url, folder, python, envs[program], requests, seed)
                    found[engine][program].append(one)
                    print("served:", engine, program, one, flush=True)
    rows = []
    for program in PROGRAMS:
        for engine in (OURS, THEIRS):
            runs = found[engine][program]
            rates = [one["output_throughput"] for one in runs]
            times = [statistics.median(one[key] for one in runs) for key in KEYS[1:]]
            spread = statistics.median(rates), min(rates), max(rates)
            rows.append([f"`{engine.lower()} serve`", f"`{program}`", *spread, *times])
    times = ["TTFT ms, p50", "TTFT ms, p95", "TPOT ms, p50", "TPOT ms, p95"]
    figures = {
        "rounds": found, "equal_texts": equal, "texts": len(PROMPTS), "requests": requests,
        "at_once": AT_ONCE, "prompt_tokens": IN, "output_tokens": OUT,
    }  # fmt: skip
    return figures, {"columns": ["server", "asked by", "tokens/s", "least", "most", *times], "rows": rows}
