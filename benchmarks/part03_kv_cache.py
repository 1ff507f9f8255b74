"""What does a cache buy, and how close does a lean loop come to engines in C++?

    python -m benchmarks.part03_kv_cache            # both thread counts, minutes, on a quiet machine
    python -m benchmarks.part03_kv_cache --repeats 1 --threads 1 --no-compile

Every side continues the same prompt by the same number of tokens, greedy, end of sequence ignored, batch 1,
fp32 arithmetic, and must produce the same token ids. The sides take turns within one run; figures are
medians. CTranslate2 and a C++ compiler (for torch.compile) are optional; what is missing is named.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from rich import print
from rich.table import Table

from benchmarks.baseline_hf import MODEL, NEW_TOKENS, PROMPT
from benchmarks.record import record, spread
from engine.cache.single import CachedForward
from engine.decoding.greedy import FullForward, generate
from engine.decoding.params import SamplingParams
from engine.layers.packed_linear import pack_linears
from engine.models.checkpoint import resolve
from engine.models.loader import load_model
from engine.text.tokenizer import Tokenizer

Side = Callable[[list[int]], list[int]]  # prompt ids -> the NEW_TOKENS ids after it

NAMES = {  # key in the results: name in the table
    "full": "Part 2: no cache",
    "cached": "Part 3: cache",
    "packed": "Part 3: cache, packed weights",
    "hf": "Hugging Face `generate`",
    "hf_compiled": "Hugging Face, static cache and torch.compile",
    "ctranslate2": "CTranslate2 (C++)",
    "bare": "a bare loop in plain PyTorch",
}
OTHERS = {"gpt2_xl": (48, 25, 64), "llama3_8b": (32, 8, 128)}  # L, Hkv, Dh
CURVE = (16, *range(100, 1001, 100))  # lengths for time per token


def ours(forward_class: type, model: torch.nn.Module, tokenizer: Tokenizer) -> Side:
    """This engine's own loop: detokenizing and stop checks included."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)

    def run(prompt: list[int]) -> list[int]:
        return generate(forward_class(model), tokenizer, model.config, prompt, params).outputs[0].token_ids

    return run


