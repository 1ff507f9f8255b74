"""How fast are Qwen3-0.6B's and 4B's shapes, with random bf16 weights, as `LLM` runs them?

    python -m benchmarks.part20_qwen3 [--only one many step peers] [--models qwen3-0.6b qwen3-4b]
    python -m benchmarks.part20_qwen3 --tiny --out FOLDER    # on a CPU: does it run? its numbers say nothing

one: a request of 128 tokens in and 256 out. many: 256 requests, inputs and outputs of 100 to 1,024 random
tokens each, all there at the start. step: a whole decode step at a context of 512. peers: Hugging Face's
`generate` on `one`. The floor of each is the time in which a copy moves as many bytes as there are weights,
keys and values to read at least. Everything is run several times in one process; medians stand in the table.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.record import RESULTS, record, show
from engine import LLM, SamplingParams
from engine.machine.collector import rare_collections
from engine.models.config import ModelConfig
from engine.models.known_shapes import SHAPES

PARTS = ("one", "many", "step", "peers")
MODELS = ("qwen3-0.6b", "qwen3-4b")
BATCHES, CONTEXT, WINDOW = (1, 64, 256), 512, 16
SEED = 0
# Tokens per second that were measured on an H200 by others' means: they stand beside, and prove nothing here.
RECORDED = {
    "one": {"mini-sglang": 554, "nano-vllm": 527},
    "many": {"mini-sglang": 21_697, "nano-vllm": 21_513},
}
TINY = {
    "vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48, "dtype": "float32",
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """How much of each."""

    prompt: int = 128
    output: int = 256
    requests: int = 256
    shortest: int = 100
    longest: int = 1024
    repeats: int = 3  # the first of which warms up


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def random_prompt(rng: random.Random, config: ModelConfig, length: int) -> dict:
    return {"prompt_token_ids": [rng.randrange(config.vocab_size) for _ in range(length)]}


def timed(llm: LLM, prompts: list[dict], lengths: list[int]) -> float:
    start = time.perf_counter()
    outputs = llm.generate(prompts, [greedy(length) for length in lengths])
    seconds = time.perf_counter() - start
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    return seconds


def model_of(llm: LLM) -> torch.nn.Module:
    return llm.engine.executor.ways[-1].model


def weights_read(llm: LLM) -> int:
    """Bytes a step reads of the weights: of a table of embeddings that is not the output layer too, next to
    nothing.
    """
    model = model_of(llm)
    table = 0 if llm.config.tie_word_embeddings else model.embed.weight.nbytes
    return sum(parameter.nbytes for parameter in model.parameters()) - table


def floor_seconds(llm: LLM, prompts: list[dict], lengths: list[int], bandwidth: float) -> float:
    """In which everything could be read: weights as often as the longest output has tokens, and each output
    token's context.
    """
    token = llm.config.kv_bytes_per_token(next(model_of(llm).parameters()).element_size())
    contexts = sum(
        n * len(prompt["prompt_token_ids"]) + n * (n + 1) // 2
        for prompt, n in zip(prompts, lengths, strict=True)
    )
    return (max(lengths) * weights_read(llm) + contexts * token) / bandwidth


def throughput(llm: LLM, prompts: list[dict], lengths: list[int], work: Work, bandwidth: float) -> dict:
    rng, found = random.Random(SEED + 1), []
    for _ in range(work.repeats):
        prompts = [
            random_prompt(rng, llm.config, len(p["prompt_token_ids"])) for p in prompts
        ]  # no prefix is known
        found.append(sum(lengths) / timed(llm, prompts, lengths))
    floor = sum(lengths) / floor_seconds(llm, prompts, lengths, bandwidth) if bandwidth else None
    return {"tokens_per_second": statistics.median(found[1:]), "all": found[1:], "floor": floor}


def one(llm: LLM, work: Work, bandwidth: float) -> dict:
    prompts = [random_prompt(random.Random(SEED), llm.config, work.prompt)]
    return throughput(llm, prompts, [work.output], work, bandwidth)


def many(llm: LLM, work: Work, bandwidth: float) -> dict:
    rng = random.Random(SEED)
    sizes = [rng.randint(work.shortest, work.longest) for _ in range(2 * work.requests)]
    prompts = [random_prompt(rng, llm.config, size) for size in sizes[: work.requests]]
    return throughput(llm, prompts, sizes[work.requests :], work, bandwidth)


def steps(llm: LLM, work: Work, bandwidth: float) -> dict:
    """Milliseconds of a decode step by batch, the median of those in the middle of which contexts are
    `CONTEXT` tokens.
    """
    found = {}
    for batch in BATCHES if bandwidth else BATCHES[:1]:
        rng, context = random.Random(SEED), CONTEXT if bandwidth else 40
        for i in range(batch):
            prompt = random_prompt(rng, llm.config, context - 2 * WINDOW)["prompt_token_ids"]
            llm.engine.add_request(f"{batch}/{i}", prompt, greedy(4 * WINDOW))
        seconds, before = [], time.perf_counter()
        with rare_collections():
            while llm.engine.has_unfinished_requests():
                outputs = llm.engine.step()
                now = time.perf_counter()
                told = [len(output.outputs[0].token_ids) for output in outputs]
                if len(told) == batch and WINDOW < min(told) <= 3 * WINDOW:
                    seconds.append(now - before)
                before = now
        ms = statistics.median(seconds) * 1e3
        token = llm.config.kv_bytes_per_token(2)
        floor = (weights_read(llm) + batch * context * token) / bandwidth * 1e3 if bandwidth else None
        found[f"b{batch}"] = {"ms": ms, "floor_ms": floor, "tokens_per_second": batch / ms * 1e3}
    return found


def peers(folder: Path, device: str, work: Work) -> dict:
    """Hugging Face's `generate` as it comes, on `one`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(dtype).eval()
    found = []
    for _ in range(work.repeats):
        ids = torch.randint(0, config.vocab_size, (1, work.prompt), device=device)
        start = time.perf_counter()
        told = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=work.output, min_new_tokens=work.output,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        told.tolist()
        found.append(work.output / (time.perf_counter() - start))
    return {"tokens_per_second": statistics.median(found[1:]), "all": found[1:]}


