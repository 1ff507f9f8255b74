"""The whole engine at once: a server that batches, streams, is watched, speculates and quantizes.

    python -m benchmarks.part20_showcase [--model gpt2-xl] [--tokenizer FOLDER] [--users 1 64] [--repeats 2]

`ruvon serve` in a process of its own, once for each row of the table: plainly, in int8, with proposals from
the text itself (n-grams), and with both. `ruvon bench serve` asks for streams, 128 tokens in and 128 out,
greedy, and a Prometheus of one asks for /metrics every second meanwhile; what it counted must be what the
readers got. Shapes of known models have random weights, whose words repeat as no text does: what n-grams
gain there says nothing of real text, what they cost is true.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.record import ROOT, record, show
from engine.demo.server import served
from engine.models.known_shapes import shape_folder

IN, OUT = 128, 128  # tokens of a prompt, about, and of an answer
NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
SIDES = {
    "plain": [],
    "int8": ["--quantization", "int8"],
    "n-grams": ["--speculative-config", NGRAM],
    "int8, n-grams": ["--quantization", "int8", "--speculative-config", NGRAM],
}
SCRAPE = 1.0  # seconds
COUNTED = {
    "generation_tokens": "vllm:generation_tokens_total",
    "steps": "ruvon:steps_total",
    "proposed": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


def counted(url: str) -> dict[str, float]:
    """What the server's telemetry has counted so far."""
    page = httpx.get(f"{url}/metrics", timeout=60, trust_env=False).raise_for_status().text
    samples = [s for family in text_string_to_metric_families(page) for s in family.samples]
    return {key: sum(s.value for s in samples if s.name == name) for key, name in COUNTED.items()}


@contextmanager
def watched(url: str) -> Iterator[list[dict[str, float]]]:
    """What /metrics said, asked for every second, as a Prometheus does."""
    done, seen = threading.Event(), []

    def watch() -> None:
        while not done.wait(SCRAPE):
            seen.append(counted(url))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def asked(url: str, users: int, seed: int, folder: Path) -> dict:
    """What `ruvon bench serve` found, with so many streams at once."""
    path = folder / "found.json"
    command = [sys.executable, "-m", "engine.cli.main", "bench", "serve", "--base-url", url]
    command += ["--num-prompts", str(max(4, 2 * users)), "--max-concurrency", str(users), "--seed", str(seed)]
    command += ["--random-input-len", str(IN), "--random-output-len", str(OUT), "--ignore-eos"]
    command += ["--metric-percentiles", "50,99", "--result-filename", str(path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return json.loads(path.read_text())


def measure(arguments: list[str], users: list[int], repeats: int, folder: Path) -> dict:
    found = {}
    with served(folder / "log", *arguments) as (url, _):
        for crowd in users:
            asked(url, crowd, 0, folder)  # warms up
            before = counted(url)
            with watched(url) as scrapes:
                runs = [asked(url, crowd, seed + 1, folder) for seed in range(repeats)]
            new = {key: value - before[key] for key, value in counted(url).items()}
            made = sum(run["total_output_tokens"] for run in runs)
            assert not sum(run["failed"] for run in runs), runs
            assert new["generation_tokens"] == made, f"{new['generation_tokens']:.0f} counted, {made} read"
            found[f"users_{crowd}"] = {
                "tokens_per_second": median(run["output_throughput"] for run in runs),
                "all_tokens_per_second": [run["output_throughput"] for run in runs],
                "ttft_ms": median(run["median_ttft_ms"] for run in runs),
                "ttft_p99_ms": median(run["p99_ttft_ms"] for run in runs),
                "tpot_ms": median(run["median_tpot_ms"] for run in runs),
                "itl_p99_ms": median(run["p99_itl_ms"] for run in runs),
                "tokens": made,
                "tokens_per_step": made / new["steps"],
                "acceptance": new["accepted"] / new["proposed"] if new["proposed"] else None,
                "scrapes": len(scrapes),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt2-xl")
    parser.add_argument("--tokenizer")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    given = ["--model", options.model]
    if shape_folder(options.model):
        given += ["--load-format", "dummy"]
    if options.tokenizer:
        given += ["--tokenizer", options.tokenizer]
    figures, rows = {}, []
    for name, more in SIDES.items():
        with tempfile.TemporaryDirectory() as folder:
            key = name.replace(", ", "_").replace("-", "_")
            figures[key] = measure([*given, *more], options.users, options.repeats, Path(folder))
        for users, one in zip(options.users, figures[key].values(), strict=True):
            times = [one[time] for time in ("ttft_ms", "ttft_p99_ms", "tpot_ms", "itl_p99_ms")]
            rows.append([name, users, one["tokens_per_second"], *times, one["acceptance"]])
        print(name, json.dumps(figures[key]), flush=True)
    columns = ["server", "streams at once", "tokens/s", "first token, ms", "99%", "ms per token"]
    tables = {"race": {"columns": [*columns, "99% of gaps, ms", "accepted"], "rows": rows}}
    path = record(
        f"part20_showcase_{options.model.replace('-', '_')}",
        "The whole engine at once: batching, streaming, telemetry, speculation and quantization",
        {"model": options.model, "prompt_tokens": IN, "new_tokens": OUT, "repeats": options.repeats},
        figures,
        tables,
    )
    show(path, tables)


if __name__ == "__main__":
    main()
