"""The block tables of a beam search, step by step: which blocks beams share, where they fork, what they free.

python articles/figures/B_beams.py    # runs storyteller, and writes B_beams.svg beside this file
"""

from dataclasses import dataclass, field

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import Rectangle

from engine import LLM
from engine.requests.batch import Batch
from engine.sampling_params import BeamSearchParams

WIDTH, STEPS, P = 3, 8, 4
PROMPT = "One day, the dog saw a"
COLOURS = ["#f8fafc", "#93c5fd", "#fdba74", "#86efac"]  # of a block: free, then by number of references
INK, GREY, FORK = "#1f2937", "#64748b", "#b91c1c"


@dataclass
class Recorder:
    """An executor around the engine's: writes down each step's tables, references and copies."""

    llm: LLM
    steps: list[tuple[Batch, dict[str, list[int]], list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.executor, self.llm.engine.executor = self.llm.engine.executor, self

    def submit(self, batch: Batch):
        cache = self.llm.engine.scheduler.cache
        tables = {name: cache.allocations[name].table.blocks.tolist() for name in batch.ids}
        self.steps.append((batch, tables, list(cache.blocks.references)))
        return self.executor.submit(batch)


def main() -> None:
    llm = LLM("storyteller", block_size=P, device="cpu")
    recorder = Recorder(llm)
    llm.beam_search(PROMPT, BeamSearchParams(WIDTH, STEPS, ignore_eos=True))
    used = sorted({block for _, tables, _ in recorder.steps for table in tables.values() for block in table})
    column = {block: x for x, block in enumerate(used)}
    names = list(dict.fromkeys(name for batch, *_ in recorder.steps for name in batch.ids))
    letter = {name: chr(ord("a") + i) for i, name in enumerate(names)}
    figure, ax = plt.subplots(figsize=(0.62 * len(used) + 3.4, 0.62 * len(recorder.steps) + 1.2))
    for row, (batch, tables, references) in enumerate(recorder.steps):
        y = -row
        forked = {target: source for copy in batch.copies for source, target in zip(copy.source, copy.target)}
        for block, x in column.items():
            holders = [letter[name] for name, table in tables.items() if block in table]
            colour = COLOURS[min(references[block], len(COLOURS) - 1)]
            ax.add_patch(Rectangle((x, y), 0.94, 0.8, facecolor=colour, edgecolor="#94a3b8", lw=0.8))
            ax.text(x + 0.47, y + 0.4, "".join(holders), ha="center", va="center", color=INK)
            if block in forked:
                ax.add_patch(Rectangle((x, y), 0.94, 0.8, facecolor="none", edgecolor=FORK, lw=1.8))
                ax.text(x + 0.08, y + 0.66, f"from {forked[block]}", va="center", color=FORK, fontsize=6)
        ax.text(-0.3, y + 0.4, f"step {row + 1}", ha="right", va="center", color=GREY)
        count = f"{batch.num_tokens} tokens" if row else f"{batch.num_tokens} tokens: the prompt"
        ax.text(len(used) + 0.2, y + 0.4, count, va="center", color=GREY)
    for block, x in column.items():
        ax.text(x + 0.47, 1.05, str(block), ha="center", color=GREY)
    ax.text(-0.3, 1.05, "block", ha="right", color=GREY)
    ax.text(
        0, -len(recorder.steps) + 0.35,
        "letters: beams whose tables name the block; colour: free, 1, 2 or 3 references; red: a fork's copy",
        color=GREY, fontsize=8,
    )  # fmt: skip
    ax.set(xlim=(-1.6, len(used) + 3.2), ylim=(-len(recorder.steps) + 0.2, 1.5))
    ax.axis("off")
    save(figure, __file__)


if __name__ == "__main__":
    main()
