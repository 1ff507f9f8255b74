"""One question, answered freely and in five forms; the odds turned round; a required call; a few beams.

python -m parts run B                   # on this machine's CPU; ends by itself
"""

import argparse
import json
import logging
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import OUT, record  # noqa: E402
from engine import LLM, EngineArgs, SamplingParams  # noqa: E402
from engine.cli.serving import Service  # noqa: E402
from engine.requests.batch import Batch  # noqa: E402
from engine.sampling_params import BeamSearchParams, StructuredOutputsParams  # noqa: E402
from parts.stage import served, title  # noqa: E402

MODEL = "storyteller"
QUESTION = "Tell me about a dog. Answer in JSON."
DOG = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "color": {"enum": ["red", "brown", "white"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 20},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 3},
    },
    "required": ["name", "color", "age", "friends"],
    "additionalProperties": False,
}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FORMS: dict[str, dict[str, Any] | None] = {
    "free": None,
    "a choice": {"choice": [" Rex", " Spot", " a cat"]},
    "a date": {"regex": r" (19|20)\d\d-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"},
    "a telephone number": {"regex": r" \(\d{3}\) \d{3}-\d{4}"},
    "a dog in JSON": {"json": DOG, "disable_any_whitespace": True},
    "JSON, with any whitespace": {"json": PERSON},
}
SAW, CHOICES, DRAWS = "The dog saw", [" the zebra.", " a big tree."], 100
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city for the next days.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
START, WIDTH, LENGTH = "One day, the dog saw a", 3, 12
FORCED, FEW, MANY = "dim", "yellow", "bold green"  # styles of tokens, by how many could have come


@dataclass
class Watched:
    """An executor around the engine's, that notes each step's record and what runs in it."""

    llm: LLM
    batches: list[Batch] = field(default_factory=list)
    running: list[list[tuple[int, ...]]] = field(default_factory=list)  # the tokens of each sequence

    def __post_init__(self) -> None:
        self.executor = self.llm.engine.executor
        self.llm.engine.executor = self

    def submit(self, batch: Batch):
        self.batches.append(batch)
        self.running.append([tuple(request.token_ids) for request in self.llm.engine.scheduler.running])
        return self.executor.submit(batch)

    def end(self) -> None:
        self.llm.engine.executor = self.executor


def num_allowed(mask: np.ndarray | None, vocab_size: int) -> int:
    return vocab_size if mask is None else int(np.bitwise_count(mask.view(np.uint32)).sum())


def told(llm: LLM, constraint: dict[str, Any] | None) -> tuple[Text, dict[str, Any]]:
    """The answer in colours, and figures of it."""
    must_fit = None if constraint is None else StructuredOutputsParams(**constraint)
    params = SamplingParams(temperature=0, max_tokens=70, structured_outputs=must_fit)
    if constraint is None:
        params.max_tokens = 24
    watched = Watched(llm)
    (output,) = llm.generate(QUESTION, params, use_tqdm=False)
    watched.end()
    (sample,) = output.outputs
    allowed = [num_allowed(batch.draws.rows[-1].mask, llm.tokenizer.vocab_size) for batch in watched.batches]
    text = Text()
    for token_id, count in zip(sample.token_ids, allowed, strict=False):
        if token_id not in llm.engine.config.eos_token_ids:
            piece = llm.tokenizer.decode([token_id]).replace("\n", "↵")
            text.append(piece, style=FORCED if count == 1 else FEW if count <= 10 else MANY)
    figures = {"text": sample.text, "finish_reason": sample.finish_reason, "tokens_allowed": allowed}
    return text, figures


def show_forms(console: Console, llm: LLM) -> dict[str, Any]:
    console.print(f"[dim]{QUESTION}[/]\n")
    figures = {}
    for name, constraint in FORMS.items():
        text, figures[name] = told(llm, constraint)
        end = "" if figures[name]["finish_reason"] == "stop" or constraint is None else " [red]… and so on[/]"
        console.print(Text(f"{name:26}", style="bold"), text, end, sep="")
    console.print(
        f"\nHow many of {llm.tokenizer.vocab_size:,} tokens could have come: "
        f"[{FORCED}]one[/], [{FEW}]up to ten[/], [{MANY}]more[/]."
    )
    dog = json.loads(figures["a dog in JSON"]["text"])
    console.print(f"json.loads takes it: a dog of {dog['age']} years with {len(dog['friends'])} friends.")
    console.print("The form is the mask's. The sense is the model's, and this one has read about balls.")
    return figures


