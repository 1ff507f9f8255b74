"""Five families through one engine, beside Hugging Face; long texts behind a window; a wrong Gemma found out.

python -m parts run C                   # small models with random weights, made on the spot
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.partC_models import tiny  # noqa: E402
from benchmarks.record import OUT, record  # noqa: E402
from engine import LLM, SamplingParams  # noqa: E402
from engine.attention.dense import causal  # noqa: E402
from engine.models import gemma, llama  # noqa: E402
from engine.models.checkpoint import CheckpointError  # noqa: E402
from engine.models.config import OURS  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.models.transformers_attention import extras_of as arguments_of  # noqa: E402
from engine.models.transformers_model import config_from  # noqa: E402
from parts.stage import title, yes  # noqa: E402
from tools.first_difference import first_difference  # noqa: E402

MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
# What the reader knows it as -> (model_type, seed, settings beside those of `tiny`).
FAMILIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "Llama": ("llama", 0, {}),
    "Gemma": ("gemma", 0, {"head_dim": 16}),
    "Phi-3": ("phi3", 0, {}),
    "Gemma 2": ("gemma2", 0, {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24}),
    "gpt-oss": ("gpt_oss", 2, {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **MIXED}),
}
PROMPTS = [
    "Once upon a time there was a dog who ran all day long",
    "The",
    "A cat and a bird sat in the old tree",
]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
SMALL = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "block_size": 4}
WINDOW, LONG = 16, 240  # tokens
# Gemma's parts that are Llama's at first, in the order in which they are put right.
PARTS = ((gemma.Model, "embedded"), (gemma.RMSNorm, "forward"), (gemma.MLP, "forward"))


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as place:
        folders = {name: Path(place) / name for name in FAMILIES}
        with console.status("Hugging Face makes five models with random weights"):
            theirs = {
                name: tiny(kind, folders[name], seed, **settings)
                for name, (kind, seed, settings) in FAMILIES.items()
            }
        title(console, "1. Five families, one engine")
        families = show_families(console, folders, theirs)
        console.print("\nAnd what is no decoder of text with keys and values is refused:")
        refused = show_refused(console)
        title(console, "2. Three texts, in memory that holds one")
        window = show_window(console, Path(place) / "mistral")
        title(console, "3. A Gemma that is still Llama, part by part")
        wrong = show_wrong(console, folders["Gemma"], theirs["Gemma"])
    figures = {"families": families, "refused": refused, "window": window, "first_differences": wrong}
    workload = {"prompts": PROMPTS, "tokens": GREEDY.max_tokens, "window": WINDOW, "long": LONG}
    question = "Hugging Face's code and our files on one engine's pages"
    path = record("partC", question, workload, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def show_families(
    console: Console, folders: dict[str, Path], theirs: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Three prompts at once through the engine, and the likeliest tokens by Hugging Face's model."""
    console.print("Three prompts at once, in pages of 4 tokens, 16 greedy tokens each.\n")
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    for column in ("family", "computed by", "layer 0 wants", "layer 1 wants", "as Hugging Face"):
        table.add_column(column, no_wrap=column == "computed by")
    found = {}
    for name, folder in folders.items():
        with console.status(name):
            llm = LLM(folder, **SMALL)
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            told = [list(output.outputs[0].token_ids) for output in outputs]
            want = [
                their_tokens(theirs[name], list(output.prompt_token_ids), tokens)
                for output, tokens in zip(outputs, told, strict=True)
            ]
            wishes = wishes_of(theirs[name])
        by = "our file" if llm.config.model_impl == OURS else "Hugging Face's"
        found[name] = {"by": by, "wishes": wishes, "same": told == want, "tokens": told}
        table.add_row(name, by, *(", ".join(wish) or "q, k, v" for wish in wishes), yes(told == want))
    console.print(table)
    return found


@torch.inference_mode()
def their_tokens(theirs: Any, prompt: list[int], output: list[int]) -> list[int]:
    """Hugging Face's likeliest token behind the prompt, and behind each token of the output but the last."""
    theirs.set_attn_implementation("eager")
    logits = theirs(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]  # [16, V]
    return logits.argmax(-1).tolist()


