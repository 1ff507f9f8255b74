"""Five moments of a memory of eight blocks: who has which, the references, and the free queue.

python articles/figures/12_states.py    # writes 12_states.svg beside this file; the engine's plan is asked
"""

from types import SimpleNamespace

import matplotlib.pyplot as plt
from drawing import save
from matplotlib.patches import Rectangle

from engine.cache.paged import PagedCache

P, BLOCKS = 4, 8
COLOURS = {"x": "#fdba74", "y": "#93c5fd", "z": "#86efac", "z′": "#f0abfc"}
KEPT, FREE, INK, GREY, LINE = "#e2e8f0", "white", "#1f2937", "#64748b", "#94a3b8"
X_TOKENS = list(range(8))
Cells = dict[tuple[int, int], tuple[str, str]]  # (block, place) -> the token in it, and its colour


class Scene:
    """Sequences over a `PagedCache`, and what the last moment of each block's tokens was."""

    def __init__(self) -> None:
        self.cache = PagedCache(BLOCKS, P)
        self.cells: Cells = {}
        self.moments: list[dict] = []

    def sequence(self, name: str, token_ids: list[int], parent=None) -> SimpleNamespace:
        return SimpleNamespace(
            id=name, token_ids=token_ids, parent=parent, adapter=None, cache_salt=None, wants_every_row=False,
            error=None,
        )  # fmt: skip

    def compute(self, seq: SimpleNamespace, num_tokens: int) -> None:
        """The sequence's tokens up to `num_tokens` are computed, and committed."""
        start = self.cache.allocations[seq.id].num_committed
        assert self.cache.reserve(seq, num_tokens)
        table = self.cache.allocations[seq.id].table.blocks
        for i in range(start, num_tokens):
            self.cells[int(table[i // P]), i % P] = f"{seq.id}{i}", COLOURS[seq.id]
        self.cache.commit(seq, num_tokens)

    def copy(self) -> None:
        """Make the copies that are planned."""
        for copy in self.cache.take_copies():
            for source, target in zip(copy.source, copy.target, strict=True):
                for place in range(P):
                    if (source, place) in self.cells:
                        self.cells[target, place] = self.cells[source, place]

    def note(self, words: str) -> None:
        blocks = self.cache.blocks
        known = [block in self.cache.prefixes for block in range(BLOCKS)]
        self.moments.append({
            "words": words, "references": list(blocks.references), "queue": list(blocks.free_queue),
            "known": known, "cells": dict(self.cells),
        })  # fmt: skip


def moments() -> list[dict]:
    scene = Scene()
    cache, sequence = scene.cache, scene.sequence
    x, y = sequence("x", X_TOKENS), sequence("y", [50 + i for i in range(7)])
    for seq in (x, y):
        cache.admit(seq)
        scene.compute(seq, len(seq.token_ids))
    scene.note("x and y run: 8 and 7 tokens")
    cache.release(x)
    scene.note("x has left: its blocks are free, and can still be found")
    z = sequence("z", [*X_TOKENS, 8, 9])
    assert cache.admit(z) == len(X_TOKENS)
    scene.compute(z, 10)
    scene.note("z begins with x’s 8 tokens: it shares 0 and 1, and computes 2 tokens in 4")
    z2 = sequence("z′", [*X_TOKENS, 8, 9], parent=z)
    assert cache.admit(z2) == 9
    scene.copy()
    scene.compute(z2, 10)
    scene.note("z′, its second sample, forks: 0 and 1 have two references, 4 is copied to 5")
    z.token_ids += [10, 11, 12]
    scene.compute(z, 13)
    cache.release(z)
    scene.note("z has grown to 13 tokens, and left: 6 to the front of the queue, 4 to its end")
    return scene.moments


def draw(ax: plt.Axes, moment: dict) -> None:
    cell, gap = 1.0, 0.35
    for block in range(BLOCKS):
        left = block * (P * cell + gap)
        is_free = moment["references"][block] == 0
        for place in range(P):
            text, colour = moment["cells"].get((block, place), ("", FREE))
            if is_free:
                text, colour = (text, KEPT) if moment["known"][block] else ("", FREE)
            ax.add_patch(Rectangle((left + place * cell, 0), cell, 0.8, fc=colour, ec=LINE, lw=0.7))
            ink = GREY if is_free else INK
            ax.text(left + (place + 0.5) * cell, 0.4, text, ha="center", va="center", color=ink, fontsize=7)
        middle = left + P * cell / 2
        ax.text(middle, -0.3, f"block {block}", ha="center", va="center", color=GREY, fontsize=8)
        references = moment["references"][block]
        weight = "bold" if references > 1 else "normal"
        ax.text(
            middle, -0.72, f"references {references}", ha="center", va="center", color=INK, fontsize=8,
            weight=weight,
        )  # fmt: skip
    queue = "  ".join(map(str, moment["queue"]))
    ax.text(BLOCKS * (P * cell + gap) + 0.3, 0.62, "free queue", va="center", color=GREY, fontsize=8)
    ax.text(BLOCKS * (P * cell + gap) + 0.3, 0.18, queue, va="center", color=INK, fontsize=10)
    ax.set_title(moment["words"], loc="left", fontsize=10, color=INK)
    ax.set(xlim=(-0.1, BLOCKS * (P * cell + gap) + 6), ylim=(-1.0, 0.9))
    ax.axis("off")


def main() -> None:
    shown = moments()
    figure, axes = plt.subplots(len(shown), 1, figsize=(11.4, 6.4), layout="constrained")
    for number, (ax, moment) in enumerate(zip(axes, shown, strict=True), 1):
        draw(ax, moment | {"words": f"{number}. {moment['words']}"})
    save(figure, __file__)


if __name__ == "__main__":
    main()