def show_odds(console: Console, llm: LLM) -> dict[str, float]:
    """How often each choice comes, free and under masks."""
    logprobs = []
    for choice in CHOICES:  # free: what the model thinks of each text
        (output,) = llm.generate(
            SAW + choice, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False
        )
        num_tokens = len(llm.tokenizer.encode(SAW))
        entries = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[num_tokens:]
        logprobs.append(sum(entry[token_id].logprob for token_id, entry in entries))
    zebra, tree = np.exp(logprobs)
    must_fit = StructuredOutputsParams(choice=CHOICES)
    params = SamplingParams(n=DRAWS, seed=1, max_tokens=16, structured_outputs=must_fit)
    (output,) = llm.generate(SAW, params, use_tqdm=False)
    count = sum(sample.text == CHOICES[0] for sample in output.outputs)
    shares = {
        "free, and kept if it is one of the two": zebra / (zebra + tree),
        f"{DRAWS} draws with masks": count / DRAWS,
    }
    console.print(f"[dim]{SAW}[/]  [yellow]{CHOICES[0]}[/] or [blue]{CHOICES[1]}[/]\n")
    for name, share in shares.items():
        num = round(50 * share)
        console.print(f"{name:40}[yellow]{'█' * num}[/][blue]{'█' * (50 - num)}[/]  zebra {share:.0%}")
    console.print("\nA mask sees one token ahead: 'the' may come, and behind it nothing but the zebra.")
    return {name: float(share) for name, share in shares.items()}


def show_tool(console: Console) -> dict[str, Any]:
    """A tool that must be called, over HTTP."""
    logging.disable(logging.WARNING)
    service = Service(EngineArgs(model=MODEL, device="cpu", max_num_seqs=4))
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": "How is your dog?"}], "tools": [TOOL],
        "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60, "temperature": 0,
    }  # fmt: skip
    with served(service.app((), None, False, None)) as url:
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:  # a server of this process
            choice = json.load(answer)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    console.print('[dim]POST /v1/chat/completions, "How is your dog?", tool_choice: required[/]')
    console.print(f"→ [bold]{name}[/]({', '.join(f'{key}={value!r}' for key, value in arguments.items())})")
    console.print("\nThe arguments fit the tool's schema. Nobody had asked for the weather.")
    return {"name": name, "arguments": arguments, "finish_reason": choice["finish_reason"]}


def show_beams(console: Console, llm: LLM) -> dict[str, Any]:
    """All that the beams have said, as a tree."""
    watched = Watched(llm)
    (found,) = llm.beam_search(START, BeamSearchParams(WIDTH, LENGTH, ignore_eos=True))
    watched.end()
    num_prompt = len(llm.tokenizer.encode(START))
    best = [tuple(sequence.tokens[num_prompt:]) for sequence in found.sequences]
    said = {tokens[num_prompt:] for step in watched.running for tokens in step} | set(best)
    tree = Tree(Text(START, style="dim"))
    grow(llm, tree, (), said, best)
    console.print(tree)
    greedy_params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=0)
    greedy = llm.generate(START, greedy_params, use_tqdm=False)[0].outputs[0]
    first = found.sequences[0]
    tokens = sum(batch.num_tokens for batch in watched.batches)
    console.print(
        f"\nThe best of {WIDTH} beams: log probability {first.cum_logprob:.2f}. "
        f"Greedy: {greedy.cumulative_logprob:.2f} ([dim]{greedy.text.strip()}[/])\n{tokens} tokens computed; "
        f"{WIDTH} requests by themselves would need {WIDTH * (num_prompt + LENGTH - 1)}."
    )
    return {
        "best": first.text, "log_probability": first.cum_logprob, "greedy": greedy.text,
        "greedy_log_probability": greedy.cumulative_logprob, "tokens_computed": tokens,
    }  # fmt: skip


def grow(llm: LLM, tree: Tree, here: tuple[int, ...], said: set[tuple[int, ...]], best: list) -> None:
    """Add what was said behind `here`: the best answer green, other answers plain, given up dim."""
    children = sorted(
        {text[: len(here) + 1] for text in said if text[: len(here)] == here and len(text) > len(here)}
    )
    for child in children:
        end = child
        while (
            len(next_ones := {text[: len(end) + 1] for text in said if text[: len(end)] == end} - {end}) == 1
        ):
            (end,) = next_ones  # nothing forks here: one line
        is_kept = [answer[: len(end)] == end for answer in best]
        style = "bold green" if is_kept[0] else "" if any(is_kept) else "dim strike"
        words = llm.tokenizer.decode(list(end[len(here) :])).strip()
        grow(llm, tree.add(Text(words, style=style)), end, said, best)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    console = Console(highlight=False)
    with console.status("an engine starts"):
        llm = LLM(MODEL, device="cpu", dtype="float32", max_model_len=256)
    title(console, "1. The same question, freely and in five forms")
    forms = show_forms(console, llm)
    title(console, "2. A mask turns the odds round")
    odds = show_odds(console, llm)
    title(console, "3. A tool that must be called")
    call = show_tool(console)
    title(console, f"4. {WIDTH} beams")
    beams = show_beams(console, llm)
    figures = {"forms": forms, "zebra": odds, "call": call, "beams": beams}
    workload = {"model": MODEL, "question": QUESTION, "draws": DRAWS, "beam_width": WIDTH}
    path = record("partB", "One question in several forms, and a search", workload, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


if __name__ == "__main__":
    main()