def measured(name: str, folder: Path, options: argparse.Namespace, work: Work, bandwidth: float) -> dict:
    sizes = {"max_num_seqs": work.requests, "max_model_len": 128} if options.tiny else {}
    if bandwidth:
        sizes = {"max_num_seqs": 256, "max_model_len": 4096}
    start = time.perf_counter()
    llm = LLM(folder, tokenizer="storyteller", load_format="dummy", device=options.device, **sizes)
    found = {"load_seconds": time.perf_counter() - start}
    for part, measure in (("one", one), ("many", many), ("step", steps)):
        if part in options.only:
            found[part] = measure(llm, work, bandwidth)
            print(name, part, json.dumps(found[part]), flush=True)
    del llm
    if options.device == "cuda":
        torch.cuda.empty_cache()
    if "peers" in options.only:
        found["peers"] = peers(folder, options.device, work)
        print(name, "peers", json.dumps(found["peers"]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a tiny model and little work, on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    work, bandwidth, folders = Work(), 0.0, {name: SHAPES / name for name in options.models}
    if options.tiny:
        options.device = "cpu"
        work = Work(prompt=6, output=6, requests=4, shortest=3, longest=9, repeats=2)
        raw = json.loads((SHAPES / MODELS[0] / "config.json").read_text()) | TINY
        folders = {"tiny": Path(tempfile.mkdtemp())}
        (folders["tiny"] / "config.json").write_text(json.dumps(raw))
    elif options.device == "cuda":
        from benchmarks.part13_decode_attention import copy_bandwidth

        bandwidth = copy_bandwidth()
        torch.cuda.empty_cache()
    found = {name: measured(name, folder, options, work, bandwidth) for name, folder in folders.items()}
    rows = [
        [name, part, figures["tokens_per_second"], figures["floor"] or ""]
        for name, parts in found.items()
        for part, figures in parts.items()
        if part in ("one", "many")
    ]
    rows += [
        [name, f"step of {batch[1:]}", step["tokens_per_second"], f"{step['ms']:.2f} ms"]
        for name, parts in found.items()
        for batch, step in parts.get("step", {}).items()
    ]
    columns = ["model", "work", "tokens/s", "floor, or a step"]
    tables = {"qwen3": {"columns": columns, "rows": rows}}
    workload = {"weights": "random bf16", "seed": SEED, "work": vars(work), "recorded_peers": RECORDED}
    figures: dict = {name.replace(".", "_"): parts for name, parts in found.items()}  # a mark's path has dots
    figures["copy_terabytes_per_second"] = bandwidth / 1e12
    path = record("part20_qwen3", __doc__.splitlines()[0], workload, figures, tables, folder=options.out)
    show(path, tables)


if __name__ == "__main__":
    main()
