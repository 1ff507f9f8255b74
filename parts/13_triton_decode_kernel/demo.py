"""Which program reads which block; the kernel, step by step, beside gathering; stories told one step ahead.

python -m parts run 13                  # on a CPU the kernels run in Triton's interpreter
"""

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before a kernel is defined

from benchmarks.part13_watch import watched  # noqa: E402
from benchmarks.record import OUT, read_record, record  # noqa: E402
from engine.attention.paged import Gathered  # noqa: E402
from engine.core.ahead import AheadEngine  # noqa: E402
from engine.core.llm_engine import LLMEngine  # noqa: E402
from engine.decoding.params import SamplingParams  # noqa: E402
from engine.models.loader import load_model  # noqa: E402
from engine.text.tokenizer import Tokenizer  # noqa: E402
from parts.stage import title, yes  # noqa: E402

MODEL = "storyteller"
PROMPTS = (
    "Once upon a time, there was a little dog named Max. Max had a red ball",
    "One day, a girl named Lily went to the park with her mom. She saw",
    "Tom was a boy who liked to climb. One day he found a big tree and",
)
TOKENS = 24
WIDE = 16  # blocks in a row of the map
COLOURS = ("cyan", "magenta", "yellow")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    console = Console(highlight=False)
    figures: dict = {}
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        console.print("Sections 1 and 2 need the package triton (Linux: pip install 'ruvon[gpu]').")
    else:
        title(console, "1. Which program reads which block, asked of the kernel")
        figures["readers"] = reads(console)
        title(console, "2. The kernel, step by step, beside gathering")
        figures["largest_difference"] = steps(console)
    title(console, "3. The next step is launched before the last one's tokens are read")
    figures["same_tokens"], figures["events"] = ahead(console)
    if GPU:
        title(console, "4. What it is worth on your GPU")
        figures["here"] = measured_here(console)
    title(console, f"{5 if GPU else 4}. What it is worth on an H200 (recorded)")
    recorded(console)
    path = record("part13", "Which program reads which block?", {"model": MODEL}, figures, folder=OUT)
    console.print(f"\n[dim]Figures saved in {path.relative_to(ROOT)}[/]")


def reads(console: Console) -> list:
    """A map of the memory: a block's letter is its sequence, its number the part that read it."""
    from benchmarks.part13_reads import LENS, NUM_BLOCKS, SPLITS, P, readers, scattered

    pages = scattered(LENS)
    with console.status("a block's values become NaN, and whose result does?"):
        found = readers(pages, SPLITS)
    for start in range(0, NUM_BLOCKS, WIDE):
        line = Text("  ")
        for programs in found[start : start + WIDE]:
            if not programs:
                line.append(" ·  ", style="dim")
            for sequence, part in programs:
                line.append(f" {'ABC'[sequence]}{part} ", style=f"reverse {COLOURS[sequence]}")
        console.print(line)
    for sequence, (table, length) in enumerate(zip(pages.tables, LENS, strict=True)):
        blocks = table[: -(-length // P)].tolist()
        console.print(Text(f"  {'ABC'[sequence]}: {length} tokens, table {blocks}", style=COLOURS[sequence]))
    busy = len({program for programs in found for program in programs})
    console.print(
        f"\n{NUM_BLOCKS} blocks of {P} tokens; A0: read by part 0 of sequence A; ·: nobody's.\n"
        f"Each sequence may have {SPLITS} parts, and a part is whole tiles of 64 tokens:\n"
        f"{busy} of {len(LENS) * SPLITS} programs have something to do."
    )
    once = all(len(programs) <= 1 for programs in found)
    console.print(f"Every block was read by one program at most: [bold]{yes(once)}[/]")
    return found


def steps(console: Console) -> dict[str, float]:
    """Largest difference to gathering, of each kernel on the way."""
    from benchmarks.part13_reads import scattered
    from benchmarks.part13_steps import STEPS, one_pass, tiles, two_passes
    from engine.kernels.paged_attention import paged_attention

    device = torch.device("cuda" if GPU else "cpu")
    pages, (Hq, Hkv, Dh) = scattered((70, 9)), (4, 2, 32)
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 40, 16, Hkv, Dh, generator=generator).to(device)
    q = torch.randn(2, Hq, Dh, generator=generator).to(device)
    kernels = {
        "two_passes": two_passes, "one_pass": one_pass, "tiles": tiles,
        "packed": paged_attention, "split": partial(paged_attention, splits=4),
    }  # fmt: skip
    want = Gathered(pages, Hq, keys)(q, keys, values)
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    table.add_column("kernel")
    table.add_column("largest difference to gathering", justify="right")
    found = {}
    for name, kernel in kernels.items():
        got = kernel(q, keys, values, *pages.on(device))
        found[name] = float((got - want).abs().max())
        table.add_row(STEPS[name].replace("`", ""), f"{found[name]:.1e}")
    console.print(table)
    console.print(f"\nAll within 1e-5: [bold]{yes(max(found.values()) < 1e-5)}[/]")
    return found


def tell(engine: LLMEngine, most: int = TOKENS) -> tuple[list[str], float]:
    """The stories, and tokens per second."""
    params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params)
    done, start = {}, time.perf_counter()
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output.outputs[0].text
    return [done[str(i)] for i in range(len(PROMPTS))], len(PROMPTS) * most / (time.perf_counter() - start)