def wishes_of(theirs: Any) -> list[list[str]]:
    """What each of the two layers wants beside q, k and v, asked of our bridge."""
    config = config_from(theirs.config.to_dict() | {"dtype": "float32"})
    wishes = []
    for layer, window in enumerate(config.windows):
        attention = theirs.get_decoder().layers[layer].self_attn
        options = {
            "scaling": attention.scaling,
            "softcap": getattr(attention, "attn_logit_softcapping", None),
            "s_aux": getattr(attention, "sinks", None),
        }
        wishes.append(arguments_of(options, config.head_dim, window).names())
    return wishes


def show_refused(console: Console) -> dict[str, str]:
    found = {}
    for kind in ("mamba", "t5", "bert"):
        try:
            config_from({"model_type": kind, "num_hidden_layers": 2})
        except CheckpointError as error:
            found[kind] = str(error).split(" is not supported")[0]
            console.print(f"  [red]{found[kind]}[/]")
    return found


def show_window(console: Console, folder: Path) -> dict[str, Any]:
    """Three long generations at once, in a cache that holds one of them whole."""
    theirs = tiny("mistral", folder, sliding_window=WINDOW)
    config = theirs.config
    head_dim = config.hidden_size // config.num_attention_heads
    block_bytes = 2 * config.num_hidden_layers * 4 * config.num_key_value_heads * head_dim * 4
    room = config.max_position_embeddings // 4  # blocks: those of one text that is as long as may be
    llm = LLM(folder, **SMALL, kv_cache_memory_bytes=room * block_bytes)
    cache = llm.engine.scheduler.cache
    held: list[int] = []  # of all texts, after each step of each
    commit = cache.commit

    def counting(seq: Any, num_tokens: int) -> None:
        commit(seq, num_tokens)
        held.append(sum(len(allocation.held) for allocation in cache.allocations.values()))

    params = SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
    with patch.object(cache, "commit", counting):
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    lengths = [len(output.prompt_token_ids) + LONG for output in outputs]
    without = sum(-(-length // 4) for length in lengths)
    told = [list(output.outputs[0].token_ids) for output in outputs]
    same = all(
        tokens == their_tokens(theirs, list(output.prompt_token_ids), tokens)
        for output, tokens in zip(outputs, told, strict=True)
    )
    draw(console, held)
    console.print(
        f"\nTexts of {', '.join(map(str, lengths))} tokens, a window of {WINDOW} in both layers. Of "
        f"the cache's {room} blocks of 4 tokens, at most [bold]{max(held)}[/] were held at once; without "
        f"the window these texts would need {without}.\n"
        f"As Hugging Face, which kept every key: [bold]{yes(same)}[/]"
    )
    return {"tokens": lengths, "most_held": max(held), "blocks": room, "without": without, "same": same}


def draw(console: Console, held: Sequence[int]) -> None:
    """Blocks held while the texts grew, as bars."""
    for i in range(8):
        at = round(i * (len(held) - 1) / 7)
        line = Text(f"  after {at + 1:3} tokens of output ")
        line.append("█" * held[at], style="dark_orange")
        line.append(f" {held[at]} blocks")
        console.print(line)


def show_wrong(console: Console, folder: Path, theirs: Any) -> list[str | None]:
    """Put Gemma's parts right one after the other, and ask each time which part differs first."""
    theirs.set_attn_implementation("eager")
    ids = torch.randint(4096, (32,), generator=torch.Generator().manual_seed(0))
    lines = []
    for count in range(len(PARTS) + 1):
        patches = [
            patch.object(cls, name, getattr(getattr(llama, cls.__name__), name))
            for cls, name in PARTS[count:]
        ]
        for each in patches:
            each.start()
        line = first_difference(load_model(folder), theirs, ids, causal)
        for each in patches:
            each.stop()
        lines.append(line)
        done = ", ".join(f"{cls.__name__}.{name}" for cls, name in PARTS[:count]) or "nothing"
        console.print(f"Right so far: {done}")
        console.print(f"  the first that differs: [red]{line}[/]\n" if line else "  [bold]nothing differs[/]")
    return lines


if __name__ == "__main__":
    main()
