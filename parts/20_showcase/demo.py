"""A Llama that speaks, and three with a mistake that fails nowhere; two other models beside Hugging Face, and
under everything that nineteen parts have brought.

python -m parts run 20
"""

import argparse
import json
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.part20_models import FAMILIES, blurred, reader  # noqa: E402
from benchmarks.record import OUT, RESULTS, record  # noqa: E402
from engine import LLM, SamplingParams  # noqa: E402
from engine.decoding.greedy import FullForward, generate  # noqa: E402
from engine.models import llama  # noqa: E402
from engine.models.config import ModelConfig, architecture  # noqa: E402
from engine.models.known_shapes import SHAPES, known_shapes  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.models.rope import rope_from, rotate  # noqa: E402
from engine.speculation.capability import Speculation  # noqa: E402
from engine.speculation.measuring import ALWAYS_DRAFT  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402
from parts.stage import title, yes  # noqa: E402
from tools.compare_models import compare  # noqa: E402

TALE = "Once upon a time, there was a little girl named Lily. She lived in a small house near a big forest. "
ENDINGS = ("One day", "Her dog", "The sun was", "She had a map, and a map, and a map, and a")
TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
DRAFT = "twin"  # a folder beside the model's
REQUEST = "Tell me a story about a dog and a red ball"
SPOKEN = SamplingParams(temperature=0.7, seed=1, max_tokens=60)
# From one token on: random weights repeat nothing longer. What is proposed is nearly always wrong, then.
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
COMMON = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4}
SETTINGS = {
    "in one batch, in slots": {"kv_cache": "slots"},
    "in pages of 4 tokens": {"block_size": 4, "enable_prefix_caching": False},
    "prompts in chunks of 8": {"block_size": 4, "max_num_batched_tokens": 8, "enable_prefix_caching": False},
    "beginnings computed once": {"block_size": 4, "max_num_batched_tokens": 32},
    "with n-grams as drafts": {"speculative_config": NGRAM},
    # A twin takes as long as the model itself, so it would never propose if its times were measured.
    "with a twin's drafts": {
        "speculative_config": {
            "model": DRAFT,
            "num_speculative_tokens": 4,
            "step_times": ALWAYS_DRAFT.as_dict(),
        }
    },
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as place:
        folders = {family: Path(place) / family for family in FAMILIES}
        with console.status("Hugging Face makes two models with random weights"):
            for family, folder in folders.items():
                blurred(reader(family, folder), folder / DRAFT)
        title(console, "1. A Llama tells a story; three others have one mistake each, and nothing fails")
        figures: dict = {"stories": stories(console)}
        title(console, "2. A query and a key, four tokens apart, here and a thousand tokens further on")
        figures["distance"] = distance(console)
        title(console, "3. The numbers are Hugging Face's (fp32, 64 random tokens)")
        figures["hugging_face"] = beside(console, folders)
        title(console, "4. The tokens of Part 2's loop, whatever the engine does around the model")
        figures["under"] = {family: under(console, family, folder) for family, folder in folders.items()}
    title(console, "5. Shapes that run without a download (--load-format dummy)")
    shapes(console)
    title(console, "6. What the parts are worth (recorded)")
    recorded(console)
    workload = {"families": list(FAMILIES), "prompts": len(ENDINGS), "tokens": TOKENS}
    path = record("part20", "Is another architecture one file?", workload, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def stories(console: Console) -> dict[str, str]:
    """What storyteller-llama says, as it is and with one mistake in the code that computes it."""
    told: dict[str, str] = {}
    for name, mistake in MISTAKES.items():
        with mistake:
            llm = LLM("storyteller-llama", **COMMON)
            (output,) = llm.chat([{"role": "user", "content": REQUEST}], SPOKEN, use_tqdm=False)
        told[name] = output.outputs[0].text
    table = Table(*told, box=None, padding=(0, 3, 0, 0), pad_edge=False)
    table.add_row(*told.values())
    console.print(f"[bold]{REQUEST}[/]\n")
    console.print(table)
    return told


def neighbours(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """`rotate` as the paper has it: numbers 0 and 1 are a pair, 2 and 3 are the next."""
    cos, sin = angles
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)


def values_for_keys(config: llama.LlamaConfig) -> dict[str, llama.Place]:
    """`places` with the rows of keys and of values exchanged."""
    table = dict(right_places(config))
    for name in [name for name in table if ".k_proj." in name]:
        other = name.replace(".k_proj.", ".v_proj.")
        table[name], table[other] = table[other], table[name]
    return table


def only_weights(self: llama.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """`RMSNorm.forward` without its division."""
    return x * self.weight


right_places = llama.places
MISTAKES: dict[str, AbstractContextManager] = {
    "as it is": nullcontext(),
    "neighbours are a pair": patch.object(llama, "rotate", neighbours),
    "values in the keys' rows": patch.object(llama, "places", values_for_keys),
    "no division in the norm": patch.object(llama.RMSNorm, "forward", only_weights),
}


def distance(console: Console) -> list[float]:
    """The product of one query and one key, at several pairs of places."""
    rope = rope_from({"max_position_embeddings": 4096}, 16)
    frequencies = torch.tensor(rope.frequencies)
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 16)  # [1, 1, Dh] each
    products = []
    for at in ((4, 0), (104, 100), (1004, 1000), (1005, 1000)):
        turned = [
            rotate(x, rope.angles(torch.tensor([p]), frequencies, torch.float32))
            for x, p in zip((q, k), at, strict=True)
        ]
        products.append(float((turned[0] * turned[1]).sum()))
        console.print(f"query at {at[0]:4}, key at {at[1]:4}: product {products[-1]:8.4f}")
    return products


def beside(console: Console, folders: dict[str, Path]) -> dict:
    table, found = plain("model", "heads", "difference", "HF's own", "top 5", "greedy tokens"), {}
    for family, folder in folders.items():
        config, one = ModelConfig.from_pretrained(folder), compare(str(folder), "float32", "cpu", 64)
        heads = f"{config.num_heads} / {config.num_kv_heads}{', normed' if config.qk_norm else ''}"
        numbers = f"{one['max_difference']:.1e}", f"{one['hf_eager_to_sdpa']:.1e}", f"{one['same_top5']:.0%}"
        table.add_row(family, heads, *numbers, f"{one['greedy_same']} of {one['greedy_of']}")
        found[family] = one
    console.print(table)
    console.print("\nheads: of queries / of keys. HF's own: between its two ways to attend.")
    return found


def under(console: Console, family: str, folder: Path) -> dict[str, bool]:
    """Whether each setting says what the model says alone, with everything computed anew for every token."""
    tokenizer, model = Tokenizer.from_pretrained(folder), load_model(folder)
    prompts = [TALE + ending for ending in ENDINGS]
    forward = FullForward(model)
    alone = [
        generate(forward, tokenizer, model.config, tokenizer.encode(prompt), GREEDY).outputs[0].token_ids
        for prompt in prompts
    ]
    table, same = plain(family, "tokens found", "drafts that stood", "the same tokens"), {}
    for name, options in SETTINGS.items():
        if draft := options.get("speculative_config", {}).get("model"):
            options = {"speculative_config": options["speculative_config"] | {"model": str(folder / draft)}}
        llm = LLM(folder, **COMMON, **options)
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        same[name] = [output.outputs[0].token_ids for output in outputs] == alone
        known = sum(output.num_cached_tokens or 0 for output in outputs)
        tallies = [each.tally for each in llm.engine.capabilities if isinstance(each, Speculation)]
        drafts = "".join(f"{tally.accepted} of {tally.proposed}" for tally in tallies)
        table.add_row(name, f"{known}" if known else "", drafts, f"[bold]{yes(same[name])}[/]")
    console.print(table)
    console.print()
    return same


def shapes(console: Console) -> None:
    table = plain("name", "M weights", "heads", "KiB a token", "all key heads")
    for name in known_shapes():
        config = ModelConfig.from_pretrained(SHAPES / name)
        model = architecture(config.model_type).Model(config, device="meta")  # no memory
        weights, token = sum(one.numel() for one in model.parameters()), config.kv_bytes_per_token(2) / 1024
        heads, all_heads = (
            f"{config.num_heads} / {config.num_kv_heads}",
            config.num_heads / config.num_kv_heads,
        )
        table.add_row(name, f"{weights / 1e6:,.0f}", heads, f"{token:,.0f}", f"{token * all_heads:,.0f}")
    console.print(table)


def recorded(console: Console) -> None:
    found = json.loads((RESULTS / "compare_storyteller.json").read_text())
    content = found["tables"]["race"]
    table = plain(*content["columns"][1:])
    for whose, what, rate, ratio in content["rows"]:
        table.add_row(what if whose == "this engine" else f"{whose}: {what}", f"{rate:,.0f}", f"{ratio:.2f}")
    console.print(table)
    console.print(f"\n{found['machine']['cpu']}, one thread, {found['date']}.")
    console.print("From benchmarks/results/compare_storyteller.json.")


def plain(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    table.add_column(first)
    for column in others:
        table.add_column(column, justify="right")
    return table


if __name__ == "__main__":
    main()
