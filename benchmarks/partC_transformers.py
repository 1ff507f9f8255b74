"""How much slower is Hugging Face's code on our pages than a file of ours, and where does the time go?

    python -m benchmarks.partC_transformers                   # some minutes, on a quiet machine
    python -m benchmarks.partC_transformers --quick            # nothing is recorded
    python -m benchmarks.partC_transformers --device cuda

Llama in the shape of 110 million weights, random, in one process: our llama.py, Hugging Face's code through
the same engine, and on a GPU our llama.py without CUDA graphs. The sides take turns. One request alone and
16 at once, greedy, end of sequence ignored; a prompt's tokens per second; and of one decode step of the
model alone, on dense attention, how many modules and operators it calls.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich import print
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.record import record
from engine import LLM, SamplingParams
from engine.attention.dense import causal
from engine.models.known_shapes import TOKENIZER
from engine.models.language_model import LanguageModel

LLAMA_110M = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048,
    "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
    "max_position_embeddings": 1024, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
REQUESTS = (1, 16)
COLUMNS = ["side", "requests", "output tokens/s", "× our file", "prompt tokens/s"]
CALL_COLUMNS = ["side", "modules called in a step", "operators"]


class CountOperators(TorchDispatchMode):
    """Counts PyTorch's operators that run inside its block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **kwargs or {})


def sides(device: str) -> dict[str, dict]:
    """What is compared: the options of `LLM` beside those that all share. The first is the measure."""
    ours = {"our file": {"model_impl": "ruvon"}}
    if device != "cpu":
        ours["our file, no graphs"] = {"model_impl": "ruvon", "enforce_eager": True}
    return ours | {"Hugging Face's code": {"model_impl": "transformers"}}


def load(folder: Path, device: str, options: dict) -> LLM:
    return LLM(
        folder, tokenizer=TOKENIZER, load_format="dummy", device=device, max_num_seqs=max(REQUESTS),
        max_num_batched_tokens=1024, enable_prefix_caching=False, **options,
    )  # fmt: skip


def prompts(count: int, length: int) -> list[dict]:
    ids = torch.randint(4096, (count, length), generator=torch.Generator().manual_seed(0)).tolist()
    return [{"prompt_token_ids": row} for row in ids]


def seconds(llm: LLM, count: int, prompt_length: int, new_tokens: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts(count, prompt_length), params, use_tqdm=False)
    return time.perf_counter() - start


def measure(
    llms: dict[str, LLM], count: int, new_tokens: int, prompt_length: int, repeats: int
) -> list[list]:
    """The rows of the table for `count` requests at once."""
    decode: dict[str, list[float]] = {side: [] for side in llms}
    prompt: dict[str, list[float]] = {side: [] for side in llms}
    for repeat in range(1 + repeats):
        for side, llm in llms.items():  # in turns, so that all meet the same machine
            first = seconds(llm, count, prompt_length, 1)
            rest = seconds(llm, count, prompt_length, 1 + new_tokens) - first
            if repeat:  # the first one warms up
                prompt[side].append(count * prompt_length / first)
                decode[side].append(count * new_tokens / rest)
    speed = {side: statistics.median(decode[side]) for side in llms}
    measure_of = speed[next(iter(llms))]
    return [
        [side, count, speed[side], speed[side] / measure_of, statistics.median(prompt[side])] for side in llms
    ]


@torch.inference_mode()
def calls(model: LanguageModel) -> tuple[int, int]:
    """(modules, operators) that a step of one token calls."""
    device = next(model.parameters()).device
    num_modules = 0

    def count(*_) -> None:
        nonlocal num_modules
        num_modules += 1

    hooks = [module.register_forward_pre_hook(count) for module in model.modules()]
    one = torch.zeros(1, dtype=torch.long, device=device)
    with CountOperators() as operators:
        model.logits(model(one, one, causal))
    for hook in hooks:
        hook.remove()
    return num_modules, operators.count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's, on a CPU")
    parser.add_argument("--quick", action="store_true", help="a few tokens, and nothing is recorded")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    new_tokens, prompt_length, repeats = (8, 16, 1) if options.quick else (64, 64, 5)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(LLAMA_110M))
        llms = {
            side: load(Path(folder), options.device, extra) for side, extra in sides(options.device).items()
        }
    rows = [row for count in REQUESTS for row in measure(llms, count, new_tokens, prompt_length, repeats)]
    call_rows = [[side, *calls(llm.engine.executor.ways[-1].model)] for side, llm in llms.items()]
    for columns, table in ((COLUMNS, rows), (CALL_COLUMNS, call_rows)):
        for row in table:
            print(dict(zip(columns, row, strict=True)))
    if options.quick:
        return
    name = "partC_transformers" + ("" if options.device == "cpu" else "_gpu")
    workload = {
        "shape": LLAMA_110M, "weights": "random", "device": options.device, "prompt_tokens": prompt_length,
        "new_tokens": new_tokens, "repeats": repeats,
    }  # fmt: skip
    question = "How much slower is Hugging Face's code on our pages than our own file?"
    figures = {f"{side}, {count}": ratio for side, count, _, ratio, _ in rows}
    tables = {
        "speed": {"columns": COLUMNS, "rows": rows},
        "calls": {"columns": CALL_COLUMNS, "rows": call_rows},
    }
    print(record(name, question, workload, figures, tables))


if __name__ == "__main__":
    main()