def ahead(console: Console) -> tuple[bool, dict]:
    tokenizer, model = (
        Tokenizer.from_pretrained(MODEL),
        load_model(MODEL, "cuda" if GPU else "cpu", "float32"),
    )
    told, events = {}, {}
    for name, kind in {"one at a time": LLMEngine, "one ahead": AheadEngine}.items():
        engine = watched(kind, tokenizer, model)
        told[name], _ = tell(engine)
        events[name] = engine.executor.events
        line = Text(f"{name:14}")
        for event, number in events[name][:6]:
            line.append(f" {event} {number} ", style=f"reverse {COLOURS[event == 'read']}")
            line.append(" ")
        console.print(line)
    console.print(f"\n[italic]{PROMPTS[0]} {' '.join(told['one ahead'][0].split())} …[/]")
    same = told["one at a time"] == told["one ahead"]
    console.print(f"\nThree stories of {TOKENS} tokens, the same both ways: [bold]{yes(same)}[/]")
    return same, events


def measured_here(console: Console) -> dict:
    """Microseconds of each kernel at 64 sequences of 512 tokens; tokens per second of each way to launch."""
    from benchmarks.part13_steps import LAUNCHES, STEPS, attention, engines

    with console.status("compiling, and measuring"), torch.inference_mode():
        found, _ = attention(heads=("gpt2_xl",), work=("64x512",))
    for name, us in found["gpt2_xl"]["us"].items():
        console.print(f"{STEPS[name].replace('`', ''):42} {us['s64x512']:8.1f} µs")
    console.print()
    tokenizer, model = Tokenizer.from_pretrained(MODEL), load_model(MODEL, "cuda", "bfloat16")
    speeds = {}
    for name, make in engines(model, tokenizer, 4, 256).items():
        engine = make()
        tell(engine, 100)
        speeds[name] = tell(engine, 100)[1]
        console.print(f"{LAUNCHES[name]:42} {speeds[name]:8.0f} tokens/s of {MODEL}, 3 requests")
    return {"attention_us": found["gpt2_xl"]["us"], "tokens_per_second": speeds}


def recorded(console: Console) -> None:
    """What benchmarks/part13_steps.py and the engine's benchmark have recorded."""
    kernels = read_record("part13_steps")
    content = kernels["tables"]["gpt2_xl"]
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    for i, column in enumerate(content["columns"]):
        table.add_column(column, justify="right" if i else "left")
    for name, *us in content["rows"]:
        table.add_row(name.replace("`", ""), *(f"{number:,.0f}" for number in us))
    console.print(table)
    console.print("sequences × tokens in each; GPT-2 XL's heads, bf16, pages of 16\n")
    whole = read_record("part13_engine")
    for name, step in whole["figures"]["step"].items():
        peer = whole["figures"]["peers"][name]
        console.print(
            f"a step of {name[1:]:>3}: {step['ms']:5.2f} ms, {step['of_floor']:.0%} of the floor's speed; "
            f"HF {peer['ms']:4.0f} ms, in a graph {peer['graph_ms']:4.1f}"
        )
    for words, ms, *_ in read_record("part13_launches")["tables"]["launches"]["rows"]:
        console.print(f"{words:32} {ms:5.2f} ms a step of one sequence")
    machine = f"{kernels['machine']['gpu']}, torch {kernels['versions']['torch']}, {kernels['date']}"
    console.print(
        "GPT-2 XL's shape at a context of 512. The floor: what a copy of as many bytes takes.\n"
        f"{machine}.\n"
        "From benchmarks/results/part13_steps.json, part13_engine.json and part13_launches.json."
    )


if __name__ == "__main__":
    main()
