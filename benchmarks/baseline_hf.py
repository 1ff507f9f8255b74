"""How fast is a plain Hugging Face pipeline? The line that every later part is measured against.

    python -m benchmarks.baseline_hf

Tokens per second and time to first token of `pipeline("text-generation")` on the embedded `storyteller`,
greedy, end of sequence ignored, every run the same work. Loaded twice: as it comes (fp16), and in fp32.
"""

import os
import statistics
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is embedded

import torch
import transformers
from rich import print
from transformers import pipeline
from transformers.generation.streamers import BaseStreamer

from benchmarks.record import record
from engine.models.checkpoint import resolve

MODEL = "storyteller"
PROMPT = "Once upon a time, there was a little dog named Max. Max had a red ball"
NEW_TOKENS = 256
REPEATS = 5
COLUMNS = ["dtype", "torch threads", "tokens/s", "time to first token, ms"]


class Clock(BaseStreamer):
    """Notes when each new token is known. `generate` hands it the prompt first, then token after token."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    pipes = {}
    for dtype in ("auto", "float32"):
        pipe = pipeline("text-generation", model=str(resolve(MODEL)), dtype=dtype, device="cpu")
        pipe.model.generation_config.eos_token_id = None  # never stop early
        pipes[str(pipe.model.dtype).removeprefix("torch.")] = pipe
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        speeds, waits = {dtype: [] for dtype in pipes}, {dtype: [] for dtype in pipes}
        for repeat in range(1 + REPEATS):
            for dtype, pipe in pipes.items():  # in turns, so that both meet the same machine
                clock = Clock()
                pipe(PROMPT, do_sample=False, max_new_tokens=NEW_TOKENS, streamer=clock)
                start, _prompt, first, *rest = clock.times
                assert len(rest) == NEW_TOKENS - 1, f"{len(rest) + 1} tokens, not {NEW_TOKENS}"
                if repeat:  # the first one warms up
                    speeds[dtype].append(NEW_TOKENS / (rest[-1] - start))
                    waits[dtype].append((first - start) * 1e3)
        rows += [[d, threads, statistics.median(speeds[d]), statistics.median(waits[d])] for d in pipes]
    for row in rows:
        print(dict(zip(COLUMNS, row, strict=True)))
    best = max(rows, key=lambda row: row[2])
    keys = ("dtype", "threads", "tokens_per_second", "time_to_first_token_ms")
    figures = dict(zip(keys, best, strict=True))
    workload = {"model": MODEL, "prompt": PROMPT, "new_tokens": NEW_TOKENS, "batch": 1, "repeats": REPEATS}
    question = "How fast is a plain Hugging Face pipeline on storyteller, on a CPU?"
    print(record("baseline_hf", question, workload, figures, {"speed": {"columns": COLUMNS, "rows": rows}}))


if __name__ == "__main__":
    main()