def hugging_face(folder: Path, compiled: bool = False) -> Side:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # never stop early
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    if compiled:
        compile_config = transformers.CompileConfig(fullgraph=False, mode="default")
        compile_config._compile_all_devices = True  # `generate` compiles on accelerators only, unless told
        options |= {"cache_implementation": "static", "compile_config": compile_config}

    def run(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()

    return run


def ctranslate2_side(folder: Path, threads: int) -> Side | None:
    """The same weights converted on the spot; None where the package is missing."""
    try:
        import ctranslate2
    except ImportError:
        return None
    names = transformers.AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as temporary:
        ctranslate2.converters.TransformersConverter(str(folder)).convert(temporary, force=True)
        generator = ctranslate2.Generator(temporary, compute_type="float32", intra_threads=threads)

    def run(prompt: list[int]) -> list[int]:
        tokens = [names.convert_ids_to_tokens(prompt)]
        options = {"max_length": NEW_TOKENS, "end_token": [], "include_prompt_in_result": False}
        return generator.generate_batch(tokens, **options)[0].sequences_ids[0]

    return run


def bare_loop(folder: Path) -> Side:
    """GPT-2 with a cache and nothing else: no modules, no text, no stop checks. What PyTorch itself costs."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    w, config = hf.transformer.state_dict(), hf.config
    L, H, D = config.n_layer, config.n_head, config.n_embd
    w = {k: v.T.contiguous() if ".c_" in k and v.dim() == 2 else v for k, v in w.items()}  # Conv1D -> Linear

    @torch.inference_mode()
    def run(prompt: list[int]) -> list[int]:
        keys, values = torch.empty(2, L, H, len(prompt) + NEW_TOKENS, D // H)  # each [L, H, max, Dh]
        new, start, out = torch.tensor(prompt), 0, []
        for _ in range(NEW_TOKENS):
            end = start + len(new)
            x = w["wte.weight"][new] + w["wpe.weight"][start:end]  # [T, D]
            for i in range(L):
                p = f"h.{i}."
                y = F.layer_norm(x, (D,), w[p + "ln_1.weight"], w[p + "ln_1.bias"])
                qkv = F.linear(y, w[p + "attn.c_attn.weight"], w[p + "attn.c_attn.bias"])
                q, k, v = qkv.view(-1, 3, H, D // H).permute(1, 2, 0, 3)  # each [H, T, Dh]
                keys[i, :, start:end], values[i, :, start:end] = k, v
                y = F.scaled_dot_product_attention(
                    q, keys[i, :, :end], values[i, :, :end], is_causal=start == 0
                )
                y = y.transpose(0, 1).reshape(-1, D)
                x = x + F.linear(y, w[p + "attn.c_proj.weight"], w[p + "attn.c_proj.bias"])
                y = F.layer_norm(x, (D,), w[p + "ln_2.weight"], w[p + "ln_2.bias"])
                y = F.gelu(F.linear(y, w[p + "mlp.c_fc.weight"], w[p + "mlp.c_fc.bias"]), approximate="tanh")
                x = x + F.linear(y, w[p + "mlp.c_proj.weight"], w[p + "mlp.c_proj.bias"])
            x = F.layer_norm(x[-1:], (D,), w["ln_f.weight"], w["ln_f.bias"])
            new, start = F.linear(x, w["wte.weight"]).argmax(-1), end
            out.append(int(new))
        return out

    return run


def make_sides(threads: int, compiled: bool) -> dict[str, Side]:
    """Built after the thread count is set: packing measures with it, and compiled code is bound to it."""
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    folder, tokenizer, model = resolve(MODEL), Tokenizer.from_pretrained(MODEL), load_model(MODEL)
    packed = load_model(MODEL, transform=pack_linears)
    sides = {
        "full": ours(FullForward, model, tokenizer),
        "cached": ours(CachedForward, model, tokenizer),
        "packed": ours(CachedForward, packed, tokenizer),
        "hf": hugging_face(folder),
        "hf_compiled": hugging_face(folder, compiled=True) if compiled else None,
        "ctranslate2": ctranslate2_side(folder, threads),
        "bare": bare_loop(folder),
    }
    return {name: side for name, side in sides.items() if side}


def race(sides: dict[str, Side], prompt: list[int], repeats: int) -> dict[str, list[float]]:
    """Tokens per second of each side in each of `repeats` rounds, taken in turns after one to warm up."""
    expected = sides["cached"](prompt)
    for name, side in sides.items():
        assert side(prompt) == expected, f"{NAMES[name]} generates other tokens"
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side(prompt)
            speeds[name].append(NEW_TOKENS / (time.perf_counter() - start))
    return speeds


def curve(models: dict[str, torch.nn.Module], repeats: int) -> dict[str, list]:
    """Milliseconds for the token after `length` others, with a cache; the fastest of several."""
    forwards = {name: CachedForward(model) for name, model in models.items()}
    vocabulary = next(iter(models.values())).config.vocab_size
    ids = [token % vocabulary for token in range(1, max(CURVE) + repeats + 2)]
    figures = {"length": list(CURVE)} | {name: [] for name in models}
    for length in CURVE:
        for forward in forwards.values():
            forward(ids[:length])  # catches up on the tokens in between
        times: dict[str, list[float]] = {name: [] for name in forwards}
        for name, forward in forwards.items():  # by itself: between others' steps, its own take longer
            for i in range(1, repeats + 1):
                start = time.perf_counter()
                forward(ids[: length + i])
                times[name].append((time.perf_counter() - start) * 1e3)
        for name, taken in times.items():
            figures[name].append(min(taken))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out (it takes half a minute)"
    )
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    compiled = not args.no_compile and any(map(shutil.which, ("g++", "clang++", "c++")))
    prompt = Tokenizer.from_pretrained(MODEL).encode(PROMPT)
    rounds = {t: race(make_sides(t, compiled), prompt, args.repeats) for t in args.threads}
    # {threads: {side: tokens per second}}
    speeds = {t: {key: statistics.median(found) for key, found in rounds[t].items()} for t in args.threads}
    keys = list(speeds[args.threads[0]])
    best = {key: max(speeds[t][key] for t in args.threads) for key in keys}

    torch.set_num_threads(1)
    model = load_model(MODEL)
    # A step reads every weight but the position table, of which it takes one row.
    weights = sum(p.numel() for p in model.parameters()) - model.embed_position.weight.numel()
    kv_bytes = model.config.kv_bytes_per_token(4)
    steps = curve({"cached_ms": model, "packed_ms": load_model(MODEL, transform=pack_linears)}, 9)
    end = len(prompt) + NEW_TOKENS
    best_threads = {key: max(args.threads, key=lambda t: speeds[t][key]) for key in keys}
    gains = [
        packed / cached
        for cached, packed in zip(
            *(rounds[best_threads[key]][key] for key in ("cached", "packed")), strict=True
        )
    ]
    figures = {
        "tokens_per_second": {str(t): by_side for t, by_side in speeds.items()},
        "best_tokens_per_second": best,
        "best_ms_per_token": {key: 1e3 / speed for key, speed in best.items()},
        "best_threads": best_threads,
        "times_part2": best["packed"] / best["full"],
        "times_hugging_face": best["packed"] / best["hf"],
        "cache_alone_times_part2": best["cached"] / best["full"],
        "cache_alone_times_hugging_face": best["cached"] / best["hf"],
        "packing_gains": best["packed"] / best["cached"],
        "packing_gains_of_each_round": gains,
        "missing": [name for key, name in NAMES.items() if key not in keys],
        "tokens_computed": {"full": sum(range(len(prompt), end)), "cached": end - 1},
        "kv_bytes_per_token": kv_bytes,
        "kv_kib_per_token_fp16": {name: 2 * L * Hkv * Dh * 2 / 1024 for name, (L, Hkv, Dh) in OTHERS.items()},
        "cat_gigabytes_for_1000_tokens": kv_bytes
        * sum(range(1000))
        / 1e9,  # copied if the cache grew by torch.cat
        "weight_megabytes_per_step": {"fp32": weights * 4 / 1e6, "fp16": weights * 2 / 1e6},
        "tokens_of_cache_as_heavy_as_fp16_weights": weights * 2 / kv_bytes,
        "curve": steps,
        "curve_ends_ratio": {name: steps[name][-1] / steps[name][0] for name in ("cached_ms", "packed_ms")},
    }
    threads = [f"tokens/s, {t} thread{'s' * (t > 1)}" for t in args.threads]
    columns = ["loop", *threads, "of the better, in rounds", "× Part 2", "× Hugging Face"]
    rows = []
    for key in keys:
        ratios = [best[key] / best["full"], best[key] / best["hf"]]
        in_rounds = spread([round(speed) for speed in rounds[best_threads[key]][key]])
        rows.append([NAMES[key], *(round(speeds[t][key]) for t in args.threads), in_rounds, *ratios])
    shown = Table(*columns, title=f"{NEW_TOKENS} tokens after {len(prompt)}, batch 1, fp32 arithmetic")
    for row in rows:
        shown.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    print(shown)
    workload = {"model": MODEL, "prompt_tokens": len(prompt), "new_tokens": NEW_TOKENS, "batch": 1}
    workload |= {"arithmetic": "float32", "repeats": args.repeats, "torch_threads": args.threads}
    question = "What does a KV cache buy, and how close does a lean loop come to engines in C++?"
    tables = {"race": {"columns": columns, "rows": rows}}
    print(record("part03_kv_cache", question, workload, figures, tables))


if __name__ == "__main__":
    main()
